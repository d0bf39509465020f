"""Admission: how many sessions are let in, how many may talk at once, and which shortage says so (DESIGN §5 rule 9).

1. A session that is admitted has its worst case of bytes: in the arena, or in host memory with a place in the resident
   set within a stated wait. It has lane time for what it always takes, and an eighth of a place: more than
   `SESSIONS_A_PLACE` sessions on one place are a queue, not a conversation.
2. A place is worth the pages of a whole context and the lane time of one session that talks. There are as many places
   as the scarcer of the two allows, so that whoever has one is neither short of pages nor of time.
3. Lane time is declared by the stages (`StageSpec.load`). A lane runs one thing after the other, and on a CPU all lanes
   share the cores.
4. A declaration may be wrong, so places follow what is measured (`Aimd`): a tenth fewer when lanes are taken beyond the
   target and somebody was served too late, one more when somebody waits and there is time. Bytes are never promised
   twice: pages bound the places whatever the lanes say. Nobody who has a place loses it; there is always one.
5. A face counts as the least it can be lowered to (`governor.py`): a still picture takes no lane time, so where that is
   allowed no session is refused for a face. What `face_least` keeps moving is reserved.
6. Where there is a fidelity ladder and the policy wants it, everybody is served more coarsely before a place is taken
   away. A voice has none: its model has one way to speak. The ladder of faces is the governor's levels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec

from duplexd.engine.governor import LEVELS, Fidelity, share_of
from duplexd.memory.sizing import SESSIONS_A_PLACE
from duplexd.messages import Shortage
from duplexd.streams.stage import FACE_ROLES, Role, StageSpec
from duplexd.units import text_from_bytes

#: Share of a lane, and of all cores, that talking sessions may take together; the rest is for what varies.
LOAD_MAX = 0.8
#: Numbers of Metronome (arXiv 2607.02640): utilisation to aim at, the factor of a retreat, the step of an advance.
TARGET, RETREAT, ADVANCE = 0.7, 0.9, 1
#: Looks after a retreat at which there is no other: utilisation is a mean over ten seconds, and forgets as slowly.
LOOKS_AFTER_RETREAT = 5


class Places(msgspec.Struct, frozen=True):
    """Sessions that may talk at once."""

    count: int
    shortage: str  #: what one more would lack, as the middle of a sentence


def places_of(stages: Iterable[StageSpec], *, contexts: int, cores: int | None, least: Fidelity = LEVELS[-1]) -> Places:
    """The places of an engine; at least one, or nobody would ever be served.

    Args:    contexts: whole contexts that fit into the arena beside each other.
             cores: that all lanes share; None when every lane has a device of its own.
             least: what a face is lowered to before a voice waits.
    """
    lanes: dict[str, float] = {}
    for spec in stages:
        lanes[spec.lane] = lanes.get(spec.lane, 0.0) + _load(spec, least)
    limits = [(contexts, f"the arena has room for {contexts} whole context{'s' * (contexts != 1)}")]
    limits += [(_fit(load, 1), f"lane {lane} has time for {_fit(load, 1)}") for lane, load in lanes.items() if load > 0]
    if cores is not None and (total := sum(lanes.values())) > 0:
        share = f"{cores} cores have" if cores > 1 else "the one core has"
        limits.append((_fit(total, cores), f"{share} time for {_fit(total, cores)}"))
    count, shortage = min(limits, key=lambda limit: limit[0])
    return Places(count, shortage)


def _load(spec: StageSpec, least: Fidelity) -> float:
    return spec.load * (share_of(least, spec.role) if spec.role in FACE_ROLES else 1.0)


class TurnedAway(msgspec.Struct, frozen=True):
    """Why one more session is not let in."""

    code: str  #: "busy": all that memory is laid out for; "no_memory"; "no_lane_time"
    sentence: str
    shortage: Shortage


class Door:
    """Who is let in: bytes and lane time of all stages, by what the plan declares.

    Args:    contexts: whole contexts that fit into the arena beside each other; context_bytes: of one of them.
             session_bytes: what one session takes of the arena at worst.
             cores, least: as for `places_of`.
    """

    def __init__(
        self,
        stages: Iterable[StageSpec],
        *,
        sessions_max: int,
        contexts: int,
        context_bytes: int,
        session_bytes: int,
        cores: int | None,
        least: Fidelity = LEVELS[-1],
    ) -> None:
        self.sessions_max = sessions_max
        self._contexts = contexts
        self._context_bytes = context_bytes
        self._session_bytes = session_bytes
        self._cores = cores
        self._least = least
        self._faced = False
        self._always: dict[str, float] = {}  #: lane time of a session that says nothing, by lane
        self._talking: dict[str, float] = {}  #: of a place beside it
        for spec in stages:
            loads = self._always if spec.role in _ALWAYS else self._talking
            loads[spec.lane] = loads.get(spec.lane, 0.0) + _load(spec, least)
            self._faced |= spec.role in FACE_ROLES

    def refuses(self, *, open_count: int, closing_count: int, places: Places) -> TurnedAway | None:
        """One more is at the door. The first shortage, or None: it is let in. Somebody is always let in.

        Args:    places: as they are now: what was measured counts as what was declared.
        """
        sessions = open_count + closing_count + 1
        if sessions > self.sessions_max:
            return self._full(open_count, closing_count)
        if sessions == 1:
            return None
        if sessions > self._contexts * SESSIONS_A_PLACE:
            return self._crowded(sessions)
        return self._overloaded(sessions) or self._late(sessions, places)

    def _full(self, open_count: int, closing_count: int) -> TurnedAway:
        closing = f", {closing_count} more still closing" if closing_count else ""
        return TurnedAway(
            "busy",
            f"{open_count} of {self.sessions_max} sessions are open{closing}; one more needs "
            f"{text_from_bytes(self._session_bytes)} that the arena was not laid out for; wait for one to end or raise "
            "sessions_max",
            Shortage("sessions", open_count + closing_count + 1, self.sessions_max, "sessions"),
        )

    def _crowded(self, sessions: int) -> TurnedAway:
        needed = -(-sessions // SESSIONS_A_PLACE)
        return TurnedAway(
            "no_memory",
            f"the arena has room for {self._contexts} whole context{'s' * (self._contexts != 1)}, and at most "
            f"{SESSIONS_A_PLACE} sessions take turns in the room of one; one more context takes "
            f"{text_from_bytes(self._context_bytes)}; wait for one to end or raise memory or sessions_resident",
            Shortage("arena", needed * self._context_bytes, self._contexts * self._context_bytes, "bytes"),
        )

    def _overloaded(self, sessions: int) -> TurnedAway | None:
        lanes = self.demand(sessions)
        limits = [(f"lane {lane}", load, LOAD_MAX) for lane, load in lanes.items()]
        if self._cores is not None:
            cores = f"{self._cores} cores" if self._cores > 1 else "the one core"
            limits.append((cores, sum(lanes.values()), LOAD_MAX * self._cores))
        of, needed, available = max(limits, key=lambda limit: limit[1] / limit[2], default=("", 0.0, 1.0))
        if needed <= available:
            return None
        return TurnedAway(
            "no_lane_time",
            f"{sessions} sessions, of which every {SESSIONS_A_PLACE}th talks{self._faces()}, would take {needed:.2f} "
            f"of the {available:.2f} of real time that {of} may give; wait for one to end or use more or faster cores",
            Shortage(of, round(needed, 3), round(available, 3), "of real time"),
        )

    def _late(self, sessions: int, places: Places) -> TurnedAway | None:
        if sessions <= places.count * SESSIONS_A_PLACE:
            return None
        return TurnedAway(
            "no_lane_time",
            f"{places.shortage} at once, and at most {SESSIONS_A_PLACE} sessions take turns in one place; wait for one "
            "to end",
            Shortage("places", -(-sessions // SESSIONS_A_PLACE), places.count, "places"),
        )

    def demand(self, sessions: int) -> dict[str, float]:
        """Lane time that so many sessions take, by lane, as a share of real time."""
        talking = -(-sessions // SESSIONS_A_PLACE)
        lanes = dict.fromkeys((*self._always, *self._talking), 0.0)
        return {lane: sessions * self._always.get(lane, 0.0) + talking * self._talking.get(lane, 0.0) for lane in lanes}

    def _faces(self) -> str:
        return f" and whose faces are lowered to {self._least.name!r}" if self._faced else ""

    def count(self, places: Places) -> int:
        """Sessions that are let in."""
        return (
            bisect_left(
                range(1, self.sessions_max),
                True,
                key=lambda opened: self.refuses(open_count=opened, closing_count=0, places=places) is not None,
            )
            + 1
        )


#: What goes on while nobody says anything: the microphone is on, and the face moves.
_ALWAYS = frozenset({Role.COPY, Role.GENERATE, Role.REFINE, Role.DECODE})


def _fit(load: float, capacity: int) -> int:
    return max(1, int(LOAD_MAX * capacity / load))


def taken(lanes: Mapping[str, float | None], *, cores: int | None) -> float | None:
    """Utilisation of what is scarcest, a lane or all cores together; None while nothing was measured.

    Args:    lanes: share of its time that each lane worked; cores: that they share, None when they share none.
    """
    measured = [value for value in lanes.values() if value is not None]
    if not measured:
        return None
    return max(max(measured), sum(measured) / cores if cores is not None else 0.0)


class Ladder(Protocol):
    """Ways to serve everybody, each cheaper than the one before. Whoever goes down comes up by itself."""

    def lower(self) -> bool:
        """One step down; False when there is none."""


class Aimd:
    """Additive increase, multiplicative decrease of the places, by measured utilisation.

    A lane that is busy and late for nobody is well used: a policy that generates at full speed takes all there is. So a
    retreat takes both, utilisation beyond the target and somebody who was harmed. Misses alone would not show that
    nothing is made any more: `harmed` counts late chunks and starved work alike.

    Args:    places: as declared; contexts: that fit the arena, the bound whatever is measured.
             target: 0 leaves the places as they are declared.
    """

    def __init__(self, places: Places, *, contexts: int, target: float = TARGET) -> None:
        self.declared = places
        self.contexts = max(contexts, places.count)
        self.target = target
        self._rest = 0  # looks before the next retreat

    def look(
        self,
        places: Places,
        *,
        utilisation: float | None,
        harmed: int,
        seated: int,
        waiting: int,
        ladder: Ladder | None = None,
    ) -> Places:
        """The places from now on; called once a second.

        Args:    harmed: chunks that came late and work that starved since the last look.
                 seated: sessions that have a place; waiting: sessions that wait for one.
                 ladder: asked before a place is taken away; None: there is none.
        """
        self._rest = max(0, self._rest - 1)
        if not self.target or utilisation is None:
            return places
        if utilisation > self.target:
            if not harmed or self._rest:
                return places
            self._rest = LOOKS_AFTER_RETREAT
            if ladder is not None and ladder.lower():
                return places
            # From the places that are in use: taking away empty ones would relieve nobody.
            return self._places(max(1, int(min(places.count, max(1, seated)) * RETREAT)))
        if waiting and places.count < self.contexts:
            return self._places(min(self.contexts, places.count + ADVANCE))
        return places

    def _places(self, count: int) -> Places:
        if count == self.declared.count:
            return self.declared
        return Places(count, f"the lanes, as measured, have time for {count}")
