"""Log-mel features as the end-of-turn network was trained on: Whisper's, 80 bands, 8 s, right-aligned.

1. Frames of 400 samples every 160 at 16 kHz, periodic Hann, reflected at both ends; the last frame is dropped.
2. Slaney mel bands, log10, floored at the loudest cell less 8, then (x + 4) / 4 (Radford et al. 2022; the figures equal
   transformers' WhisperFeatureExtractor with do_normalize to 1e-4).
3. The waveform is normalised over the whole 8 s, padding included. That only scales the spectrum and changes bins 0 and
   1 by a constant, so frames that hold nothing but padding need no transform: the cost is O(audio), not O(8 s).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

RATE = 16_000
WINDOW_SAMPLES = 128_000  #: 8 s
FRAME_SAMPLES = 400
HOP_SAMPLES = 160
FRAME_COUNT = WINDOW_SAMPLES // HOP_SAMPLES
BAND_COUNT = 80
_HALF = FRAME_SAMPLES // 2
_POWER_MIN = 1e-10
_VARIANCE_MIN = 1e-7
_RANGE = 8.0  #: powers of ten below the loudest cell

Array = npt.NDArray[Any]


def _mel_from_hz(hz: Array) -> Array:
    """Slaney's scale: linear to 1 kHz (15 mel), then 27 mel for each factor of 6.4."""
    return np.where(hz < 1000.0, hz * 3 / 200, 15 + 27 * np.log(np.maximum(hz, 1.0) / 1000) / np.log(6.4))


def _hz_from_mel(mel: Array) -> Array:
    return np.where(mel < 15.0, mel * 200 / 3, 1000 * np.exp((mel - 15) * np.log(6.4) / 27))


def mel_bands(bands: int = BAND_COUNT) -> Array:
    """Triangles of unit area over the bins of a frame. Returns float64 (bands, 201)."""
    edges = _hz_from_mel(np.linspace(0.0, float(_mel_from_hz(np.array(RATE / 2))), bands + 2))
    bins = np.linspace(0.0, RATE / 2, _HALF + 1)
    rising = (bins - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - bins) / np.diff(edges)[1:, None]
    triangles: Array = np.clip(np.minimum(rising, falling), 0.0, None) * (2.0 / (edges[2:] - edges[:-2]))[:, None]
    return triangles


_WINDOW = np.hanning(FRAME_SAMPLES + 1)[:-1]
_WINDOW_SPECTRUM = np.round(np.fft.rfft(_WINDOW).real)  #: 200, -100, then zeros
_BANDS = mel_bands()


def log_mel(audio: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Features of the last 8 s, padded with silence on the left.

    Args:    audio: float32 (n,), 16 kHz, full scale 1.0; of more than 8 s the last 8 s count.
    Returns: float32 (80, 800).
    Raises:  ValueError when it is not mono or holds a value that is not finite.
    """
    if audio.ndim != 1 or not np.isfinite(audio).all():
        raise ValueError(f"features need finite mono audio, got shape {audio.shape}")
    heard = audio[-WINDOW_SAMPLES:].astype(np.float64)
    mean = heard.sum() / WINDOW_SAMPLES
    variance = (heard @ heard) / WINDOW_SAMPLES - mean * mean
    scale = 1 / np.sqrt(variance + _VARIANCE_MIN)
    power = np.empty((BAND_COUNT, FRAME_COUNT))
    silent = _silent_frames(len(heard))
    offset = mean * scale * _WINDOW_SPECTRUM
    level = _BANDS @ (offset * offset)
    np.maximum(level, _POWER_MIN, out=level)
    power[:, :silent] = level[:, None]
    if silent < FRAME_COUNT:
        spectrum = np.fft.rfft(_frames(heard, silent) * (_WINDOW * scale), axis=-1)
        spectrum[:, :2] -= offset[:2]  # a constant reaches no other bin of a Hann window
        np.maximum(_BANDS @ (spectrum.real**2 + spectrum.imag**2).T, _POWER_MIN, out=power[:, silent:])
    logs = np.log10(power)
    np.maximum(logs, logs.max() - _RANGE, out=logs)
    return ((logs + 4.0) / 4.0).astype(np.float32)


def _silent_frames(samples: int) -> int:
    """Frames at the start of the window that see padding only; 0 or at least 2, so that none needs reflection."""
    silent = (WINDOW_SAMPLES - samples - _HALF) // HOP_SAMPLES + 1
    return min(silent, FRAME_COUNT) if silent >= 2 else 0


def _frames(heard: Array, first: int) -> Array:
    """Frames `first`.. of the padded window, before normalisation. Returns float64 (800 - first, 400)."""
    start = max(0, first * HOP_SAMPLES - _HALF)  # of the first sample needed, within the 8 s window
    signal = np.zeros(WINDOW_SAMPLES - start)
    signal[len(signal) - len(heard) :] = heard
    head = signal[_HALF:0:-1] if first == 0 else signal[:0]  # the window's start is reflected, as its end is
    padded = np.concatenate((head, signal, signal[-2 : -_HALF - 2 : -1]))
    return np.lib.stride_tricks.sliding_window_view(padded, FRAME_SAMPLES)[::HOP_SAMPLES][: FRAME_COUNT - first]
