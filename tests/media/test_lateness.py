"""Lateness is what comes on top of the least delay, whatever the clocks' origins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplexd.media.lateness import ARRIVALS_MAX, Arrival, Lateness
from duplexd.units import NANOS_PER_MS, Nanos


@pytest.mark.parametrize("origin", [0, 2**32 - 2000, 123_456_789])
def test_what_comes_later_than_the_fastest_is_late(origin: int) -> None:
    """Timestamps wrap, clocks have other origins: only the excess counts."""
    lateness = Lateness()
    for index, waited_ms in enumerate((7, 5, 65, 5, 15)):
        at = 20 * index + waited_ms
        lateness.note((origin + 960 * index) % 2**32, Nanos(at * NANOS_PER_MS + 987_654_321))

    assert lateness.excess_ms() == [2, 0, 60, 0, 10]


def test_a_stream_that_begins_anew_is_measured_anew_and_the_past_is_bounded() -> None:
    lateness = Lateness(kept=3)
    lateness.note(0, Nanos(0))
    lateness.note(48_000 * 60, Nanos(5 * NANOS_PER_MS))
    for index in range(1, 9):
        lateness.note(48_000 * 60 + 960 * index, Nanos((5 + 20 * index) * NANOS_PER_MS))

    assert lateness.excess_ms() == [0, 0, 0]
    assert Lateness().excess_ms() == []


@given(st.lists(st.tuples(st.integers(0, 2000), st.sampled_from([960, 960, 960, 48_000 * 11])), max_size=60))
def test_what_a_packet_is_told_is_its_excess_over_all_that_are_kept(packets: list[tuple[int, int]]) -> None:
    """Whatever comes when, and wherever the stream begins anew."""
    lateness, rtp, now = Lateness(kept=5), 0, 0
    for waited_ms, step in packets:
        rtp += step
        now += waited_ms * NANOS_PER_MS
        told = lateness.note(rtp, Nanos(now))

        assert told / NANOS_PER_MS == lateness.excess_ms()[-1]


def test_arrivals_are_kept_one_by_one_with_the_first_loud_sample() -> None:
    """The newest half minute of them; a silent piece says so."""
    lateness = Lateness()
    sound = np.zeros(320, np.int16)
    sound[112:] = -9000
    lateness.note(2**32 + 960, Nanos(1), np.zeros(320, np.int16))
    lateness.note(2**32 + 1920, Nanos(2), sound)
    kept = list(lateness.arrivals)
    for index in range(ARRIVALS_MAX):
        lateness.note(2880 + 960 * index, Nanos(3 + index), sound)

    assert kept == [Arrival(960, Nanos(1), -1), Arrival(1920, Nanos(2), 112)]
    assert (len(lateness.arrivals), lateness.arrivals[0].at) == (ARRIVALS_MAX, 3)
