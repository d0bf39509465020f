"""The word clock's code and its ear."""

from __future__ import annotations

import fractions
from itertools import pairwise

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from duplexd.media.tones import (
    GAP_MS,
    HIGH_GROUP_HZ,
    LOW_GROUP_HZ,
    TONE_AMPLITUDE,
    WORDS_MAX,
    HeardWord,
    decode,
    tone_of,
    unwrapped,
    word_pcm,
    word_samples,
)

OPUS_DELAY = 312  # samples at 48 kHz: the encoder's look-ahead, which a raw packet stream does not skip
TOLERANCE_MS = 8.0
few = settings(max_examples=25, deadline=None, derandomize=True)


def spoken(indexes: list[int], rate: int) -> NDArray[np.float32]:
    return np.concatenate([word_pcm(index, rate=rate) for index in indexes])


def int16(sound: NDArray[np.floating]) -> NDArray[np.int16]:
    return np.round(np.clip(sound, -1, 1) * 32767).astype(np.int16)


def through_opus(pcm: NDArray[np.int16], rate: int) -> NDArray[np.int16]:
    """Encoded at 32 kbit/s as the transport does, decoded at 48 kHz; 20 ms longer than what went in."""
    encoder = av.CodecContext.create("libopus", "w")
    encoder.bit_rate, encoder.format, encoder.layout, encoder.sample_rate = 32_000, "s16", "mono", rate
    encoder.time_base = fractions.Fraction(1, rate)
    encoder.options = {"application": "voip", "frame_duration": "20"}
    decoder = av.CodecContext.create("libopus", "r")
    decoder.sample_rate, decoder.layout, decoder.format = 48_000, "mono", "s16"
    size = rate // 50
    padded = np.pad(pcm, (0, -len(pcm) % size + 2 * size))
    heard: list[NDArray[np.int16]] = []
    for start in range(0, len(padded), size):
        frame = av.AudioFrame.from_ndarray(padded[start : start + size].reshape(1, -1), format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = rate, start, fractions.Fraction(1, rate)
        for packet in encoder.encode(frame):
            heard += [out.to_ndarray().reshape(-1) for out in decoder.decode(av.Packet(bytes(packet)))]
    return np.concatenate(heard)


def assert_edges(word: HeardWord, start: float, end: float, *, rate: int, delay: int = 0) -> None:
    off = np.array([word.start_sample - delay - start, word.end_sample - delay - end]) * 1000 / rate

    assert np.abs(off).max() <= TOLERANCE_MS, f"{word} is off by {off} ms"


def test_every_word_has_a_chord_of_its_own() -> None:
    chords = {tone_of(index) for index in range(WORDS_MAX)}

    assert len(chords) == WORDS_MAX
    assert tone_of(WORDS_MAX + 5) == tone_of(5)


def test_neighbouring_words_differ_in_both_tones_by_more_than_an_ear_confuses() -> None:
    pairs = [(tone_of(index), tone_of(index + 1)) for index in range(WORDS_MAX)]

    assert min(abs(one.low_hz - other.low_hz) for one, other in pairs) >= 300
    assert min(abs(one.high_hz - other.high_hz) for one, other in pairs) >= 300


def test_all_tones_pass_a_wideband_line() -> None:
    chords = [tone_of(index) for index in range(WORDS_MAX)]

    assert min(chord.low_hz for chord in chords) == LOW_GROUP_HZ
    assert max(chord.low_hz for chord in chords) < HIGH_GROUP_HZ
    assert max(chord.high_hz for chord in chords) < 5000


@few
@given(
    index=st.integers(0, 5000),
    cuts=st.lists(st.integers(0, 4800), max_size=6),
    rate=st.sampled_from([16_000, 24_000, 48_000]),
)
def test_slices_of_a_word_are_the_word(index: int, cuts: list[int], rate: int) -> None:
    whole = word_pcm(index, rate=rate)
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    parts = [word_pcm(index, start=a, stop=b, rate=rate) for a, b in pairwise(edges)]

    assert np.array_equal(np.concatenate(parts), whole)


def test_a_word_ends_in_its_gap_and_never_clips() -> None:
    whole = word_pcm(77, samples=12_000)

    assert not whole[-GAP_MS * 24 :].any()
    assert np.abs(whole).max() <= 2 * TONE_AMPLITUDE
    assert abs(float(whole[0])) == 0


@pytest.mark.parametrize(
    "arguments", [{"samples": 500}, {"start": -1}, {"stop": 10_000}, {"start": 3, "stop": 2}], ids=str
)
def test_a_slice_that_is_none_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="word of"):
        word_pcm(1, **arguments)


@pytest.mark.parametrize("rate", [16_000, 24_000, 44_100, 48_000])
def test_words_are_heard_at_every_usual_rate(rate: int) -> None:
    indexes = [1023, 0, 1, 2, 31, 32, 33]
    heard = decode(spoken(indexes, rate), rate)
    pitch, voiced = word_samples(rate), word_samples(rate) - GAP_MS * rate // 1000

    assert [word.index for word in heard] == indexes
    for place, word in enumerate(heard):
        assert_edges(word, place * pitch, place * pitch + voiced, rate=rate)
        assert word.level == pytest.approx(2 * TONE_AMPLITUDE, rel=0.1)


@few
@given(
    first=st.integers(0, WORDS_MAX - 1),
    cut_ms=st.tuples(st.integers(0, 80), st.integers(40, 160)),
    rate=st.sampled_from([16_000, 24_000, 48_000]),
    gain=st.floats(0.05, 1.0),
    noise=st.floats(0, 0.003),
    seed=st.integers(0, 2**16),
)
def test_a_word_cut_short_is_heard_for_as_long_as_it_sounded_through_opus(
    first: int, cut_ms: tuple[int, int], rate: int, gain: float, noise: float, seed: int
) -> None:
    """Three words; the middle one is muted before and after a random stretch, hard, as an interruption does."""
    begin, length = cut_ms
    begin_sample, end_sample = begin * rate // 1000, min(begin + length, 160) * rate // 1000
    if end_sample - begin_sample < 40 * rate // 1000:
        begin_sample = end_sample - 40 * rate // 1000
    pitch = word_samples(rate)
    sound = spoken([first, first + 1, first + 2], rate) * gain
    sound[pitch : pitch + begin_sample] = 0
    sound[pitch + end_sample : 2 * pitch] = 0
    sound = sound + np.random.default_rng(seed).normal(0, noise * gain, len(sound))
    heard = decode(through_opus(int16(sound), rate), 48_000)
    scale = 48_000 // rate

    assert [word.index for word in heard] == [(first + step) % WORDS_MAX for step in range(3)]
    for word, (start, end) in zip(
        heard,
        [
            (0, pitch * 4 // 5),
            (pitch + begin_sample, pitch + end_sample),
            (2 * pitch, 2 * pitch + pitch * 4 // 5),
        ],
        strict=True,
    ):
        assert_edges(word, start * scale, end * scale, rate=48_000, delay=OPUS_DELAY)


def test_a_word_that_is_muted_and_resumed_is_heard_in_two_parts() -> None:
    """Playout is held in the middle of word 5 for 100 ms and goes on with the muted sample."""
    whole, middle, pause = word_pcm(5, rate=48_000), 3_840, np.zeros(4_800, np.float32)
    sound = np.concatenate((spoken([4], 48_000), whole[:middle], pause, whole[middle:], spoken([6], 48_000)))
    heard = decode(int16(sound), 48_000)

    assert [word.index for word in heard] == [4, 5, 5, 6]
    assert_edges(heard[1], 9_600, 9_600 + middle, rate=48_000)
    assert_edges(heard[2], 9_600 + middle + 4_800, 9_600 + 7_680 + 4_800, rate=48_000)


def test_a_hole_of_one_packet_loss_does_not_make_two_words() -> None:
    sound = spoken([9], 48_000)
    sound[3_000:3_480] = 0

    assert [word.index for word in decode(sound, 48_000)] == [9]


def test_a_click_in_the_silence_is_no_word() -> None:
    sound = np.concatenate((spoken([3], 48_000), np.zeros(9_600, np.float32), spoken([4], 48_000)))
    sound[12_000:12_100] = 0.9

    assert [word.index for word in decode(sound, 48_000)] == [3, 4]


def test_ten_milliseconds_of_a_word_are_too_little_to_be_told_from_a_click() -> None:
    sound = np.concatenate((spoken([3], 48_000), word_pcm(4, start=0, stop=480, rate=48_000), np.zeros(4_800)))

    assert [word.index for word in decode(sound, 48_000)] == [3]


@pytest.mark.parametrize("level", [0.01, 0.1, 0.5])
def test_noise_is_no_word(level: float) -> None:
    noise = np.random.default_rng(1).normal(0, level, 48_000 * 5)

    assert decode(noise, 48_000) == []


def test_a_voice_like_buzz_is_no_word() -> None:
    """A harmonic series with a gliding pitch, as vowels have; it has energy in both groups."""
    at = np.arange(48_000 * 4) / 48_000
    phase = 2 * np.pi * np.cumsum(120 + 40 * np.sin(2 * np.pi * 1.5 * at)) / 48_000
    buzz = sum(np.sin(k * phase) / k for k in range(1, 40)) * 0.2

    assert decode(buzz, 48_000) == []


@pytest.mark.parametrize("samples", [0, 1, 100])
def test_hardly_any_sound_is_no_word(samples: int) -> None:
    assert decode(np.zeros(samples, np.int16), 48_000) == []


def test_a_sound_that_is_stereo_or_too_slow_is_refused() -> None:
    with pytest.raises(ValueError, match="mono sound"):
        decode(np.zeros((2, 100)), 48_000)
    with pytest.raises(ValueError, match="mono sound"):
        decode(np.zeros(100), 8_000)


@given(first=st.integers(0, 10**6), steps=st.lists(st.integers(-400, 400), max_size=50))
def test_numbers_beyond_the_code_come_back_from_their_order(first: int, steps: list[int]) -> None:
    numbers = [first + sum(steps[:count]) + 20_000 for count in range(len(steps) + 1)]

    assert unwrapped([number % WORDS_MAX for number in numbers], first=numbers[0] + 300) == numbers
