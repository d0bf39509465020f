"""A session rests when nothing happens in it, and loses no sound of the word that wakes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from duplexd.ids import Epoch, SessionId
from duplexd.media.line import Block
from duplexd.messages import Cursor, HoldExpired, VoiceStarted
from duplexd.units import BLOCK_SAMPLES, NANOS_PER_SECOND, Nanos, Span, Ticks
from duplexd.webrtc.realtime.pause import KEPT_BLOCKS, Pause

ME = SessionId(1)
BLOCK = BLOCK_SAMPLES * 3  #: ticks


def s(seconds: float) -> Nanos:
    return Nanos(round(seconds * NANOS_PER_SECOND))


def block(index: int, *, voice: float = 0.0) -> Block:
    span = Span(Ticks(index * BLOCK), Ticks((index + 1) * BLOCK))
    return Block(np.zeros(BLOCK_SAMPLES, np.int16), span, Nanos(0), voice, 0.0, False)


def voice_at(index: int) -> VoiceStarted:
    return VoiceStarted(ME, Ticks(index * BLOCK), Cursor(Epoch(0), Ticks(0), Nanos(0)), False)


def rested(*, threshold: float = 0.5) -> Pause:
    pause = Pause(after_s=2, threshold=threshold)
    pause.tick(s(0), busy=False)
    assert pause.tick(s(2), busy=False)
    return pause


def starts(facts: list[Any]) -> list[int]:
    return [fact.span.start // BLOCK for fact in facts if isinstance(fact, Block)]


def test_it_rests_when_nothing_has_happened_for_so_long_and_not_before() -> None:
    pause = Pause(after_s=2, threshold=0.5)
    pause.tick(s(0), busy=False)
    early = pause.tick(s(1.9), busy=False)
    pause.tick(s(1.95), busy=True)
    after_work = [pause.tick(s(at), busy=False) for at in (3.9, 3.95, 4.0)]

    assert early is False
    assert after_work == [False, True, False]
    assert pause.paused


def test_what_is_no_sound_passes_while_it_rests_and_silence_does_not() -> None:
    pause = rested()
    passed = pause.screen([block(0), HoldExpired(ME, 1, resumed=True)], s(3))

    assert passed == [HoldExpired(ME, 1, resumed=True)]
    assert pause.paused


def test_a_voice_wakes_it_and_the_second_before_goes_first() -> None:
    pause = rested()
    pause.screen([block(index) for index in range(100)], s(3))
    passed = pause.screen([voice_at(98), block(100, voice=0.9), block(101, voice=0.9)], s(4))
    kinds = [type(fact).__name__ for fact in passed]

    assert not pause.paused
    assert starts(passed) == list(range(101 - KEPT_BLOCKS, 102))
    assert kinds.index("VoiceStarted") == len(passed) - 3  # Before the block that made it a fact.
    assert pause.paused_s(s(9)) == pytest.approx(2.0)


def test_a_voice_too_faint_wakes_nothing_until_it_is_loud_enough() -> None:
    """Its beginning is then where there is still sound of it."""
    pause = rested(threshold=0.8)
    faint = pause.screen([voice_at(0), *(block(index, voice=0.6) for index in range(100))], s(4))
    passed = pause.screen([block(100, voice=0.9)], s(5))

    assert faint == []
    assert starts(passed) == list(range(101 - KEPT_BLOCKS, 101))
    assert isinstance(passed[0], VoiceStarted)
    assert passed[0].at == passed[1].span.start


def test_what_is_to_be_said_wakes_it_too() -> None:
    pause = rested()
    pause.screen([block(0), block(1)], s(3))

    assert starts(pause.wake(s(4))) == [0, 1]
    assert not pause.paused
    assert pause.tick(s(5), busy=False) is False
