"""Rules that the face of any family keeps, for the suite of a plan (contract.py): overhear, generate, refine, decode.

One session makes its first chunk; a second one's slots are looked at all the while. What a family must keep beyond that
(chunks against the whole, causality) needs its own ear: pocket's suite is models/face/contract.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from duplexd.ids import ChunkId, Epoch, FenceId, SessionId, SlotId
from duplexd.memory.arena import Arena
from duplexd.memory.histories import GENERATE, REFINE, Histories, HistoryStage
from duplexd.memory.ledger import SlotLedger
from duplexd.memory.window import Window
from duplexd.models.contract import MASKED, REDO, WHOLE, Bytes, Finding, Memory, names, result_of, same, tried
from duplexd.streams.graph import FacePlan, ModelPlan
from duplexd.streams.stage import (
    DecodeJob,
    GenerateJob,
    OverhearJob,
    ReferenceJob,
    RefineJob,
    Role,
    Spoken,
    Stage,
)
from duplexd.units import Span, Ticks, ticks_from_samples

_SAMPLES = 8192  #: of own voice: more than a third of a second at any rate a voice has
_CHUNK = ChunkId(1)


class FaceRules:
    """One plan with a face; its stages are loaded. Raises AssertionError where the plan has none."""

    def __init__(self, plan: ModelPlan, arena: Arena, stages: dict[str, Stage]) -> None:
        assert plan.face is not None, f"model {plan.name} has no face"
        self.plan, self.face, self.arena, self.memory = plan, plan.face, arena, Memory()
        self._stages = {role: stages[plan.need(role).name] for role in _RULES}
        noisy, clean = (
            SlotLedger(arena.layout.partitions[name], passed=lambda fence: True) for name in ("noisy", "clean")
        )
        self._histories = Histories(noisy, clean, SessionId(1), self.face.history)
        self.memory.slots = {0: np.random.default_rng(7).integers(-9000, 9000, _SAMPLES).astype(np.int16)}
        for at in range(8):
            self.memory.slots[1 + at] = self.memory.slots[0][at * _SAMPLES // 8 : (at + 1) * _SAMPLES // 8]

    def findings(self) -> list[Finding]:
        """In the order in which a chunk passes the stages: each is tried on what the one before it made."""
        return [
            tried(self.plan.need(role).name, rule, lambda attempt=attempt: attempt(self))  # type: ignore[misc]
            for role, attempts in _RULES.items()
            for rule, attempt in attempts
        ]

    # Overhear

    def overhear_whole(self) -> None:
        self._hear(1, 0, at=0)
        for piece in range(8):
            self._hear(2, 1 + piece, at=piece * _SAMPLES // 8)
        ring = self.arena.field("voice", "pcm")
        same(ring[0, :_SAMPLES], ring[1, :_SAMPLES], "one piece and eight")

    def overhear_masked(self) -> None:
        before = Bytes(self.arena)
        self.memory.slots[0] = -self.memory.slots[0]
        self._hear(1, 0, at=0)
        before.check_only({"voice": {0}})

    def _hear(self, session: int, slot: int, *, at: int) -> None:
        start, samples = ticks_from_samples(at, self.plan.sample_rate), len(self.memory.slots[slot])
        job = OverhearJob(*names(session), slot, SlotId(session - 1), start, samples)
        result_of(self._stages[Role.OVERHEAR], job, self.memory)

    # Generate and refine

    def generate_masked(self) -> None:
        self._refer(Role.GENERATE, GENERATE)
        self._refer(Role.REFINE, REFINE)
        window = self._histories.begin(_CHUNK, Epoch(0), fence=FenceId(1))
        assert window is not None, self._histories.refusal
        self._draft = self._job(GenerateJob, window)
        self._masked(Role.GENERATE, self._draft, "noisy")

    def generate_redo(self) -> None:
        self._redo(Role.GENERATE, self._draft, {"noisy": self._draft.window[-1], "motion": self._draft.motion})
        self._histories.finish(_CHUNK, Epoch(0), GENERATE)

    def refine_masked(self) -> None:
        self._shown = self._job(RefineJob, self._histories.refine(_CHUNK, Epoch(0), fence=FenceId(2)))
        self._masked(Role.REFINE, self._shown, "clean")

    def refine_redo(self) -> None:
        self._redo(Role.REFINE, self._shown, {"clean": self._shown.window[-1]})

    def _refer(self, role: Role, stage: HistoryStage) -> None:
        slots = tuple(SlotId(lease.slot) for lease in self._histories.anchors(stage))
        result_of(self._stages[role], ReferenceJob(*names(1), slots, self.face.character), self.memory)

    def _job(self, kind: type[Any], window: Window) -> Any:
        """A chunk at its own length from the start of the timeline on, in which all that was overheard sounds."""
        heard = ticks_from_samples(_SAMPLES, self.plan.sample_rate)
        start = Ticks(0)
        return kind(
            *names(1),
            window=tuple(SlotId(lease.slot) for lease in window.leases),
            tokens=window.tokens,
            motion=SlotId(0),
            start=start,
            voice=SlotId(0),
            spoken=(Spoken(Span(start, heard), start),),
            ring=SlotId(0),
            heard_end=0,
            heard_from=0,
            mood=(0.0,) * len(self.face.conditions),
        )

    def _masked(self, role: Role, job: Any, history: str) -> None:
        before = Bytes(self.arena)
        result_of(self._stages[role], job, self.memory)
        before.check_only({history: {int(job.window[-1])}, "motion": {int(job.motion)}})

    def _redo(self, role: Role, job: Any, spoiled: dict[str, SlotId]) -> None:
        made = Bytes(self.arena)
        for partition, slot in spoiled.items():
            self.arena.fill_nan(partition, [slot])
        result_of(self._stages[role], job, self.memory)
        assert not made.changed(), f"made again, {', '.join(made.changed())} is another"

    # Decode

    def decode_masked(self) -> None:
        before = Bytes(self.arena)
        self._draw(0)
        before.check_only({})
        assert set(self.memory.pictures) == {(0, at) for at in range(2)}, "a slot that nobody gave was written"

    def decode_redo(self) -> None:
        self._draw(1)
        for at in range(2):
            same(self.memory.pictures[1, at], self.memory.pictures[0, at], f"picture {at} drawn again")

    def _draw(self, slot: int) -> None:
        job = DecodeJob(*names(1), SlotId(0), self.face.character, 0, 2, slot)
        result_of(self._stages[Role.DECODE], job, self.memory)
        self._check_size(self.face, slot)

    def _check_size(self, face: FacePlan, slot: int) -> None:
        width, height = face.size
        shape = self.memory.pictures[slot, 0].shape
        assert shape == (height * 3 // 2, width), f"a picture is {shape}, the plan says {width} x {height}, I420"


_RULES: dict[Role, tuple[tuple[str, Callable[[FaceRules], None]], ...]] = {
    Role.OVERHEAR: ((WHOLE, FaceRules.overhear_whole), (MASKED, FaceRules.overhear_masked)),
    Role.GENERATE: ((MASKED, FaceRules.generate_masked), (REDO, FaceRules.generate_redo)),
    Role.REFINE: ((MASKED, FaceRules.refine_masked), (REDO, FaceRules.refine_redo)),
    Role.DECODE: ((MASKED, FaceRules.decode_masked), (REDO, FaceRules.decode_redo)),
}
