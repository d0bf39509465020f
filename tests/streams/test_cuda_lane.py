"""The CUDA lane itself, on a device of paper: streams list what they were given, events are set by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from toys import stage_spec

from duplexd.ids import FenceId, WorkId
from duplexd.streams.executor import Executor
from duplexd.streams.lane import (
    CudaLane,
    DeviceLost,
    Fences,
    Finished,
    HostLane,
    InlineLane,
    LaneClosed,
    LaneFull,
    Later,
    StreamLane,
    WorkCancelled,
)
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos


class PaperEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.timed = enable_timing
        self.done = False

    def record(self, stream: PaperStream) -> None:
        stream.given.append(self)

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, end: PaperEvent) -> float:
        assert self.timed
        assert end.done
        return 2.5


class PaperStream:
    def __init__(self, device: str, priority: int) -> None:
        self.priority = priority
        self.given: list[Any] = []
        self.fault = ""

    def wait_event(self, event: PaperEvent) -> None:
        self.given.append(("wait", event))

    def synchronize(self) -> None:
        self.given.append("idle")
        if self.fault:
            raise RuntimeError(self.fault)


@contextmanager
def paper_stream(stream: PaperStream) -> Iterator[None]:
    yield


class Paper:
    """Two CUDA lanes whose events the test sets."""

    def __init__(self) -> None:
        self.fences = Fences()
        self.ends: list[Finished] = []
        self.one, self.two = self.lane("one"), self.lane("two", priority=2)

    def lane(self, name: str, **options: Any) -> CudaLane:
        lane = CudaLane(name, self.fences, now=lambda: Nanos(10 * NANOS_PER_MS), **options)
        lane.open(self.ends.append)
        return lane

    def finish(self, fence: FenceId) -> None:
        self.fences.events[fence].done = True


@pytest.fixture
def on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", PaperEvent)
    monkeypatch.setattr(torch.cuda, "Stream", PaperStream)
    monkeypatch.setattr(torch.cuda, "stream", paper_stream)


@pytest.fixture
def paper(on_paper: None) -> Paper:
    return Paper()


class Toy:
    spec = stage_spec("toy", "voice")

    def load(self, arena: Any) -> None:
        pass

    def run(self, jobs: Sequence[Any], media: Any) -> list[Any]:
        return list(jobs)


class Threaded:
    """A lane with a thread and a stream, and a lane of the host that waits for it."""

    def __init__(self) -> None:
        self.fences = Fences()
        self.ends: list[Finished] = []
        self.lane = StreamLane("voice", self.fences, priority=1)
        self.host = HostLane("host", self.fences)
        for lane in (self.lane, self.host):
            lane.open(self.ends.append)

    def close(self) -> None:
        for lane in (self.lane, self.host):
            assert lane.close(within=Nanos(5 * NANOS_PER_SECOND))

    def run(self, *works: Callable[[], Any]) -> list[Finished]:
        """Everything on the lane, and then the host's turn; the lane's ends, in order."""
        fences = [self.lane.submit(work) for work in works]
        after = self.host.submit(lambda: None, waits=fences)
        assert self.fences.wait([after], unless=lambda: False)
        return [end for end in self.ends if end.fence in fences]


@pytest.fixture
def threaded(on_paper: None) -> Iterator[Threaded]:
    made = Threaded()
    yield made
    made.close()


def test_a_greater_priority_is_a_lower_number_for_cuda(paper: Paper) -> None:
    assert (paper.one.stream.priority, paper.two.stream.priority) == (0, -2)


def test_work_ends_when_its_event_passes_and_lasts_as_long_as_the_device_says(paper: Paper) -> None:
    fence = paper.one.submit(lambda: Later(lambda: "read"))
    paper.one.poll()
    assert (paper.ends, paper.one.queued, paper.one.busy_since) == ([], 1, 10 * NANOS_PER_MS)
    paper.finish(fence)
    paper.one.poll()

    (end,) = paper.ends
    assert (end.value, end.ended, end.started) == ("read", 10 * NANOS_PER_MS, 7.5 * NANOS_PER_MS)
    assert paper.fences.passed(fence)
    assert paper.fences.events == {}


def test_a_wait_between_streams_is_enqueued_before_the_work(paper: Paper) -> None:
    """Nothing on the host waits: the second stream is told to wait for the first one's event, and then given work."""
    first = paper.one.submit(lambda: None)
    ran: list[int] = []
    paper.two.submit(lambda: ran.append(len(paper.two.stream.given)), waits=[first])

    assert paper.two.stream.given[0] == ("wait", paper.fences.events[first])
    assert ran == [2], "after the wait and the first timestamp, before the last"


def test_work_that_waits_for_a_host_lane_is_held_with_all_behind_it(paper: Paper) -> None:
    host = paper.fences.issue("host", None)
    held = paper.one.submit(lambda: "held", waits=[host])
    behind = paper.one.submit(lambda: "behind")
    paper.one.poll()
    assert paper.one.stream.given == []
    paper.fences.mark_passed(host)
    paper.one.poll()
    paper.finish(behind)
    paper.one.poll()
    assert paper.ends == [], "the oldest has not passed"
    paper.finish(held)
    paper.one.poll()

    assert [end.value for end in paper.ends] == ["held", "behind"]


def test_work_that_raises_ends_behind_the_kernels_it_enqueued(paper: Paper) -> None:
    fence = paper.one.submit(lambda: 1 // 0)
    paper.one.poll()
    assert not paper.fences.passed(fence)
    paper.finish(fence)
    paper.one.poll()

    assert isinstance(paper.ends[0].error, ZeroDivisionError)


def test_a_result_that_cannot_be_read_fails_its_work_only(paper: Paper) -> None:
    fences = [paper.one.submit(lambda: Later(lambda: 1 // 0)), paper.one.submit(lambda: "next")]
    for fence in fences:
        paper.finish(fence)
    paper.one.poll()

    assert [type(end.error) for end in paper.ends] == [ZeroDivisionError, type(None)]


def test_held_work_can_be_cancelled_and_enqueued_work_cannot(paper: Paper) -> None:
    enqueued = paper.one.submit(lambda: "enqueued")
    held = paper.one.submit(lambda: "held", waits=[paper.fences.issue("host", None)])
    assert not paper.one.cancel(enqueued)
    assert paper.one.cancel(held)
    paper.one.poll()
    assert not paper.fences.passed(held), "it passes in its turn"
    paper.finish(enqueued)
    paper.one.poll()

    assert isinstance(paper.ends[1].error, WorkCancelled)
    assert paper.fences.passed(held)


def test_a_stream_takes_a_bounded_amount_of_work(paper: Paper) -> None:
    lane = paper.lane("small", queue_max=2)
    lane.submit(lambda: None)
    lane.submit(lambda: None)

    with pytest.raises(LaneFull):
        lane.submit(lambda: None)


def test_a_stream_that_does_not_end_is_wedged(paper: Paper) -> None:
    fence = paper.one.submit(lambda: None)
    assert not paper.one.close(within=Nanos(0))
    assert not paper.fences.passed(fence)
    paper.finish(fence)

    assert paper.one.close(within=Nanos(NANOS_PER_SECOND))
    with pytest.raises(LaneClosed):
        paper.one.submit(lambda: None)


def test_inline_work_cannot_wait_for_a_stream_but_a_stream_for_inline_work(paper: Paper) -> None:
    inline = InlineLane("inline", paper.fences)
    inline.open(paper.ends.append)
    fence = paper.one.submit(lambda: "after", waits=[inline.submit(lambda: None)])
    paper.finish(fence)
    paper.one.poll()

    assert paper.ends[1].value == "after"


# A thread with a stream -----------------------------------------------------------------------------------------------


def test_a_thread_waits_for_its_stream_before_it_reads_and_before_its_fence_passes(threaded: Threaded) -> None:
    stream = threaded.lane.stream
    (end,) = threaded.run(lambda: Later(lambda: list(stream.given)))

    assert end.value == ["idle"], "the figure was read when the stream was idle"
    assert stream.priority == -1


def test_work_that_raises_is_waited_for_and_fails_alone(threaded: Threaded) -> None:
    def broken() -> None:
        raise ValueError("a bad row")

    bad, good = threaded.run(broken, lambda: "next")

    assert isinstance(bad.error, ValueError)
    assert threaded.lane.stream.given == ["idle", "idle"]
    assert (good.value, good.error) == ("next", None)


def test_a_fault_of_the_device_is_not_a_fault_of_the_row(threaded: Threaded) -> None:
    threaded.lane.stream.fault = "CUDA error: an illegal memory access was encountered"
    (end,) = threaded.run(lambda: "done")

    assert isinstance(end.error, DeviceLost)
    assert "illegal memory access" in str(end.error)


def test_a_lost_device_is_raised_on_the_engines_thread(on_paper: None) -> None:
    lane = StreamLane("voice", Fences())
    executor = Executor({"toy": Toy()}, {"voice": lane}, None)
    executor.open()
    lane.stream.fault = "CUDA error: misaligned address"
    executor.launch(WorkId(1), "toy", [1])
    assert lane.fences.wait([FenceId(1)], unless=lambda: False)
    try:
        with pytest.raises(DeviceLost, match="lane voice: CUDA error: misaligned address"):
            executor.completions()
    finally:
        assert executor.close(within=Nanos(5 * NANOS_PER_SECOND)) == ()
