"""The thinker is told between two turns that the person came into view or left it, once, and never within a turn."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplexd.engine.dialogue import Dialogue
from duplexd.ids import SessionId
from duplexd.messages import PastTurn, PersonSeen
from duplexd.models.clock.language import CAME, LEFT, ClockDialect
from tests.engine.simulation import Simulation, ms

MARKS = (CAME, LEFT)


def told(dialogue: Dialogue) -> list[int]:
    return [token for token in dialogue.tokens() if token in MARKS]


def answered(dialogue: Dialogue, words: str = "say 2") -> None:
    dialogue.say(words)
    dialogue.close_user()
    dialogue.think([1000])
    dialogue.finish_reply(kept=1, text="0-0", response=len(dialogue.exchanges) + 1)


def test_somebody_comes_and_goes_with_a_turn_between() -> None:
    dialogue = Dialogue(ClockDialect())
    for present in (True, True, False):
        dialogue.see(present=present)
        answered(dialogue)

    assert told(dialogue) == [CAME, LEFT]


def test_somebody_who_came_and_went_unspoken_to_was_not_there() -> None:
    dialogue = Dialogue(ClockDialect())
    answered(dialogue)
    before = dialogue.tokens()

    assert dialogue.see(present=True)
    assert dialogue.tokens() != before
    assert dialogue.see(present=False)
    assert dialogue.tokens() == before


@pytest.mark.parametrize("replying", [False, True], ids=["while the person speaks", "while it answers"])
def test_within_a_turn_it_waits_for_its_end(replying: bool) -> None:
    """The keys of a turn that is being said are not thrown away for it."""
    dialogue = Dialogue(ClockDialect())
    dialogue.say("say 2")
    if replying:
        dialogue.close_user()
        dialogue.think([1000])
    before = dialogue.tokens()

    assert not dialogue.see(present=True)
    assert dialogue.tokens() == before
    if not replying:
        dialogue.close_user()
        dialogue.think([1000])
    dialogue.finish_reply(kept=1, text="0-0", response=1)
    assert told(dialogue) == [CAME]
    assert dialogue.tokens()[-1] == CAME


def test_a_turn_that_came_to_nothing_is_an_end_too() -> None:
    dialogue = Dialogue(ClockDialect())
    dialogue.say("hm")
    dialogue.see(present=True)
    dialogue.forget_turn()

    assert told(dialogue) == [CAME]


def test_a_reply_nobody_heard_gives_its_turn_to_the_next_one_across_a_sight() -> None:
    dialogue = Dialogue(ClockDialect())
    answered(dialogue, "say 2")
    dialogue.see(present=True)
    answered(dialogue, "and 3")

    assert dialogue.correct(1, "say 2", tokens=(), text="")
    assert [(e.user, e.sight) for e in dialogue.exchanges] == [("", True), ("say 2 and 3", None)]
    fresh = Dialogue(ClockDialect())
    fresh.see(present=True)
    answered(fresh, "say 2 and 3")
    assert dialogue.tokens() == fresh.tokens()


def test_a_history_of_the_clients_keeps_what_is_in_view() -> None:
    dialogue = Dialogue(ClockDialect())
    dialogue.see(present=True)
    answered(dialogue)
    dialogue.recast([PastTurn("say 4", "")])

    assert told(dialogue) == [CAME]


@given(st.lists(st.sampled_from(["came", "left", "turn", "open", "nothing", "slide", "past"]), max_size=30))
def test_what_was_told_last_is_how_it_is(steps: list[str]) -> None:
    """Whatever happened before: between two turns the newest mark is the truth, and no two alike follow each other."""
    dialogue, in_view = Dialogue(ClockDialect()), False
    for step in steps:
        match step:
            case "came" | "left":
                in_view = step == "came"
                dialogue.see(present=in_view)
            case "turn":
                answered(dialogue)
            case "open":
                dialogue.say("say")
            case "nothing":
                dialogue.forget_turn()
            case "slide":
                dialogue.slide()
            case "past":
                dialogue = dialogue.past()
    dialogue.forget_turn()
    dialogue.see(present=in_view)
    marks = told(dialogue)

    assert (marks[-1:] == [CAME]) == in_view
    assert all(a != b for a, b in pairwise(marks))


@pytest.mark.parametrize("speculation", [True, False])
def test_in_a_session_it_stands_before_the_next_turn(speculation: bool) -> None:
    """Seen while the first reply sounds: the second turn's context says so, and the reply is numbered as ever."""
    simulation = Simulation(until_ms=9000, speculation=speculation)
    person = simulation.connect()
    person.type("say 3", at=ms(300), key="a")
    simulation.world.at(ms(900), lambda: PersonSeen(SessionId(1), True, 0.1, 0.0))
    person.type("say 2", at=ms(4500), key="b")
    simulation.world.at(ms(8000), lambda: PersonSeen(SessionId(1), False))
    simulation.run()

    session = simulation.core.sessions[SessionId(1)]
    assert [(e.user, e.sight) for e in session.dialogue.exchanges] == [
        ("say 3", None),
        ("", True),
        ("say 2", None),
        ("", False),
    ]
    assert session.context.ids == session.dialogue.tokens()
    assert [words[-1].strip() for words in simulation.words().values()] == ["0-2.", "1-1."]
