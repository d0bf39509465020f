"""Where the ear stands when nobody says: the assumed way, and what a receiver's reports add to it."""

from __future__ import annotations

import pytest

from duplexd.media.line import ASSUMED_BOUND, ASSUMED_LAG, Way, way_by_reports
from duplexd.messages import CursorReported, HoldAnswered
from duplexd.units import ticks_from_ms
from tests.media.test_line_without_track import facts, line_with, ms


@pytest.mark.parametrize(
    ("round_trip_ms", "jitter_ms", "lag_ms", "bound_ms"),
    [
        pytest.param(1, 0, 250, 120, id="a-near-listener-is-as-far-as-assumed"),
        pytest.param(100, 0, 250, 120, id="what-was-assumed-of-the-network"),
        pytest.param(600, 0, 500, 370, id="a-far-one"),
        pytest.param(100, 40, 330, 200, id="a-trembling-network"),
        pytest.param(-5, -1, 250, 120, id="nonsense"),
        pytest.param(1e9, 1e9, 250 + 1950 + 1000, 120 + 1950 + 1000, id="more-than-anybody-may-claim"),
    ],
)
def test_reports_move_the_ear_back_and_never_forward(
    round_trip_ms: float, jitter_ms: float, lag_ms: float, bound_ms: float
) -> None:
    way = way_by_reports(round_trip_ms=round_trip_ms, jitter_ms=jitter_ms)

    assert (way.lag, way.bound, way.by_reports) == (ticks_from_ms(lag_ms), ticks_from_ms(bound_ms), True)
    assert way.lag >= ASSUMED_LAG
    assert way.bound >= ASSUMED_BOUND


def test_positions_of_a_far_listener_are_further_back_and_still_called_assumed() -> None:
    """600 ms there and back: the constant had the ear 250 ms further on than it was, beyond its own bound."""
    line = line_with(2000)
    line.way = way_by_reports(round_trip_ms=600, jitter_ms=0)
    line.tick(ms(2000))
    report = facts(line, CursorReported)[0]

    assert report.assumed
    assert report.cursor.position == ticks_from_ms(1000 - 500)
    assert (report.buffer, report.bound) == (ticks_from_ms(500), ticks_from_ms(370))


def test_a_cut_stands_on_the_same_way() -> None:
    line = line_with(2000)
    line.way = Way(ticks_from_ms(500), ticks_from_ms(370), by_reports=True)
    line.cut(None, ms(2000))
    answer = facts(line, HoldAnswered)[0]

    assert (answer.cursor.position, answer.bound) == (ticks_from_ms(500), ticks_from_ms(370))
    assert answer.assumed
