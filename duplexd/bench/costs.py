"""`duplexd bench costs`: what every stage of the pocket model costs on this machine, as a calibration for `simulate`.

1. The real stages run inside the sample-accurate simulated world: people speak and type, so the mix of launches is one
   that conversations make. Only `run` is timed, by the thread's own processor time, one torch thread.
2. Each stage's times are fitted with non-negative coefficients of rows, units and steps (see `simulation/model.py` for
   what they count). The spread that is left is its `sigma`.
3. What is fitted describes this machine, alone and warm. Two stages that run at once on two cores are slower than that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import log
from random import Random
from statistics import median, pstdev
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from duplexd.bench import recordings
from duplexd.channel import MediaShape
from duplexd.clock import thread_time
from duplexd.engine.loop import drive
from duplexd.engine.process import EngineConfig, core_of, layout_of, load_plan, stages_of
from duplexd.engine.simulator import SimWorld
from duplexd.ids import SessionId
from duplexd.memory.layout import PartitionKind
from duplexd.simulation.model import sizes_of
from duplexd.streams.stage import Role, Stage, StageSpec, TalkResult
from duplexd.units import NANOS_PER_SECOND, Nanos, ms_from_ticks

IDLE_BELOW = 0.1  #: of the median: a launch that did nothing
SESSIONS = 3
FRAME_MS = 25  #: two hops of the vocoder, of 12.5 ms
QUESTIONS = 12  #: spoken, by all sessions in turn
READY_S = 20.0  #: virtual time by which the anchor is prefilled and people may come
EVERY_S = 9.0
TYPED = (
    "What do you do when it rains all day?",
    "Tell me about the place where you grew up, and what you liked about it.",
    "Which of your friends would you take with you on a long journey, and why?",
)
#: Names of the stages a calibration asks for, by role.
NAMES = {Role.COPY: "copy", Role.LISTEN: "ears", Role.THINK: "think", Role.TALK: "talk", Role.RENDER: "render"}


class Sample(msgspec.Struct, frozen=True):
    """One timed launch."""

    rows: int
    units: int
    steps: int
    us: float


class Fit(msgspec.Struct, frozen=True):
    """Microseconds, none negative, and the lognormal spread around them."""

    fixed_us: int
    per_row_us: int
    per_unit_us: int
    per_step_us: int
    sigma: float
    launches: int
    idle_launches: int  #: of them, launches that returned at once and are not fitted
    median_us: int


class Timed:
    """A stage whose launches are timed."""

    def __init__(self, stage: Stage, size: Any) -> None:
        self.spec: StageSpec = stage.spec
        self.samples: list[Sample] = []
        self.words = 0
        self.spoken_ms = 0.0
        self._stage = stage
        self._size = size

    def load(self, arena: Any) -> None:
        self._stage.load(arena)

    def run(self, jobs: Sequence[Any], media: Any) -> list[Any]:
        began = thread_time()
        results = self._stage.run(jobs, media)
        took = thread_time() - began
        if self._size is not None:
            units, steps = self._size(jobs, results)
            self.samples.append(Sample(len(jobs), units, steps, took / 1000))
        for result in results:
            if isinstance(result, TalkResult):
                self.words += len(result.words)
                self.spoken_ms += ms_from_ticks(result.length)
        return results


def bench() -> dict[str, Any]:
    """Run conversations and fit. Raises WeightsError without the pocket weights."""
    import torch

    from duplexd.memory.arena import Arena

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    plan = load_plan("pocket", {})
    layout = layout_of(plan, SESSIONS)
    media = MediaShape(in_slots=64, in_samples=512, out_slots=16 * SESSIONS, out_samples=plan.sample_rate)
    config = EngineConfig(model="pocket", media=media, sessions_max=SESSIONS)
    counted = sizes_of(FRAME_MS)
    stages = {
        name: Timed(stage, counted.get(stage.spec.role)) for name, stage in stages_of(plan, layout, SESSIONS).items()
    }
    arena = Arena(layout)
    for stage in stages.values():
        stage.load(arena)
    world = SimWorld(stages=stages, rng=Random(1), until=_seconds(READY_S + EVERY_S * (QUESTIONS + len(TYPED) + 2)))
    _converse(world, plan.sample_rate)
    drive(core_of(config, plan, layout), world)
    pages = next(spec for spec in layout.partitions.values() if spec.kind is PartitionKind.PAGES)
    talk = next(stage for stage in stages.values() if stage.spec.role is Role.TALK)
    return {
        "stages": {
            NAMES[stage.spec.role]: {
                **msgspec.to_builtins(fit(stage.samples)),
                "batch_max": stage.spec.batch_max,
                "load": stage.spec.load,
            }
            for stage in stages.values()
            if stage.spec.role in NAMES
        },
        "frame_ms": FRAME_MS,
        "word_ms": round(talk.spoken_ms / max(1, talk.words)),
        "chunk_ms": round(ms_from_ticks(plan.chunk_ramp[-1])),
        "chunk_ramp_ms": [round(ms_from_ticks(length)) for length in plan.chunk_ramp],
        "think_steps": plan.think_steps,
        "context_tokens_max": plan.context_tokens_max,
        "token_bytes": pages.row_bytes,
    }


def _converse(world: SimWorld, rate: int) -> None:
    """People speak one after the other, then all type at once, so that think steps share launches."""
    questions = recordings.load("question")[:QUESTIONS]
    people = [world.connect(SessionId(1 + n), at=_seconds(READY_S), rate=rate) for n in range(SESSIONS)]
    for number, question in enumerate(questions):
        people[number % SESSIONS].say(question.pcm(), at=_seconds(READY_S + 1 + number * EVERY_S))
    for number, text in enumerate(TYPED):
        for person in people:
            at = _seconds(READY_S + 1 + (len(questions) + number) * EVERY_S)
            person.type(text, at=at, key=f"{person.session}-{number}")


def fit(samples: Sequence[Sample]) -> Fit:
    """Least squares of non-negative coefficients; a column that does not vary goes into the fixed cost."""
    if not samples:
        raise ValueError("nothing can be fitted to no launch at all")
    usual = median(sample.us for sample in samples)
    # Ears that find no speech in their window return at once: that is no cost of listening.
    launched, samples = len(samples), [sample for sample in samples if sample.us >= IDLE_BELOW * usual]
    columns = {
        "fixed_us": [1.0] * len(samples),
        "per_row_us": [float(sample.rows) for sample in samples],
        "per_unit_us": [float(sample.units) for sample in samples],
        "per_step_us": [float(sample.steps) for sample in samples],
    }
    varying = {n: c for n, c in columns.items() if n == "fixed_us" or min(c) < max(c)}
    took = np.array([sample.us for sample in samples])
    found = non_negative(np.array(list(varying.values())).T, took)
    costs = dict.fromkeys(columns, 0) | {n: round(v) for n, v in zip(varying, found, strict=True)}
    means = [max(1.0, sum(costs[n] * columns[n][i] for n in columns)) for i in range(len(samples))]
    spread = [log(max(1.0, sample.us) / expected) for sample, expected in zip(samples, means, strict=True)]
    return Fit(
        **costs,
        sigma=round(min(1.0, pstdev(spread)), 3) if len(spread) > 1 else 0.0,
        launches=launched,
        idle_launches=launched - len(samples),
        median_us=round(usual),
    )


def non_negative(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> list[float]:
    """Least squares with coefficients of at least zero, relative errors weighing alike.

    With four columns the active sets can be tried out: of all subsets whose solution is positive, the best one wins.
    """
    weights = 1.0 / np.maximum(1.0, target)
    a, b = matrix * weights[:, None], target * weights
    count = matrix.shape[1]
    best, best_error = [0.0] * count, float(b @ b)
    for mask in range(1, 1 << count):
        chosen = [column for column in range(count) if mask >> column & 1]
        solution, *_ = np.linalg.lstsq(a[:, chosen], b, rcond=None)
        error = float(((a[:, chosen] @ solution - b) ** 2).sum())
        if (solution >= 0).all() and error < best_error - 1e-12:
            best, best_error = [0.0] * count, error
            for column, value in zip(chosen, solution, strict=True):
                best[column] = float(value)
    return best


def toml_of(report: dict[str, Any]) -> str:
    """A calibration file. Every stage is on the machine's cores, of which one launch takes one."""
    frame = report["frame_ms"]
    word = max(1, round(report["word_ms"] / frame)) * frame
    speech = {
        "frame_ms": frame,
        "word_ms": word,
        "first_clause_words": 4,
        "clause_words": 6,
        "chunk_ms": report["chunk_ms"] // frame * frame,
        "chunk_ramp_ms": [ms // frame * frame for ms in report["chunk_ramp_ms"]],
        "think_steps": report["think_steps"],
        "reply_words_max": 200,
        "context_tokens_max": report["context_tokens_max"],
        "token_bytes": report["token_bytes"],
        "copy_bytes_per_second": 5e9,
    }
    fitted = (
        "Measured by `duplexd bench costs` over conversations with this machine's pocket model; nothing in it is "
        "published. Clauses of four, then six words are about what its replies have; the turn judge is left out."
    )
    lines = [
        'name = "pocket"',
        'source = "duplexd bench costs: the default model on the CPU it was run on, one torch thread a lane"',
        f"fitted = {json.dumps(fitted)}",
        "",
        "[capacities]",
        "cores = 2.0",
        "",
        "[speech]",
        *(f"{name} = {value}" for name, value in speech.items()),
    ]
    for name, costs in report["stages"].items():
        kept = ("fixed_us", "per_row_us", "per_unit_us", "per_step_us", "sigma", "batch_max", "load")
        lines += ["", f"[stages.{name}]", 'device = "cores"', *(f"{key} = {costs[key]}" for key in kept)]
    return "\n".join(lines) + "\n"


def _seconds(value: float) -> Nanos:
    return Nanos(round(value * NANOS_PER_SECOND))
