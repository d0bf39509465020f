"""The monitor: bounded, and what it could not measure is None."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplexd.engine.monitor import WINDOW, WINDOWS, Monitor, StageTimes, Utilisation
from duplexd.ids import SessionId
from duplexd.units import NANOS_PER_MS, Nanos

S = WINDOW


def test_the_ring_keeps_the_newest_and_counts_what_fell_out() -> None:
    monitor = Monitor(events_max=3)
    for number in range(5):
        monitor.note(Nanos(number), SessionId(1), "voice_started", number)

    assert [event.value for event in monitor.events()] == [2, 3, 4]
    assert monitor["events_overwritten"] == 2


def test_time_after_a_stage_is_the_longest_way_to_the_output() -> None:
    times = StageTimes([("think", "talk"), ("talk", "render"), ("talk", "face")])
    assert times.after("render") == 0
    assert times.after("think") is None
    times.note("render", Nanos(30))
    times.note("face", Nanos(70))
    assert times.after("talk") == 70
    assert times.after("think") is None
    times.note("talk", Nanos(5))
    assert times.after("think") == 75


def test_an_average_follows_what_is_measured() -> None:
    times = StageTimes([])
    for took in [80] + [0] * 60:
        times.note("render", Nanos(took))

    assert times.mean("render") is not None
    assert times.mean("render") < 10  # type: ignore[operator]


def test_one_must_expect_a_running_launch_ones_own_and_their_strays() -> None:
    """A steady stage needs twice its time; one that strays by 40 around 100 needs four deviations more."""
    times = StageTimes([("talk", "render")])
    assert times.reach("talk") is None
    for number in range(200):
        times.note("render", Nanos(10))
        times.note("talk", Nanos(140 if number % 2 else 60))

    assert times.reach("render") == pytest.approx(20, abs=8)  # whole nanoseconds: what is left of the first deviation
    assert times.reach("talk") == pytest.approx(2 * 100 + 4 * 40, rel=0.15)
    assert times.reach_after("talk") == times.reach("render")
    assert times.reach_after("render") == 0


def test_launches_of_more_rows_are_known_apart() -> None:
    times = StageTimes([])
    for _ in range(100):
        times.note("talk", Nanos(2000), rows=1)
        times.note("talk", Nanos(4000), rows=4)

    assert (times.of_rows("talk", 1), times.of_rows("talk", 4)) == (2000, 4000)
    assert times.of_rows("talk", 2) is None
    assert times.at_worst("talk", 2) is None
    assert times.at_worst("talk", 4) == pytest.approx(4000, rel=0.05)


def test_a_launch_that_runs_over_is_expected_to_go_on_for_a_while() -> None:
    times = StageTimes([])
    times.note("talk", Nanos(400), rows=2)
    assert times.lane_free_at("talk", Nanos(50)) == (50, 0)
    times.begin("talk", 2, Nanos(1000))

    assert times.lane_free_at("talk", Nanos(1100)) == (1400, 400)
    assert times.lane_free_at("talk", Nanos(1500)) == (1600, 400)
    assert times.end("talk") == 2
    assert times.lane_free_at("talk", Nanos(1500)) == (1500, 0)


def test_utilisation_is_not_known_before_a_window_has_passed() -> None:
    used = Utilisation()
    assert used.value(Nanos(5 * S)) is None
    used.begin(Nanos(5 * S))
    assert used.value(Nanos(6 * S - 1)) is None
    assert used.value(Nanos(6 * S)) == 1.0


def test_a_lane_that_sleeps_becomes_idle() -> None:
    used = Utilisation()
    used.begin(Nanos(0))
    used.end(Nanos(3 * S))

    assert used.value(Nanos(3 * S)) == 1.0
    assert used.value(Nanos(6 * S)) == 0.5
    assert used.value(Nanos(10_000 * S)) == 0.0


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 2500)), min_size=1, max_size=30), st.integers(0, 3000))
def test_utilisation_is_the_share_of_the_last_windows(runs: list[tuple[int, int]], more: int) -> None:
    """Launches of any length, also longer than a window, with any pauses, looked at in between or not."""
    used, now, intervals = Utilisation(), 0, []
    for pause, length in runs:
        now += pause
        used.begin(Nanos(now * NANOS_PER_MS))
        intervals.append((now, now + length))
        now += length
        if length % 2:
            used.value(Nanos(now * NANOS_PER_MS))
        used.end(Nanos(now * NANOS_PER_MS))
    now += more
    value = used.value(Nanos(now * NANOS_PER_MS))
    first = intervals[0][0]
    whole = (now - first) // 1000
    end = first + 1000 * whole
    begin = max(first, end - 1000 * WINDOWS)
    busy = sum(max(0, min(b, end) - max(a, begin)) for a, b in intervals)

    if whole == 0:
        assert value is None
    else:
        assert value is not None
        assert abs(value - busy / (end - begin)) < 1e-9
