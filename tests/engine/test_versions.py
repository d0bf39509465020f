"""What a message says of the state it belongs to: the condition of a chunk, the class of what a session waits for."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from duplexd.engine.work import Launch
from duplexd.ids import ConditionVersion, SessionId
from duplexd.messages import ConditionSet, Progress, PublishChunk, PublishFrames
from duplexd.streams.stage import CostModel, RenderJob, TalkJob, ThinkJob
from duplexd.units import ms_from_ticks, ticks_from_ms
from tests.engine.simulation import Simulation, ms
from tests.engine.test_face import watched

ME = SessionId(1)


def told_while_speaking(policy: str = "interaction", *, at_ms: float = 4000) -> Simulation:
    """24 words, and other instructions in the middle of them."""
    simulation = Simulation(policy=policy, until_ms=16_000)
    simulation.connect().type("say 24", at=ms(1000), key="1")
    simulation.world.at(ms(at_ms), lambda: ConditionSet(ME, "be brief"))
    simulation.run()
    return simulation


def jobs(simulation: Simulation, kind: type) -> list[tuple[float, int]]:
    """(ms, condition) of every job of a kind, as launched."""
    return [
        (at / 1e6, job.condition)
        for at, launch in simulation.world.launches
        for job in launch.jobs
        if isinstance(job, kind) and job.session == ME
    ]


def test_a_chunk_keeps_the_condition_its_words_were_thought_under() -> None:
    """fcfs thinks ahead of its talker: what was thought before the instructions changed is spoken as it was."""
    simulation = told_while_speaking("fcfs", at_ms=1002)
    versions = [news.condition for news in simulation.news(PublishChunk)]
    late = [version for at, version in jobs(simulation, RenderJob) if at > 1002]

    assert set(versions) <= {ConditionVersion(0), ConditionVersion(1)}
    assert late == sorted(late)
    assert [version for _, version in jobs(simulation, TalkJob)] == sorted(v for _, v in jobs(simulation, TalkJob))
    assert {v for at, v in jobs(simulation, ThinkJob) if at > 1002} <= {1}
    assert versions[0] == late[0] == 0


def test_versions_change_at_a_boundary_and_reach_the_ear_in_order() -> None:
    """Behind the gate the reply is still being thought when the instructions change: 0 ... 0, then 1 ... 1."""
    simulation = told_while_speaking()
    chunks = simulation.news(PublishChunk)
    versions = [news.condition for news in chunks]
    first = versions.index(1)
    rendered = {job.chunk: job.condition for _, launch in simulation.world.launches for job in of(launch, RenderJob)}

    assert versions == sorted(versions)
    assert 0 < first < len(versions)
    assert all(rendered[news.chunk] == news.condition for news in chunks)
    # At 4 s three were heard. What was thought by then, the clause under way with it, still comes: no more than that.
    assert 3000 < ms_from_ticks(chunks[first].span.start - chunks[0].span.start) < 3000 + 3500


def of(launch: Launch, kind: type) -> list[RenderJob]:
    return [job for job in launch.jobs if isinstance(job, kind) and job.session == ME]


def test_frames_carry_the_condition_of_their_chunk() -> None:
    """It thinks about a typed question from 3 s on, and looks like that from the next boundary on."""
    simulation, (person,) = watched(until_ms=6000)
    person.type("say 3", at=ms(3000), key="1")
    simulation.run()
    frames = simulation.news(PublishFrames)
    by_chunk: dict[tuple[int, int], set[int]] = {}
    for news in frames:
        by_chunk.setdefault((news.epoch, news.chunk), set()).add(news.condition)

    assert len({news.condition for news in frames}) > 1
    assert all(len(versions) == 1 for versions in by_chunk.values())
    assert all(a.condition <= b.condition for a, b in pairwise(frames) if a.epoch == b.epoch)


# Urgency -------------------------------------------------------------------------------------------------------------


def test_progress_says_what_the_scheduler_is_about_to_do() -> None:
    """Whoever waits for the first sound is U1; whoever has its budget full waits for nothing; nearly silent is U0."""
    simulation = Simulation(until_ms=9000)
    stage = simulation.world.stages["render"]
    stage.spec = msgspec.structs.replace(stage.spec, cost=CostModel(fixed_us=80_000))
    for session in (1, 2, 3, 4):
        simulation.connect(session).type("say 12", at=ms(1000), key="1")
    simulation.run()
    told = [news for session in (1, 2, 3, 4) for news in simulation.news(Progress, session)]
    seen = {news.urgency for news in told}
    left = {name: [n.generation - n.playback for n in told if n.urgency == name] for name in seen}

    assert {"U0", "U1", "running"} <= seen <= {"U0", "U1", "due", "U2", "waiting", "running", "ahead"}
    assert max(left["U1"]) == 0
    # P_safe, and the longest that four launches of 80 ms and what follows them may take.
    assert max(left["U0"]) <= ticks_from_ms(1200)


def test_a_policy_without_classes_names_none() -> None:
    simulation = Simulation(policy="fcfs", until_ms=6000)
    simulation.connect().type("say 12", at=ms(1000), key="1")
    simulation.run()

    assert {news.urgency for news in simulation.news(Progress)} <= {"running", "ahead"}
