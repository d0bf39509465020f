"""The executor: launches by name, completions on one thread, faults that stay where they are."""

from __future__ import annotations

import select
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from duplexd import clock
from duplexd.errors import ConfigError, LedgerError, ModelError
from duplexd.ids import FenceId, WorkId
from duplexd.streams.executor import Completion, Executor
from duplexd.streams.lane import Fences, HostLane, InlineLane, Lane, LaneFull, WorkCancelled
from duplexd.streams.stage import CostModel, PayloadKind, Role, StageSpec
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos

LONG = Nanos(10 * NANOS_PER_SECOND)


class EchoStage:
    """Gives its jobs back; a job that can be called is called."""

    def __init__(self, name: str = "echo", lane: str = "lane", batch_max: int = 4) -> None:
        self.spec = StageSpec(
            name, Role.THINK, lane, PayloadKind.TOKEN, PayloadKind.TOKEN, CostModel(), batch_max=batch_max
        )
        self.loaded_on = ""
        self.fault: Exception | None = None

    def load(self, arena: Any) -> None:
        if self.fault:
            raise self.fault
        self.loaded_on = threading.current_thread().name

    def run(self, jobs: Sequence[Any], media: Any) -> list[Any]:
        if jobs[0] == "short":
            return []
        return [job() if callable(job) else (job, media) for job in jobs]


def executor_of(lane: Lane, *stages: EchoStage, **options: Any) -> Executor:
    built = Executor({stage.spec.name: stage for stage in stages or [EchoStage()]}, {"lane": lane}, "media", **options)
    built.open()
    return built


def take(executor: Executor, count: int) -> list[Completion]:
    taken = executor.completions()
    deadline = Nanos(clock.now() + LONG)
    while len(taken) < count:
        assert executor.wait(until=deadline)
        taken += executor.completions()
    return taken


def host() -> HostLane:
    return HostLane("lane", Fences(), queue_max=4)


def test_results_come_back_under_the_name_of_their_work() -> None:
    executor = executor_of(host())
    fence = executor.launch(WorkId(812), "echo", ["a", "b"])

    (completion,) = take(executor, 1)
    assert (fence, completion.work, completion.fence) == (812, 812, 812)
    assert completion.results == (("a", "media"), ("b", "media"))
    assert completion.failure is None
    assert completion.launched <= completion.started <= completion.ended
    assert executor.close(within=LONG) == ()


def test_a_stage_that_raises_fails_that_launch_only() -> None:
    executor = executor_of(host())
    executor.launch(WorkId(1), "echo", ["a"])
    executor.launch(WorkId(2), "echo", [lambda: 1 // 0])
    executor.launch(WorkId(3), "echo", ["c"], waits=[FenceId(2)])

    one, two, three = take(executor, 3)
    assert isinstance(two.failure, ZeroDivisionError)
    assert (one.failure, two.results, three.results) == (None, (), (("c", "media"),))
    executor.close(within=LONG)


def test_a_stage_that_answers_for_too_few_jobs_has_failed() -> None:
    executor = executor_of(InlineLane("lane", Fences()))
    executor.launch(WorkId(1), "echo", ["short", "b"])

    (completion,) = executor.completions()
    assert isinstance(completion.failure, ModelError)
    assert str(completion.failure) == "stage echo gave 0 results for 2 jobs"
    executor.close(within=LONG)


def test_a_poll_loop_is_woken_by_a_completion() -> None:
    executor, gate = executor_of(host()), threading.Event()
    executor.launch(WorkId(1), "echo", [lambda: gate.wait(10)])
    assert select.select([executor], [], [], 0)[0] == []
    gate.set()

    assert select.select([executor], [], [], 10)[0] == [executor]
    assert len(executor.completions()) == 1
    assert select.select([executor], [], [], 0)[0] == []
    executor.close(within=LONG)


def test_stages_load_on_their_own_lane() -> None:
    stage = EchoStage()
    executor = executor_of(host(), stage)
    executor.load(None, within=LONG)

    assert stage.loaded_on == "lane-lane"
    assert executor.completions() == []
    executor.close(within=LONG)


def test_a_stage_that_does_not_load_is_named() -> None:
    stage = EchoStage("broken")
    stage.fault = OSError("no such file")
    executor = executor_of(host(), EchoStage(), stage)
    with pytest.raises(ModelError, match="stage broken did not load: no such file") as refused:
        executor.load(None, within=LONG)

    assert isinstance(refused.value.__cause__, OSError)
    executor.close(within=LONG)


def test_a_stage_that_loads_for_ever_is_named() -> None:
    """The clock jumps past the deadline while the stage hangs."""
    gate = threading.Event()
    times = iter(range(0, 10**15, 3 * NANOS_PER_SECOND))
    stage = EchoStage()
    stage.load = lambda arena: gate.wait(30)  # type: ignore[method-assign,assignment]
    executor = Executor({"echo": stage}, {"lane": host()}, None, now=lambda: Nanos(next(times)))
    executor.open()
    with pytest.raises(ModelError, match="stages echo did not load within 2 s"):
        executor.load(None, within=Nanos(2 * NANOS_PER_SECOND))

    gate.set()
    executor.close(within=LONG)


def test_a_refused_launch_leaves_nothing_behind() -> None:
    executor, gate = executor_of(host()), threading.Event()
    for number in range(1, 5):
        executor.launch(WorkId(number), "echo", [lambda: gate.wait(10)])
    assert executor.room("echo") == 0
    with pytest.raises(LaneFull):
        executor.launch(WorkId(5), "echo", ["late"])
    gate.set()
    assert len(take(executor, 4)) == 4

    executor.launch(WorkId(5), "echo", ["now"])
    assert take(executor, 1)[0].work == 5
    executor.close(within=LONG)


def test_completions_nobody_takes_stop_the_launches() -> None:
    executor = executor_of(InlineLane("lane", Fences()), completions_max=2)
    executor.launch(WorkId(1), "echo", ["a"])
    executor.launch(WorkId(2), "echo", ["a"])
    with pytest.raises(LaneFull, match="completions_max"):
        executor.launch(WorkId(3), "echo", ["a"])
    executor.completions()

    assert executor.launch(WorkId(3), "echo", ["a"]) == 3
    executor.close(within=LONG)


@pytest.mark.parametrize("work", [7, 6, 0])
def test_work_ids_only_grow(work: int) -> None:
    """A name used again must not touch the launch that has it."""
    executor = executor_of(InlineLane("lane", Fences()))
    executor.launch(WorkId(7), "echo", ["a"])
    with pytest.raises(LedgerError):
        executor.launch(WorkId(work), "echo", ["b"])

    assert [(end.work, end.results[0]) for end in executor.completions()] == [(7, ("a", "media"))]
    executor.close(within=LONG)


def test_cancelled_work_completes_as_cancelled() -> None:
    executor, gate = executor_of(host()), threading.Event()
    executor.launch(WorkId(1), "echo", [lambda: gate.wait(10)])
    executor.launch(WorkId(2), "echo", ["never"])
    assert executor.cancel(WorkId(2))
    gate.set()

    assert isinstance(take(executor, 2)[1].failure, WorkCancelled)
    assert not executor.cancel(WorkId(2))
    executor.close(within=LONG)


def test_a_wedged_lane_is_named_and_rings_no_closed_bell() -> None:
    executor, gate, started = executor_of(lane := host()), threading.Event(), threading.Event()
    executor.launch(WorkId(1), "echo", [lambda: started.set() or gate.wait(30)])
    assert started.wait(10)

    assert executor.close(within=Nanos(NANOS_PER_MS)) == ("lane",)
    assert executor.close(within=Nanos(NANOS_PER_MS)) == ()
    gate.set()
    assert lane.close(within=LONG)
    assert not executor._ended


@pytest.mark.parametrize("jobs", [[], ["a"] * 5], ids=["none", "too many"])
def test_a_batch_has_bounds(jobs: list[str]) -> None:
    executor = executor_of(InlineLane("lane", Fences()))
    with pytest.raises(ConfigError, match="takes 1 to 4 jobs"):
        executor.launch(WorkId(1), "echo", jobs)

    executor.close(within=LONG)


def test_a_stage_without_its_lane_is_refused() -> None:
    with pytest.raises(ConfigError, match="runs on lane gpu; the lanes are lane"):
        Executor({"echo": EchoStage(lane="gpu")}, {"lane": host()}, None)


def test_launches_are_counted() -> None:
    executor = executor_of(InlineLane("lane", Fences()), now=iter(map(Nanos, range(100))).__next__)
    for number in range(1, 4):
        executor.launch(WorkId(number), "echo", ["a"])

    assert (executor.figures.count, executor.figures.total_ns, executor.figures.longest_ns) == (3, 3, 1)
    executor.close(within=LONG)
