"""Windows: what is read, in which order, at which positions."""

from __future__ import annotations

from array import array

import pytest

from duplexd.errors import LedgerError
from duplexd.ids import ChunkId, Epoch, SessionId, SlotId
from duplexd.memory.classes import CacheClass
from duplexd.memory.ledger import Held, Lease
from duplexd.memory.window import place_window, positions, select_window


def held(slot: int, label: CacheClass, epoch: int = 0) -> Held:
    return Held(Lease("window", SlotId(slot), 1), SessionId(1), label, ChunkId(slot), Epoch(epoch), "generate")


def slots(window: list[Held]) -> list[int]:
    return [entry.lease.slot for entry in window]


def test_a_window_reads_anchors_then_the_newest_chunks() -> None:
    session = [held(0, CacheClass.ANCHOR), *(held(slot, CacheClass.RECENT) for slot in range(1, 5))]

    assert slots(select_window(session, epoch=Epoch(0), recent_max=2)) == [0, 3, 4]


def test_what_was_compressed_is_read_between_anchors_and_recent() -> None:
    """The long-term slot takes none of the places of the recent ones, and none of the anchors'."""
    labels = [CacheClass.ANCHOR, CacheClass.RECENT, CacheClass.RECENT, CacheClass.LONG_TERM, CacheClass.RECENT]
    session = [held(slot, label) for slot, label in enumerate(labels)]

    assert slots(select_window(session, epoch=Epoch(0), recent_max=2)) == [0, 3, 2, 4]


def test_no_slot_of_a_dead_epoch_is_read_unless_it_was_heard() -> None:
    """Epoch 3 began: the heard chunk of epoch 2 stays in view, the unheard one does not."""
    session = [
        held(0, CacheClass.RECENT, epoch=2),
        held(1, CacheClass.CURRENT, epoch=2),
        held(2, CacheClass.CURRENT, epoch=3),
    ]

    assert slots(select_window(session, epoch=Epoch(3), recent_max=5)) == [0, 2]


def test_positions_do_not_grow_with_the_session() -> None:
    """A thousand chunks later the anchor still stands at 0 and the newest token at the window's length."""
    ends = []
    for age in range(1, 1000):
        session = [held(0, CacheClass.ANCHOR), *(held(slot, CacheClass.RECENT) for slot in range(age, age + 3))]
        window = place_window(select_window(session, epoch=Epoch(0), recent_max=3), [4, 4, 4, 2])
        ends.append((window.starts, window.length))

    assert set(ends) == {((0, 4, 8, 12), 14)}


def test_positions_are_consecutive_int32() -> None:
    assert array("i", range(14)).tobytes() == positions(14)


def test_an_anchor_behind_another_class_is_refused() -> None:
    with pytest.raises(LedgerError, match="anchor"):
        place_window([held(0, CacheClass.RECENT), held(1, CacheClass.ANCHOR)], [1, 1])


def test_an_empty_window_has_no_length() -> None:
    assert place_window([], []).length == 0
