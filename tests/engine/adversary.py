"""The word clock's engine on adversary lanes: of all orders its fences allow, one that hurts.

1. A launch runs on an `AdversaryLane`; each launch lends the adversary one step, some time later. What it starves runs
   late, after other lanes have worked and the core has decided other things.
2. What the core frees is filled with NaN at once, so that who still reads it speaks of it.
3. `Watch` knows what every launch that has not ended names, and says which of it was freed under its feet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np

from duplexd.engine.simulator import SimWorld
from duplexd.engine.work import Launch, StageFailed, StageFinished
from duplexd.ids import WorkId
from duplexd.memory.guards import Freed
from duplexd.streams.executor import Executor
from duplexd.streams.lane import Adversary, AdversaryLane, Fences
from duplexd.streams.stage import (
    CopyJob,
    DecodeJob,
    Failed,
    GenerateJob,
    JudgeJob,
    ListenJob,
    MotionJob,
    MoveJob,
    OverhearJob,
    ReferenceJob,
    RefineJob,
    RenderJob,
    Stage,
    TalkJob,
    ThinkJob,
)
from duplexd.units import NANOS_PER_MS, Nanos
from tests.engine.simulation import Simulation

#: How much later than it would end a launch may be allowed to run; most are not.
DELAYS_MS = (0, 0, 0, 3, 15, 60, 120)

Place = tuple[str, int]  #: a partition and a slot of it


class Watch:
    """Which slots running launches name, and which of them were freed meanwhile."""

    def __init__(self, *, page_tokens: int) -> None:
        self.wrong: list[str] = []
        self.broken: list[str] = []  #: what a stage said it could not do with what it read
        self._page_tokens = page_tokens
        self._running: dict[WorkId, tuple[str, frozenset[Place]]] = {}

    def begun(self, launch: Launch) -> None:
        named = frozenset(place for job in launch.jobs for place in named_by(job, launch.stage, self._page_tokens))
        self._running[launch.work] = (launch.stage, named)

    def ended(self, work: WorkId) -> None:
        del self._running[work]

    def freed(self, partition: str, slots: Sequence[int]) -> None:
        places = {(partition, int(slot)) for slot in slots}
        for work, (stage, named) in self._running.items():
            if hit := sorted(places & named):
                self.wrong.append(f"{stage} {work} still uses {hit[0][0]} {[slot for _, slot in hit]}")


def named_by(job: Any, stage: str, page_tokens: int) -> Iterator[Place]:
    """Every slot of the arena that a job reads or writes; token slots of pages."""
    match job:
        case CopyJob() | ListenJob() | JudgeJob():
            yield "ingest", job.ring
        case ThinkJob():
            yield from (("pages", slot) for slot in np.frombuffer(job.slots, np.int64).tolist())
        case TalkJob():
            yield "latents", job.latents
        case RenderJob():
            yield from (("latents", job.latents), ("state", job.state))
        case MoveJob():
            tokens = ((page * page_tokens, page_tokens) for page, _ in job.moves)
            yield from (("pages", slot) for first, count in tokens for slot in range(first, first + count))
        case OverhearJob():
            yield "voice", job.ring
        case ReferenceJob():
            yield from (("noisy" if stage == "generate" else "clean", slot) for slot in job.slots)
        case GenerateJob() | RefineJob():
            yield from _motion(job, "noisy" if isinstance(job, GenerateJob) else "clean")
        case DecodeJob():
            yield "motion", job.motion
        case _:
            raise TypeError(f"nobody has said what {type(job).__name__} names in the arena")


def _motion(job: MotionJob, history: str) -> Iterator[Place]:
    yield from ((history, slot) for slot in job.window)
    yield from (("motion", job.motion), ("voice", job.voice), ("ingest", job.ring))


class AdversaryWorld(SimWorld):
    """Virtual time in which the adversary chooses what ends when."""

    def __init__(
        self,
        *,
        stages: Mapping[str, Stage],
        rng: Random,
        until: Nanos,
        fails: Callable[[Launch], str] | None = None,
        watch: Watch,
        enemy: Adversary,
    ) -> None:
        super().__init__(stages=stages, rng=rng, until=until, fails=fails)
        self.watch = watch
        self._enemy = enemy
        fences, names = Fences(), dict.fromkeys(stage.spec.lane for stage in stages.values())
        lanes = {name: AdversaryLane(name, fences, adversary=enemy, now=self.now) for name in names}
        self._executor = Executor(stages, lanes, self.media, now=self.now)
        self._executor.open()

    def close(self) -> None:
        self._executor.close(within=Nanos(0))

    def _launch(self, launch: Launch, now: Nanos) -> None:
        self.launches.append((now, launch))
        self.watch.begun(launch)
        self._executor.launch(launch.work, launch.stage, launch.jobs)
        cost = self.stages[launch.stage].spec.cost.predict_us(rows=len(launch.jobs), units=1) * 1000
        self.at(now + cost + self._enemy.rng.choice(DELAYS_MS) * NANOS_PER_MS, self._step)

    def _step(self) -> StageFinished | StageFailed:
        """As many steps are lent as work is queued, and one lane in idleness always may run: each ends something."""
        (end,) = self._executor.completions()
        self.watch.ended(end.work)
        if end.failure is not None:
            self.watch.broken.append(f"{end.stage} {end.work}: {end.failure!r}")
            return StageFailed(end.work, repr(end.failure))
        self.watch.broken += [f"{end.stage} {end.work}: {r.reason}" for r in end.results if isinstance(r, Failed)]
        return StageFinished(end.work, end.results, end.started, end.ended)


class Adversarial(Simulation):
    """One engine whose lanes the adversary runs. `forgets`: (ledger, method) whose `after` never reaches the ledger."""

    def __init__(self, *, seed: int, forgets: tuple[str, str] | None = None, **rest: Any) -> None:
        self.freed: Freed = lambda partition, slots: None  # Until there is an arena.

        def world(**given: Any) -> AdversaryWorld:
            self.watch = Watch(page_tokens=self.arena.layout.partitions["pages"].page_tokens)
            self.enemy = Adversary(Random(seed), fill=self.arena.fill_nan)
            self.freed = self._freed
            return AdversaryWorld(**given, watch=self.watch, enemy=self.enemy)

        super().__init__(seed=seed, world=world, freed=lambda *what: self.freed(*what), **rest)
        if forgets is not None:
            self._forget(*forgets)

    def _freed(self, partition: str, slots: Sequence[int]) -> None:
        self.watch.freed(partition, slots)
        self.enemy.freed(partition, slots)

    def _forget(self, ledger: str, method: str) -> None:
        stores = self.core.stores
        owner = getattr(stores, ledger, None) or getattr(stores.face, ledger)
        kept = getattr(owner, method)
        setattr(owner, method, lambda *args, after=None, **named: kept(*args, after=None, **named))

    def run(self) -> None:
        super().run()
        assert isinstance(self.world, AdversaryWorld)
        self.world.close()
