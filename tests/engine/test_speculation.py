"""Speculative turns: what is made for a turn that may be over stays inside until it is (DESIGN §6)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import msgspec
import pytest

from duplexd.engine.work import Launch, Need, Work
from duplexd.ids import SessionId
from duplexd.messages import (
    AdvanceEpoch,
    InputCleared,
    PublishChunk,
    ReplyWords,
    ResponseChanged,
    ResponseState,
    UserWords,
)
from duplexd.streams.stage import CostModel, Role
from duplexd.units import Nanos
from tests.engine.simulation import Simulation, beep, heard_words, history_words, ms

#: The word clock ends a turn after this much silence: time enough for the whole first clause.
SILENCE = 700.0


def count(simulation: Simulation, name: str) -> int:
    return simulation.core.monitor[name]


def speaking(
    *parts: tuple[float, float], until_ms: float = 9000, speculation: bool = True, **more: object
) -> Simulation:
    """Somebody whose voice is on from a to b, for each part, milliseconds."""
    simulation = Simulation(until_ms=until_ms, speculation=speculation, **more)  # type: ignore[arg-type]
    listener = simulation.connect(at_ms=200)
    for start, end in parts:
        listener.say(beep(end - start), at=ms(start))
    return simulation


def test_a_reply_made_ahead_goes_out_the_moment_the_turn_has_ended() -> None:
    simulation = speaking((500, 1100))
    simulation.run()
    plain = speaking((500, 1100), speculation=False)
    plain.run()

    accepted, published = simulation.times(ResponseChanged)[0], simulation.times(PublishChunk)[0]
    assert published == accepted, "the sound was ready"
    assert plain.times(PublishChunk)[0] > plain.times(ResponseChanged)[0], "without speculation it has to be made"
    assert accepted == plain.times(ResponseChanged)[0], "when the turn ends is not speculation's affair"
    assert heard_words(simulation.world.listeners[SessionId(1)]) == list(range(12))
    assert count(simulation, "speculations_confirmed") == count(simulation, "speculations") == 1


def test_nothing_of_it_is_seen_before_the_turn_has_ended() -> None:
    simulation = speaking((500, 1100))
    simulation.run()
    thought = [at for at, launch in simulation.world.launches if launch.stage == "think" and launch.jobs[0].steps]
    rendered = [at for at, launch in simulation.world.launches if launch.stage == "render"]
    announced = ms(simulation.times(ResponseChanged)[0])
    assert thought[0] < rendered[0] < announced
    shown = (ResponseChanged, ReplyWords, PublishChunk)
    assert all(at >= announced for at, news in simulation.world.news if isinstance(news, shown))


def test_the_latency_of_a_turn_counts_no_time_that_was_hidden() -> None:
    simulation = speaking((500, 1100))
    simulation.run()
    (latency,) = simulation.world.listeners[SessionId(1)].latencies
    parts = dict(latency.parts)
    assert parts["prefill"] == parts["first_word"] == parts["first_audio"] == 0
    assert parts["end_of_turn"] >= SILENCE - 100


def test_who_goes_on_speaking_is_not_answered_and_nothing_of_the_guess_remains() -> None:
    simulation = speaking((500, 1000), (1400, 1900))
    simulation.run()
    said = [n.text for n in simulation.news(UserWords) if n.final]
    assert said == ["sound sound"], "one turn"
    assert count(simulation, "speculations_dropped") == 1
    assert count(simulation, "speculative_us_discarded") > 0
    assert not simulation.news(AdvanceEpoch), "nobody saw it: no epoch ends"
    assert [n.response for n in simulation.news(ResponseChanged) if n.state is ResponseState.ACCEPTED] == [1]
    assert history_words(simulation) == heard_words(simulation.world.listeners[SessionId(1)])
    chunks = [n.chunk for n in simulation.news(PublishChunk)]
    assert chunks[0] > 1, "ids of discarded chunks never come again"
    spans = [n.span for n in simulation.news(PublishChunk)]
    assert spans[0].start == 0
    assert all(a.end == b.start for a, b in pairwise(spans))


def tables(simulation: Simulation) -> list[tuple[bytes, bytes | None]]:
    """After every event: where the keys of the trunk lie, and those of the branch that the turn grows on."""
    seen: list[tuple[bytes, bytes | None]] = []
    core, handle = simulation.core, simulation.core.handle

    def watched(event: object, now: Nanos) -> None:
        handle(event, now)
        if (session := core.sessions.get(SessionId(1))) is not None:
            pages, growing = core.stores.pages, session.growing
            branch = None if growing is session.context else pages.slots(growing.id)
            seen.append((pages.slots(session.context.id), branch))

    core.handle = watched  # type: ignore[method-assign]
    return seen


def test_a_turn_that_was_guessed_at_grows_on_a_branch_until_it_ends() -> None:
    """The first guess is wrong. Meanwhile the trunk is not written; what the branch held is the trunk afterwards."""
    simulation = speaking((500, 1000), (1400, 1900))
    seen = tables(simulation)
    simulation.run()
    first = next(at for at, (_, branch) in enumerate(seen) if branch is not None)
    last = next(at for at, (_, branch) in enumerate(seen) if at > first and branch is None)
    trunks = {trunk for trunk, _ in seen[first:last]}
    assert count(simulation, "speculations") > count(simulation, "speculations_dropped") == 1
    assert trunks == {seen[first - 1][0]}
    assert len(seen[last - 1][1] or b"") > len(seen[first - 1][0]), "it grew"
    assert seen[last][0] == seen[last - 1][1], "advance: nothing is copied"
    session = simulation.core.sessions[SessionId(1)]
    assert not simulation.core.stores.pages.lies_scattered(session.context.id), "nor a page lost"
    assert session.context.ids == session.dialogue.tokens()


def test_a_turn_that_comes_to_nothing_leaves_the_trunk_as_it_was() -> None:
    """The client throws the turn away while it is guessed at: resume drops the branch."""
    simulation = speaking((500, 1100), until_ms=4000)
    seen = tables(simulation)
    simulation.world.at(ms(1500), lambda: InputCleared(SessionId(1)))
    simulation.run()
    first = next(at for at, (_, branch) in enumerate(seen) if branch is not None)
    session = simulation.core.sessions[SessionId(1)]
    assert count(simulation, "speculations_dropped") == 1
    assert seen[-1][1] is None
    assert seen[first - 1][0].startswith(seen[-1][0]), "what nobody said any more was cut; nothing else has changed"
    assert session.context.ids == session.dialogue.tokens()
    assert simulation.core.metrics().values["pages_retiring"] == 0


def test_switched_off_nothing_is_made_ahead() -> None:
    simulation = speaking((500, 1100), speculation=False)
    simulation.run()
    assert count(simulation, "speculations") == 0


def test_a_person_who_halts_again_and_again_costs_a_bounded_number_of_guesses() -> None:
    parts = [(500 + 800 * i, 900 + 800 * i) for i in range(20)]
    simulation = speaking(*parts, until_ms=20_000)
    simulation.run()
    most = simulation.core.sessions[SessionId(1)]._speculating.turn_max
    assert len([n for n in simulation.news(UserWords) if n.final]) == 1
    assert count(simulation, "speculations") == most


@pytest.mark.parametrize("stage", ["think", "talk", "render"])
def test_a_guess_that_fails_costs_the_person_nothing(stage: str) -> None:
    failed = []

    def fails(launch: Launch) -> str:
        job = launch.jobs[0]
        if launch.stage == stage and (stage != "think" or job.steps) and not failed:
            failed.append(launch.work)
            return "made to fail"
        return ""

    simulation = speaking((500, 1100), fails=fails)
    simulation.run()
    assert failed
    states = [n.state for n in simulation.news(ResponseChanged)]
    if stage == "talk":  # The clause is tried in halves, as it is for an announced reply.
        assert count(simulation, "speculations_confirmed") == 1
    else:
        assert count(simulation, "speculations_dropped") == 1
    assert states[-1] is ResponseState.COMPLETED
    assert ResponseState.FAILED not in states


def test_a_person_who_leaves_in_the_middle_of_a_guess_leaves_nothing_behind() -> None:
    simulation = speaking((500, 1100), until_ms=4000)
    simulation.world.at(ms(1500), lambda: simulation.world.listeners[SessionId(1)].leave())
    simulation.run()
    assert count(simulation, "speculations_dropped") == 1
    values = simulation.core.metrics().values
    assert values["latents_held"] == values["ingest_held"] == values["pages_retiring"] == 0
    assert values["out_slots_free"] == simulation.core.stores.out_slots_count


def test_typed_words_end_a_guess() -> None:
    simulation = speaking((500, 1100), until_ms=9000)
    simulation.world.listeners[SessionId(1)].type("say 3", at=ms(1500), key="k")
    simulation.run()
    assert count(simulation, "speculations_dropped") == 1
    assert simulation.core.sessions[SessionId(1)].dialogue.exchanges[0].user == "sound say 3"


def test_under_load_nobody_is_answered_on_suspicion() -> None:
    """Half of the places belong to others who talk: the guess waits, and the reply is made in its time."""
    simulation = Simulation(until_ms=9000, sessions_max=2)
    first, second = simulation.connect(1), simulation.connect(2)
    first.type("say 30", at=ms(300), key="a")
    second.say(beep(600), at=ms(700))
    simulation.run()
    assert simulation.core.residency.places.count == 2
    assert count(simulation, "speculations") == 0
    assert simulation.final_states(2) == {1: [ResponseState.COMPLETED]}


def test_memory_that_may_leave_is_no_reason_to_guess_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever rests has filled the arena with what is only a cache: that is how few resident sessions always look."""
    monkeypatch.setattr("duplexd.models.clock.PAGES_PER_SESSION", 4)
    simulation = Simulation(until_ms=30_000, sessions_max=3, sessions_resident=1)
    people = [simulation.connect(session) for session in (1, 2, 3)]
    for at, person in enumerate(people[:2]):
        person.type("say 12", at=ms(1000 + 7000 * at), key=f"{at}")
    people[2].say(beep(600), at=ms(20_000))
    simulation.run()

    assert count(simulation, "speculations") == 1
    assert simulation.final_states(3) == {1: [ResponseState.COMPLETED]}


def slow(simulation: Simulation, stage: str, cost_us: int) -> None:
    """This stage takes so long for each launch."""
    held = simulation.world.stages[stage]
    held.spec = msgspec.structs.replace(held.spec, cost=CostModel(cost_us))


def watch(simulation: Simulation) -> list[tuple[Work, set[Need]]]:
    """Every launch that is considered, with the needs of what else waits for the stage."""
    seen: list[tuple[Work, set[Need]]] = []
    core = simulation.core
    launch = core._launch

    def watched(work: Work, now: Nanos) -> bool:
        waiting = [(other, since) for other, since in core._scheduler.waiting() if since <= now]
        seen.append((work, {other.need for other, _ in waiting if other.stage == work.stage and other is not work}))
        return launch(work, now)

    core._launch = watched  # type: ignore[method-assign]
    return seen


def test_suspicion_ranks_behind_all_other_work() -> None:
    """Whatever waits for certain, and may begin a launch, goes before what may never be wanted."""
    simulation = Simulation(until_ms=3000, sessions_max=4)
    slow(simulation, "think", 30_000)
    listeners = [simulation.connect(session) for session in (1, 2)]
    listeners[0].type("say 30", at=ms(800), key="a")
    listeners[1].say(beep(600), at=ms(500))
    seen = watch(simulation)
    simulation.run()
    thoughts = [(work.need, others) for work, others in seen if work.role is Role.THINK]
    assert any(need is Need.CHUNK and Need.SPECULATION in others for need, others in thoughts), "both wanted the lane"
    assert all(others <= {Need.SPECULATION} for need, others in thoughts if need is Need.SPECULATION)


def test_a_guess_is_never_taken_for_words_that_were_said() -> None:
    """What is fed for a guess is a guess: it neither ranks nor counts as the person's input."""
    simulation = speaking((500, 1000), (1400, 1900))
    slow(simulation, "think", 30_000)
    seen = watch(simulation)
    core = simulation.core
    guessing = []
    offer = core._scheduler.offer

    def offered(session: SessionId, works: Iterable[Work], now: Nanos) -> None:
        works = list(works)
        if session in core.sessions and core.sessions[session].speculation is not None:
            guessing.extend(work.need for work in works if work.role is Role.THINK)
        offer(session, works, now)

    core._scheduler.offer = offered  # type: ignore[method-assign]
    simulation.run()
    assert seen
    assert set(guessing) == {Need.SPECULATION}


@pytest.mark.parametrize("stage", ["think", "talk", "render"])
def test_what_still_runs_for_a_dropped_guess_comes_back_to_nobody(stage: str) -> None:
    """The person goes on while a stage works for the guess: its result is thrown away, the memory comes home."""
    simulation = speaking((500, 1000), (1400, 1900), (2300, 2800), until_ms=18_000)
    slow(simulation, stage, {"think": 120_000, "talk": 700_000, "render": 700_000}[stage])
    wrong = []
    core, handle = simulation.core, simulation.core.handle

    def checked(event: object, now: Nanos) -> None:
        handle(event, now)
        session = core.sessions.get(SessionId(1))
        if session is None or session.contest is not None:
            return
        guess = session.speculation
        supposed = session.dialogue if guess is None else guess.dialogue
        if session.growing.want != supposed.tokens():
            wrong.append((now, "the context follows another dialogue"))

    core.handle = checked  # type: ignore[method-assign]
    simulation.run()
    assert not wrong
    assert count(simulation, "speculations_dropped") >= 1
    (response,) = simulation.words().values()
    assert response == [f"0-{i}" + ("," if i in (3, 7) else "") for i in range(11)] + ["0-11."]
    assert history_words(simulation) == heard_words(simulation.world.listeners[SessionId(1)])
    assert core.metrics().values["latents_held"] == 0
    assert core.metrics().values["out_slots_free"] == core.stores.out_slots_count
