"""The executor: runs stages on their lanes and brings their ends back to the engine's thread.

1. One thread launches, polls and takes completions. Worker threads only append to a queue and ring a descriptor.
2. A launch is named by its WorkId and so is its fence: the core can say "after work 812" before 812 was launched.
3. A stage that raises fails that launch and nothing else.
4. What is launched and not yet taken is bounded; beyond the bound `launch` raises LaneFull and changes nothing.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from duplexd import clock
from duplexd.errors import ConfigError, ModelError
from duplexd.ids import FenceId, WorkId
from duplexd.streams.lane import DeviceLost, Finished, Lane, LaneFull
from duplexd.streams.stage import Stage
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos

#: Between two polls of CUDA events while work is in flight.
POLL_NS = NANOS_PER_MS // 5


class Completion(msgspec.Struct, frozen=True):
    """The end of one launch."""

    work: WorkId
    stage: str
    fence: FenceId  #: the same number as `work`; its work has ended, so ledgers may be told that it passed
    results: tuple[Any, ...]  #: one per job, in order; empty when the launch failed
    failure: BaseException | None  #: what the stage raised, or WorkCancelled, or LaneClosed
    launched: Nanos
    started: Nanos  #: equal to `ended` when it never began
    ended: Nanos


class LaunchFigures(msgspec.Struct):
    """Host time of `launch` itself, on the engine's thread (the work is not in it, except on an InlineLane)."""

    count: int = 0
    total_ns: int = 0
    longest_ns: int = 0


class _Launch(msgspec.Struct):
    stage: str
    rows: int
    launched: Nanos


class Executor:
    """Stages and lanes of one engine.

    Args:    stages: by name; lanes: by name, every stage's lane among them.
             media: shared memory, given to every `Stage.run` as it is.
             completions_max: launches running, queued or not yet taken, at once.
    Raises:  ConfigError when a stage is filed under another name or names a lane that does not exist.
    """

    def __init__(
        self,
        stages: Mapping[str, Stage],
        lanes: Mapping[str, Lane],
        media: Any,
        *,
        completions_max: int = 4096,
        now: Callable[[], Nanos] = clock.now,
    ) -> None:
        for name, stage in stages.items():
            if stage.spec.name != name or stage.spec.lane not in lanes:
                raise ConfigError(
                    f"stage {name} calls itself {stage.spec.name} and runs on lane {stage.spec.lane}; "
                    f"the lanes are {', '.join(lanes)}"
                )
        self.stages = dict(stages)
        self.lanes = dict(lanes)
        self._polled = [lane for lane in self.lanes.values() if lane.needs_poll]
        self.figures = LaunchFigures()
        self.completions_max = completions_max
        self._media = media
        self._now = now
        self._launches: dict[FenceId, _Launch] = {}
        self._ended: deque[Finished] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._bell_lock = threading.Lock()
        self._closed = False

    # Starting and ending ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Start the lanes."""
        for lane in self.lanes.values():
            lane.open(self._take_end)

    def load(self, arena: Any, *, within: Nanos) -> None:
        """Load every stage on its own lane, lanes beside each other; returns when all have.

        Raises:  ModelError naming the stage that failed (its cause is chained) or did not end in time.
        """
        deadline = self._now() + within
        loading = {
            self.lanes[stage.spec.lane].submit(partial(stage.load, arena)): name for name, stage in self.stages.items()
        }
        while loading:
            for end in self._collect():
                name = loading.pop(end.fence)
                if end.error is not None:
                    raise ModelError(f"stage {name} did not load: {end.error}") from end.error
            if loading and self._now() >= deadline:
                names = ", ".join(loading.values())
                raise ModelError(f"stages {names} did not load within {within / NANOS_PER_SECOND:.0f} s")
            if loading:
                self.wait(until=Nanos(deadline))

    def close(self, *, within: Nanos) -> tuple[str, ...]:
        """Stop all lanes in bounded time; returns the names of those that are wedged. Closing twice is nothing."""
        if self._closed:
            return ()
        deadline = self._now() + within
        for lane in self.lanes.values():
            lane.close(within=Nanos(0))  # all are told before any is waited for
        wedged = tuple(
            name for name, lane in self.lanes.items() if not lane.close(within=Nanos(max(0, deadline - self._now())))
        )
        with self._bell_lock:
            # A wedged thread may still ring one day; by then this number may be another file.
            self._closed = True
            os.close(self._bell)
        return wedged

    # Launching -------------------------------------------------------------------------------------------------------

    def launch(self, work: WorkId, stage: str, jobs: Sequence[Any], *, waits: Sequence[FenceId] = ()) -> FenceId:
        """Queue one batch on the stage's lane; returns its fence, which is `FenceId(work)`.

        Work ids grow from launch to launch. A wait for a fence that failed is over when it failed: whoever launches
        ahead of a result looks at the result as well.
        Raises:  LaneFull beyond a bound; ConfigError for more jobs than `batch_max`; LedgerError for a bad id or wait.
        """
        launched = self._now()
        fence = FenceId(work)
        runner = self.stages[stage]
        self._check_launch(runner, jobs)
        lane = self.lanes[runner.spec.lane]
        # Before submitting: an inline lane has ended by the time `submit` returns.
        known = self._launches.setdefault(fence, launch := _Launch(stage, len(jobs), launched))
        try:
            lane.submit(partial(runner.run, tuple(jobs), self._media), waits=waits, fence=fence)
        except BaseException:
            if known is launch:
                del self._launches[fence]
            raise
        self._count(self._now() - launched)
        return fence

    def cancel(self, work: WorkId) -> bool:
        """True when the launch had not begun and never will; it completes with WorkCancelled in its lane's order."""
        launch = self._launches.get(FenceId(work))
        return launch is not None and self.lanes[self.stages[launch.stage].spec.lane].cancel(FenceId(work))

    def room(self, stage: str) -> int:
        """Launches this stage's lane takes before it says LaneFull."""
        lane = self.lanes[self.stages[stage].spec.lane]
        return max(0, min(lane.queue_max - lane.queued, self.completions_max - len(self._launches)))

    def _check_launch(self, stage: Stage, jobs: Sequence[Any]) -> None:
        if not 1 <= len(jobs) <= stage.spec.batch_max:
            raise ConfigError(f"stage {stage.spec.name} takes 1 to {stage.spec.batch_max} jobs, not {len(jobs)}")
        if len(self._launches) >= self.completions_max:
            raise LaneFull(f"{len(self._launches)} launches have not been taken, completions_max is the same")

    def _count(self, spent_ns: int) -> None:
        figures = self.figures
        figures.count += 1
        figures.total_ns += spent_ns
        figures.longest_ns = max(figures.longest_ns, spent_ns)

    # Completing ------------------------------------------------------------------------------------------------------

    def completions(self) -> list[Completion]:
        """What has ended since the last call, each lane's in order. Polls the lanes; never waits.

        Raises:  DeviceLost: nothing of this engine can go on.
        """
        return [self._complete(end) for end in self._collect()]

    def fileno(self) -> int:
        """Readable while completions wait to be taken; for a poll loop. Silent about lanes that need a poll."""
        return self._bell

    @property
    def needs_poll(self) -> bool:
        """Some lane with work makes progress only when polled: call `completions` again within `POLL_NS`."""
        return any(lane.queued for lane in self._polled) if self._polled else False

    def wait(self, *, until: Nanos) -> bool:
        """Block until something has ended (True), or until the time comes or a lane wants to be polled (False)."""
        remaining = max(0, until - self._now())
        if self.needs_poll:
            remaining = min(remaining, POLL_NS)
        return bool(self._ended) or bool(select.select([self._bell], [], [], remaining / NANOS_PER_SECOND)[0])

    def _collect(self) -> list[Finished]:
        for lane in self._polled:
            lane.poll()
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)  # before the queue: a ring in between is heard again
        ends = []
        while self._ended:
            end = self._ended.popleft()
            if isinstance(end.error, DeviceLost):
                raise end.error
            ends.append(end)
        return ends

    def _complete(self, end: Finished) -> Completion:
        launch = self._launches.pop(end.fence)
        results = tuple(end.value) if end.error is None else ()
        failure = end.error
        if failure is None and len(results) != launch.rows:
            failure = ModelError(f"stage {launch.stage} gave {len(results)} results for {launch.rows} jobs")
            results = ()
        return Completion(
            work=WorkId(end.fence),
            stage=launch.stage,
            fence=end.fence,
            results=results,
            failure=failure,
            launched=launch.launched,
            started=end.started,
            ended=end.ended,
        )

    def _take_end(self, end: Finished) -> None:
        """The lanes' sink; called on any thread."""
        with self._bell_lock:
            if not self._closed:
                self._ended.append(end)
                os.eventfd_write(self._bell, 1)
