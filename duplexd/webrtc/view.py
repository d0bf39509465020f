"""What one person sees of the character: frames of the engine, and what the engine is told about them.

    HIDDEN --the page is seen, and its track has a clock--> SHOWN --hidden, or the track is gone--> HIDDEN

1. Pictures are made for nobody but a page that is seen, and for viewers (audience.py): without either the view ends,
   and the engine stops.
2. The engine hears which frames are beyond its reach (`FramesSent`), at most once in 80 ms and right after a cut: what
   lies behind it may still be made again.
3. When this process cannot encode in time it says so, once in two seconds: the engine then makes fewer frames.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from duplexd.ids import SessionId
from duplexd.media import pictures
from duplexd.media.line import Line
from duplexd.media.pictures import PICTURE_FRAME, PICTURES_BEHIND, Pictures
from duplexd.messages import CutFrames, FramesSent, PictureShortage, PublishFrames, ViewEnded, ViewStarted
from duplexd.units import NANOS_PER_SECOND, TICKS_PER_MS, Nanos, Ticks
from duplexd.webrtc.video import VideoTrack
from duplexd.webrtc.wire import Picture

TOLD_EVERY = Ticks(80 * TICKS_PER_MS)
JUDGED_EVERY = Nanos(2 * NANOS_PER_SECOND)
SHORTAGE_BELOW = 0.9  #: share of the frames that were there in time and could be sent


class View:
    """One session's picture in the front end.

    Args:    tell: takes facts for the engine, in order.
    """

    def __init__(self, session: SessionId, line: Line, tell: Callable[[Any], object]) -> None:
        self.pictures = Pictures()
        self.page_is_seen = True  #: until the page says that it is hidden
        self.page_counts: dict[str, int] = {}  #: what the page counted of it; they never fall, whatever it says
        self._session = session
        self._line = line
        self._tell = tell
        self._track: VideoTrack | None = None  #: it is shown on; None: it is hidden
        self._told = Ticks(0)  #: newest `FramesSent.until`
        self._judge_at = Nanos(0)
        self._judged = (0, 0)  #: frames shown and skipped when the last two seconds began

    @property
    def shown(self) -> bool:
        return self._track is not None

    def count(self, told: Picture) -> None:
        """What the page says that it has received."""
        new = {"received": told.received, "dropped": told.dropped, "freezes": told.freezes}
        self.page_counts = {name: max(count, self.page_counts.get(name, 0)) for name, count in new.items()}

    # The track --------------------------------------------------------------------------------------------------------

    def look(self, pts: Ticks) -> pictures.Picture | None:
        """What is new at a tick of the track."""
        picture = self.pictures.pull(pts)
        if pts + PICTURE_FRAME - self._told >= TOLD_EVERY:
            self._tell_sent(Ticks(pts + PICTURE_FRAME))
        return picture

    def _tell_sent(self, until: Ticks) -> None:
        if until > self._told:
            self._told = until
            self._tell(FramesSent(self._session, until))

    # Time -------------------------------------------------------------------------------------------------------------

    def tick(self, track: VideoTrack | None, origin: Nanos | None, now: Nanos, *, watched: bool = False) -> None:
        """Begin or end the view as the page and its connection are now.

        Args:    track: the face's, while the page is connected; origin: of its clock, once it has one. Its pictures
                 are due `PICTURES_BEHIND` later than its voice.
                 watched: somebody else looks, whether the page is seen or not.
        """
        if not (self.page_is_seen or watched) or track is None or origin is None:
            self._end()
        elif track is not self._track:
            self._end()  # A track for viewers went with the last of them, and the next has another.
            self._begin(track, origin, now)
        if self.shown and now >= self._judge_at:
            self._judge(now)

    def _begin(self, track: VideoTrack, origin: Nanos, now: Nanos) -> None:
        self._track = track
        self._line.begin_view()
        track.show()
        self._tell(ViewStarted(self._session, Nanos(origin + PICTURES_BEHIND)))
        self._tell_sent(track.next_pts)
        self._begin_judging(now)

    def _end(self) -> None:
        if self._track is None:
            return
        self._track.hide()
        self._track = None
        self._line.end_view()
        self.pictures.clear()
        self._tell(ViewEnded(self._session))

    def _begin_judging(self, now: Nanos) -> None:
        self._judge_at = Nanos(now + JUDGED_EVERY)
        self._judged = (self.pictures.counts.shown, self.pictures.counts.skipped)

    def _judge(self, now: Nanos) -> None:
        shown = self.pictures.counts.shown - self._judged[0]
        skipped = self.pictures.counts.skipped - self._judged[1]
        if shown < SHORTAGE_BELOW * (shown + skipped):
            self._tell(PictureShortage(self._session, shown / (shown + skipped)))
        self._begin_judging(now)

    # The engine -------------------------------------------------------------------------------------------------------

    def publish(self, news: PublishFrames, frames: NDArray[Any]) -> None:
        """Args:    frames: uint8 (count, height * 3 / 2, width), a copy that is ours."""
        if self.shown:
            self.pictures.publish(epoch=news.epoch, start=news.start, frame=news.frame, frames=list(frames))

    def cut(self, news: CutFrames) -> None:
        self.pictures.cut(epoch=news.epoch, at=news.at)
        if self._track is not None:
            self._tell_sent(self._track.next_pts)
