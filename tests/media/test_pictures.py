"""The face's frames: nothing early, nothing twice, nothing of a dead epoch, and every frame accounted for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplexd.media.pictures import I420, PICTURE_FRAME, Picture, Pictures
from duplexd.units import Ticks

FRAME = PICTURE_FRAME


def planes(count: int, value: int = 0) -> list[I420]:
    return [np.full((6, 4), value + index, np.uint8) for index in range(count)]


def at(frame: float) -> Ticks:
    return Ticks(round(frame * FRAME))


def publish(pictures: Pictures, first: int, count: int, *, epoch: int = 0, frame: Ticks = FRAME) -> int:
    return pictures.publish(epoch=epoch, start=at(first), frame=frame, frames=planes(count, first))


def shown(pictures: Pictures, frames: range) -> list[int | None]:
    """Which frame each tick brought, by its number on the grid."""
    found = [pictures.pull(at(frame)) for frame in frames]
    return [None if picture is None else picture.start // FRAME for picture in found]


def test_frames_come_at_their_pts_and_the_last_is_held() -> None:
    pictures = Pictures()
    publish(pictures, 2, 3)

    assert shown(pictures, range(7)) == [None, None, 2, 3, 4, None, None]
    assert pictures.last is not None
    assert pictures.last.planes[0, 0] == 4


def test_a_frame_that_comes_after_its_moment_is_dropped_and_counted() -> None:
    """The engine is late with frames 0 to 2: showing them would make the lips hurry after the voice."""
    pictures = Pictures()
    shown(pictures, range(3))

    assert publish(pictures, 0, 5) == 2
    assert shown(pictures, range(3, 6)) == [3, 4, None]
    assert pictures.counts.late == 3


def test_a_transport_that_asks_too_late_skips_to_the_newest_frame() -> None:
    pictures = Pictures()
    publish(pictures, 0, 6)

    assert shown(pictures, range(0, 6, 3)) == [0, 3]
    assert pictures.counts.skipped == 2
    assert pictures.counts.late == 0


def test_a_slower_face_shows_every_second_tick() -> None:
    """The governor makes frames twice as long; none of them is sent twice."""
    pictures = Pictures()
    pictures.publish(epoch=0, start=at(0), frame=Ticks(2 * FRAME), frames=planes(2))

    assert shown(pictures, range(5)) == [0, None, 2, None, None]
    assert pictures.counts.skipped == 0


def test_a_cut_keeps_what_lies_before_it_and_the_new_epoch_goes_on_there() -> None:
    pictures = Pictures()
    publish(pictures, 0, 8)

    assert pictures.cut(epoch=1, at=at(3)) == 5
    assert publish(pictures, 3, 8, epoch=1) == 8
    assert shown(pictures, range(12)) == [*range(11), None]


def test_a_frame_of_a_dead_epoch_that_comes_after_the_cut_is_never_shown() -> None:
    pictures = Pictures()
    pictures.cut(epoch=2, at=at(4))

    assert publish(pictures, 3, 4, epoch=1) == 1
    assert publish(pictures, 5, 1, epoch=2) == 1
    assert shown(pictures, range(8)) == [None, None, None, 3, None, 5, None, None]
    assert pictures.counts.cut == 3


def test_an_older_cut_that_comes_late_changes_nothing() -> None:
    pictures = Pictures()
    pictures.cut(epoch=2, at=at(4))
    publish(pictures, 4, 2, epoch=2)

    assert pictures.cut(epoch=1, at=at(0)) == 0
    assert shown(pictures, range(7)) == [None, None, None, None, 4, 5, None]


def test_the_queue_has_a_bound_and_refuses() -> None:
    pictures = Pictures(queued_max=4)

    assert publish(pictures, 0, 6) == 4
    assert pictures.counts.refused == 2
    assert pictures.queued == 4


def test_two_frames_never_stand_at_one_moment() -> None:
    """An engine that forgets to cut before it makes frames again is refused, not believed."""
    pictures = Pictures()
    publish(pictures, 0, 4)

    assert publish(pictures, 2, 3, epoch=1) == 1
    assert shown(pictures, range(6)) == [0, 1, 2, 3, 4, None]
    assert pictures.counts.refused == 2


def test_nobody_looks() -> None:
    pictures = Pictures()
    publish(pictures, 0, 4)
    pictures.pull(at(0))

    assert pictures.clear() == 3
    assert pictures.last is None
    assert shown(pictures, range(1, 4)) == [None, None, None]


def test_a_pts_that_goes_back_gets_nothing() -> None:
    pictures = Pictures()
    publish(pictures, 0, 3)
    shown(pictures, range(1))

    assert pictures.pull(at(0)) is None
    assert shown(pictures, range(1, 3)) == [1, 2]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(0, 40), st.integers(1, 9), st.sampled_from([1, 2, 4])),
        st.tuples(st.just("cut"), st.integers(-2, 12), st.integers(1, 2), st.just(0)),
        st.tuples(st.just("pull"), st.integers(1, 4), st.just(0), st.just(0)),
        st.tuples(st.just("stray"), st.integers(0, 40), st.integers(1, 4), st.just(0)),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(events=EVENTS)
def test_whatever_comes_in_whatever_order(events: list[tuple[str, int, int, int]]) -> None:
    """Shown frames only go forward and are never early; after a cut nothing older is shown at or after it; the bound
    holds; and every published frame is shown, waits, or was counted as what became of it.
    """
    pictures = Pictures(queued_max=12)
    epoch, now, cuts = 0, 0, [(0, Ticks(0))]
    seen: list[Picture] = []
    for kind, a, b, c in events:
        if kind == "publish":
            publish(pictures, now + a, b, epoch=epoch, frame=Ticks(c * FRAME))
        elif kind == "stray":
            publish(pictures, now + a, b, epoch=max(0, epoch - 1))
        elif kind == "cut":
            epoch += b
            cuts.append((epoch, at(now + a)))
            pictures.cut(epoch=epoch, at=at(now + a))
        else:
            now += a
            picture = pictures.pull(at(now))
            if picture is not None:
                newest, where = cuts[-1]
                assert picture.start <= at(now)
                assert not seen or picture.start > seen[-1].start
                assert picture.epoch >= newest or picture.start < where
                seen.append(picture)
        assert pictures.queued <= 12

    counts = pictures.counts
    fates = counts.shown + counts.late + counts.skipped + counts.cut + counts.refused + pictures.queued
    assert counts.published == fates
    assert counts.shown == len(seen)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_until_is_behind_the_newest_frame(count: int) -> None:
    pictures = Pictures()
    publish(pictures, 3, count)

    assert pictures.until == (at(3 + count) if count else 0)
