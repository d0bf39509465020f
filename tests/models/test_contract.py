"""The contract suite notices what it is for: stages of the clock, each broken in one way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from duplexd.memory.arena import Arena
from duplexd.memory.layout import ArenaLayout
from duplexd.models import clock
from duplexd.models.clock import stages
from duplexd.models.contract import CAUSAL, CLAIMED, MASKED, REDO, RESET, WHOLE, Bytes, Finding, Suite, check_plan
from duplexd.streams.stage import RenderResult


class ForgetsAnEnd(stages.Renderer):
    """The last sample of every chunk is lost in silence."""

    def _render(self, job: Any, media: Any) -> Any:
        result = super()._render(job, media)
        if isinstance(result, RenderResult):
            pcm = media.slots[job.slot]
            pcm[-3:] = 9999
        return result


class GoesOnFromWhatWasThere(stages.Renderer):
    """A fresh clause is as loud as the last one was long."""

    def _render(self, job: Any, media: Any) -> Any:
        left = int(self.arena.field("state", "end")[job.state][0])
        result = super()._render(job, media)
        if job.fresh and left > 0:
            media.slots[job.slot] = media.slots[job.slot] // 2
        return result


class WritesEveryRow(stages.Renderer):
    def _render(self, job: Any, media: Any) -> Any:
        result = super()._render(job, media)
        self.arena.field("state", "end")[1 - job.state] = job.start
        return result


class Hoards(stages.Renderer):
    def _render(self, job: Any, media: Any) -> Any:
        self.kept = [
            *getattr(self, "kept", []),
            media.slots.get(job.slot, b""),
            self.arena.field("ingest", "pcm")[0].clone(),
        ]
        return super()._render(job, media)


class LooksAhead(stages.Thinker):
    """The first key of a context is the sum of its feed."""

    def _think(self, job: Any) -> Any:
        result = super()._think(job)
        slots = self.arena.tensor_of(job.slots)
        if job.feed and job.past == 0:
            self.arena.field("pages", "k")[slots[1]] = float(sum(n * token for n, token in enumerate(job.feed)))
        return result


class LosesItsPlace(stages.Copy):
    """A copy in pieces starts each of them anew."""

    def run(self, jobs: Sequence[Any], media: Any) -> Any:
        import msgspec

        return super().run([msgspec.structs.replace(job, start=job.start % 1024) for job in jobs], media)


@pytest.mark.parametrize(
    ("place", "broken", "stage", "rule"),
    [
        ("Renderer", ForgetsAnEnd, "render", WHOLE),
        ("Renderer", GoesOnFromWhatWasThere, "render", RESET),
        ("Renderer", GoesOnFromWhatWasThere, "render", REDO),
        ("Renderer", WritesEveryRow, "render", MASKED),
        ("Renderer", Hoards, "render", CLAIMED),
        ("Thinker", LooksAhead, "think", CAUSAL),
        ("Copy", LosesItsPlace, "copy", WHOLE),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_a_broken_stage_is_found_out(
    monkeypatch: pytest.MonkeyPatch, place: str, broken: type[stages.ClockStage], stage: str, rule: str
) -> None:
    monkeypatch.setattr(stages, place, broken)
    faults = {(finding.stage, finding.rule) for finding in check_plan(clock.plan()) if finding.fault}

    assert (stage, rule) in faults


def test_a_stage_that_raises_breaks_its_rules_and_not_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    class Raises(stages.Talker):
        def _talk(self, job: Any) -> Any:
            raise RuntimeError("no voice today")

    monkeypatch.setattr(stages, "Talker", Raises)
    findings = check_plan(clock.plan())

    assert any("no voice today" in finding.fault for finding in findings if finding.stage == "talk")
    assert not any(finding.fault for finding in findings if finding.stage == "copy")


def test_findings_are_told_stage_by_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits sees what was tried before the slow stages are."""
    told: list[Finding] = []
    known: list[int] = []
    think = Suite.think

    def thinking(suite: Suite, name: str) -> list[Finding]:
        known.append(len(told))
        return think(suite, name)

    monkeypatch.setattr(Suite, "think", thinking)
    findings = check_plan(clock.plan(), told=told.append)

    assert told == findings
    assert known[0] > 0


@pytest.mark.parametrize("at", [0, 7, 8, 20], ids=["first", "end of a word", "next word", "rest"])
def test_one_byte_that_differs_is_seen(at: int) -> None:
    plan = clock.plan()
    arena = Arena(ArenaLayout(plan.partitions(2)), "cpu")
    before = Bytes(arena)
    placement = arena.layout.placements["ingest", "pcm"]
    arena.buffer[placement.offset + at] += 1

    assert before.changed() == {"ingest": {0}}
