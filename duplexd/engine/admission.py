"""Admission: how many sessions may talk at once, and which shortage says so (DESIGN §5 rule 9).

1. A session that is admitted has its worst case of bytes: in the arena, or in host memory with a place in the resident
   set within a stated wait.
2. A place is worth the pages of a whole context and the lane time of one session that talks. There are as many places
   as the scarcer of the two allows, so that whoever has one is neither short of pages nor of time.
3. Lane time is declared by the stages (`StageSpec.load`). A lane runs one thing after the other, and on a CPU all lanes
   share the cores.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from duplexd.streams.stage import StageSpec

#: Share of a lane, and of all cores, that talking sessions may take together; the rest is for what varies.
LOAD_MAX = 0.8


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
