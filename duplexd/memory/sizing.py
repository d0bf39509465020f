"""Sizing: how many sessions a byte budget admits, before anything is allocated (DESIGN §8).

1. The budget holds the weights and the one allocation; what a device keeps for itself is not in it.
2. Every session is counted at its worst case, as admission reserves it (DESIGN §5 rule 9).
3. An idle session may leave to host memory with its pages; everything else that is its own stays in the arena, so more
   sessions in all mean fewer resident ones.
4. Every eighth session at least has a place: whoever sizes for more expects that most of them say nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

import msgspec

from duplexd.errors import ConfigError
from duplexd.memory.layout import ArenaLayout, Partitions, Section, resident_layout, section_of
from duplexd.units import text_from_bytes

#: Sessions in all for one that is resident, at most.
SESSIONS_A_PLACE = 8


class Footprint(msgspec.Struct, frozen=True):
    """What a model takes of a device."""

    model: str
    partitions: Partitions  #: of so many sessions; never smaller for more of them
    weights_bytes: int = 0  #: of weights outside the partitions
    weights_held: str = ""  #: what they are, or where they lie, in words

    def device_bytes(self, sessions: int, resident: int = 0) -> int:
        layout = resident_layout(self.partitions, sessions=sessions, resident=resident or sessions)
        return self.weights_bytes + layout.total_bytes


class Row(msgspec.Struct, frozen=True):
    """One section of the table."""

    section: Section
    holds: str  #: its partitions
    total_bytes: int  #: of all sessions, alignment included
    session_bytes: int  #: worst case of one session; 0: not held per session


class Sizing(msgspec.Struct, frozen=True):
    """The answer: the table, section by section in layout order, and the sessions it admits."""

    model: str
    memory_bytes: int
    host_bytes: int
    rows: tuple[Row, ...]
    total_bytes: int  #: sum of the rows; at most `memory_bytes`
    session_bytes: int  #: sum of the rows
    leaving_bytes: int  #: what one idle session takes to host memory
    sessions_resident: int
    sessions_all: int  #: resident ones and those in host memory
    sessions_resident_of_all: int  #: resident at once when there are so many
    sessions_max: int  #: neither count is searched beyond it
    scarcest: Section | None  #: takes most of one more session; None: nothing is held per session


def size(footprint: Footprint, *, memory_bytes: int, host_bytes: int = 0, sessions_max: int) -> Sizing:
    """The most sessions that fit, and what takes the bytes.

    Args:    sessions_max: look no further; the sizes of a small model would admit more than anything can schedule.
    Raises:  ConfigError when not even one session fits, with what one needs.
    Cost:    O(log sessions_max) layouts.
    """
    resident = bisect_right(range(1, sessions_max + 1), memory_bytes, key=footprint.device_bytes)
    if not resident:
        raise ConfigError(_refusal(footprint, memory_bytes))
    layout = ArenaLayout(footprint.partitions(resident))
    rows = _rows(footprint, layout)
    leaving = sum(spec.session_slots * spec.slot_bytes for spec in layout.partitions.values() if spec.page_tokens)
    together = _together(footprint, memory_bytes, most=min(host_bytes // leaving, sessions_max) if leaving else 0)
    scarcest = max(rows, key=lambda row: row.session_bytes)
    return Sizing(
        model=footprint.model,
        memory_bytes=memory_bytes,
        host_bytes=host_bytes,
        rows=rows,
        total_bytes=footprint.weights_bytes + layout.total_bytes,
        session_bytes=layout.session_bytes,
        leaving_bytes=leaving,
        sessions_resident=resident,
        sessions_all=max(resident, together.all),
        sessions_resident_of_all=together.resident if together.all > resident else resident,
        sessions_max=sessions_max,
        scarcest=scarcest.section if scarcest.session_bytes else None,
    )


def resident_in(footprint: Footprint, *, memory_bytes: int, sessions: int) -> int:
    """How many of so many sessions have room for their whole contexts at once in this budget.

    Raises:  ConfigError when not one has, with what is needed and how many sessions would fit.
    """
    resident = _resident(footprint, memory_bytes, sessions)
    if not resident:
        fewer = bisect_left(range(1, sessions + 1), True, key=lambda n: footprint.device_bytes(n, 1) > memory_bytes)
        if not fewer:
            raise ConfigError(_refusal(footprint, memory_bytes))
        raise ConfigError(
            f"{footprint.model} with sessions_max {sessions} does not fit {text_from_bytes(memory_bytes)}: with one "
            f"resident session it needs {text_from_bytes(footprint.device_bytes(sessions, 1))}; raise memory, or lower "
            f"sessions_max to {fewer}"
        )
    return resident


def _resident(footprint: Footprint, memory_bytes: int, sessions: int) -> int:
    return bisect_right(range(1, sessions + 1), memory_bytes, key=lambda r: footprint.device_bytes(sessions, r))


class _Together(NamedTuple):
    """Sessions in all and those of them that are resident at once."""

    all: int
    resident: int


def _together(footprint: Footprint, memory_bytes: int, *, most: int) -> _Together:
    """The most sessions, up to `most`, of which every eighth still has a place."""

    def crowded(sessions: int) -> bool:
        return _resident(footprint, memory_bytes, sessions) * SESSIONS_A_PLACE < sessions

    sessions = bisect_right(range(1, most + 1), False, key=crowded)
    return _Together(sessions, _resident(footprint, memory_bytes, sessions) if sessions else 0)


def _rows(footprint: Footprint, layout: ArenaLayout) -> tuple[Row, ...]:
    """Sections that the model has. Weights outside the partitions are in the first row; anchors that lie within windows
    and pages are in theirs.
    """
    rows = []
    for section in Section:
        specs = [spec for spec in layout.partitions.values() if section_of(spec) is section]
        names = [spec.name for spec in specs]
        total = sum(layout.partition_bytes(name) for name in names)
        session = sum(spec.session_slots * spec.slot_bytes for spec in specs)
        if section is Section.ANCHORS:
            within = [spec for spec in layout.partitions.values() if spec.anchor_bytes and spec not in specs]
            names += [f"within {spec.name}" for spec in within]
            total += sum(spec.anchor_bytes for spec in within)
            session += sum(spec.anchor_slots * spec.slot_bytes for spec in within)
        else:
            total -= sum(spec.anchor_bytes for spec in specs)
            session -= sum(spec.anchor_slots * spec.slot_bytes for spec in specs)
        if section is Section.WEIGHTS and footprint.weights_bytes:
            total += footprint.weights_bytes
            names.append(footprint.weights_held)
        if names:
            rows.append(Row(section, "; ".join(name for name in names if name), total, session))
    return tuple(rows)


def _refusal(footprint: Footprint, memory_bytes: int) -> str:
    layout = ArenaLayout(footprint.partitions(1))
    needed = footprint.weights_bytes + layout.total_bytes
    parts = {
        "weights": footprint.weights_bytes,
        "workspace and shared parts": layout.total_bytes - layout.session_bytes,
        "one session": layout.session_bytes,
    }
    sum_of = " + ".join(f"{name} {text_from_bytes(count)}" for name, count in parts.items() if count)
    return (
        f"{footprint.model} does not fit {text_from_bytes(memory_bytes)}: {sum_of} need {text_from_bytes(needed)} "
        f"({needed} bytes)"
    )
