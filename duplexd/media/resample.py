"""Sound from one sample rate to another, piece by piece: the pieces' sum equals the whole, bit for bit.

1. A windowed sinc in polyphase form; it holds the last `TAPS` input samples, nothing else.
2. After n input samples exactly ceil(n * up / down) output samples have come out: nothing is lost at a seam.
3. The output is late by half the filter: `TAPS / 2` input samples, 0.7 ms at 24 kHz.
"""

from __future__ import annotations

from math import gcd

import numpy as np
from numpy.typing import NDArray

TAPS = 32  #: input samples one output sample is made of, at the lower of the two rates
_WINDOW_BETA = 8.0  # Kaiser: stop band below -80 dB
_PASS = 0.92  #: of the lower Nyquist frequency


class Resampler:
    """One stream, int16 to int16. Rates are those of the wire: 8, 16, 24 or 48 kHz."""

    def __init__(self, source: int, target: int) -> None:
        common = gcd(source, target)
        self._up, self._down = target // common, source // common
        taps = TAPS * max(1, -(-self._down // self._up))
        self._filter = _polyphase(self._up, taps, cutoff=_PASS * min(1.0, self._up / self._down))
        self._taps = taps
        self._past = np.zeros(taps - 1, np.float32)
        self._taken = 0  #: input samples so far, modulo `_down`
        self.is_plain = source == target

    def push(self, pcm: NDArray[np.int16]) -> NDArray[np.int16]:
        """The output that this piece completes, int16. Cost: O(len(pcm))."""
        if self.is_plain or not len(pcm):
            return pcm
        sound = np.concatenate([self._past, pcm.astype(np.float32)])
        first = -(-self._taken * self._up // self._down)  # Outputs before it have left already.
        end = -(-(self._taken + len(pcm)) * self._up // self._down)
        at = np.arange(first, end) * self._down
        newest = at // self._up - self._taken  # index of the newest input sample that each output needs
        windows = np.lib.stride_tricks.sliding_window_view(sound, self._taps)[newest]
        made = np.einsum("ij,ij->i", windows, self._filter[at % self._up], optimize=False)
        self._past = sound[-(self._taps - 1) :]
        self._taken = (self._taken + len(pcm)) % self._down
        return np.asarray(np.clip(np.rint(made), -32768, 32767), np.int16)


def _polyphase(up: int, taps: int, *, cutoff: float) -> NDArray[np.float32]:
    """(up, taps) float32, oldest sample first; each phase sums to one."""
    at = np.arange(taps * up) - (taps * up - 1) / 2
    shape = np.sinc(at * cutoff / up) * np.kaiser(taps * up, _WINDOW_BETA)
    phases = shape.reshape(taps, up).T[:, ::-1]
    return np.asarray(phases / phases.sum(axis=1, keepdims=True), np.float32)
