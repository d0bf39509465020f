"""Weights inside the one allocation: what is promised is what is placed, and what is placed computes the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from duplexd.errors import ConfigError, ModelError
from duplexd.memory.arena import Arena, Shelf, sizes_of
from duplexd.memory.layout import ALIGNMENT, ArenaLayout, FieldSpec, PartitionKind, PartitionSpec, shelf_partition

PAYLOAD = PartitionSpec("payload", PartitionKind.SLOTS, 2, (FieldSpec("x", (3,)),))


def shelf_of(*sizes: int) -> tuple[Shelf, Arena]:
    spec = shelf_partition("weights", sizes)
    arena = Arena(ArenaLayout([PAYLOAD, spec]))
    return Shelf(arena, spec), arena


def test_weights_lie_first_in_the_allocation() -> None:
    _, arena = shelf_of(10, 300)

    assert arena.layout.placement("weights", "bytes").offset == 0
    assert arena.layout.partition_bytes("weights") == 3 * ALIGNMENT
    assert arena.layout.placement("payload", "x").offset == 3 * ALIGNMENT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float64, torch.complex64], ids=str)
def test_a_placed_tensor_is_a_view_of_the_allocation(dtype: torch.dtype) -> None:
    given = torch.arange(12).reshape(3, 4).T.to(dtype)  # not contiguous
    shelf, arena = shelf_of(given.nbytes)
    placed = shelf.place(given)
    shelf.close()

    assert torch.equal(given, placed)
    assert placed.is_contiguous()
    assert placed.untyped_storage().data_ptr() == arena.buffer.untyped_storage().data_ptr()
    assert placed.data_ptr() % ALIGNMENT == arena.buffer.data_ptr() % ALIGNMENT


def test_a_module_computes_the_same_from_the_shelf() -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2)).eval()
    x = torch.randn(4, 5)
    before = module(x)
    shelf, arena = shelf_of(*sizes_of(module))
    shelf.place_all(module)
    shelf.close()
    inside = arena.buffer.untyped_storage().data_ptr()

    assert torch.equal(before, module(x))
    assert {one.untyped_storage().data_ptr() for one in (*module.parameters(), *module.buffers())} == {inside}


def test_more_than_promised_is_refused() -> None:
    shelf, _ = shelf_of(8)
    shelf.place(torch.zeros(2))

    with pytest.raises(ModelError, match="the header promised less"):
        shelf.place(torch.zeros(1))


def test_less_than_promised_is_refused() -> None:
    shelf, _ = shelf_of(8, 8)
    shelf.place(torch.zeros(2))

    with pytest.raises(ModelError, match="256 of 512 bytes were placed: the header promised more"):
        shelf.close()


def test_an_arena_without_the_shelf_says_what_it_has() -> None:
    with pytest.raises(ConfigError, match=r"no field weights\.bytes; it has payload\.x"):
        Shelf(Arena(ArenaLayout([PAYLOAD])), shelf_partition("weights", [8]))
