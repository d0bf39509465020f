"""What a client may order a session: turns it ends itself, replies it asks for, a history it sets and corrects."""

from __future__ import annotations

from typing import Any

import pytest

from duplexd.engine.calls import CallFilter
from duplexd.engine.dialogue import OVERHEARD_MAX, Dialogue
from duplexd.ids import ResponseId, SessionId
from duplexd.messages import (
    AdvanceEpoch,
    CallMade,
    ConditionSet,
    HistoryChanged,
    HistoryCut,
    HistorySet,
    InputCleared,
    InputRefusal,
    PastTurn,
    ReplyWanted,
    ReplyWords,
    ResponseChanged,
    ResponseState,
    SettingChanged,
    TurnEnded,
    TurnOpened,
    TurnOutcome,
    TurnSettingChanged,
    TurnSettled,
)
from duplexd.models.clock.language import INSTRUCT, ClockDialect
from duplexd.units import Ticks, ticks_from_ms
from tests.engine.simulation import Simulation, beep, heard_words, history_words, ms

ME = SessionId(1)


def order(simulation: Simulation, at_ms: float, fact: Any) -> None:
    simulation.world.at(ms(at_ms), lambda: fact)


def asked(simulation: Simulation, text: str, *, at_ms: float = 300, key: str = "k", **wanted: Any) -> None:
    order(simulation, at_ms, HistorySet(ME, (), text))
    order(simulation, at_ms, ReplyWanted(ME, key, **wanted))


def dialogue(simulation: Simulation) -> Any:
    return simulation.core.sessions[ME].dialogue


def test_a_reply_that_is_asked_for_answers_what_the_history_holds() -> None:
    simulation = Simulation(until_ms=6000)
    listener = simulation.connect()
    asked(simulation, "say 5")
    simulation.run()

    assert heard_words(listener) == [0, 1, 2, 3, 4]
    assert {news.key for news in simulation.news(ResponseChanged)} == {"k"}
    assert [(e.user, e.reply) for e in dialogue(simulation).exchanges] == [("say 5", "0-0 0-1 0-2 0-3, 0-4.")]


def test_a_reply_in_writing_makes_no_sound_and_is_remembered_whole() -> None:
    simulation = Simulation(until_ms=3000)
    listener = simulation.connect()
    asked(simulation, "say 6", spoken=False)
    simulation.run()

    written = "".join(news.text for news in simulation.news(ReplyWords))
    assert written == "0-0 0-1 0-2 0-3, 0-4 0-5."
    assert heard_words(listener) == []
    assert simulation.final_states() == {1: [ResponseState.COMPLETED]}
    assert history_words(simulation) == [0, 1, 2, 3, 4, 5]


def test_words_that_somebody_else_thought_up_are_spoken_as_they_are() -> None:
    simulation = Simulation(until_ms=6000)
    listener = simulation.connect()
    order(simulation, 300, ReplyWanted(ME, "k", script="7 9 7"))
    simulation.run()

    assert heard_words(listener) == [7, 9, 7]
    assert simulation.history()[1].text == "7 9 7"
    assert simulation.core.monitor.values().get("think_failures", 0) == 0


def test_tokens_of_a_reply_are_counted_and_bounded() -> None:
    simulation = Simulation(until_ms=3000)
    simulation.connect()
    asked(simulation, "say 9", spoken=False, tokens_max=4)
    simulation.run()

    last = simulation.news(ResponseChanged)[-1]
    assert (last.written, last.cut_short, last.context) == (4, True, 5)


def test_a_turn_is_not_answered_until_a_reply_is_asked_for() -> None:
    """create_response: false. Two turns, then one reply to both."""
    simulation = Simulation(until_ms=14_000)
    listener = simulation.connect()
    order(simulation, 100, TurnSettingChanged(ME, auto_reply=False))
    listener.say(beep(500), at=ms(500))
    listener.say(beep(500), at=ms(2500))
    order(simulation, 5000, ReplyWanted(ME, "k"))
    simulation.run()

    assert [n.outcome for n in simulation.news(TurnSettled)] == [TurnOutcome.TAKEN] * 2
    assert simulation.times(ResponseChanged)[0] >= 5000
    assert [e.user for e in dialogue(simulation).exchanges] == ["sound sound"]
    assert heard_words(listener)


def test_a_turn_ends_when_the_client_says_so_and_never_by_silence() -> None:
    """Push to talk: three seconds of silence end nothing; the reply waits until the words are understood."""
    simulation = Simulation(until_ms=14_000)
    listener = simulation.connect()
    order(simulation, 100, TurnSettingChanged(ME, by_client=True, auto_reply=False))
    listener.say(beep(500), at=ms(500))
    listener.say(beep(500), at=ms(3500))
    order(simulation, 4010, TurnEnded(ME, Ticks(0), "commit"))
    order(simulation, 4010, ReplyWanted(ME, "k"))
    simulation.run()

    settled = simulation.news(TurnSettled)
    assert [(n.outcome, n.text, n.key) for n in settled] == [(TurnOutcome.TAKEN, "sound sound", "commit")]
    assert simulation.times(TurnSettled)[0] < 4200
    assert simulation.times(ResponseChanged)[0] >= simulation.times(TurnSettled)[0]
    assert heard_words(listener) == list(range(12))


def test_a_turn_without_a_voice_ends_empty() -> None:
    simulation = Simulation(until_ms=3000)
    simulation.connect()
    order(simulation, 100, TurnSettingChanged(ME, by_client=True, auto_reply=False))
    order(simulation, 900, TurnEnded(ME, Ticks(4800), "c"))
    simulation.run()

    assert [(n.outcome, n.key) for n in simulation.news(TurnSettled)] == [(TurnOutcome.EMPTY, "c")]


def test_what_was_said_can_be_thrown_away() -> None:
    simulation = Simulation(until_ms=5000)
    listener = simulation.connect()
    listener.say(beep(800), at=ms(500))
    order(simulation, 1000, InputCleared(ME))
    simulation.run()

    assert [n.outcome for n in simulation.news(TurnSettled)] == [TurnOutcome.CLEARED]
    assert heard_words(listener) == []
    assert dialogue(simulation).user == ""


@pytest.mark.parametrize(
    ("clear", "setting", "remembered"),
    [
        pytest.param(False, None, ["sound"], id="remembered"),
        pytest.param(True, None, [], id="cleared-by-the-client"),
        pytest.param(False, TurnSettingChanged(ME, overhears=False), [], id="the-client-keeps-the-history"),
    ],
)
def test_words_of_a_false_alarm_follow_the_reply_unless_the_client_says_otherwise(
    clear: bool, setting: TurnSettingChanged | None, remembered: list[str]
) -> None:
    """A voice of 400 ms over the second word does not interrupt; what it said is a turn of its own behind the reply,
    and the next turn stands behind that (DESIGN §6).
    """
    simulation = Simulation(until_ms=12_000)
    listener = simulation.connect()
    if setting is not None:
        order(simulation, 100, setting)
    listener.type("say 9", at=ms(300), key="a")
    listener.say(beep(400), at=ms(1500))
    if clear:
        order(simulation, 1850, InputCleared(ME))
    listener.type("say 3", at=ms(7000), key="b")
    simulation.run()

    session = simulation.core.sessions[ME]
    said = [(e.user, e.reply != "", e.overheard) for e in session.dialogue.exchanges]
    assert simulation.news(AdvanceEpoch) == []
    assert said == [("say 9", True, False), *((words, False, True) for words in remembered), ("say 3", True, False)]
    assert heard_words(listener) == [*range(9), *range(32, 35)]
    assert session.context.ids == session.dialogue.tokens()


def test_words_over_a_reply_of_which_nothing_stays_belong_to_its_turn() -> None:
    talk = Dialogue(ClockDialect())
    talk.say("say 9")
    talk.close_user()
    talk.overhear("one")
    talk.overhear("two")
    talk.finish_reply(kept=0, text="")

    assert (talk.user, talk.user_open, talk.exchanges) == ("say 9 one two", True, ())


def test_an_interruption_finds_the_words_of_a_false_alarm_before_it() -> None:
    """The branch on which an interruption is prefilled holds what the trunk will hold."""
    talk = Dialogue(ClockDialect())
    talk.say("say 9")
    talk.close_user()
    talk.think([1000, 1002])
    talk.overhear("one")
    branch = talk.interrupted(kept=1, text="0-0")
    talk.finish_reply(kept=1, text="0-0")

    assert branch.tokens() == talk.tokens()
    assert [e.user for e in branch.exchanges] == ["say 9", "one"]


def test_what_is_overheard_is_bounded() -> None:
    talk = Dialogue(ClockDialect())
    talk.say("say 9")
    talk.close_user()
    talk.think([1000])
    for number in range(200):
        talk.overhear(f"word{number}")
    talk.finish_reply(kept=1, text="0-0")

    assert len(talk.exchanges[-1].user) <= OVERHEARD_MAX
    assert talk.exchanges[-1].user.endswith("word199")


def test_turns_say_when_they_open_and_how_they_end() -> None:
    """One turn, and a false alarm over its reply: nobody has to be told of a turn that was none."""
    simulation = Simulation(until_ms=9000)
    listener = simulation.connect()
    listener.say(beep(500), at=ms(500))
    listener.say(beep(120), at=ms(3500))
    simulation.run()

    assert [n.over_reply for n in simulation.news(TurnOpened)] == [False, True]
    assert [n.outcome for n in simulation.news(TurnSettled)] == [TurnOutcome.TAKEN, TurnOutcome.OVERHEARD]


def test_the_history_can_be_set_and_what_stays_keeps_its_keys() -> None:
    """Two exchanges; the second is replaced. The next reply follows the new one, and the first is not read again."""
    simulation = Simulation(until_ms=12_000)
    simulation.connect()
    asked(simulation, "say 2", spoken=False)
    told = PastTurn("say 2", "0-0 0-1.")
    order(simulation, 1500, HistorySet(ME, (told, PastTurn("hm", "7-0 7-1.")), "say 3"))
    order(simulation, 1500, ReplyWanted(ME, "k2", spoken=False))
    simulation.run()

    assert "".join(n.text for n in simulation.news(ReplyWords) if n.response == 2) == "8-0 8-1 8-2."
    assert dialogue(simulation).exchanges[0].response == 1  # The one that was said, tokens and all.


@pytest.mark.parametrize(("heard_ms", "words"), [(0, 0), (500, 1), (1450, 3), (60_000, 6)])
def test_what_a_client_says_it_heard_corrects_a_reply_that_has_ended(heard_ms: float, words: int) -> None:
    """Stopped in the middle by an estimate; the client knows better, and whatever it says is what is remembered."""
    simulation = Simulation(until_ms=8000)
    listener = simulation.connect()
    asked(simulation, "say 6")
    listener.stop(at=ms(2000))
    order(simulation, 2600, HistoryCut(ME, ResponseId(1), ticks_from_ms(heard_ms), "t"))
    asked_text = simulation.history
    simulation.run()

    assert asked_text()[1].words == words
    assert history_words(simulation) == list(range(words))
    assert dialogue(simulation).user == ("say 6" if words == 0 else "")


def test_a_correction_of_an_unknown_reply_is_refused() -> None:
    simulation = Simulation(until_ms=2000)
    simulation.connect()
    order(simulation, 500, HistoryCut(ME, ResponseId(9), Ticks(0), "t"))
    simulation.run()

    assert [(n.code, n.key) for n in simulation.news(InputRefusal)] == [("unknown_response", "t")]


def test_instructions_stand_behind_the_anchor_and_survive_sliding() -> None:
    simulation = Simulation(until_ms=60_000)
    simulation.connect()
    order(simulation, 100, ConditionSet(ME, "be very brief"))
    for turn in range(30):
        order(simulation, 300 + 1500 * turn, HistorySet(ME, (), f"{'word ' * 40} say {1 + turn % 3}"))
        order(simulation, 300 + 1500 * turn, ReplyWanted(ME, f"k{turn}", spoken=False))
    simulation.run()

    assert dialogue(simulation).tokens()[:3] == [0, INSTRUCT, 5]
    assert len(simulation.final_states()) == 30


def test_instructions_without_end_are_refused() -> None:
    simulation = Simulation(until_ms=1000)
    simulation.connect()
    order(simulation, 100, ConditionSet(ME, "word " * 2000))
    simulation.run()

    assert [n.code for n in simulation.news(InputRefusal)] == ["instructions_too_long"]


def test_a_call_is_announced_and_not_spoken() -> None:
    simulation = Simulation(until_ms=5000)
    listener = simulation.connect()
    asked(simulation, "say 700")
    simulation.run()

    assert [(n.name, n.arguments) for n in simulation.news(CallMade)] == [("number", '{"asked": true}')]
    assert heard_words(listener) == []
    assert simulation.final_states() == {1: [ResponseState.COMPLETED]}
    assert dialogue(simulation).user == "say 700"  # The turn is open until the function's result is there.


def test_a_reply_that_is_asked_for_over_another_follows_it() -> None:
    simulation = Simulation(until_ms=9000)
    listener = simulation.connect()
    asked(simulation, "say 3")
    order(simulation, 600, ReplyWanted(ME, "k2"))
    simulation.run()

    assert list(dict.fromkeys(n.key for n in simulation.news(ResponseChanged))) == ["k", "k2"]
    assert heard_words(listener)[:3] == [0, 1, 2]
    assert len(heard_words(listener)) == 3 + 12


def test_an_interruption_is_off_while_turns_belong_to_the_client() -> None:
    simulation = Simulation(until_ms=9000)
    listener = simulation.connect(barge_in=False)
    order(simulation, 100, SettingChanged(ME, barge_in=False))
    order(simulation, 100, TurnSettingChanged(ME, by_client=True, auto_reply=False))
    asked(simulation, "say 6")
    listener.say(beep(900), at=ms(1500))
    order(simulation, 2500, TurnEnded(ME, Ticks(0), "c"))
    simulation.run()

    assert heard_words(listener) == list(range(6))
    assert [n.outcome for n in simulation.news(TurnSettled)] == [TurnOutcome.TAKEN]
    assert dialogue(simulation).user == "sound"
    assert len([n for n in simulation.news(HistoryChanged) if n.final]) == 1


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_found_however_the_text_is_cut(size: int) -> None:
    text = 'Well. <tool_call>\n{"name": "look", "arguments": {"q": "a <b> c"}}\n</tool_call> And <tool> more.'
    call_filter = CallFilter()
    spoken = "".join(call_filter.push(text[i : i + size]) for i in range(0, len(text), size)) + call_filter.finish()

    assert spoken == "Well.  And <tool> more."
    assert [(c.name, c.arguments) for c in call_filter.calls] == [("look", '{"q": "a <b> c"}')]


@pytest.mark.parametrize("inside", ["no json", "[]", '{"arguments": {}}', '{"name": "f", "arguments": 3}'])
def test_what_is_no_call_is_dropped_and_counted(inside: str) -> None:
    call_filter = CallFilter()

    assert call_filter.push(f"a<tool_call>{inside}</tool_call>b") == "ab"
    assert (call_filter.calls, call_filter.dropped) == ([], 1)


def test_a_call_without_end_is_bounded() -> None:
    call_filter = CallFilter(call_max=100)
    call_filter.push("<tool_call>" + "x" * 101)

    assert (call_filter.push("spoken"), call_filter.dropped) == ("spoken", 1)
