"""One output's timeline: what was generated, handed over, heard.

1. Cursors only move forward within an epoch; a late, duplicate, decreasing or foreign report changes nothing.
2. Gating may extrapolate playback between reports; commits and history never do: they use `heard`.
3. While playout is held nothing plays, so nothing is extrapolated.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from duplexd.ids import Epoch
from duplexd.messages import CursorReported
from duplexd.units import Nanos, Ticks, nanos_from_ticks, ticks_from_ms, ticks_from_nanos

#: A report older than this is not extrapolated any further: the listener's network may be gone.
EXTRAPOLATE_MAX = ticks_from_ms(500)
NANOS_PER_TICK = 20_834  #: rounded up
BUDGET_MIN = ticks_from_ms(300)
BUDGET_MAX = ticks_from_ms(1500)


class Timeline:
    """Integer media time of the voice output. `lookahead = generation - playback`."""

    def __init__(self, *, reports_kept: int = 64) -> None:
        self.epoch = Epoch(0)
        self.generation = Ticks(0)  #: end of what was started or made
        self.published = Ticks(0)  #: end of what the front end was given
        self.reported = Ticks(0)  #: newest accepted position of the ear
        self.reported_at = Nanos(0)
        self.bound = Ticks(0)
        self.buffer = Ticks(0)
        self.assumed = True  #: no measured report has come in this epoch
        self.held = False
        self._ages: deque[int] = deque(maxlen=reports_kept)
        self._by_age: list[int] = []  # the same, in order
        self._age_p99 = ticks_from_ms(200)  #: of a listener who has not reported yet
        self.reports_ignored = 0

    # what came in --------------------------------------------------------------------------------------------------

    def report(self, fact: CursorReported, now: Nanos) -> bool:
        """Take a report; False when it is late, foreign or moves backwards."""
        position = min(fact.cursor.position, self.published)
        if fact.cursor.epoch != self.epoch or position < self.reported or fact.cursor.observed_at < self.reported_at:
            self.reports_ignored += 1
            return False
        self.reported = Ticks(position)
        # An observation from the future is a broken clock, not news: it must not freeze later reports out.
        self.reported_at = Nanos(min(fact.cursor.observed_at, now))
        self.bound, self.buffer, self.assumed = fact.bound, fact.buffer, fact.assumed
        self._age_p99 = ticks_from_nanos(self._p99_with(max(0, fact.age)))
        return True

    def _p99_with(self, age: int) -> int:
        """P99 of the ages that are kept, this newest one among them."""
        ages = self._by_age
        if len(self._ages) == self._ages.maxlen:
            del ages[bisect_left(ages, self._ages[0])]
        self._ages.append(age)
        insort(ages, age)
        return ages[min(len(ages) - 1, len(ages) * 99 // 100)]

    def settle(self, position: Ticks, now: Nanos) -> None:
        """The authoritative answer to a hold: the cursor stands exactly here, even where a report had run ahead."""
        self.reported = Ticks(max(0, min(position, self.published)))
        self.reported_at = now

    # questions -----------------------------------------------------------------------------------------------------

    def playback(self, now: Nanos) -> Ticks:
        """Where the ear is, extrapolated since the last report; never past what was published."""
        if self.held or self.reported >= self.published:
            return self.reported
        position = Ticks(self.reported + min(self._extrapolated(now), EXTRAPOLATE_MAX))
        return position if position < self.published else self.published

    @property
    def heard(self) -> Ticks:
        """What certainly was heard: the last report less its error bound."""
        return Ticks(max(0, self.reported - self.bound))

    def budget(self, chunk: Ticks, making: Ticks = Ticks(0)) -> Ticks:
        """How far generation may run ahead: chunk + client buffer + P99 age of reports, within 0.3-1.5 s (DESIGN §5.1).

        `making` is how long the chunk takes to be made: started later than that, it comes after the transport has run
        dry, whatever still lies in the client's buffer.
        """
        budget = Ticks(chunk + self.buffer + self._age_p99 + making)
        return BUDGET_MIN if budget < BUDGET_MIN else BUDGET_MAX if budget > BUDGET_MAX else budget

    def reenters_budget_at(self, end: Ticks, budget: Ticks, now: Nanos) -> Nanos | None:
        """When a chunk that ends at `end` fits the budget, if playback goes on as it does; None if it never will.

        What needs more playback than the last report can be carried on for waits for the next report: a moment that is
        asked for and does not come would be asked for again at once, and again.
        """
        playback = self.playback(now)
        short = end - playback - budget
        if short <= 0:
            return now
        if self.held or playback + short > min(self.published, self.reported + EXTRAPOLATE_MAX):
            return None
        return Nanos(now + nanos_from_ticks(short) + 1)

    def silence_at(self, made: Ticks, now: Nanos) -> Nanos:
        """When silence would start if nothing came after `made`; while playback goes on, the same at any `now`."""
        elapsed = self._extrapolated(now)
        if self.held or elapsed >= EXTRAPOLATE_MAX or self.reported + elapsed >= self.published:
            return Nanos(now + nanos_from_ticks(max(0, made - self.playback(now))))
        return Nanos(self.reported_at + nanos_from_ticks(max(0, made - self.reported)))

    def silent_for(self, now: Nanos) -> Nanos:
        """How long ago all that was published had been heard; 0 while some of it has not, or nothing may play."""
        if self.held:
            return Nanos(0)
        return Nanos(max(0, now - self.reported_at - nanos_from_ticks(self.published - self.reported)))

    def _extrapolated(self, now: Nanos) -> Ticks:
        return ticks_from_nanos(now - self.reported_at) if now > self.reported_at else Ticks(0)

    # orders --------------------------------------------------------------------------------------------------------

    def advance(self, at: Ticks) -> None:
        """An interruption: the timeline goes on at `at`, in a new epoch, and nothing after `at` was ever made."""
        self.epoch = Epoch(self.epoch + 1)
        self.generation = self.published = self.reported = at
        self.held = False


class PictureTimeline(Timeline):
    """The picture's: both processes read one clock, so where the eye is needs no report.

    Playback goes on whether or not something was made: a frame that comes late is dropped, never shown later.
    """

    def __init__(self, *, ahead: Ticks) -> None:
        super().__init__()
        self.assumed = False
        self.ahead = ahead  #: how far beyond the way through the stages a chunk may be begun
        self._origin = Nanos(0)

    def begin(self, origin: Nanos) -> None:
        """Picture time 0 is due at `origin`; nothing was made on it yet."""
        self._origin = origin
        self.generation = self.published = self.reported = Ticks(0)

    def playback(self, now: Nanos) -> Ticks:
        return ticks_from_nanos(max(0, now - self._origin))

    def due(self, pts: Ticks) -> Nanos:
        return Nanos(self._origin + nanos_from_ticks(pts))

    def budget(self, chunk: Ticks, making: Ticks = Ticks(0)) -> Ticks:
        return Ticks(chunk + self.ahead + making)

    def reenters_budget_at(self, end: Ticks, budget: Ticks, now: Nanos) -> Nanos | None:
        short = end - self.playback(now) - budget
        return now if short <= 0 else Nanos(now + nanos_from_ticks(short) + NANOS_PER_TICK)

    def silence_at(self, made: Ticks, now: Nanos) -> Nanos:
        return self.due(made)

    def silent_for(self, now: Nanos) -> Nanos:
        return Nanos(max(0, now - self.due(self.published)))
