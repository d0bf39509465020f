"""Playout: which sample of the timeline stands at which pts of the transport, and what was heard of it.

1. The transport asks for a frame every 20 ms with a pts that never goes back; it gets content, or silence, never
   nothing.
2. The log maps pts to (epoch, position). Held, muted and silent pts map to nothing; after a resume two stretches of
   pts may map to one stretch of the timeline, of which only the later one was heard.
3. What was sent in the last `kept` of media time is kept, so that a resume sends again from the muted sample.
4. `advance` drops everything of older epochs. Nothing of an older epoch can be published afterwards.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np
from numpy.typing import NDArray

from duplexd.ids import Epoch
from duplexd.units import Span, Ticks, ticks_from_ms, ticks_from_samples

Pcm = NDArray[np.int16]
FRAME = ticks_from_ms(20)


class Piece(msgspec.Struct):
    """Content: PCM of one span."""

    epoch: Epoch
    start: Ticks
    pcm: Pcm


class Entry(msgspec.Struct):
    """`length` ticks from `pts` on carried the timeline from `position` on."""

    pts: int
    length: int
    epoch: Epoch
    position: Ticks

    @property
    def end(self) -> int:
        return self.pts + self.length


class Place(msgspec.Struct, frozen=True):
    """What stands at a pts: the position, and how long before the pts the content ended (0 while it plays)."""

    epoch: Epoch
    position: Ticks
    past: Ticks


class Taken(msgspec.Struct, frozen=True):
    """Content handed to a transport that has no clock of its own: what stands at `position` and after it."""

    position: Ticks
    pcm: Pcm


class Playout:
    """One session's voice output on its way to the transport.

    Args:    rate: samples per second, a divisor of 48000.
             kept: media time of sent content kept for a resume; log_max: entries of the log.
             queued_max: content accepted and not yet sent; beyond it `publish` raises, since the engine's lookahead
             gate must have failed.
    """

    def __init__(
        self,
        *,
        rate: int,
        kept: Ticks = ticks_from_ms(2000),
        log_max: int = 2048,
        queued_max: Ticks = ticks_from_ms(10_000),
    ) -> None:
        self.rate = rate
        self.epoch = Epoch(0)
        self.held = False
        self.delivered = Ticks(0)  #: end of what was handed to the transport
        self.dropped_samples = 0  #: content of dead epochs that was refused or flushed
        self.sent_samples = 0
        self.stale_samples = 0  #: content sent although the engine had ended its epoch: the news was under way
        self.underruns = 0  #: times the content ran out before the reply's last chunk
        self.underrun_ticks = 0
        self.gaps = 0  #: silences inside a reply that have ended in sound; never falls, as `underruns` may
        self._ticks_per_sample = int(ticks_from_samples(1, rate))
        self._frame = FRAME // self._ticks_per_sample
        self._queue: deque[Piece] = deque()
        self._queued = 0
        self._sent: deque[Piece] = deque()
        self._kept = kept
        self._log: deque[Entry] = deque(maxlen=log_max)
        self._queued_max = queued_max
        self._expecting = False  #: more of this reply is to come
        self.placed: list[Entry] = []  #: what the last `pull` put where it does not follow what was there
        self._taken_until = -1  #: pts behind what was taken last of a reply that is not over
        self._starved_at: int | None = None

    # The engine's side ---------------------------------------------------------------------------------------------

    def publish(self, *, epoch: Epoch, span: Span, pcm: Pcm, last: bool) -> bool:
        """Queue a chunk; False when its epoch is dead: it is dropped here, at the last door."""
        if epoch != self.epoch:
            self.dropped_samples += len(pcm)
            return False
        if self._queued + span.length > self._queued_max:
            raise OverflowError(f"{self._queued} ticks are queued; the bound is {self._queued_max}")
        if len(pcm):
            self._queue.append(Piece(epoch, span.start, pcm))
        self._queued += len(pcm) * self._ticks_per_sample
        self._expecting = not last
        return True

    def advance(self, epoch: Epoch, at: Ticks) -> int:
        """A new epoch begins at `at`; returns how many samples were flushed."""
        if epoch <= self.epoch:
            return 0
        flushed = sum(len(piece.pcm) for piece in self._queue)
        self.dropped_samples += flushed
        self._queue.clear()
        self._sent.clear()
        self._queued = 0
        self.forget_after(at)
        self.epoch, self.held, self.delivered = epoch, False, at
        self._expecting, self._starved_at, self._taken_until = False, None, -1
        return flushed

    def finish(self) -> None:
        """The reply is over: what ran dry at its end was its end, not a gap."""
        self._expecting, self._taken_until = False, -1
        if self._starved_at is not None:
            self.underruns -= 1
            self._starved_at = None

    # Holding -------------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Freeze: silence goes out, the queue stays."""
        self.held = True
        self._starved_at = None

    def resume(self, heard: Ticks) -> None:
        """Go on from `heard`: what was sent after it was muted and is sent again, from the sample that holds it."""
        self.held = False
        while self._sent and self._end(self._sent[-1]) > heard:
            piece = self._sent.pop()
            skip = max(0, heard - piece.start) // self._ticks_per_sample
            if skip:
                # Heard for good: a second resume must not find what is sent again now in both places.
                self._sent.append(Piece(piece.epoch, piece.start, piece.pcm[:skip]))
                piece = Piece(piece.epoch, self._end(self._sent[-1]), piece.pcm[skip:])
            heard = Ticks(min(heard, piece.start))
            self._queue.appendleft(piece)
            self._queued += len(piece.pcm) * self._ticks_per_sample
        self.forget_after(heard)
        self.delivered = Ticks(min(self.delivered, heard))

    def _end(self, piece: Piece) -> Ticks:
        return Ticks(piece.start + len(piece.pcm) * self._ticks_per_sample)

    def forget_after(self, heard: Ticks) -> None:
        """The log keeps only what stands before `heard`: the rest was muted."""
        while self._log and self._log[-1].position >= heard:
            self._log.pop()
        if self._log:
            last = self._log[-1]
            last.length = min(last.length, heard - last.position)

    # The transport's side ------------------------------------------------------------------------------------------

    def pull(self, pts: int) -> Pcm:
        """The frame at `pts` (1/48000 s), int16 (20 ms of samples). Cost: O(frame)."""
        frame = np.zeros(self._frame, dtype=np.int16)
        self.placed = []
        if self.held:
            return frame
        filled = 0
        while filled < self._frame and self._queue:
            piece = self._queue[0]
            count = min(self._frame - filled, len(piece.pcm))
            frame[filled : filled + count] = piece.pcm[:count]
            self._note(pts + filled * self._ticks_per_sample, piece, count)
            filled += count
        self._watch_starvation(pts, filled)
        return frame

    def take(self, pts: int) -> Taken | None:
        """All of the next piece, to be played from `pts` on, without silence around it; None while there is none."""
        self.placed = []
        if self.held or not self._queue:
            return None
        piece = self._queue[0]
        taken = Taken(piece.start, piece.pcm)
        if 0 <= self._taken_until < pts:
            self.underruns += 1
            self.gaps += 1
            self.underrun_ticks += pts - self._taken_until
        self._note(pts, piece, len(piece.pcm))
        over = not self._queue and not self._expecting
        self._taken_until = -1 if over else pts + len(taken.pcm) * self._ticks_per_sample
        return taken

    def discard(self) -> None:
        """Nothing of what waits is played, although its epoch goes on: its reply was stopped at its very end."""
        self.dropped_samples += sum(len(piece.pcm) for piece in self._queue)
        self._queue.clear()
        self._sent.clear()
        self._queued, self.held, self._taken_until = 0, False, -1
        self.finish()

    def _note(self, pts: int, piece: Piece, count: int) -> None:
        ticks = count * self._ticks_per_sample
        taken = Piece(piece.epoch, piece.start, piece.pcm[:count])
        piece.pcm, piece.start = piece.pcm[count:], Ticks(piece.start + ticks)
        if not len(piece.pcm):
            self._queue.popleft()
        self._queued -= ticks
        self._sent.append(taken)
        self.sent_samples += count
        self.delivered = Ticks(taken.start + ticks)
        while len(self._sent) > 1 and self._sent[0].start < self.delivered - self._kept:
            self._sent.popleft()
        last = self._log[-1] if self._log else None
        if last and last.end == pts and last.epoch == taken.epoch and last.position + last.length == taken.start:
            last.length += ticks
        else:
            self._log.append(Entry(pts, ticks, taken.epoch, taken.start))
            self.placed.append(Entry(pts, ticks, taken.epoch, taken.start))

    def _watch_starvation(self, pts: int, filled: int) -> None:
        """A gap inside a reply is counted, with its length (an underrun a person can hear)."""
        if self._starved_at is not None and (filled or not self._expecting):
            if filled:
                self.underrun_ticks += pts - self._starved_at
                self.gaps += 1
            else:  # The reply's last chunk was empty: it ran dry at its end.
                self.underruns -= 1
            self._starved_at = None
        if filled < self._frame and self._expecting and self._starved_at is None and self._log:
            self._starved_at = pts + filled * self._ticks_per_sample
            self.underruns += 1

    @property
    def queued(self) -> Ticks:
        """Content accepted and not yet sent."""
        return Ticks(self._queued)

    @property
    def begin(self) -> Ticks:
        """Where the content of the present epoch begins, as far as it is remembered."""
        return next((entry.position for entry in self._log if entry.epoch == self.epoch), self.delivered)

    @property
    def quiet(self) -> bool:
        """Nothing is queued: only silence goes out."""
        return not self._queue

    def coming(self, pts: int) -> Entry | None:
        """What the next `pull`, at `pts`, will put where it does not follow what was there; None for nothing. O(1)."""
        if self.held or not self._queue:
            return None
        piece = self._queue[0]
        last = self._log[-1] if self._log else None
        if last and last.end == pts and last.epoch == piece.epoch and last.position + last.length == piece.start:
            return None
        return Entry(pts, len(piece.pcm) * self._ticks_per_sample, piece.epoch, piece.start)

    def playing(self, pts: int) -> Entry | None:
        """The content at `pts` itself and what follows it; None for silence. O(1)."""
        last = self._log[-1] if self._log else None
        if last is None or not last.pts <= pts < last.end:
            return None
        inside = pts - last.pts
        return Entry(pts, last.length - inside, last.epoch, Ticks(last.position + inside))

    # The ear's side ------------------------------------------------------------------------------------------------

    def pts_of(self, epoch: Epoch, position: Ticks) -> int | None:
        """Where a position stood last; None when it never did, or so long ago that it is forgotten."""
        for entry in reversed(self._log):
            if entry.epoch == epoch and entry.position <= position <= entry.position + entry.length:
                return entry.pts + position - entry.position
        return None

    def place(self, pts: int) -> Place | None:
        """What the ear has reached when it hears `pts`; None before the first content. O(entries after it)."""
        for entry in reversed(self._log):
            if entry.pts <= pts:
                inside = min(pts - entry.pts, entry.length)
                return Place(entry.epoch, Ticks(entry.position + inside), Ticks(max(0, pts - entry.end)))
        return None
