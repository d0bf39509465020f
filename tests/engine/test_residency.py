"""More sessions than the arena has whole contexts for: who talks has a place, who rests may leave, nobody is lost."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import msgspec
import pytest

from duplexd.engine.admission import Places
from duplexd.engine.residency import Residency
from duplexd.engine.work import Launch
from duplexd.ids import SessionId
from duplexd.messages import InputRefusal, PrefetchWanted, ResponseChanged, ResponseState
from duplexd.streams.stage import CostModel
from tests.engine.simulation import Simulation, beep, heard_words, history_words, ms

COMPLETED, FAILED = ResponseState.COMPLETED, ResponseState.FAILED
PLACE_WAIT_MS = 1500.0


@pytest.fixture(autouse=True)
def small_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five pages a session: a few short turns fill the arena."""
    monkeypatch.setattr("duplexd.models.clock.PAGES_PER_SESSION", 5)


def crowd(sessions: int, resident: int, *, until_ms: float, fails: object = None) -> Simulation:
    simulation = Simulation(
        sessions_max=sessions,
        sessions_resident=resident,
        place_wait_ms=PLACE_WAIT_MS,
        until_ms=until_ms,
        fails=fails,  # type: ignore[arg-type]
    )
    for session in range(1, sessions + 1):
        simulation.connect(session)
    return simulation


def ask(simulation: Simulation, session: int, words: int, *, at_ms: float) -> None:
    simulation.world.listeners[SessionId(session)].type(f"say {words}", at=ms(at_ms), key=f"{session}-{at_ms}")


def rounds(simulation: Simulation, sessions: int, *, turns: int, every_ms: float) -> None:
    """Everybody asks in turn, again and again: a reply of three words (1.5 s) each time."""
    for number in range(turns * sessions):
        ask(simulation, 1 + number % sessions, 3, at_ms=1000 + every_ms * number)


def require_all_completed(simulation: Simulation, sessions: Iterable[int], turns: int) -> None:
    for session in sessions:
        remembered = history_words(simulation, session)

        assert list(simulation.final_states(session).values()) == [[COMPLETED]] * turns
        assert remembered == heard_words(simulation.world.listeners[SessionId(session)])
        assert len(remembered) == 3 * turns


def prefer(simulation: Simulation, sessions: Iterable[int]) -> None:
    for session in sessions:
        simulation.core.sessions[SessionId(session)].priority = 9


def reasons(simulation: Simulation, session: int) -> list[str]:
    return [n.reason for n in simulation.news(ResponseChanged, session) if n.state is FAILED]


def test_ten_sessions_talk_in_turn_on_memory_for_two() -> None:
    """Two at once at most; everybody's turn comes three times, and everybody's history is what they heard."""
    simulation = crowd(10, 2, until_ms=33_000)
    rounds(simulation, 10, turns=3, every_ms=1000)
    simulation.run()
    counts = simulation.core.monitor

    require_all_completed(simulation, range(1, 11), 3)
    assert counts["pages_offloaded"] > 5
    assert counts["pages_restored"] > 5
    assert counts["transfers_failed"] == 0


def test_whoever_finds_no_place_waits_and_is_answered() -> None:
    """Three ask at once, two have places; the third is answered when one of them has heard its reply."""
    simulation = crowd(3, 2, until_ms=6000)
    ask(simulation, 1, 2, at_ms=1000)
    ask(simulation, 2, 2, at_ms=1000)
    ask(simulation, 3, 2, at_ms=1010)
    simulation.run()

    assert [simulation.final_states(session)[1] for session in (1, 2, 3)] == [[COMPLETED]] * 3


def test_whoever_waits_too_long_is_told_busy_and_is_answered_later() -> None:
    simulation = crowd(3, 2, until_ms=12_000)
    ask(simulation, 1, 12, at_ms=1000)
    ask(simulation, 2, 12, at_ms=1000)
    ask(simulation, 3, 2, at_ms=1010)
    ask(simulation, 3, 2, at_ms=9000)
    simulation.run()

    said = "the arena has room for 2 whole contexts, and others have them; waited 1500 ms"
    assert reasons(simulation, 3) == [f"busy: {said}"]
    refused = simulation.news(InputRefusal, 3)
    assert [(one.code, one.reason) for one in refused] == [("busy", f"Session 3: {said}. Say it again in a moment.")]
    assert list(simulation.final_states(3).values()) == [[FAILED], [COMPLETED]]
    assert simulation.final_states(1)[1] == simulation.final_states(2)[1] == [COMPLETED]


@pytest.mark.parametrize("leaving", [True, False], ids=["on the way out", "on the way back"])
def test_what_a_failed_copy_carried_is_prefilled_again(leaving: bool) -> None:
    """Every third copy in one direction fails. Its tokens are lost from memory, not from the conversation."""
    copies = 0

    def fails(launch: Launch) -> str:
        nonlocal copies
        if launch.stage != "mover" or launch.jobs[0].leaving is not leaving:
            return ""
        copies += 1
        return "the copy engine failed" if copies % 3 == 0 else ""

    simulation = crowd(5, 1, until_ms=33_000, fails=fails)
    rounds(simulation, 5, turns=3, every_ms=2000)
    simulation.run()

    require_all_completed(simulation, range(1, 6), 3)
    assert simulation.core.monitor["transfers_failed"] > 0


def test_a_voice_brings_memory_back_before_its_words_are_understood() -> None:
    """Session 1 has left for the others; at the onset of its next voice the copy begins, hidden behind the voice."""
    simulation = crowd(4, 1, until_ms=36_000)
    ask(simulation, 1, 3, at_ms=1000)
    for session in (2, 3, 4):
        ask(simulation, session, 12, at_ms=3000 + 7000 * (session - 2))
    simulation.world.listeners[SessionId(1)].say(beep(900), at=ms(23_500))
    simulation.run()

    assert simulation.core.monitor["preloads_hideable"] >= 1
    assert simulation.core.monitor["restores_early"] >= 1
    assert simulation.final_states(1)[2] == [COMPLETED]


def test_sessions_that_leave_give_everything_back() -> None:
    """They close while they are resident, away, in line and in the middle of a copy."""
    simulation = crowd(6, 1, until_ms=16_000)
    rounds(simulation, 6, turns=1, every_ms=1700)
    for session in range(1, 7):
        listener = simulation.world.listeners[SessionId(session)]
        simulation.world.at(ms(11_000 + 2 * session), listener.leave)
        ask(simulation, session, 3, at_ms=10_990)
    simulation.run()
    stores = simulation.core.stores

    assert stores.pages.free_count == stores.pages.spec.count - 1
    assert stores.host is not None
    assert stores.host.free_count == stores.host.spec.count
    assert simulation.core.residency.seated_count == simulation.core.residency.waiting_count == 0


def test_think_steps_of_several_sessions_share_a_launch() -> None:
    simulation = crowd(4, 4, until_ms=6000)
    for session in range(1, 5):
        ask(simulation, session, 4, at_ms=1000)
    simulation.run()
    batches = [len(launch.jobs) for _, launch in simulation.world.launches if launch.stage == "think"]

    assert max(batches) > 1
    for session in range(1, 5):
        assert history_words(simulation, session) == heard_words(simulation.world.listeners[SessionId(session)])


@pytest.mark.parametrize("seed", [0, 2, 7])
def test_a_rider_that_orders_its_memory_back_comes_after_the_launch_it_missed(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ask at once under pressure: one thinks, the other's pages are away. The copy was launched before the older
    launch that the other had wanted to ride on; a live engine dies of that.
    """
    monkeypatch.setattr("duplexd.models.clock.PAGES_PER_SESSION", 4)
    rng = Random(seed)
    simulation = crowd(4, 2, until_ms=37_000)
    for name, costs_us in (("think", (10_000, 25_000, 40_000)), ("mover", (5_000, 20_000, 60_000))):
        stage = simulation.world.stages[name]
        stage.spec = msgspec.structs.replace(stage.spec, cost=CostModel(fixed_us=rng.choice(costs_us)))
    simulation.world.at(ms(900), lambda: prefer(simulation, (1, 3)))
    for number in range(9):
        at_ms = 1000 + 3800 * number
        first, second = rng.sample(range(1, 5), 2)
        ask(simulation, first, rng.choice([3, 6, 8]), at_ms=at_ms)
        ask(simulation, second, rng.choice([3, 6, 8]), at_ms=at_ms + rng.choice([0, 20, 80]))
    simulation.run()

    assert simulation.core.monitor["restores_late"] > 0
    for session in range(1, 5):
        remembered, heard = (
            history_words(simulation, session),
            heard_words(simulation.world.listeners[SessionId(session)]),
        )
        assert heard[len(heard) - len(remembered) :] == remembered  # The oldest exchanges have slid out.


def slow_copies(simulation: Simulation, *, us: int) -> None:
    stage = simulation.world.stages["mover"]
    stage.spec = msgspec.structs.replace(stage.spec, cost=CostModel(fixed_us=us))


@pytest.mark.parametrize("at_ms", [21_500, 24_500], ids=["away", "on the way back"])
def test_a_stop_before_the_memory_is_back_interrupts_without_a_branch(at_ms: int) -> None:
    """Session 1 had to leave for the others. It types, and at once presses stop, while its pages are still away: there
    is nothing yet that a branch could share. The engine died of that, or thought on pages that no copy had filled.
    """
    simulation = crowd(4, 1, until_ms=36_000)
    slow_copies(simulation, us=600_000)
    ask(simulation, 1, 3, at_ms=1000)
    for session in (2, 3, 4):
        ask(simulation, session, 12, at_ms=3000 + 7000 * (session - 2))
    ask(simulation, 1, 8, at_ms=at_ms)
    readable: list[bool] = []
    simulation.world.at(
        ms(at_ms + 15), lambda: readable.append(simulation.core.sessions[SessionId(1)].context.readable)
    )
    simulation.world.listeners[SessionId(1)].stop(at=ms(at_ms + 20))
    ask(simulation, 1, 3, at_ms=30_000)
    simulation.run()

    assert readable == [False]
    assert list(simulation.final_states(1).values()) == [[COMPLETED], [ResponseState.CANCELLED], [COMPLETED]]


def test_who_rests_longest_keeps_its_turn_when_pages_are_counted_again() -> None:
    """Nobody reports playback, so the least recently used leaves first, whenever its pages were counted."""
    residency = Residency(places=Places(4, ""), sessions_max=4, page_bytes=10, pages=16, bytes_per_second=0)
    early, late = SessionId(2), SessionId(1)
    residency.rest(early, 0, ms(1))
    residency.rest(late, 3, ms(2))
    for session in (late, early, SessionId(3)):
        residency.recount(session, 3)

    chosen = residency.choose(3, ms(9))
    assert [candidate.session for candidate in chosen] == [early]


def test_what_each_session_holds_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the arena and beside it; those that hold most are listed, and how many are not."""
    monkeypatch.setattr("duplexd.engine.core.SESSIONS_LISTED_MAX", 2)
    simulation = crowd(3, 1, until_ms=19_000)
    rounds(simulation, 3, turns=3, every_ms=2000)
    simulation.run()
    stores, metrics = simulation.core.stores, simulation.core.metrics()
    held = {session: stores.bytes_of(session) for session in simulation.core.sessions}
    assert stores.host is not None
    own = [spec for spec in stores.layout.partitions.values() if spec.name != "pages"]
    slots = sum(spec.slot_bytes for spec in own if spec.name in ("ingest", "state"))
    pages = stores.layout.partitions["pages"]
    away = stores.host.spec.count - stores.host.free_count

    assert sum(one.host for one in held.values()) == away * stores.host.spec.slot_bytes > 0
    used = pages.count - pages.shared_slots - stores.pages.free_count
    assert sum(one.arena for one in held.values()) == 3 * slots + used * pages.slot_bytes
    assert len(metrics.sessions) == 2
    assert metrics.values["sessions_unlisted"] == 1
    unlisted = {one.session: one for one in held.values()}.keys() - {one.session for one in metrics.sessions}
    size = {session: one.arena + one.host for session, one in held.items()}
    assert all(size[session] <= min(size[one.session] for one in metrics.sessions) for session in unlisted)
    assert metrics.values["session_bytes_all"] == sum(size.values())
    assert metrics.values["bytes_long_term"] == away * pages.slot_bytes


@pytest.mark.parametrize(("words", "end"), [(2, "completed"), (12, "busy")])
def test_a_ninth_simultaneous_talker_waits_or_is_told_busy(words: int, end: str) -> None:
    """Nine type at the same moment and eight have places. A reply of a second gives its place back in time for the
    ninth; replies of six seconds do not, and it is told so after the stated wait, neither earlier nor much later.
    """
    simulation = crowd(9, 8, until_ms=9000)
    for session in range(1, 10):
        ask(simulation, session, words, at_ms=1000)
    simulation.run()
    ends = {session: simulation.final_states(session)[1] for session in range(1, 10)}
    ninth = [session for session, states in ends.items() if states == [FAILED]]

    assert simulation.core.residency.places.count == 8
    assert sum(states == [COMPLETED] for states in ends.values()) == (9 if end == "completed" else 8)
    if end == "busy":
        (session,) = ninth
        (refused,) = simulation.news(InputRefusal, session)
        failed = dict(
            zip(
                [n.state for n in simulation.news(ResponseChanged, session)],
                simulation.times(ResponseChanged, session),
                strict=True,
            )
        )
        assert refused.code == "busy"
        assert refused.reason.startswith(f"Session {session}: the arena has room for 8 whole contexts, and others")
        assert PLACE_WAIT_MS <= failed[FAILED] - failed[ResponseState.ACCEPTED] <= PLACE_WAIT_MS + 20


def away(simulation: Simulation, session: int) -> bool:
    return not simulation.core.sessions[SessionId(session)].context.readable


def test_a_prefetch_brings_memory_back_before_anybody_speaks() -> None:
    """Session 1 has left for the others. Asked for, its pages come back, without a word; what it is asked next waits
    for no copy, and it holds no place meanwhile.
    """
    simulation = crowd(4, 1, until_ms=36_000)
    ask(simulation, 1, 3, at_ms=1000)
    for session in (2, 3, 4):
        ask(simulation, session, 12, at_ms=3000 + 7000 * (session - 2))
    seen: list[tuple[bool, int, int]] = []

    def look() -> None:
        counts = simulation.core.monitor
        seen.append((away(simulation, 1), counts["restores_early"], simulation.core.residency.seated_count))

    simulation.world.at(ms(23_490), look)
    simulation.world.at(ms(23_500), lambda: PrefetchWanted(SessionId(1)))
    simulation.world.at(ms(24_500), look)
    ask(simulation, 1, 3, at_ms=25_000)
    simulation.run()

    assert seen == [(True, 0, 0), (False, 1, 0)]
    assert simulation.core.monitor["prefetches_done"] == 1
    assert simulation.core.monitor["restores_late"] == 0
    assert list(simulation.final_states(1).values()) == [[COMPLETED]] * 2


def test_a_prefetch_that_finds_no_place_is_given_up() -> None:
    """Others have all places for longer than anybody waits: nobody is kept in line for something nobody asked for."""
    simulation = crowd(3, 2, until_ms=9000)
    ask(simulation, 1, 12, at_ms=1000)
    ask(simulation, 2, 12, at_ms=1000)
    simulation.world.at(ms(1500), lambda: PrefetchWanted(SessionId(3)))
    waiting: list[int] = []
    simulation.world.at(ms(3500), lambda: waiting.append(simulation.core.residency.waiting_count))
    simulation.run()

    assert waiting == [0]
    assert simulation.core.monitor["prefetches_done"] + simulation.core.monitor["prefetches_given_up"] == 1
