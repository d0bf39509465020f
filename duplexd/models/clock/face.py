"""The word clock's face: a grey picture that is white while a word sounds. The instrument for sound against picture.

1. A frame is white when the tone of a word fills more than 0.6 of it: a flash begins within 0.6 frames of its tone.
2. Keys are the numbers of frames: a stage that reads a window in which frames do not rise, or that goes beyond its own
   chunk, says so. Motion is what share of a frame sounds.
3. The same stages, histories and rings as a drawn face has, without a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duplexd.models.clock.flash import ANCHOR_TOKENS, FRAME, FRAMES, RING_SAMPLES, SIDE, STAGES
from duplexd.models.clock.stages import OUTPUT_RATE, ClockStage
from duplexd.streams.stage import (
    DecodeJob,
    DecodeResult,
    Failed,
    MotionJob,
    MotionResult,
    OverhearJob,
    OverhearResult,
    ReferenceJob,
    ReferenceResult,
    Result,
    Stage,
)
from duplexd.units import Ticks, samples_from_ticks

GREY, WHITE = 110, 235  #: luma, limited range
_LOUD = 0.03  #: of full scale; a tone of a word has 0.25 and more
_WINDOW = OUTPUT_RATE // 500  # 2 ms


def build() -> dict[str, Stage]:
    kinds = {"overhear": Overhear, "generate": Generator, "refine": Refiner, "decode": Flash}
    return {spec.name: kinds[spec.name](spec) for spec in STAGES}


class Overhear(ClockStage):
    """Own voice from its output slot into the session's ring."""

    def run(self, jobs: Sequence[OverhearJob], media: Any) -> list[Result]:
        ring = self.arena.field("voice", "pcm")
        for job in jobs:
            pcm = torch.from_numpy(media.read_output(job.slot, job.samples).astype(np.float32) / 32768.0)
            start = samples_from_ticks(job.start, OUTPUT_RATE)
            at = torch.arange(start, start + job.samples) % RING_SAMPLES
            ring[job.ring].index_copy_(0, at.to(ring.device), pcm.to(ring.device))
        return [OverhearResult(job.session, job.samples) for job in jobs]


class _Motion(ClockStage):
    """What generator and refiner share: windows whose frames must rise."""

    partition = ""

    def run(self, jobs: Sequence[Any], media: Any) -> list[Result]:
        return [self._refer(job) if isinstance(job, ReferenceJob) else self._chunk(job) for job in jobs]

    def _refer(self, job: ReferenceJob) -> Result:
        self.arena.field(self.partition, "frame")[job.slots[0], :ANCHOR_TOKENS] = torch.arange(-ANCHOR_TOKENS, 0)
        return ReferenceResult(job.session)

    def _chunk(self, job: MotionJob) -> Result:
        keys = self.arena.field(self.partition, "frame")
        first = job.start // FRAME
        pairs = list(zip(job.window[:-1], job.tokens[:-1], strict=True))
        seen = torch.cat([keys[slot, :tokens] for slot, tokens in pairs])
        if job.start % FRAME or bool((seen[1:] <= seen[:-1]).any()) or int(seen[-1]) >= first:
            return Failed(job.session, f"chunk at frame {job.start / FRAME} reads frames {seen.tolist()}")
        keys[job.window[-1], :FRAMES] = torch.arange(first, first + FRAMES)
        self._make(job)
        return MotionResult(job.session, FRAMES)

    def _make(self, job: MotionJob) -> None:
        raise NotImplementedError


class Generator(_Motion):
    partition = "noisy"

    def _make(self, job: MotionJob) -> None:
        ring = self.arena.field("voice", "pcm")[job.voice]
        shares = [_sounding(ring, job, Ticks(job.start + frame * FRAME)) for frame in range(FRAMES)]
        self.arena.field("motion", "draft")[job.motion] = torch.tensor(shares)


class Refiner(_Motion):
    partition = "clean"

    def _make(self, job: MotionJob) -> None:
        self.arena.field("motion", "motion")[job.motion] = self.arena.field("motion", "draft")[job.motion]


def _sounding(ring: Tensor, job: MotionJob, start: Ticks) -> float:
    """Share of one frame in which a tone sounds."""
    samples = samples_from_ticks(FRAME, OUTPUT_RATE)
    pcm = np.zeros(samples, np.float32)
    for piece in job.spoken:
        low, high = max(start, piece.span.start), min(start + FRAME, piece.span.end)
        if low < high:
            begin = samples_from_ticks(low - piece.shift, OUTPUT_RATE)
            count = samples_from_ticks(high - low, OUTPUT_RATE)
            at = samples_from_ticks(low - start, OUTPUT_RATE)
            stretch = torch.arange(begin, begin + count, device=ring.device) % RING_SAMPLES
            pcm[at : at + count] = ring[stretch].cpu().numpy()
    levels = np.abs(pcm[: samples // _WINDOW * _WINDOW].reshape(-1, _WINDOW)).max(1)
    return float((levels > _LOUD).mean())


class Flash(ClockStage):
    """Shares to pictures: all grey, or all white."""

    def run(self, jobs: Sequence[DecodeJob], media: Any) -> list[Result]:
        return [self._draw(job, media) for job in jobs]

    def _draw(self, job: DecodeJob, media: Any) -> Result:
        if not 0 <= job.first < job.stop <= FRAMES or job.stride < 1:
            return Failed(job.session, f"frames {job.first} to {job.stop} of {FRAMES}, every {job.stride}th")
        shares = self.arena.field("motion", "motion")[job.motion].tolist()
        frames = range(job.first, job.stop, job.stride)
        for at, frame in enumerate(frames):
            picture = np.full((SIDE * 3 // 2, SIDE), 128, np.uint8)
            # More than half: a gap of one frame's length that lies over two halves must darken, not vanish.
            picture[:SIDE] = WHITE if shares[frame] > 0.6 else GREY
            media.write_picture(job.slot, at, picture)
        return DecodeResult(job.session, len(frames))
