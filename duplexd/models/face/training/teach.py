"""Teaching: flow matching, distillation to two steps, the refiner. Resumable at any step.

1. `flow`: the generator learns velocities at all noise, with a history at the noise its last step leaves in its keys.
2. `distil`: from the same noise and history, two steps must end where the teacher's seven do. In half of the batches
   the history is what the student itself would have made (on-policy): it learns to go on from its own faults.
3. `refine`: the refiner starts from the flow teacher and learns low noise on a clean history.

A stop at any moment loses at most `SAVE_STEPS` steps: state is written aside and renamed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from duplexd.models.face.checkpoint import FaceWeights
from duplexd.models.face.motion import CHANNELS, SPEECH, Channel
from duplexd.models.face.net import FaceNet, FaceShape, blended, velocity_step
from duplexd.models.face.training.lessons import Clip, Lesson, Lessons, Sampler, statistics

#: Noise times of the generator's two steps; its history is kept at the second.
GENERATOR_TIMES = (1.0, 0.4)
#: Noise time the refiner starts from; its history is kept at 0.
REFINER_TIME = 0.25
TEACHER_TIMES = (1.0, 0.86, 0.71, 0.55, 0.4, 0.26, 0.12, 0.0)
CHUNKS = 10
CLIPS = 12
SAVE_STEPS = 50
_EMA = 0.998


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of every phase, and the seed of everything."""

    flow: int = 2400
    distil: int = 300
    refine: int = 700
    rate: float = 1.5e-3
    lips: float = 3.0  #: weight of the opening of the mouth; of other channels see `weights_of`
    seed: int = 20_261_130


def weights_of(course: Course) -> Tensor:
    """How much an error of each channel counts, (CHANNELS,), 1 on average."""
    weights = torch.ones(CHANNELS)
    # Wrong lips are seen first.
    weights[list(SPEECH)] = 1.6
    weights[Channel.OPENING] = course.lips
    # Blinks are rare, short and missed when they are gone.
    weights[[Channel.LID_LEFT, Channel.LID_RIGHT]] = 2.5
    # So are nods, and they are how a listener is seen to listen; eyes, brows and smiles answer too.
    weights[Channel.PITCH] = 3.0
    weights[[Channel.GAZE_X, Channel.GAZE_Y, Channel.BROW_LEFT, Channel.BROW_RIGHT, Channel.SMILE]] = 1.3
    return weights / weights.mean()


class School:
    """Two networks being taught, and everything needed to go on after a stop.

    Args:    folder: where state and curve are kept.
             after: the folder of an earlier course on the same lessons, from whose ends all networks begin.
    """

    def __init__(self, lessons: Lessons, course: Course, folder: Path, *, after: Path | None = None) -> None:
        self.course, self.folder = course, folder
        self.shape = FaceShape()
        self.mean, self.deviation = statistics(lessons)
        self.lessons = lessons
        self.nets = {name: FaceNet(self.shape) for name in ("flow", "distil", "refine")}
        self.ema = {name: FaceNet(self.shape) for name in self.nets}
        self.nets["flow"].begin(torch.Generator().manual_seed(course.seed))
        self.ema["flow"].load_state_dict(self.nets["flow"].state_dict())
        self.done = dict.fromkeys(self.nets, 0)
        self._weights = weights_of(course)
        self._after = after
        self._optimiser: tuple[str, torch.optim.AdamW] | None = None
        if after is not None:
            earlier = torch.load(after / "state.pt", weights_only=True)
            for name in self.nets:
                self.nets[name].load_state_dict(earlier["ema"][name])
                self.ema[name].load_state_dict(earlier["ema"][name])
        self._resume()

    # Going on -----------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        path = self.folder / "state.pt"
        if not path.exists():
            return
        kept = torch.load(path, weights_only=True)
        if kept["course"] != msgspec.to_builtins(self.course):
            raise SystemExit(f"{path} belongs to another course: {kept['course']}; move it away to begin anew")
        self.done = kept["done"]
        for name in self.nets:
            self.nets[name].load_state_dict(kept["nets"][name])
            self.ema[name].load_state_dict(kept["ema"][name])
        if kept["optimiser"] is not None:
            name, state = kept["optimiser"]
            self._optimiser_of(name).load_state_dict(state)
        print(f"going on after {self.done}", flush=True)

    def _save(self) -> None:
        partial = self.folder / "state.tmp"
        optimiser = None if self._optimiser is None else (self._optimiser[0], self._optimiser[1].state_dict())
        torch.save(
            {
                "course": msgspec.to_builtins(self.course),
                "done": self.done,
                "nets": {name: net.state_dict() for name, net in self.nets.items()},
                "ema": {name: net.state_dict() for name, net in self.ema.items()},
                "optimiser": optimiser,
            },
            partial,
        )
        partial.rename(self.folder / "state.pt")

    def _optimiser_of(self, name: str) -> torch.optim.AdamW:
        if self._optimiser is None or self._optimiser[0] != name:
            self._optimiser = (
                name,
                torch.optim.AdamW(self.nets[name].parameters(), betas=(0.9, 0.98), weight_decay=0.01),
            )
        return self._optimiser[1]

    # Phases -------------------------------------------------------------------------------------------------------

    def teach(self, clock: Callable[[], float]) -> None:
        """All that is left of the course. `clock` gives seconds, for the curve only."""
        steps = {"flow": self.course.flow, "distil": self.course.distil, "refine": self.course.refine}
        lessons = {"flow": self._flow_loss, "distil": self._distil_loss, "refine": self._refine_loss}
        for name, count in steps.items():
            if self.done[name] == 0 and name != "flow" and self._after is None:
                self.nets[name].load_state_dict(self.ema["flow"].state_dict())
                self.ema[name].load_state_dict(self.ema["flow"].state_dict())
            for step in range(self.done[name], count):
                began = clock()
                # A step's randomness is its own: a course that was stopped goes on as if it had not been.
                rng = np.random.default_rng((self.course.seed, list(steps).index(name), step))
                torch.manual_seed(int(rng.integers(1 << 62)))
                sampler = Sampler(self.lessons, self.shape, self.mean, self.deviation, rng)
                rate = self._rate(step, count, first=self.course.rate if name == "flow" else self.course.rate / 3)
                loss = self._learn(name, lessons[name](sampler), rate)
                self.done[name] = step + 1
                self._note(name, step, loss, clock() - began)
                if (step + 1) % SAVE_STEPS == 0 or step + 1 == count:
                    self._save()

    @staticmethod
    def _rate(step: int, count: int, *, first: float) -> float:
        warm = min(1.0, (step + 1) / 60)
        return first * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / count)))

    def _learn(self, name: str, losses: dict[str, Tensor], rate: float) -> dict[str, float]:
        optimiser = self._optimiser_of(name)
        for group in optimiser.param_groups:
            group["lr"] = rate
        total = torch.stack(list(losses.values())).sum()
        if not bool(torch.isfinite(total)):
            raise SystemExit(f"{name}, step {self.done[name]}: the loss is {total}; the last saved state is sound")
        optimiser.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.nets[name].parameters(), 1.0)
        optimiser.step()
        keep = min(_EMA, (self.done[name] + 1) / (self.done[name] + 10))
        with torch.no_grad():
            for slow, fast in zip(self.ema[name].parameters(), self.nets[name].parameters(), strict=True):
                slow.lerp_(fast, 1 - keep)
        return {key: float(value.detach()) for key, value in losses.items()}

    def _note(self, name: str, step: int, loss: dict[str, float], seconds: float) -> None:
        entry: dict[str, Any] = {"phase": name, "step": step, "seconds": round(seconds, 3)}
        entry |= {key: round(value, 5) for key, value in loss.items()}
        with (self.folder / "curve.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")

    # Losses -------------------------------------------------------------------------------------------------------

    def _flow_loss(self, sampler: Sampler) -> dict[str, Tensor]:
        clip = sampler.draw(CLIPS, CHUNKS)
        lesson = Lesson(self.nets["flow"], clip)
        noise = torch.randn_like(clip.motion)
        t_history = GENERATOR_TIMES[-1]
        history = lesson.remember(blended(clip.motion, noise, t_history), t_history)
        other = torch.randn_like(clip.motion)
        # Most steps of a sampler are spent where the noise is high, and all begin at 1.
        t = torch.where(torch.rand(CLIPS, CHUNKS) < 0.15, 1.0, torch.rand(CLIPS, CHUNKS))
        x = blended(clip.motion, other, t[:, :, None, None])
        v = lesson.velocity(x, t)
        clean = x - t[:, :, None, None] * v
        return {
            "history": 0.5 * _error(history, noise - clip.motion, clip, self._weights),
            "flow": _error(v, other - clip.motion, clip, self._weights),
            "speed": 1.5 * _speed_error(clean, clip.motion, clip, self._weights),
        }

    def _refine_loss(self, sampler: Sampler) -> dict[str, Tensor]:
        clip = sampler.draw(CLIPS, CHUNKS)
        lesson = Lesson(self.nets["refine"], clip)
        lesson.remember(clip.motion + 0.01 * torch.randn_like(clip.motion), 0.0)
        # A draft begins where the noisy history let it think it was: the refiner must trust its own, clean one.
        along = torch.linspace(-1, 1, self.shape.frames)[:, None]
        astray = 0.15 * torch.randn(CLIPS, CHUNKS, 1, CHANNELS) + 0.08 * torch.randn(CLIPS, CHUNKS, 1, CHANNELS) * along
        noise = torch.randn_like(clip.motion)
        t = torch.where(torch.rand(CLIPS, CHUNKS) < 0.7, REFINER_TIME, 0.1 + 0.3 * torch.rand(CLIPS, CHUNKS))
        x = blended(clip.motion + astray, noise, t[:, :, None, None])
        clean = x - t[:, :, None, None] * lesson.velocity(x, t)
        return {
            "clean": 10 * _error(clean, clip.motion, clip, self._weights),
            "speed": 10 * _speed_error(clean, clip.motion, clip, self._weights),
        }

    def _distil_loss(self, sampler: Sampler) -> dict[str, Tensor]:
        clip = sampler.draw(CLIPS, CHUNKS)
        student = Lesson(self.nets["distil"], clip)
        with torch.no_grad():
            teacher = Lesson(self.ema["flow"], clip)
            if sampler.rng.random() < 0.5:
                history = rollout(student)
            else:
                history = blended(clip.motion, torch.randn_like(clip.motion), GENERATOR_TIMES[-1])
            teacher.remember(history, GENERATOR_TIMES[-1])
            start = torch.randn_like(clip.motion)
            states = dict(follow(teacher, start, TEACHER_TIMES))
        student.remember(history, GENERATOR_TIMES[-1])
        first, second = GENERATOR_TIMES
        half = velocity_step(start, student.velocity(start, _all(clip, first)), first, second)
        clean = velocity_step(half.detach(), student.velocity(half.detach(), _all(clip, second)), second, 0.0)
        return {
            "half": 4 * _error(half, states[second], clip, self._weights),
            "clean": 4 * _error(clean, states[0.0], clip, self._weights),
            "speed": 6 * _speed_error(clean, states[0.0], clip, self._weights),
        }


def follow(lesson: Lesson, x: Tensor, times: tuple[float, ...]) -> Iterator[tuple[float, Tensor]]:
    """The path of a flow from noise down, with the time of every state."""
    for start, stop in pairwise(times):
        x = velocity_step(x, lesson.velocity(x, _all(lesson.clip, start)), start, stop)
        yield stop, x


def rollout(lesson: Lesson) -> Tensor:
    """What a student makes of a clip from its own history, chunk by chunk: states as its history holds them.

    The first chunk is the clip's own.
    """
    clip = lesson.clip
    first, second = GENERATOR_TIMES
    history = blended(clip.motion, torch.randn_like(clip.motion), second)
    lesson.remember(history, second)
    for chunk in range(1, clip.motion.shape[1]):
        start = torch.randn_like(clip.motion[:, chunk])
        half = velocity_step(start, lesson.one(start, first, chunk, keep=False), first, second)
        lesson.one(half, second, chunk, keep=True)
        history[:, chunk] = half
    return history


def _all(clip: Clip, t: float) -> Tensor:
    return torch.full(clip.kept.shape, t)


def _error(found: Tensor, wanted: Tensor, clip: Clip, weights: Tensor) -> Tensor:
    """Weighted mean square. The first chunk of a clip has no history, which is rare in life: it counts less."""
    squared = ((found - wanted).square() * weights).mean((0, 2, 3))
    squared = torch.cat([0.3 * squared[:1], squared[1:]])
    return squared.mean()


def _speed_error(found: Tensor, wanted: Tensor, clip: Clip, weights: Tensor) -> Tensor:
    """The same of changes from frame to frame, the first from the last frame that was seen before."""
    if wanted is clip.motion:
        last = (clip.kept - 1)[:, :-1, None, None].expand(-1, -1, 1, CHANNELS)
        before = torch.cat([wanted[:, :1, :1], wanted[:, :-1].gather(2, last)], 1)
        found, wanted = torch.cat([before, found], 2), torch.cat([before, wanted], 2)
    # A sample goes on from its own history, which is not the clip's: its first frame has no known change.
    squared = (found.diff(dim=2) - wanted.diff(dim=2)).square()
    return (squared * weights).mean()


def graduate(school: School) -> FaceWeights:
    """Both networks as they are used: slow averages of what was taught."""
    return FaceWeights(
        shape=school.shape,
        generator=school.ema["distil"].eval().requires_grad_(False),
        refiner=school.ema["refine"].eval().requires_grad_(False),
        mean=school.mean,
        deviation=school.deviation,
        generator_times=GENERATOR_TIMES,
        refiner_time=REFINER_TIME,
        card={"course": msgspec.to_builtins(school.course)},
    )
