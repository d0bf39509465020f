"""Offers of all sessions in one order a stage; every idle lane gets the most urgent of its stages.

1. One piece of work a lane at a time: what has not been launched can still be taken back.
2. Nothing is sorted anew while nothing happens. An offer is ranked when it comes, when it changes, and when the clock
   alone has changed its rank (`Rank.until`), each in O(log n).
3. An offer that may not begin a launch (`Rank.leads`) waits for company: it rides on another's, begins one when as many
   wait as share a launch, or when the clock says so. The policy ranks it behind all that may.
4. Lane time is counted by session, over its priority (EEVDF's v): what was had, and the mean V of those who want the
   lane now. Whoever comes back after a while is neither owed more than a second nor owes more.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence

import msgspec

from duplexd.engine.policy import Moment, Rank, SchedulingPolicy
from duplexd.engine.work import Need, Work
from duplexd.ids import SessionId, WorkId
from duplexd.memory.agenda import Agenda
from duplexd.streams.stage import Role, StageSpec
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos

#: What absence can earn or cost (Linux: sleepers keep a bounded lag).
LAG_MAX = NANOS_PER_SECOND
QUANTUM_MIN = NANOS_PER_MS
FOREVER = Nanos(2**63 - 1)
#: Stages whose steps several sessions may share; a copy is a batch of one session's blocks already.
SHARED = frozenset({Role.THINK, Role.TALK, Role.RENDER, Role.GENERATE, Role.REFINE})

#: Stages that a reply passes to be heard.
SPEAKING = frozenset({Role.THINK, Role.TALK, Role.RENDER})

#: One offer: a session wants one piece of work of a stage for one reason.
OfferId = tuple[SessionId, str, Need]


class Accounts:
    """Lane time by session, over its weight, and the mean of those who want the lane."""

    def __init__(self) -> None:
        self._served: dict[SessionId, float] = {}
        self._offers: dict[SessionId, int] = {}  # of those who want the lane: how many offers each
        self._sum = 0.0
        self._mean = 0.0  # as it was when somebody last wanted the lane

    def join(self, session: SessionId) -> None:
        """One more offer of this session."""
        offers = self._offers.get(session, 0)
        if offers == 0:
            mean = self.mean  # of the others
            served = self._served.get(session, mean)
            served = self._served[session] = min(max(served, mean - LAG_MAX), mean + LAG_MAX)
            self._sum += served
        self._offers[session] = offers + 1

    def leave(self, session: SessionId) -> None:
        """One offer fewer."""
        offers = self._offers[session] - 1
        if offers:
            self._offers[session] = offers
            return
        self._mean = self.mean
        del self._offers[session]
        self._sum = self._sum - self._served[session] if self._offers else 0.0

    def charge(self, session: SessionId, spent: float) -> None:
        """It had this much lane time, over its weight."""
        if session not in self._served:
            return  # It has closed.
        self._served[session] += spent
        if session in self._offers:
            self._sum += spent

    def forget(self, session: SessionId) -> None:
        """It has closed; its offers have been taken back."""
        self._served.pop(session, None)

    def served(self, session: SessionId) -> float:
        served = self._served.get(session)
        return self.mean if served is None else served

    @property
    def wanted(self) -> bool:
        """Somebody has an offer on this lane."""
        return bool(self._offers)

    @property
    def mean(self) -> float:
        return self._sum / len(self._offers) if self._offers else self._mean


class _Running(msgspec.Struct, frozen=True):
    lane: str
    stage: str
    owners: tuple[tuple[SessionId, int], ...]  #: (session, weight)


class Scheduler:
    """Args: stages by name; the policy that ranks their work."""

    def __init__(self, stages: dict[str, StageSpec], policy: SchedulingPolicy) -> None:
        self._lane_of = {name: spec.lane for name, spec in stages.items()}
        self._stages_of: dict[str, list[str]] = {}
        for name, lane in self._lane_of.items():
            self._stages_of.setdefault(lane, []).append(name)
        self._rows = {name: spec.batch_max if spec.role in SHARED else 1 for name, spec in stages.items()}
        self._policy = policy
        self._held: dict[SessionId, dict[OfferId, Work]] = {}
        self._orders: dict[str, Agenda[OfferId]] = {name: Agenda() for name in stages}
        self._changes: dict[str, Agenda[OfferId]] = {lane: Agenda() for lane in self._stages_of}
        self._ranks: dict[OfferId, Rank] = {}
        self._due: dict[OfferId, Nanos] = {}  # of those that wait, or have waited, for company: when they may begin one
        self._accounts = {lane: Accounts() for lane in self._stages_of}
        self._quantum = dict.fromkeys(stages, Nanos(QUANTUM_MIN))
        self._reach = dict.fromkeys(stages, Nanos(0))
        self._loads: Mapping[str, float | None] = {}
        self._pool_occupancy: float | None = None
        self._running: dict[WorkId, _Running] = {}
        self._busy: dict[str, int] = {}
        self._idle: set[str] = set()  # see `idle_lanes`
        self._place_of = {lane: place for place, lane in enumerate(self._stages_of)}
        self._scanned = {
            lane: [(self._orders[stage], self._rows[stage]) for stage in names]
            for lane, names in self._stages_of.items()
        }

    # Offers ----------------------------------------------------------------------------------------------------------

    def offer(self, session: SessionId, works: Sequence[Work], now: Nanos) -> None:
        """Replace everything a session offers. What has not changed keeps its place."""
        old = self._held.pop(session, None)
        if old is None:
            if not works:
                return
            old = {}
        new: dict[OfferId, Work] = {}
        for work in works:
            name = (session, work.stage, work.need)
            new[name] = work
            before = old.pop(name, None)
            if before is None:
                lane = self._lane_of[work.stage]
                self._accounts[lane].join(session)
                if lane not in self._busy:
                    self._idle.add(lane)
            elif before == work:
                continue
            self._rank(name, work, now)
        for name in old:
            self._remove(name)
        if new:
            self._held[session] = new

    def forget(self, session: SessionId) -> None:
        """The session has closed."""
        for name in self._held.pop(session, {}):
            self._remove(name)
        for accounts in self._accounts.values():
            accounts.forget(session)

    def _remove(self, name: OfferId) -> None:
        lane = self._lane_of[name[1]]
        self._orders[name[1]].remove(name)
        self._changes[lane].remove(name)
        del self._ranks[name]
        if name in self._due:
            del self._due[name]
        accounts = self._accounts[lane]
        accounts.leave(name[0])
        if not accounts.wanted:
            self._idle.discard(lane)

    def _rank(self, name: OfferId, work: Work, now: Nanos) -> None:
        lane = self._lane_of[work.stage]
        accounts = self._accounts[lane]
        served = accounts.served(work.session)
        moment = Moment(
            now,
            self._pool_occupancy,
            served,
            served <= accounts.mean,
            self._quantum[work.stage],
            self._reach[work.stage],
            self._loads.get(lane),
        )
        rank = self._ranks[name] = self._policy.rank(work, moment)
        self._orders[work.stage].put(name, rank.key)
        if not rank.leads:
            self._due[name] = FOREVER if rank.until is None else rank.until
        elif name in self._due:
            self._due[name] = min(now, self._due[name])
        if rank.until is None:
            self._changes[lane].remove(name)
        else:
            self._changes[lane].put(name, max(rank.until, now + 1))  # Later than now, or `_refresh` would never end.

    def _refresh(self, lane: str, now: Nanos) -> None:
        """Rank anew what the clock has changed."""
        changes = self._changes[lane]
        while (name := changes.due(now)) is not None:
            self._rank(name, self._held[name[0]][name], now)

    # Choosing --------------------------------------------------------------------------------------------------------

    def note_pool(self, occupancy: float | None) -> None:
        """How full the page pool is; ranks take it over as they are made."""
        self._pool_occupancy = occupancy

    def note_times(self, stage: str, *, took: Nanos, reach: Nanos) -> None:
        """How long one step of a stage takes, as measured, and how long one must expect to wait for its end."""
        self._quantum[stage] = Nanos(max(QUANTUM_MIN, took))
        self._reach[stage] = reach

    def note_loads(self, loads: Mapping[str, float | None]) -> None:
        """Share of its time that each lane works; ranks take it over as they are made."""
        self._loads = loads

    def idle_lanes(self) -> list[str]:
        """Lanes with nothing to do and something offered, in the order of the plan. It is asked after every event."""
        if len(self._idle) < 2:
            return list(self._idle)
        return sorted(self._idle, key=self._place_of.__getitem__)

    def wakes_at(self) -> Nanos | None:
        """When the clock may let somebody begin a launch on a lane with nothing to do; None: nobody waits for that."""
        if not self._idle:
            return None
        firsts = (self._changes[lane].first() for lane in self._idle)
        return min((Nanos(first[0]) for first in firsts if first is not None), default=None)

    def rows_max(self, stage: str) -> int:
        """How many sessions may share a launch of a stage."""
        return self._rows[stage]

    def urgent(self, lane: str, now: Nanos) -> Generator[Work, None, None]:
        """Offers of one lane that may begin a launch, most urgent first, each once. Offers may be replaced meanwhile;
        close it when done.
        """
        self._refresh(lane, now)
        return self._scan(self._scanned[lane], now)

    def beside(self, stage: str) -> Generator[Work, None, None]:
        """Offers of one stage, most urgent first, to share a launch that has its first row."""
        return self._scan([(self._orders[stage], 0)], FOREVER)

    def _scan(self, orders: Sequence[tuple[Agenda[OfferId], int]], now: Nanos) -> Generator[Work, None, None]:
        """Orders with how many must wait in them before one that waits for company comes up."""
        seen: set[OfferId] = set()
        lifted = []
        try:
            while (order := self._most_urgent(orders, now)) is not None:
                entry = order.lift()
                lifted.append((order, entry))
                name = entry[2]
                if name not in seen:
                    seen.add(name)
                    yield self._held[name[0]][name]
        finally:
            for order, entry in lifted:
                order.lower(entry)

    def _most_urgent(self, orders: Sequence[tuple[Agenda[OfferId], int]], now: Nanos) -> Agenda[OfferId] | None:
        """The order whose first offer may begin a launch and goes before those of the others."""
        least: tuple[float, ...] | None = None
        urgent = None
        for order, company in orders:
            head = order.first()
            if head is None or (least is not None and head[0] >= least):
                continue
            if self._due.get(head[2], now) <= now or len(order) >= company:
                least, urgent = head[0], order
        return urgent

    # Running ---------------------------------------------------------------------------------------------------------

    def begin(self, work: WorkId, stage: str, owners: Sequence[tuple[SessionId, int]] = ()) -> str:
        """A launch was ordered; `owners` are its sessions with their weights. Returns the lane."""
        lane = self._lane_of[stage]
        self._running[work] = _Running(lane, stage, tuple(owners))
        self._busy[lane] = self._busy.get(lane, 0) + 1
        self._idle.discard(lane)
        return lane

    def end(self, work: WorkId, took: Nanos) -> tuple[str, str]:
        """A launch has come back; its rows share the time it took. Returns (lane, stage)."""
        running = self._running.pop(work)
        self._busy[running.lane] -= 1
        if not self._busy[running.lane]:
            del self._busy[running.lane]
            if self._accounts[running.lane].wanted:
                self._idle.add(running.lane)
        for session, weight in running.owners:
            self._accounts[running.lane].charge(session, took / len(running.owners) / max(1, weight))
        return running.lane, running.stage

    def urgency(self, session: SessionId) -> str:
        """What the policy calls the most urgent step that this session's reply offers; '' when it offers none."""
        ranks = [self._ranks[name] for name, work in self._held.get(session, {}).items() if work.role in SPEAKING]
        return self._policy.urgency(min(ranks, key=lambda rank: rank.key)) if ranks else ""

    @property
    def running_count(self) -> int:
        return len(self._running)

    def waiting(self) -> Iterator[tuple[Work, Nanos]]:
        """Everything that is offered and not launched, and since when it could have been; a moment to come while it
        waits for company.
        """
        for works in self._held.values():
            for name, work in works.items():
                yield work, max(work.ready_at, self._due.get(name, work.ready_at))
