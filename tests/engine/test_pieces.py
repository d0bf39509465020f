"""The core's small parts, each on its own: clauses, chunks, timeline, utterance, barge-in, dialogue, policy."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplexd.engine.bargein import BargeInRule, BargeInTunables, Decision, VoiceView, content_words, echoes
from duplexd.engine.chunk import Chunk, ChunkState, ChunkTable
from duplexd.engine.clause import ClauseSplitter, halves
from duplexd.engine.dialogue import Dialogue, common_prefix
from duplexd.engine.timeline import BUDGET_MAX, BUDGET_MIN, Timeline
from duplexd.engine.utterance import FREEZE_AT, ListenKind, Utterance, agreed, newest
from duplexd.ids import Epoch, SessionId
from duplexd.messages import Cursor, CursorReported
from duplexd.models.clock.language import ClockDialect
from duplexd.units import Nanos, Span, Ticks, ticks_from_ms, ticks_from_nanos

# Clauses ------------------------------------------------------------------------------------------------------------


def clauses_of(text: str, *, step: int = 4) -> list[str]:
    splitter = ClauseSplitter()
    found = []
    for at in range(0, len(text), step):
        found += splitter.push(text[at : at + step])
    return [clause.text for clause in found + splitter.finish()]


@pytest.mark.parametrize(
    ("text", "clauses"),
    [
        ("The capital of France is Paris.", ["The capital of France is Paris."]),
        ("Well, that is a good question. I think so.", ["Well, that is a good question.", "I think so."]),
        ("I like tea, and you?", ["I like tea,", "and you?"]),
        ("Dr. Smith is here. Yes.", ["Dr. Smith is here.", "Yes."]),
        ('She said "no!" and left.', ['She said "no!"', "and left."]),
        ("", []),
        ("   ", []),
        ("no punctuation at all", ["no punctuation at all"]),
    ],
)
def test_a_reply_is_cut_where_a_person_would_breathe(text: str, clauses: list[str]) -> None:
    assert clauses == clauses_of(text)


def test_a_number_is_not_cut_at_its_point() -> None:
    assert clauses_of("Pi is about 3.14 or so.", step=1) == ["Pi is about 3.14 or so."]


@given(st.text(alphabet="ab .,!?\n", max_size=200), st.integers(1, 9), st.sampled_from([0, 1, 3]))
def test_clauses_hold_every_word_once_and_stay_short(text: str, step: int, first_words: int) -> None:
    splitter = ClauseSplitter(first_words=first_words)
    found = []
    for at in range(0, len(text), step):
        found += splitter.push(text[at : at + step])
    found += splitter.finish()

    assert letters(text) == "".join(letters(clause.text) for clause in found)
    for clause in found:
        assert clause.text == splitter.text[clause.start : clause.end]
        assert len(clause.text.split()) <= splitter.words_max


def parts_of(text: str, *, first_words: int = 0) -> list[tuple[str, str, str]]:
    """Before, clause, after; a word is a token."""
    splitter = ClauseSplitter(first_words=first_words)
    found = []
    for index, word in enumerate(text.split()):
        found += splitter.push(f" {word}" if index else word)
    return [(clause.before, clause.text, clause.after) for clause in found + splitter.finish()]


def test_a_clause_that_ends_within_a_phrase_knows_the_words_around_it() -> None:
    text = "one two three four five six seven eight nine ten, eleven"
    assert parts_of(text) == [
        ("", "one two three four five six seven eight", "nine"),
        ("five six seven eight", "nine ten,", ""),
        ("", "eleven", ""),
    ]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("The biggest planet is Jupiter.", ["The biggest planet", "is Jupiter."]),
        ("I am a cat and you", ["I am a cat", "and you"]),
        ("Oh, that is very kind.", ["Oh, that is", "very kind."]),
        ("Paris.", ["Paris."]),
        ("Yes, I do.", ["Yes, I do."]),
        ("One two three four. One two three four.", ["One two three", "four.", "One two three four."]),
    ],
    ids=["three words", "not too short", "a comma after one word", "whole", "two", "only the first"],
)
def test_the_first_clause_is_begun_before_its_phrase_is_whole(text: str, parts: list[str]) -> None:
    """Somebody is waiting for it; the others end where a person would breathe."""
    assert [clause for _, clause, _ in parts_of(text, first_words=3)] == parts


def test_nothing_is_begun_before_the_next_word_is() -> None:
    """Without it the voice would take the third word for the last of all."""
    splitter = ClauseSplitter(first_words=3)
    assert splitter.push("The biggest planet") == []
    (clause,) = splitter.push(" is")
    assert (clause.text, clause.after) == ("The biggest planet", "is")


def test_halves_of_a_clause_go_on_from_each_other() -> None:
    (clause,) = ClauseSplitter().push("one two three four five.")
    clause = msgspec.structs.replace(clause, before="zero", after="six")
    left, right = halves(clause) or ()
    assert (left.before, left.text, left.after) == ("zero", "one two", "three")
    assert (right.before, right.text, right.after) == ("zero one two", "three four five.", "six")


def letters(text: str) -> str:
    return "".join(character for character in text if character.isalnum())


# Chunks -------------------------------------------------------------------------------------------------------------


def plan_chunks(table: ChunkTable, count: int) -> list[Chunk]:
    return [
        table.plan(
            epoch=Epoch(0),
            offset=Ticks(0),
            span=Span(Ticks(1000 * i), Ticks(1000 * (i + 1))),
        )
        for i in range(count)
    ]


def test_an_illegal_move_raises_and_changes_nothing() -> None:
    table = ChunkTable()
    (chunk,) = plan_chunks(table, 1)
    with pytest.raises(ValueError, match="cannot become heard"):
        table.move(chunk, ChunkState.HEARD)

    assert ChunkState.PLANNED is chunk.state


def test_an_interruption_splits_only_the_straddling_chunk() -> None:
    """Published, published, running, planned; the ear is inside the second: it is split, the rest is dropped."""
    table = ChunkTable()
    chunks = plan_chunks(table, 4)
    for chunk in chunks[:3]:
        table.move(chunk, ChunkState.RUNNING)
    for chunk in chunks[:2]:
        table.move(chunk, ChunkState.READY)
        table.move(chunk, ChunkState.PUBLISHED)

    dropped = table.interrupt(Ticks(1400))

    assert [chunk.state for chunk in dropped] == [ChunkState.RETIRING, ChunkState.DISCARDED]
    assert table.heard_ticks == 1400
    assert Span(Ticks(1000), Ticks(1400)) == chunks[1].span


def test_chunk_ids_never_repeat() -> None:
    table = ChunkTable()
    first = plan_chunks(table, 2)
    table.interrupt(Ticks(0))
    second = plan_chunks(table, 2)

    assert [chunk.chunk_id for chunk in first + second] == [1, 2, 3, 4]


def test_the_chunk_table_is_bounded() -> None:
    table = ChunkTable(chunks_max=2)
    with pytest.raises(RuntimeError, match="2 chunks are alive"):
        plan_chunks(table, 3)


# Timeline -----------------------------------------------------------------------------------------------------------


def reported(epoch: int, position: int, at: int, *, age: int = 0) -> CursorReported:
    cursor = Cursor(Epoch(epoch), Ticks(position), Nanos(at))
    return CursorReported(SessionId(1), cursor, Ticks(0), Nanos(age), Ticks(0), False)


def published(until: int) -> Timeline:
    timeline = Timeline()
    timeline.generation = timeline.published = Ticks(until)
    return timeline


@given(st.lists(st.tuples(st.integers(-1, 2), st.integers(-(10**7), 10**7), st.integers(0, 10**10)), max_size=40))
def test_no_report_moves_the_cursor_back_or_past_what_was_published(reports: list[tuple[int, int, int]]) -> None:
    timeline = published(100_000)
    before = 0
    for epoch, position, at in reports:
        timeline.report(reported(epoch, position, at), Nanos(5 * 10**9))
        assert before <= timeline.reported <= 100_000
        before = timeline.reported


@given(st.lists(st.integers(-(10**6), 10**9), min_size=1, max_size=40), st.sampled_from([3, 16, 200]))
def test_the_budget_knows_the_p99_of_the_ages_that_are_kept(ages: list[int], kept: int) -> None:
    """Kept in order as they come and go, they are what sorting them finds."""
    timeline = Timeline(reports_kept=kept)
    timeline.published = Ticks(100_000)
    for at, age in enumerate(ages):
        timeline.report(reported(0, 0, at, age=age), Nanos(5 * 10**9))
    newest = sorted(max(0, age) for age in ages[-kept:])
    p99 = ticks_from_nanos(newest[min(len(newest) - 1, len(newest) * 99 // 100)])

    assert timeline.budget(BUDGET_MIN) == min(BUDGET_MAX, BUDGET_MIN + p99)


def test_a_report_from_the_future_does_not_freeze_later_ones_out() -> None:
    timeline = published(100_000)
    assert timeline.report(reported(0, 1000, 10**15), Nanos(10**9))
    assert timeline.report(reported(0, 2000, 2 * 10**9), Nanos(2 * 10**9))


def test_playback_is_extrapolated_only_while_it_plays_and_never_for_long() -> None:
    timeline = published(10**7)
    timeline.report(reported(0, 48_000, 10**9), Nanos(10**9))

    assert timeline.playback(Nanos(10**9 + 10**8)) == 48_000 + 4800
    assert timeline.playback(Nanos(10**10)) == 48_000 + 24_000
    timeline.held = True
    assert timeline.playback(Nanos(10**10)) == 48_000


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**10))
def test_the_budget_stays_within_its_bounds(chunk: int, buffer: int, age: int) -> None:
    timeline = published(10**7)
    timeline.report(reported(0, 0, 10**9, age=age), Nanos(10**9))
    timeline.buffer = Ticks(buffer)

    assert BUDGET_MIN <= timeline.budget(Ticks(chunk)) <= BUDGET_MAX


def test_a_chunk_beyond_the_budget_fits_exactly_when_it_is_said_to() -> None:
    timeline = published(96_000)
    timeline.report(reported(0, 0, 10**9), Nanos(10**9))
    end, budget, now = Ticks(96_000 - 100), Ticks(90_000), Nanos(10**9)
    at = timeline.reenters_budget_at(end, budget, now)

    assert at is not None
    assert end - timeline.playback(at) <= budget < end - timeline.playback(Nanos(at - 1_000_000))


# Utterance ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "stable"),
    [
        ("what is the", "what is the capital", "what is the"),
        ("what is the cat", "what is the capital of", "what is the"),
        ("what", "what", ""),
        ("", "what is", ""),
        ("a b c", "a b c", "a b"),
    ],
)
def test_a_word_is_stable_when_two_partials_agree_and_it_is_not_the_last(before: str, after: str, stable: str) -> None:
    assert stable == agreed(before, after)


def test_a_window_that_failed_makes_no_word_stable() -> None:
    utterance = Utterance(onset=Ticks(0), start=Ticks(0), listen_max=ticks_from_ms(8000))
    for index in range(2):
        span = Span(ticks_from_ms(400 * index), ticks_from_ms(400 * (index + 1)))
        utterance.take(span, voiced=True, echo=False, voice=0.9, captured_at=Nanos(1))
        window = utterance.wanted(span.end, final=False)
        assert window is not None
        utterance.listen(window)
        utterance.hear("what is the") if index == 0 else utterance.miss()

    assert (utterance.text, utterance.stable_text) == ("what is the", "")
    assert utterance.heard_until == ticks_from_ms(800)


def read(*texts: str, over_reply: bool = False) -> Utterance:
    """An utterance whose growing window was read as each of these; 400 ms of voice between two readings."""
    utterance = Utterance(onset=Ticks(0), start=Ticks(0), listen_max=ticks_from_ms(8000))
    for index, text in enumerate(texts):
        span = Span(ticks_from_ms(400 * index), ticks_from_ms(400 * (index + 1)))
        utterance.take(span, voiced=True, echo=False, voice=0.9, captured_at=Nanos(1))
        window = utterance.wanted(span.end, final=False)
        assert window is not None
        utterance.listen(window)
        utterance.hear(text, -0.2, over_reply=over_reply)
    return utterance


def test_words_that_came_twice_are_not_taken_back_by_a_reading_without_any() -> None:
    """The ears doubt their last reading of a question: without this nobody answers it (talk bench, question 19)."""
    utterance = read("is the sun", "is the sun hotter than", "")

    assert (utterance.text, utterance.stable_text) == ("is the sun hotter than", "is the sun")
    assert utterance.complete


def test_over_a_reply_a_reading_without_words_takes_all_back() -> None:
    """There words may be the character's own, come back from a loudspeaker: an interruption must not rest on them."""
    utterance = read("is the sun", "is the sun hotter than", "", over_reply=True)

    assert (utterance.text, utterance.stable_text) == ("", "")


def test_words_that_came_once_are_noise_when_a_longer_reading_finds_none() -> None:
    assert read("is the sun", "").text == ""


def test_the_last_words_of_a_turn_are_tried_twice() -> None:
    """One fault of the ears costs no words; a lasting one ends the turn with those that are known."""
    utterance = Utterance(onset=Ticks(0), start=Ticks(0), listen_max=ticks_from_ms(8000))
    utterance.take(Span(Ticks(0), ticks_from_ms(400)), voiced=True, echo=False, voice=0.9, captured_at=Nanos(1))
    utterance.take(
        Span(ticks_from_ms(400), ticks_from_ms(800)), voiced=False, echo=False, voice=0.0, captured_at=Nanos(1)
    )
    for complete in (False, True):
        window = utterance.wanted(ticks_from_ms(800), final=True)
        assert window is not None
        assert window.kind is ListenKind.FINAL
        utterance.listen(window)
        utterance.miss()
        assert utterance.complete is complete

    assert utterance.wanted(ticks_from_ms(800), final=True) is None


def test_a_turn_that_never_ends_keeps_its_newest_words() -> None:
    """The text of one turn is bounded, or its messages would outgrow the channel after an hour."""
    text = " ".join(f"word{i}" for i in range(3000))
    kept = newest(text, 8000)

    assert newest("short", 8000) == "short"
    assert 5000 < len(kept) <= 6000
    assert kept.startswith("word")
    assert text.endswith(" " + kept)


def test_a_minute_of_speech_costs_no_more_than_eight_seconds() -> None:
    """Windows stay within the bound however long somebody speaks, and no word is lost or doubled."""
    listen_max = ticks_from_ms(8000)
    utterance = Utterance(onset=Ticks(0), start=Ticks(0), listen_max=listen_max)
    block = ticks_from_ms(32)
    said = 0
    for index in range(60_000 // 32):
        span = Span(Ticks(index * block), Ticks((index + 1) * block))
        pause = index % 100 >= 92  # 256 ms of silence every 3.2 s
        utterance.take(span, voiced=not pause, echo=False, voice=0.0 if pause else 0.9, captured_at=Nanos(1))
        window = utterance.wanted(span.end, final=False)
        if window is None:
            continue
        assert window.span.length <= listen_max
        utterance.listen(window)
        words = window.span.length // ticks_from_ms(500)
        utterance.hear(" ".join(f"w{said + i}" for i in range(words)))
        if window.kind is ListenKind.FREEZE:
            said += words

    assert utterance.frozen.split() == [f"w{i}" for i in range(said)]
    assert utterance.input_end - utterance.window_start <= FREEZE_AT + 2 * ticks_from_ms(320)


def test_speech_without_a_pause_is_cut_at_its_quietest_moment() -> None:
    utterance = Utterance(onset=Ticks(0), start=Ticks(0), listen_max=ticks_from_ms(8000))
    block = ticks_from_ms(32)
    window = None
    for index in range(300):
        span = Span(Ticks(index * block), Ticks((index + 1) * block))
        utterance.take(span, voiced=True, echo=False, voice=0.6 if index == 200 else 0.9, captured_at=Nanos(1))
        window = utterance.wanted(span.end, final=False)
        if window is not None and window.kind is ListenKind.FREEZE:
            break
        if window is not None:
            utterance.listen(window)
            utterance.hear("words")

    assert window is not None
    assert window.kind is ListenKind.FREEZE
    assert window.span.end in Span(Ticks(200 * block), Ticks(201 * block))


# Barge-in -----------------------------------------------------------------------------------------------------------


def view(**changes: object) -> VoiceView:
    base: dict[str, object] = {
        "source": "page",
        "elapsed": ticks_from_ms(400),
        "voiced": ticks_from_ms(350),
        "echo": Ticks(0),
        "quiet": Ticks(0),
        "text": "",
        "stable": "",
        "certainty": -0.1,
        "transcribed": False,
        "reply_heard": True,
        "audible": True,
        "cancelled": True,
        "learning": False,
        "reply_tail": "the capital of france is paris",
    }
    return VoiceView(**(base | changes))  # type: ignore[arg-type]


OVER: dict[str, object] = {"quiet": ticks_from_ms(320), "transcribed": True}  #: the voice has ended and was read
LONG = {"voiced": ticks_from_ms(700), "elapsed": ticks_from_ms(800)}


@pytest.mark.parametrize(
    ("changes", "decision"),
    [
        pytest.param({"source": "stop", "voiced": Ticks(0)}, Decision.ADVANCE, id="stop button"),
        pytest.param({"text": "Stop."}, Decision.ADVANCE, id="a command"),
        pytest.param({"text": "The."}, Decision.WAIT, id="an early partial invents words"),
        pytest.param(
            {"text": "What about", "stable": "What", **LONG}, Decision.ADVANCE, id="words two partials agree on"
        ),
        pytest.param({"text": "What about", **LONG}, Decision.WAIT, id="words no partial agrees on"),
        pytest.param({"text": "Why?", **OVER}, Decision.ADVANCE, id="a short question"),
        pytest.param({"text": "The hammer.", **OVER}, Decision.RESUME, id="a misheard mm-hm"),
        pytest.param({"text": "Mamma.", **LONG, **OVER, "certainty": -0.78}, Decision.RESUME, id="a longer mm-hm"),
        pytest.param({"text": "I do not", "stable": "I do", **LONG, "certainty": -0.6}, Decision.WAIT, id="unsure"),
        pytest.param(
            {"text": "Is it the hand?", **LONG, **OVER, "cancelled": False}, Decision.RESUME, id="garbled echo"
        ),
        pytest.param({"text": "I meant London.", **LONG, **OVER}, Decision.ADVANCE, id="words, and it is over"),
        pytest.param(
            {"text": "Well, Emma,", **LONG, **OVER, "learning": True}, Decision.RESUME, id="mm-hm with the first sound"
        ),
        pytest.param(
            {"text": "Stop it.", **LONG, **OVER, "learning": True},
            Decision.ADVANCE,
            id="a command with the first sound",
        ),
        pytest.param({"text": "42 43", **LONG, **OVER}, Decision.ADVANCE, id="numbers"),
        pytest.param({"text": "Paris?", **LONG, **OVER}, Decision.ADVANCE, id="asks back with a word of the reply"),
        pytest.param({"text": "Mm-hmm.", **OVER}, Decision.RESUME, id="mm-hm"),
        pytest.param({"text": "Uh-huh, yeah.", **OVER}, Decision.RESUME, id="uh-huh"),
        pytest.param({}, Decision.WAIT, id="no words yet"),
        pytest.param({"voiced": Ticks(0), "quiet": OVER["quiet"]}, Decision.WAIT, id="the page heard it first"),
        pytest.param({"voiced": Ticks(0), **OVER, "elapsed": ticks_from_ms(700)}, Decision.RESUME, id="only the page"),
        pytest.param({"voiced": ticks_from_ms(90), "quiet": OVER["quiet"]}, Decision.RESUME, id="cough"),
        pytest.param({"elapsed": ticks_from_ms(1700)}, Decision.RESUME, id="music: voice without words"),
        pytest.param({"echo": ticks_from_ms(500), **OVER}, Decision.RESUME, id="own voice"),
        pytest.param({"echo": ticks_from_ms(500)}, Decision.WAIT, id="own voice, perhaps with a person"),
        pytest.param({"text": "of France is Paris", **OVER}, Decision.RESUME, id="own words"),
        pytest.param(
            {"text": "is Paris Right", "echo": ticks_from_ms(64), **OVER}, Decision.RESUME, id="own words and yes"
        ),
        pytest.param({"reply_heard": False}, Decision.ADVANCE, id="goes on before a word was heard"),
        pytest.param(
            {"reply_heard": False, "cancelled": False}, Decision.WAIT, id="or it is an echo of the first word"
        ),
        pytest.param(
            {"audible": False, "cancelled": False}, Decision.ADVANCE, id="goes on before the reply could be heard"
        ),
    ],
)
def test_what_is_an_interruption(changes: dict[str, object], decision: Decision) -> None:
    assert decision is BargeInRule(BargeInTunables()).decide(view(**changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"text": "I like that."}, True, id="a remark"),
        pytest.param({"text": ""}, False, id="no words"),
        pytest.param({"text": "Mm-hmm, yeah."}, False, id="an acknowledgement"),
        pytest.param({"text": "The hammer.", "certainty": -0.6}, False, id="what the ears make of mm-hm"),
        pytest.param({"text": "of France is Paris"}, False, id="the character's own words"),
        pytest.param({"text": "I like that.", "echo": ticks_from_ms(500)}, False, id="mostly the character's sound"),
        pytest.param({"text": "I like Paris.", "echo": ticks_from_ms(64)}, True, id="a remark through an echo"),
    ],
)
def test_which_words_of_a_false_alarm_were_said(changes: dict[str, object], said: bool) -> None:
    assert said is BargeInRule(BargeInTunables()).is_said(view(**changes))


def test_acknowledgements_carry_no_content() -> None:
    assert content_words("Mm-hmm. Uh-huh, okay, yeah!") == []
    for phrase in ("Yeah, I see.", "Got it!", "That's right.", "All right, okay.", "You're right!", "Thank you."):
        assert content_words(phrase) == [], phrase
    assert content_words("I see a dog") == ["i", "see", "a", "dog"]
    assert content_words("Oh no.") == ["no"]
    assert not echoes([], "anything")


# Dialogue -----------------------------------------------------------------------------------------------------------


def test_an_unheard_reply_leaves_the_turn_open() -> None:
    dialogue = Dialogue(ClockDialect())
    dialogue.say("say 3")
    before = dialogue.tokens()
    dialogue.close_user()
    dialogue.think([1000, 1002])
    dialogue.finish_reply(kept=0, text="")

    assert before == dialogue.tokens()


def test_a_turn_that_is_too_long_loses_its_first_words_and_never_the_last() -> None:
    dialogue = Dialogue(ClockDialect())
    dialogue.say("a b c d e")

    assert dialogue.forget_words(2)
    assert dialogue.user == "c d e"
    assert not dialogue.forget_words(3)
    assert dialogue.user == "c d e"


def test_a_cut_reply_keeps_its_heard_tokens() -> None:
    dialogue = Dialogue(ClockDialect())
    dialogue.say("say 3")
    dialogue.close_user()
    dialogue.think([1000, 1002, 1005])
    other = dialogue.interrupted(kept=2, text="0-0 0-1")

    assert other.tokens() == [0, 1, 5, 103, 2, 1000, 1002, 3]
    assert dialogue.tokens() == [0, 1, 5, 103, 2, 1000, 1002, 1005]


def test_what_is_closed_is_one_value_until_it_changes() -> None:
    """Words of the open turn and of the reply leave it alone, so that a context need not read it again."""
    dialogue = Dialogue(ClockDialect(), instructions="be brief")
    seen = [dialogue.closed]

    def closed_anew() -> bool:
        seen.append(dialogue.closed)
        assert dialogue.tokens() == [*dialogue.closed, *dialogue.open_tokens()]
        assert dialogue.length == len(dialogue.tokens())
        return seen[-1] is not seen[-2]

    dialogue.say("say 3")
    assert not closed_anew()
    dialogue.close_user()
    dialogue.think([1000, 1002, 1005])
    assert not closed_anew()
    assert dialogue.past().closed is dialogue.closed
    assert dialogue.supposing("say 4").closed is dialogue.closed
    dialogue.finish_reply(kept=2, text="0-0 0-1", response=1)
    assert closed_anew()
    assert dialogue.closed[-2:] == (1002, 3)
    dialogue.instruct("be long")
    assert closed_anew()
    dialogue.correct(1, "say 3", tokens=[1000], text="0-0")
    assert closed_anew()
    assert dialogue.closed[-2:] == (1000, 3)
    dialogue.long_term = 4
    assert closed_anew()
    dialogue.slide()
    assert closed_anew()
    assert len(dialogue.closed) == dialogue.head_with("be long")


def test_a_past_keeps_nothing_open() -> None:
    """And what is said to it is not said to the other."""
    dialogue = Dialogue(ClockDialect(), instructions="be brief", in_view=True)
    dialogue.say("say 3")
    dialogue.close_user()
    dialogue.think([1000])
    dialogue.overhear("indeed")
    past = dialogue.past()
    past.say("one")
    past.close_user()
    past.think([1002])
    past.finish_reply(kept=1, text="0-1")

    assert [exchange.user for exchange in past.exchanges if exchange.is_turn] == ["one"]
    assert (past.instructions, past.in_view) == ("be brief", True)
    assert (dialogue.user, dialogue.replying, dialogue.reply, dialogue.exchanges) == ("say 3", True, [1000], ())


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_the_common_prefix_is_the_longest(left: list[int], right: list[int]) -> None:
    length = common_prefix(left, right)

    assert left[:length] == right[:length]
    assert length == min(len(left), len(right)) or left[length] != right[length]
