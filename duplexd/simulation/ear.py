"""What one listener hears, computed: a published chunk is a stretch of time at the ear, not a row of frames.

1. The front end sends what it has at the speed of sound: a chunk's first sample leaves when it was published, or when
   the one before it has left. It is heard `way` later: network, jitter buffer, output device.
2. A packet that needs longer than `way` is late at the ear, and so is everything behind it until the next silence.
3. Within one reply, silence between two stretches that belong together is a gap. What the listener stopped is none.
"""

from __future__ import annotations

from collections import deque

import msgspec

from duplexd.ids import Epoch, ResponseId
from duplexd.units import NANOS_PER_SECOND, Nanos, Span, Ticks, nanos_from_ticks, ticks_from_nanos

KEPT = Nanos(NANOS_PER_SECOND)  #: how far back a position can be asked for


class Stretch(msgspec.Struct):
    """One chunk at the ear."""

    epoch: Epoch
    response: ResponseId
    start: Ticks
    end: Ticks
    at: Nanos  #: when its first sample is heard
    resumed: bool = False  #: it was stopped and goes on: the silence before it was the listener's own

    @property
    def until(self) -> Nanos:
        return Nanos(self.at + nanos_from_ticks(self.end - self.start))

    def position(self, now: Nanos) -> Ticks:
        return Ticks(min(self.end, self.start + ticks_from_nanos(max(0, now - self.at))))


class Gap(msgspec.Struct, frozen=True):
    """Silence inside a reply."""

    response: ResponseId
    at: Nanos  #: when the sound came back
    length: Nanos


class Place(msgspec.Struct, frozen=True):
    epoch: Epoch
    position: Ticks
    past: Nanos  #: silence since the position was reached


class Ear:
    """One listener's playout. Bounded: what has been heard for `KEPT` is forgotten."""

    def __init__(self, *, way: Nanos) -> None:
        self.way = way
        self.epoch = Epoch(0)
        self.frozen = False
        self._stretches: deque[Stretch] = deque()
        self._position = Ticks(0)  #: where the ear is when no stretch says it
        self._since = Nanos(0)

    def publish(self, *, epoch: Epoch, response: ResponseId, span: Span, now: Nanos, delay: Nanos) -> Stretch | None:
        """A chunk was handed to the front end; `delay` is what the network makes of its first packet. None: too old."""
        if epoch < self.epoch:
            return None
        last = self._stretches[-1] if self._stretches else None
        sent = now if last is None else max(now, last.until - self.way)
        heard = sent + max(self.way, delay)
        stretch = Stretch(
            epoch, response, span.start, span.end, Nanos(heard if last is None else max(heard, last.until))
        )
        self._stretches.append(stretch)
        self._forget(now)
        return stretch

    def gap_before(self, stretch: Stretch) -> Gap | None:
        """The silence before the newest stretch, if it belongs to what was heard before it."""
        if len(self._stretches) < 2 or stretch.resumed:
            return None
        before = self._stretches[-2]
        belongs = before.response == stretch.response and before.end == stretch.start
        silence = stretch.at - before.until
        return Gap(stretch.response, stretch.at, Nanos(silence)) if belongs and silence > 0 else None

    def where(self, now: Nanos) -> Place:
        """Where the ear is, or was up to `KEPT` ago."""
        place = Place(self.epoch, self._position, Nanos(max(0, now - self._since)))
        for stretch in self._stretches:
            if stretch.at > now:
                break
            place = Place(stretch.epoch, stretch.position(now), Nanos(max(0, now - stretch.until)))
        return place

    def freeze(self, now: Nanos) -> Place:
        """The page mutes itself. What comes in meanwhile waits."""
        place = self.where(now)
        self._position, self._since, self.frozen = place.position, now, True
        return place

    def resume(self, now: Nanos) -> list[Stretch]:
        """Go on where the sound stopped; returns what is to be heard, with its new times."""
        self.frozen = False
        left = [stretch for stretch in self._stretches if stretch.end > self._position]
        at = now + self.way
        for stretch in left:
            stretch.start = max(stretch.start, self._position)
            stretch.at, stretch.resumed = Nanos(at), True
            at = stretch.until
        self._stretches = deque(left)
        return left

    def flush(self, *, epoch: Epoch, at: Ticks, now: Nanos) -> Place:
        """An interruption: nothing that was not heard by now is heard. Returns where the ear stood."""
        place = Place(self.epoch, self._position, Nanos(0)) if self.frozen else self.where(now)
        self._stretches.clear()
        self._position, self._since, self.epoch, self.frozen = at, now, epoch, False
        return place

    def _forget(self, now: Nanos) -> None:
        while len(self._stretches) > 2 and self._stretches[1].at <= now - KEPT:
            gone = self._stretches.popleft()
            self._position, self._since = gone.end, gone.until
