"""Signal processing of the pocket voice: from spectra per 12.5 ms frame to samples at 24 kHz.

    S = exp(lh) e^{i pi tanh(theta)} STFT(pulses(F0)) + exp(ln) Z + exp(lr) e^{i phi}

1. 1200-point frames, 300 samples apart, periodic Hann window on both sides, frame k centred on sample 300 k. Block j
   (samples 300 j .. 300 j + 299) is therefore complete when frames j-1, j, j+1 and j+2 are in.
2. Everything depends on the frame's number in its clause, never on how the clause was cut into chunks: the pulses of a
   frame start at a phase that was summed over the whole clause, and the noise of frame k is row k of one table.
3. The formula and its constants are hibari's (Apache-2.0), whose training fixed them.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

SAMPLE_RATE = 24_000
HOP = 300
WINDOW = 4 * HOP
HALF = WINDOW // 2
BINS = WINDOW // 2 + 1
#: Frames after a block's own that it needs.
LOOK_AHEAD = 2
#: Blocks kept between two chunks: one complete, three that later frames still add to.
TAIL = 4

_VOICED_HZ = 40.0
_HARMONIC_HZ_MAX = 11_000.0
_LOG_MAX = 7.0
_NOISE_SEED = 20_261_129


@functools.cache
def window(device: torch.device) -> Tensor:
    # Made on the host and copied: a table that one stream computes may not be there yet when another reads it.
    return torch.hann_window(WINDOW, periodic=True, dtype=torch.float64).to(torch.float32).to(device)


def noise_table(frames: int, device: torch.device) -> Tensor:
    """Complex standard noise (frames, 601), the same in every process: a clause that is made again sounds the same."""
    rng = torch.Generator().manual_seed(_NOISE_SEED)
    return torch.view_as_complex(torch.randn(frames, BINS, 2, generator=rng)).to(device)


def frequency(f0: Tensor, start: int, end: int) -> Tensor:
    """F0 in Hz at every sample of frames `start` to `end`, linear between the frames' middles; (frames, 300)."""
    index = torch.arange(start - 1, end + 1, device=f0.device).clamp(0, len(f0) - 1)
    before, here, after = f0[index].unfold(0, 3, 1).T.unsqueeze(2)
    along = (torch.arange(HOP, device=f0.device, dtype=torch.float32) + 0.5) / HOP - 0.5
    return torch.where(along < 0, here + (before - here) * -along, here + (after - here) * along)


def start_phases(f0: Tensor) -> Tensor:
    """Cycles of the pulse train before each frame, fraction only; float64 (frames,)."""
    cycles = frequency(f0, 0, len(f0)).clamp(min=_VOICED_HZ).double().sum(1) / SAMPLE_RATE
    return torch.cat([cycles.new_zeros(1), cycles.cumsum(0)[:-1]]).frac()


def pulses(f0: Tensor, phases: Tensor, start: int, end: int) -> Tensor:
    """Band-limited pulse train of frames `start` to `end`, 300 samples each, silent where unvoiced.

    Every harmonic below 11 kHz has amplitude 1: sum_{h=1..H} cos(h t) = sin((H + 1/2) t) / (2 sin(t / 2)) - 1/2.
    """
    hertz = frequency(f0, start, end)
    voiced = hertz > _VOICED_HZ
    hertz = hertz.clamp(min=_VOICED_HZ)
    cycles = phases[start:end, None] + hertz.double().cumsum(1) / SAMPLE_RATE
    angle = (cycles.frac() * (2 * torch.pi)).float()
    order = torch.floor(_HARMONIC_HZ_MAX / hertz) + 0.5
    below = 2 * torch.sin(angle / 2)
    # Near a whole cycle the quotient is 0/0; its limit there is the number of harmonics and a half.
    whole = below.abs() <= 2e-3
    train = torch.where(whole, order, torch.sin(order * angle) / below.masked_fill(whole, 1.0)) - 0.5
    return (train * voiced).reshape(-1)


def pulse_spectra(f0: Tensor, phases: Tensor, start: int, end: int) -> Tensor:
    """STFT of the pulse train at frames `start` to `end` (reflected at the clause's ends); complex64 (frames, 601).

    `f0` and `phases` are those of the whole clause.
    """
    low, high = max(0, start - 2), min(len(f0), end + 1)
    train = pulses(f0, phases, low, high)
    left = max(0, HALF - HOP * start)
    right = max(0, HOP * (end - 1) + HALF - HOP * len(f0))
    padded = F.pad(train[None], (left, right), mode="reflect")[0]
    shape = window(f0.device) / (WINDOW / 4)
    spectra: Tensor = torch.fft.rfft(padded.unfold(0, WINDOW, HOP) * shape)
    return spectra


def frames_of(spectra: Tensor, source: Tensor, noise: Tensor) -> Tensor:
    """Windowed signal of each frame, four hops long: (frames, 4, 300).

    Args: spectra (frames, 5, 601) as the network gives them; source, noise complex (frames, 601).
    """
    harmonic, turn, rough, free, phase = spectra.unbind(1)
    whole = source * torch.polar(_bounded_exp(harmonic), torch.pi * torch.tanh(turn))
    whole = whole + noise * _bounded_exp(rough) + torch.polar(_bounded_exp(free), phase)
    signal: Tensor = torch.fft.irfft(whole, n=WINDOW) * window(spectra.device)
    return signal.view(-1, 4, HOP)


def overlap(frames: Tensor, tail: Tensor) -> Tensor:
    """Add up frames p .. T-1 (none: T = p) over what earlier frames left in blocks p-3 .. p.

    Block p-3 is complete; it is carried along because a chunk may end inside it. Returns blocks p-3 .. T, (T-p+4, 300).
    """
    count = len(frames)
    blocks = torch.cat([tail, tail.new_zeros(count, HOP)])
    for part in range(4):
        blocks[1 + part : 1 + part + count] += frames[:, part]
    return blocks


def overlap_weight(start: int, end: int, count: int, device: torch.device) -> Tensor:
    """Sum of the squared windows over blocks `start` to `end` of a clause of `count` frames: (blocks, 300)."""
    squared = window(device).square().view(4, HOP)
    block = torch.arange(start, end, device=device)[:, None]
    frame = block + torch.arange(LOOK_AHEAD, -2, -1, device=device)
    return ((frame >= 0) & (frame < count)).float() @ squared


def _bounded_exp(x: Tensor) -> Tensor:
    """A network that is wrong must be loud, not infinite."""
    return torch.exp(x.clamp(max=_LOG_MAX))
