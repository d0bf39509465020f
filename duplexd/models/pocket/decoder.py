"""The decoder: tokens of several contexts in, hidden states out, keys and values in memory that somebody else owns.

1. New tokens of all rows are packed into one matrix; only attention looks at a row alone.
2. Keys are handed out before rotation (DESIGN §5 rule 6). A row holds *rotated* keys for the length of one job only:
   they are computed once when the job begins, for positions 0..past-1, and each new token adds its own.
3. A row's keys and values lie in a workspace of the arena; between two jobs the workspace means nothing.
4. Rotary pairs are adjacent, so a rotation is one multiplication of complex numbers (see checkpoint.py rule 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from duplexd.models.pocket.checkpoint import DecoderShape, DecoderWeights, LayerWeights
from duplexd.models.pocket.linear import Head, Linear, Precision, hold, hold_head, parameter_bytes


@dataclass
class Row:
    """One context during one job."""

    keys: Tensor  #: workspace (layers, kv_heads, tokens, head_dim), rotated
    values: Tensor  #: workspace, same shape
    fresh_keys: Tensor  #: (layers, new tokens of the job, kv_heads, head_dim), not rotated: what the arena will keep
    past: int  #: tokens in `keys` and `values`
    fed: int = 0  #: tokens in `fresh_keys`


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


class Rotary:
    """Rotation of adjacent pairs: `turn` for new tokens, `turn_into` for a whole past.

    The table is complex, (context_max, head_dim / 2), in the precision attention is computed in.
    """

    def __init__(self, shape: DecoderShape, *, context_max: int, dtype: torch.dtype, device: torch.device) -> None:
        exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
        frequency = shape.rope_base**-exponent
        if shape.rope_factors:
            frequency = frequency / torch.tensor(shape.rope_factors, dtype=torch.float64)
        # float64 angles: in float32 the fastest pairs lose 1e-4 of a turn at position 2000.
        angle = torch.outer(torch.arange(context_max, dtype=torch.float64), frequency)
        table = torch.polar(torch.ones_like(angle), angle)
        self.dtype = dtype
        self.table = table.to(device, torch.complex128 if dtype == torch.float64 else torch.complex64)

    def turn(self, x: Tensor, turns: Tensor) -> Tensor:
        """x (tokens, heads, head_dim) of any float type -> the same shape, rotated, in `dtype`.

        `turns` are the rows of the table at the tokens' positions, (tokens, 1, head_dim / 2).
        """
        return torch.view_as_real(self._complex(x) * turns).flatten(-2)

    def turn_into(self, keys: Tensor, out: Tensor) -> None:
        """keys (tokens, kv_heads, head_dim) at positions 0..tokens-1 -> out (kv_heads, tokens, head_dim)."""
        target = torch.view_as_complex(out.view(*out.shape[:-1], -1, 2))
        torch.mul(self._complex(keys).transpose(0, 1), self.table[: len(keys)], out=target)

    def _complex(self, x: Tensor) -> Tensor:
        return torch.view_as_complex(x.to(self.dtype).view(*x.shape[:-1], -1, 2))


def held_bytes(weights: DecoderWeights, precision: Precision) -> int:
    """Bytes a `Decoder` holds in matrices, embedding and head, from the header alone.

    Norms, biases and scales of whole rows are left out: below one percent of a real checkpoint. A checkpoint that
    mixes 4-bit and other matrices counts as if all were like those of its first layer.
    """
    shape = weights.shape
    attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layers = shape.layers * shape.width * (attention + 3 * shape.inner)
    vocabulary = shape.vocabulary * shape.width
    tied = weights.head.names == weights.embedding.names
    tables = vocabulary * precision.dtype.itemsize * (1 if tied else 2)
    rough = vocabulary if precision in (Precision.INT4, Precision.INT8) else 0
    return round(layers * parameter_bytes(precision)) + tables + rough


class Decoder:
    """Weights of a decoder, held in one precision on one device.

    Args:    context_max: longest context; the rotary table has that many rows.
    """

    def __init__(
        self, weights: DecoderWeights, *, precision: Precision, context_max: int, device: torch.device
    ) -> None:
        self.shape = weights.shape
        self.dtype = precision.dtype
        self.cache_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.device = device
        self.rotary = Rotary(self.shape, context_max=context_max, dtype=self.cache_dtype, device=device)
        self.embedding = weights.embedding.dense().to(device, self.dtype)
        tied = weights.head.names == weights.embedding.names
        head = self.embedding if tied else weights.head.dense().to(device, self.dtype)
        self.head: Head = hold_head(head, precision)
        self._final_norm = weights.final_norm().to(device, self.dtype)
        self._layers = [self._hold(weights.layer(index), precision) for index in range(self.shape.layers)]

    def _hold(self, layer: LayerWeights, precision: Precision) -> _Layer:
        def norm(weight: Tensor | None) -> Tensor | None:
            return None if weight is None else weight.to(self.device, self.dtype)

        return _Layer(
            attention_norm=layer.attention_norm.to(self.device, self.dtype),
            qkv=hold(layer.qkv, layer.qkv_bias, precision, self.device),
            query_norm=norm(layer.query_norm),
            key_norm=norm(layer.key_norm),
            out=hold(layer.out, None, precision, self.device),
            mlp_norm=layer.mlp_norm.to(self.device, self.dtype),
            gate_up=hold(layer.gate_up, None, precision, self.device),
            down=hold(layer.down, None, precision, self.device),
        )

    def recall(self, row: Row, keys: Tensor, values: Tensor) -> None:
        """Fill a row's workspace with its past: stored keys are rotated for positions 0..past-1, values copied.

        Args:    keys, values: (layers, past, kv_heads, head_dim) as stored, oldest first.
        """
        if not row.past:
            return
        for layer in range(self.shape.layers):
            self.rotary.turn_into(keys[layer], row.keys[layer, :, : row.past])
        row.values[:, :, : row.past] = values.transpose(1, 2)

    def forward(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], *, states: bool) -> Tensor | None:
        """Append tokens to rows.

        Args:    tokens: at least one per row. states: False when no row needs its hidden state (prefill only).
        Returns: normed hidden state of each row's last token, (rows, width), or None without `states`.
        """
        packed = torch.tensor([token for part in tokens for token in part], device=self.device)
        positions = torch.cat([torch.arange(r.past, r.past + len(t)) for r, t in zip(rows, tokens, strict=True)])
        counts = [len(part) for part in tokens]
        masks = [self._mask(row.past, count) for row, count in zip(rows, counts, strict=True)]
        x = F.embedding(packed, self.embedding)
        turns = self.rotary.table[positions.to(self.device)][:, None]
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            z = layer.qkv(self._norm(x, layer.attention_norm))
            queries = self._remember(rows, counts, index, layer, z, turns)
            if index == last and not states:
                break  # nobody reads what the last layer says about a token that only is to be remembered
            attended = [
                self._attend(row, queries[start : start + count], index, count, mask)
                for row, start, count, mask in zip(rows, _starts(counts), counts, masks, strict=True)
            ]
            x = x + layer.out((attended[0] if len(attended) == 1 else torch.cat(attended)).to(self.dtype))
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate).mul_(up))
        for row, count in zip(rows, counts, strict=True):
            row.past += count
            row.fed += count
        return self._norm(x[_ends(counts)], self._final_norm) if states else None

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.shape.norm_epsilon)

    def _remember(
        self, rows: Sequence[Row], counts: Sequence[int], index: int, layer: _Layer, z: Tensor, turns: Tensor
    ) -> Tensor:
        """Split a layer's q, k, v; keep k and v in the rows; return rotated queries (tokens, heads, head_dim)."""
        shape = self.shape
        heads = z.view(len(z), -1, shape.head_dim)
        border = shape.heads + shape.kv_heads
        both, values = heads[:, :border], heads[:, border:]
        if layer.query_norm is not None and layer.key_norm is not None:
            both = torch.cat(
                [
                    self._norm(both[:, : shape.heads], layer.query_norm),
                    self._norm(both[:, shape.heads :], layer.key_norm),
                ],
                dim=1,
            )
        turned = self.rotary.turn(both, turns)
        for row, start, count in zip(rows, _starts(counts), counts, strict=True):
            end, past = start + count, row.past
            row.fresh_keys[index, row.fed : row.fed + count] = both[start:end, shape.heads :]
            row.keys[index, :, past : past + count] = turned[start:end, shape.heads :].transpose(0, 1)
            row.values[index, :, past : past + count] = values[start:end].transpose(0, 1)
        return turned[:, : shape.heads]

    def _attend(self, row: Row, queries: Tensor, index: int, count: int, mask: Tensor | None) -> Tensor:
        """queries (count, heads, head_dim) over one row's past and themselves -> (count, heads * head_dim)."""
        shape = self.shape
        total = row.past + count
        group = shape.heads // shape.kv_heads
        # Heads that share keys become rows of one product, so that keys are never repeated.
        q = (
            queries.view(count, shape.kv_heads, group, -1)
            .permute(1, 2, 0, 3)
            .reshape(1, shape.kv_heads, group * count, -1)
        )
        y = F.scaled_dot_product_attention(
            q, row.keys[index, :, :total][None], row.values[index, :, :total][None], attn_mask=mask
        )
        return y.view(shape.kv_heads, group, count, -1).permute(2, 0, 1, 3).reshape(count, -1)

    def _mask(self, past: int, count: int) -> Tensor | None:
        """Which of past + count tokens each of `count` new ones sees, repeated for the heads of a group."""
        if count == 1:
            return None
        seen = torch.ones(count, past + count, dtype=torch.bool, device=self.device).tril(past)
        return seen.repeat(self.shape.heads // self.shape.kv_heads, 1)


def _starts(counts: Sequence[int]) -> list[int]:
    starts, total = [], 0
    for count in counts:
        starts.append(total)
        total += count
    return starts


def _ends(counts: Sequence[int]) -> list[int]:
    return [start + count - 1 for start, count in zip(_starts(counts), counts, strict=True)]
