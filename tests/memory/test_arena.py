"""The arena: one allocation, and views that alias it."""

from __future__ import annotations

from array import array

import pytest
import torch

from duplexd.errors import ConfigError
from duplexd.ids import SlotId
from duplexd.memory.arena import Arena
from duplexd.memory.layout import ArenaLayout, FieldSpec, PartitionKind, PartitionSpec
from duplexd.memory.ledger import Lease

LAYOUT = ArenaLayout(
    [
        PartitionSpec("pages", PartitionKind.PAGES, 4, (FieldSpec("k", (2,), outer=(3,)),), page_tokens=2),
        PartitionSpec("state", PartitionKind.SLOTS, 3, (FieldSpec("pcm", (5,), "int16"), FieldSpec("h", (2, 2)))),
    ]
)


def test_start_up_allocates_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    empty = torch.empty

    def counting(*args: object, **kwargs: object) -> torch.Tensor:
        tensor: torch.Tensor = empty(*args, **kwargs)  # type: ignore[call-overload]
        made.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", counting)
    arena = Arena(LAYOUT)
    storages = {arena.field(*name).untyped_storage().data_ptr() for name in LAYOUT.placements}

    assert made == [LAYOUT.total_bytes]
    assert storages == {arena.buffer.untyped_storage().data_ptr()}


def test_fields_are_views_and_do_not_overlap() -> None:
    """Every field is filled with its own number; none of them overwrites another, and all of it lies in the buffer."""
    arena = Arena(LAYOUT)
    for number, name in enumerate(LAYOUT.placements, start=1):
        arena.field(*name).fill_(number)

    for number, name in enumerate(LAYOUT.placements, start=1):
        assert arena.field(*name).unique().tolist() == [number]
    assert arena.field("pages", "k").shape == (3, 8, 2)
    arena.buffer.zero_()
    assert not any(arena.field(*name).any() for name in LAYOUT.placements)


def test_a_lease_is_viewed_without_a_copy() -> None:
    arena = Arena(LAYOUT)
    arena.view(Lease("state", SlotId(1), 1), "h").fill_(7)

    assert arena.field("state", "h")[1].tolist() == [[7, 7], [7, 7]]


def test_filling_with_nan_reaches_all_fields_of_these_slots_alone() -> None:
    arena = Arena(LAYOUT)
    arena.buffer.zero_()
    arena.fill_nan("pages", range(2, 4))
    arena.fill_nan("state", [2])

    keys = arena.field("pages", "k")
    assert keys.isnan().nonzero()[:, 1].unique().tolist() == [2, 3]
    assert keys[:, 2:4].isnan().all()
    assert arena.field("state", "h").isnan().flatten(1).all(1).tolist() == [False, False, True]
    assert arena.field("state", "pcm")[:, 0].tolist() == [0, 0, -32768]


def test_slots_become_an_index() -> None:
    arena = Arena(LAYOUT)

    assert arena.tensor_of(array("q", [5, 0, 7]).tobytes()).tolist() == [5, 0, 7]
    assert arena.tensor_of(b"").shape == (0,)


def test_an_unknown_field_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"pages\.k"):
        Arena(LAYOUT).field("pages", "q")
