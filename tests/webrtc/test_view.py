"""The picture's half of a visit: when frames are wanted, what the engine hears of them, and what is dropped."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from duplexd.ids import ChunkId, SessionId
from duplexd.media.line import Line
from duplexd.media.pictures import PICTURE_FRAME, PICTURES_BEHIND
from duplexd.messages import CutFrames, FramesSent, PictureShortage, PublishFrames, ViewEnded, ViewStarted
from duplexd.units import NANOS_PER_MS, Nanos, Ticks
from duplexd.webrtc.video import VideoTrack
from duplexd.webrtc.view import View

SESSION = SessionId(3)
ORIGIN = Nanos(77)


class Track:
    """The switch of a video track."""

    def __init__(self) -> None:
        self.is_shown = False
        self.next_pts = Ticks(0)

    def show(self) -> None:
        self.is_shown = True

    def hide(self) -> None:
        self.is_shown = False


class SeenLine:
    def __init__(self) -> None:
        self.seen = False

    def begin_view(self) -> None:
        self.seen = True

    def end_view(self) -> None:
        self.seen = False


class Scene:
    def __init__(self) -> None:
        self.told: list[Any] = []
        self.line = SeenLine()
        self.track = Track()
        self.view = View(SESSION, cast(Line, self.line), self.told.append)
        self.at = 0.0

    def tick(self, *, connected: bool = True, origin: Nanos | None = ORIGIN, ms: float = 20) -> None:
        self.at += ms
        track = cast(VideoTrack, self.track) if connected else None
        self.view.tick(track, origin, Nanos(round(self.at * NANOS_PER_MS)))

    def look(self, *frames: int) -> list[int | None]:
        """What the track is given at these ticks, by number of the frame."""
        found = []
        for frame in frames:
            picture = self.view.look(Ticks(frame * PICTURE_FRAME))
            self.track.next_pts = Ticks((frame + 1) * PICTURE_FRAME)
            found.append(None if picture is None else picture.start // PICTURE_FRAME)
        return found

    def publish(self, first: int, count: int, *, epoch: int = 0) -> None:
        news = PublishFrames(SESSION, ChunkId(1), epoch, Ticks(first * PICTURE_FRAME), count, 0, PICTURE_FRAME)
        self.view.publish(news, np.zeros((count, 6, 4), np.uint8))

    def take(self, kind: type[Any]) -> list[Any]:
        return [fact for fact in self.told if isinstance(fact, kind)]

    def frames_told(self) -> list[int]:
        return [fact.until // PICTURE_FRAME for fact in self.take(FramesSent)]


def seen() -> Scene:
    scene = Scene()
    scene.tick()
    return scene


def test_the_view_begins_when_page_connection_and_clock_are_there() -> None:
    scene = Scene()
    scene.tick(connected=False)
    scene.tick(origin=None)
    assert scene.told == []
    scene.tick()
    scene.tick()

    assert scene.told == [ViewStarted(SESSION, Nanos(ORIGIN + PICTURES_BEHIND))]
    assert scene.track.is_shown
    assert scene.line.seen


def test_a_hidden_page_ends_the_view_and_comes_back() -> None:
    scene = seen()
    scene.publish(0, 4)
    scene.view.page_is_seen = False
    scene.tick()
    assert scene.take(ViewEnded) == [ViewEnded(SESSION)]
    assert not scene.track.is_shown
    assert not scene.line.seen
    scene.publish(1, 4)
    scene.view.page_is_seen = True
    scene.tick()

    assert len(scene.take(ViewStarted)) == 2
    assert scene.look(0, 1, 2) == [None, None, None]


def test_a_lost_connection_ends_the_view_once() -> None:
    scene = seen()
    scene.tick(connected=False)
    scene.tick(connected=False)

    assert len(scene.take(ViewEnded)) == 1


def test_a_track_that_takes_the_place_of_another_begins_the_view_anew() -> None:
    """The last viewer goes and the next comes between two ticks: the new track would stay dark."""
    scene = seen()
    first, scene.track = scene.track, Track()
    scene.tick()

    assert (first.is_shown, scene.track.is_shown) == (False, True)
    assert [type(fact) for fact in scene.told] == [ViewStarted, ViewEnded, ViewStarted]


def test_the_engine_hears_at_most_every_80_ms_what_is_beyond_its_reach() -> None:
    """Frames and empty ticks alike: a frame that would come for an empty tick now would be late."""
    scene = seen()
    scene.publish(0, 4)

    assert scene.look(*range(8)) == [0, 1, 2, 3, None, None, None, None]
    assert scene.frames_told() == [2, 4, 6, 8]


def test_after_a_cut_the_engine_hears_it_at_once() -> None:
    scene = seen()
    scene.publish(0, 8)
    scene.look(0, 1, 2)
    scene.view.cut(CutFrames(SESSION, 1, Ticks(4 * PICTURE_FRAME)))

    assert scene.frames_told() == [2, 3]
    scene.publish(4, 3, epoch=1)
    assert scene.look(3, 4, 5) == [3, 4, 5]


def test_a_front_end_that_cannot_keep_up_says_so_every_two_seconds() -> None:
    """Every second frame waits in time and is not asked for in time."""
    scene = seen()
    for first in range(0, 52, 4):
        scene.publish(first, 4)
        scene.look(first + 1, first + 3)
    scene.tick(ms=2000)
    scene.tick(ms=2000)

    assert scene.take(PictureShortage) == [PictureShortage(SESSION, 0.5)]


def test_late_frames_of_the_engine_are_no_shortage_of_the_front_end() -> None:
    scene = seen()
    for frame in range(50):
        scene.look(frame)
        scene.publish(frame, 1)
    scene.tick(ms=2000)

    assert scene.take(PictureShortage) == []
    assert scene.view.pictures.counts.late == 50
