"""The tokens of a checkpoint: text to ids, ids to bytes, and the ids that control a conversation. No torch.

1. Control tokens are never made from text: they are left out of the tokenizer and known by id only. A person who says
   or types "<|im_end|>" says nine characters and ends nothing.
2. Bytes per token come from the byte-level alphabet, so that text can be split at any token without breaking UTF-8.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from duplexd.errors import ModelError
from duplexd.models.pocket.gguffile import GgufFile


class Template(Enum):
    """How turns are marked."""

    CHATML = "chatml"  #: <|im_start|>role\n ... <|im_end|>\n
    LLAMA3 = "llama3"  #: <|start_header_id|>role<|end_header_id|>\n\n ... <|eot_id|>


@dataclass(frozen=True)
class Vocabulary:
    """What text and tokens mean to one checkpoint."""

    tokenizer: Tokenizer  #: without control tokens
    pieces: tuple[bytes, ...]  #: bytes of each token; empty for control tokens
    control: Mapping[str, int]
    template: Template
    begin: int | None  #: a token that starts every context
    stop: tuple[int, ...]
    thinks: bool  #: the template opens a reply with an empty thought when thinking is off (Qwen3)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; never a control token."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def load_vocabulary(path: Path, *, gguf: GgufFile | None = None) -> Vocabulary:
    """Read the tokenizer and the chat template of a GGUF file or a Hugging Face folder.

    Raises:  ModelError for a missing or unknown tokenizer, or turns marked in a way that is not known here.
    """
    return _from_folder(path) if path.is_dir() else _from_gguf(path, gguf or GgufFile(path))


def _vocabulary(
    path: Path,
    tokenizer: Tokenizer,
    names: Mapping[int, str],
    control: Mapping[str, int],
    *,
    chat: str,
    begin: int | None,
    ends: Iterable[int],
) -> Vocabulary:
    template, closers = _template(path, control)
    hidden = set(control.values())
    pieces = tuple(b"" if id_ in hidden else _piece(names.get(id_, "")) for id_ in range(max(names) + 1))
    return Vocabulary(
        tokenizer=tokenizer,
        pieces=pieces,
        control=control,
        template=template,
        begin=begin,
        stop=tuple(dict.fromkeys((*closers, *ends))),
        thinks="enable_thinking" in chat and "<think>" in names.values(),
    )


def _template(path: Path, control: Mapping[str, int]) -> tuple[Template, list[int]]:
    """The template by its control tokens, and the ids that end a turn in it."""
    if "<|im_start|>" in control and "<|im_end|>" in control:
        return Template.CHATML, [control["<|im_end|>"]]
    if "<|start_header_id|>" in control and "<|end_header_id|>" in control and "<|eot_id|>" in control:
        return Template.LLAMA3, [control["<|eot_id|>"]]
    found = ", ".join(sorted(control)[:8]) or "none"
    raise ModelError(
        f"{path} has no known chat template; allowed are ChatML (<|im_start|>, <|im_end|>) and Llama 3 "
        f"(<|start_header_id|>, <|end_header_id|>, <|eot_id|>); its control tokens are {found}"
    )


# Byte-level alphabet --------------------------------------------------------------------------------------------------


def _alphabet() -> dict[str, int]:
    """Character -> byte. Printable bytes stand for themselves, the others for U+0100 and on. Source: GPT-2."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _alphabet()


def _piece(name: str) -> bytes:
    """Bytes of a token; a name outside the alphabet (an added token) stands for its own text."""
    if all(character in _BYTE_OF for character in name):
        return bytes(_BYTE_OF[character] for character in name)
    return name.encode("utf-8")


# GGUF -----------------------------------------------------------------------------------------------------------------

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
#: Names that llama.cpp gives to pre-tokenizers, as far as they are known here.
_SPLITS = ("smollm", "qwen2", "llama-bpe", "gpt-2")
_CONTROL, _UNUSED = 3, 5


def _splitter(name: str) -> pre_tokenizers.PreTokenizer:
    if name in ("qwen2", "llama-bpe"):
        split = pre_tokenizers.Split(Regex(_QWEN2 if name == "qwen2" else _LLAMA3), "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level]) if name == "smollm" else level
    )


def _from_gguf(path: Path, file: GgufFile) -> Vocabulary:
    get = file.fields.get
    model, split = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre")
    if model != "gpt2" or split not in _SPLITS:
        allowed = ", ".join(f"gpt2/{name}" for name in _SPLITS)
        raise ModelError(f"{path} has a tokenizer {model}/{split}; allowed are {allowed}")
    tokens: list[str] = file.fields["tokenizer.ggml.tokens"]
    kinds: list[int] = get("tokenizer.ggml.token_type") or [1] * len(tokens)
    merges = [tuple(merge.split(" ", 1)) for merge in file.fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=split == "llama-bpe",
        )
    )
    tokenizer.pre_tokenizer = _splitter(split)
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    control = {token: index for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == _CONTROL}
    names = {index: token for index, token in enumerate(tokens) if kinds[index] != _UNUSED}
    begin = get("tokenizer.ggml.bos_token_id") if get("tokenizer.ggml.add_bos_token", split == "llama-bpe") else None
    return _vocabulary(
        path,
        tokenizer,
        names,
        control,
        chat=get("tokenizer.chat_template") or "",
        begin=begin,
        ends=_ids(get("tokenizer.ggml.eos_token_id")),
    )


# Hugging Face folder --------------------------------------------------------------------------------------------------


def _from_folder(path: Path) -> Vocabulary:
    data = _read_json(path / "tokenizer.json", required=True)
    if data.get("model", {}).get("type") != "BPE" or "ByteLevel" not in json.dumps(data.get("decoder")):
        raise ModelError(f"{path}/tokenizer.json is no byte-level BPE tokenizer, which is the only kind read here")
    added = data.get("added_tokens") or []
    plain = Tokenizer.from_str(json.dumps(data | {"added_tokens": [], "post_processor": None}))
    names = {index: token for token, index in plain.get_vocab(with_added_tokens=False).items()}
    names |= {int(token["id"]): str(token["content"]) for token in added}
    control = {str(token["content"]): int(token["id"]) for token in added if token.get("special")}
    settings = _read_json(path / "tokenizer_config.json")
    config = _read_json(path / "generation_config.json") or _read_json(path / "config.json")
    return _vocabulary(
        path,
        plain,
        names,
        control,
        chat=_chat_template(path, settings),
        begin=control.get("<|begin_of_text|>"),
        ends=_ids(config.get("eos_token_id")),
    )


def _read_json(file: Path, *, required: bool = False) -> dict[str, Any]:
    if not file.exists() and not required:
        return {}
    try:
        data: dict[str, Any] = json.loads(file.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{file.parent} has no {file.name}") from error
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    return data


def _chat_template(path: Path, settings: Mapping[str, Any]) -> str:
    separate = path / "chat_template.jinja"
    return separate.read_text("utf-8") if separate.exists() else str(settings.get("chat_template") or "")


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else value
