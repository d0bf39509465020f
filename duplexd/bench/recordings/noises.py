"""Sounds that are not speech, made from a seed: what a voice detector and the ears must not take for words.

All return float32 (samples,) at 16 kHz with a peak of at most 1; scale with `at_snr` or a factor.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

RATE = 16_000

Audio = npt.NDArray[np.float32]
Rng = np.random.Generator


def shaped(samples: int, rng: Rng, *, low: float, high: float, tilt: float = 0.0) -> Audio:
    """Noise between two frequencies; its power falls with frequency to the `tilt` (1: pink)."""
    spectrum = np.fft.rfft(rng.standard_normal(samples))
    hz = np.fft.rfftfreq(samples, 1 / RATE)
    spectrum *= (hz >= low) & (hz <= high)
    spectrum /= np.maximum(hz, 20.0) ** (tilt / 2)
    return _peak(np.fft.irfft(spectrum, samples))


def room(samples: int, rng: Rng) -> Audio:
    """A fan and a street far away: pink noise that swells slowly."""
    swell = 1 + 0.3 * np.sin(2 * np.pi * 0.3 * np.arange(samples) / RATE + rng.uniform(0, 6))
    return _peak(shaped(samples, rng, low=30, high=7000, tilt=1.3) * swell)


def keyboard(samples: int, rng: Rng) -> Audio:
    """Key strokes at four to nine a second, each a click and a softer release."""
    sound = np.zeros(samples)
    at = 0.0
    while (at := at + rng.uniform(0.11, 0.25)) * RATE < samples - 3000:
        for delay, level in ((0.0, 1.0), (rng.uniform(0.06, 0.09), 0.4)):
            click = shaped(800, rng, low=800, high=7000, tilt=0.5) * np.exp(-np.arange(800) / rng.uniform(30, 90))
            start = int((at + delay) * RATE)
            sound[start : start + 800] += click * level * rng.uniform(0.5, 1.0)
    return _peak(sound)


def cough(samples: int, rng: Rng) -> Audio:
    """Bursts like coughs: an abrupt broad-band start that dies within 300 ms, two or three in a row."""
    sound = np.zeros(samples)
    at = 0.2
    while at * RATE < samples - RATE // 2:
        for _ in range(rng.integers(2, 4)):
            length = int(rng.uniform(0.18, 0.32) * RATE)
            envelope = np.minimum(1, np.arange(length) / 80) * np.exp(-np.arange(length) / (length / 4))
            burst = shaped(length, rng, low=300, high=4500, tilt=0.7) * envelope
            start = int(at * RATE)
            sound[start : start + length] += burst[: max(0, samples - start)]
            at += rng.uniform(0.35, 0.5)
            if at * RATE > samples - RATE // 2:
                break
        at += rng.uniform(0.8, 1.5)
    return _peak(sound)


def music(samples: int, rng: Rng) -> Audio:
    """Plucked chords over a bass, eight notes in two seconds."""
    sound = np.zeros(samples)
    for start in range(0, samples, RATE // 4):
        root = 110 * 2 ** (rng.integers(0, 12) / 12)
        for ratio in (1, 2, 2.52, 3):
            length = min(RATE, samples - start)
            t = np.arange(length) / RATE
            tone = sum(np.sin(2 * np.pi * root * ratio * k * t) / k for k in range(1, 6))
            sound[start : start + length] += tone * np.exp(-t * 4) * np.minimum(1, t * 200)
    return _peak(sound)


NOISES: dict[str, Callable[[int, Rng], Audio]] = {"room": room, "keyboard": keyboard, "cough": cough, "music": music}


def at_snr(speech: Audio, noise: Audio, snr_db: float) -> Audio:
    """Speech with noise that lies `snr_db` below it (RMS of the speech where it is above -45 dBFS). Same length."""
    loud = speech[np.abs(speech) > 10 ** (-45 / 20)]
    level = float(np.sqrt((loud**2).mean()) / np.sqrt((noise**2).mean()) * 10 ** (-snr_db / 20))
    return np.asarray(speech + np.resize(noise, len(speech)) * level, np.float32)


def _peak(sound: npt.NDArray[np.float64]) -> Audio:
    return np.asarray(sound / max(1e-9, float(np.abs(sound).max())), np.float32)
