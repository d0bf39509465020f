"""How much of the microphone is the character's own voice coming back from the loudspeaker.

The front end knows every sample it played and when it was heard; what it does not know is the way from the loudspeaker
to the microphone: its delay, its gain, and what the browser's canceller left of it.

1. Both signals are compared as powers in BAND_COUNT bands every 16 ms: a canceller, a codec or a cheap loudspeaker
   changes phases and single bands, and hardly when which band is loud.
2. The way is learned while the two agree: its delay (the lag at which their patterns correlate best) and its gain in
   each band. A person who talks over it spoils the agreement, so nothing is learned from them.
3. A cell (one band, 16 ms) is explained up to the power predicted for it. The share of a block is the explained part of
   its power: near 1 for echo alone, about 0.3 for a person 6 dB louder than the echo.
4. Before a way is known the strongest echo that what came back so far allows is assumed (T-VAD-04: the first seconds of
   the first reply), and only as long as the patterns have not been seen to disagree.
5. Nothing played recently explains nothing. All buffers are fixed; memory and cost do not grow with the session.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from duplexd.units import BLOCK_SAMPLES, INPUT_RATE

HOP_SAMPLES = 256  #: 16 ms
BAND_COUNT = 20
_FFT = 512
_HOPS = BLOCK_SAMPLES // HOP_SAMPLES

Array = npt.NDArray[np.float64]
Block = npt.NDArray[np.float32]


class EchoRule(msgspec.Struct, frozen=True):
    """Lags, windows and counts are frames of 16 ms; powers are of a full-scale signal."""

    lag_max: int = 28  #: latest echo behind the moment the character was heard: 448 ms
    window: int = 40  #: frames whose patterns are compared: 640 ms
    span: int = 4  #: frames a share is taken over: 64 ms
    agree: float = 0.6  #: correlation from which the patterns agree, and something is learned
    disagree: float = 0.35  #: correlation below which a voice is not the character's, while no way is known
    frames_min: int = 8  #: loud frames of both signals that a correlation needs: 128 ms
    margin: float = 2.0  #: how far above its prediction an echo may be, as power
    gain_max: float = 0.2  #: strongest echo there is, as power: -7 dB
    floor: float = 1e-6  #: mean square of a frame that counts as silence: -60 dBFS
    ahead: int = 2 * INPUT_RATE  #: samples that may be announced before they are heard

    def __post_init__(self) -> None:
        if not 0 < self.span <= self.window or self.lag_max < 2 or self.ahead < BLOCK_SAMPLES:
            raise ValueError(f"need 0 < span <= window, lag_max >= 2, ahead >= {BLOCK_SAMPLES}: {self}")


class EchoReport(msgspec.Struct, frozen=True):
    """What is known after one block."""

    share: float  #: part of the block's power that the character's voice explains, 0..1
    agreement: float  #: correlation of the patterns at the best lag, -1..1; 0 while there is nothing to compare
    lag: int  #: frames behind the heard timeline; -1 while unknown


_NOTHING = EchoReport(0.0, 0.0, -1)


class EchoReference:
    """One person's way from loudspeaker to microphone; sample indexes are of the input timeline (16 kHz).

    Cost: about 0.3 ms a block with numpy on one core, less when nothing is played.
    """

    def __init__(self, rule: EchoRule | None = None) -> None:
        self.rule = rule or EchoRule()
        self._coming = np.zeros(self.rule.ahead + BLOCK_SAMPLES, np.float32)  #: ring, by sample index
        self._out_tail = np.zeros(_FFT, np.float32)
        self._mic_tail = np.zeros(_FFT, np.float32)
        self._out = np.zeros((self.rule.window + self.rule.lag_max, BAND_COUNT))  #: oldest first
        self._mic = np.zeros((self.rule.window, BAND_COUNT))
        self._noise = np.full(BAND_COUNT, 1e-9)  #: power of the microphone when nobody speaks
        self._lag = -1
        self._gain = np.zeros(BAND_COUNT)
        self._next: int | None = None  #: sample index of the next block

    def play(self, pcm: Block, at: int) -> None:
        """The character is heard with `pcm` from sample `at` on. Call before the microphone gets there.

        Args:   pcm: float32 (n,), 16 kHz, full scale 1.0.    at: input sample index at which its first sample is heard.
        Samples before the next microphone block or more than `ahead` behind it are left out: they cannot be kept.
        """
        first = self._next or 0
        start, end = max(at, first), min(at + len(pcm), first + self.rule.ahead)
        if start < end:
            self._coming[np.arange(start, end) % len(self._coming)] = pcm[start - at : end - at]

    def cut(self, at: int) -> None:
        """What was announced from sample `at` on is not heard: a hold or an interruption."""
        first = self._next or 0
        start = max(at, first)
        if start < first + self.rule.ahead:
            self._coming[np.arange(start, first + self.rule.ahead) % len(self._coming)] = 0

    def hear(self, block: Block, at: int) -> EchoReport:
        """One microphone block that starts at sample `at`.

        Args:   block: float32 (512,), full scale 1.0. A block that is not finite counts as silence.
        Raises: ValueError for another length, or a block that goes back; then nothing has changed.
        """
        if block.shape != (BLOCK_SAMPLES,) or (self._next is not None and at < self._next):
            raise ValueError(f"expected {BLOCK_SAMPLES} samples at or after {self._next}, got {block.shape} at {at}")
        self._skip(at)
        out = self._take(at)
        self._next = at + BLOCK_SAMPLES
        heard = block if np.isfinite(block).all() else np.zeros_like(block)
        self._out, self._out_tail = _push(self._out, self._out_tail, out)
        self._mic, self._mic_tail = _push(self._mic, self._mic_tail, heard)
        self._noise = np.minimum(self._noise * 1.004, self._mic[-_HOPS:].min(axis=0)) + 1e-12
        return self._judge()

    def _skip(self, at: int) -> None:
        """Blocks that never came: what was heard meanwhile moves on, the microphone was silent."""
        if self._next is None:
            self._next = at
        limit = at - (self.rule.window + self.rule.lag_max) * HOP_SAMPLES
        if self._next < limit:
            self._coming[:] = 0
            self._next = limit
        while self._next + BLOCK_SAMPLES <= at:
            self._out, self._out_tail = _push(self._out, self._out_tail, self._take(self._next))
            self._mic, self._mic_tail = _push(self._mic, self._mic_tail, np.zeros(BLOCK_SAMPLES, np.float32))
            self._next += BLOCK_SAMPLES

    def _take(self, at: int) -> Block:
        where = np.arange(at, at + BLOCK_SAMPLES) % len(self._coming)
        taken = self._coming[where]
        self._coming[where] = 0
        return taken

    def _judge(self) -> EchoReport:
        rule = self.rule
        loud_out = self._out.sum(axis=1) > rule.floor
        if not loud_out.any():
            return _NOTHING
        loud_mic = self._mic.sum(axis=1) > np.maximum(rule.floor, 4 * self._noise.sum())
        enough = loud_mic.sum() >= rule.frames_min and loud_out.sum() >= rule.frames_min
        lag, agreement = self._best_lag() if enough else (self._lag, 0.0)
        if agreement >= rule.agree:
            self._learn(lag, loud_mic)
        if self._lag >= 0:
            return EchoReport(self._share(self._predicted(self._lag)), agreement, self._lag)
        if enough and agreement < rule.disagree:
            return EchoReport(0.0, agreement, -1)
        return EchoReport(self._share(self._strongest(loud_out)), agreement, -1)

    def _best_lag(self) -> tuple[int, float]:
        """Lag at which the patterns of the window correlate best; a known lag stays while it agrees."""
        window, lags = self.rule.window, self.rule.lag_max + 1
        mic = np.log10(self._mic + self._noise * 2 + 1e-10)
        mic -= mic.mean(axis=0)
        out = np.log10(self._out + self._out.max() * 1e-5 + 1e-10)
        shifted = np.lib.stride_tricks.sliding_window_view(
            out, window, axis=0
        )  # (lags, bands, window), latest lag first
        product = np.tensordot(shifted, mic.T, axes=((1, 2), (0, 1)))
        spread = (shifted**2).sum(axis=(1, 2)) - window * (shifted.mean(axis=2) ** 2).sum(axis=1)
        agreement = (product / np.sqrt(np.maximum(spread * (mic**2).sum(), 1e-12)))[::-1][:lags]
        best = int(agreement.argmax())
        if self._lag >= 0 and agreement[self._lag] > min(self.rule.agree, float(agreement[best]) - 0.05):
            best = self._lag
        return best, float(agreement[best])

    def _learn(self, lag: int, loud_mic: npt.NDArray[np.bool_]) -> None:
        """Take the lag, and the gain of each band: geometric mean over the cells in which the character was loud."""
        sent = self._sent(lag, self.rule.window)
        cells = (sent > sent.max() * 1e-4) & loud_mic[:, None]
        ratio = np.where(cells, np.log(np.maximum(self._mic, 1e-15) / np.maximum(sent, 1e-15)), 0.0)
        count = cells.sum(axis=0)
        overall = ratio.sum() / max(1, count.sum())
        gain = np.exp(np.where(count >= 4, ratio.sum(axis=0) / np.maximum(count, 1), overall))
        gain = np.minimum(gain, self.rule.gain_max * 4)
        fresh = self._lag < 0 or abs(lag - self._lag) > 1
        self._gain = gain if fresh else self._gain + 0.2 * (gain - self._gain)
        self._lag = lag

    def _sent(self, lag: int, frames: int) -> Array:
        """What was heard `lag` frames before the newest `frames` frames. Returns (frames, bands)."""
        end = len(self._out) - lag
        return self._out[end - frames : end]

    def _predicted(self, lag: int) -> Array:
        """Echo in the newest `span` frames: the learned way, one frame early or late, and a tail that halves each
        frame.
        """
        span = self.rule.span
        latest = max(0, lag - 1)
        sent = self._sent(latest, span + 8)
        predicted = np.maximum(sent[6:-2], sent[7:-1])
        predicted = np.maximum(predicted, sent[8:]) if lag > 0 else predicted
        for age in range(1, 6):
            predicted = np.maximum(predicted, sent[6 - age : -2 - age] * 0.5**age)
        return predicted * self._gain * self.rule.margin

    def _strongest(self, loud_out: npt.NDArray[np.bool_]) -> Array:
        """The strongest echo at any lag, as long as the way is unknown: no stronger than what has come back so far.

        An echo adds to whatever else there is, so its gain is at most microphone over loudspeaker. Only microphone
        frames count by which even the latest echo has come: at the start of a reply nothing has come back yet.
        """
        come = loud_out[: self.rule.window]
        # The median, not the mean: a person's own first frames must not make the echo they are taken for possible.
        came = float(np.median(self._mic[come].sum(axis=1))) if come.sum() >= self.rule.frames_min else np.inf
        sent = float(np.median(self._out[loud_out].sum(axis=1)))
        gain = min(self.rule.gain_max, 4 * came / sent)
        return np.broadcast_to(self._out.max(axis=0) * gain * self.rule.margin, (self.rule.span, BAND_COUNT))

    def _share(self, predicted: Array) -> float:
        heard = self._mic[-self.rule.span :]
        explained = np.minimum(heard, predicted + 2 * self._noise)
        return float(explained.sum() / max(1e-12, heard.sum()))


def _bands() -> Array:
    """Overlapping triangles between 150 and 7000 Hz, equally wide on a logarithmic scale. float64 (257, bands)."""
    edges = np.geomspace(150.0, 7000.0, BAND_COUNT + 2)
    hz = np.fft.rfftfreq(_FFT, 1 / INPUT_RATE)[:, None]
    rising = (hz - edges[:-2]) / np.diff(edges)[:-1]
    falling = (edges[2:] - hz) / np.diff(edges)[1:]
    # A triangle narrower than a bin would be empty; it takes the nearest bin.
    triangles = np.clip(np.minimum(rising, falling), 0.0, None)
    nearest = np.abs(hz - edges[1:-1]).argmin(axis=0)
    triangles[nearest, np.arange(BAND_COUNT)] = np.maximum(triangles[nearest, np.arange(BAND_COUNT)], 0.5)
    return np.asarray(triangles)


_WINDOW = np.hanning(_FFT + 1)[:-1].astype(np.float32)
_BANDS = _bands() / float((_WINDOW**2).sum() * _FFT / 2)  #: so that a band holds about its mean square


def _push(frames: Array, tail: Block, block: Block) -> tuple[Array, Block]:
    """Append the frames that a block completes. Returns the frames (oldest dropped) and the new tail of 512 samples."""
    signal = np.concatenate((tail, block))
    cut = np.stack([signal[HOP_SAMPLES * (i + 1) : HOP_SAMPLES * (i + 1) + _FFT] for i in range(_HOPS)])
    spectrum = np.fft.rfft(cut * _WINDOW, axis=1)
    power = (spectrum.real**2 + spectrum.imag**2) @ _BANDS
    return np.concatenate((frames[_HOPS:], power)), signal[-_FFT:]
