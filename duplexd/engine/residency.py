"""Residency: who has a place in the arena, who waits for one, whose pages leave when there are too few (DESIGN §5, §8).

1. Who needs the thinker needs a *place*. Places are counted so that everybody who has one can grow to its bound: once
   it has its place, a session is never short of pages for longer than others take to leave.
2. Who needs nothing gives the place back. Its pages stay, as a cache, until somebody else is short of pages.
3. Who finds no place waits in line. The line is bounded by the sessions there are; the session itself gives up.
4. Pages leave from the sessions that are needed last, of each the suffix first. What leaves counts as free already, so
   that two who are short at once do not both drive somebody out.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from duplexd.engine.admission import Places
from duplexd.engine.dialogue import Context
from duplexd.ids import SessionId, WorkId
from duplexd.memory.eviction import Candidate, EvictionIndex, Remaining, Verdict, admit_preload
from duplexd.units import NANOS_PER_MS, Nanos

#: T_reply of somebody who has not answered yet: the median pause between playback and the next words.
REPLY_PRIOR = Nanos(1_200 * NANOS_PER_MS)
PRELOAD_MARGIN = Nanos(10 * NANOS_PER_MS)
#: From the onset of a voice to the first words that two readings agree on; the thinker is not needed earlier.
FIRST_WORDS_AFTER = Nanos(600 * NANOS_PER_MS)


class Residency:
    """The resident set of one engine.

    Args:    places: sessions that may need the thinker at once. sessions_max: sessions known at once.
             page_bytes: of one page; pages: how many the arena has for sessions.
             bytes_per_second: what the copy lane carries, declared by its cost model.
    """

    def __init__(
        self, *, places: Places, sessions_max: int, page_bytes: int, pages: int, bytes_per_second: int
    ) -> None:
        self.places = places
        self.page_bytes = page_bytes
        self.index = EvictionIndex(
            reply_prior=REPLY_PRIOR, protected_bytes_max=pages * page_bytes, sessions_max=sessions_max
        )
        self._bytes_per_second = bytes_per_second
        self._seated: dict[SessionId, None] = {}
        self._line: dict[SessionId, None] = {}
        self._rested: dict[SessionId, Nanos] = {}  #: since when it needs nothing
        self._leaving: dict[WorkId, int] = {}  #: pages under copies that will free them

    # Places ----------------------------------------------------------------------------------------------------------

    def need(self, session: SessionId) -> bool:
        """It needs the thinker. True: it has a place; False: it stands in line."""
        if session in self._seated:
            return True
        self.index.busy(session)
        self._rested.pop(session, None)
        self._line.setdefault(session)
        self._seat()
        return session in self._seated

    def rest(self, session: SessionId, pages: int, now: Nanos) -> list[SessionId]:
        """It needs nothing; `pages` of its own may leave. Returns who has a place because of that."""
        self._seated.pop(session, None)
        self._line.pop(session, None)
        self._rested[session] = now
        self.index.idle(session, pages * self.page_bytes, now)
        return self._seat()

    def recount(self, session: SessionId, pages: int) -> None:
        """Another number of its pages may leave. Whoever rests keeps its turn; of others nothing is changed."""
        if session in self._rested:
            self.index.idle(session, pages * self.page_bytes, self._rested[session])

    def forget(self, session: SessionId) -> list[SessionId]:
        """It has closed. Returns who has a place because of that."""
        self._seated.pop(session, None)
        self._line.pop(session, None)
        self._rested.pop(session, None)
        self.index.forget(session)
        return self._seat()

    def resize(self, places: Places) -> list[SessionId]:
        """There are more places, or fewer: whoever has one keeps it. Returns who has a place because of that."""
        self.places = places
        return self._seat()

    def _seat(self) -> list[SessionId]:
        seated = []
        while self._line and len(self._seated) < self.places.count:
            session = next(iter(self._line))
            del self._line[session]
            self._seated[session] = None
            seated.append(session)
        return seated

    def taken_by_others(self, session: SessionId) -> float:
        """Share of the places that others have or wait for."""
        others = len(self._seated) + len(self._line) - (session in self._seated) - (session in self._line)
        return others / self.places.count

    @property
    def seated_count(self) -> int:
        return len(self._seated)

    @property
    def waiting_count(self) -> int:
        return len(self._line)

    # Room ------------------------------------------------------------------------------------------------------------

    def choose(self, pages_needed: int, *, free: int, now: Nanos) -> Sequence[Candidate]:
        """Whose pages should leave so that `pages_needed` become free; nobody when enough are free or on their way."""
        short = pages_needed - free - sum(self._leaving.values())
        return self.index.choose(short * self.page_bytes, now) if short > 0 else ()

    def left(self, session: SessionId, work: WorkId, pages: int, *, still: int) -> None:
        """A copy was ordered that lets `pages` leave; `still` may follow."""
        self._leaving[work] = pages
        self.index.resize(session, still * self.page_bytes)

    def gone(self, work: WorkId) -> None:
        """That copy has ended, well or not."""
        self._leaving.pop(work, None)

    def judge_preload(self, pages: int, *, queued: Nanos) -> Verdict:
        """Speech began and the session's pages are away: can they come back before the first words are understood?"""
        remaining = Remaining(utterance=FIRST_WORDS_AFTER, spoken=Nanos(0), silence=Nanos(0), encode=Nanos(0))
        return admit_preload(
            preload_bytes=pages * self.page_bytes,
            bytes_per_second=self._bytes_per_second,
            queued=queued,
            margin=PRELOAD_MARGIN,
            remaining=remaining,
            protected_bytes=0,
            protected_bytes_max=self.index.protected_bytes_max,
        )


class Transfer(msgspec.Struct, frozen=True):
    """One copy under way between the arena and host memory."""

    session: SessionId
    context: Context
    leaving: bool
    pages: int
    ordered_at: Nanos
