"""Admission: how many sessions may talk at once, and which shortage says so (DESIGN §5 rule 9).

1. A session that is admitted has its worst case of bytes: in the arena, or in host memory with a place in the resident
   set within a stated wait.
2. A place is worth the pages of a whole context and the lane time of one session that talks. There are as many places
   as the scarcer of the two allows, so that whoever has one is neither short of pages nor of time.
3. Lane time is declared by the stages (`StageSpec.load`). A lane runs one thing after the other, and on a CPU all lanes
   share the cores.
4. A declaration may be wrong, so places follow what is measured (`Aimd`): a tenth fewer when lanes are taken beyond the
   target and somebody was served too late, one more when somebody waits and there is time. Bytes are never promised
   twice: pages bound the places whatever the lanes say. Nobody who has a place loses it; there is always one.
5. Where there is a fidelity ladder and the policy wants it, everybody is served more coarsely before a place is taken
   away. A voice has none: its model has one way to speak. The ladder of faces is the governor's levels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec

from duplexd.streams.stage import StageSpec

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


def places_of(stages: Iterable[StageSpec], *, contexts: int, cores: int | None) -> Places:
    """The places of an engine; at least one, or nobody would ever be served.

    Args:    contexts: whole contexts that fit into the arena beside each other.
             cores: that all lanes share; None when every lane has a device of its own.
    """
    lanes: dict[str, float] = {}
    for spec in stages:
        lanes[spec.lane] = lanes.get(spec.lane, 0.0) + spec.load
    limits = [(contexts, f"the arena has room for {contexts} whole context{'s' * (contexts != 1)}")]
    limits += [(_fit(load, 1), f"lane {lane} has time for {_fit(load, 1)}") for lane, load in lanes.items() if load > 0]
    if cores is not None and (total := sum(lanes.values())) > 0:
        share = f"{cores} cores have" if cores > 1 else "the one core has"
        limits.append((_fit(total, cores), f"{share} time for {_fit(total, cores)}"))
    count, shortage = min(limits, key=lambda limit: limit[0])
    return Places(count, shortage)


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
