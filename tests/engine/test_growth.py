"""One session's memory never dies: at every bound of its context the oldest goes, and the person is answered."""

from __future__ import annotations

from array import array
from collections import Counter
from random import Random
from typing import Any

import pytest

from duplexd.engine.dialogue import Dialogue
from duplexd.engine.simulator import SimNetwork
from duplexd.ids import SessionId, WorkId
from duplexd.memory.classes import CacheClass
from duplexd.messages import ConditionSet, HistorySet, InputRefusal, PastTurn, ReplyWanted, ResponseState
from duplexd.models.clock.language import INSTRUCT, WORD
from duplexd.streams.stage import ThinkJob
from tests.engine.simulation import Simulation, beep, ms

CONTEXT_TOKENS = 256
#: In the default model's proportions: what the tokens of a whole context take, and 24 spare ones for 1024 tokens.
SESSION_PAGES = CONTEXT_TOKENS // 16 + 6
ME = SessionId(1)
BOUNDS: dict[str, Any] = {"sessions_max": 1, "context_tokens": CONTEXT_TOKENS, "session_pages": SESSION_PAGES}


@pytest.mark.parametrize("seed", range(2))
def test_forty_quick_interruptions_are_all_answered(seed: int) -> None:
    """Every turn leaves pages partly filled: the pages are full long before the tokens are."""
    rng = Random(seed)
    simulation = Simulation(seed=seed, until_ms=122_000, **BOUNDS)
    listener = simulation.connect(network=SimNetwork(delay=ms(8), buffer=ms(60)))
    for turn in range(40):
        listener.say(beep(1000), at=ms(500 + 3000 * turn + rng.uniform(0, 200)))
    simulation.run()

    ends = simulation.final_states()
    assert len(ends) >= 40
    assert not [response for response, states in ends.items() if ResponseState.FAILED in states]


def order(simulation: Simulation, at_ms: float, fact: Any) -> None:
    simulation.world.at(ms(at_ms), lambda: fact)


def thought(simulation: Simulation) -> list[ThinkJob]:
    """Every step of the thinker for the session."""
    jobs = [job for _, launch in simulation.world.launches if launch.stage == "think" for job in launch.jobs]
    return [job for job in jobs if job.session == ME]


def past(words: int) -> PastTurn:
    """A turn that takes so many tokens and some marks."""
    return PastTurn("word " * (words - 4), "0-0 0-1 0-2 0-3")


def test_a_full_context_with_instructions_prefills_nothing_that_it_keeps() -> None:
    """Fourteen turns of some fifty tokens: the context is full after nine, and slides behind the instructions."""
    simulation = Simulation(until_ms=2500 * 14)
    listener = simulation.connect()
    order(simulation, 100, ConditionSet(ME, "be very brief"))
    for turn in range(14):
        listener.type(f"{'word ' * 44} say 3", at=ms(300 + 2400 * turn), key=f"t{turn}")
    simulation.run()
    jobs = thought(simulation)
    live = simulation.core.sessions[ME]
    new = 14 * (1 + 46 + 1 + 3 + 1)

    assert simulation.core.monitor["exchanges_slid"] >= 4
    assert live.dialogue.tokens()[:5] == [0, INSTRUCT, WORD, WORD, WORD]
    assert live.context.ids == live.dialogue.tokens()[: len(live.context.ids)]
    assert sum(len(job.feed) for job in jobs) <= new + 4 + 2 * 14


def test_instructions_are_measured_by_themselves_not_with_the_history() -> None:
    """A conversation fills half of the context: instructions may still be given, and those too long change nothing."""
    simulation = Simulation(until_ms=2000)
    simulation.connect()
    order(simulation, 100, HistorySet(ME, tuple(past(50) for _ in range(7)), ""))
    order(simulation, 300, ConditionSet(ME, "be very brief"))
    order(simulation, 500, ConditionSet(ME, "word " * 400))
    simulation.run()
    live = simulation.core.sessions[ME]

    assert [n.code for n in simulation.news(InputRefusal)] == ["instructions_too_long"]
    assert live.dialogue.instructions == "be very brief"
    assert (live.condition, len(live.dialogue.exchanges)) == (1, 7)


def test_instructions_given_in_the_middle_of_a_reply_to_a_full_context_end_nothing() -> None:
    """Two hundred tokens more than fit: what is oldest goes while the reply lives, and it is heard to its end."""
    simulation = Simulation(until_ms=15_000)
    simulation.connect()
    order(simulation, 100, HistorySet(ME, tuple(past(50) for _ in range(8)), "say 30"))
    order(simulation, 300, ReplyWanted(ME, "k"))
    order(simulation, 1500, ConditionSet(ME, "word " * 200))
    simulation.run()
    held = [job.past + len(job.feed) + job.steps for job in thought(simulation)]

    assert simulation.final_states() == {1: [ResponseState.COMPLETED]}
    assert max(held) <= simulation.plan.context_tokens_max
    assert simulation.history()[1].words == 30
    assert simulation.core.sessions[ME].dialogue.instructions


def test_a_long_message_leaves_room_for_the_instructions() -> None:
    """What fits without them and not with them is refused, rather than begun in the middle."""
    simulation = Simulation(until_ms=2000)
    listener = simulation.connect()
    order(simulation, 100, ConditionSet(ME, "word " * 200))
    listener.type("word " * 300, at=ms(300), key="long")
    simulation.run()

    assert [(n.code, n.key) for n in simulation.news(InputRefusal)] == [("text_too_long", "long")]


def test_words_over_a_reply_wait_as_text_where_no_page_is_left_for_a_branch() -> None:
    """Five pages: a long turn and its reply take them all, and the person speaks over it at length."""
    simulation = Simulation(until_ms=18_000, sessions_max=1, context_tokens=512, session_pages=5)
    listener = simulation.connect()
    listener.type(f"{'word ' * 56} say 16", at=ms(300), key="a")
    listener.say(beep(3500), at=ms(4500))
    simulation.run()

    assert simulation.core.monitor["branches_without_room"] > 0
    assert simulation.final_states() == {1: [ResponseState.CANCELLED], 2: [ResponseState.COMPLETED]}


def scatter(simulation: Simulation) -> None:
    """Lay every token behind the anchor on a page of its own, as branches that take the rest of each do."""
    live, keys = simulation.core.sessions[ME], simulation.arena.field("pages", "k")
    tokens = live.context.ids[1:]
    live.context.follow(live.context.ids[:1])
    for number, token in enumerate(tokens):
        work = WorkId(1_000_000 + number)
        branch = live.context.fork(live.context.ids)
        live.context.follow([*live.context.ids, token])
        slots = array("q", b"".join(live.context.launch(work, steps=0, feed_max=1).pieces))
        keys[slots[-1], 0] = token
        live.context.land(work, ())
        branch.close()


def test_a_turn_that_lies_on_too_many_pages_is_laid_side_by_side() -> None:
    """Nothing older is there to go: its keys are prefilled again, and the reply is thought to its end."""
    simulation = Simulation(until_ms=22_000, sessions_max=1, context_tokens=512, session_pages=12)
    simulation.connect()
    order(simulation, 100, HistorySet(ME, (), f"{'word ' * 8} say 33"))
    simulation.world.at(ms(300), lambda: scatter(simulation))
    order(simulation, 400, ReplyWanted(ME, "k"))
    simulation.run()

    assert simulation.core.monitor["contexts_prefilled_anew"] == 1
    assert simulation.final_states() == {1: [ResponseState.COMPLETED]}
    assert simulation.history()[1].words == 32


def test_a_guess_without_pages_is_given_up_and_the_turn_is_answered_when_it_has_ended() -> None:
    """Somebody else's pages count as this session's for a moment: nothing is forgotten for a guess."""
    simulation = Simulation(until_ms=9000, **BOUNDS | {"sessions_max": 4})
    listener = simulation.connect()
    order(simulation, 100, HistorySet(ME, (past(26),), ""))
    listener.say(beep(700), at=ms(500))
    pages, taken = simulation.core.stores.pages, []

    def take() -> None:
        taken.append(pages.open(ME))
        while pages.append(taken[0], 1, CacheClass.RECENT):
            pass

    simulation.world.at(ms(860), take)
    simulation.world.at(ms(1400), lambda: pages.close(taken[0], after=None))
    simulation.run()

    assert simulation.core.monitor["speculations_without_room"] == 1
    assert simulation.final_states() == {1: [ResponseState.COMPLETED]}
    assert len(simulation.core.sessions[ME].dialogue.exchanges) == 2


def test_a_history_far_too_long_slides_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client sets five hundred turns: they are looked through a few times, not once for each that goes."""
    looks: Counter[str] = Counter()
    tokens = Dialogue.tokens

    def counted(self: Dialogue) -> list[int]:
        looks["tokens"] += 1
        return tokens(self)

    monkeypatch.setattr(Dialogue, "tokens", counted)
    simulation = Simulation(until_ms=300)
    simulation.connect()
    order(simulation, 100, HistorySet(ME, tuple(past(50) for _ in range(500)), "say 3"))
    simulation.run()

    assert simulation.core.monitor["exchanges_slid"] == 492
    assert looks["tokens"] < 25


def test_a_full_context_still_guesses() -> None:
    """One token is left beside a reply: the oldest exchange goes for the guess, not only for the turn it becomes."""
    simulation = Simulation(until_ms=9000, sessions_max=1, context_tokens=CONTEXT_TOKENS)
    listener = simulation.connect()
    order(simulation, 100, HistorySet(ME, (*(past(26) for _ in range(6)), past(28)), ""))
    listener.say(beep(1500), at=ms(500))
    simulation.run()

    assert simulation.core.monitor["exchanges_slid"] == 1
    assert simulation.core.monitor["speculations_without_room"] == 0
    assert simulation.core.monitor["speculations_confirmed"] == 1
