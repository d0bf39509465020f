"""Eviction: whose memory leaves first, and whether bringing it back early can hide (DESIGN §8, LiveServe eq. 4).

1. Candidates are idle sessions with resident bytes. A busy or protected session is never chosen.
2. Farthest next use first: T_next = T_play + T_reply. T_play is the playback that remains; it is 0 of all whom the
   engine offers today (`residency.py`, rule 6, says why). T_reply is the moving average of the session's gaps from the
   end of a playback to the next input, or the prior while none was seen.
3. A gap in progress counts for no less than it has lasted, so that whoever left does not look due for ever.
4. Whoever's playback is not known goes before all others, least recently used first: a session that reports nothing
   must not push out one that does.
5. Ties go to the least recently used, then to the lower session id. Nothing here depends on a hash.
6. Protected bytes have a cap. Beyond it protection is refused and counted, and the session may be chosen like others.
7. Nothing is moved or copied here, and nobody's correctness depends on the order.

T_next of one session is the greatest of three lines over the clock, so the greatest T_next of all sessions is the
greatest of three maxima. Each line has a heap that stays right as the clock moves; `now` is asked only to compare them:

    line       T_next on it           counts while
    playing    ends_at + gap - now    the reply plays
    waiting    gap                    it has ended, and the gap is not over
    overdue    now - ends_at          the gap lasts longer than expected (rule 3)
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from duplexd.errors import LedgerError
from duplexd.ids import SessionId
from duplexd.memory.agenda import Agenda
from duplexd.units import NANOS_PER_SECOND, Nanos

#: The newest gap has this share of the average, as a divisor: 1/4 follows a change of habit within a few turns.
GAP_WEIGHT = 4


class Candidate(msgspec.Struct, frozen=True):
    """An idle session and what it holds."""

    session: SessionId
    resident_bytes: int


#: (sort key, since, session): the smallest is chosen first. A sort key is -T_next at now = 0, on one line.
_Key = tuple[int, int, SessionId]


def _order() -> Agenda[SessionId]:
    """A line's candidates by `_Key`; never more entries than twice the live ones."""
    return Agenda(slack=0)


class _Session:
    """What is known of one session."""

    __slots__ = ("ends_at", "gap", "resident_bytes", "since")

    def __init__(self) -> None:
        self.ends_at: Nanos | None = None  # when its playback ends or ended; None without telemetry
        self.gap: Nanos | None = None  # moving average; None before the first
        self.since = Nanos(0)  # when it became idle
        self.resident_bytes = 0  # 0: no candidate


class EvictionIndex:
    """Candidates by next use. Every change costs O(log n) amortised; that the clock moves costs nothing.

    Args:    reply_prior: T_reply of a session without a gap of its own.
             protected_bytes_max: how much may be protected at once; what is left is what pressure can always have.
             sessions_max: sessions known at once, candidates or not.
    """

    def __init__(self, *, reply_prior: Nanos, protected_bytes_max: int, sessions_max: int) -> None:
        self.reply_prior = reply_prior
        self.protected_bytes_max = protected_bytes_max
        self.sessions_max = sessions_max
        self.protected_bytes = 0
        self.protections_refused = 0
        self.candidate_bytes = 0  #: of all that may be chosen
        self._offered: dict[SessionId, int] = {}  #: whose, how many of them
        self._sessions: dict[SessionId, _Session] = {}
        self._protected: dict[SessionId, int] = {}
        self._playing, self._waiting, self._overdue = _order(), _order(), _order()
        self._unknown = _order()
        self._orders = (self._playing, self._waiting, self._overdue, self._unknown)

    # What is told -----------------------------------------------------------------------------------------------------

    def note_playback(self, session: SessionId, ends_at: Nanos | None) -> None:
        """Its playback ends, or ended, at this moment; None: nobody knows any more."""
        known = self._know(session)
        known.ends_at = ends_at
        self._place(session, known)

    def note_reply_gap(self, session: SessionId, gap: Nanos) -> None:
        """It was so long from the end of a playback to the next input; less than 0 (it was interrupted) counts as 0."""
        known = self._know(session)
        gap = Nanos(max(0, gap))
        known.gap = gap if known.gap is None else Nanos(known.gap + (gap - known.gap) // GAP_WEIGHT)
        self._place(session, known)

    def idle(self, session: SessionId, resident_bytes: int, now: Nanos) -> None:
        """No work of it runs or waits: from now on it may be chosen, unless it is protected or holds nothing."""
        known = self._know(session)
        known.resident_bytes, known.since = resident_bytes, now
        if self.release(session):
            self.protect(session, resident_bytes)  # It has grown meanwhile; the cap holds for what it holds now.
        self._place(session, known)

    def resize(self, session: SessionId, resident_bytes: int) -> None:
        """A candidate lost a part of its memory (0: all); its place stays. Raises LedgerError for a busy session."""
        known = self._sessions.get(session)
        if known is None or not known.resident_bytes:
            raise LedgerError(f"session {session} is no candidate for eviction; only an idle one changes its size")
        known.resident_bytes = resident_bytes
        if not resident_bytes:
            self._place(session, known)
        elif session in self._offered:
            self._offer(session, resident_bytes)

    def busy(self, session: SessionId) -> None:
        """Work of it runs or waits, or a copy of its memory is on the way: it is no candidate until `idle`."""
        known = self._know(session)
        known.resident_bytes = 0
        self._place(session, known)

    def protect(self, session: SessionId, resident_bytes: int) -> bool:
        """Speech began: it needs its memory at once (T_next = 0), so it is not chosen until `release`.

        Args:    resident_bytes: what it holds, or will hold once a preload has come.
        Returns: False when that exceeds the cap; it is counted, and an earlier protection of the session stays.
        """
        known = self._know(session)
        claimed = self.protected_bytes - self._protected.get(session, 0) + resident_bytes
        if claimed > self.protected_bytes_max:
            self.protections_refused += 1
            return False
        self.protected_bytes = claimed
        self._protected[session] = resident_bytes
        self._place(session, known)
        return True

    def protects(self, session: SessionId) -> bool:
        return session in self._protected

    def release(self, session: SessionId) -> bool:
        """Undo `protect`; returns whether it was protected."""
        if session not in self._protected:
            return False
        self.protected_bytes -= self._protected.pop(session)
        self._place(session, self._sessions[session])
        return True

    def forget(self, session: SessionId) -> None:
        """The session has closed. Forgetting twice is nothing."""
        self.release(session)
        self._sessions.pop(session, None)
        self._leave(session)

    # What is asked ----------------------------------------------------------------------------------------------------

    def choose(self, bytes_needed: int, now: Nanos) -> list[Candidate]:
        """Who should leave, farthest next use first, until the sum is enough or no candidate is left.

        Nothing is taken out: the caller evicts (of each session, suffix pages before prefix pages) and then says what
        is left by `resize`, or `busy` while the copy to the host is on the way.
        Cost:    O(chosen log n) amortised.
        """
        lifted: list[tuple[Agenda[SessionId], tuple[Any, int, SessionId]]] = []
        chosen: dict[SessionId, Candidate] = {}
        while bytes_needed > 0 and (order := self._farthest(now)) is not None:
            entry = order.lift()
            lifted.append((order, entry))
            session = entry[2]
            if session not in chosen:  # else it was chosen by another of its lines
                chosen[session] = Candidate(session, self._sessions[session].resident_bytes)
                bytes_needed -= chosen[session].resident_bytes
        for order, entry in lifted:
            order.lower(entry)
        return list(chosen.values())

    def __len__(self) -> int:
        """Candidates."""
        return len(self._playing) + len(self._unknown)

    @property
    def entries_count(self) -> int:
        """Entries of all heaps, stale ones included: at most six for each candidate."""
        return sum(order.entries_count for order in self._orders)

    # Places -----------------------------------------------------------------------------------------------------------

    def _know(self, session: SessionId) -> _Session:
        known = self._sessions.get(session)
        if known is None:
            if len(self._sessions) >= self.sessions_max:
                raise LedgerError(
                    f"session {session} is one more than the {self.sessions_max} the eviction index may know; "
                    "forget sessions that have closed"
                )
            known = self._sessions[session] = _Session()
        return known

    def _leave(self, session: SessionId) -> None:
        self._offer(session, 0)
        for order in self._orders:
            order.remove(session)

    def _offer(self, session: SessionId, resident_bytes: int) -> None:
        self.candidate_bytes += resident_bytes - self._offered.pop(session, 0)
        if resident_bytes:
            self._offered[session] = resident_bytes

    def _place(self, session: SessionId, known: _Session) -> None:
        """Put it where it belongs after something has changed."""
        self._leave(session)
        if not known.resident_bytes or session in self._protected:
            return
        self._offer(session, known.resident_bytes)
        if known.ends_at is None:
            self._unknown.put(session, (0, known.since, session))
            return
        gap = self.reply_prior if known.gap is None else known.gap
        self._playing.put(session, (-(known.ends_at + gap), known.since, session))
        self._waiting.put(session, (-gap, known.since, session))
        self._overdue.put(session, (known.ends_at, known.since, session))

    def _farthest(self, now: Nanos) -> Agenda[SessionId] | None:
        """The order whose first entry goes before those of the others."""
        if self._unknown.first() is not None:
            return self._unknown
        lines = ((self._playing, now), (self._waiting, 0), (self._overdue, -now))
        firsts: list[tuple[_Key, Agenda[SessionId]]] = []
        for order, shift in lines:
            if (first := order.first()) is not None:
                key, since, session = first[0]
                firsts.append(((key + shift, since, session), order))
        return min(firsts, key=lambda first: first[0])[1] if firsts else None


# Preload -------------------------------------------------------------------------------------------------------------


class Verdict(Enum):
    """Whether an offloaded session is brought back now; everything but HIDEABLE is skipped and loaded when needed."""

    HIDEABLE = "hideable"
    LATE = "late"  #: the copy would not be done when the thinker needs it
    NO_ROOM = "no room"  #: with it, more would be protected than the cap allows
    NO_BANDWIDTH = "no bandwidth"  #: nobody knows how fast the copy lane is
    NO_ESTIMATE = "no estimate"  #: nobody knows when the thinker will need it


class Remaining(msgspec.Struct, frozen=True):
    """How long until the thinker needs its context, seen from speech onset. None: not known.

    A thinker that prefills words while they are spoken needs it at the first of them, not at the end of the turn: its
    `utterance` is the time from onset to the first stable words, and its `silence` is 0.
    """

    utterance: Nanos | None  #: how long the person usually speaks
    spoken: Nanos  #: how long they have spoken already
    silence: Nanos | None  #: that must pass before the turn counts as ended
    encode: Nanos | None  #: from the last sample to the thinker: copy, encode, decode of the words

    @property
    def expected(self) -> Nanos | None:
        """The sum; None when a part is missing. Who has spoken for longer than usual may end at any moment."""
        if self.utterance is None or self.silence is None or self.encode is None:
            return None
        return Nanos(max(0, self.utterance - self.spoken) + self.silence + self.encode)


def admit_preload(
    *,
    preload_bytes: int,
    bytes_per_second: int | None,
    queued: Nanos,
    margin: Nanos,
    remaining: Remaining,
    protected_bytes: int,
    protected_bytes_max: int,
) -> Verdict:
    """Is there time and room to bring a session back before it is needed (notes/papers.md formula 5)?

        queued + preload_bytes / bytes_per_second + margin <= remaining   and
        protected_bytes + preload_bytes <= protected_bytes_max

    Args:    bytes_per_second: what the copy lane does under the load of now; None or 0: not measured yet.
             queued: time of the copies that wait on that lane; protected_bytes: of all others (`EvictionIndex`).
    Returns: the first reason against it. A signal that is missing is a reason: fail closed, and load when needed.
    """
    expected = remaining.expected
    if expected is None:
        return Verdict.NO_ESTIMATE
    if not bytes_per_second:
        return Verdict.NO_BANDWIDTH
    # A preload that puts out somebody else's protected memory is worse than none.
    if protected_bytes + preload_bytes > protected_bytes_max:
        return Verdict.NO_ROOM
    copying = -(-preload_bytes * NANOS_PER_SECOND // bytes_per_second)
    return Verdict.HIDEABLE if queued + copying + margin <= expected else Verdict.LATE
