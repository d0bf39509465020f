"""The drawn face in an engine: real stages and weights, a simulated clock, the word clock's voice and words."""

from __future__ import annotations

import copy
from itertools import groupby
from typing import Any

import msgspec
import numpy as np
import pytest

from duplexd.engine import simulator
from duplexd.engine.feeling import SURE
from duplexd.messages import PublishFrames
from duplexd.models.clock import plan as clock_plan
from duplexd.models.clock.stages import WORD
from duplexd.models.contract import check_plan
from duplexd.models.face.checkpoint import load_face
from duplexd.models.face.motion import CHUNK_FRAMES, CHUNK_TICKS, CONDITION, Channel
from duplexd.models.face.performer import Part, Performer
from duplexd.models.pocket import FaceParts
from duplexd.streams.graph import ModelPlan, MoodWords
from duplexd.streams.stage import DecodeJob, DecodeResult, GenerateJob, RefineJob
from duplexd.units import Ticks
from tests.engine import simulation as simulations
from tests.engine.simulation import Simulation, heard_words, ms


def plan_with_face() -> ModelPlan:
    clock, face = clock_plan(), FaceParts("mira")
    plan = copy.copy(clock)
    specs = [*clock.stages.values(), *(stage.spec for stage in face.stages)]
    plan.stages = {spec.name: spec for spec in specs}
    plan.edges = (*clock.edges, ("generate", "refine"), ("refine", "decode"))
    plan.partitions = lambda sessions: clock.partitions(sessions) + face.partitions(sessions)
    plan.build = lambda: clock.build() | {stage.spec.name: stage for stage in face.stages}
    # The word clock says numbers; some of them are merry ones.
    merry = tuple(f"0-{word}" for word in range(4, 8))
    plan.face = msgspec.structs.replace(face.plan, moods=(MoodWords("joy", sure=merry),))
    plan._by_role = {spec.role: spec for spec in reversed(specs)}
    return plan


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    return drawn_simulation(monkeypatch)


def drawn_simulation(monkeypatch: pytest.MonkeyPatch, *, until_ms: float = 3600, blank: bool = False) -> Simulation:
    """A person who looks from 0.4 s on, in a room without a sound; the motion behind every picture is kept. `blank`:
    pictures are grey, which takes no time.
    """
    monkeypatch.setattr(simulations, "clock_plan", lambda options: plan_with_face())
    monkeypatch.setattr(simulations, "PICTURE_BYTES", 2 * 512 * 768)
    monkeypatch.setattr(simulator, "ROOM_NOISE", 0.0)
    simulation = Simulation(face="mira", until_ms=until_ms, sessions_max=1)
    person = simulation.connect()
    person.look(at=ms(400))
    motions: dict[tuple[int, int], Any] = {}
    decoder = simulation.world.stages["decode"]
    run = decoder.run

    def grey(jobs: Any, media: Any) -> list[DecodeResult]:
        counts = [len(range(job.first, job.stop, job.stride)) for job in jobs]
        for job, count in zip(jobs, counts, strict=True):
            for at in range(count):
                media.write_picture(job.slot, at, np.full((768, 512), 128, np.uint8))
        return [DecodeResult(job.session, count) for job, count in zip(jobs, counts, strict=True)]

    def kept(jobs: Any, media: Any) -> Any:
        for job in jobs:
            assert isinstance(job, DecodeJob)
            motion = simulation.arena.field("motion", "motion")[job.motion].numpy()
            motions.update({(int(job.chunk), frame): motion[frame].copy() for frame in range(job.first, job.stop)})
        return grey(jobs, media) if blank else run(jobs, media)

    monkeypatch.setattr(decoder, "run", kept)
    simulation.motions = motions  # type: ignore[attr-defined]
    return simulation


def test_an_idle_face_in_an_engine_is_the_offline_one(drawn: Simulation) -> None:
    """Chunk by chunk the motion is what the same stages make of silence with nothing around them; then it is drawn."""
    drawn.run()
    motions: dict[tuple[int, int], Any] = drawn.motions  # type: ignore[attr-defined]
    whole = [chunk for chunk in range(1, 8) if (chunk, CHUNK_FRAMES - 1) in motions]
    live = np.stack([motions[chunk, frame] for chunk in whole for frame in range(CHUNK_FRAMES)])
    offline = Performer(load_face(), [Part()]).play(len(whole))[0]
    view = drawn.world.listeners[1].view  # type: ignore[index]

    assert len(whole) >= 7
    np.testing.assert_allclose(live, offline, atol=2e-4)
    assert len(view.shown) >= 70
    assert view.late == 0
    assert drawn.core.monitor["face_faults"] == 0


def test_a_drawn_face_moves_its_mouth_to_the_voice_and_pictures_are_whole(drawn: Simulation) -> None:
    """Tones are no speech, but they are sound: the mouth does not stay as it was, and shuts again. Nothing is late, the
    words are heard, and every picture of a slot is one of the character.
    """
    person = drawn.world.listeners[1]  # type: ignore[index]
    person.type("say 2", at=ms(1200), key="a")
    drawn.run()
    motions: dict[tuple[int, int], Any] = drawn.motions  # type: ignore[attr-defined]
    opening = np.array([motion[Channel.OPENING] for _, motion in sorted(motions.items())])
    pictures = list(drawn.world.media.pictures.values())

    assert heard_words(person) == [0, 1]
    assert drawn.core.monitor["face_faults"] == 0
    assert opening.max() > 3 * np.abs(opening[:16]).max() + 0.02
    assert opening[-8:].max() < 0.5 * opening.max()
    assert {picture.shape for picture in pictures} == {(768, 512)}
    assert all(40 < picture[:512].mean() < 220 and picture[:512].std() > 20 for picture in pictures)
    assert len(drawn.news(PublishFrames)) > 30


def test_joy_of_a_clause_is_in_the_mood_of_its_chunks_and_the_corners_of_the_mouth_rise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight words in two clauses, the second of them merry: chunks of the first feel nothing, those of the second joy,
    in generator and refiner alike, from a new version of the condition on; then the face is seen to smile.
    """
    simulation = drawn_simulation(monkeypatch, until_ms=7400, blank=True)
    person = simulation.world.listeners[1]  # type: ignore[index]
    person.type("say 8", at=ms(1200), key="a")
    simulation.run()
    felt: dict[int, set[tuple[int, float]]] = {}
    starts: dict[int, int] = {}
    for _, launch in simulation.world.launches:
        for job in launch.jobs:
            if isinstance(job, GenerateJob | RefineJob):
                felt.setdefault(job.chunk, set()).add((job.condition, job.mood[CONDITION.index("joy")]))
                starts[job.chunk] = job.start
    motions: dict[tuple[int, int], Any] = simulation.motions  # type: ignore[attr-defined]
    smile = {
        glad: np.mean([motion[Channel.SMILE] for (chunk, _), motion in motions.items() if (chunk in merry) is glad])
        for merry in [{chunk for chunk, both in felt.items() if next(iter(both))[1] > 0}]
        for glad in (False, True)
    }
    joys = [next(iter(felt[chunk]))[1] for chunk in sorted(felt)]
    sound = np.abs(np.concatenate(person.sent))
    voice = Ticks(2 * int((sound > 1000).argmax()))
    first = min(starts[chunk] for chunk, both in felt.items() if next(iter(both))[1] > 0)

    assert all(len(both) == 1 for both in felt.values())
    assert [joy for joy, _ in groupby(joys)] == [0.0, SURE, 0.0]
    assert abs(first - (voice + 4 * WORD)) <= CHUNK_TICKS
    assert smile[True] > smile[False] + 0.15


def test_the_drawn_face_keeps_the_rules_of_any_face() -> None:
    found = check_plan(plan_with_face())

    assert [finding for finding in found if finding.fault] == []
    assert {finding.stage for finding in found} >= {"overhear", "generate", "refine", "decode"}
