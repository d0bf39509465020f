"""Ears of the face: sound in, features out, for the character's own voice and for the person's, from PCM alone.

1. A mel frame covers 25 ms and ends where its 10 ms hop ends, so no feature looks ahead. At 16 and at 24 kHz the bins
   of 25 ms are 40 Hz wide, and one filter bank serves both.
2. The encoder looks `reach` features back and never ahead. Encoding a window with that much before it therefore equals
   the offline run over everything (DESIGN §5 rule 7: an encoder of O(window), here bounded by its window's length).
3. Sample 0 is the start of the session's timeline; what was before it is silence.

    frame of motion   |      0      |      1      |        40 ms, 640 or 960 samples
    features           |  0  |  1   |  2   |  3   |        20 ms, two mel frames each
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duplexd.models.face.motion import FRAMES_PER_SECOND
from duplexd.streams.stage import Spoken

MELS = 40
MEL_RATE = 100
MELS_PER_FEATURE = 2
#: Features of one frame of motion.
FEATURES_PER_FRAME = MEL_RATE // MELS_PER_FEATURE // FRAMES_PER_SECOND
MELS_PER_FRAME = FEATURES_PER_FRAME * MELS_PER_FEATURE
_BINS = 201  #: up to 8 kHz, 40 Hz apart
_LOWEST_HZ, _HIGHEST_HZ = 60.0, 7600.0
#: Energies below this are silence: about -70 dB of full scale in one band.
FLOOR = 1e-5
_CENTRE, _SPREAD = -7.0, 3.0  #: of log energies, roughly; features start near zero


@functools.cache
def filterbank(device: torch.device) -> Tensor:
    """Triangles on the mel scale, (201, MELS); the area of each is 1, so that bands are comparable.

    Made on the host and copied, as the window is: a table that one CUDA stream computes may not be there yet when
    another reads it.
    """
    lowest, highest = (2595.0 * math.log10(1.0 + hertz / 700.0) for hertz in (_LOWEST_HZ, _HIGHEST_HZ))
    edges = torch.linspace(lowest, highest, MELS + 2)
    hertz = 700.0 * (10.0 ** (edges / 2595.0) - 1.0)
    bins = torch.arange(_BINS) * 40.0
    rising = (bins[:, None] - hertz[:-2]) / (hertz[1:-1] - hertz[:-2])
    falling = (hertz[2:] - bins[:, None]) / (hertz[2:] - hertz[1:-1])
    bank = torch.minimum(rising, falling).clamp(min=0.0)
    return (bank / bank.sum(0, keepdim=True).clamp(min=1e-6)).to(device)


@functools.cache
def _window(length: int, device: torch.device) -> Tensor:
    window = torch.hann_window(length, periodic=True)
    return (window / window.sum()).to(device)


def hop_samples(rate: int) -> int:
    return rate // MEL_RATE


def before_samples(rate: int) -> int:
    """Samples that the first mel frame of a stretch needs from before it."""
    return rate // 40 - hop_samples(rate)


def mel_frames(pcm: Tensor, rate: int) -> Tensor:
    """Normalised log energies of whole hops.

    Args:    pcm (..., before_samples + n * hop) float at full scale 1.
    Returns: (..., n, MELS)
    """
    frames = pcm.unfold(-1, rate // 40, hop_samples(rate)) * _window(rate // 40, pcm.device)
    energy = torch.fft.rfft(frames)[..., :_BINS].abs().square()
    return (torch.log(energy @ filterbank(pcm.device) + FLOOR**2) - 2 * _CENTRE) / (2 * _SPREAD)


SILENCE = (2 * float(torch.log(torch.tensor(FLOOR))) - 2 * _CENTRE) / (2 * _SPREAD)  #: a mel frame of nothing


class AudioEncoder(nn.Module):
    """Mel frames -> features of 20 ms; every layer looks two features back.

    Args:    width: of a feature; layers: convolutions of three features.
    """

    def __init__(self, width: int, *, layers: int = 3) -> None:
        super().__init__()
        self.into = nn.Linear(MELS_PER_FEATURE * MELS, width)
        self.layers = nn.ModuleList([nn.Conv1d(width, width, 3) for _ in range(layers)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(layers)])
        self.out = nn.LayerNorm(width)

    @property
    def reach(self) -> int:
        """Features before a stretch that its first feature depends on."""
        return 2 * len(self.layers)

    def forward(self, mels: Tensor) -> Tensor:
        """(rows, 2 * (reach + n), MELS) -> (rows, n, width)."""
        x = self.into(mels.reshape(len(mels), -1, MELS_PER_FEATURE * MELS))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x[:, 2:] + F.silu(layer(norm(x).transpose(1, 2)).transpose(1, 2))
        features: Tensor = self.out(x)
        return features


def valid_stretch(ring: Tensor, start: int, stop: int, valid: Sequence[tuple[int, int]]) -> Tensor:
    """Samples `start` to `stop` of a ring, silence where nothing valid was written.

    Args:    ring (capacity,): sample i lies at i % capacity; start may be negative.
             valid: half-open ranges of samples that were written and still lie in the ring.
    """
    pcm = ring.new_zeros(stop - start)
    for low, high in valid:
        low, high = max(low, start), min(high, stop)
        if low < high:
            at = torch.arange(low, high, device=ring.device) % len(ring)
            pcm[low - start : high - start] = ring[at]
    return pcm


def spoken_stretch(ring: Tensor, start: int, stop: int, spoken: Sequence[Spoken], rate: int) -> Tensor:
    """Samples `start` to `stop` of the picture's timeline from a ring that is addressed by positions of the voice.

    Two pieces may stand beside each other: a voice that was held goes on later than it was said.
    """
    pcm = ring.new_zeros(stop - start)
    for piece in spoken:
        shift = piece.shift * rate // 48_000
        low, high = (max(start, piece.span.start * rate // 48_000), min(stop, piece.span.end * rate // 48_000))
        if low < high:
            at = torch.arange(low - shift, high - shift, device=ring.device) % len(ring)
            pcm[low - start : high - start] = ring[at]
    return pcm


def mixed(a: Tensor, b: Tensor) -> Tensor:
    """Normalised log energies of two sounds together."""
    both = torch.logaddexp(2 * _SPREAD * a + 2 * _CENTRE, 2 * _SPREAD * b + 2 * _CENTRE)
    return (both - 2 * _CENTRE) / (2 * _SPREAD)
