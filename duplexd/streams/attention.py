"""Attention: new tokens of many contexts in one packed row, over keys that were stored before rotation.

1. Keys lie in the arena's `pages` as the layer made them. A token's position is its index in the table of its context,
   given when it is read: 0..n-1, whatever was slid, cut or forked before (DESIGN §5 rule 6).
2. A job is: `recall` a row's past into its place of the workspace, then `pack`, and per layer `remember` and `attend`,
   as often as it likes, then `keep` what it appended. `recall` alone reads pages and `keep` alone writes them, so a job
   that fails leaves them as they were.
3. Between two jobs a place of the workspace means nothing.
4. The implementations differ in what the workspace holds and in the kernel. One is chosen at start; `plain` is what the
   others are compared with.

    name      the workspace holds                                kernel                           runs on
    plain     stored keys, rotated at every read; values         SDPA, row by row                 everything
    rotated   keys rotated once a job; values; stored new keys   SDPA, heads of a group as one    everything (CPU: auto)
    varlen    the same, in blocks of 256 tokens                  torch's, all rows in one call    CUDA, 16 bits (auto)
    flash     the same                                           flash-attn's, all rows           CUDA, 16 bits
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from duplexd.errors import ModelError
from duplexd.memory.layout import FieldSpec, PartitionKind, PartitionSpec, Section

PAGES = "pages"
WORKSPACE = "workspace"
#: flash-attention 2 pages keys in multiples of 256 tokens.
BLOCK = 256

# Rotation -------------------------------------------------------------------------------------------------------------


class Rotary(ABC):
    """Rotation of the pairs of a head by its token's position.

    Args:    table: complex (positions, head_dim / 2). Rotated tensors have its precision; any magnitude other than one
             scales them, as some checkpoints ask.
    """

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.dtype = torch.float64 if table.dtype == torch.complex128 else torch.float32

    @abstractmethod
    def turn(self, x: Tensor, turns: Tensor) -> Tensor:
        """x (tokens, heads, head_dim) of any float type -> the same shape, rotated, in `dtype`.

        `turns` are rows of the table at the tokens' positions, (tokens, 1, head_dim / 2).
        """

    @abstractmethod
    def turn_into(self, x: Tensor, turns: Tensor, out: Tensor) -> None:
        """The same, into memory of type `dtype` that the caller owns; `out` may be strided, but not within a head."""


class AdjacentPairs(Rotary):
    """Elements 2i and 2i + 1 are a pair: a rotation is one product of complex numbers, without a copy."""

    def turn(self, x: Tensor, turns: Tensor) -> Tensor:
        return torch.view_as_real(_complex(x.to(self.dtype)) * turns).flatten(-2)

    def turn_into(self, x: Tensor, turns: Tensor, out: Tensor) -> None:
        torch.mul(_complex(x.to(self.dtype)), turns, out=_complex(out))


def _complex(x: Tensor) -> Tensor:
    """A view: (..., head_dim) real -> (..., head_dim / 2) complex."""
    return torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))


class SplitHalves(Rotary):
    """Elements i and i + head_dim / 2 are a pair, as in Hugging Face modules."""

    def turn(self, x: Tensor, turns: Tensor) -> Tensor:
        turned = torch.complex(*x.to(self.dtype).chunk(2, dim=-1)) * turns
        return torch.cat([turned.real, turned.imag], dim=-1)

    def turn_into(self, x: Tensor, turns: Tensor, out: Tensor) -> None:
        out.copy_(self.turn(x, turns))


def rotary_table(frequency: Tensor, *, positions: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Turns of every position, complex (positions, head_dim / 2), for attention computed in `dtype`.

    Args:    frequency: radians a token, float64 (head_dim / 2,).
    """
    # float64 angles: in float32 the fastest pairs lose 1e-4 of a turn at position 2000.
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), frequency)
    table = torch.polar(torch.ones_like(angle), angle)
    return table.to(device, torch.complex128 if dtype == torch.float64 else torch.complex64)


# What is asked --------------------------------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True):
    """One context of a packed batch: `count` new tokens after `past` remembered ones."""

    slots: bytes  #: token slots of the table, int64 little endian, oldest first; at least past + count
    past: int
    count: int
    place: int  #: slot of the workspace, one row's at a time

    @property
    def end(self) -> int:
        return self.past + self.count

    def then(self, count: int) -> Row:
        """The same context when its new tokens are remembered and `count` more follow."""
        return Row(self.slots, self.end, count, self.place)


class AttentionShape(msgspec.Struct, frozen=True):
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_max: int  #: tokens of the longest row


class Packed(Protocol):
    """New tokens of several rows side by side, ready to go through all layers."""

    positions: Tensor  #: of the tokens within their contexts, int64 (tokens,)

    def remember(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Append to the rows: (tokens, kv_heads, head_dim) each, keys not rotated."""

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """What each token sees: its row's past, and its own row's new tokens up to itself.

        Args:    queries: (tokens, heads, head_dim), not rotated. `remember` of the layer came before.
        Returns: (tokens, heads * head_dim); of the workspace's precision.
        """


class Attention(ABC):
    """One implementation, with its memory. `load` comes first.

    Args:    stored: type of keys and values in the arena.
    """

    def __init__(self, shape: AttentionShape, rotary: Rotary, *, stored: torch.dtype, device: torch.device) -> None:
        if len(rotary.table) < shape.context_max:
            raise ModelError(f"the rotary table has {len(rotary.table)} positions; a row has up to {shape.context_max}")
        self.shape = shape
        self.rotary = rotary
        self.stored = stored
        self.device = device

    def page_fields(self) -> tuple[FieldSpec, ...]:
        """Fields of the `pages` partition: keys before rotation, and values."""
        size = (self.shape.kv_heads, self.shape.head_dim)
        return tuple(FieldSpec(name, size, _name(self.stored), outer=(self.shape.layers,)) for name in ("k", "v"))

    def workspace(self, places: int) -> PartitionSpec:
        """The `workspace` partition for this many rows of a batch."""
        return PartitionSpec(WORKSPACE, PartitionKind.SLOTS, places, self._scratch(), section=Section.WORKSPACE)

    @abstractmethod
    def _scratch(self) -> tuple[FieldSpec, ...]:
        """Fields of one place of the workspace."""

    def load(self, arena: Any) -> None:
        """Take the arena's views. Raises ModelError when a field has another shape or type."""
        pages = {field.name: _view(arena, PAGES, field) for field in self.page_fields()}
        self._page_keys, self._page_values = pages["k"], pages["v"]
        self._take({field.name: _view(arena, WORKSPACE, field) for field in self._scratch()})

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        """Keys before rotation, and values, of all pages: (layers, token slots, kv_heads, head_dim) each."""
        return self._page_keys, self._page_values

    @abstractmethod
    def _take(self, fields: dict[str, Tensor]) -> None:
        """The workspace's views, (places, *shape of the field)."""

    def recall(self, row: Row) -> None:
        """Fill a row's place with its past, once a job."""
        if row.past:
            slots = _slots(row)[: row.past]
            self._fill(row, _gather(self._page_keys, slots), _gather(self._page_values, slots))

    @abstractmethod
    def _fill(self, row: Row, keys: Tensor, values: Tensor) -> None:
        """Keys and values (layers, past, kv_heads, head_dim) as stored, oldest first, into a row's place."""

    @abstractmethod
    def pack(self, rows: Sequence[Row]) -> Packed:
        """What all layers need to know of a batch, computed once. Raises ValueError for a row beyond `context_max`."""

    def keep(self, row: Row) -> None:
        """Write the `count` tokens after a row's `past` to its slots in the pages."""
        keys, values = self._appended(row)
        slots = _slots(row)[row.past : row.end]
        _scatter(self._page_keys, slots, keys)
        _scatter(self._page_values, slots, values)

    @abstractmethod
    def _appended(self, row: Row) -> tuple[Tensor, Tensor]:
        """Unrotated keys, and values, of a row's `count` tokens: (layers, count, kv_heads, head_dim) each."""

    def turns(self, positions: Tensor) -> Tensor:
        """Rows of the rotary table for packed tokens: (tokens, 1, head_dim / 2)."""
        return self.rotary.table[positions][:, None]

    def check(self, rows: Sequence[Row]) -> None:
        longest = max(row.end for row in rows)
        if longest > self.shape.context_max:
            raise ValueError(f"a row of {longest} tokens; at most {self.shape.context_max}")


# SDPA -----------------------------------------------------------------------------------------------------------------


class PlainAttention(Attention):
    """Everything as it reads: stored keys are rotated for positions 0..n-1 each time they are seen."""

    def _scratch(self) -> tuple[FieldSpec, ...]:
        size = (self.shape.layers, self.shape.context_max, self.shape.kv_heads, self.shape.head_dim)
        return tuple(FieldSpec(name, size, _name(self.stored)) for name in ("keys", "values"))

    def _take(self, fields: dict[str, Tensor]) -> None:
        self.keys, self.values = fields["keys"], fields["values"]

    def _fill(self, row: Row, keys: Tensor, values: Tensor) -> None:
        self.keys[row.place, :, : row.past] = keys
        self.values[row.place, :, : row.past] = values

    def pack(self, rows: Sequence[Row]) -> Packed:
        self.check(rows)
        return _PlainPacked(self, rows)

    def _appended(self, row: Row) -> tuple[Tensor, Tensor]:
        return self.keys[row.place, :, row.past : row.end], self.values[row.place, :, row.past : row.end]


class _PlainPacked:
    def __init__(self, attention: PlainAttention, rows: Sequence[Row]) -> None:
        self._attention = attention
        self._rows = list(zip(rows, _spans(rows), strict=True))
        self.positions = _positions(rows, attention.device)
        self._turns = attention.turns(self.positions)

    def remember(self, layer: int, keys: Tensor, values: Tensor) -> None:
        for row, span in self._rows:
            self._attention.keys[row.place, layer, row.past : row.end] = keys[span]
            self._attention.values[row.place, layer, row.past : row.end] = values[span]

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        turned = self._attention.rotary.turn(queries, self._turns)
        return torch.cat([self._attend(layer, row, turned[span]) for row, span in self._rows])

    def _attend(self, layer: int, row: Row, queries: Tensor) -> Tensor:
        attention, rotary = self._attention, self._attention.rotary
        keys = rotary.turn(attention.keys[row.place, layer, : row.end], rotary.table[: row.end, None])
        values = attention.values[row.place, layer, : row.end].to(rotary.dtype)
        q, k, v = (x.transpose(0, 1)[None] for x in (queries, keys, values))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=_seen(row, attention.device), enable_gqa=True)
        return y[0].transpose(0, 1).flatten(1)


class RotatedAttention(Attention):
    """A row's past is rotated once a job, and each new token adds its own; decoding rotates one key a layer."""

    def _scratch(self) -> tuple[FieldSpec, ...]:
        shape = self.shape
        size = (shape.layers, shape.kv_heads, shape.context_max, shape.head_dim)
        fresh = (shape.layers, shape.context_max, shape.kv_heads, shape.head_dim)
        read = _name(self.rotary.dtype)
        return (
            FieldSpec("keys", size, read),
            FieldSpec("values", size, read),
            FieldSpec("fresh", fresh, _name(self.stored)),
        )

    def _take(self, fields: dict[str, Tensor]) -> None:
        self.keys, self.values, self.fresh = fields["keys"], fields["values"], fields["fresh"]

    def _fill(self, row: Row, keys: Tensor, values: Tensor) -> None:
        turns = self.rotary.table[: row.past, None]
        place = self.keys[row.place]
        # Layer by layer, so that nothing of the size of all layers is allocated.
        for layer in range(self.shape.layers):
            self.rotary.turn_into(keys[layer], turns, place[layer, :, : row.past].transpose(0, 1))
        self.values[row.place, :, :, : row.past] = values.transpose(1, 2)

    def pack(self, rows: Sequence[Row]) -> Packed:
        self.check(rows)
        return _RotatedPacked(self, rows)

    def _appended(self, row: Row) -> tuple[Tensor, Tensor]:
        values = self.values[row.place, :, :, row.past : row.end].transpose(1, 2)
        return self.fresh[row.place, :, row.past : row.end], values


class _Part:
    """A row of a packed batch and its place. Views are taken once a batch: a layer then costs one index each."""

    def __init__(self, attention: RotatedAttention, row: Row, span: slice, turns: Tensor) -> None:
        keys, values = attention.keys[row.place], attention.values[row.place]
        new = slice(row.past, row.end)
        self.count = row.count
        self.span = span  #: of the packed tokens
        self.turns = turns[span]
        self.fresh = attention.fresh[row.place, :, new]  #: (layers, count, kv_heads, head_dim), as the next two
        self.new_keys = keys[:, :, new].transpose(1, 2)
        self.new_values = values[:, :, new].transpose(1, 2)
        self.keys = keys[:, :, : row.end]  #: (layers, kv_heads, end, head_dim), as the values
        self.values = values[:, :, : row.end]


class _RotatedPacked:
    def __init__(self, attention: RotatedAttention, rows: Sequence[Row]) -> None:
        self._rotary = attention.rotary
        self._kv_heads = attention.shape.kv_heads
        self._group = attention.shape.heads // attention.shape.kv_heads
        self.positions = _positions(rows, attention.device)
        self._turns = attention.turns(self.positions)
        self._parts = [_Part(attention, *each, self._turns) for each in zip(rows, _spans(rows), strict=True)]
        # Masks are repeated for the heads of a group. A lone token sees all.
        self._seen = [_seen(row, attention.device).repeat(self._group, 1) if row.count > 1 else None for row in rows]

    def remember(self, layer: int, keys: Tensor, values: Tensor) -> None:
        for part in self._parts:
            new = keys[part.span]
            part.fresh[layer] = new
            self._rotary.turn_into(new, part.turns, part.new_keys[layer])
            part.new_values[layer] = values[part.span]

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        turned = self._rotary.turn(queries, self._turns)
        one_layer = slice(layer, layer + 1)
        attended = []
        for part, seen in zip(self._parts, self._seen, strict=True):
            q = self._grouped(turned[part.span], part.count)
            y = F.scaled_dot_product_attention(q, part.keys[one_layer], part.values[one_layer], attn_mask=seen)
            attended.append(self._ungrouped(y, part.count))
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _grouped(self, queries: Tensor, count: int) -> Tensor:
        """(count, heads, head_dim) -> (1, kv_heads, heads of a group * count, head_dim).

        Heads that share keys become rows of one product, so that keys are never repeated.
        """
        if count == 1:
            return queries.view(1, self._kv_heads, self._group, -1)
        apart = queries.view(count, self._kv_heads, self._group, -1).permute(1, 2, 0, 3)
        return apart.reshape(1, self._kv_heads, self._group * count, -1)

    def _ungrouped(self, y: Tensor, count: int) -> Tensor:
        """The way back, heads side by side: (count, heads * head_dim)."""
        if count == 1:
            return y.reshape(1, -1)
        return y.view(self._kv_heads, self._group, count, -1).permute(2, 0, 1, 3).reshape(count, -1)


# Kernels over blocks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spans:
    """Where the rows of a batch lie, for a kernel; int32 on the device, `*_max` known on the host."""

    new_ends: Tensor  #: running sum of new tokens, (rows + 1,), from 0
    ends: Tensor  #: running sum of tokens seen, (rows + 1,), from 0
    lengths: Tensor  #: tokens seen, (rows,)
    blocks: Tensor  #: (rows, blocks of the longest)
    new_max: int
    length_max: int


class Kernel(Protocol):
    """Causal attention over blocks, each row's newest token last.

    queries (tokens, heads, head_dim); keys and values (blocks, BLOCK, kv_heads, head_dim) -> shape of the queries.
    """

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, spans: Spans) -> Tensor: ...


class BlockAttention(Attention):
    """Rotated keys and values in blocks; one kernel call a layer for all rows, and no host loop over rows.

    A place of the workspace is blocks in a row, layer after layer, so a row's block table is an arithmetic sequence,
    and the tokens a table has cut or slid cost nothing: pages of the arena need no alignment.
    """

    def __init__(
        self,
        shape: AttentionShape,
        rotary: Rotary,
        kernel: Kernel,
        *,
        stored: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(shape, rotary, stored=stored, device=device)
        self.kernel = kernel
        self.layer_blocks = -(-shape.context_max // BLOCK)

    def _scratch(self) -> tuple[FieldSpec, ...]:
        shape = self.shape
        size = (shape.layers, self.layer_blocks * BLOCK, shape.kv_heads, shape.head_dim)
        return tuple(FieldSpec(name, size, _name(self.stored)) for name in ("keys", "values", "fresh"))

    def _take(self, fields: dict[str, Tensor]) -> None:
        self.keys, self.values, self.fresh = fields["keys"], fields["values"], fields["fresh"]

    def _fill(self, row: Row, keys: Tensor, values: Tensor) -> None:
        turned = self.rotary.turn(keys, self.rotary.table[: row.past, None])
        self.keys[row.place, :, : row.past] = turned.to(self.stored)
        self.values[row.place, :, : row.past] = values

    def pack(self, rows: Sequence[Row]) -> Packed:
        self.check(rows)
        return _BlockPacked(self, rows)

    def _appended(self, row: Row) -> tuple[Tensor, Tensor]:
        return self.fresh[row.place, :, row.past : row.end], self.values[row.place, :, row.past : row.end]


class _BlockPacked:
    def __init__(self, attention: BlockAttention, rows: Sequence[Row]) -> None:
        self._attention = attention
        self._step = attention.layer_blocks * BLOCK
        positions = np.concatenate([np.arange(row.past, row.end) for row in rows])
        starts = (
            np.repeat([row.place for row in rows], [row.count for row in rows]) * attention.shape.layers * self._step
        )
        self.positions, self._at = _sent(np.stack([positions, starts + positions]), attention.device)
        self._turns = attention.turns(self.positions)
        self._spans = self._span(rows)

    def _span(self, rows: Sequence[Row]) -> Spans:
        counts, lengths = [row.count for row in rows], [row.end for row in rows]
        ends = [list(accumulate(each, initial=0)) for each in (counts, lengths)]
        host = np.array([*ends, [*lengths, 0]], dtype=np.int32)
        first = np.array([row.place for row in rows]) * self._attention.shape.layers * self._attention.layer_blocks
        blocks = first[:, None] + np.arange(-(-max(lengths) // BLOCK))
        device = _sent(host, self._attention.device)
        return Spans(
            new_ends=device[0],
            ends=device[1],
            lengths=device[2, :-1],
            blocks=_sent(blocks.astype(np.int32), self._attention.device),
            new_max=max(counts),
            length_max=max(lengths),
        )

    def remember(self, layer: int, keys: Tensor, values: Tensor) -> None:
        attention = self._attention
        turned = attention.rotary.turn(keys, self._turns)
        for pool, new in ((attention.fresh, keys), (attention.keys, turned), (attention.values, values)):
            self._from(pool, layer).index_copy_(0, self._at, new.to(attention.stored))

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        attention = self._attention
        turned = attention.rotary.turn(queries, self._turns).to(attention.stored)
        keys, values = (self._from(pool, layer) for pool in (attention.keys, attention.values))
        keys, values = (flat.view(-1, BLOCK, *flat.shape[1:]) for flat in (keys, values))
        return attention.kernel(turned, keys, values, self._spans).flatten(1)

    def _from(self, pool: Tensor, layer: int) -> Tensor:
        """All tokens of a pool from a layer of the first place on: the same indexes serve every layer."""
        return pool.flatten(0, 2)[layer * self._step :]


def torch_varlen(queries: Tensor, keys: Tensor, values: Tensor, spans: Spans) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    y = varlen_attn(
        queries,
        keys,
        values,
        spans.new_ends,
        None,
        spans.new_max,
        spans.length_max,
        window_size=(-1, 0),
        enable_gqa=True,
        seqused_k=spans.lengths,
        block_table=spans.blocks,
        # Splits depend on the longest row of the batch; without them a row's result does not depend on its neighbours.
        num_splits=1,
    )
    assert isinstance(y, Tensor)
    return y


def flash_varlen() -> Kernel:
    """flash-attn's kernel. Raises ModelError when the package is missing."""
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError as error:
        raise ModelError(f"attention flash needs the package flash-attn ({error}); ask for varlen instead") from error

    def kernel(queries: Tensor, keys: Tensor, values: Tensor, spans: Spans) -> Tensor:
        y: Tensor = flash_attn_varlen_func(
            queries,
            keys,
            values,
            spans.new_ends,
            spans.ends,
            spans.new_max,
            spans.length_max,
            causal=True,
            block_table=spans.blocks,
        )
        return y

    return kernel


# Choice ---------------------------------------------------------------------------------------------------------------

ATTENTIONS = ("plain", "rotated", "varlen", "flash")


def choose_attention(
    asked: str, shape: AttentionShape, rotary: Rotary, *, stored: torch.dtype, device: torch.device
) -> Attention:
    """The implementation asked for, or for "auto" the fastest this device has.

    Args:    stored: type of keys and values in the arena's pages.
    Raises:  ModelError for an unknown name, a missing package, or blocks where no kernel reads them.
    """
    obstacle = _block_obstacle(shape, stored, device)
    name = asked if asked != "auto" else "rotated" if obstacle else "varlen"
    if name == "plain":
        return PlainAttention(shape, rotary, stored=stored, device=device)
    if name == "rotated":
        return RotatedAttention(shape, rotary, stored=stored, device=device)
    if name not in ATTENTIONS:
        raise ModelError(f"unknown attention {asked!r}; allowed are auto, {', '.join(ATTENTIONS)}")
    if obstacle:
        raise ModelError(f"attention {asked} has no kernel for {obstacle}; use auto, plain or rotated")
    kernel = torch_varlen if name == "varlen" else flash_varlen()
    return BlockAttention(shape, rotary, kernel, stored=stored, device=device)


def _block_obstacle(shape: AttentionShape, stored: torch.dtype, device: torch.device) -> str:
    """Why the flash kernels cannot be used; empty when they can."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"device {device}"
    if stored not in (torch.float16, torch.bfloat16):
        return f"{_name(stored)}, only for float16 and bfloat16"
    if shape.head_dim % 8 or shape.head_dim > 256:
        return f"heads of {shape.head_dim}, only for multiples of 8 up to 256"
    return "" if torch.cuda.get_device_capability(device) >= (8, 0) else f"{torch.cuda.get_device_name(device)}"


# Small pure functions -------------------------------------------------------------------------------------------------


def _spans(rows: Sequence[Row]) -> list[slice]:
    ends = list(accumulate((row.count for row in rows), initial=0))
    return [slice(start, end) for start, end in pairwise(ends)]


def _seen(row: Row, device: torch.device) -> Tensor:
    """Which of a row's tokens each new one sees: its past, and the new ones up to itself. (count, end)."""
    return torch.ones(row.count, row.end, dtype=torch.bool, device=device).tril(row.past)


def _positions(rows: Sequence[Row], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(row.past, row.end) for row in rows]).to(device)


def _sent(host: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device; asynchronous on CUDA, from pinned memory that torch keeps until it is done."""
    tensor = torch.from_numpy(host)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _slots(row: Row) -> npt.NDArray[np.int64]:
    return np.frombuffer(row.slots, dtype="<i8")


def _in_a_row(slots: npt.NDArray[np.int64]) -> bool:
    return bool(len(slots) == 0 or (slots[-1] - slots[0] == len(slots) - 1 and (np.diff(slots) == 1).all()))


def _gather(field: Tensor, slots: npt.NDArray[np.int64]) -> Tensor:
    """(layers, tokens, ...) at the given token slots; a view when they lie in a row."""
    if _in_a_row(slots):
        start = int(slots[0]) if len(slots) else 0
        return field[:, start : start + len(slots)]
    return field.index_select(1, _sent(slots.copy(), field.device))


def _scatter(field: Tensor, slots: npt.NDArray[np.int64], source: Tensor) -> None:
    if _in_a_row(slots):
        start = int(slots[0]) if len(slots) else 0
        field[:, start : start + len(slots)] = source
    else:
        field.index_copy_(1, _sent(slots.copy(), field.device), source.to(field.dtype))


def _view(arena: Any, partition: str, spec: FieldSpec) -> Tensor:
    """A field of the arena, which must have the shape and type of `spec`."""
    view: Tensor = arena.field(partition, spec.name)
    axis = len(spec.outer)
    if (*view.shape[:axis], *view.shape[axis + 1 :]) != (*spec.outer, *spec.shape) or _name(view.dtype) != spec.dtype:
        raise ModelError(
            f"arena field {partition}.{spec.name} is {tuple(view.shape)} {_name(view.dtype)}; attention needs "
            f"{(*spec.outer, *spec.shape)} {spec.dtype} with slots at dimension {axis}"
        )
    return view


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
