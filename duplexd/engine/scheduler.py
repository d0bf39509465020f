"""Puts offers of all sessions in one order a lane and launches the first on every idle lane."""

from __future__ import annotations

from collections.abc import Iterable

from duplexd.engine.policy import SchedulingPolicy
from duplexd.engine.work import Work
from duplexd.ids import SessionId, WorkId
from duplexd.streams.stage import StageSpec
from duplexd.units import Nanos


class Scheduler:
    """One piece of work a lane at a time: what has not been launched can still be taken back."""

    def __init__(self, stages: dict[str, StageSpec], policy: SchedulingPolicy) -> None:
        self._lane_of = {name: spec.lane for name, spec in stages.items()}
        self._policy = policy
        self._offers: dict[str, dict[tuple[SessionId, str], Work]] = {lane: {} for lane in self._lane_of.values()}
        self._running: dict[WorkId, str] = {}
        self._busy: set[str] = set()

    def offer(self, session: SessionId, works: Iterable[Work]) -> None:
        """Replace everything a session offers."""
        for offers in self._offers.values():
            for key in [key for key in offers if key[0] == session]:
                del offers[key]
        for work in works:
            self._offers[self._lane_of[work.stage]][session, work.stage + work.need.name] = work

    def idle_lanes(self) -> list[str]:
        return [lane for lane in self._offers if lane not in self._busy and self._offers[lane]]

    def ranked(self, lane: str, now: Nanos, pool_share: float) -> list[Work]:
        """Offers of one lane, most urgent first."""
        return sorted(self._offers[lane].values(), key=lambda work: self._policy.rank(work, now, pool_share))

    def begin(self, work: WorkId, stage: str) -> None:
        lane = self._lane_of[stage]
        self._running[work] = lane
        self._busy.add(lane)

    def end(self, work: WorkId) -> str:
        """The lane that is idle now."""
        lane = self._running.pop(work)
        self._busy.discard(lane)
        return lane

    @property
    def running_count(self) -> int:
        return len(self._running)
