"""The same people on every policy: what differs is how far generation runs, what is handed over, and what is wasted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from duplexd.engine.policy import PACED_DELIVERY, POLICIES
from duplexd.engine.session import REPORT_WITHIN
from duplexd.engine.timeline import BUDGET_MAX
from duplexd.engine.work import Work
from duplexd.ids import SessionId
from duplexd.messages import Progress, PublishChunk, ResponseState
from duplexd.streams.stage import Role
from duplexd.units import NANOS_PER_MS, Nanos, Ticks, ticks_from_ms
from tests.engine.simulation import Simulation, beep, heard_words, history_words, ms

COMPLETED, CANCELLED = ResponseState.COMPLETED, ResponseState.CANCELLED
CHUNK_MAX = ticks_from_ms(320)
REPORT_STEP = ticks_from_ms(120)  #: what playback is behind, at most, between two looks at it


def long_reply(policy: str, options: dict[str, str] | None = None, *, stop_ms: float | None = None) -> Simulation:
    """One person asks for 24 words (12 s), and may interrupt."""
    simulation = Simulation(policy=policy, policy_options=options, until_ms=16_000)
    listener = simulation.connect()
    listener.type("say 24", at=ms(1000), key="1")
    if stop_ms is not None:
        listener.stop(at=ms(stop_ms))
    simulation.run()
    return simulation


def lookaheads(simulation: Simulation) -> list[Ticks]:
    """Generation beyond the ear, every 100 ms."""
    return [Ticks(n.generation - n.playback) for n in simulation.news(Progress)]


def deliveries(simulation: Simulation) -> Iterator[Ticks]:
    """How far beyond the ear each chunk ended when it was handed over, by what the core knew a moment later."""
    playback, waiting = Ticks(0), []
    for _, news in simulation.world.news:
        if isinstance(news, PublishChunk):
            waiting.append(news.span.end)
        elif isinstance(news, Progress):
            playback = news.playback
            yield from (Ticks(end - playback) for end in waiting)
            waiting.clear()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_whole_reply_is_heard_whatever_the_policy(policy: str) -> None:
    simulation = long_reply(policy)

    assert simulation.final_states() == {1: [COMPLETED]}
    assert heard_words(simulation.world.listeners[SessionId(1)]) == list(range(24))
    assert simulation.core.monitor["chunks_late"] == 0


@pytest.mark.parametrize(
    ("policy", "options", "least_ms", "most"),
    [
        ("interaction", {}, 150, BUDGET_MAX),
        ("window-k", {"k": "3"}, 500, Ticks(3 * CHUNK_MAX)),
        ("fcfs", {}, 6000, None),
        ("edf", {}, 6000, None),
        ("delivery-paced", {}, 6000, None),
        ("interaction", {"gate": "false"}, 6000, None),
    ],
    ids=lambda value: str(value),
)
def test_how_far_generation_runs_ahead_of_the_ear(
    policy: str, options: dict[str, str], least_ms: float, most: Ticks | None
) -> None:
    farthest = max(lookaheads(long_reply(policy, options)))

    assert farthest >= ticks_from_ms(least_ms)
    if most is not None:
        assert farthest <= most + REPORT_STEP


def test_paced_delivery_hands_over_what_the_ear_is_near_although_all_is_made() -> None:
    paced, fast = long_reply("delivery-paced"), long_reply("fcfs")

    assert max(deliveries(paced)) <= PACED_DELIVERY + REPORT_STEP
    assert max(deliveries(fast)) > ticks_from_ms(5000)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_interruption_takes_everything_back_whatever_was_made(policy: str) -> None:
    """At 4 s about 3 s were heard. History is what was heard, every slot comes home, and the next reply is whole."""
    simulation = Simulation(policy=policy, until_ms=14_000)
    listener = simulation.connect()
    listener.type("say 24", at=ms(1000), key="1")
    listener.stop(at=ms(4000))
    listener.type("say 3", at=ms(6000), key="2")
    simulation.run()
    stores = simulation.core.stores

    assert simulation.final_states() == {1: [CANCELLED], 2: [COMPLETED]}
    assert history_words(simulation) == heard_words(listener)
    assert len(stores.out_slots) == stores.out_slots_count
    assert stores.latents.free_count == stores.latents.spec.count


def test_full_speed_wastes_what_the_gate_never_makes() -> None:
    """The same interruption: fcfs had made all of the reply, interaction what was about to be heard."""
    wasted = {
        policy: long_reply(policy, stop_ms=4000).core.sessions[SessionId(1)].chunks.discarded_ticks
        for policy in ("fcfs", "interaction")
    }

    assert wasted["fcfs"] > ticks_from_ms(5000)
    assert wasted["interaction"] <= BUDGET_MAX


@pytest.mark.parametrize("policy", ["fcfs", "delivery-paced"])
def test_memory_holds_full_speed_back(policy: str) -> None:
    """Output slots for six chunks: generation waits for them, nobody fails, and a freed slot wakes who waits for it."""
    simulation = Simulation(policy=policy, until_ms=16_000)
    stores = simulation.core.stores
    while len(stores.out_slots) > 6:
        stores.out_slots.pop()
    simulation.connect().type("say 24", at=ms(1000), key="1")
    simulation.run()

    assert simulation.final_states() == {1: [COMPLETED]}
    assert len(stores.out_slots) == 6


def test_a_closed_session_gives_back_the_chunks_that_were_not_handed_over() -> None:
    simulation = Simulation(policy="delivery-paced", until_ms=6000)
    listener = simulation.connect()
    listener.type("say 24", at=ms(1000), key="1")
    simulation.world.at(ms(3000), listener.leave)
    simulation.run()
    stores = simulation.core.stores

    assert len(stores.out_slots) == stores.out_slots_count


# Chunks --------------------------------------------------------------------------------------------------------------


def test_chunks_grow_with_the_buffer_and_follow_the_ramp_without_a_position() -> None:
    """By slack: the first is the smallest, the longest come when enough is left to play. A page that reports nothing
    gets the ramp.
    """
    by_slack = long_reply("interaction", {"slack_chunks": "true"})
    silent = Simulation(policy="interaction", policy_options={"slack_chunks": "true"}, until_ms=16_000)
    listener = silent.connect()
    listener.reports = False
    listener.type("say 24", at=ms(1000), key="1")
    silent.run()
    slack = [n.span.length for n in by_slack.news(PublishChunk)]
    ramp = [n.span.length for n in silent.news(PublishChunk)]

    assert slack[0] == min(by_slack.plan.chunk_ramp)
    assert max(slack[:12]) > slack[0]
    assert tuple(ramp[:3]) == silent.plan.chunk_ramp
    assert heard_words(by_slack.world.listeners[SessionId(1)]) == list(range(24))


# Batches -------------------------------------------------------------------------------------------------------------


def test_talk_and_render_steps_of_several_sessions_share_launches() -> None:
    simulation = Simulation(until_ms=8000, rows=4)
    for session in range(1, 5):
        simulation.connect(session).type("say 8", at=ms(1000), key="1")
    simulation.run()
    rows = {
        stage: max(len(launch.jobs) for _, launch in simulation.world.launches if launch.stage == stage)
        for stage in ("talk", "render")
    }

    assert rows["talk"] > 1
    assert rows["render"] > 1
    for session in range(1, 5):
        assert heard_words(simulation.world.listeners[SessionId(session)]) == history_words(simulation, session)
        assert simulation.final_states(session) == {1: [COMPLETED]}


def test_until_a_first_report_can_have_come_the_servers_clock_stands_in_for_the_ear() -> None:
    """Fail closed: half a second after its first sound a page that never reports has no deadlines any more, and is
    served by age; one that reports has them throughout.
    """
    deadlines: dict[bool, list[tuple[float, bool]]] = {}
    for reports in (True, False):
        simulation = Simulation(until_ms=6000)
        listener = simulation.connect()
        listener.reports = reports
        listener.type("say 12", at=ms(1000), key="1")
        seen, core = deadlines.setdefault(reports, []), simulation.core
        launch = core._launch

        def watched(work: Work, now: Nanos, *, seen: Any = seen, core: Any = core, launch: Any = launch) -> bool:
            reply = core.sessions[work.session].reply
            if work.role is Role.RENDER and reply.published_at:
                seen.append(((now - reply.published_at) / NANOS_PER_MS, work.silence_at is not None))
            return bool(launch(work, now))

        core._launch = watched  # type: ignore[method-assign]
        simulation.run()
    limit = REPORT_WITHIN / NANOS_PER_MS

    assert all(known for _, known in deadlines[True])
    assert [known for _, known in deadlines[False]] == [after < limit for after, _ in deadlines[False]]
    assert {known for _, known in deadlines[False]} == {True, False}


def test_a_launch_that_fails_ends_the_replies_in_it_and_no_other() -> None:
    """DESIGN §5 rule 10, on shared launches: the first of two rows fails for its two owners, the others go on."""
    failed: list[int] = []

    def fails(launch) -> str:  # type: ignore[no-untyped-def]
        if launch.stage == "render" and len(launch.jobs) == 2 and not failed:
            failed.extend(job.session for job in launch.jobs)
            return "made to fail"
        return ""

    simulation = Simulation(until_ms=8000, rows=4, fails=fails, policy_options={"company": "false"})
    for session in range(1, 5):
        simulation.connect(session).type("say 8", at=ms(1000), key="1")
    simulation.run()

    assert len(failed) == 2
    for session in range(1, 5):
        expected = ResponseState.FAILED if session in failed else COMPLETED
        assert simulation.final_states(session) == {1: [expected]}


# Memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "early"), [({}, True), ({"preload": "false"}, False)], ids=["interaction", "without preload"]
)
def test_only_a_policy_that_preloads_brings_memory_back_early(
    options: dict[str, str], early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Session 1 has left for the others and speaks again; without preload its memory comes when the thinker asks."""
    monkeypatch.setattr("duplexd.models.clock.PAGES_PER_SESSION", 5)
    simulation = Simulation(sessions_max=4, sessions_resident=1, policy_options=options, until_ms=36_000)
    for session in range(1, 5):
        simulation.connect(session)
    for session, words, at_ms in ((1, 3, 1000), (2, 12, 3000), (3, 12, 10_000), (4, 12, 17_000)):
        simulation.world.listeners[SessionId(session)].type(f"say {words}", at=ms(at_ms), key=f"{session}")
    simulation.world.listeners[SessionId(1)].say(beep(900), at=ms(24_500))
    simulation.run()

    assert (simulation.core.monitor["restores_early"] > 0) == early
    assert simulation.final_states(1)[2] == [COMPLETED]


# What is seen of it --------------------------------------------------------------------------------------------------


def test_the_pressure_snapshot_is_a_value() -> None:
    """Taken in the middle of a reply; later events do not reach it."""
    simulation = Simulation(until_ms=6000)
    simulation.connect().type("say 24", at=ms(1000), key="1")
    taken = []
    simulation.world.at(ms(3000), lambda: taken.append(simulation.core.pressure()))
    simulation.run()
    pressure, later = taken[0], simulation.core.pressure()
    session = pressure.sessions[SessionId(1)]

    assert session.replies
    assert session.started
    assert session.measured
    assert 0 < session.playback < later.sessions[SessionId(1)].playback
    assert session.buffers["render"] == session.generation - session.playback
    assert session.buffers["talk"] >= session.buffers["render"] > 0
    assert 0 < pressure.load.pages < 1  # type: ignore[operator]
    assert pressure.load.lanes["voice"] is not None
    with pytest.raises(TypeError):
        pressure.sessions[SessionId(2)] = session  # type: ignore[index]
    with pytest.raises(TypeError):
        pressure.load.lanes["voice"] = 0.0  # type: ignore[index]


def test_events_of_a_conversation_lie_in_the_ring() -> None:
    simulation = Simulation(until_ms=8000)
    listener = simulation.connect()
    listener.say(beep(700), at=ms(1000))
    listener.stop(at=ms(4000))
    simulation.run()
    kinds = [event.kind for event in simulation.core.monitor.events()]

    assert kinds[:3] == ["voice_started", "turn_ended", "interrupted"]
    assert [e.kind for e in simulation.core.monitor.events("interrupted")] == ["interrupted"]


# Misfits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("misfit", "waits"), [("skip", False), ("stop", True)])
def test_an_offer_that_cannot_start_stops_its_lane_or_is_passed_over(misfit: str, waits: bool) -> None:
    """Session 1 asked first, and finds no memory until 1.6 s; session 2 asked a moment later."""
    simulation = Simulation(policy_options={"misfit": misfit}, until_ms=8000)
    for session in (1, 2):
        simulation.connect(session).type("say 3", at=ms(1000 + 5 * session), key="1")
    begin = simulation.core._begin

    def short(work, work_id, now):  # type: ignore[no-untyped-def]
        refused = work.session == 1 and work.role is Role.THINK and now < ms(1600)
        return None if refused else begin(work, work_id, now)

    simulation.core._begin = short  # type: ignore[method-assign]
    simulation.run()
    first = min(
        at for at, launch in simulation.world.launches if launch.stage == "think" and launch.jobs[0].session == 2
    )

    assert (first >= ms(1600)) == waits
    assert [simulation.final_states(session) for session in (1, 2)] == [{1: [COMPLETED]}] * 2
