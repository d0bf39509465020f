"""Stages of the face on a tiny network: the contract holds, and each rule notices when it is broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from faces import random_face, random_net

from duplexd.errors import ModelError
from duplexd.models.contract import Memory, check_plan
from duplexd.models.face import contract
from duplexd.models.face import performer as performers
from duplexd.models.face.checkpoint import load_face, save_face
from duplexd.models.face.contract import FaceSuite
from duplexd.models.face.motion import CHUNK_FRAMES
from duplexd.models.face.performer import Part, Performer
from duplexd.models.face.stages import Decoder, Generator, Overhear, Refiner
from duplexd.streams.stage import Failed, GenerateJob, ReferenceJob
from duplexd.units import Ticks


@pytest.fixture(scope="module")
def suite() -> FaceSuite:
    torch.set_num_threads(1)
    return FaceSuite(random_face())


def test_the_contract_holds(suite: FaceSuite) -> None:
    assert [finding for finding in suite.findings() if finding.fault] == []


class KeepsTheFirstStep(Generator):
    """Noisy history at the wrong noise."""

    def _make(self, jobs: Any) -> Any:
        results = super()._make(jobs)
        for job in jobs:
            self._history[job.window[-1]] *= 1.5
        return results


class NoiseOfTheRow(Generator):
    """Noise by place in the batch: neighbours change what somebody does."""

    def _noise(self, jobs: Any) -> Any:
        rng = torch.Generator().manual_seed(len(jobs))
        return torch.randn(len(jobs), self.shape.tokens, self.shape.latent, generator=rng)


class SpoilsItsDraft(Refiner):
    def _make(self, jobs: Any) -> Any:
        results = super()._make(jobs)
        for job in jobs:
            self._draft[job.motion] += 0.1
        return results


class HearsTheFuture(Generator):
    def _own(self, job: Any) -> Any:
        sound = super()._own(job)
        return torch.roll(sound, -int(sound.abs().sum() > 0) * 9600) + self._voice[job.voice].nan_to_num().sum()


class WritesANeighbour(Generator):
    def _make(self, jobs: Any) -> Any:
        results = super()._make(jobs)
        self._history[(jobs[0].window[-1] + 1) % len(self._history)] = 0.0
        return results


class Remembers(Generator):
    def _make(self, jobs: Any) -> Any:
        self.past = [*getattr(self, "past", []), self._history[jobs[0].window[-1]].clone()]
        return super()._make(jobs)


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (KeepsTheFirstStep, FaceSuite.whole),
        (NoiseOfTheRow, FaceSuite.masked),
        (HearsTheFuture, FaceSuite.causal),
        (WritesANeighbour, FaceSuite.masked),
        (Remembers, FaceSuite.claimed),
    ],
    ids=lambda x: x.__name__,
)
def test_a_broken_generator_is_found_out(
    suite: FaceSuite, monkeypatch: pytest.MonkeyPatch, broken: type[Generator], rule: Callable[[FaceSuite], None]
) -> None:
    monkeypatch.setattr(performers, "Generator", broken)
    with pytest.raises(AssertionError):
        rule(suite)


def test_a_refiner_that_writes_the_draft_is_found_out(suite: FaceSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performers, "Refiner", SpoilsItsDraft)
    with pytest.raises(AssertionError, match="made again"):
        suite.redo()


class DrawsTheLastFrame(Decoder):
    """A whole chunk is right; a part of it begins at the wrong frame."""

    def _decode(self, job: Any, media: Any) -> Any:
        return super()._decode(msgspec.structs.replace(job, first=0, stop=job.stop - job.first), media)


class DrawsInAnotherSlot(Decoder):
    def _decode(self, job: Any, media: Any) -> Any:
        result = super()._decode(job, media)
        media.write_picture(job.slot + 1, 0, media.pictures[job.slot, 0])
        return result


class KeepsPictures(Decoder):
    def _decode(self, job: Any, media: Any) -> Any:
        result = super()._decode(job, media)
        self.past = [*getattr(self, "past", []), media.pictures[job.slot, 0].copy()]
        return result


class ForgetsWhereItStands(Overhear):
    """It writes behind what it wrote last instead of where it is told to."""

    at = 0

    def run(self, jobs: Any, media: Any) -> Any:
        for job in jobs:
            result = super().run([msgspec.structs.replace(job, start=Ticks(2 * self.at))], media)
            self.at += job.samples
        return result


@pytest.mark.parametrize(
    ("name", "broken", "rule"),
    [
        ("Decoder", DrawsTheLastFrame, FaceSuite.decode_parts),
        ("Decoder", DrawsInAnotherSlot, FaceSuite.decode_beside),
        ("Decoder", KeepsPictures, FaceSuite.decode_claims),
        ("Overhear", ForgetsWhereItStands, FaceSuite.overhear_again),
        ("Overhear", ForgetsWhereItStands, FaceSuite.overhear_used),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_broken_stage_at_either_end_is_found_out(
    suite: FaceSuite,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    broken: type[Any],
    rule: Callable[[FaceSuite], None],
) -> None:
    monkeypatch.setattr(contract, name, broken)
    with pytest.raises(AssertionError):
        rule(suite)


def test_a_painter_that_takes_more_than_the_plan_says_is_found_out(
    suite: FaceSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "PAINTER_BYTES", 20_000_000)
    with pytest.raises(AssertionError, match="20,000,000 are claimed"):
        suite.decode_claims()


def test_every_stage_of_the_face_keeps_six_rules() -> None:
    """The names of what is tried, without trying it."""
    suite = FaceSuite(random_face())
    rules: dict[str, set[str]] = {}
    for stage, rule, _ in suite.attempts():
        rules.setdefault(stage, set()).add(rule)

    assert {stage: len(found) for stage, found in rules.items()} == {
        "generate, refine": 6, "overhear": 6, "decode": 6,
    }  # fmt: skip


def test_the_clock_keeps_its_contract_too() -> None:
    from duplexd.models.clock import plan

    findings = check_plan(plan())

    assert [finding for finding in findings if finding.fault] == []
    assert {finding.rule for finding in findings} >= {"chunked == whole", "causal", "discard, then redo"}


def clock_with_a_face() -> Any:
    from duplexd.models.clock import plan

    return plan({"face": "flash"})


def test_the_clocks_face_keeps_the_rules_of_any_face() -> None:
    findings = check_plan(clock_with_a_face())
    tried = {finding.stage for finding in findings}

    assert [finding for finding in findings if finding.fault] == []
    assert tried >= {"overhear", "generate", "refine", "decode"}


@pytest.mark.parametrize(
    ("stage", "rule"), [("overhear", "masked row unchanged"), ("generate", "masked row unchanged")]
)
def test_a_face_that_writes_a_neighbours_slot_is_found_out(stage: str, rule: str) -> None:
    plan, values = clock_with_a_face(), iter(range(99))
    build = plan.build

    def spoiled() -> Any:
        stages = build()
        run = stages[stage].run

        def stray(jobs: Any, media: Any) -> Any:
            results = run(jobs, media)
            if not isinstance(jobs[0], ReferenceJob):
                stages[stage].arena.field("voice", "pcm")[1, -5:] = next(values)
            return results

        stages[stage].run = stray
        return stages

    plan.build = spoiled
    faults = {(finding.stage, finding.rule) for finding in check_plan(plan) if finding.fault}

    assert (stage, rule) in faults


def test_a_session_is_the_same_among_others() -> None:
    """Batches of one and of five, with windows of different lengths beside each other."""
    weights = random_face()
    rng = np.random.default_rng(0)
    parts = [Part(voice=(0.2 * rng.normal(size=30_000)).astype(np.float32)) for _ in range(5)]
    together, alone = Performer(weights, parts), Performer(weights, parts[:1])
    for performer in (together, alone):
        performer.play(2)
        performer.interrupt(0, frames=5)

    np.testing.assert_allclose(together.play(2)[0], alone.play(2)[0], atol=1e-3)


def test_a_chunk_that_is_not_a_number_ends_its_own_row_only() -> None:
    """NaN in one session's window: its row fails, its neighbour's is as it was."""
    performer = Performer(random_face(), [Part(), Part()])
    performer.play(1)
    jobs = []
    for index, history in enumerate(performer.histories):
        window = history.begin(performers.ChunkId(9), history.epoch, fence=performer.fence())
        assert window is not None
        jobs.append(performer.job(GenerateJob, index, performers.ChunkId(9), window))
    performer.arena.fill_nan("noisy", [jobs[0].window[0]])
    first, second = performer.generator.run(jobs, None)

    assert isinstance(first, Failed)
    assert "not finite" in first.reason
    assert not isinstance(second, Failed)


def test_a_start_between_frames_is_refused() -> None:
    performer = Performer(random_face(), [Part()])
    history = performer.histories[0]
    window = history.begin(performers.ChunkId(9), history.epoch, fence=performer.fence())
    assert window is not None
    job = performer.job(GenerateJob, 0, performers.ChunkId(9), window)
    (result,) = performer.generator.run([msgspec.structs.replace(job, start=job.start + 1)], Memory())

    assert isinstance(result, Failed)
    assert "multiples of 1920" in result.reason


def test_hours_leave_no_more_than_minutes() -> None:
    """Slots in use after many chunks are those after a few."""
    performer = Performer(random_face(), [Part()])
    performer.play(6)
    before = [ledger.free_count for ledger in performer.ledgers]
    performer.play(40)

    assert [ledger.free_count for ledger in performer.ledgers] == before
    assert performer.frame[0] == 46 * CHUNK_FRAMES


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    weights = random_face()
    save_face(tmp_path / "face.safetensors", weights)
    back = load_face(tmp_path / "face.safetensors")

    assert back.shape == weights.shape
    assert back.generator_times == (1.0, 0.4)
    assert back.card == {"made": "at random"}
    (tmp_path / "face.json").unlink()
    assert load_face(tmp_path / "face.safetensors").card == {}
    for name, value in random_net(seed=2).state_dict().items():
        torch.testing.assert_close(back.refiner.state_dict()[name], value, atol=1e-3, rtol=1e-3)


def test_a_missing_or_foreign_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="scripts/train_face makes them"):
        load_face(tmp_path / "none.safetensors")
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match="has format None"):
        load_face(tmp_path / "other.safetensors")


def test_a_performer_takes_the_steps_it_is_asked_for() -> None:
    """One step of two is another motion; as many as were taught is the usual one."""
    weights = random_face()
    usual, both, one = (Performer(weights, [Part()], steps=steps).play(2)[0] for steps in (0, 2, 1))

    assert np.array_equal(usual, both)
    assert np.abs(usual - one).max() > 1e-3
