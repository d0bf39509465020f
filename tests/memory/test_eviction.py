"""The eviction index against a plain sorted list, its rules one by one, and the admission test of a preload."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from duplexd.errors import LedgerError
from duplexd.ids import SessionId
from duplexd.memory.eviction import GAP_WEIGHT, EvictionIndex, Remaining, Verdict, admit_preload
from duplexd.units import NANOS_PER_SECOND, Nanos

ONE, TWO, THREE = SessionId(1), SessionId(2), SessionId(3)
START = Nanos(1000)
PRIOR = Nanos(20)


def index(*, prior: Nanos = PRIOR, cap: int = 100, sessions: int = 8) -> EvictionIndex:
    return EvictionIndex(reply_prior=prior, protected_bytes_max=cap, sessions_max=sessions)


def order(candidates: EvictionIndex, now: Nanos = START) -> list[SessionId]:
    """All candidates, first to go first."""
    return [candidate.session for candidate in candidates.choose(1 << 60, now)]


class Person:
    """One session of the plain version."""

    def __init__(self) -> None:
        self.ends_at: int | None = None
        self.gap: int | None = None
        self.since = 0
        self.resident_bytes = 0  # 0: busy, or nothing resident
        self.protected: int | None = None

    def place(self, now: int) -> tuple[bool, int, int]:
        """Sort key: who goes first sorts first."""
        if self.ends_at is None:
            return (False, 0, self.since)
        gap = PRIOR if self.gap is None else self.gap
        still_to_play = max(0, self.ends_at - now)
        return (True, -(still_to_play + max(gap, now - self.ends_at)), self.since)


class IndexMachine(RuleBasedStateMachine):
    """People play, answer, fall silent, are protected and leave, in any order; a sorted list says who should go."""

    CAP, KNOWN = 20, 5
    SESSIONS = st.integers(0, 6).map(SessionId)

    @initialize()
    def begin(self) -> None:
        self.now = Nanos(0)
        self.people: dict[SessionId, Person] = {}
        self.refused = 0
        self.index = index(cap=self.CAP, sessions=self.KNOWN)

    def known(self, session: SessionId) -> Person | None:
        """None when one more would be too many; the index must say so and change nothing."""
        if session not in self.people and len(self.people) == self.KNOWN:
            with pytest.raises(LedgerError, match="forget"):
                self.index.busy(session)
            return None
        return self.people.setdefault(session, Person())

    def protect_in_model(self, person: Person, size: int) -> bool:
        others = sum(other.protected or 0 for other in self.people.values() if other is not person)
        if others + size > self.CAP:
            self.refused += 1
            return False
        person.protected = size
        return True

    @rule(step=st.integers(0, 30))
    def pass_time(self, step: int) -> None:
        self.now = Nanos(self.now + step)

    @rule(session=SESSIONS, after=st.none() | st.integers(-10, 30))
    def play(self, session: SessionId, after: int | None) -> None:
        if person := self.known(session):
            person.ends_at = None if after is None else self.now + after
            self.index.note_playback(session, None if after is None else Nanos(self.now + after))

    @rule(session=SESSIONS, gap=st.integers(-5, 40))
    def answer(self, session: SessionId, gap: int) -> None:
        if person := self.known(session):
            waited = max(0, gap)
            person.gap = waited if person.gap is None else person.gap + (waited - person.gap) // GAP_WEIGHT
            self.index.note_reply_gap(session, Nanos(gap))

    @rule(session=SESSIONS, size=st.integers(0, 9))
    def idle(self, session: SessionId, size: int) -> None:
        if person := self.known(session):
            person.resident_bytes, person.since = size, self.now
            if person.protected is not None:
                person.protected = None
                self.protect_in_model(person, size)
            self.index.idle(session, size, self.now)

    @rule(session=SESSIONS, gap=st.integers(-5, 40), after=st.integers(-10, 30), size=st.integers(1, 9))
    def take_turn(self, session: SessionId, gap: int, after: int, size: int) -> None:
        """The person answers, the reply is written and begins to play."""
        self.answer(session, gap)
        self.play(session, after)
        self.idle(session, size)

    @rule(session=SESSIONS)
    def busy(self, session: SessionId) -> None:
        if person := self.known(session):
            person.resident_bytes = 0
            self.index.busy(session)

    @rule(session=SESSIONS, size=st.integers(0, 12))
    def protect(self, session: SessionId, size: int) -> None:
        if person := self.known(session):
            expected = self.protect_in_model(person, size)
            assert expected == self.index.protect(session, size)

    @rule(session=SESSIONS)
    def release(self, session: SessionId) -> None:
        person = self.people.get(session)
        expected = person is not None and person.protected is not None
        if person is not None:
            person.protected = None
        assert expected == self.index.release(session)

    @rule(session=SESSIONS)
    def forget(self, session: SessionId) -> None:
        self.people.pop(session, None)
        self.index.forget(session)

    @rule(needed=st.integers(0, 30), evict=st.booleans(), left=st.integers(0, 2))
    def choose(self, needed: int, evict: bool, left: int) -> None:
        expected: list[tuple[SessionId, int]] = []
        for session in self.in_order():
            if sum(size for _, size in expected) < needed:
                expected.append((session, self.people[session].resident_bytes))
        chosen = self.index.choose(needed, self.now)

        assert expected == [(candidate.session, candidate.resident_bytes) for candidate in chosen]
        for session, _ in expected if evict else ():
            self.people[session].resident_bytes = left
            self.index.resize(session, left)

    def in_order(self) -> list[SessionId]:
        candidates = [
            session for session, person in self.people.items() if person.resident_bytes and person.protected is None
        ]
        return sorted(candidates, key=lambda session: (self.people[session].place(self.now), session))

    @invariant()
    def agrees(self) -> None:
        expected = self.in_order()
        assert expected == order(self.index, self.now)
        assert len(expected) == len(self.index)
        assert self.index.candidate_bytes == sum(self.people[session].resident_bytes for session in expected)
        assert self.index.entries_count <= 6 * len(self.index)
        assert self.index.protected_bytes == sum(person.protected or 0 for person in self.people.values()) <= self.CAP
        assert self.index.protections_refused == self.refused


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# Who goes first ------------------------------------------------------------------------------------------------------


def test_the_longest_playback_and_gap_go_first() -> None:
    """One listens for 10 and answers after 50; two listens for 30 and answers at once: one is needed later."""
    candidates = index()
    for session, playback, gap in ((ONE, 10, 50), (TWO, 30, 0)):
        candidates.note_playback(session, Nanos(START + playback))
        candidates.note_reply_gap(session, Nanos(gap))
        candidates.idle(session, 1, START)

    assert order(candidates) == [ONE, TWO]


def test_the_clock_changes_the_order_without_an_update() -> None:
    """Two still listens, so it is needed later than one; when its playback has ended, one's longer gap decides."""
    candidates = index()
    for session, playback, gap in ((ONE, 0, 50), (TWO, 60, 10)):
        candidates.note_playback(session, Nanos(START + playback))
        candidates.note_reply_gap(session, Nanos(gap))
        candidates.idle(session, 1, START)

    assert order(candidates) == [TWO, ONE]
    assert order(candidates, Nanos(START + 30)) == [ONE, TWO]


def test_who_left_the_room_is_not_due_for_ever() -> None:
    """One used to answer at once and has been silent for an hour; two takes a while and was just spoken to."""
    candidates = index()
    later = Nanos(START + 3600)
    for session, ended, gap in ((ONE, START, 1), (TWO, later, 30)):
        candidates.note_playback(session, ended)
        candidates.note_reply_gap(session, Nanos(gap))
        candidates.idle(session, 1, ended)

    assert order(candidates, later) == [ONE, TWO]


def test_a_gap_moves_the_average_by_a_quarter() -> None:
    """The average of one goes from 100 to 75 and no further, so two, at 74, is needed before it."""
    candidates = index()
    for session, gaps in ((ONE, (100, 0)), (TWO, (74,)), (THREE, (76,))):
        for gap in gaps:
            candidates.note_reply_gap(session, Nanos(gap))
        candidates.note_playback(session, START)
        candidates.idle(session, 1, START)

    assert order(candidates) == [THREE, ONE, TWO]


def test_no_more_are_chosen_than_the_bytes_need() -> None:
    candidates = index()
    for session, gap in ((ONE, 30), (TWO, 20), (THREE, 10)):
        candidates.note_reply_gap(session, Nanos(gap))
        candidates.note_playback(session, START)
        candidates.idle(session, 5, START)

    assert [candidate.session for candidate in candidates.choose(6, START)] == [ONE, TWO]
    assert candidates.choose(0, START) == []


def test_a_choice_changes_nothing() -> None:
    """The caller may fail to evict; whoever asks again gets the same answer."""
    candidates = index()
    for session in (ONE, TWO):
        candidates.note_playback(session, START)
        candidates.idle(session, 5, START)

    assert candidates.choose(6, START) == candidates.choose(6, START)


def test_what_left_in_part_keeps_its_place() -> None:
    """Its suffix pages are gone; the rest of it goes before anybody else's."""
    candidates = index()
    for session, gap in ((ONE, 30), (TWO, 20)):
        candidates.note_reply_gap(session, Nanos(gap))
        candidates.note_playback(session, START)
        candidates.idle(session, 5, START)
    candidates.resize(ONE, 2)

    assert [(each.session, each.resident_bytes) for each in candidates.choose(6, START)] == [(ONE, 2), (TWO, 5)]


@pytest.mark.parametrize("arrival", list(permutations((ONE, TWO, THREE))), ids=str)
@pytest.mark.parametrize("ends_at", [None, START], ids=["no telemetry", "telemetry"])
def test_ties_go_to_the_lower_session_whatever_the_order_of_arrival(
    arrival: tuple[SessionId, ...], ends_at: Nanos | None
) -> None:
    candidates = index()
    for session in arrival:
        candidates.note_playback(session, ends_at)
        candidates.idle(session, 1, START)

    assert order(candidates) == [ONE, TWO, THREE]


# Missing signals -----------------------------------------------------------------------------------------------------


def test_without_playback_telemetry_the_least_recently_used_goes_first() -> None:
    """A gap alone says nothing: nobody knows when it began."""
    candidates = index()
    for session, since, gap in ((ONE, 3, 90), (TWO, 1, 10), (THREE, 2, 50)):
        candidates.note_reply_gap(session, Nanos(gap))
        candidates.idle(session, 1, Nanos(since))

    assert order(candidates) == [TWO, THREE, ONE]


def test_who_reports_nothing_goes_before_who_reports() -> None:
    candidates = index()
    candidates.note_playback(ONE, Nanos(START + 1000))
    candidates.idle(ONE, 1, Nanos(0))
    candidates.idle(TWO, 1, START)

    assert order(candidates) == [TWO, ONE]


def test_telemetry_that_stops_makes_the_session_one_without() -> None:
    candidates = index()
    for session in (ONE, TWO):
        candidates.note_playback(session, START)
        candidates.idle(session, 1, START)
    candidates.note_playback(TWO, None)

    assert order(candidates) == [TWO, ONE]


def test_without_a_gap_of_its_own_a_session_has_the_prior() -> None:
    candidates = index(prior=Nanos(20))
    for session, gap in ((ONE, 19), (TWO, None), (THREE, 21)):
        if gap is not None:
            candidates.note_reply_gap(session, Nanos(gap))
        candidates.note_playback(session, START)
        candidates.idle(session, 1, START)

    assert order(candidates) == [THREE, TWO, ONE]


# Protection ----------------------------------------------------------------------------------------------------------


def test_a_protected_session_is_not_chosen_until_it_is_released() -> None:
    """The person begins to speak; pressure takes the others, however soon they are needed."""
    candidates = index()
    for session in (ONE, TWO):
        candidates.idle(session, 5, START)

    assert candidates.protect(ONE, 5)
    assert order(candidates) == [TWO]
    candidates.release(ONE)
    assert order(candidates) == [ONE, TWO]


def test_protection_beyond_the_cap_is_refused_and_counted() -> None:
    """Everybody speaks at once; what is not protected stays enough for pressure to be relieved."""
    candidates = index(cap=8)
    for session in (ONE, TWO):
        candidates.idle(session, 5, START)

    assert [candidates.protect(session, 5) for session in (ONE, TWO)] == [True, False]
    assert (candidates.protected_bytes, candidates.protections_refused) == (5, 1)
    assert order(candidates) == [TWO]


def test_a_protected_session_that_outgrows_the_cap_may_be_chosen() -> None:
    candidates = index(cap=8)
    candidates.protect(ONE, 5)
    candidates.idle(ONE, 9, START)

    assert (candidates.protected_bytes, candidates.protections_refused) == (0, 1)
    assert order(candidates) == [ONE]


def test_a_session_that_closes_gives_its_protection_back() -> None:
    candidates = index(cap=8)
    candidates.protect(ONE, 8)
    candidates.forget(ONE)

    assert candidates.protect(TWO, 8)


def test_a_busy_session_does_not_change_its_size() -> None:
    """Its memory is being written; nobody can have evicted a part of it."""
    candidates = index()
    candidates.busy(ONE)

    with pytest.raises(LedgerError, match="no candidate"):
        candidates.resize(ONE, 1)


# Bounds --------------------------------------------------------------------------------------------------------------


def test_a_hundred_thousand_updates_leave_heaps_of_the_size_of_the_crowd() -> None:
    """Fifty people talk all day; nothing is chosen, so stale entries never surface by themselves."""
    candidates = index(sessions=50)
    most = 0
    for number in range(100_000):
        session = SessionId(number * 7 % 50)
        candidates.note_playback(session, Nanos(number * 31 % 1009))
        if number % 2:
            candidates.idle(session, 1, Nanos(number))
        most = max(most, candidates.entries_count)

    assert most <= 6 * 50


# Preload -------------------------------------------------------------------------------------------------------------

REMAINING = Remaining(utterance=Nanos(500), spoken=Nanos(100), silence=Nanos(300), encode=Nanos(50))  # 750 in sum
FITS = {
    "preload_bytes": 400,  # at one byte a nanosecond
    "bytes_per_second": NANOS_PER_SECOND,
    "queued": Nanos(300),
    "margin": Nanos(50),
    "remaining": REMAINING,
    "protected_bytes": 600,
    "protected_bytes_max": 1000,
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param({}, Verdict.HIDEABLE, id="just in time and just within the cap"),
        pytest.param({"queued": Nanos(301)}, Verdict.LATE, id="the lane is busy for too long"),
        pytest.param({"margin": Nanos(51)}, Verdict.LATE, id="no margin"),
        pytest.param({"bytes_per_second": NANOS_PER_SECOND - 1}, Verdict.LATE, id="the lane is too slow"),
        pytest.param({"protected_bytes": 601}, Verdict.NO_ROOM, id="others are protected"),
        pytest.param({"bytes_per_second": None}, Verdict.NO_BANDWIDTH, id="bandwidth not measured"),
        pytest.param({"bytes_per_second": 0}, Verdict.NO_BANDWIDTH, id="the lane stands still"),
    ],
)
def test_a_preload_is_admitted_only_when_it_hides(change: dict[str, object], expected: Verdict) -> None:
    assert expected == admit_preload(**{**FITS, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("missing", ["utterance", "silence", "encode"])
def test_a_preload_without_an_estimate_is_skipped(missing: str) -> None:
    values = {name: getattr(REMAINING, name) for name in REMAINING.__struct_fields__} | {missing: None}

    assert admit_preload(**{**FITS, "remaining": Remaining(**values)}) == Verdict.NO_ESTIMATE  # type: ignore[arg-type]


def test_who_has_spoken_longer_than_usual_may_end_at_any_moment() -> None:
    late = Remaining(utterance=Nanos(500), spoken=Nanos(900), silence=Nanos(300), encode=Nanos(50))

    assert Nanos(350) == late.expected
