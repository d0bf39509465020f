"""Lanes on the host: order, waits, bounds, faults, cancelling, and an end in bounded time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from duplexd.errors import LedgerError
from duplexd.ids import FenceId
from duplexd.streams.lane import (
    Adversary,
    AdversaryLane,
    Fences,
    Finished,
    HostLane,
    InlineLane,
    Lane,
    LaneClosed,
    LaneError,
    LaneFull,
    Later,
    WorkCancelled,
)
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos

LONG = Nanos(10 * NANOS_PER_SECOND)  # a bound no passing test comes near


class Ends:
    """A sink that can be waited for."""

    def __init__(self) -> None:
        self.list: list[Finished] = []
        self._changed = threading.Condition()

    def __call__(self, end: Finished) -> None:
        with self._changed:
            self.list.append(end)
            self._changed.notify_all()

    def wait(self, count: int) -> list[Finished]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.list) >= count, timeout=10)
            return self.list


@pytest.fixture
def opened() -> Iterator[Callable[..., HostLane]]:
    """Opens host lanes and closes them afterwards."""
    lanes: list[HostLane] = []

    def open_lane(name: str, fences: Fences, ends: Ends, **options: Any) -> HostLane:
        lane = HostLane(name, fences, **options)
        lane.open(ends)
        lanes.append(lane)
        return lane

    yield open_lane
    for lane in lanes:
        lane.close(within=LONG)


def build(kind: str, fences: Fences) -> Lane:
    if kind == "inline":
        return InlineLane("lane", fences)
    if kind == "host":
        return HostLane("lane", fences)
    return AdversaryLane("lane", fences, adversary=Adversary(Random(0), fill=lambda partition, slots: None))


@pytest.mark.parametrize("kind", ["inline", "host", "adversary"])
def test_every_lane_runs_in_order_and_reports_values_and_faults(kind: str) -> None:
    """Work 2 raises; 1 and 3 do not notice. Work 3 leaves its value to be read once its fence has passed."""
    ends, fences = Ends(), Fences()
    lane = build(kind, fences)
    lane.open(ends)
    lane.submit(lambda: "one", fence=FenceId(1))
    lane.submit(lambda: 1 // 0, fence=FenceId(2))
    lane.submit(lambda: Later(lambda: "three"), fence=FenceId(3), waits=[FenceId(1)])
    while lane.needs_poll and lane.queued:
        lane.poll()

    assert [end.value for end in ends.wait(3)] == ["one", None, "three"]
    assert [end.fence for end in ends.list] == [1, 2, 3]
    assert [None, ZeroDivisionError, None] == [end.error and type(end.error) for end in ends.list]
    assert all(end.started <= end.ended for end in ends.list)
    assert lane.close(within=LONG)
    assert fences.all_passed([FenceId(1), FenceId(2), FenceId(3)])


class WatchedFences(Fences):
    """Says when a lane has begun to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Event()

    def wait(self, fences: Sequence[FenceId], *, unless: Callable[[], bool]) -> bool:
        self.waiting.set()
        return super().wait(fences, unless=unless)


def test_work_waits_for_another_lane(opened: Callable[..., HostLane]) -> None:
    """The reader's lane is idle, and its thread has come to the read before the write is let go on."""
    ends, fences, gate, written = Ends(), WatchedFences(), threading.Event(), []
    write, read = opened("write", fences, ends), opened("read", fences, ends)

    def slow_write() -> None:
        gate.wait(10)
        written.append(1)

    fence = write.submit(slow_write)
    read.submit(lambda: list(written), waits=[fence])
    assert fences.waiting.wait(10)
    assert not fences.passed(fence)
    gate.set()

    assert [end.value for end in ends.wait(2)] == [None, [1]]


def test_a_full_lane_refuses_and_drops_nothing(opened: Callable[..., HostLane]) -> None:
    ends, gate = Ends(), threading.Event()
    lane = opened("lane", Fences(), ends, queue_max=3)
    for number in range(1, 4):
        lane.submit(lambda number=number: gate.wait(10) and number)
    with pytest.raises(LaneFull, match="queue_max is 3"):
        lane.submit(lambda: None)
    gate.set()

    assert [end.value for end in ends.wait(3)] == [1, 2, 3]


def test_queued_work_is_cancelled_and_its_fence_passes_in_turn(opened: Callable[..., HostLane]) -> None:
    """Advance: what runs is retired, what has not been launched never is."""
    ends, fences, gate, started, ran = Ends(), Fences(), threading.Event(), threading.Event(), []
    lane = opened("lane", fences, ends)
    running = lane.submit(lambda: started.set() or gate.wait(10))
    queued = lane.submit(lambda: ran.append("cancelled"))
    assert started.wait(10)
    assert not lane.cancel(running)
    assert lane.cancel(queued)
    assert not fences.passed(queued)
    gate.set()

    assert isinstance(ends.wait(2)[1].error, WorkCancelled)
    assert ran == []


def test_work_is_cancelled_while_it_waits_for_another_lane(opened: Callable[..., HostLane]) -> None:
    ends, fences, gate = Ends(), Fences(), threading.Event()
    other, lane = opened("other", fences, Ends()), opened("lane", fences, ends)
    blocked = lane.submit(lambda: None, waits=[other.submit(lambda: gate.wait(10))])
    after = lane.submit(lambda: "after")
    lane.cancel(blocked)

    assert [end.value for end in ends.wait(2)] == [None, "after"]
    assert after == ends.list[1].fence
    gate.set()


def test_a_wedged_lane_is_reported_and_its_fence_never_passes() -> None:
    """Whatever the wedged work may still write stays retired; the lane behind it is told that it closed."""
    fences, ends, started, gate = Fences(), Ends(), threading.Event(), threading.Event()
    lane, behind = HostLane("wedged", fences), HostLane("behind", fences)
    lane.open(ends)
    behind.open(ends)
    wedged = lane.submit(lambda: started.set() or gate.wait(30))
    behind.submit(lambda: None, waits=[wedged])
    assert started.wait(10)
    assert lane.busy_since is not None

    assert not lane.close(within=Nanos(NANOS_PER_MS))
    assert behind.close(within=LONG)
    assert [LaneClosed] == [type(end.error) for end in ends.list]
    assert not fences.passed(wedged)
    gate.set()
    assert lane.close(within=LONG)


def test_a_closed_lane_takes_nothing() -> None:
    lane = HostLane("lane", Fences())
    with pytest.raises(LaneClosed):
        lane.submit(lambda: None)
    lane.open(Ends())
    lane.close(within=LONG)

    with pytest.raises(LaneClosed):
        lane.submit(lambda: None)


def test_a_lane_opens_once() -> None:
    lane = InlineLane("lane", Fences())
    lane.open(Ends())

    with pytest.raises(LaneError, match="already open"):
        lane.open(Ends())


def test_threads_return_to_baseline() -> None:
    before = threading.active_count()
    for _ in range(5):
        lane = HostLane("lane", Fences())
        lane.open(Ends())
        lane.submit(lambda: None)
        assert lane.close(within=LONG)

    assert before == threading.active_count()


def test_an_inline_lane_refuses_to_wait() -> None:
    fences, ends = Fences(), Ends()
    enemy = Adversary(Random(0), fill=lambda partition, slots: None)
    late, lane = AdversaryLane("late", fences, adversary=enemy), InlineLane("lane", fences)
    late.open(ends)
    lane.open(ends)
    fence = late.submit(lambda: None)

    with pytest.raises(LedgerError, match="cannot wait"):
        lane.submit(lambda: None, waits=[fence])


def test_a_lane_is_told_apart_in_a_list_of_threads(opened: Callable[..., HostLane]) -> None:
    """Linux keeps 15 characters; benches read a lane's processor time by this name."""
    ends = Ends()
    opened("face", Fences(), ends).submit(
        lambda: Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip()
    )

    assert [end.value for end in ends.wait(1)] == ["lane-face"]


def test_a_lower_priority_lowers_the_threads_share(opened: Callable[..., HostLane]) -> None:
    ends = Ends()
    usual, background = opened("usual", Fences(), ends), opened("background", Fences(), ends, priority=-1)
    for lane in (usual, background):
        lane.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    nice = {end.value for end in ends.wait(2)}

    assert len(nice) == 2 or 19 in nice
