"""The word clock's code: word k is a chord of two tones, so that whoever hears it knows which word it was.

    |<----------------- a word: 200 ms ----------------->|
    | fade 4 | chord of word k             | fade 4 | gap |
    |<----------------- 160 ms ------------------->|40 ms |

1. One low tone of 32 and one high tone of 32: 1024 words can be told apart, then the code starts again (`unwrapped`).
2. All tones lie in 500..4500 Hz: they pass 16 kHz and every mode of Opus. A telephone takes the highest of them away:
   behind one, the words with a tone above 3.7 kHz are not heard.
3. Neighbouring words differ in both tones by many steps: the smear of one codec frame never turns a word into its
   neighbour.
4. A word is a pure function of its sample numbers: any slice of it equals the same slice of the whole.
5. The ear reports what was *heard* of a word. A word muted in the middle and resumed is heard twice, in two parts; less
   than some 20 ms of a word cannot be told from a click and is not reported, nor is what is 20 dB below the loudest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

TONES_PER_GROUP = 32
WORDS_MAX = TONES_PER_GROUP**2  #: words that can be told apart
WORDS_PER_REPLY_MAX = 32  #: word k of the word clock's reply r sounds as word `32 r + k`
TONE_SPACING_HZ = 60.0
LOW_GROUP_HZ = 500.0  #: lowest tone of the low group, which ends at 2360 Hz
HIGH_GROUP_HZ = 2600.0  #: lowest tone of the high group, which ends at 4460 Hz
WORD_MS = 200  #: default length of a word with its gap
CLOCK_WORD_MS = 480  #: length of the word clock's words: long against the error of a measured cursor
GAP_MS = 40  #: silence at the end of a word
FADE_MS = 4  #: raised cosine at both ends of the chord; a click would be heard as every word at once
TONE_AMPLITUDE = 0.25  #: of full scale, each of the two tones
SAMPLE_RATE = 24_000  #: default rate of `word_pcm`
HEARD_MIN_MS = 20  #: shorter parts of a word are not reported

_LOW_STEP = 11  # odd, so that i -> 11 i (mod 32) meets every tone; neighbours are 660 Hz apart
_HIGH_STEP = 7  # neighbours are 420 Hz apart

_EAR_RATE = 12_000  # the ear works at the divisor of the rate that is nearest above this
_CUTOFF_HZ = 5_200.0  # of the ear's filter, between the highest tone and half of its rate
_FILTER_MS = 5.0
_FRAME_MS = 20.0  # Hann: 60 Hz resolution at half power, the spacing of the tones
_HOP_MS = 1.0
_PURITY_MIN = 0.5  # part of the power in 300..5200 Hz that the two tones explain; speech and noise stay below
_LEVEL_MIN = 10 ** (-50 / 20)  # amplitude of the weaker tone; noise below it is never a word
_BALANCE_MIN = 0.1  # weaker tone to stronger tone
_JOIN_MS = 15.0  # a dropout up to this long does not split a word
_EDGE_FRAME_MS = 6.0
_EDGE_LEVEL = 0.35  # of the word's own level; between the middle of a hard cut and the foot of a fade
_FAINT = 0.1  # of the loudest word: a codec spreads a click of a word, or its pre-echo, over 20 ms at such a level
_BATCH_FRAMES = 4096

Signal = NDArray[np.float64]


@dataclass(frozen=True)
class Chord:
    """The two tones of a word."""

    low_hz: float
    high_hz: float


@dataclass(frozen=True)
class HeardWord:
    """One uninterrupted stretch in which a word was heard."""

    index: int  #: 0..WORDS_MAX-1
    start_sample: int  #: in samples of what was given to `decode`
    end_sample: int
    level: float  #: amplitude of the two tones together, 1.0 is full scale; as spoken: 0.5

    @property
    def samples_count(self) -> int:
        return self.end_sample - self.start_sample


def tone_of(index: int) -> Chord:
    """The chord of word `index`; words that are WORDS_MAX apart share one.

    Raises:  ValueError for a negative index.
    """
    if index < 0:
        raise ValueError(f"a word index counts from 0, not {index}")
    low, high = _steps_of(index)
    return Chord(LOW_GROUP_HZ + low * TONE_SPACING_HZ, HIGH_GROUP_HZ + high * TONE_SPACING_HZ)


def word_samples(rate: int = SAMPLE_RATE) -> int:
    """Length of a word of the default length, with its gap."""
    return WORD_MS * rate // 1000


def word_pcm(
    index: int, *, samples: int | None = None, start: int = 0, stop: int | None = None, rate: int = SAMPLE_RATE
) -> NDArray[np.float32]:
    """The sound of a word, or a slice of it.

    Args:    samples: length of the whole word with its gap, by default WORD_MS; start, stop: the slice that is wanted.
    Returns: float32 (stop - start,), peak below 2 * TONE_AMPLITUDE.
    Raises:  ValueError when the word has no room for its gap and fades, or the slice leaves the word.
    """
    whole = word_samples(rate) if samples is None else samples
    last = whole if stop is None else stop
    gap, fade = GAP_MS * rate // 1000, FADE_MS * rate // 1000
    if whole < gap + 2 * fade:
        raise ValueError(f"a word of {whole} samples at {rate} Hz has no room for {GAP_MS} ms of gap and its fades")
    if not 0 <= start <= last <= whole:
        raise ValueError(f"samples {start}..{last} are not a slice of a word of {whole} samples")
    at = np.arange(start, last, dtype=np.float64)
    chord = tone_of(index)
    turns = 2 * np.pi / rate * at
    sound = TONE_AMPLITUDE * (np.sin(chord.low_hz * turns) + np.sin(chord.high_hz * turns))
    # The distance from the nearer end of the chord, in fades; 0 outside of it.
    inside = np.clip(np.minimum(at, whole - gap - at) / fade, 0, 1)
    return (sound * (0.5 - 0.5 * np.cos(np.pi * inside))).astype(np.float32)


def decode(pcm: NDArray[np.int16] | NDArray[np.floating[Any]], rate: int) -> list[HeardWord]:
    """Which words are heard in a sound, from when to when, in the order of their starts.

    Args:    pcm: (samples,) mono, int16 or float in -1..1; rate: 12000 Hz or more.
    Returns: parts of at least HEARD_MIN_MS; edges within 8 ms after Opus at 32 kbit/s, 2 ms on clean sound.
    Raises:  ValueError for another shape or a lower rate.
    Cost:    about 1/100 of the sound's length on one core.
    """
    if pcm.ndim != 1 or rate < _EAR_RATE:
        raise ValueError(f"decode takes mono sound at {_EAR_RATE} Hz or more, not {pcm.shape} at {rate} Hz")
    if not len(pcm):
        return []
    factor = rate // _EAR_RATE
    scale = 1 / 32768 if pcm.dtype == np.int16 else 1.0
    sound = _lowpass(pcm.astype(np.float64) * scale, rate)[::factor]
    ear_rate = rate / factor
    hop = max(1, round(_HOP_MS * ear_rate / 1000))
    codes = _codes(sound, ear_rate, hop)
    parts = [_measure(sound, ear_rate, code, begin * hop, end * hop) for code, begin, end in _runs(codes)]
    joined = _join([part for part in parts if part is not None], round(_JOIN_MS * ear_rate / 1000))
    least = HEARD_MIN_MS * ear_rate / 1000
    faint = _FAINT * max((word.level for word in joined), default=0.0)
    heard = [word for word in joined if word.samples_count >= least and word.level > faint]
    return [_at_rate(word, factor, len(pcm)) for word in heard]


def unwrapped(indexes: Sequence[int], *, first: int = 0) -> list[int]:
    """Word numbers beyond WORDS_MAX, for words heard in order: each is the number nearest to the one before.

    Args:    first: about where the first of them is expected.
    """
    numbers: list[int] = []
    near = first
    for index in indexes:
        near += (index - near + WORDS_MAX // 2) % WORDS_MAX - WORDS_MAX // 2
        numbers.append(near)
    return numbers


def _steps_of(index: int) -> tuple[int, int]:
    """Tone numbers of a word: a bijection of 0..WORDS_MAX-1."""
    row, column = divmod(index % WORDS_MAX, TONES_PER_GROUP)
    return column * _LOW_STEP % TONES_PER_GROUP, (column * _HIGH_STEP + row) % TONES_PER_GROUP


def _index_of(low: NDArray[np.intp], high: NDArray[np.intp]) -> NDArray[np.intp]:
    """The inverse of `_steps_of`."""
    column = low * pow(_LOW_STEP, -1, TONES_PER_GROUP) % TONES_PER_GROUP
    row = (high - column * _HIGH_STEP) % TONES_PER_GROUP
    return row * TONES_PER_GROUP + column


def _lowpass(sound: Signal, rate: int) -> Signal:
    """Removes what would fold into the tones; a windowed sinc, centred, so that nothing moves in time."""
    half = round(_FILTER_MS / 2 * rate / 1000)
    at = np.arange(-half, half + 1)
    taps = np.sinc(2 * _CUTOFF_HZ / rate * at) * np.hanning(2 * half + 3)[1:-1]
    taps /= taps.sum()
    # "same" of numpy has the length of the longer one, which would be the filter for a very short sound.
    return np.convolve(sound, taps)[half : half + len(sound)]


def _frames(sound: Signal, length: int, hop: int) -> Signal:
    """Frames centred on every hop-th sample, silence beyond the ends; a view of (frames, length)."""
    padded = np.pad(sound, (length // 2, length - length // 2 - 1))
    return np.lib.stride_tricks.sliding_window_view(padded, length)[::hop]


def _codes(sound: Signal, rate: float, hop: int) -> NDArray[np.intp]:
    """Word index per hop, -1 where none is heard."""
    length = round(_FRAME_MS * rate / 1000)
    window = np.hanning(length + 2)[1:-1]
    window /= window.sum()
    tones = np.arange(TONES_PER_GROUP) * TONE_SPACING_HZ
    frequencies = np.concatenate((LOW_GROUP_HZ + tones, HIGH_GROUP_HZ + tones))
    turns = 2 * np.pi / rate * np.arange(length)
    basis = 2 * window[:, None] * np.exp(-1j * np.outer(turns, frequencies))
    real_basis = np.hstack((basis.real, basis.imag))
    # Power under the same window: a sine of amplitude a has a^2 / 2 of it.
    weights = window
    frames = _frames(sound, length, hop)
    codes = [
        _codes_of(frames[low : low + _BATCH_FRAMES], real_basis, weights)
        for low in range(0, len(frames), _BATCH_FRAMES)
    ]
    return np.concatenate(codes)


def _codes_of(frames: Signal, basis: Signal, weights: Signal) -> NDArray[np.intp]:
    products = frames @ basis
    half = 2 * TONES_PER_GROUP
    amplitudes = np.hypot(products[:, :half], products[:, half:])
    low, high = amplitudes[:, :TONES_PER_GROUP], amplitudes[:, TONES_PER_GROUP:]
    low_step, high_step = low.argmax(axis=1), high.argmax(axis=1)
    low_peak, high_peak = low.max(axis=1), high.max(axis=1)
    power = frames**2 @ weights
    weaker, stronger = np.minimum(low_peak, high_peak), np.maximum(low_peak, high_peak)
    pure = (low_peak**2 + high_peak**2) / 2 > _PURITY_MIN * power
    heard = pure & (weaker > _LEVEL_MIN) & (weaker > _BALANCE_MIN * stronger)
    return np.where(heard, _index_of(low_step, high_step), -1)


def _runs(codes: NDArray[np.intp]) -> list[tuple[int, int, int]]:
    """(code, first hop, end hop) of every stretch of one word."""
    edges = np.flatnonzero(np.diff(codes, prepend=-2, append=-2))
    return [(int(codes[begin]), int(begin), int(end)) for begin, end in pairwise(edges) if codes[begin] >= 0]


def _measure(sound: Signal, rate: float, code: int, begin: int, end: int) -> HeardWord | None:
    """Start, end and level of the word that was recognised in samples begin..end, from the envelope of its tones."""
    length = round(_EDGE_FRAME_MS * rate / 1000)
    reach = round(_FRAME_MS * rate / 1000)
    low = max(0, begin - reach)
    part = sound[low : min(len(sound), end + reach)]
    envelope = _envelope(part, rate, code, length)
    middle = envelope[begin - low : max(begin - low + 1, end - low)]
    plateau = float(np.percentile(middle, 75))
    peak = begin - low + int(middle.argmax())
    quiet = np.flatnonzero(envelope < _EDGE_LEVEL * plateau)
    before, after = quiet[quiet < peak], quiet[quiet > peak]
    first = low + (int(before[-1]) + 1 if len(before) else 0)
    last = low + (int(after[0]) if len(after) else len(part))
    return HeardWord(code, first, last, plateau) if last > first else None


def _envelope(part: Signal, rate: float, code: int, length: int) -> Signal:
    """Sum of the amplitudes of the word's two tones, per sample."""
    chord = tone_of(code)
    window = np.hanning(length + 2)[1:-1]
    window /= window.sum()
    turns = 2 * np.pi / rate * np.arange(len(part))
    total = np.zeros(len(part))
    for frequency in (chord.low_hz, chord.high_hz):
        # Two passes over real arrays; the window is shorter than half of the tones' beat, so each stands alone.
        shifted = part * np.exp(-1j * frequency * turns)
        total += 2 * np.abs(np.convolve(shifted, window, mode="full")[length // 2 : length // 2 + len(part)])
    return total


def _join(words: Sequence[HeardWord], gap_max: int) -> list[HeardWord]:
    """Joins parts of one word that overlap or are at most `gap_max` samples apart."""
    joined: list[HeardWord] = []
    for word in sorted(words, key=lambda word: word.start_sample):
        same = [index for index, other in enumerate(joined[-3:], max(0, len(joined) - 3)) if other.index == word.index]
        if same and word.start_sample - joined[same[-1]].end_sample <= gap_max:
            other = joined[same[-1]]
            joined[same[-1]] = HeardWord(
                word.index,
                other.start_sample,
                max(other.end_sample, word.end_sample),
                max(other.level, word.level),
            )
        else:
            joined.append(word)
    return joined


def _at_rate(word: HeardWord, factor: int, samples: int) -> HeardWord:
    start, end = word.start_sample * factor, min(word.end_sample * factor, samples)
    return HeardWord(word.index, start, end, word.level)
