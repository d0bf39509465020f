"""The decoder: tokens of several contexts in, hidden states out, keys and values in memory that somebody else owns.

1. New tokens of all rows are packed into one matrix; only attention looks at a row alone.
2. Attention keeps the keys, is given them before rotation, and knows the positions (streams/attention.py).
3. Rotary pairs are adjacent, so a rotation is one multiplication of complex numbers (see checkpoint.py rule 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from duplexd.models.pocket.checkpoint import DecoderShape, DecoderWeights, LayerWeights, Matrix
from duplexd.models.pocket.linear import FEW, Head, Linear, Place, Precision, as_it_is, held_sizes, hold, hold_head
from duplexd.streams.attention import (
    AdjacentPairs,
    Attention,
    AttentionShape,
    Packed,
    Row,
    choose_attention,
    rotary_table,
)


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


def placed_sizes(weights: DecoderWeights, precision: Precision) -> list[int]:
    """Bytes of every tensor a `Decoder` places, before a matrix is read: from headers, norms and biases."""
    shape, item = weights.shape, precision.dtype.itemsize
    tables = 1 if weights.head.names == weights.embedding.names else 2
    sizes = [shape.vocabulary * shape.width * item] * tables + [shape.width * item]
    for layer in map(weights.layer, range(shape.layers)):
        small = (layer.attention_norm, layer.mlp_norm, layer.query_norm, layer.key_norm, layer.qkv_bias)
        sizes += [part.numel() * item for part in small if part is not None]
        for matrix, rows, columns in _matrices(shape, layer):
            sizes += held_sizes(matrix, rows, columns, precision)
    return sizes


def _matrices(shape: DecoderShape, layer: LayerWeights) -> tuple[tuple[Matrix, int, int], ...]:
    """A layer's matrices with their rows and columns."""
    attended = shape.heads * shape.head_dim
    return (
        (layer.qkv, attended + 2 * shape.kv_heads * shape.head_dim, shape.width),
        (layer.out, shape.width, attended),
        (layer.gate_up, 2 * shape.inner, shape.width),
        (layer.down, shape.width, shape.inner),
    )


def rough_bytes(weights: DecoderWeights, precision: Precision) -> int:
    """Bytes of the rough head: torch packs it into an object of its own, which lies where it likes."""
    packed = precision in (Precision.INT4, Precision.INT8)
    return weights.shape.vocabulary * weights.shape.width if packed else 0


class Decoder:
    """Weights of a decoder, held in one precision on one device.

    Args:    attention: of the checkpoint's shape, see `attention_of`.
             place: where the tensors go that stay (a shelf of the arena); all but the rough head's.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        attention: Attention,
        *,
        precision: Precision,
        device: torch.device,
        place: Place = as_it_is,
    ) -> None:
        self.shape = weights.shape
        self.attention = attention
        self.dtype = precision.dtype
        self.device = device
        self._place = place
        self.embedding = place(weights.embedding.dense().to(device, self.dtype))
        tied = weights.head.names == weights.embedding.names
        head = self.embedding if tied else place(weights.head.dense().to(device, self.dtype))
        self.head: Head = hold_head(head, precision)
        self._final_norm = place(weights.final_norm().to(device, self.dtype))
        self._layers = [self._hold(weights.layer(index), precision) for index in range(self.shape.layers)]

    def _hold(self, layer: LayerWeights, precision: Precision) -> _Layer:
        def norm(weight: Tensor) -> Tensor:
            return self._place(weight.to(self.device, self.dtype))

        def linear(matrix: Matrix, bias: Tensor | None = None) -> Linear:
            return hold(matrix, bias, precision, self.device, self._place)

        return _Layer(
            attention_norm=norm(layer.attention_norm),
            qkv=linear(layer.qkv, layer.qkv_bias),
            query_norm=None if layer.query_norm is None else norm(layer.query_norm),
            key_norm=None if layer.key_norm is None else norm(layer.key_norm),
            out=linear(layer.out),
            mlp_norm=norm(layer.mlp_norm),
            gate_up=linear(layer.gate_up),
            down=linear(layer.down),
        )

    def forward(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], *, states: bool) -> Tensor | None:
        """Append tokens to rows.

        Args:    rows: those that append at most FEW tokens first: each takes the kernels of its own size.
                 tokens: `count` of each row, at least one. states: False when no row needs its hidden state (prefill).
        Returns: normed hidden state of each row's last token, (rows, width), or None without `states`.
        """
        batch = self.attention.pack(rows)
        few = sum(row.count for row in rows if row.count <= FEW)
        x = F.embedding(torch.tensor([token for part in tokens for token in part], device=self.device), self.embedding)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            queries = self._remember(batch, index, layer, layer.qkv(self._norm(x, layer.attention_norm), few))
            if index == last and not states:
                return None  # nobody reads what the last layer says about a token that only is to be remembered
            x = x + layer.out(batch.attend(index, queries).to(self.dtype), few)
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm), few).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate).mul_(up), few)
        ends = torch.tensor([end - 1 for end in accumulate(row.count for row in rows)], device=self.device)
        return self._norm(x[ends], self._final_norm)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.shape.norm_epsilon)

    def _remember(self, batch: Packed, index: int, layer: _Layer, z: Tensor) -> Tensor:
        """Split a layer's q, k, v; hand k and v to the rows; return queries (tokens, heads, head_dim)."""
        shape = self.shape
        heads = z.view(len(z), -1, shape.head_dim)
        border = shape.heads + shape.kv_heads
        queries, keys, values = heads[:, : shape.heads], heads[:, shape.heads : border], heads[:, border:]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = self._norm(queries, layer.query_norm), self._norm(keys, layer.key_norm)
        batch.remember(index, keys, values)
        return queries


def attention_of(
    shape: DecoderShape, asked: str = "auto", *, context_max: int, precision: Precision, device: torch.device
) -> Attention:
    """Attention for a checkpoint, computed in float64 for float64 weights and in float32 for all others.

    Raises:  ModelError as `choose_attention`.
    """
    frequency = shape.rope_base ** -(torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
    if shape.rope_factors:
        frequency = frequency / torch.tensor(shape.rope_factors, dtype=torch.float64)
    # On the host until the thinker puts it on its shelf: a plan is read on machines that lack its device.
    table = rotary_table(frequency, positions=context_max, dtype=precision.dtype, device=torch.device("cpu"))
    size = AttentionShape(shape.layers, shape.heads, shape.kv_heads, shape.head_dim, context_max)
    return choose_attention(asked, size, AdjacentPairs(table), stored=precision.dtype, device=device)
