"""One entry point, several implementations: each sees what the plain one sees."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from duplexd.errors import ModelError
from duplexd.memory.arena import Arena
from duplexd.memory.layout import ArenaLayout, PartitionKind, PartitionSpec
from duplexd.streams.attention import (
    BLOCK,
    PAGES,
    WORKSPACE,
    AdjacentPairs,
    Attention,
    AttentionShape,
    BlockAttention,
    PlainAttention,
    Rotary,
    RotatedAttention,
    Row,
    Spans,
    SplitHalves,
    choose_attention,
    rotary_table,
)

CPU = torch.device("cpu")
SHAPE = AttentionShape(layers=2, heads=4, kv_heads=2, head_dim=8, context_max=BLOCK + 20)
PLACES, SLOTS = 3, 2 * (BLOCK + 20)
TABLE = rotary_table(
    1e3 ** -torch.arange(0, 1, 0.25, dtype=torch.float64), positions=300, dtype=torch.float64, device=CPU
)


def blocks_on_cpu(queries: Tensor, keys: Tensor, values: Tensor, spans: Spans) -> Tensor:
    """The contract of a kernel over blocks, row by row."""
    assert spans.new_max == int(spans.new_ends.diff().max())
    assert spans.length_max == int(spans.lengths.max())
    assert torch.equal(spans.ends.diff(), spans.lengths)
    rows = []
    for start, end, length, blocks in zip(
        spans.new_ends, spans.new_ends[1:], spans.lengths, spans.blocks, strict=False
    ):
        q = queries[start:end].transpose(0, 1)
        k, v = (pool[blocks].flatten(0, 1)[:length].transpose(0, 1) for pool in (keys, values))
        seen = torch.ones(q.shape[1], int(length), dtype=torch.bool).tril(int(length) - q.shape[1])
        rows.append(F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen, enable_gqa=True)[0])
    return torch.cat(rows, dim=1).transpose(0, 1)


def built(name: str, rotary: Rotary) -> Attention:
    more = {"stored": torch.float64, "device": CPU}
    if name == "blocks":
        return BlockAttention(SHAPE, rotary, blocks_on_cpu, **more)
    return {"plain": PlainAttention, "rotated": RotatedAttention}[name](SHAPE, rotary, **more)


def arena_of(attention: Attention, seed: int) -> Arena:
    """Random keys and values in the pages, NaN in the workspace."""
    pages = PartitionSpec(PAGES, PartitionKind.PAGES, SLOTS // 4, attention.page_fields(), page_tokens=4)
    arena = Arena(ArenaLayout([pages, attention.workspace(PLACES)]))
    rng = torch.Generator().manual_seed(seed)
    for name in "kv":
        field = arena.field(PAGES, name)
        field.copy_(torch.randn(field.shape, generator=rng, dtype=field.dtype))
    arena.fill_nan(WORKSPACE, range(PLACES))
    attention.load(arena)
    return arena


def run_twice(attention: Attention, rows: Sequence[Row], seed: int) -> tuple[list[Tensor], Arena]:
    """The rows' new tokens through all layers, then one more token of each; what was seen, and the arena after it."""
    arena = arena_of(attention, seed)
    rng = torch.Generator().manual_seed(seed + 1)
    seen = []
    for row in rows:
        attention.recall(row)
    for now in (rows, [row.then(1) for row in rows]):
        batch = attention.pack(now)
        count = sum(row.count for row in now)
        for layer in range(SHAPE.layers):
            heads = torch.randn(count, 8, SHAPE.head_dim, generator=rng, dtype=torch.float64)
            batch.remember(layer, heads[:, 4:6], heads[:, 6:])
            seen.append(batch.attend(layer, heads[:, :4]))
    for row in rows:
        attention.keep(Row(row.slots, row.past, row.count + 1, row.place))
    return seen, arena


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    """Up to three rows over disjoint slots in any order: some short, some beyond a block, with and without a past."""
    slots = draw(st.permutations(range(SLOTS)))
    rows, taken = [], 0
    for place in draw(st.permutations(range(PLACES)))[: draw(st.integers(1, PLACES))]:
        past = draw(st.one_of(st.just(0), st.integers(1, 40), st.integers(BLOCK - 4, BLOCK + 4)))
        count = draw(st.integers(1, 6))
        if taken + past + count + 1 > SLOTS:
            break
        rows.append(Row(array("q", slots[taken : taken + past + count + 1]).tobytes(), past, count, place))
        taken += past + count + 1
    return rows


@pytest.mark.parametrize("name", ["rotated", "blocks"])
@pytest.mark.parametrize("pairs", [AdjacentPairs, SplitHalves])
@given(rows=batches(), seed=st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_every_implementation_sees_what_the_plain_one_sees(
    name: str, pairs: type[Rotary], rows: list[Row], seed: int
) -> None:
    """CPU, float64, 1e-12; "blocks" is the CUDA implementation around a kernel written out in torch."""
    expected, kept = run_twice(PlainAttention(SHAPE, pairs(TABLE), stored=torch.float64, device=CPU), rows, seed)
    actual, also_kept = run_twice(built(name, pairs(TABLE)), rows, seed)

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    for field in "kv":
        assert torch.equal(kept.field(PAGES, field), also_kept.field(PAGES, field))


@pytest.mark.parametrize("name", ["plain", "rotated", "blocks"])
def test_until_it_is_kept_a_token_is_in_no_page(name: str) -> None:
    attention = built(name, AdjacentPairs(TABLE))
    arena = arena_of(attention, 3)
    before = arena.field(PAGES, "k").clone()
    row = Row(array("q", range(8)).tobytes(), 4, 4, 1)
    attention.recall(row)
    batch = attention.pack([row])
    new = torch.randn(4, 2, SHAPE.head_dim, dtype=torch.float64)
    for layer in range(SHAPE.layers):
        batch.remember(layer, new, new)
    assert torch.equal(arena.field(PAGES, "k"), before)

    attention.keep(row)
    assert torch.equal(arena.field(PAGES, "k")[1, 4:8], new)
    before[:, 4:8] = new
    assert torch.equal(arena.field(PAGES, "k"), before)


def test_both_layouts_are_one_rotation_of_differently_laid_heads() -> None:
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    turns = TABLE[7:12, None]
    halves = SplitHalves(TABLE).turn(x, turns)
    adjacent = AdjacentPairs(TABLE).turn(x.view(5, 3, 2, 4).transpose(2, 3).reshape(5, 3, 8), turns)

    torch.testing.assert_close(halves, adjacent.view(5, 3, 4, 2).transpose(2, 3).reshape(5, 3, 8), rtol=0, atol=1e-14)


@pytest.mark.parametrize("pairs", [AdjacentPairs, SplitHalves])
def test_a_turn_into_memory_is_a_turn(pairs: type[Rotary]) -> None:
    x, out = torch.randn(5, 2, 8), torch.empty(2, 5, 8)
    rotary = pairs(TABLE.to(torch.complex64))
    rotary.turn_into(x, TABLE[:5, None].to(torch.complex64), out.transpose(0, 1))

    assert torch.equal(out, rotary.turn(x, rotary.table[:5, None]).transpose(0, 1))


# Choice ---------------------------------------------------------------------------------------------------------------


def chosen(asked: str, stored: torch.dtype = torch.bfloat16) -> Attention:
    return choose_attention(asked, SHAPE, AdjacentPairs(TABLE), stored=stored, device=CPU)


def test_a_cpu_rotates_once_a_job_unless_asked_otherwise() -> None:
    assert [type(chosen(name)) for name in ("auto", "rotated", "plain")] == [
        RotatedAttention,
        RotatedAttention,
        PlainAttention,
    ]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("paged", r"unknown attention 'paged'; allowed are auto, plain, rotated, varlen, flash"),
        ("varlen", "attention varlen has no kernel for device cpu; use auto, plain or rotated"),
        ("flash", "attention flash has no kernel for device cpu; use auto, plain or rotated"),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_can(asked: str, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        chosen(asked)


def test_a_missing_flash_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duplexd.streams.attention._block_obstacle", lambda *_: "")
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ModelError, match=r"needs the package flash-attn .*ask for varlen instead"):
        chosen("flash")


def test_a_row_beyond_the_bound_is_refused() -> None:
    attention = built("rotated", AdjacentPairs(TABLE))
    arena_of(attention, 0)
    with pytest.raises(ValueError, match=f"a row of {BLOCK + 21} tokens; at most {BLOCK + 20}"):
        attention.pack([Row(b"", BLOCK + 20, 1, 0)])
