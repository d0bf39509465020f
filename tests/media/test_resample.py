"""Sound from one rate to another in pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplexd.media.resample import Resampler

PAIRS = [(24_000, 16_000), (8_000, 16_000), (24_000, 8_000), (16_000, 24_000), (48_000, 16_000)]


def tone(hertz: float, rate: int, seconds: float = 0.5) -> np.ndarray:
    return np.rint(8000 * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)).astype(np.int16)


@pytest.mark.parametrize(("source", "target"), PAIRS)
@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(1, 400), min_size=1, max_size=30))
def test_pieces_are_the_whole_bit_for_bit(source: int, target: int, cuts: list[int]) -> None:
    sound = np.random.default_rng(1).integers(-9000, 9000, sum(cuts)).astype(np.int16)
    whole = Resampler(source, target).push(sound)
    resampler = Resampler(source, target)
    pieces = [resampler.push(piece) for piece in np.split(sound, np.cumsum(cuts)[:-1])]

    assert np.array_equal(np.concatenate(pieces), whole)
    assert len(whole) == -(-len(sound) * target // source)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_tone_keeps_its_pitch_and_level(source: int, target: int) -> None:
    made = Resampler(source, target).push(tone(1000, source))[200:-200].astype(float)
    spectrum = np.abs(np.fft.rfft(made * np.hanning(len(made))))
    peak = np.fft.rfftfreq(len(made), 1 / target)[spectrum.argmax()]

    assert abs(peak - 1000) < target / len(made)
    assert 0.98 < np.sqrt((made**2).mean()) / (8000 / np.sqrt(2)) < 1.02


def test_what_the_lower_rate_cannot_hold_is_gone() -> None:
    """7 kHz at 8 kHz would come back as 1 kHz."""
    made = Resampler(24_000, 8_000).push(tone(7000, 24_000))[100:].astype(float)

    assert np.sqrt((made**2).mean()) < 8000 * 10 ** (-60 / 20)


def test_the_same_rate_changes_nothing() -> None:
    sound = tone(440, 16_000)

    assert Resampler(16_000, 16_000).push(sound) is sound
