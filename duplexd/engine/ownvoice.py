"""Own voice on the picture's timeline: what of it is known, and where it stands.

1. What was said is known by position (epoch and span of a chunk), where it is sent by pts: `place` joins the two. From
   a placement on content is contiguous until the next one, or until it is stopped.
2. A position of a dead epoch is never heard: the new epoch's sound lies in the same places of the ring.
3. What ended longer ago than a face hears is forgotten; pieces are few.
"""

from __future__ import annotations

from collections import deque

import msgspec

from duplexd.ids import Epoch
from duplexd.streams.stage import Spoken
from duplexd.units import Span, Ticks, ticks_from_ms

#: A voice whose next chunk is overdue by this much has run dry; until then it is about to go on.
DRY_AFTER = ticks_from_ms(100)
PIECES_MAX = 16  #: stretches remembered; the oldest is forgotten at the bound


class _Piece(msgspec.Struct):
    """A stretch that is sent without a break; it goes on as long as its voice does, unless it was stopped."""

    epoch: Epoch
    pts: Ticks
    position: Ticks
    stop: Ticks | None = None  #: pts behind its end; None: it goes on

    @property
    def shift(self) -> int:
        return self.pts - self.position


class OwnVoice:
    """Args: kept: how long after its end a stretch may still be heard by a face."""

    def __init__(self, *, kept: Ticks) -> None:
        self.epoch = Epoch(0)
        self._kept = kept
        self._known = Span(Ticks(0), Ticks(0))  # positions of this epoch that lie in the ring
        self._made = Ticks(0)  # end of what the voice has made
        self._complete = True  # nothing follows what is known
        self._pieces: deque[_Piece] = deque(maxlen=PIECES_MAX)

    # What comes ------------------------------------------------------------------------------------------------------

    def expect(self, epoch: Epoch, end: Ticks) -> None:
        """A chunk is on its way into the ring: what it says is awaited from where what is known ends."""
        if epoch == self.epoch:
            self._complete, self._made = False, Ticks(max(self._made, end))

    def learn(self, epoch: Epoch, span: Span, *, last: bool) -> None:
        """A chunk lies in the ring; `last`: nothing of its reply follows."""
        if epoch != self.epoch:
            return
        follows = span.start == self._known.end
        self._known = Span(self._known.start if follows else span.start, span.end)
        self._made = Ticks(max(self._made, span.end))
        self._complete = last

    def advance(self, epoch: Epoch, at: Ticks) -> None:
        """What was said after `at` is dead. Where it stood as long as it was sent, it is not heard any more."""
        self.epoch, self._complete, self._made = epoch, True, at
        self._known = Span(Ticks(min(self._known.start, at)), Ticks(min(self._known.end, at)))
        for piece in self._pieces:
            ends = Ticks(max(piece.pts, at + piece.shift))
            piece.stop = ends if piece.stop is None else Ticks(min(piece.stop, ends))

    def place(self, epoch: Epoch, position: Ticks, pts: Ticks) -> bool:
        """From `pts` on the voice goes on from `position`. False for a dead epoch, which changes nothing."""
        if epoch != self.epoch:
            return False
        live = self._pieces[-1] if self._pieces else None
        if live is not None and live.stop is None and position >= live.position:
            # It ran dry before it goes on here: what is sent now was not sent then.
            self.stop(Ticks(min(pts, position + live.shift)))
        self.stop(pts)
        self._pieces.append(_Piece(epoch, pts, position))
        return True

    def stop(self, pts: Ticks) -> None:
        """From `pts` on nothing of the voice is sent."""
        for piece in self._pieces:
            # What is made later was not sent then, even if the voice had run dry before it was stopped.
            sent = min(pts, self._made + piece.shift) if piece.epoch == self.epoch else pts
            if piece.stop is None or piece.stop > sent:
                piece.stop = Ticks(max(piece.pts, sent))

    def forget(self, before: Ticks) -> None:
        """Nobody will hear what ended before this pts, less what a face hears of the past."""
        while self._pieces and self._pieces[0].stop is not None and self._pieces[0].stop < before - self._kept:
            self._pieces.popleft()

    def clear(self) -> None:
        """Picture time begins anew: nothing stands anywhere."""
        self._pieces.clear()

    # Questions -------------------------------------------------------------------------------------------------------

    def spoken(self) -> tuple[Spoken, ...]:
        """What is heard, by pts, oldest first; pieces without a sample are left out."""
        pieces = ((piece, self._begin(piece), self._heard_until(piece)) for piece in self._pieces)
        return tuple(Spoken(Span(begin, end), Ticks(begin - p.shift)) for p, begin, end in pieces if end > begin)

    def _begin(self, piece: _Piece) -> Ticks:
        """Pts of the first sample of a piece that lies in the ring: what was said while nobody looked does not."""
        return piece.pts if piece.epoch != self.epoch else Ticks(max(piece.pts, self._known.start + piece.shift))

    def _heard_until(self, piece: _Piece) -> Ticks:
        end = self._end(piece)
        return end if piece.stop is None else Ticks(min(end, piece.stop))

    def _end(self, piece: _Piece) -> Ticks:
        """Pts behind the last known sample of a piece. A dead epoch's ends where it was stopped."""
        if piece.epoch != self.epoch and piece.stop is not None:
            return piece.stop
        return Ticks(max(piece.pts, self._known.end + piece.shift))

    def awaited_from(self, playback: Ticks) -> Ticks | None:
        """Pts from which on the voice is not known yet although it goes on; None while nothing more is to come, or it
        has run dry already: silence is what is heard then.
        """
        live = self._pieces[-1] if self._pieces else None
        if live is None or live.stop is not None or self._complete or live.epoch != self.epoch:
            return None
        end = self._end(live)
        return end if end > playback - DRY_AFTER else None

    def said_at(self, pts: Ticks) -> Ticks | None:
        """The position in this epoch's voice that stands at a pts; None where none of it is known to."""
        for piece in reversed(self._pieces):
            if piece.epoch == self.epoch and self._begin(piece) <= pts < self._heard_until(piece):
                return Ticks(pts - piece.shift)
        return None

    def heard_at(self, pts: Ticks) -> bool:
        """Something stands at this pts or after it."""
        return any(self._heard_until(piece) > max(pts, self._begin(piece)) for piece in self._pieces)
