"""A reply that was held is whole at the loudspeaker, or what is twice or missing shows."""

from __future__ import annotations

import numpy as np
import pytest

from duplexd.bench.resumed import resumed
from duplexd.bench.stage import Event
from duplexd.bench.tap import RATE, ClockMap, Recording
from duplexd.media import tones
from duplexd.units import Nanos

WORDS = [{"text": f"1-{k},"} for k in range(4)]
LOG = [Event(kind="words", at=1, response=1, words=WORDS), Event(kind="resume", at=2)]


def played(*stretches: tuple[float, float], pause_ms: float = 300) -> Recording:
    """Stretches of a reply of four words, in milliseconds of it, with a hold after each."""
    samples = tones.CLOCK_WORD_MS * RATE // 1000
    reply = np.concatenate([tones.word_pcm(32 + k, samples=samples, rate=RATE) for k in range(4)])
    hold = np.zeros(round(pause_ms * RATE / 1000), np.float32)
    parts = [part for a, b in stretches for part in (reply[round(a * RATE / 1000) : round(b * RATE / 1000)], hold)]
    clock = ClockMap(rate=RATE, starts=(0,), origins_ns=(0,), spread_ns=0)
    pcm = np.rint(np.concatenate(parts) * 32767).astype(np.int16)
    return Recording(pcm=pcm, rate=RATE, first_sample=0, clock=clock)


END = 4 * tones.CLOCK_WORD_MS


@pytest.mark.parametrize(
    ("stretches", "off_ms"),
    [
        (((0, 700), (700, END)), (0, 0, 0, 0)),
        (((0, 700), (400, END)), (40, 220, 0, 0)),
        (((0, 700), (1000, END)), (0, -220, -40, 0)),
        (((0, 200), (200, 750), (750, END)), (0, 0, 0, 0)),
    ],
    ids=["where it was", "300 ms twice", "300 ms left out", "two holds"],
)
def test_words_are_as_long_as_they_are(stretches: tuple[tuple[float, float], ...], off_ms: tuple[float, ...]) -> None:
    heard = played(*stretches)
    found = resumed(heard, LOG, response=1, after=Nanos(0), before=heard.end)

    assert found.is_whole
    assert found.holds == 1
    assert found.off_ms == [pytest.approx(off, abs=10) for off in off_ms]


def test_a_word_that_was_skipped_is_missing() -> None:
    heard = played((0, 470), (970, END))
    found = resumed(heard, LOG, response=1, after=Nanos(0), before=heard.end)

    assert (found.is_whole, found.words) == (False, [0, 2, 3])
