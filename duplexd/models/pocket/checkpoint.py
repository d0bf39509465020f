"""Any local Llama, Qwen2 or Qwen3 checkpoint as one `DecoderWeights`, read lazily.

1. A checkpoint is a GGUF file or a Hugging Face folder (config.json, *.safetensors, tokenizer.json).
2. Rotary pairs are adjacent rows (2i, 2i+1) here, whatever the file says: a pair is then one complex number and a
   rotation one multiplication. A GGUF of architecture `llama` stores q and k that way already (its converter permutes
   them); everything else stores halves (i, i + head_dim/2), and its rows, biases and q/k norms are permuted on read.
3. Four-bit blocks stay readable as blocks (`Matrix.blocks`), so that nothing is quantised twice.
4. What is not computed exactly is refused with what was found and what is allowed; nothing is skipped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from safetensors import safe_open
from torch import Tensor

from duplexd.errors import ModelError
from duplexd.models.pocket.gguffile import GgufFile, GgufTensor

ARCHITECTURES = ("llama", "qwen2", "qwen3")
#: Every float and quantised format whose dequantisation is pure arithmetic in the gguf package.
GGUF_KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
GROUP = 32  #: columns that share one scale in every four-bit format read here


class DecoderShape(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a decoder that is not a weight."""

    architecture: str  #: one of ARCHITECTURES
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int  #: width of the gated MLP
    vocabulary: int
    context_max: int  #: positions the model was trained for
    rope_base: float
    norm_epsilon: float
    rope_factors: tuple[float, ...] = ()  #: divisor per rotary frequency, (head_dim / 2,) or empty


@dataclass(frozen=True)
class Blocks:
    """Four-bit codes in groups of 32 columns: weight = code * scale + low."""

    codes: Tensor  #: uint8 (rows, columns), 0..15
    scale: Tensor  #: float32 (rows, columns / 32)
    low: Tensor  #: float32 (rows, columns / 32)

    def take(self, rows: Tensor) -> Blocks:
        return Blocks(self.codes[rows], self.scale[rows], self.low[rows])


class Source(Protocol):
    """Where tensors come from, by the names of their format."""

    def has(self, name: str) -> bool: ...
    def dense(self, name: str) -> Tensor: ...
    def blocks(self, name: str) -> Blocks | None: ...
    def in_blocks(self, name: str) -> bool: ...


@dataclass(frozen=True)
class Matrix:
    """Rows of one or more stored matrices, read when asked for."""

    source: Source
    names: tuple[str, ...]
    orders: tuple[Tensor | None, ...]  #: per name: the stored row that each row is, None for as stored

    def dense(self) -> Tensor:
        """The weights in the precision they are stored in, or float32 if they were quantised; (rows, columns)."""
        parts = [_ordered(self.source.dense(name), order) for name, order in self._parts()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def blocks(self) -> Blocks | None:
        """The four-bit blocks, or None unless every part is stored in them."""
        parts: list[Blocks] = []
        for name, order in self._parts():
            part = self.source.blocks(name)
            if part is None:
                return None
            parts.append(part if order is None else part.take(order))
        return Blocks(*(torch.cat([getattr(part, key) for part in parts]) for key in ("codes", "scale", "low")))

    @property
    def in_blocks(self) -> bool:
        """Whether `blocks` would give some; read off the header."""
        return all(map(self.source.in_blocks, self.names))

    def _parts(self) -> Iterable[tuple[str, Tensor | None]]:
        return zip(self.names, self.orders, strict=True)


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; matrices that read the same input are stacked."""

    attention_norm: Tensor  #: (width,)
    qkv: Matrix  #: ((heads + 2 kv_heads) * head_dim, width)
    qkv_bias: Tensor | None
    query_norm: Tensor | None  #: (head_dim,), qwen3 only
    key_norm: Tensor | None
    out: Matrix  #: (width, heads * head_dim)
    mlp_norm: Tensor  #: (width,)
    gate_up: Matrix  #: (2 * inner, width)
    down: Matrix  #: (width, inner)


@dataclass(frozen=True)
class DecoderWeights:
    """A decoder whose tensors are read when asked for."""

    path: Path
    shape: DecoderShape
    layer: Callable[[int], LayerWeights] = field(repr=False)
    embedding: Matrix  #: (vocabulary, width)
    head: Matrix  #: (vocabulary, width); the embedding when they are tied
    final_norm: Callable[[], Tensor] = field(repr=False)


def load_checkpoint(path: Path, *, gguf: GgufFile | None = None) -> DecoderWeights:
    """Read the header of a checkpoint; weights are read later, layer by layer.

    Args:    path: a .gguf file or a Hugging Face folder. gguf: the same file, if it is open already.
    Raises:  ModelError for a missing file, an architecture, a rotary rule or a quantisation that is not computed here.
    """
    if path.is_dir():
        return _from_folder(path)
    if not path.exists():
        raise ModelError(f"no checkpoint at {path}; give a .gguf file or a folder with config.json and *.safetensors")
    return _from_gguf(path, gguf or GgufFile(path))


def adjacent_pairs(heads: int, head_dim: int) -> Tensor:
    """Row order that turns halves (i, i + head_dim/2) into adjacent pairs (2i, 2i+1), for each head."""
    pair = torch.arange(head_dim).view(2, head_dim // 2).T.reshape(-1)
    return (torch.arange(heads)[:, None] * head_dim + pair).reshape(-1)


# Names --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Names:
    """How a format calls its tensors."""

    embedding: str
    final_norm: str
    head: str
    layer: str  #: prefix, with {} for the index
    attention_norm: str
    query: str
    key: str
    value: str
    query_norm: str
    key_norm: str
    out: str
    mlp_norm: str
    gate: str
    up: str
    down: str


_GGUF = _Names(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    head="output.weight",
    layer="blk.{}.",
    attention_norm="attn_norm.weight",
    query="attn_q",
    key="attn_k",
    value="attn_v",
    query_norm="attn_q_norm.weight",
    key_norm="attn_k_norm.weight",
    out="attn_output",
    mlp_norm="ffn_norm.weight",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
)
_FOLDER = _Names(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    layer="model.layers.{}.",
    attention_norm="input_layernorm.weight",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    query_norm="self_attn.q_norm.weight",
    key_norm="self_attn.k_norm.weight",
    out="self_attn.o_proj",
    mlp_norm="post_attention_layernorm.weight",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)


def _weights(
    path: Path, shape: DecoderShape, source: Source, names: _Names, *, paired: bool, tied: bool
) -> DecoderWeights:
    """Put a source behind the description. `paired`: q and k rows are stored as adjacent pairs already."""
    queries = None if paired else adjacent_pairs(shape.heads, shape.head_dim)
    keys = None if paired else adjacent_pairs(shape.kv_heads, shape.head_dim)
    one_head = None if paired else adjacent_pairs(1, shape.head_dim)

    def matrix(*parts: str, orders: Sequence[Tensor | None] | None = None) -> Matrix:
        return Matrix(source, parts, tuple(orders or [None] * len(parts)))

    def norm(name: str) -> Tensor | None:
        return _ordered(source.dense(name), one_head) if shape.architecture == "qwen3" else None

    def layer(index: int) -> LayerWeights:
        at = names.layer.format(index)
        inputs = [at + part for part in (names.query, names.key, names.value)]
        orders = (queries, keys, None)
        for part in (names.out, names.gate, names.up, names.down):
            if source.has(f"{at}{part}.bias"):
                raise ModelError(f"{path} has a bias {at}{part}.bias; only q, k and v may have one")
        return LayerWeights(
            attention_norm=source.dense(at + names.attention_norm),
            qkv=matrix(*(part + ".weight" for part in inputs), orders=orders),
            qkv_bias=_biases(source, inputs, orders),
            query_norm=norm(at + names.query_norm),
            key_norm=norm(at + names.key_norm),
            out=matrix(f"{at}{names.out}.weight"),
            mlp_norm=source.dense(at + names.mlp_norm),
            gate_up=matrix(f"{at}{names.gate}.weight", f"{at}{names.up}.weight"),
            down=matrix(f"{at}{names.down}.weight"),
        )

    return DecoderWeights(
        path=path,
        shape=shape,
        layer=layer,
        embedding=matrix(names.embedding),
        head=matrix(names.embedding if tied else names.head),
        final_norm=lambda: source.dense(names.final_norm),
    )


def _biases(source: Source, inputs: Sequence[str], orders: Sequence[Tensor | None]) -> Tensor | None:
    if not source.has(f"{inputs[0]}.bias"):
        return None
    return torch.cat(
        [_ordered(source.dense(f"{name}.bias"), order) for name, order in zip(inputs, orders, strict=True)]
    )


def _ordered(tensor: Tensor, order: Tensor | None) -> Tensor:
    return tensor if order is None else tensor[order]


def _check_shape(path: Path, shape: DecoderShape) -> None:
    rules = [
        (shape.heads % shape.kv_heads, f"{shape.heads} heads over {shape.kv_heads} key heads, which does not divide"),
        (shape.head_dim % 2, f"head_dim {shape.head_dim}, which has no rotary pairs"),
        (
            bool(shape.rope_factors) and len(shape.rope_factors) != shape.head_dim // 2,
            f"{len(shape.rope_factors)} rotary factors for {shape.head_dim // 2} frequencies",
        ),
    ]
    for broken, sentence in rules:
        if broken:
            raise ModelError(f"{path} has {sentence}")


# GGUF ---------------------------------------------------------------------------------------------------------------


class GgufSource:
    """Tensors of a GGUF file."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def has(self, name: str) -> bool:
        return name in self._file.tensors

    def dense(self, name: str) -> Tensor:
        tensor = self._tensor(name)
        rows = tensor.raw.reshape(*tensor.shape[:-1], -1)
        values = dequantize(rows, GGMLQuantizationType[tensor.kind])
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def blocks(self, name: str) -> Blocks | None:
        tensor = self._tensor(name)
        read = _BLOCK_READERS.get(tensor.kind)
        return read(tensor) if read else None

    def in_blocks(self, name: str) -> bool:
        return self._tensor(name).kind in _BLOCK_READERS

    def _tensor(self, name: str) -> GgufTensor:
        found = self._file.tensors.get(name)
        if found is None:
            raise ModelError(f"{self._file.path} has no tensor {name}")
        if found.kind not in GGUF_KINDS:
            raise ModelError(f"{self._file.path}: {name} is stored as {found.kind}; read are {', '.join(GGUF_KINDS)}")
        return found


def _from_gguf(path: Path, file: GgufFile) -> DecoderWeights:
    architecture = file.fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(f"{path} has architecture {architecture!r}; allowed are {', '.join(ARCHITECTURES)}")

    def get(key: str, default: Any = None) -> Any:
        value = file.fields.get(f"{architecture}.{key}", default)
        if value is None:
            raise ModelError(f"{path} lacks the field {architecture}.{key}")
        return value

    heads = int(get("attention.head_count"))
    head_dim = int(get("attention.key_length", int(get("embedding_length")) // heads))
    _check_gguf(path, head_dim, get)
    source = GgufSource(file)
    tied = not source.has(_GGUF.head)
    if not source.has(_GGUF.embedding):
        raise ModelError(f"{path} has no tensor {_GGUF.embedding}; it is no language model or one part of a split file")
    shape = DecoderShape(
        architecture=str(architecture),
        layers=int(get("block_count")),
        width=int(get("embedding_length")),
        heads=heads,
        kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        inner=int(get("feed_forward_length")),
        vocabulary=file.tensors[_GGUF.embedding].shape[0],
        context_max=int(get("context_length")),
        rope_base=float(get("rope.freq_base", 10000.0)),
        norm_epsilon=float(get("attention.layer_norm_rms_epsilon")),
        rope_factors=_gguf_factors(source, head_dim, get),
    )
    _check_shape(path, shape)
    return _weights(path, shape, source, _GGUF, paired=architecture == "llama", tied=tied)


def _check_gguf(path: Path, head_dim: int, get: Callable[..., Any]) -> None:
    rotary = int(get("rope.dimension_count", head_dim))
    if rotary != head_dim:
        raise ModelError(f"{path} rotates {rotary} of {head_dim} dimensions; only whole heads are supported")
    scaling = get("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ModelError(f"{path} scales positions by {scaling!r}; allowed are none and linear")
    if int(get("expert_count", 0)):
        raise ModelError(f"{path} is a mixture of experts; only dense decoders are supported")


def _gguf_factors(source: GgufSource, head_dim: int, get: Callable[..., Any]) -> tuple[float, ...]:
    if source.has("rope_freqs.weight"):
        return tuple(source.dense("rope_freqs.weight").tolist())
    if get("rope.scaling.type", "none") == "linear":
        return (float(get("rope.scaling.factor")),) * (head_dim // 2)
    return ()


def _nibbles(packed: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Low halves, then high halves, of each group of 16 bytes: (blocks, 16) -> (blocks, 32)."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _halves(raw: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Two bytes per row as float16, widened: (blocks, 2) -> (blocks,)."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)[:, 0]


def _to_blocks(tensor: GgufTensor, codes: Any, scale: Any, low: Any) -> Blocks:
    rows = tensor.shape[0]
    return Blocks(
        torch.from_numpy(np.ascontiguousarray(codes.reshape(rows, -1))),
        torch.from_numpy(np.ascontiguousarray(scale.reshape(rows, -1), dtype=np.float32)),
        torch.from_numpy(np.ascontiguousarray(low.reshape(rows, -1), dtype=np.float32)),
    )


def _read_q4_0(tensor: GgufTensor) -> Blocks:
    """18 bytes a block: scale f16, 16 bytes of codes; weight = scale * (code - 8)."""
    block = tensor.raw.reshape(-1, 18)
    scale = _halves(block[:, :2])
    return _to_blocks(tensor, _nibbles(block[:, 2:]), scale, -8 * scale)


def _read_q4_1(tensor: GgufTensor) -> Blocks:
    """20 bytes a block: scale f16, low f16, 16 bytes of codes; weight = scale * code + low."""
    block = tensor.raw.reshape(-1, 20)
    return _to_blocks(tensor, _nibbles(block[:, 4:]), _halves(block[:, :2]), _halves(block[:, 2:4]))


def _read_q4_k(tensor: GgufTensor) -> Blocks:
    """144 bytes for 8 groups of 32: scale f16, low f16, 12 bytes of 6-bit factors for both, 128 bytes of codes."""
    block = tensor.raw.reshape(-1, 144)
    factor, low = _six_bits(block[:, 4:16])
    # Codes of groups 2j and 2j+1 share 32 bytes: the low halves are one group, the high halves the next.
    packed = block[:, 16:].reshape(-1, 4, 32)
    codes = np.stack([packed & 15, packed >> 4], axis=2)
    return _to_blocks(tensor, codes, _halves(block[:, :2])[:, None] * factor, -_halves(block[:, 2:4])[:, None] * low)


def _six_bits(packed: np.ndarray[Any, np.dtype[np.uint8]]) -> tuple[Any, Any]:
    """Eight 6-bit scales and eight 6-bit lows from 12 bytes; the last four of each keep their top bits elsewhere."""
    scales, lows, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    return (
        np.concatenate([scales & 63, (rest & 15) | (scales >> 6 << 4)], axis=1).astype(np.float32),
        np.concatenate([lows & 63, (rest >> 4) | (lows >> 6 << 4)], axis=1).astype(np.float32),
    )


_BLOCK_READERS: dict[str, Callable[[GgufTensor], Blocks]] = {
    "Q4_0": _read_q4_0,
    "Q4_1": _read_q4_1,
    "Q4_K": _read_q4_k,
}


# Hugging Face folder --------------------------------------------------------------------------------------------------


class FolderSource:
    """Tensors of all *.safetensors of a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._where: dict[str, Any] = {}
        for file in sorted(path.glob("*.safetensors")):
            self._add(file)
        if not self._where:
            raise ModelError(f"{path} has no *.safetensors; other weight files are not read")

    def _add(self, file: Path) -> None:
        try:
            opened: Any = safe_open(file, framework="pt")
            self._where.update(dict.fromkeys(opened.keys(), opened))
        except Exception as error:
            raise ModelError(f"{file} is damaged: {error}") from error

    def has(self, name: str) -> bool:
        return name in self._where

    def dense(self, name: str) -> Tensor:
        opened = self._where.get(name)
        if opened is None:
            raise ModelError(f"{self._path} has no tensor {name} in its *.safetensors")
        tensor: Tensor = opened.get_tensor(name)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ModelError(f"{self._path}: {name} is {tensor.dtype}; allowed are float16, bfloat16, float32, float64")
        return tensor

    def blocks(self, name: str) -> Blocks | None:
        return None

    def in_blocks(self, name: str) -> bool:
        return False


def _from_folder(path: Path) -> DecoderWeights:
    config = _read_config(path)
    architecture = config.get("model_type")
    if architecture not in ARCHITECTURES:
        raise ModelError(f"{path} has model_type {architecture!r}; allowed are {', '.join(ARCHITECTURES)}")
    _check_config(path, config)

    def get(key: str) -> Any:
        if key not in config:
            raise ModelError(f"{path}/config.json lacks {key}")
        return config[key]

    heads = int(get("num_attention_heads"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    shape = DecoderShape(
        architecture=str(architecture),
        layers=int(get("num_hidden_layers")),
        width=int(get("hidden_size")),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or int(get("hidden_size")) // heads),
        inner=int(get("intermediate_size")),
        vocabulary=int(get("vocab_size")),
        context_max=int(get("max_position_embeddings")),
        rope_base=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        norm_epsilon=float(get("rms_norm_eps")),
    )
    shape = msgspec.structs.replace(shape, rope_factors=_config_factors(path, rope, shape))
    _check_shape(path, shape)
    source = FolderSource(path)
    tied = bool(config.get("tie_word_embeddings", not source.has(_FOLDER.head)))
    return _weights(path, shape, source, _FOLDER, paired=False, tied=tied)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} has no config.json; give a Hugging Face folder or a .gguf file") from error
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    return config


def _check_config(path: Path, config: dict[str, Any]) -> None:
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"{path} is quantised by {method!r}; give float16, bfloat16 or float32 weights, or a GGUF file"
        )
    if config.get("use_sliding_window"):
        raise ModelError(f"{path} uses sliding-window attention, which is not computed here; full attention is")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{path} uses the activation {activation!r}; allowed is silu")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{path} rotates a part of each head only; only whole heads are supported")


def _config_factors(path: Path, rope: dict[str, Any], shape: DecoderShape) -> tuple[float, ...]:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return ()
    if kind == "linear":
        return (float(rope["factor"]),) * (shape.head_dim // 2)
    if kind == "llama3":
        return llama3_factors(rope, head_dim=shape.head_dim, base=shape.rope_base)
    raise ModelError(f"{path} scales positions by {kind!r}; allowed are default, linear and llama3")


def llama3_factors(rope: dict[str, Any], *, head_dim: int, base: float) -> tuple[float, ...]:
    """Divisor of each rotary frequency: long waves are stretched, short ones kept, the middle blended.

    Source: `rope_type: llama3` of Llama 3.1; reads factor, low_freq_factor, high_freq_factor and
    original_max_position_embeddings.
    """
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    frequency = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = float(rope["original_max_position_embeddings"]) * frequency / (2 * torch.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return tuple((1.0 / (keep + (1.0 - keep) / factor)).tolist())
