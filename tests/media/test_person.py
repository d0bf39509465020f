"""Somebody in front of the camera: found where they are, told when it matters, gone when they are gone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from duplexd.media.person import GONE_AFTER, MOVED, TOLD_EVERY, PersonFinder, PersonRule, Place, Sighting
from duplexd.units import NANOS_PER_MS, Nanos
from tests.media.faces import with_a_face

PERIOD = Nanos(200 * NANOS_PER_MS)
HERE = Place(0.1, 0.2)


@pytest.fixture(name="finder", scope="module")
def _finder() -> PersonFinder:
    return PersonFinder()


def run(*places: Place | None, period: Nanos = PERIOD) -> list[Sighting | None]:
    rule = PersonRule()
    return [rule.look(place, Nanos(index * period)) for index, place in enumerate(places)]


# The finder ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "y"), [(0.0, 0.0), (-0.4, 0.0), (0.4, 0.0), (0.0, 0.2)], ids=["middle", "left", "right", "up"]
)
def test_a_face_is_found_where_it_is(finder: PersonFinder, x: float, y: float) -> None:
    """To the right of the camera is positive, up is positive."""
    found = finder.find(with_a_face(320, 240, x=x, y=y))

    assert found is not None
    assert found.x == pytest.approx(x, abs=0.12)
    assert found.y == pytest.approx(y, abs=0.15)


@pytest.mark.parametrize(("width", "height"), [(240, 320), (480, 640)])
def test_a_face_is_found_by_a_phone_held_upright(finder: PersonFinder, width: int, height: int) -> None:
    assert finder.find(with_a_face(width, height, x=0.0, y=0.0)) is not None


@pytest.mark.parametrize("picture", ["dark", "noise", "slope"])
def test_nobody_is_found_where_nobody_is(finder: PersonFinder, picture: str) -> None:
    pictures: dict[str, NDArray[np.uint8]] = {
        "dark": np.zeros((240, 320), np.uint8),
        "noise": np.random.default_rng(1).integers(0, 255, (240, 320), np.uint8),
        "slope": np.broadcast_to(np.linspace(0, 255, 320).astype(np.uint8), (240, 320)).copy(),
    }

    assert finder.find(pictures[picture]) is None


# The rule -----------------------------------------------------------------------------------------------------------


def test_somebody_counts_once_they_were_found_twice() -> None:
    assert run(HERE, None, HERE, HERE) == [None, None, None, Sighting(True, HERE)]


def test_a_small_movement_is_not_told_and_a_large_one_is() -> None:
    near, far = Place(HERE.x + MOVED / 2, HERE.y), Place(HERE.x + 0.2, HERE.y)

    assert run(HERE, HERE, near, far) == [None, Sighting(True, HERE), None, Sighting(True, far)]


def test_a_person_who_turns_aside_for_a_moment_has_not_gone() -> None:
    frames = GONE_AFTER // PERIOD - 1
    told = run(HERE, HERE, *[None] * frames, HERE)

    assert told[2:] == [None] * (frames + 1)


def test_a_person_who_has_gone_is_told_once() -> None:
    frames = -(-GONE_AFTER // PERIOD)
    told = run(HERE, HERE, *[None] * (frames + 5))

    assert [fact for fact in told if fact] == [Sighting(True, HERE), Sighting(False, HERE)]
    assert told[1 + frames] == Sighting(False, HERE)


def test_a_camera_that_stops_sending_shows_nobody() -> None:
    rule = PersonRule()
    rule.look(HERE, Nanos(0))
    rule.look(HERE, PERIOD)

    assert rule.wait(Nanos(PERIOD + GONE_AFTER - 1)) is None
    assert rule.wait(Nanos(PERIOD + GONE_AFTER)) == Sighting(False, HERE)
    assert rule.wait(Nanos(PERIOD + 2 * GONE_AFTER)) is None


def test_a_camera_that_is_switched_off_shows_nobody_at_once() -> None:
    rule = PersonRule()
    rule.look(HERE, Nanos(0))
    rule.look(HERE, PERIOD)

    assert rule.leave(PERIOD) == Sighting(False, HERE)
    assert rule.leave(PERIOD) is None
    assert rule.look(HERE, Nanos(2 * PERIOD)) is None


PLACES = st.none() | st.builds(Place, st.floats(-1, 1), st.floats(-1, 1))


@given(st.lists(st.tuples(PLACES, st.integers(1, 400)), max_size=60))
def test_never_more_than_five_movements_a_second_and_presence_alternates(looks: list[tuple[Place | None, int]]) -> None:
    rule, now, told = PersonRule(), 0, list[tuple[int, Sighting]]()
    for place, passed_ms in looks:
        now += passed_ms * NANOS_PER_MS
        fact = rule.look(place, Nanos(now))
        if fact is not None:
            told.append((now, fact))

    for (at, before), (then, after) in zip([(0, Sighting(False, HERE)), *told], told, strict=False):
        if before.present == after.present:
            assert after.present
            assert then - at >= TOLD_EVERY
