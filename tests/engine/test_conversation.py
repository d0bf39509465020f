"""Whole conversations in virtual time, on the core that serves people, compared with what the person really heard."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from random import Random

import msgspec
import numpy as np
import pytest

from duplexd.engine.simulator import SimListener, SimNetwork
from duplexd.engine.work import Launch
from duplexd.ids import SessionId
from duplexd.messages import (
    AdmitSession,
    AdvanceEpoch,
    ClientStalled,
    HistoryChanged,
    ImageArrived,
    InputRefusal,
    LatencyMeasured,
    PublishChunk,
    RefuseSession,
    ReplyWords,
    ResponseChanged,
    ResponseState,
    ResumePlayback,
    Shortage,
    StateChanged,
    TurnState,
    UserWords,
)
from duplexd.models.clock.language import END, ClockDialect, ClockStream
from duplexd.streams.stage import CostModel, ListenJob, ListenResult, ThinkJob, ThinkResult
from duplexd.units import Nanos, ms_from_ticks
from tests.engine.simulation import RATE, Simulation, beep, heard_words, history_words, ms


def test_a_typed_turn_is_answered_and_remembered_whole() -> None:
    """Every word of the reply is spoken, heard and in the history, byte for byte (field case T-BI-04)."""
    simulation = Simulation(until_ms=8000)
    listener = simulation.connect()
    listener.type("say 9", at=ms(300), key="a")
    simulation.run()

    assert heard_words(listener) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert listener.line.playout.underruns == 0
    assert simulation.history()[1].text == "0-0 0-1 0-2 0-3, 0-4 0-5 0-6 0-7, 0-8."
    assert simulation.final_states() == {1: [ResponseState.COMPLETED]}


def test_a_spoken_turn_is_answered() -> None:
    """Sound, then silence: the turn ends by silence alone, because the word clock has no judge."""
    simulation = Simulation(until_ms=9000)
    listener = simulation.connect()
    listener.say(beep(600), at=ms(500))
    simulation.run()

    assert list(range(12)) == heard_words(listener)
    assert [n.text for n in simulation.news(UserWords) if n.final] == ["sound"]


@pytest.mark.parametrize("seed", range(20))
def test_history_is_what_was_heard_at_random_interruptions(seed: int) -> None:
    """Twenty interruptions at random: remembered == heard, but for words inside the cursor's error (T-BI-01)."""
    rng = Random(seed)
    simulation = Simulation(seed=seed, until_ms=12_000)
    listener = simulation.connect(network=SimNetwork(delay=ms(rng.uniform(1, 60)), buffer=ms(rng.uniform(40, 200))))
    listener.type("say 12", at=ms(300), key="a")
    listener.say(beep(700), at=ms(rng.uniform(900, 4000)))
    simulation.run()

    first = simulation.history()[1]
    surely = {word for word in heard_words(listener, missing_ms=8) if word < 32}
    perhaps = {word for word in heard_words(listener) if word < 32}
    remembered = [word for word in history_words(simulation) if word < 32]

    assert remembered == list(range(first.words))
    assert set(remembered) <= perhaps
    assert surely - set(remembered) <= set(first.ambiguous)


def test_nothing_of_an_old_epoch_is_published_after_it_ended() -> None:
    """Ten stops at random moments: no chunk carries an epoch older than the newest announced one (DESIGN §5 rule 2)."""
    simulation = Simulation(until_ms=30_000)
    listener = simulation.connect()
    rng = Random(7)
    for turn in range(10):
        listener.type("say 20", at=ms(500 + 2500 * turn), key=f"t{turn}")
        listener.stop(at=ms(500 + 2500 * turn + rng.uniform(5, 2000)))
    simulation.run()

    epoch = 0
    for _, news in simulation.world.news:
        if isinstance(news, AdvanceEpoch):
            assert news.epoch == epoch + 1
            epoch = news.epoch
        elif isinstance(news, PublishChunk):
            assert news.epoch == epoch
    assert epoch == 10


def test_a_stop_before_the_first_sound_leaves_no_reply() -> None:
    """The person stops before anything was heard: the reply never existed (T-BI-14), and the turn stays open."""
    simulation = Simulation(until_ms=3000)
    listener = simulation.connect()
    listener.type("say 9", at=ms(300), key="a")
    listener.stop(at=ms(310))
    simulation.run()

    dialogue = simulation.core.sessions[SessionId(1)].dialogue
    assert heard_words(listener) == []
    assert dialogue.exchanges == ()
    assert dialogue.user == "say 9"


def test_a_turn_that_ended_too_early_is_merged_with_what_follows() -> None:
    """The person pauses, the turn ends, the person goes on before a word was heard: one turn, not two (T-VAD-10)."""
    simulation = Simulation(until_ms=9000)
    listener = simulation.connect(network=SimNetwork(delay=ms(5), buffer=ms(150)))
    listener.say(beep(500), at=ms(500))
    listener.say(beep(500), at=ms(500 + 500 + 750))  # The turn ends 700 ms after the first part.
    simulation.run()

    exchanges = simulation.core.sessions[SessionId(1)].dialogue.exchanges
    assert [e.user for e in exchanges] == ["sound sound"]
    assert simulation.final_states() == {1: [ResponseState.CANCELLED], 2: [ResponseState.COMPLETED]}


def test_a_click_over_the_reply_resumes_where_it_was() -> None:
    """A short sound freezes playout; when it turns out to be nothing, the reply goes on and every word is heard."""
    simulation = Simulation(until_ms=9000)
    listener = simulation.connect()
    listener.type("say 9", at=ms(300), key="a")
    listener.say(beep(130), at=ms(1500))
    simulation.run()

    assert simulation.news(AdvanceEpoch) == []
    assert len(simulation.news(ResumePlayback)) == 1
    assert list(range(9)) == heard_words(listener)
    assert simulation.history()[1].words == 9


def two_sounds(seed: int, *, words: int, second_ms: float) -> tuple[Simulation, SimListener]:
    """A click over the reply, and another sound while the server's detector still rests from it."""
    simulation = Simulation(seed=seed, until_ms=14_000)
    listener = simulation.connect()
    at = 1500 + 37 * seed
    listener.type(f"say {words}", at=ms(300), key="a")
    listener.say(beep(130), at=ms(at))
    listener.say(beep(second_ms), at=ms(at + 720))
    simulation.run()
    return simulation, listener


@pytest.mark.parametrize("seed", range(5))
def test_a_second_sound_after_a_false_alarm_neither_pauses_nor_starves_the_reply(seed: int) -> None:
    """While the server's detector rests a sound freezes nothing: the reply is made on, without a gap, and is whole."""
    simulation, listener = two_sounds(seed, words=15, second_ms=140)

    assert simulation.core.monitor.values()["false_alarms"] == 2
    assert len(simulation.news(ResumePlayback)) == 1  # Nothing was held the second time.
    assert listener.line.playout.underruns == 0
    assert list(range(15)) == heard_words(listener)


@pytest.mark.parametrize("seed", range(5))
def test_an_interruption_during_the_rest_is_remembered_as_it_was_heard(seed: int) -> None:
    """A false alarm, and at once a person who means it: frozen when the rest is over, cut where the ear stood."""
    simulation, listener = two_sounds(seed, words=20, second_ms=900)

    remembered = [word for word in history_words(simulation) if word < 32]
    heard = [word for word in heard_words(listener) if word < 32]
    assert len(simulation.news(AdvanceEpoch)) == 1
    assert remembered == list(range(len(remembered)))
    assert set(heard) - set(remembered) <= set(simulation.history()[1].ambiguous)
    assert set(remembered) <= set(heard)


def test_an_interruption_says_when_its_voice_was_noticed_and_typed_words_are_no_voice() -> None:
    simulation = Simulation(until_ms=9000)
    listener = simulation.connect()
    listener.type("say 9", at=ms(300), key="a")
    listener.say(beep(900), at=ms(1500))
    listener.type("say 2", at=ms(5500), key="b")
    simulation.run()
    spoken, typed = simulation.news(AdvanceEpoch)

    assert ms(1500) < spoken.noticed_at < spoken.decided_at < spoken.noticed_at + ms(1500)
    assert typed.noticed_at == 0


def test_a_voice_that_could_hold_nothing_at_first_was_noticed_when_it_began() -> None:
    """It begins at 2220 ms; playout is frozen only when the detector has rested, 250 ms after it was noticed."""
    simulation, _ = two_sounds(0, words=20, second_ms=900)
    (advance,) = simulation.news(AdvanceEpoch)

    assert ms(2220) < advance.noticed_at < ms(2400)


def test_barge_in_can_be_switched_off() -> None:
    """Without barge-in the reply plays to its end, and what the person said is answered afterwards, once (T-BI-29)."""
    simulation = Simulation(until_ms=16_000)
    listener = simulation.connect(barge_in=False)
    listener.type("say 6", at=ms(300), key="a")
    listener.say(beep(600), at=ms(1000))
    simulation.run()

    assert simulation.news(AdvanceEpoch) == []
    assert simulation.final_states() == {1: [ResponseState.COMPLETED], 2: [ResponseState.COMPLETED]}
    assert [e.user for e in simulation.core.sessions[SessionId(1)].dialogue.exchanges] == ["say 6", "sound"]


def test_turns_that_wait_for_a_reply_are_bounded_and_the_refused_are_told() -> None:
    """Without barge-in a fifth waiting turn is refused with its own key; the four before it are all answered."""
    simulation = Simulation(until_ms=40_000)
    listener = simulation.connect(barge_in=False)
    listener.type("say 6", at=ms(300), key="a")
    for turn in range(5):
        listener.type(f"say {turn + 1}", at=ms(900 + 10 * turn), key=f"w{turn}")
    simulation.run()

    (refusal,) = simulation.news(InputRefusal)
    assert (refusal.code, refusal.key) == ("turns_full", "w4")
    said = [e.user for e in simulation.core.sessions[SessionId(1)].dialogue.exchanges]
    assert said == ["say 6", "say 1", "say 2", "say 3", "say 4"]


def test_a_message_too_long_for_the_model_is_refused_and_nothing_else_happens() -> None:
    simulation = Simulation(until_ms=8000)
    listener = simulation.connect()
    listener.type("word " * simulation.plan.context_tokens_max, at=ms(300), key="long")
    listener.type("say 3", at=ms(600), key="short")
    simulation.run()

    (refusal,) = simulation.news(InputRefusal)
    assert (refusal.code, refusal.key) == ("text_too_long", "long")
    assert simulation.final_states() == {1: [ResponseState.COMPLETED]}


def test_generation_stays_inside_the_lookahead_budget() -> None:
    """generation - playback <= budget whenever a chunk is started, its own length included (DESIGN §5 rule 1)."""
    ahead: list[tuple[int, int]] = []

    def look(launch: Launch) -> str:
        session = simulation.core.sessions.get(SessionId(1))
        if launch.stage == "render" and session is not None:
            timeline, length = session.timeline, launch.jobs[0].length
            lead = timeline.generation - timeline.playback(simulation.world.now())
            ahead.append((lead, timeline.budget(length, session._making_time)))
        return ""

    simulation = Simulation(until_ms=10_000, fails=look)
    listener = simulation.connect()
    listener.type("say 20", at=ms(300), key="a")
    simulation.run()

    assert len(ahead) > 10
    assert [(lead, budget) for lead, budget in ahead if lead > budget] == []
    assert all(300 <= ms_from_ticks(budget) <= 1500 for _, budget in ahead)
    assert max(ms_from_ticks(lead) for lead, _ in ahead) > 100


def test_a_page_that_reports_nothing_is_paced_by_a_conservative_clock() -> None:
    """No reports: playback is assumed, the history says so, and the reply still ends (T-BI-25)."""
    simulation = Simulation(until_ms=12_000)
    listener = simulation.connect()
    listener.reports = False
    listener.type("say 9", at=ms(300), key="a")
    simulation.run()

    assert list(range(9)) == heard_words(listener)
    assert listener.line.playout.underruns == 0
    assert simulation.history()[1].estimated
    assert simulation.final_states() == {1: [ResponseState.COMPLETED]}


def test_a_listener_who_hears_nothing_throttles_the_thinker() -> None:
    """Blocked sound: the cursor stands, and generation stops within its budget instead of running to the end."""
    simulation = Simulation(until_ms=12_000)
    listener = simulation.connect()
    listener.line.silent = True
    listener.reports = False
    listener.type("say 20", at=ms(300), key="a")
    simulation.run()

    published = sum(ms_from_ticks(n.span.length) for n in simulation.news(PublishChunk))
    assert 0 < published <= 1500
    assert len(simulation.words()[1]) < 20


def test_reports_from_the_past_the_future_and_other_epochs_change_nothing() -> None:
    """Late, decreasing, foreign and impossible reports are counted, never raised (DESIGN §5 rule 13)."""
    simulation = Simulation(until_ms=8000)
    listener = simulation.connect(network=SimNetwork(report_loss=0.3))
    listener.type("say 9", at=ms(300), key="a")
    for index, (epoch, position) in enumerate([(0, 10), (7, 48_000), (0, 10**9), (0, 0)]):
        simulation.world.at(ms(1500 + 10 * index), lambda e=epoch, p=position: report(simulation, e, p))
    simulation.run()

    assert list(range(9)) == heard_words(listener)
    assert simulation.history()[1].words == 9
    assert simulation.core.sessions[SessionId(1)].timeline.reports_ignored >= 3


def report(simulation: Simulation, epoch: int, position: int) -> object:
    from duplexd.ids import Epoch
    from duplexd.messages import Cursor, CursorReported
    from duplexd.units import Ticks

    cursor = Cursor(Epoch(epoch), Ticks(position), Nanos(simulation.world.now() - 1))
    return CursorReported(SessionId(1), cursor, Ticks(0), Nanos(0), Ticks(0), False)


def test_a_failing_stage_ends_its_reply_and_nothing_else() -> None:
    """The third chunk of session 1 fails: its reply ends as failed, it answers again, session 2 hears every word."""
    renders = {"count": 0}

    def fails(launch: Launch) -> str:
        if launch.stage == "render" and launch.jobs[0].session == 1:
            renders["count"] += 1
            return "made to fail" if renders["count"] == 3 else ""
        return ""

    simulation = Simulation(until_ms=12_000, fails=fails)
    first, second = simulation.connect(1), simulation.connect(2)
    for listener in (first, second):
        listener.type("say 9", at=ms(300), key="a")
    first.type("say 4", at=ms(5000), key="b")
    simulation.run()

    assert simulation.final_states()[1] == [ResponseState.FAILED]
    assert simulation.final_states()[2] == [ResponseState.COMPLETED]
    assert list(range(9)) == heard_words(second)


@pytest.mark.parametrize(
    ("stage", "text"), [("render", ResponseState.COMPLETED), ("talk", ResponseState.FAILED)], ids=["voice", "words"]
)
def test_a_voice_that_fails_behind_its_words_is_a_partial_result(stage: str, text: ResponseState) -> None:
    """The only clause is told before its sound fails; of two clauses, both thought, the second is never told."""

    def fails(launch: Launch) -> str:
        spared = launch.stage == "talk" and launch.jobs[0].first
        return "made to fail" if launch.stage == stage and not spared else ""

    simulation = Simulation(until_ms=9000, fails=fails)
    listener = simulation.connect()
    listener.type("say 4" if stage == "render" else "say 8", at=ms(300), key="a")
    simulation.run()

    last = simulation.news(ResponseChanged)[-1]
    assert last.state is ResponseState.FAILED
    assert {one.output: one.state for one in last.outputs} == {"text": text, "voice": ResponseState.FAILED}


def test_a_reply_without_a_word_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thinker ends before it has said anything; its second attempt gets a token to decode from and is heard."""
    simulation = Simulation(until_ms=6000)
    thinker = simulation.world.stages["think"]
    think = thinker.run
    fed: list[ThinkJob] = []

    def silent_at_first(jobs: Sequence[ThinkJob], media: object) -> list[object]:
        fed.extend(job for job in jobs if job.steps)
        results = think(jobs, media)
        return [ThinkResult(jobs[0].session, (END,))] if len(fed) == 1 else results

    monkeypatch.setattr(thinker, "run", silent_at_first)
    listener = simulation.connect()
    listener.type("say 4", at=ms(300), key="a")
    simulation.run()

    assert all(job.feed for job in fed)
    assert simulation.final_states() == {1: [ResponseState.COMPLETED]}
    assert heard_words(listener) == [0, 1, 2, 3]
    assert history_words(simulation) == [0, 1, 2, 3]


def test_an_image_is_refused_with_the_reason() -> None:
    simulation = Simulation(until_ms=1000)
    simulation.connect()
    simulation.world.at(ms(300), lambda: ImageArrived(SessionId(1), "img", 1000))
    simulation.run()

    (refusal,) = simulation.news(InputRefusal)
    assert refusal.code == "modality_unsupported"
    assert "does not read images" in refusal.reason


def test_admission_refuses_the_session_that_does_not_fit_and_says_why() -> None:
    simulation = Simulation(until_ms=1000, sessions_max=2)
    for session in (1, 2, 3):
        simulation.connect(session, at_ms=50 + session)
    simulation.run()

    assert 1 == len(simulation.news(AdmitSession, 1)) == len(simulation.news(AdmitSession, 2))
    (refusal,) = simulation.news(RefuseSession, 3)
    assert "2 of 2 sessions are open" in refusal.reason
    assert refusal.code == "busy"
    assert refusal.shortage == Shortage("sessions", 3, 2, "sessions")


def test_closing_in_the_middle_gives_everything_back() -> None:
    """Sessions leave while every stage may be at work: slots, pages and output slots return to the baseline."""
    simulation = Simulation(until_ms=20_000, sessions_max=4)
    before = simulation.core.metrics().values
    for session in range(1, 9):
        listener = simulation.connect(session, at_ms=2000 * session)
        listener.type("say 20", at=ms(2000 * session + 100), key="a")
        listener.say(beep(400), at=ms(2000 * session + 700))
        simulation.world.at(ms(2000 * session + 40 + 210 * session), listener.leave)
    simulation.run()

    after = simulation.core.metrics().values
    held = ("out_slots_free", "pages_retiring", "latents_held", "ingest_held", "sessions", "closing_sessions")
    assert {k: after[k] for k in held} == {k: before[k] if k != "out_slots_free" else 32.0 for k in held}
    assert after["pages_free"] == simulation.core.stores.pages.spec.count - 1  # the anchor's page


def test_sequence_numbers_are_contiguous_and_every_response_ends_once() -> None:
    """DESIGN §5 rule 12, over a conversation with interruptions."""
    simulation = Simulation(until_ms=45_000)
    listener = simulation.connect()
    for turn in range(6):
        listener.type("say 6", at=ms(400 + 3500 * turn), key=f"t{turn}")
        if turn % 2:
            listener.say(beep(600), at=ms(400 + 3500 * turn + 900))
    simulation.run()

    sequences = [n.sequence for _, n in simulation.world.news if getattr(n, "sequence", 0)]
    assert list(range(1, len(sequences) + 1)) == sequences
    for response, ends in simulation.final_states().items():
        assert len(ends) == 1, response


def test_a_repeated_message_is_said_once() -> None:
    simulation = Simulation(until_ms=9000)
    listener = simulation.connect()
    listener.type("say 4", at=ms(300), key="same")
    listener.type("say 4", at=ms(4000), key="same")
    simulation.run()

    assert heard_words(listener) == [0, 1, 2, 3]


def test_a_long_session_stays_bounded() -> None:
    """Sixty turns: the context slides, positions and pages do not grow (DESIGN §5 rule 6)."""
    simulation = Simulation(until_ms=200_000)
    listener = simulation.connect()
    for turn in range(60):
        listener.type("say 6 " + "word " * 14, at=ms(300 + 3200 * turn), key=f"t{turn}")
    simulation.run()

    session = simulation.core.sessions[SessionId(1)]
    assert len(session.context.ids) <= simulation.plan.context_tokens_max
    assert simulation.core.monitor["exchanges_slid"] > 0
    assert simulation.core.monitor["responses_completed"] == 60


def test_four_people_at_once_hear_only_their_own_words() -> None:
    """Overlapping turns of four sessions, some interrupted (T-ISO-01): each hears its own reply, in order."""
    simulation = Simulation(until_ms=15_000)
    listeners = [simulation.connect(session) for session in (1, 2, 3, 4)]
    for index, listener in enumerate(listeners):
        listener.type(f"say {6 + index}", at=ms(300 + 90 * index), key="a")
    listeners[2].say(beep(700), at=ms(1500))
    simulation.run()

    for index in (0, 1, 3):
        assert list(range(6 + index)) == heard_words(listeners[index])
    heard = simulation.history(3)[1]
    assert [w for w in heard_words(listeners[2]) if w < 32][: heard.words] == list(range(heard.words))


def digest(seed: int) -> str:
    simulation = Simulation(seed=seed, until_ms=9000)
    listener = simulation.connect(network=SimNetwork(report_loss=0.2))
    listener.type("say 12", at=ms(300), key="a")
    listener.say(beep(700), at=ms(1700))
    simulation.run()
    return hashlib.sha256(repr(simulation.world.news).encode()).hexdigest()


@pytest.mark.parametrize("hash_seed", ["0", "1", "4711"])
def test_same_seed_same_trace_on_any_hash_seed(hash_seed: str) -> None:
    code = "from tests.engine.test_conversation import digest; print(digest(5))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": hash_seed, "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert digest(5) == run.stdout.strip()


@pytest.mark.parametrize(("delay_ms", "buffer_ms"), [(1, 40), (5, 60), (40, 150)])
def test_latency_parts_sum_to_what_the_person_waited(delay_ms: float, buffer_ms: float) -> None:
    """From the last sample spoken to the first one heard, both taken from the listener's own microphone and ear."""
    simulation = Simulation(until_ms=6000)
    listener = simulation.connect(at_ms=50, network=SimNetwork(delay=ms(delay_ms), buffer=ms(buffer_ms)))
    listener.say(beep(400), at=ms(400))
    simulation.run()

    # The next packet after 400 leaves at 410 and holds the 20 ms before: the last of twenty ends at 790.
    spoken_ms = 790.0
    first = int(np.flatnonzero(listener.sound())[0])
    heard_ms = 50 + 1000 * first / RATE + delay_ms + buffer_ms
    (latency,) = listener.latencies
    names = "capture uplink end_of_turn prefill first_word first_audio pacing network jitter_buffer output"
    assert [name for name, _ in latency.parts] == names.split()
    assert sum(part for _, part in latency.parts) == pytest.approx(heard_ms - spoken_ms, abs=12)


def test_a_hold_nobody_answers_does_not_spin() -> None:
    """The page never says where the ear stands: the cut waits 150 ms, once, and the loop does not run hot meanwhile."""
    simulation = Simulation(until_ms=6000)
    listener = simulation.connect()
    listener.line.on_hold_answer = lambda *a, **k: None  # type: ignore[method-assign]
    listener.type("say 9", at=ms(300), key="a")
    listener.say(beep(900), at=ms(1500))
    steps = 0
    timed = simulation.core.handle_timer

    def counted(now: Nanos) -> None:
        nonlocal steps
        steps += 1
        timed(now)

    simulation.core.handle_timer = counted  # type: ignore[method-assign]
    simulation.run()

    assert steps < 500
    assert len(simulation.news(AdvanceEpoch)) == 1
    assert simulation.history()[1].estimated


def test_words_are_never_forgotten_while_they_are_heard() -> None:
    """History only grows within a response."""
    simulation = Simulation(until_ms=6000)
    listener = simulation.connect()
    listener.type("say 9", at=ms(300), key="a")
    simulation.run()

    counts = [n.words for n in simulation.news(HistoryChanged)]
    assert sorted(counts) == counts


class HurriedStream(ClockStream):
    """Words whose end is known with their own token, as with "Goodbye!": the stop token then comes alone."""

    def push(self, token: int) -> str:
        return super().push(token).strip() + " "


class HurriedDialect(ClockDialect):
    def stream(self) -> ClockStream:
        return HurriedStream()


@pytest.mark.parametrize("words", [4, 8, 16])
def test_a_clause_that_lies_with_the_talker_makes_the_reply_neither_empty_nor_over(words: int) -> None:
    """The stop token came while the only clause was being talked: the reply was taken for empty and thought again,
    beside the first one, and the engine died of the contradiction.
    """
    simulation = Simulation(until_ms=22_000)
    simulation.plan.dialect = HurriedDialect()
    simulation.plan.reply_words_enough = simulation.plan.reply_sentences_max = 99
    stage = simulation.world.stages["talk"]
    stage.spec = msgspec.structs.replace(stage.spec, cost=CostModel(fixed_us=400_000))
    listener = simulation.connect()
    listener.type(f"say {words}", at=ms(500), key="a")
    simulation.run()

    assert simulation.core.monitor["empty_replies"] == 0
    assert simulation.final_states() == {1: [ResponseState.COMPLETED]}
    assert len(heard_words(listener)) == simulation.history()[1].words == words


@pytest.mark.parametrize(("voice_ms", "told"), [(900, [("", True)]), (250, [])], ids=["a sentence", "a cough"])
def test_a_turn_of_which_no_word_could_be_told_is_not_passed_over_in_silence(
    voice_ms: float, told: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever said it waits for an answer, so the page must show that there will be none."""
    simulation = Simulation(until_ms=4000)

    def deaf(jobs: Sequence[ListenJob], media: object) -> list[ListenResult]:
        return [ListenResult(job.session, "") for job in jobs]

    monkeypatch.setattr(simulation.world.stages["ears"], "run", deaf)
    listener = simulation.connect()
    listener.say(beep(voice_ms), at=ms(500))
    simulation.run()

    assert [(news.text, news.final) for news in simulation.news(UserWords)] == told
    assert simulation.final_states() == {}


def test_a_reply_without_a_word_ends_although_an_older_clause_was_still_being_talked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The talker is busy for a reply that was stopped; when it comes back, the wordless one behind it is over."""
    simulation = Simulation(until_ms=3000)
    talk = simulation.world.stages["talk"]
    talk.spec = msgspec.structs.replace(talk.spec, cost=CostModel(fixed_us=900_000))
    thinker = simulation.world.stages["think"]
    think = thinker.run
    tries: list[ThinkJob] = []

    def wordless_at_last(jobs: Sequence[ThinkJob], media: object) -> list[object]:
        results = think(jobs, media)
        if simulation.world.now() < ms(700) or not jobs[0].steps:
            return results
        tries.extend(jobs)
        return [ThinkResult(jobs[0].session, (END,))]

    monkeypatch.setattr(thinker, "run", wordless_at_last)
    listener = simulation.connect()
    listener.type("say 8", at=ms(300), key="a")
    listener.type("say 4", at=ms(700), key="b")
    simulation.run()

    assert len(tries) == 2
    assert simulation.final_states() == {1: [ResponseState.CANCELLED], 2: [ResponseState.COMPLETED]}


def test_a_person_whose_page_does_not_read_is_waited_for_and_nobody_else_is() -> None:
    """The unread messages of one page gate its own thinker, talker and voice; when it reads again the reply goes on."""
    simulation = Simulation(until_ms=24_000)
    stalled, neighbour = simulation.connect(1), simulation.connect(2)
    for listener in (stalled, neighbour):
        listener.type("say 12", at=ms(300), key="a")
    simulation.world.at(ms(1500), lambda: ClientStalled(SessionId(1), True))
    simulation.world.at(ms(12_000), lambda: ClientStalled(SessionId(1), False))
    simulation.run()

    published = [at for at in simulation.times(PublishChunk, 1) if 2500 < at < 12_000]
    assert published == []
    assert [at for at in simulation.times(ReplyWords, 1) if 2500 < at < 12_000] == []
    assert max(simulation.times(PublishChunk, 2)) < 8000
    assert neighbour.line.playout.underruns == 0
    for listener in (stalled, neighbour):
        assert heard_words(listener) == list(range(12))


def test_a_sound_that_was_nothing_leaves_a_reply_that_is_thought_thinking() -> None:
    """T-PP-04: the thinker is slow, somebody knocks on the table: nobody is told that the character speaks."""
    simulation = Simulation(until_ms=20_000)
    think = simulation.world.stages["think"]
    think.spec = msgspec.structs.replace(think.spec, cost=CostModel(fixed_us=500_000))
    listener = simulation.connect(at_ms=1000)
    listener.type("say 3", at=ms(1300), key="a")
    listener.say(beep(160), at=ms(1500))
    simulation.run()
    said = [news.state for news in simulation.news(StateChanged)]

    assert simulation.core.monitor.values()["false_alarms"] == 1
    assert said == [TurnState.THINKING, TurnState.SPEAKING, TurnState.LISTENING]
    assert simulation.times(StateChanged)[1] == simulation.times(LatencyMeasured)[0]
