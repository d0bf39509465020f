"""The world of load: virtual time, devices that lanes share, people behind networks, around the core that serves all.

1. Same seed, same run: time jumps from event to event, ties are broken by a serial number, and every draw comes from a
   generator named by the seed and by what it is for. Nothing is ordered by a hash.
2. A stage runs when it is launched, because what it costs depends on what it makes; its results come when its device
   has done the work.
3. People do what `people` drew for them. What the engine does changes when they do it, never what.
4. The front end in between is `Link`: it holds, flushes, reports and frees slots as `media/line.py` does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import msgspec

from duplexd.engine.virtual import VirtualTime
from duplexd.engine.work import Launch, StageFailed, StageFinished
from duplexd.errors import LedgerError
from duplexd.ids import SessionId, WorkId
from duplexd.messages import (
    AdmitSession,
    AdvanceEpoch,
    EndSession,
    FreeSlots,
    InputRefusal,
    LatencyMeasured,
    Metrics,
    PublishChunk,
    RefuseSession,
    ResponseChanged,
    ResumePlayback,
    SlotsFreed,
)
from duplexd.simulation.device import Device
from duplexd.simulation.link import Link, Network
from duplexd.simulation.model import SPOKEN, Size
from duplexd.simulation.people import Visit
from duplexd.simulation.records import Guess, TurnRecord
from duplexd.streams.stage import RenderJob, SimulatedCost, Stage, TalkJob, TalkResult, ThinkJob, ThinkResult
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos, Ticks

#: The front end copies a chunk out at once. Its slots come back in company, so that a thousand chunks are not a
#: thousand events; there are far more slots than wait here.
FREE_WITHIN = Nanos(200 * NANOS_PER_MS)


class Placed(msgspec.Struct, frozen=True):
    """A stage with its cost."""

    stage: Stage
    cost: SimulatedCost
    size: Size


class Flight(msgspec.Struct, frozen=True):
    launch: Launch
    results: tuple[Any, ...]
    reason: str  #: why it fails, '' when it does not
    started: Nanos
    tallies: tuple[TurnRecord | Guess | None, ...]  #: where what each job makes is counted


class LoadWorld:
    """Runs a core against people in virtual time.

    Args:    placed: stages by name, loaded. fails: a reason for a launch to fail, '' for none.
             word, spoken_word: how long one word of a reply, and of a person, is.
             patience: how long a person waits for the first sound before they give a turn up.
             until: the world ends then, whatever goes on; people begin no turn after `turns_until`.
    """

    def __init__(
        self,
        *,
        placed: Mapping[str, Placed],
        capacities: Mapping[str, float],
        seed: int,
        turns_until: Nanos,
        until: Nanos,
        network: Network,
        voice: bool,
        word: Ticks,
        spoken_word: Ticks,
        patience: Nanos = Nanos(60 * NANOS_PER_SECOND),
        failure: float = 0.0,
    ) -> None:
        self.turns: list[TurnRecord] = []
        self.guesses: list[Guess] = []
        self.away: Callable[[SessionId], bool] = lambda session: False  #: some of its memory is not in the arena
        self.metrics: dict[str, float] = {}
        self.refusals = 0
        self.events = 0
        self.launches: dict[str, list[int]] = {name: [0, 0] for name in placed}  #: launches, rows
        self.links: dict[SessionId, Link] = {}
        self.watch: Callable[[Launch, Nanos], None] | None = None  #: told of every launch, for tests
        self.devices = {cost.device: Device(cost.device) for cost in (one.cost for one in placed.values())}
        for name, capacity in capacities.items():
            self.devices[name].capacity = capacity
        self.seed = seed
        self.turns_until = turns_until
        self.network = network
        self.voice = voice  #: people speak; False: they type
        self.word = word  #: playback length of one word of a reply
        self.spoken_word = spoken_word  #: of one word of a person
        self.overheard = 0  #: interruptions taken for false alarms
        self.patience = patience
        self._placed = placed
        self._costs = {name: Random(f"{seed}/cost/{name}") for name in placed}
        self._faults = Random(f"{seed}/faults")
        self._failure = failure
        self._flights: dict[WorkId, Flight] = {}
        self._due: dict[str, Nanos] = {}  #: what each device's pending wake-up is for
        self._until = until
        self._time = VirtualTime()
        self._ready: list[Any] = []  #: further events of the same moment
        self._in_slots = itertools.count()
        self._freed: list[int] = []
        self._sessions = itertools.count(1)
        self._last_work = 0
        self._takers: dict[type, Callable[[Any, Nanos], None]] = {
            Launch: self._launch,
            PublishChunk: self._publish,
            Metrics: self._measure,
            RefuseSession: self._refuse,
            **dict.fromkeys(
                (
                    AdmitSession,
                    AdvanceEpoch,
                    ResumePlayback,
                    ResponseChanged,
                    LatencyMeasured,
                    InputRefusal,
                    EndSession,
                ),
                self._deliver,
            ),
            FreeSlots: _ignore,
        }

    # The World contract ---------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self.now() >= self._until or (self._time.next_at() is None and not self._ready)

    def now(self) -> Nanos:
        return self._time.now

    def wait(self, until: Nanos | None) -> Any | None:
        """The next event in virtual time; None when the timer comes first."""
        if self._ready:
            return self._ready.pop(0)
        limit = self._until if until is None else min(until, self._until)
        while (at := self._time.next_at()) is not None and at <= limit:
            event = self._time.step()
            if event is not None:
                self.events += 1
                return event
        if until is not None or self._time.next_at() is not None:
            self._time.pass_to(limit)
        return None

    def execute(self, command: Any, now: Nanos) -> None:
        taker = self._takers.get(type(command))
        if taker is not None:
            taker(command, now)

    def at(self, when: int, happen: Callable[[], Any]) -> None:
        """`happen` is called at `when`; what it returns, if anything, is the core's next event."""
        self._time.at(when, happen)

    def tell(self, when: int, fact: Any) -> None:
        """The core learns `fact` at `when`."""
        self.at(when, lambda: fact)

    # Work -----------------------------------------------------------------------------------------------------------

    def _launch(self, launch: Launch, now: Nanos) -> None:
        if launch.work <= self._last_work:
            raise LedgerError(f"work {launch.work} was launched after work {self._last_work}; names only grow")
        self._last_work = launch.work
        if self.watch is not None:
            self.watch(launch, now)
        placed = self._placed[launch.stage]
        reason = self._fault(launch)
        results = () if reason else tuple(placed.stage.run(launch.jobs, self))
        units, steps = placed.size(launch.jobs, results)
        alone = placed.cost.draw_us(self._costs[launch.stage], rows=len(launch.jobs), units=units, steps=steps)
        tallies = tuple(self._tally_of(job) for job in launch.jobs)
        self._flights[launch.work] = Flight(launch, results, reason, now, tallies)
        counts = self.launches[launch.stage]
        counts[0] += 1
        counts[1] += len(launch.jobs)
        device = self.devices[placed.cost.device]
        device.begin(launch.work, share=placed.cost.share, alone=Nanos(alone * 1000), now=now)
        self._wake(device)

    def _fault(self, launch: Launch) -> str:
        if self._failure and isinstance(launch.jobs[0], ThinkJob | TalkJob | RenderJob):
            return "a simulated fault" if self._faults.random() < self._failure else ""
        return ""

    def _tally_of(self, job: Any) -> TurnRecord | Guess | None:
        link = self.links.get(job.session)
        return link.made_for(job) if link is not None else None

    def _wake(self, device: Device) -> None:
        when = device.next_end()
        if when is not None and self._due.get(device.name) != when:
            self._due[device.name] = when
            self.at(when, lambda: self._done(device, when))

    def _done(self, device: Device, due: Nanos) -> Any | None:
        if self._due.get(device.name) != due:
            return None  # A launch that began meanwhile has moved the end.
        del self._due[device.name]
        facts = [self._finish(self._flights.pop(work)) for work in device.ended(self.now())]
        self._wake(device)
        self._ready.extend(facts[1:])
        return facts[0] if facts else None

    def _finish(self, flight: Flight) -> StageFinished | StageFailed:
        if flight.reason:
            return StageFailed(flight.launch.work, flight.reason)
        for job, result, tally in zip(flight.launch.jobs, flight.results, flight.tallies, strict=True):
            if tally is not None:
                _credit(tally, job, result)
        return StageFinished(flight.launch.work, flight.results, flight.started, self.now())

    def words(self, session: SessionId, *, start: int, samples: int) -> str:
        """What the ears understand: the person's words that end inside the window."""
        return self.links[session].words(start, start + samples) if session in self.links else ""

    # News -----------------------------------------------------------------------------------------------------------

    def _publish(self, news: PublishChunk, now: Nanos) -> None:
        self._free(news.slot)
        link = self.links.get(news.session)
        if link is not None:
            link.publish(news, now)

    def _deliver(self, news: Any, now: Nanos) -> None:
        link = self.links.get(news.session)
        if link is not None:
            link.take(news, now)

    def _refuse(self, news: RefuseSession, now: Nanos) -> None:
        self.refusals += 1
        self._deliver(news, now)

    def _measure(self, news: Metrics, now: Nanos) -> None:
        self.metrics = news.values

    def _free(self, slot: int) -> None:
        self._freed.append(slot)
        if len(self._freed) == 1:
            self.at(self.now() + FREE_WITHIN, self._give_slots_back)

    def _give_slots_back(self) -> SlotsFreed:
        freed, self._freed = self._freed, []
        return SlotsFreed(tuple(freed))

    def input_slot(self) -> int:
        """Input has no bytes here, so its slots have no bound: numbers do."""
        return next(self._in_slots)

    # People ---------------------------------------------------------------------------------------------------------

    def visit(self, visit: Visit, *, at: Nanos, left: Callable[[], None]) -> None:
        """Somebody comes; `left` is called when they have gone."""
        session = SessionId(next(self._sessions))
        link = Link(self, session, visit, left=left)
        self.links[session] = link
        self.at(at, link.come)

    def forget(self, session: SessionId) -> None:
        self.links.pop(session, None)


def _credit(tally: TurnRecord | Guess, job: Any, result: Any) -> None:
    """Count what was made: for a turn, for a guess that has become one, or for a guess."""
    if isinstance(tally, Guess) and tally.turn is not None:
        tally = tally.turn
    if isinstance(result, ThinkResult):
        tally.thought_words += sum(token >= SPOKEN for token in result.tokens)
    elif isinstance(result, TalkResult):
        tally.talked = Ticks(tally.talked + result.length)
    elif isinstance(job, RenderJob):
        tally.rendered = Ticks(tally.rendered + job.length)


def _ignore(command: Any, now: Nanos) -> None:
    """Input slots have no bytes here."""


def place(
    stages: Mapping[str, Stage], costs: Mapping[str, SimulatedCost], sizes: Mapping[Any, Size]
) -> dict[str, Placed]:
    """Stages with their costs and what the costs count."""
    return {name: Placed(stage, costs[name], sizes[stage.spec.role]) for name, stage in stages.items()}
