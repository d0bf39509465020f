"""The contract suite, `duplexd check-model NAME`: what every stage promises, tried on the stage itself (DESIGN §10).

    chunked == whole        whatever the schedule of chunks, the result is the same
    causal                  what comes later changes nothing that came before
    masked row unchanged    a launch changes no byte of a session that is not in it, and a neighbour changes no result
    reset == fresh          a slot that was used before serves like one that was not
    discard, then redo      work that is thrown away and done again gives the same
    claimed == used         stages keep nothing outside the arena, and the plan claims nothing that nobody uses

Sessions of the suite are two, in an arena whose every slot is NaN until it is written. Where a stage has no such
property (ears without a past have nothing to reset), the rule is not listed for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from duplexd.ids import ChunkId, ConditionVersion, Epoch, SessionId, SlotId
from duplexd.memory.arena import Arena
from duplexd.memory.layout import ArenaLayout, PartitionKind
from duplexd.streams.graph import ModelPlan
from duplexd.streams.stage import (
    CopyJob,
    Failed,
    JudgeJob,
    ListenJob,
    RenderJob,
    Role,
    Stage,
    TalkJob,
    TalkResult,
    ThinkJob,
    ThinkResult,
)
from duplexd.units import INPUT_RATE, Ticks, samples_from_ticks

WHOLE, CAUSAL, MASKED, RESET, REDO, CLAIMED = (
    "chunked == whole", "causal", "masked row unchanged", "reset == fresh", "discard, then redo", "claimed == used",
)  # fmt: skip
#: What two ways of computing the same keys may differ by, as a share of their size: kernels of few and of many tokens
#: round differently, and keys may be kept in 16 bits.
KEYS_OFF = 0.03


class Finding(msgspec.Struct, frozen=True):
    stage: str
    rule: str
    fault: str = ""  #: nothing: the rule holds


class Memory:
    """Shared memory of the suite: input and output slots by number."""

    def __init__(self) -> None:
        self.slots: dict[int, npt.NDArray[Any]] = {}
        self.pictures: dict[tuple[int, int], npt.NDArray[Any]] = {}  #: by slot and place in it

    def read(self, slot: int, samples: int) -> npt.NDArray[np.int16]:
        return self.slots[slot][:samples]

    def read_output(self, slot: int, samples: int) -> npt.NDArray[np.int16]:
        return self.slots[slot][:samples]

    def write(self, slot: int, pcm: npt.NDArray[np.int16]) -> None:
        self.slots[slot] = pcm.copy()

    def write_picture(self, slot: int, at: int, picture: npt.NDArray[np.uint8]) -> None:
        self.pictures[slot, at] = picture.copy()


def names(session: int, chunk: int = 1) -> tuple[SessionId, Epoch, ChunkId, ConditionVersion]:
    return SessionId(session), Epoch(0), ChunkId(chunk), ConditionVersion(0)


def result_of(stage: Stage, job: Any, memory: Any) -> Any:
    """The one result of one job. Raises AssertionError when it failed."""
    (result,) = stage.run([job], memory)
    assert not isinstance(result, Failed), result.reason
    return result


class Bytes:
    """A copy of the arena, to see what a launch changed."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._before = arena.buffer.clone()

    def changed(self) -> dict[str, set[int]]:
        """Slots (token slots of pages) that differ, by partition."""
        changed: dict[str, set[int]] = {}
        for (partition, _), placement in self._arena.layout.placements.items():
            stretch = slice(placement.offset, placement.offset + placement.nbytes)
            # Most of an arena is weights, which nobody writes: a comparison in words, of no memory of its own.
            if _alike(self._before[stretch], self._arena.buffer[stretch]):
                continue
            shape = (*placement.shape, placement.nbytes // int(np.prod(placement.shape)))
            differs = (self._before[stretch] != self._arena.buffer[stretch]).view(shape)
            rows = differs.transpose(0, placement.slot_axis).flatten(1).any(1).nonzero().flatten().tolist()
            changed.setdefault(partition, set()).update(rows)
        return {partition: rows for partition, rows in changed.items() if rows}

    def check_only(self, allowed: dict[str, set[int]]) -> None:
        """Raises AssertionError for a byte that changed elsewhere. `allowed` of a workspace: {-1} is any slot."""
        for partition, rows in self.changed().items():
            mine = allowed.get(partition, set())
            stray = set() if -1 in mine else rows - mine
            assert not stray, f"{partition} slots {sorted(stray)[:8]} changed, which no job names"


def _alike(first: Tensor, second: Tensor) -> bool:
    """Two stretches of bytes, uint8 (n,), each from a multiple of eight on."""
    words = first.numel() // 8 * 8
    whole = torch.equal(first[:words].view(torch.int64), second[:words].view(torch.int64))
    return whole and torch.equal(first[words:], second[words:])


def held_bytes(stage: object) -> int:
    """Bytes of all tensors and arrays a stage can reach, arena views not counted."""
    return sum(_arrays(stage, set()))


def _arrays(thing: Any, seen: set[int], depth: int = 0) -> Iterator[int]:
    if id(thing) in seen or depth > 8 or isinstance(thing, type | str | bytes | int | float | Arena):
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        if thing.untyped_storage().data_ptr() not in seen:
            seen.add(thing.untyped_storage().data_ptr())
            yield thing.untyped_storage().nbytes()
    elif isinstance(thing, np.ndarray):
        yield thing.nbytes
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from _arrays(value, seen, depth + 1)
    elif isinstance(thing, list | tuple | set | frozenset):
        for value in thing:
            yield from _arrays(value, seen, depth + 1)
    elif hasattr(thing, "__dict__"):
        yield from _arrays(vars(thing), seen, depth + 1)


def tried(stage: str, rule: str, attempt: Callable[[], None]) -> Finding:
    """A finding of what an attempt says: it raises where the rule is broken, or where the stage itself gives up."""
    try:
        attempt()
    except AssertionError as broken:
        return Finding(stage, rule, str(broken) or "broken")
    except Exception as error:  # a stage may raise anything; that is a finding, not the end of the suite
        return Finding(stage, rule, f"the stage raised {type(error).__name__}: {error}")
    return Finding(stage, rule)


def same(first: Any, second: Any, what: str, *, within: float = 0.0) -> None:
    """Raises AssertionError unless two arrays agree."""
    a, b = (_host(each) for each in (first, second))
    assert a.shape == b.shape, f"{what}: shapes {a.shape} and {b.shape}"
    off = float(np.abs(a - b).max()) if a.size else 0.0
    assert off <= within, f"{what}: {off:.3g} apart, at most {within:.3g} is allowed"


def _host(values: Any) -> npt.NDArray[np.float64]:
    return np.asarray(values.cpu() if isinstance(values, Tensor) else values, np.float64)


# The suite of a plan --------------------------------------------------------------------------------------------------


def check_plan(
    plan: ModelPlan, *, device: str = "cpu", told: Callable[[Finding], object] = lambda finding: None
) -> list[Finding]:
    """Every rule for every stage of a plan; of a drawn face those of any family (faces.py), it has a suite of its own
    beside (models/face/contract.py).

    Args:    told: hears the findings of a stage as soon as it has been tried: on a busy machine all take a minute.
    """
    findings: list[Finding] = []
    for some in _checked(plan, device):
        findings += some
        for finding in some:
            told(finding)
    return findings


def _checked(plan: ModelPlan, device: str) -> Iterator[list[Finding]]:
    """Findings by stage, in the order of the plan; then the face's, and what was claimed."""
    from duplexd.models.faces import FaceRules  # It imports this module.

    suite = Suite(plan, device=device)
    checks = {
        Role.COPY: suite.copy,
        Role.LISTEN: suite.listen,
        Role.JUDGE: suite.judge,
        Role.THINK: suite.think,
        Role.TALK: suite.talk,
        Role.RENDER: suite.render,
    }
    for spec in plan.stages.values():
        if spec.role in checks:
            try:
                found = checks[spec.role](spec.name)
            except Exception as error:  # what a rule needs of another stage is not to be had
                found = [Finding(spec.name, "all rules", f"could not be tried: {type(error).__name__}: {error}")]
            yield found
    if plan.face is not None:
        yield FaceRules(plan, suite.arena, suite.stages).findings()
    yield suite.claims()


class Suite:
    """One plan, two sessions."""

    def __init__(self, plan: ModelPlan, *, device: str = "cpu") -> None:
        self.plan, self.memory = plan, Memory()
        self.arena = Arena(ArenaLayout(plan.partitions(2)), device)
        self.poison()
        self.stages = plan.build()
        for stage in self.stages.values():
            stage.load(self.arena)
        self._held = {name: held_bytes(stage) for name, stage in self.stages.items()}
        self._rng = np.random.default_rng(11)

    def poison(self, *partitions: str) -> None:
        for name, spec in self.arena.layout.partitions.items():
            if name in partitions or not partitions:
                self.arena.fill_nan(name, range(spec.rows))

    def ring(self, slot: int) -> Tensor:
        found: Tensor = self.arena.field("ingest", "pcm")[slot]
        return found

    def _sound(self, samples: int) -> npt.NDArray[np.int16]:
        """Something that is not silence."""
        t = np.arange(samples) / INPUT_RATE
        tone = 0.2 * np.sin(2 * np.pi * 180 * t) * (1 + np.sin(2 * np.pi * 3 * t)) + 0.01 * self._rng.normal(
            size=samples
        )
        return np.asarray(np.clip(tone, -1, 1) * 20_000, np.int16)

    # Copy

    def copy(self, name: str) -> list[Finding]:
        stage, samples = self.stages[name], 4096
        sound = self._sound(samples)

        def job(session: int, slot: int, start: int, count: int) -> CopyJob:
            return CopyJob(*names(session), slot, SlotId(session - 1), start, count)

        def whole() -> None:
            self.memory.slots = {0: sound, **{1 + at: sound[at * 512 : (at + 1) * 512] for at in range(8)}}
            result_of(stage, job(1, 0, 0, samples), self.memory)
            for at in range(8):
                result_of(stage, job(2, 1 + at, at * 512, 512), self.memory)
            same(self.ring(0)[:samples], self.ring(1)[:samples], "one copy and eight")

        def masked() -> None:
            before = Bytes(self.arena)
            self.memory.slots[0] = self._sound(samples)
            result_of(stage, job(1, 0, 0, samples), self.memory)
            before.check_only({"ingest": {0}})

        return [tried(name, WHOLE, whole), tried(name, MASKED, masked)]

    # Listen and judge

    def listen(self, name: str) -> list[Finding]:
        return self._stateless(name, lambda: ListenJob(*names(1), SlotId(0), 0, 2 * INPUT_RATE))

    def judge(self, name: str) -> list[Finding]:
        return self._stateless(name, lambda: JudgeJob(*names(1), SlotId(0), 0, 2 * INPUT_RATE))

    def _stateless(self, name: str, job: Callable[[], Any]) -> list[Finding]:
        stage = self.stages[name]
        sound = torch.from_numpy(self._sound(2 * INPUT_RATE).astype(np.float32) / 32768)
        self.ring(0)[: 2 * INPUT_RATE].copy_(sound)

        def redo() -> None:
            first, second = (result_of(stage, job(), self.memory) for _ in range(2))
            assert first == second, f"{first} and then {second}"

        def masked() -> None:
            before = Bytes(self.arena)
            result_of(stage, job(), self.memory)
            before.check_only({})

        return [tried(name, REDO, redo), tried(name, MASKED, masked)]

    # Think

    def think(self, name: str) -> list[Finding]:
        stage, dialect = self.stages[name], self.plan.dialect
        feed = [*dialect.anchor(), *dialect.open_user(), *dialect.words("tell me about the sea", first=True)]
        feed += dialect.close_user_open_reply()
        room = len(feed) + 8
        rows = self.arena.layout.partitions["pages"].rows
        assert rows >= 2 * room, "the suite needs room for two contexts"
        first, second = list(range(room)), list(range(rows - room, rows))

        def job(session: int, slots: list[int], past: int, tokens: Sequence[int], steps: int) -> ThinkJob:
            length = past + len(tokens) + max(0, steps - 1)
            return ThinkJob(*names(session), (array("q", slots[:length]).tobytes(),), past, tuple(tokens), steps)

        def answer(session: int, slots: list[int], cuts: Sequence[int] = ()) -> tuple[int, ...]:
            edges = [0, *cuts, len(feed)]
            for start, stop in pairwise(edges[:-1]):
                result_of(stage, job(session, slots, start, feed[start:stop], 0), self.memory)
            result = result_of(stage, job(session, slots, edges[-2], feed[edges[-2] :], 4), self.memory)
            assert isinstance(result, ThinkResult)
            return result.tokens

        def whole() -> None:
            self.poison("pages")
            expected, once = answer(1, first), self._keys(first[: len(feed)])
            for cuts in ([1], [3, 5], list(range(1, len(feed)))):
                self.poison("pages")
                actual, again = answer(1, first, cuts), self._keys(first[: len(feed)])
                assert actual == expected, f"cut at {cuts}: {actual}, whole: {expected}"
                _close(again, once, f"keys of a prefill cut at {cuts}")

        def causal() -> None:
            self.poison("pages")
            half = len(feed) // 2
            result_of(stage, job(1, first, 0, feed, 0), self.memory)
            kept = self._keys(first[:half])
            self.poison("pages")
            other = [*feed[:half], *reversed(feed[half:])]
            result_of(stage, job(1, first, 0, other, 0), self.memory)
            _close(self._keys(first[:half]), kept, "keys of a beginning with another end")

        def masked() -> None:
            self.poison("pages")
            alone = answer(1, first)
            before = Bytes(self.arena)
            answer(2, second)
            before.check_only({"pages": set(second), "workspace": {-1}})
            if stage.spec.batch_max > 1:
                self.poison("pages")
                both = stage.run([job(1, first, 0, feed, 4), job(2, second, 0, feed, 2)], self.memory)
                assert both[0].tokens == alone, f"beside a neighbour {both[0].tokens}, alone {alone}"

        def reset() -> None:
            self.poison("pages")
            fresh = answer(1, first)
            result_of(stage, job(2, first, 0, list(reversed(feed)), 0), self.memory)
            used = answer(1, first)
            assert used == fresh, f"after another context {used}, fresh {fresh}"

        def redo() -> None:
            self.poison("pages")
            expected = answer(1, first)
            half = len(feed) // 2
            self.arena.fill_nan("pages", first[half:])
            result = result_of(stage, job(1, first, half, feed[half:], 4), self.memory)
            assert result.tokens == expected, f"done again {result.tokens}, before {expected}"

        rules = [(WHOLE, whole), (CAUSAL, causal), (MASKED, masked), (RESET, reset), (REDO, redo)]
        return [tried(name, rule, attempt) for rule, attempt in rules]

    def _keys(self, slots: Sequence[int]) -> Tensor:
        """All fields of some token slots, flat."""
        parts = []
        for (partition, field), placement in self.arena.layout.placements.items():
            if partition == "pages":
                view = self.arena.field(partition, field)
                parts.append(
                    view.index_select(placement.slot_axis, torch.tensor(list(slots), device=view.device))
                    .double()
                    .flatten()
                )
        return torch.cat(parts)

    # Talk and render

    def talk(self, name: str) -> list[Finding]:
        stage = self.stages[name]

        def redo() -> None:
            first = self._talk(stage, 0)
            kept = self._row("latents", 0)
            self.arena.fill_nan("latents", [0])
            assert self._talk(stage, 0) == first, "the same clause has another length or other words"
            same(_plain(self._row("latents", 0)), _plain(kept), "latents of the same clause")

        def masked() -> None:
            before = Bytes(self.arena)
            self._talk(stage, 0)
            before.check_only({"latents": {0}})

        def reset() -> None:
            result_of(stage, TalkJob(*names(1), self._clause(1), SlotId(1), True), self.memory)
            self._talk(stage, 1)
            self._talk(stage, 0)
            length = int(np.isfinite(_plain(self._row("latents", 0))).sum())
            assert length, "nothing was written"

        return [tried(name, REDO, redo), tried(name, MASKED, masked), tried(name, RESET, reset)]

    def _clause(self, index: int) -> str:
        """Text the family's talker understands: the clock speaks in numbered words."""
        texts = ("0-0 0-1 0-2", "1-0 1-1") if self.plan.name == "clock" else ("The sea is wide and blue.", "Yes.")
        return texts[index]

    def _talk(self, stage: Stage, slot: int) -> TalkResult:
        result = result_of(stage, TalkJob(*names(1), self._clause(0), SlotId(slot), True), self.memory)
        assert isinstance(result, TalkResult)
        return result

    def render(self, name: str) -> list[Finding]:
        stage = self.stages[name]
        talker = self.plan.need(Role.TALK)
        length = self._talk(self.stages[talker.name], 0).length
        self._talk(self.stages[talker.name], 1)

        def pcm(cuts: Sequence[int], state: int, latents: int = 0) -> npt.NDArray[np.int16]:
            edges, parts = [0, *cuts, length], []
            for start, stop in pairwise(edges):
                self._render(stage, latents, state, start, stop, fresh=start == 0)
                parts.append(self.memory.slots[9])
            return np.concatenate(parts)

        def whole() -> None:
            self.poison("state")
            expected = pcm([], 0)
            assert len(expected) == samples_from_ticks(length, self.plan.sample_rate), f"{len(expected)} samples"
            for schedule in range(4):
                self.poison("state")
                grains = np.unique(self._rng.integers(1, max(2, length // self.plan.grain), 1 + 3 * schedule))
                cuts = [int(at) * self.plan.grain for at in grains if at * self.plan.grain < length]
                same(pcm(cuts, 0), expected, f"cut at {cuts}", within=1)

        def masked() -> None:
            pcm([], 1)
            before = Bytes(self.arena)
            pcm([self.plan.grain], 0)
            before.check_only({"state": {0}})

        def reset() -> None:
            self.poison("state")
            fresh = pcm([self.plan.grain], 0)
            self._render(stage, 1, 0, 0, self.plan.grain, fresh=True)
            same(pcm([self.plan.grain], 0), fresh, "in a state that was used")

        def redo() -> None:
            expected = pcm([], 0)
            self.poison("state")
            same(pcm([], 0), expected, "made again")

        rules = [(WHOLE, whole), (MASKED, masked), (RESET, reset), (REDO, redo)]
        return [tried(name, rule, attempt) for rule, attempt in rules]

    def _render(self, stage: Stage, latents: int, state: int, start: int, stop: int, *, fresh: bool) -> None:
        span = (Ticks(start), Ticks(stop - start))
        result_of(stage, RenderJob(*names(1), SlotId(latents), SlotId(state), *span, fresh, 9), self.memory)

    # Bytes

    def claims(self) -> list[Finding]:
        """After all of the above: who keeps more than at the start, and what was claimed for nothing."""
        findings = [
            tried(name, CLAIMED, lambda name=name, stage=stage: self._kept(name, stage))  # type: ignore[misc]
            for name, stage in self.stages.items()
        ]
        return [*findings, tried("arena", CLAIMED, self._used)]

    def _kept(self, name: str, stage: Stage) -> None:
        now = held_bytes(stage)
        grown = now - self._held[name]
        assert grown <= max(65_536, self._held[name] // 100), f"holds {grown:,} bytes more than before its first job"

    def _used(self) -> None:
        total = sum(placement.nbytes for placement in self.arena.layout.placements.values())
        claimed = self.arena.layout.total_bytes
        slack = 256 * len(self.arena.layout.placements)
        assert total <= claimed <= total + slack, f"{claimed:,} bytes are claimed, fields take {total:,}"
        idle = [
            f"{partition}.{field}"
            for (partition, field), placement in self.arena.layout.placements.items()
            if self.arena.layout.partitions[partition].kind is not PartitionKind.RING
            and self._untouched(partition, field)
        ]
        assert not idle, f"claimed and never written: {', '.join(idle)}"

    def _untouched(self, partition: str, field: str) -> bool:
        view = self.arena.field(partition, field)
        return bool(torch.isnan(view).all()) if view.dtype.is_floating_point else False

    def _row(self, partition: str, slot: int) -> list[Tensor]:
        return [
            self.arena.field(partition, field)[slot].clone()
            for owner, field in self.arena.layout.placements
            if owner == partition
        ]


def _plain(parts: Sequence[Tensor]) -> npt.NDArray[np.float64]:
    """Flat; what was never written counts as 0."""
    flat = np.concatenate([part.double().flatten().cpu().numpy() for part in parts])
    return np.asarray(np.nan_to_num(flat, nan=0.0), np.float64)


def _close(found: Tensor, wanted: Tensor, what: str) -> None:
    off = float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))
    assert off <= KEYS_OFF, f"{what}: {off:.3g} of their size apart, at most {KEYS_OFF} is allowed"
