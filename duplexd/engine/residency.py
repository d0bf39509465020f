"""Residency: who has a place in the arena, who waits for one, whose pages leave when there are too few (DESIGN §5, §8).

1. Who needs the thinker needs a *place*. Places are counted so that everybody who has one can grow to its bound: once
   it has its place, a session is never short of pages for longer than others take to leave.
2. Who needs nothing gives the place back. Its pages stay, as a cache, until somebody else is short of pages.
3. Who finds no place waits in line. The line is bounded by the sessions there are; the session itself gives up.
4. Pages leave from the sessions that are needed last, of each the suffix first. What leaves counts as free already, so
   that two who are short at once do not both drive somebody out.
5. Whoever stands in line is protected as far as pages reach beyond the places. The others in line give pages when
   nobody rests, the last in line first: a place is a promise, a stand in line is none.
6. Whoever is chosen has been heard to the end, so T_play is 0 here. A session whose reply is thought and still plays
   keeps its place, and giving it up would help nobody: places are counted so that pages suffice for all who have one
   (1), so that none of these is ever asked for pages; what nobody has heard is CURRENT, which dies with its epoch and
   does not leave (`classes.py`); a place is lane time as well, and what plays is still being talked and rendered; and
   whoever interrupts needs the memory at that moment, in a place that others would have by then. A policy that gives
   places back earlier finds the index right for it: it counts T_play, and its tests and `bench memory` use it.
7. How fast copies are and how long a voice lasts before the thinker needs its memory is measured; until then it is as
   declared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from duplexd.engine.admission import Places
from duplexd.engine.dialogue import Context
from duplexd.ids import SessionId, WorkId
from duplexd.memory.eviction import Candidate, EvictionIndex, Remaining, Verdict, admit_preload
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos

#: T_reply of somebody who has not answered yet: the median pause between playback and the next words.
REPLY_PRIOR = Nanos(1_200 * NANOS_PER_MS)
PRELOAD_MARGIN = Nanos(10 * NANOS_PER_MS)
#: From the onset of a voice to the first words that two readings agree on; the thinker is not needed earlier. Of an
#: engine that has heard nobody yet.
FIRST_WORDS_PRIOR = Nanos(600 * NANOS_PER_MS)
#: The newest measurement has this share of an average, as a divisor.
WEIGHT = 8


#: Processor time of the calling thread, to measure with and never to decide by.
ThreadTime = Callable[[], Nanos]


def nothing_measured() -> Nanos:
    """Thread time of a world that measures none of its own: simulations and replays."""
    return Nanos(0)


class CopyPace:
    """Bytes a second that the copy lane carries: as declared until a copy has ended, then as measured.

    Bytes and time are averaged apart, so that a small copy, most of which is overhead, counts for little.
    """

    def __init__(self, declared: int) -> None:
        self._declared = declared
        self._bytes = self._took = 0.0

    def note(self, copied_bytes: int, took: Nanos) -> None:
        """A copy of so many bytes has run for so long."""
        if took > 0:
            self._bytes += (copied_bytes - self._bytes) / WEIGHT
            self._took += (took - self._took) / WEIGHT

    @property
    def bytes_per_second(self) -> int:
        return round(self._bytes * NANOS_PER_SECOND / self._took) if self._took else self._declared

    def time_of(self, count_bytes: int) -> Nanos:
        """How long a copy of so many bytes runs; 0 while nobody knows (then no preload is admitted either)."""
        pace = self.bytes_per_second
        return Nanos(-(-count_bytes * NANOS_PER_SECOND // pace) if pace else 0)


class FirstWords:
    """How long after the onset of a voice the thinker is needed: a moving average over all sessions."""

    def __init__(self, prior: Nanos = FIRST_WORDS_PRIOR) -> None:
        self.expected = prior
        self._measured = False

    def note(self, took: Nanos) -> None:
        step = took - self.expected
        self.expected = Nanos(self.expected + (step // WEIGHT if self._measured else step))
        self._measured = True


class Residency:
    """The resident set of one engine.

    Args:    places: sessions that may need the thinker at once. sessions_max: sessions known at once.
             page_bytes: of one page; pages: how many the arena has for sessions.
             bytes_per_second: what the copy lane carries, declared by its cost model.
             session_pages: of a whole context; 0: of an equal share of the pages.
             thread_time: what the time of choosing is measured with.
    """

    def __init__(
        self,
        *,
        places: Places,
        sessions_max: int,
        page_bytes: int,
        pages: int,
        bytes_per_second: int,
        session_pages: int = 0,
        thread_time: ThreadTime = nothing_measured,
    ) -> None:
        self.places = places
        self.choices_count = 0  #: times that somebody was looked for whose pages leave
        self.choices_took = Nanos(0)  #: and how long that took in all
        self.page_bytes = page_bytes
        self._pages = pages
        self._thread_time = thread_time
        self._session_pages = session_pages or pages // places.count
        self.index = EvictionIndex(
            reply_prior=REPLY_PRIOR, protected_bytes_max=self._beyond_places(), sessions_max=sessions_max
        )
        self.pace = CopyPace(bytes_per_second)
        self.first_words = FirstWords()
        self._seated: dict[SessionId, None] = {}
        self._line: dict[SessionId, None] = {}
        self._rested: dict[SessionId, Nanos] = {}  #: since when it needs nothing
        self._leaving: dict[WorkId, int] = {}  #: pages under copies that will free them

    # Places ----------------------------------------------------------------------------------------------------------

    def need(self, session: SessionId, pages: int = 0) -> bool:
        """It needs the thinker. True: it has a place; False: it stands in line.

        Args:    pages: of its context, in the arena and in host memory.
        """
        if session in self._seated:
            return True
        if session not in self._line:
            self.index.busy(session)
            self._rested.pop(session, None)
            self._line[session] = None
            if session not in self._seat():
                self.index.protect(session, pages * self.page_bytes)
        return session in self._seated

    def seats(self, session: SessionId) -> bool:
        """It has a place."""
        return session in self._seated

    def rest(self, session: SessionId, pages: int, now: Nanos) -> list[SessionId]:
        """It needs nothing; `pages` of its own may leave. Returns who has a place because of that."""
        self._seated.pop(session, None)
        self._line.pop(session, None)
        self._rested[session] = now
        self.index.release(session)
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
        self.index.protected_bytes_max = self._beyond_places()
        return self._seat()

    def _beyond_places(self) -> int:
        """Bytes that are there when everybody who has a place has grown to the bound."""
        return max(0, self._pages - self.places.count * self._session_pages) * self.page_bytes

    def _seat(self) -> list[SessionId]:
        seated = []
        while self._line and len(self._seated) < self.places.count:
            session = next(iter(self._line))
            del self._line[session]
            self.index.release(session)
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

    def short(self, pages_needed: int, *, free: int) -> int:
        """Pages that still have to be sent away so that `pages_needed` become free; 0: enough are free or leaving."""
        return max(0, pages_needed - free - self.leaving_count)

    @property
    def cached_count(self) -> int:
        """Pages of those who rest: a cache, which leaves when somebody needs the room."""
        return self.index.candidate_bytes // self.page_bytes

    def choose(self, pages_short: int, now: Nanos) -> Sequence[Candidate]:
        """Whose pages should leave so that so many become free, farthest next use first."""
        if pages_short <= 0:
            return ()
        began = self._thread_time()
        chosen = self.index.choose(pages_short * self.page_bytes, now)
        self.choices_took = Nanos(self.choices_took + self._thread_time() - began)
        self.choices_count += 1
        return chosen

    def in_line_unprotected(self) -> Sequence[SessionId]:
        """Who stands in line and may have to give pages, the last one first."""
        return [session for session in reversed(self._line) if not self.index.protects(session)]

    def left(self, session: SessionId, work: WorkId, pages: int) -> None:
        """A copy was ordered that lets `pages` leave; 0: it cannot go now. Either way it is no candidate before its
        pages are counted again, which is done when the copy has ended.
        """
        if pages:
            self._leaving[work] = pages
        if session in self._rested:
            self.index.resize(session, 0)

    def gone(self, work: WorkId) -> None:
        """That copy has ended, well or not."""
        self._leaving.pop(work, None)

    @property
    def leaving_count(self) -> int:
        """Pages under copies that will free them."""
        return sum(self._leaving.values())

    def judge_preload(self, session: SessionId, pages: int, *, short: int, queued: Nanos, spoken: Nanos) -> Verdict:
        """A person speaks and the session's pages are away: can they come back before the first words are understood?

        Args:    short: pages that must leave before; queued: time of the copies that were ordered already.
                 spoken: since the onset.
        """
        remaining = Remaining(utterance=self.first_words.expected, spoken=spoken, silence=Nanos(0), encode=Nanos(0))
        own = pages * self.page_bytes
        index = self.index
        # A place is a promise of room. In line there is room as far as it is protected, `own` included.
        promised = session in self._seated or index.protects(session)
        return admit_preload(
            preload_bytes=own,
            bytes_per_second=self.pace.bytes_per_second,
            queued=Nanos(queued + self.pace.time_of(short * self.page_bytes)),
            margin=PRELOAD_MARGIN,
            remaining=remaining,
            protected_bytes=0 if promised else index.protected_bytes_max,
            protected_bytes_max=self._pages * self.page_bytes if promised else index.protected_bytes_max,
        )


class Transfer(msgspec.Struct, frozen=True):
    """One copy under way between the arena and host memory."""

    session: SessionId
    context: Context
    leaving: bool
    pages: int
    ordered_at: Nanos
