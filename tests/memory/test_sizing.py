"""Sizing: as many sessions as the bytes admit, not one more, and a refusal that says what one needs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplexd.errors import ConfigError
from duplexd.memory.layout import ArenaLayout, FieldSpec, PartitionKind, PartitionSpec, Section
from duplexd.memory.sizing import SESSIONS_A_PLACE, Footprint, Sizing, resident_in, size

MANY = 1000


class Part:
    """A random partition as a function of sessions."""

    def __init__(self, name: str, kind: PartitionKind, section: Section, width: int, each: int, shared: int) -> None:
        self.name, self.kind, self.section = name, kind, section
        self.width, self.each, self.shared = width, each, shared if each else shared + 1

    def at(self, sessions: int) -> PartitionSpec:
        return PartitionSpec(
            self.name,
            self.kind,
            sessions * self.each + self.shared,
            (FieldSpec("x", (self.width,), "int16"), FieldSpec("y", (3,))),
            page_tokens=16 if self.kind is PartitionKind.PAGES else 0,
            session_slots=self.each,
            shared_slots=self.shared,
            section=self.section,
        )


@st.composite
def footprints(draw: st.DrawFn) -> Footprint:
    parts = [
        Part(f"p{index}", kind, section, draw(st.integers(1, 5000)), draw(st.integers(0, 9)), draw(st.integers(0, 3)))
        for index, (kind, section) in enumerate(
            draw(st.lists(st.tuples(st.sampled_from(PartitionKind), st.sampled_from(Section)), min_size=1, max_size=6))
        )
    ]

    def partitions(sessions: int) -> tuple[PartitionSpec, ...]:
        return tuple(part.at(sessions) for part in parts)

    return Footprint("random", partitions, draw(st.integers(0, 10**6)), "somewhere")


def sized(footprint: Footprint, memory_bytes: int, host_bytes: int = 0) -> Sizing:
    return size(footprint, memory_bytes=memory_bytes, host_bytes=host_bytes, sessions_max=MANY)


@given(footprints(), st.integers(0, 10**8))
def test_as_many_as_fit_and_one_more_does_not(footprint: Footprint, spare: int) -> None:
    memory = footprint.device_bytes(1) + spare
    sizing = sized(footprint, memory)

    count = sizing.sessions_resident
    assert footprint.device_bytes(count) == sizing.total_bytes <= memory
    assert count == MANY or footprint.device_bytes(count + 1) > memory


@given(footprints(), st.integers(0, 10**8))
def test_the_rows_are_the_sections_there_are_in_order_and_sum_up(footprint: Footprint, spare: int) -> None:
    sizing = sized(footprint, footprint.device_bytes(1) + spare)

    order = list(Section)
    assert [row.section for row in sizing.rows] == sorted((row.section for row in sizing.rows), key=order.index)
    assert sum(row.total_bytes for row in sizing.rows) == sizing.total_bytes
    assert sum(row.session_bytes for row in sizing.rows) == sizing.session_bytes
    largest = max(row.session_bytes for row in sizing.rows)
    assert [row.session_bytes for row in sizing.rows if row.section is sizing.scarcest] == [largest] * bool(largest)


@given(footprints())
def test_one_byte_too_few_is_refused_with_the_bytes_that_would_do(footprint: Footprint) -> None:
    needed = footprint.device_bytes(1)
    with pytest.raises(ConfigError, match=rf"random does not fit .* \({needed} bytes\)"):
        sized(footprint, needed - 1)

    assert sized(footprint, needed).sessions_resident >= 1


@given(footprints(), st.integers(0, 10**9))
def test_host_memory_holds_the_pages_of_all_and_every_eighth_has_a_place(footprint: Footprint, host_bytes: int) -> None:
    memory_bytes = footprint.device_bytes(1) + 10**6
    sizing = sized(footprint, memory_bytes, host_bytes)
    leaving = sum(spec.session_slots * spec.slot_bytes for spec in footprint.partitions(1) if spec.page_tokens)
    everybody, resident = sizing.sessions_all, sizing.sessions_resident_of_all
    more = everybody + 1

    assert sizing.leaving_bytes == leaving
    assert footprint.device_bytes(everybody, resident) <= memory_bytes
    if everybody > sizing.sessions_resident:
        assert everybody * leaving <= host_bytes
        assert everybody <= SESSIONS_A_PLACE * resident
        assert (
            more > MANY
            or more * leaving > host_bytes
            or footprint.device_bytes(more, -(-more // SESSIONS_A_PLACE)) > memory_bytes
        )


def test_a_refusal_says_what_takes_the_bytes() -> None:
    """The pair of 17 B on one card of 80 GB, in small."""
    footprint = Footprint("pair", lambda sessions: (window(sessions), scratch()), 68_000, "bfloat16")

    with pytest.raises(ConfigError) as refused:
        sized(footprint, 80_000)
    assert str(refused.value) == (
        "pair does not fit 80.0 kB: weights 68.0 kB + workspace and shared parts 9.0 kB + one session 76.8 kB "
        "need 153.8 kB (153760 bytes)"
    )


def test_a_family_may_name_its_partitions_in_any_order() -> None:
    layout = ArenaLayout([scratch(), window(2)])

    assert list(layout.partitions) == ["window", "scratch"]
    assert layout.placement("window", "kv").offset == 0


def window(sessions: int) -> PartitionSpec:
    kv = FieldSpec("kv", (6400,), "bfloat16")
    return PartitionSpec("window", PartitionKind.RING, sessions * 6, (kv,), session_slots=6)


def scratch() -> PartitionSpec:
    fields = (FieldSpec("bytes", (8960,), "uint8"),)
    return PartitionSpec("scratch", PartitionKind.SLOTS, 1, fields, section=Section.WORKSPACE)


def test_anchors_are_a_section_although_they_lie_within_windows_and_pages() -> None:
    """Two pinned slots of each session's six, and the prompt that all share."""
    ring = PartitionSpec("clean", PartitionKind.RING, 12, (FieldSpec("kv", (64,)),), session_slots=6, anchor_slots=2)
    fields = (FieldSpec("k", (16,)),)
    pages = PartitionSpec("pages", PartitionKind.PAGES, 11, fields, page_tokens=4, session_slots=4, shared_slots=3)
    sizing = sized(Footprint("two", lambda sessions: (ring, pages)), 1 << 20)
    rows = {row.section: row for row in sizing.rows}

    assert rows[Section.ANCHORS].holds == "within clean; within pages"
    assert rows[Section.ANCHORS].total_bytes == 2 * 2 * 256 + 3 * 256
    assert rows[Section.ANCHORS].session_bytes == 2 * 256
    assert (rows[Section.WINDOWS].session_bytes, rows[Section.PAGES].session_bytes) == (4 * 256, 4 * 256)
    assert (rows[Section.WINDOWS].total_bytes, rows[Section.PAGES].total_bytes) == (2 * 4 * 256, 2 * 4 * 256)


@given(footprints(), st.integers(1, 40), st.integers(0, 10**7))
def test_a_budget_says_how_many_are_resident(footprint: Footprint, sessions: int, spare: int) -> None:
    memory = footprint.device_bytes(sessions, 1) + spare
    resident = resident_in(footprint, memory_bytes=memory, sessions=sessions)

    assert footprint.device_bytes(sessions, resident) <= memory
    assert resident == sessions or footprint.device_bytes(sessions, resident + 1) > memory


@given(footprints(), st.integers(2, 40))
def test_a_budget_that_holds_nobody_is_refused_with_what_would_do(footprint: Footprint, sessions: int) -> None:
    memory = footprint.device_bytes(sessions, 1) - 1
    with pytest.raises(ConfigError, match=r"random .*does not fit .*"):
        resident_in(footprint, memory_bytes=memory, sessions=sessions)
