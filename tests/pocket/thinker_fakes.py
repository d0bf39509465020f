"""Tiny random checkpoints in both formats, a plain reference decoder, and jobs without an engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from duplexd.ids import ChunkId, ConditionVersion, Epoch, SessionId
from duplexd.memory.arena import Arena
from duplexd.memory.layout import ArenaLayout, PartitionKind, PartitionSpec
from duplexd.memory.pages import FoldTokens
from duplexd.models.pocket.thinker import Thinker
from duplexd.streams.attention import PAGES
from duplexd.streams.stage import Failed, ThinkJob, ThinkResult


@dataclass(frozen=True)
class Tiny:
    """Sizes of a random decoder; everything divides by 32, so that it can be quantised."""

    architecture: str = "llama"
    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    inner: int = 96
    vocabulary: int = 320
    tied: bool = False
    base: float = 10000.0

    @property
    def biased(self) -> bool:
        return self.architecture == "qwen2"

    @property
    def normed(self) -> bool:
        return self.architecture == "qwen3"


def random_weights(tiny: Tiny, seed: int = 0) -> dict[str, Tensor]:
    """Hugging Face names; scaled so that every part matters (1/sqrt of the inputs, norms near one)."""
    rng = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=rng) / columns**0.5

    def near_one(size: int) -> Tensor:
        return 1 + 0.1 * torch.randn(size, generator=rng)

    queries, keys = tiny.heads * tiny.head_dim, tiny.kv_heads * tiny.head_dim
    out = {"model.embed_tokens.weight": torch.randn(tiny.vocabulary, tiny.width, generator=rng)}
    for index in range(tiny.layers):
        at = f"model.layers.{index}."
        out |= {
            at + "input_layernorm.weight": near_one(tiny.width),
            at + "self_attn.q_proj.weight": matrix(queries, tiny.width),
            at + "self_attn.k_proj.weight": matrix(keys, tiny.width),
            at + "self_attn.v_proj.weight": matrix(keys, tiny.width),
            at + "self_attn.o_proj.weight": matrix(tiny.width, queries),
            at + "post_attention_layernorm.weight": near_one(tiny.width),
            at + "mlp.gate_proj.weight": matrix(tiny.inner, tiny.width),
            at + "mlp.up_proj.weight": matrix(tiny.inner, tiny.width),
            at + "mlp.down_proj.weight": matrix(tiny.width, tiny.inner),
        }
        if tiny.biased:
            sizes = {"q": queries, "k": keys, "v": keys}
            out |= {f"{at}self_attn.{x}_proj.bias": torch.randn(n, generator=rng) for x, n in sizes.items()}
        if tiny.normed:
            out |= {f"{at}self_attn.{x}_norm.weight": near_one(tiny.head_dim) for x in "qk"}
    out["model.norm.weight"] = near_one(tiny.width)
    if not tiny.tied:
        out["lm_head.weight"] = matrix(tiny.vocabulary, tiny.width)
    return out


def config_of(tiny: Tiny, **more: Any) -> dict[str, Any]:
    return {
        "model_type": tiny.architecture,
        "num_hidden_layers": tiny.layers,
        "hidden_size": tiny.width,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "head_dim": tiny.head_dim,
        "intermediate_size": tiny.inner,
        "vocab_size": tiny.vocabulary,
        "max_position_embeddings": 512,
        "rope_theta": tiny.base,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tiny.tied,
        **more,
    }


def write_folder(path: Path, tiny: Tiny, weights: dict[str, Tensor], **more: Any) -> Path:
    """A Hugging Face folder, its weights in two files."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config_of(tiny, **more)))
    names = sorted(weights)
    for part in range(2):
        save_file({name: weights[name] for name in names[part::2]}, path / f"model-{part}.safetensors")
    return path


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _GGUF_OUTER:
        return f"{_GGUF_OUTER[stem]}.{kind}"
    index, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{index}.{_GGUF_NAMES[part]}.{kind}"


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """What the converter does to q and k of a Llama: halves of each head become adjacent rows."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    tiny: Tiny,
    weights: dict[str, Tensor],
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    fields: dict[str, Any] | None = None,
) -> Path:
    """A GGUF file; matrices of the layers are stored as `kind`."""
    writer = gguf.GGUFWriter(path, tiny.architecture)
    writer.add_block_count(tiny.layers)
    writer.add_embedding_length(tiny.width)
    writer.add_head_count(tiny.heads)
    writer.add_head_count_kv(tiny.kv_heads)
    writer.add_key_length(tiny.head_dim)
    writer.add_feed_forward_length(tiny.inner)
    writer.add_context_length(512)
    writer.add_rope_freq_base(tiny.base)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, value in (fields or {}).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_string
        add(name, value)
    for name, weight in weights.items():
        if tiny.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = _interleaved(weight, tiny.heads if "q_proj" in name else tiny.kv_heads)
        quantised = kind if "proj.weight" in name else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(weight.numpy(), quantised)
        writer.add_tensor(_gguf_name(name), data, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reference_logits(
    tiny: Tiny,
    weights: dict[str, Tensor],
    tokens: Sequence[int],
    factors: Tensor | None = None,
    *,
    seen: Tensor | None = None,
) -> Tensor:
    """Every position at once, halves rotated, no cache: the textbook decoder in float64. (tokens, vocabulary).

    Args:    seen: position at which token i sees token j, negative where it does not; None for an ordinary text.
    """
    w = {name: tensor.double() for name, tensor in weights.items()}
    count, half = len(tokens), tiny.head_dim // 2
    frequency = tiny.base ** (-torch.arange(half, dtype=torch.float64) / half)
    if factors is not None:
        frequency = frequency / factors
    at = torch.arange(count)
    seen = torch.where(at <= at[:, None], at, -1) if seen is None else seen

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        angle = positions[..., None, None] * frequency
        cos, sin, a, b = angle.cos(), angle.sin(), x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    x = w["model.embed_tokens.weight"][torch.tensor(list(tokens))]
    for index in range(tiny.layers):
        at = f"model.layers.{index}."
        z = norm(x, w[at + "input_layernorm.weight"])
        q, k, v = (
            (z @ w[f"{at}self_attn.{p}_proj.weight"].T + w.get(f"{at}self_attn.{p}_proj.bias", torch.zeros(1))).view(
                count, -1, tiny.head_dim
            )
            for p in "qkv"
        )
        if tiny.normed:
            q, k = norm(q, w[at + "self_attn.q_norm.weight"]), norm(k, w[at + "self_attn.k_norm.weight"])
        group = tiny.heads // tiny.kv_heads
        q, k, v = rotate(q, seen.diagonal()), rotate(k, seen).repeat_interleave(group, 2), v.repeat_interleave(group, 1)
        scores = torch.einsum("ihd,ijhd->hij", q, k) / tiny.head_dim**0.5
        scores = scores.masked_fill(seen < 0, float("-inf"))
        y = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(count, -1)
        x = x + y @ w[at + "self_attn.o_proj.weight"].T
        z = norm(x, w[at + "post_attention_layernorm.weight"])
        gate = z @ w[at + "mlp.gate_proj.weight"].T
        x = x + (gate * gate.sigmoid() * (z @ w[at + "mlp.up_proj.weight"].T)) @ w[at + "mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight"] if tiny.tied else w["lm_head.weight"]
    return norm(x, w["model.norm.weight"]) @ head.T


# Jobs -----------------------------------------------------------------------------------------------------------------

WHO: dict[str, Any] = {
    "session": SessionId(7),
    "epoch": Epoch(0),
    "chunk": ChunkId(1),
    "condition": ConditionVersion(0),
}


def arena_for(thinker: Thinker, *, tokens: int = 256) -> Arena:
    """A real arena with the thinker's partitions, everything in it NaN."""
    pages = PartitionSpec(
        name=PAGES, kind=PartitionKind.PAGES, count=tokens // 16, page_tokens=16, fields=thinker.page_fields()
    )
    arena = Arena(ArenaLayout([thinker.shelf(), pages, thinker.workspace(thinker.spec.batch_max)]))
    for partition, count in ((PAGES, tokens), (thinker.workspace().name, thinker.spec.batch_max)):
        arena.fill_nan(partition, range(count))
    return arena


def think(
    slots: Iterable[int],
    feed: Iterable[int],
    *,
    past: int = 0,
    steps: int = 0,
    reply: Iterable[int] = (),
    stop: Iterable[int] = (),
    session: int = 7,
    folds: Iterable[tuple[Sequence[int], Sequence[int]]] = (),
) -> ThinkJob:
    """`folds`: pairs of sources and target, each the first of its context."""
    return ThinkJob(
        **(WHO | {"session": SessionId(session)}),
        pieces=(np.array(list(slots), dtype="<i8").tobytes(),),
        past=past,
        feed=tuple(feed),
        steps=steps,
        reply=tuple(reply),
        stop=tuple(stop),
        folds=tuple(
            FoldTokens(*(np.array(list(part), dtype="<i8").tobytes() for part in pair), first=True) for pair in folds
        ),
    )


def only(results: list[ThinkResult | Failed]) -> tuple[int, ...]:
    """Tokens of the only result, which must have succeeded."""
    (result,) = results
    assert isinstance(result, ThinkResult), result

    return result.tokens


# Vocabulary -----------------------------------------------------------------------------------------------------------

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def small_tokenizer(control: Sequence[str], *, digits: bool = True) -> Tokenizer:
    """A byte-level BPE tokenizer trained on a few lines, control tokens after the ordinary ones."""
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    split = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level]) if digits else level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    lines = ["user assistant system", "what is the weather like in the city today", "the cat is on the mat, isn't it?"]
    tokenizer.train_from_iterator(lines * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in control])
    return tokenizer


def write_tokenizer(path: Path, tokenizer: Tokenizer, **settings: Any) -> Path:
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def write_vocabulary_gguf(path: Path, tokenizer: Tokenizer, control: Sequence[str], *, pre: str) -> Path:
    """The tokenizer's tokens and merges in a GGUF file, split by the rule that llama.cpp calls `pre`."""
    model = json.loads(tokenizer.to_str())["model"]
    size = tokenizer.get_vocab_size()
    names = [tokenizer.id_to_token(index) for index in range(size)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(names)
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_token_types([3 if name in control else 1 for name in names])
    writer.add_eos_token_id(names.index(control[0]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
