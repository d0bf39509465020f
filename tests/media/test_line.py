"""One person's line, with a detector that hears loudness and a transport whose clock is the test's own."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from duplexd.ids import ChunkId, Epoch, ResponseId, SessionId, TurnId
from duplexd.media.line import (
    ASSUMED_LAG,
    BOUND,
    HOLD_MAX,
    REHOLD_AFTER,
    TEXTS_MAX,
    Block,
    EarReport,
    FlushOrder,
    HoldOrder,
    LatencyReady,
    Line,
    Muted,
    ResumeOrder,
)
from duplexd.media.playout import FRAME
from duplexd.messages import (
    AdvanceEpoch,
    Cursor,
    CursorReported,
    HoldAnswered,
    HoldExpired,
    LatencyMeasured,
    PublishChunk,
    ResumePlayback,
    TextArrived,
    VoicePlaced,
    VoiceStarted,
    VoiceStopped,
)
from duplexd.units import NANOS_PER_MS, Nanos, Span, Ticks, ms_from_nanos, ticks_from_ms, ticks_from_nanos

SESSION = SessionId(1)
BEGIN = 5_000  #: milliseconds of the machine's clock at which the transport began: pts 0
FRAME_SAMPLES = 480
NETWORK = ticks_from_ms(30)
BUFFER = ticks_from_ms(80)
LAG = NETWORK + BUFFER
Item = TypeVar("Item")


def ms(value: float) -> Nanos:
    return Nanos(round(value * NANOS_PER_MS))


class Loudness:
    """Voice is whatever is loud."""

    def probability(self, block: NDArray[np.float32]) -> float:
        return float(np.abs(block).max() > 0.1)


class Scene:
    """A line, the transport that pulls from it, and a page that hears `LAG` later. `at` is in milliseconds."""

    def __init__(self, *, barge_in: bool = True, echo_warmup_ms: float = 0) -> None:
        self.at = float(BEGIN)
        self.line = Line(
            session=SESSION,
            rate=24_000,
            detector=Loudness(),
            echo=None,
            allow_barge_in=barge_in,
            pts_at=lambda now: int(ticks_from_nanos(now - ms(BEGIN))),
            echo_warmup=ms(echo_warmup_ms),
        )
        self.items: list[Any] = []
        self.frames: list[NDArray[np.int16]] = []
        self.reports = True
        self.microphone = True
        self.published = Ticks(0)

    @property
    def now(self) -> Nanos:
        return ms(self.at)

    @property
    def ear(self) -> int:
        """What the page hears now."""
        return int(ticks_from_ms(self.at - BEGIN)) - LAG

    def publish(self, length_ms: float, *, epoch: int = 0, last: bool = True) -> bool:
        span = Span(self.published, Ticks(self.published + ticks_from_ms(length_ms)))
        self.published = span.end
        news = PublishChunk(SESSION, ResponseId(1), ChunkId(1), Epoch(epoch), span, 0, span.length // 2, last, 1)
        return self.line.publish(news, np.arange(1, 1 + span.length // 2).astype(np.int16))

    def run(self, length_ms: float, *, voice: bool = False) -> None:
        """Frames leave and arrive every 20 ms; ten times a second the page says what it hears."""
        for _ in range(round(length_ms / 20)):
            pts = int(ticks_from_ms(self.at - BEGIN))
            self.frames.append(self.line.pull(pts, self.now))
            if self.microphone:
                pcm = np.full(320, 20_000 if voice else 0, np.int16)
                self.line.on_audio(pcm, pts, self.now)
            if self.reports and pts % ticks_from_ms(100) == 0:
                self.report()
            self.line.tick(self.now)
            self.at += 20
            self.items += self.line.drain()

    def report(self, *, muted: bool = False, silent: bool = False, pts: int | None = None) -> None:
        report = EarReport(self.ear if pts is None else pts, self.now, NETWORK, BUFFER, Ticks(0))
        self.line.on_report(report, self.now, muted=muted, silent=silent)

    def take(self, kind: type[Item]) -> list[Item]:
        """Items of a kind since the last `clear`."""
        self.items += self.line.drain()
        return [item for item in self.items if isinstance(item, kind)]

    def clear(self) -> None:
        self.line.drain()
        self.items.clear()


def speaking(**options: Any) -> Scene:
    """A scene in which the character has been heard for 390 ms and has 1.5 s to go."""
    scene = Scene(**options)
    scene.publish(2000)
    scene.run(500)
    scene.clear()
    return scene


def held(*, pts: int | None = None) -> Scene:
    """The page froze itself at `pts`, by default where its ear was."""
    scene = speaking()
    scene.line.on_page_voice(1, at=Muted(scene.ear if pts is None else pts), now=scene.now)
    return scene


# Holding ------------------------------------------------------------------------------------------------------------


def test_a_voice_over_the_reply_freezes_it() -> None:
    """From the third loud block on nothing leaves, the engine hears of it with the ear's place, the page is told."""
    scene = speaking()
    scene.run(160, voice=True)
    (started,) = scene.take(VoiceStarted)
    noticed = int(ticks_from_nanos(started.onset_at - ms(BEGIN)))

    assert started.held
    assert started.source == "server"
    assert not started.assumed
    assert abs(started.cursor.position - (noticed - LAG)) <= 1
    assert started.bound == BOUND
    assert scene.take(HoldOrder) == [HoldOrder(started.hold, Epoch(0))]
    assert scene.line.playout.held
    assert not scene.frames[-1].any()


def test_the_block_that_made_a_voice_a_fact_follows_the_fact() -> None:
    """The engine opens the utterance before it gets the block, and the block is not lost to it."""
    scene = speaking()
    scene.run(160, voice=True)
    kinds = [type(item) for item in scene.items if isinstance(item, VoiceStarted | Block)]
    at = kinds.index(VoiceStarted)

    assert kinds[at + 1] is Block


def no_reply() -> Scene:
    return Scene()


def over_and_heard() -> Scene:
    scene = speaking()
    scene.run(2500)
    return scene


def barge_in_off() -> Scene:
    return speaking(barge_in=False)


def echo_canceller_still_learning() -> Scene:
    return speaking(echo_warmup_ms=1500)


def just_resumed() -> Scene:
    scene = held()
    scene.line.resume(ResumePlayback(SESSION, 1, Epoch(0)), scene.now)
    return scene


@pytest.mark.parametrize(
    "scene_of", [no_reply, over_and_heard, barge_in_off, echo_canceller_still_learning, just_resumed]
)
def test_a_voice_that_may_not_interrupt_is_told_and_freezes_nothing(scene_of: Any) -> None:
    scene = scene_of()
    scene.clear()
    scene.run(200, voice=True)

    assert [(fact.held, fact.hold) for fact in scene.take(VoiceStarted)] == [(False, 0)]
    assert scene.take(HoldOrder) == []
    assert not scene.line.playout.held


def test_the_end_of_a_reply_that_is_still_on_its_way_can_be_interrupted() -> None:
    """Everything has left, but the ear is 110 ms behind: the last words may still be stopped."""
    scene = Scene()
    scene.publish(600)
    scene.run(480)
    scene.run(160, voice=True)

    assert scene.line.playout.quiet is False or scene.line.playout.delivered == ticks_from_ms(600)
    assert [fact.held for fact in scene.take(VoiceStarted)] == [True]


def test_after_a_false_alarm_the_server_rests_and_then_hears_again() -> None:
    scene = just_resumed()
    scene.run(ms_from_nanos(REHOLD_AFTER) + 20)
    scene.clear()
    scene.run(160, voice=True)

    assert [fact.held for fact in scene.take(VoiceStarted)] == [True]


@pytest.mark.parametrize(("spoken_ms", "holds"), [(1000, 1), (300, 0)])
def test_a_voice_that_began_while_the_server_rested_freezes_when_the_rest_is_over(spoken_ms: int, holds: int) -> None:
    """Somebody who goes on speaking is not talked over; what was over by then has frozen nothing."""
    scene = just_resumed()
    scene.clear()
    scene.run(spoken_ms, voice=True)
    scene.run(300)

    started = scene.take(VoiceStarted)
    assert [fact.held for fact in started] == [False] + [True] * holds
    assert len(scene.take(HoldOrder)) == holds
    assert len({fact.at for fact in started}) == 1
    assert scene.line.playout.held == bool(holds)


def test_a_voice_that_has_interrupted_freezes_nothing_again() -> None:
    """The page heard it first, the server's detector during the hold; the person talks on after the flush."""
    scene = speaking()
    scene.line.on_page_voice(1, at=Muted(scene.ear), now=scene.now)
    scene.run(300, voice=True)
    (started, *_) = scene.take(VoiceStarted)
    scene.line.advance(AdvanceEpoch(SESSION, Epoch(1), started.cursor.position, started.hold, scene.now))
    scene.clear()
    scene.run(900, voice=True)

    assert scene.take(HoldOrder) == []
    assert scene.line.hold is None
    assert not scene.line.playout.held


def test_an_epoch_the_front_end_began_by_itself_is_held_by_nobody_when_the_engine_confirms_it() -> None:
    scene = held()
    scene.run(2200, voice=True)  # Nobody decides: the front end flushes by itself.
    scene.line.playout.hold()
    scene.line.advance(AdvanceEpoch(SESSION, Epoch(1), Ticks(0), 1, scene.now))

    assert scene.line.playout.epoch == 1
    assert not scene.line.playout.held


def test_a_click_freezes_nothing() -> None:
    scene = speaking()
    scene.run(40, voice=True)
    scene.run(300)

    assert scene.take(VoiceStarted) == []


# The page -----------------------------------------------------------------------------------------------------------


def test_a_page_that_says_it_three_times_is_believed_once() -> None:
    """Voice messages travel on a lossy channel, in three copies; the second and third change nothing."""
    scene = speaking()
    for _ in range(3):
        scene.line.on_page_voice(1, at=Muted(scene.ear), now=scene.now)
        scene.at += 20

    assert [(fact.held, fact.hold, fact.source) for fact in scene.take(VoiceStarted)] == [(True, 1, "page")]
    assert scene.take(HoldOrder) == []  # It has muted itself already.


def test_a_page_that_did_not_mute_only_hints() -> None:
    scene = speaking()
    scene.line.on_page_voice(1, at=None, now=scene.now)

    assert scene.take(VoiceStarted) == []
    assert not scene.line.playout.held


def test_the_pages_mute_says_where_the_ear_stands() -> None:
    scene = held(pts=ticks_from_ms(123))
    (started,) = scene.take(VoiceStarted)

    assert started.cursor == Cursor(Epoch(0), ticks_from_ms(123), scene.now)


def test_nothing_is_heard_that_was_not_sent() -> None:
    """A page that claims to hear the future is taken to hear the newest frame."""
    scene = held(pts=ticks_from_ms(60_000))
    (started,) = scene.take(VoiceStarted)

    assert started.cursor.position == ticks_from_ms(500)


def test_the_answer_to_a_hold_moves_the_cut() -> None:
    """The server froze by an estimate; the page muted later, and what it heard until then counts."""
    scene = speaking()
    scene.run(160, voice=True)
    (order,) = scene.take(HoldOrder)
    guess = scene.take(VoiceStarted)[0].cursor.position
    later = guess + ticks_from_ms(33)
    scene.line.on_hold_answer(order.hold, at=Muted(later), now=scene.now)
    (answer,) = scene.take(HoldAnswered)
    scene.line.resume(ResumePlayback(SESSION, order.hold, Epoch(0)), scene.now)
    scene.run(20)

    assert (answer.hold, answer.cursor.position, answer.bound) == (order.hold, later, BOUND)
    assert scene.frames[-1][0] == later // 2 + 1


@pytest.mark.parametrize("hold", [0, 2, 99])
def test_an_answer_to_another_hold_changes_nothing(hold: int) -> None:
    scene = held()
    before = scene.line.hold
    scene.line.on_hold_answer(hold, at=Muted(0), now=scene.now)

    assert scene.take(HoldAnswered) == []
    assert scene.line.hold == before


def test_a_pages_voice_during_the_servers_hold_is_its_answer() -> None:
    """Both heard the person; the server was first, and the page knows better where the ear stands."""
    scene = speaking()
    scene.run(160, voice=True)
    (order,) = scene.take(HoldOrder)
    scene.line.on_page_voice(1, at=Muted(ticks_from_ms(200)), now=scene.now)

    assert [(a.hold, a.cursor.position) for a in scene.take(HoldAnswered)] == [(order.hold, ticks_from_ms(200))]
    assert len(scene.take(VoiceStarted)) == 1


def test_silence_heard_for_longer_than_the_error_leaves_no_doubt() -> None:
    """The reply ended 60 ms before the ear froze: all of it was heard, for certain."""
    scene = Scene()
    scene.publish(200)
    scene.run(500)
    scene.clear()
    scene.report(pts=ticks_from_ms(260))
    (report,) = scene.take(CursorReported)

    assert (report.cursor.position, report.bound) == (ticks_from_ms(200), 0)


# Reports ------------------------------------------------------------------------------------------------------------


def test_a_report_says_what_is_heard_and_what_lies_between() -> None:
    scene = speaking()
    scene.report()
    (report,) = scene.take(CursorReported)

    assert report.cursor == Cursor(Epoch(0), Ticks(scene.ear), scene.now)
    assert (report.buffer, report.bound) == (LAG, BOUND)
    assert not report.assumed


@pytest.mark.parametrize("state", ["muted", "silent", "held"])
def test_a_page_that_hears_nothing_reports_nothing(state: str) -> None:
    """Muted, blocked or frozen: its clock runs on, the ear does not."""
    scene = held() if state == "held" else speaking()
    scene.at += 300
    scene.report(muted=state == "muted", silent=state == "silent")

    assert scene.take(CursorReported) == []


def test_without_reports_a_conservative_clock_speaks_and_says_so() -> None:
    """The page says nothing for 1.5 s: from then on positions are assumed, far behind what was sent."""
    scene = speaking()
    scene.reports = False
    scene.run(1400)
    early = scene.take(CursorReported)
    scene.run(400)
    late = scene.take(CursorReported)

    assert early == []
    assert len(late) >= 3
    assert all(report.assumed for report in late)
    assert [r.cursor.position for r in late] == [
        ticks_from_nanos(r.cursor.observed_at - ms(BEGIN)) - ASSUMED_LAG for r in late
    ]


def test_assumed_reports_come_ten_times_a_second_and_stop_when_the_page_speaks() -> None:
    scene = Scene()
    scene.reports = False
    scene.publish(2000)
    scene.run(1000)
    assumed = len(scene.take(CursorReported))
    scene.reports = True
    scene.run(100)
    scene.clear()
    scene.run(500)

    assert assumed == 7  # At 300, 400 ... 900 ms: before that the lag leaves nothing heard.
    assert not any(report.assumed for report in scene.take(CursorReported))


def test_a_page_whose_sound_is_blocked_is_not_assumed_to_hear() -> None:
    scene = speaking()
    scene.report(silent=True)
    scene.reports = False
    scene.run(3000)

    assert scene.take(CursorReported) == []


# Decisions ----------------------------------------------------------------------------------------------------------


def test_a_resume_goes_on_from_the_muted_sample() -> None:
    scene = held(pts=ticks_from_ms(390))
    scene.run(300)
    scene.line.resume(ResumePlayback(SESSION, 1, Epoch(0)), scene.now)
    (order,) = scene.take(ResumeOrder)
    scene.run(20)

    assert order == ResumeOrder(1, Epoch(0), ticks_from_ms(800))
    assert scene.frames[-1].tolist() == list(range(390 * 24 + 1, 410 * 24 + 1))


def test_a_resume_of_another_hold_changes_nothing() -> None:
    scene = held()
    scene.line.resume(ResumePlayback(SESSION, 7, Epoch(0)), scene.now)

    assert scene.take(ResumeOrder) == []
    assert scene.line.playout.held


def test_an_advance_flushes_and_what_comes_late_is_refused() -> None:
    scene = held()
    scene.line.advance(AdvanceEpoch(SESSION, Epoch(1), ticks_from_ms(390), 1, scene.now))
    late = scene.publish(100)
    scene.run(60)

    assert scene.take(FlushOrder) == [FlushOrder(1, Epoch(1), ticks_from_ms(500), ticks_from_ms(390))]
    assert late is False
    assert not np.concatenate(scene.frames[-3:]).any()
    assert scene.line.hold is None


def test_what_is_sent_between_the_decision_and_the_flush_is_counted() -> None:
    """Nothing froze the reply, and the engine's news took 60 ms: three frames of the dead epoch had left."""
    scene = speaking()
    decided = scene.now - 1
    scene.run(60)
    scene.line.advance(AdvanceEpoch(SESSION, Epoch(1), Ticks(0), 0, Nanos(decided)))
    scene.line.advance(AdvanceEpoch(SESSION, Epoch(1), Ticks(0), 0, Nanos(decided)))

    assert scene.line.playout.stale_samples == 3 * FRAME_SAMPLES


def test_a_held_reply_sends_nothing_between_the_decision_and_the_flush() -> None:
    scene = held()
    decided = scene.now - 1
    scene.run(60)
    scene.line.advance(AdvanceEpoch(SESSION, Epoch(1), Ticks(0), 1, Nanos(decided)))

    assert scene.line.playout.stale_samples == 0


def test_a_hold_that_nobody_decides_resumes_alone() -> None:
    """The engine is silent for `hold_max` and so is the person: a stalled engine must not leave a frozen character."""
    scene = held(pts=ticks_from_ms(390))
    scene.run(ms_from_nanos(HOLD_MAX) - 40)
    waiting = scene.take(HoldExpired)
    scene.run(80)

    assert waiting == []
    assert scene.take(HoldExpired) == [HoldExpired(SESSION, 1, True)]
    assert [order.hold for order in scene.take(ResumeOrder)] == [1]
    assert scene.frames[-1].any()


def test_a_hold_that_nobody_decides_is_flushed_while_the_person_goes_on() -> None:
    scene = held(pts=ticks_from_ms(390))
    scene.run(ms_from_nanos(HOLD_MAX) + 20, voice=True)

    assert scene.take(HoldExpired) == [HoldExpired(SESSION, 1, False)]
    assert [(o.hold, o.epoch, o.at) for o in scene.take(FlushOrder)] == [(1, Epoch(1), ticks_from_ms(390))]
    assert scene.line.playout.quiet
    assert scene.publish(100, epoch=0) is False


def test_a_decision_that_comes_after_the_line_decided_is_harmless() -> None:
    """Resume orders of a hold that expired are for nobody; an advance to the epoch the line is in flushes nothing."""
    scene = held(pts=ticks_from_ms(390))
    scene.run(ms_from_nanos(HOLD_MAX) + 20, voice=True)
    scene.clear()
    scene.line.resume(ResumePlayback(SESSION, 1, Epoch(0)), scene.now)
    scene.publish(100, epoch=1)
    scene.line.advance(AdvanceEpoch(SESSION, Epoch(1), ticks_from_ms(390), 1, scene.now))

    assert scene.take(ResumeOrder) == []
    assert scene.line.playout.queued == ticks_from_ms(100)


# Words and the stop button ------------------------------------------------------------------------------------------


def test_typed_words_go_straight_to_the_engine_in_silence() -> None:
    scene = Scene()
    scene.line.say("hello", "k1", scene.now)

    assert scene.take(TextArrived) == [TextArrived(SESSION, "hello", "k1")]
    assert scene.take(HoldOrder) == []


def test_typed_words_over_a_reply_wait_until_the_cut_is_known() -> None:
    """The ear's place is asked for first; the words follow the epoch they interrupt."""
    scene = speaking()
    scene.line.say("wait", "k1", scene.now)
    (started,) = scene.take(VoiceStarted)
    (order,) = scene.take(HoldOrder)
    early = scene.take(TextArrived)
    scene.line.on_hold_answer(order.hold, at=Muted(scene.ear), now=scene.now)
    scene.line.advance(AdvanceEpoch(SESSION, Epoch(1), Ticks(scene.ear), order.hold, scene.now))

    assert (started.source, started.held) == ("stop", True)
    assert early == []
    assert [type(item) for item in scene.items[-2:] + scene.line.drain()][-2:] == [FlushOrder, TextArrived]


def test_words_that_wait_keep_their_order_and_none_is_lost_at_the_bound() -> None:
    """One more than may wait: they all stop waiting, oldest first."""
    scene = held()
    keys = [f"k{number}" for number in range(TEXTS_MAX + 2)]
    for key in keys:
        scene.line.say("again", key, scene.now)
    scene.line.resume(ResumePlayback(SESSION, 1, Epoch(0)), scene.now)

    assert [fact.key for fact in scene.take(TextArrived)] == keys


def test_a_stop_over_the_reply_freezes_it() -> None:
    scene = speaking()
    scene.line.on_stop(1, at=Muted(ticks_from_ms(390)), now=scene.now)
    (started,) = scene.take(VoiceStarted)

    assert (started.source, started.held, started.cursor.position) == ("stop", True, ticks_from_ms(390))
    assert scene.take(HoldOrder) == []


def test_a_stop_of_a_page_that_cannot_mute_is_answered_with_a_hold() -> None:
    scene = speaking()
    for _ in range(3):
        scene.line.on_stop(1, at=None, now=scene.now)

    assert [fact.source for fact in scene.take(VoiceStarted)] == ["stop"]
    assert len(scene.take(HoldOrder)) == 1


def test_a_stop_without_sound_is_told_and_freezes_nothing() -> None:
    """The reply is being thought of: there is nothing to freeze, and the engine must still hear of it."""
    scene = Scene()
    scene.run(100)
    scene.line.on_stop(1, at=None, now=scene.now)

    assert [(fact.source, fact.held, fact.hold) for fact in scene.take(VoiceStarted)] == [("stop", False, 0)]
    assert scene.take(HoldOrder) == []
    assert not scene.line.playout.held


def test_the_first_stop_after_typed_words_counts() -> None:
    """Typed words interrupt, too, but they are no press of the button: the page counts those alone."""
    scene = speaking()
    scene.line.say("wait", "k1", scene.now)
    scene.line.advance(AdvanceEpoch(SESSION, Epoch(1), Ticks(scene.ear), 1, scene.now))
    scene.published = Ticks(scene.ear)
    scene.publish(1000, epoch=1)
    scene.run(400)
    scene.clear()
    scene.line.on_stop(1, at=Muted(scene.ear), now=scene.now)

    assert [(fact.source, fact.held) for fact in scene.take(VoiceStarted)] == [("stop", True)]


@pytest.mark.parametrize("muted", [True, False])
def test_a_stop_during_a_hold_needs_no_judgement_any_more(muted: bool) -> None:
    """A cough froze the reply and the person presses stop: the engine must not judge the cough and resume."""
    scene = held(pts=ticks_from_ms(390))
    scene.clear()
    scene.line.on_stop(1, at=Muted(ticks_from_ms(390)) if muted else None, now=scene.now)
    (started,) = scene.take(VoiceStarted)

    assert (started.source, started.held, started.hold) == ("stop", True, 1)
    assert started.cursor.position == ticks_from_ms(390)
    assert scene.take(HoldOrder) == []


# Latency ------------------------------------------------------------------------------------------------------------


def latency(*marks_ms: float) -> LatencyMeasured:
    return LatencyMeasured(SESSION, TurnId(3), ResponseId(4), *(ms(mark) for mark in marks_ms))


def test_latency_parts_touch_each_other_and_sum_to_the_whole() -> None:
    """From the person's last sample to the ear: every part begins where the one before it ends."""
    scene = Scene()
    scene.run(200)
    scene.clear()
    scene.line.measure(latency(BEGIN, BEGIN + 40, BEGIN + 70, BEGIN + 130, BEGIN + 190))
    scene.publish(500)
    scene.run(300)
    (ready,) = scene.take(LatencyReady)

    assert (ready.turn, ready.response) == (TurnId(3), ResponseId(4))
    assert ready.parts == (
        ("end_of_turn", 40.0),
        ("prefill", 30.0),
        ("first_word", 60.0),
        ("first_audio", 60.0),
        ("pacing", 10.0),  # Published at 190, and the next frame left at 200.
        ("network", 30.0),
        ("jitter_buffer", 80.0),
        ("output", 0.0),
    )


def test_latency_of_a_reply_that_was_cut_before_its_first_sample_is_not_measured() -> None:
    scene = Scene()
    scene.run(200)
    scene.line.measure(latency(BEGIN, BEGIN + 40, BEGIN + 70, BEGIN + 130, BEGIN + 190))
    scene.line.advance(AdvanceEpoch(SESSION, Epoch(1), Ticks(0), 0, scene.now))
    scene.publish(500, epoch=1)
    scene.run(300)

    assert scene.take(LatencyReady) == []


def test_the_first_sound_of_a_reply_is_measured_once_when_it_enters_the_track() -> None:
    scene = Scene()
    scene.run(200)
    scene.line.measure(latency(BEGIN, BEGIN + 40, BEGIN + 70, BEGIN + 130, BEGIN + 190))
    scene.run(100)
    assert list(scene.line.first_sounds) == []
    scene.publish(500)
    scene.run(300)

    (took,) = scene.line.first_sounds
    assert 290 <= took / NANOS_PER_MS <= 320


def test_how_long_a_page_took_to_mute_itself_is_measured_once_a_hold() -> None:
    scene = speaking()
    scene.run(400, voice=True)
    (order,) = scene.take(HoldOrder)
    since = scene.line.hold.since if scene.line.hold is not None else 0
    scene.line.on_hold_answer(order.hold, at=Muted(scene.ear), now=Nanos(since + 30 * NANOS_PER_MS))
    scene.line.on_hold_answer(order.hold, at=Muted(scene.ear), now=Nanos(since + 50 * NANOS_PER_MS))

    assert list(scene.line.stops) == [30 * NANOS_PER_MS]


# The microphone -----------------------------------------------------------------------------------------------------


def test_a_microphone_that_falls_silent_still_makes_time_pass() -> None:
    """Muted in the middle of a word: blocks of nothing follow, marked, so that the voice ends at its last block."""
    scene = Scene()
    scene.run(400, voice=True)
    scene.clear()
    scene.microphone = False
    scene.run(3000)
    blocks = scene.take(Block)
    spans = [block.span for block in blocks]

    assert len(blocks) > 60
    assert all(block.gap for block in blocks[1:])
    assert all(later.start == earlier.end for earlier, later in pairwise(spans))


def test_a_microphone_that_comes_back_goes_on_where_its_timestamps_say() -> None:
    scene = Scene()
    scene.run(400)
    scene.microphone = False
    scene.run(2000)
    scene.microphone = True
    scene.run(400)
    spans = [block.span for block in scene.take(Block)]

    assert all(later.start == earlier.end for earlier, later in pairwise(spans))
    assert abs(spans[-1].end - ticks_from_ms(2800)) <= ticks_from_ms(32)


def test_a_page_without_a_microphone_makes_no_blocks() -> None:
    scene = Scene()
    scene.microphone = False
    scene.run(3000)

    assert scene.take(Block) == []


def test_frames_leave_with_pts_that_only_grow() -> None:
    scene = speaking()

    assert scene.line.next_pts == ticks_from_ms(500)
    assert all(len(frame) * 2 == FRAME for frame in scene.frames)


# What is seen -------------------------------------------------------------------------------------------------------


def seen() -> Scene:
    scene = Scene()
    scene.line.begin_view()
    return scene


def places(scene: Scene) -> list[tuple[int, float, float]]:
    """(epoch, position in ms, pts in ms) of every voice that was placed."""
    return [(p.epoch, p.position / 48, p.pts / 48) for p in scene.take(VoicePlaced)]


def stops(scene: Scene) -> list[tuple[int, float]]:
    return [(s.epoch, s.pts / 48) for s in scene.take(VoiceStopped)]


def test_a_voice_is_placed_once_where_it_enters_the_track() -> None:
    scene = seen()
    scene.run(100)
    scene.publish(300, last=False)
    scene.run(100)
    scene.publish(300)
    scene.run(700)

    assert places(scene) == [(0, 0, 100)]
    assert stops(scene) == []


def test_a_voice_that_ran_dry_is_placed_anew() -> None:
    """The second half comes 80 ms late: lips that went on by the first place would be 80 ms early."""
    scene = seen()
    scene.publish(200, last=False)
    scene.run(280)
    scene.publish(200)
    scene.run(300)

    assert places(scene) == [(0, 0, 0), (0, 200, 280)]


def test_nobody_who_does_not_see_is_told() -> None:
    scene = speaking()
    scene.line.on_page_voice(1, at=Muted(scene.ear), now=scene.now)
    scene.run(100)

    assert places(scene) == []
    assert stops(scene) == []


def test_whoever_begins_to_see_in_the_middle_of_a_reply_is_told_where_it_stands() -> None:
    scene = speaking()
    scene.line.begin_view()
    scene.run(100)

    assert places(scene) == [(0, 500, 500)]


def test_a_hold_stops_the_voice_and_a_resume_places_what_is_said_again() -> None:
    """The ear was at 390 ms when the page muted itself; from there on it is said again, 100 ms later."""
    scene = seen()
    scene.publish(2000)
    scene.run(500)
    scene.clear()
    scene.line.on_page_voice(1, at=Muted(scene.ear), now=scene.now)
    assert stops(scene) == [(0, 500)]
    scene.run(100)
    assert places(scene) == []
    scene.line.resume(ResumePlayback(SESSION, 1, Epoch(0)), scene.now)
    scene.run(100)

    assert places(scene) == [(0, 390, 600)]


def test_a_hold_that_ends_before_the_next_frame_is_placed_all_the_same() -> None:
    """Nothing was muted and nothing is said again: the pts go on, but the engine has been told of a stop."""
    scene = seen()
    scene.publish(2000)
    scene.run(500)
    scene.clear()
    scene.line.on_page_voice(1, at=Muted(scene.line.next_pts), now=scene.now)
    scene.line.resume(ResumePlayback(SESSION, 1, Epoch(0)), scene.now)
    scene.run(60)

    assert stops(scene) == [(0, 500)]
    assert places(scene) == [(0, 500, 500)]


def test_a_new_epoch_stops_the_voice_of_the_old_one_and_places_its_own() -> None:
    scene = seen()
    scene.publish(2000)
    scene.run(500)
    scene.clear()
    scene.line.advance(AdvanceEpoch(SESSION, Epoch(1), Ticks(390 * 48), 0, scene.now))
    scene.published = Ticks(390 * 48)
    scene.publish(200, epoch=1)
    scene.run(60)

    assert stops(scene) == [(0, 500)]
    assert places(scene) == [(1, 390, 500)]


def test_the_place_of_a_voice_is_told_before_it_enters_the_track() -> None:
    """The face needs every millisecond: the next frame will carry what has just come."""
    scene = seen()
    scene.run(100)
    scene.publish(300)
    assert places(scene) == [(0, 0, 100)]
    scene.run(300)

    assert places(scene) == [(0, 0, 100)]


def test_a_place_that_was_foreseen_and_came_otherwise_is_told_again() -> None:
    """The loop stalls: the transport skips 200 ms, and the first sound stands there."""
    scene = seen()
    scene.run(100)
    scene.publish(300)
    scene.at += 200
    scene.run(100)

    assert places(scene) == [(0, 0, 100), (0, 0, 300)]
