"""Room in the arena: who gives it, how much of it, and memory that is back before its words are."""

from __future__ import annotations

import msgspec
import pytest

from duplexd.engine.admission import Places
from duplexd.engine.residency import CopyPace, FirstWords, Residency
from duplexd.engine.work import Launch
from duplexd.ids import SessionId, WorkId
from duplexd.memory.eviction import Verdict
from duplexd.messages import ResponseChanged, ResponseState
from duplexd.streams.stage import CostModel
from duplexd.units import NANOS_PER_SECOND, Nanos
from tests.engine.simulation import Simulation, beep, ms

COMPLETED = ResponseState.COMPLETED


def crowd(sessions: int, resident: int, *, until_ms: float, pages: int, patch: pytest.MonkeyPatch) -> Simulation:
    patch.setattr("duplexd.models.clock.PAGES_PER_SESSION", pages)
    simulation = Simulation(
        sessions_max=sessions, sessions_resident=resident, place_wait_ms=1500.0, until_ms=until_ms, speculation=False
    )
    for session in range(1, sessions + 1):
        simulation.connect(session)
    return simulation


def ask(simulation: Simulation, session: int, words: int, *, at_ms: float) -> None:
    simulation.world.listeners[SessionId(session)].type(f"say {words}", at=ms(at_ms), key=f"{session}-{at_ms}")


def copies_cost(simulation: Simulation, us: int) -> None:
    stage = simulation.world.stages["mover"]
    stage.spec = msgspec.structs.replace(stage.spec, cost=CostModel(fixed_us=us))


def left_for_others(patch: pytest.MonkeyPatch, *, until_ms: float = 36_000) -> Simulation:
    """Session 1 has spoken, and two of its pages have left for the others; one of them rests, and one page is free."""
    simulation = crowd(3, 1, until_ms=until_ms, pages=3, patch=patch)
    for session in (1, 2, 3):
        ask(simulation, session, 12, at_ms=1000 + 7000 * (session - 1))
    return simulation


def moves(simulation: Simulation, *, after_ms: float) -> list[tuple[float, bool, int]]:
    """Copies that were ordered: when, whether out, how many pages."""
    return [
        (at / ms(1), launch.jobs[0].leaving, len(launch.jobs[0].moves))
        for at, launch in simulation.world.launches
        if launch.stage == "mover" and at >= ms(after_ms)
    ]


def test_a_preload_that_has_no_room_begins_when_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena is full at the onset, which is what a preload is for. It was counted as one, and the copy back waited
    for the first words all the same.
    """
    simulation = left_for_others(monkeypatch)
    copies_cost(simulation, 20_000)
    simulation.world.listeners[SessionId(1)].say(beep(900), at=ms(23_500))
    simulation.run()
    counts = simulation.core.monitor
    (out, back) = moves(simulation, after_ms=23_400)[:2]

    assert (out[1], back[1]) == (True, False)
    assert out[0] - 23_500 < 250  # at the onset, as soon as it is one
    assert back[0] - out[0] == pytest.approx(20, abs=1)  # at once when the room was there
    assert (counts["preloads_hideable"], counts["preload_hits"], counts["preload_misses"]) == (1, 1, 0)
    assert simulation.final_states(1)[2] == [COMPLETED]


def test_a_copy_lane_that_was_measured_as_slow_brings_nothing_back_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declared as fast as any, it takes 0.4 s for each copy: with room to be made first, that cannot hide."""
    simulation = left_for_others(monkeypatch)
    copies_cost(simulation, 400_000)
    simulation.world.listeners[SessionId(1)].say(beep(900), at=ms(23_500))
    simulation.run()
    counts = simulation.core.monitor

    assert (counts["preload_skips"], counts["preloads_late"], counts["restores_early"]) == (1, 1, 0)
    assert counts["restores_late"] > 0
    assert simulation.final_states(1)[2] == [COMPLETED]


def test_typed_words_are_no_onset_and_judge_no_preload(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = left_for_others(monkeypatch, until_ms=30_000)
    ask(simulation, 1, 3, at_ms=25_000)
    simulation.run()
    counts = simulation.core.monitor

    assert counts["preload_hits"] + counts["preload_misses"] + counts["preload_skips"] == 0
    assert counts["restores_late"] > 0


def test_who_has_the_place_is_not_held_up_by_memory_of_those_who_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Session 3 speaks. Session 1, whose three pages are away, waits for its place, and so does 2, which has three of
    the five. When 3 rests it has not enough to give. Nobody else rested, so nobody gave: the one with the place waited
    until 2 had given up its turn.
    """
    simulation = crowd(3, 1, until_ms=38_000, pages=5, patch=monkeypatch)
    for session, words, at_ms in ((1, 12, 1000), (1, 12, 8000), (2, 12, 15_000), (3, 3, 22_000), (2, 12, 24_000)):
        ask(simulation, session, words, at_ms=at_ms)
    for session, at_ms in ((3, 31_000), (1, 31_500), (2, 32_400)):
        ask(simulation, session, 3, at_ms=at_ms)
    simulation.run()
    news = simulation.news(ResponseChanged, 1)
    times = dict(zip([(n.response, n.state) for n in news], simulation.times(ResponseChanged, 1), strict=True))

    assert 32_400 < times[3, ResponseState.STREAMING] < 33_400
    assert simulation.core.monitor["evictions_in_line"] == 1


def test_only_what_is_still_short_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rest. Each was told to let the whole need leave, whatever the other had given."""
    simulation = crowd(3, 2, until_ms=9000, pages=5, patch=monkeypatch)
    ask(simulation, 1, 2, at_ms=1000)
    ask(simulation, 2, 12, at_ms=3000)
    simulation.run()
    core = simulation.core
    pages = core.stores.pages
    first, second = (pages.offloadable(core.sessions[SessionId(one)].context.id) for one in (1, 2))
    needed = pages.free_count + first + 1
    core._make_room(needed, ms(9001))
    ordered = [len(job.moves) for one in core.commands() if isinstance(one, Launch) for job in one.jobs]

    assert second > 1
    assert ordered == [first, 1]
    assert core.residency.leaving_count == first + 1


def residency(*, places: int = 2, pages: int = 30, session_pages: int = 10) -> Residency:
    return Residency(
        places=Places(places, ""),
        sessions_max=9,
        page_bytes=100,
        pages=pages,
        bytes_per_second=100_000,
        session_pages=session_pages,
    )


def test_a_copy_that_moves_nothing_promises_nothing() -> None:
    """It stood as pages on their way out for ever, since only a copy that was ordered ends."""
    room = residency()
    room.rest(SessionId(1), 5, ms(1))
    room.left(SessionId(1), WorkId(7), 0)

    assert room.leaving_count == 0
    assert room.short(3, free=1) == 2
    assert room.choose(2, ms(2)) == []
    room.recount(SessionId(1), 5)
    assert [one.session for one in room.choose(2, ms(3))] == [SessionId(1)]


def test_who_waits_in_line_is_protected_as_far_as_pages_reach_beyond_the_places() -> None:
    """Thirty pages, two places of ten each: one more context is protected. The rest gives, the last in line first."""
    room = residency()
    seated = [room.need(SessionId(one), 10) for one in (1, 2, 3, 4, 5)]

    assert seated == [True, True, False, False, False]
    assert list(room.in_line_unprotected()) == [5, 4]
    assert room.index.protections_refused == 2
    room.rest(SessionId(1), 10, ms(5))  # 3 has its place, and needs no protection any more
    assert room.index.protected_bytes == 0
    room.forget(SessionId(4))
    assert list(room.in_line_unprotected()) == [5]


def judge(room: Residency, session: int, pages: int, *, short: int = 0, spoken: Nanos = ms(0)) -> Verdict:
    return room.judge_preload(SessionId(session), pages, short=short, queued=ms(0), spoken=spoken)


def test_a_preload_counts_the_room_it_makes_and_how_long_one_has_spoken() -> None:
    """A page takes 1 ms, and words are expected 30 ms after the onset; 10 ms of them are a margin."""
    room = residency()
    room.first_words.note(ms(30))
    room.need(SessionId(1), 10)

    assert judge(room, 1, 10) is Verdict.HIDEABLE
    assert judge(room, 1, 10, short=10) is Verdict.HIDEABLE
    assert judge(room, 1, 10, short=11) is Verdict.LATE
    assert judge(room, 1, 10, spoken=ms(11)) is Verdict.LATE


def test_in_line_memory_comes_back_only_where_it_is_protected() -> None:
    room = residency()
    for one in (1, 2, 3, 4):
        room.need(SessionId(one), 10)

    assert [judge(room, one, 5) for one in (1, 3, 4)] == [Verdict.HIDEABLE, Verdict.HIDEABLE, Verdict.NO_ROOM]


def test_the_pace_of_copies_is_measured() -> None:
    pace = CopyPace(1000)
    assert pace.bytes_per_second == 1000
    pace.note(0, Nanos(0))  # A world in which copies take no time says nothing.
    assert pace.bytes_per_second == 1000
    for _ in range(3):
        pace.note(500, Nanos(NANOS_PER_SECOND))

    assert pace.bytes_per_second == 500
    assert pace.time_of(250) == NANOS_PER_SECOND // 2


def test_when_words_come_after_an_onset_is_measured() -> None:
    words = FirstWords(ms(600))
    words.note(ms(1000))
    assert words.expected == ms(1000)
    words.note(ms(1800))

    assert words.expected == ms(1100)
