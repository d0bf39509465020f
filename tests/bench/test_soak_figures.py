"""What the soak makes of its readings."""

from __future__ import annotations

import pytest

from duplexd.bench.soak import course_of, memory_of


def rounds(**series: list[float | None]) -> list[dict[str, float]]:
    """One reading a minute; None: not there in that round."""
    count = len(next(iter(series.values())))
    return [
        {"minute": float(at)} | {name: found for name, values in series.items() if (found := values[at]) is not None}
        for at in range(count)
    ]


def test_the_slope_is_that_of_the_second_half_and_the_worst_rounds_are_told() -> None:
    """Twenty rounds: ten while caches fill, ten that lose a picture in two minutes; one bad round among them."""
    fps = [float(5 * at) for at in range(10)] + [25 - 0.5 * at for at in range(10)]
    found = course_of(rounds(fps=list(fps)), "fps")

    assert found["slope_per_minute"] == pytest.approx(-0.5)
    assert (found["first_half"], found["p05"], found["p95"]) == (20.0, 0.0, 40.0)


def test_a_figure_that_no_round_has_is_nothing() -> None:
    assert set(course_of(rounds(other=[1.0, 2.0]), "fps").values()) == {None}


def test_memory_of_a_painter_that_came_later_is_read_while_it_is_there() -> None:
    found = memory_of(rounds(engine=[1.0] * 6, painter=[None, 80.0, 90.0, 91.0, 92.0, 93.0]), "painter")

    assert found == {"first": 80.0, "last": 93.0, "highest": 93.0, "growth_per_minute": 1.0}
