"""A line whose transport has no clock of its own: sound is taken, positions come from the client, stops from events."""

from __future__ import annotations

from typing import Any

import numpy as np

from duplexd.ids import ChunkId, Epoch, ResponseId, SessionId
from duplexd.media.energy import EnergyDetector
from duplexd.media.line import ASSUMED_BOUND, ASSUMED_LAG, HoldOrder, Line, ResumeOrder
from duplexd.media.playout import Playout
from duplexd.messages import AdvanceEpoch, CursorReported, HoldAnswered, PublishChunk, ResumePlayback, VoiceStarted
from duplexd.units import NANOS_PER_MS, Nanos, Span, Ticks, ticks_from_ms, ticks_from_nanos

ME = SessionId(1)


def ms(value: float) -> Nanos:
    return Nanos(round(value * NANOS_PER_MS))


def line_with(published_ms: float, *, taken_at_ms: float = 1000) -> Line:
    """A line that has been given so much sound, all of it taken at one moment."""
    line = Line(
        session=ME,
        rate=24_000,
        detector=EnergyDetector(),
        echo=None,
        allow_barge_in=True,
        pts_at=lambda now: int(ticks_from_nanos(now)),
        holds=False,
    )
    line.publish(chunk(0, published_ms), np.full(round(24 * published_ms), 9, np.int16))
    taken = line.take(ms(taken_at_ms))
    assert taken is not None
    assert (taken.position, len(taken.pcm)) == (0, round(24 * published_ms))
    return line


def chunk(start_ms: float, length_ms: float, *, last: bool = False, epoch: int = 0) -> PublishChunk:
    start = ticks_from_ms(start_ms)
    span = Span(start, Ticks(start + ticks_from_ms(length_ms)))
    return PublishChunk(ME, ResponseId(1), ChunkId(1), Epoch(epoch), span, 0, round(24 * length_ms), last, 1)


def facts(line: Line, kind: type[Any]) -> list[Any]:
    return [item for item in line.drain() if isinstance(item, kind)]


def test_what_is_taken_is_played_behind_what_was_taken_before() -> None:
    line = line_with(400)
    line.publish(chunk(400, 200), np.ones(4800, np.int16))
    line.take(ms(1010))

    assert line.playout.pts_of(Epoch(0), ticks_from_ms(500)) == ticks_from_ms(1500)
    assert line.take(ms(1020)) is None


def test_sound_that_comes_too_late_is_played_now_and_counted() -> None:
    line = line_with(100)
    line.publish(chunk(100, 100, last=True), np.ones(2400, np.int16))
    line.take(ms(1150))

    assert (line.playout.underruns, line.playout.underrun_ticks) == (1, ticks_from_ms(50))


def test_without_reports_the_position_is_the_clocks_less_its_lag() -> None:
    line = line_with(1000)
    line.tick(ms(1600))
    report = facts(line, CursorReported)[0]

    assert report.assumed
    assert report.cursor.position == ticks_from_ms(600) - ASSUMED_LAG


def test_what_the_client_says_it_has_played_is_the_position() -> None:
    line = line_with(1000)
    line.heard_until(ticks_from_ms(300), ms(1700))
    report = facts(line, CursorReported)[0]

    assert (report.cursor.position, report.assumed) == (ticks_from_ms(300), False)


def test_a_position_that_was_never_sent_is_no_report() -> None:
    line = line_with(100)
    line.heard_until(ticks_from_ms(5000), ms(1700))

    assert facts(line, CursorReported) == []


def test_a_cut_with_a_position_needs_no_answer() -> None:
    line = line_with(1000)
    line.cut(ticks_from_ms(420), ms(1700))
    out = line.drain()
    started = next(item for item in out if isinstance(item, VoiceStarted))

    assert (started.source, started.held, started.assumed) == ("stop", True, False)
    assert (started.cursor.position, started.bound) == (ticks_from_ms(420), 0)
    assert not [item for item in out if isinstance(item, HoldAnswered | HoldOrder)]
    assert line.take(ms(1710)) is None


def test_a_cut_without_a_position_is_answered_by_the_estimate_at_once() -> None:
    line = line_with(1000)
    line.cut(None, ms(1700))
    answer = facts(line, HoldAnswered)[0]

    assert answer.assumed
    assert (answer.cursor.position, answer.bound) == (ticks_from_ms(700) - ASSUMED_LAG, ASSUMED_BOUND)


def test_a_cut_before_anything_can_have_been_heard_cuts_at_the_beginning() -> None:
    """The first sound was sent 10 ms ago: the lagging clock stands before it (T-BI-31)."""
    line = line_with(400)
    line.cut(None, ms(1010))

    assert facts(line, HoldAnswered)[0].cursor.position == 0


def test_a_cut_that_comes_after_the_end_plays_nothing_again() -> None:
    """The engine had completed the reply: it says resume, and nothing is sent a second time."""
    line = line_with(400)
    line.publish(chunk(400, 100, last=True), np.ones(2400, np.int16))
    line.cut(ticks_from_ms(100), ms(1200))
    line.resume(ResumePlayback(ME, 1, Epoch(0)), ms(1201))

    assert line.take(ms(1300)) is None
    assert facts(line, ResumeOrder) == []
    assert not line.playout.held
    line.publish(chunk(500, 100), np.ones(2400, np.int16))
    assert line.take(ms(1400)) is not None


def test_after_an_advance_sound_of_the_new_epoch_is_taken() -> None:
    line = line_with(400)
    line.cut(ticks_from_ms(100), ms(1200))
    line.advance(AdvanceEpoch(ME, Epoch(1), ticks_from_ms(100), 1, ms(1201)))
    line.publish(chunk(100, 100, epoch=1), np.ones(2400, np.int16))
    taken = line.take(ms(1210))

    assert taken is not None
    assert taken.position == ticks_from_ms(100)
    assert line.playout.begin == ticks_from_ms(100)


def test_the_rest_of_a_block_leaves_when_a_turn_ends() -> None:
    """Twenty milliseconds are no block of 32: the end of a word must not wait for the next one."""
    line = line_with(100)
    line.on_audio(np.ones(320, np.int16), 0, ms(1000))
    before = len([b for b in line.drain() if type(b).__name__ == "Block"])
    line.end_input(ms(1001))
    after = [b for b in line.drain() if type(b).__name__ == "Block"]

    assert (before, len(after), int(after[0].pcm.sum())) == (0, 1, 320)


def test_a_playout_that_discards_forgets_what_it_sent() -> None:
    playout = Playout(rate=24_000)
    playout.publish(epoch=Epoch(0), span=Span(Ticks(0), Ticks(960)), pcm=np.ones(480, np.int16), last=False)
    playout.take(0)
    playout.publish(epoch=Epoch(0), span=Span(Ticks(960), Ticks(1920)), pcm=np.ones(480, np.int16), last=True)
    playout.discard()
    playout.resume(Ticks(0))

    assert (playout.quiet, playout.queued, playout.dropped_samples) == (True, 0, 480)
