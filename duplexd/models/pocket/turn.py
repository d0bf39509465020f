"""Has the turn ended? Smart Turn v3.2 (BSD-2-Clause) judges the last 8 s of the person's audio.

The network is a small Whisper encoder with a pooled head, int8; its output is a probability already. It always costs
the same (50 to 110 ms of one core), however short the audio, so it is asked a few times a pause: see media/endpoint.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from duplexd.media.network import load_network
from duplexd.models.pocket.ears import ArenaView, read_ring
from duplexd.models.pocket.features import log_mel
from duplexd.streams.stage import CostModel, Failed, JudgeJob, JudgeResult, PayloadKind, Result, Role, StageSpec


class TurnJudge:
    """Raises WeightsError when the file cannot be loaded."""

    def __init__(self, model: Path, *, threads: int = 1) -> None:
        self._network = load_network(model, called="the turn judge", threads=threads)

    def probability(self, audio: npt.NDArray[np.float32]) -> float:
        """Probability that the turn has ended at the end of `audio` (16 kHz, full scale 1.0; the last 8 s count)."""
        return float(self._network.run(None, {"input_features": log_mel(audio)[None]})[0][0, 0])


class Turn:
    """Stage: the end of the person's audio -> probability that the turn has ended. A bad row fails alone."""

    def __init__(self, judge: TurnJudge, *, lane: str = "judge") -> None:
        self._judge = judge
        self.spec = StageSpec(
            name="judge",
            role=Role.JUDGE,
            lane=lane,
            takes=PayloadKind.AUDIO,
            gives=PayloadKind.MEDIA_FEATURE,
            cost=CostModel(fixed_us=90_000),
            load=0.02,
        )

    def load(self, arena: ArenaView) -> None:
        self._ring = arena.field("ingest", "pcm")

    def run(self, jobs: Sequence[JudgeJob], media: object) -> list[Result]:
        return [self._run(job) for job in jobs]

    def _run(self, job: JudgeJob) -> Result:
        try:
            audio = read_ring(self._ring, job.ring, job.start, job.samples)
            return JudgeResult(job.session, self._judge.probability(audio))
        except ValueError as fault:
            return Failed(job.session, str(fault))
