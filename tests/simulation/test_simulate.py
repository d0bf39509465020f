"""The engine's core among simulated people: what they get, what it never does, and that a seed is a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from duplexd.engine.work import Launch
from duplexd.errors import ConfigError
from duplexd.simulation import calibration, faces, scenario
from duplexd.simulation.command import report_of
from duplexd.simulation.link import Network
from duplexd.simulation.people import Faults, Spread
from duplexd.simulation.records import Outcome
from duplexd.simulation.report import is_continuous
from duplexd.simulation.run import Simulation
from duplexd.simulation.scenario import Scenario
from duplexd.streams.stage import Job, RenderJob, Role, TalkJob, ThinkJob
from duplexd.units import NANOS_PER_SECOND, Nanos, ticks_from_ms

SCENARIOS = Path("demos/scenarios")


def load(name: str, **changes: Any) -> Scenario:
    """A shipped scenario, short, with what a test changes."""
    return msgspec.structs.replace(scenario.load(SCENARIOS / f"{name}.toml"), warmup_s=0.0, **changes)


def closed(shipped: Scenario, concurrency: int) -> Scenario:
    return msgspec.structs.replace(shipped, arrivals=msgspec.structs.replace(shipped.arrivals, concurrency=concurrency))


def run(one: Scenario, *, policy: str = "interaction", seed: int = 1) -> Simulation:
    simulation = Simulation(one, policy=policy, seed=seed, folder=SCENARIOS)
    simulation.run()
    return simulation


@pytest.mark.parametrize("name", sorted(file.stem for file in SCENARIOS.glob("*.toml") if not faces.describes(file)))
def test_a_shipped_scenario_is_whole_and_people_are_answered(name: str) -> None:
    # Who returns must first be told what they talked about, and pauses for half a minute.
    simulation = run(load(name, duration_s=150.0 if name == "returning" else 40.0))
    ended = [turn for turn in simulation.world.turns if turn.outcome is not Outcome.OPEN]

    assert len(ended) == len(simulation.world.turns) > 3
    assert sum(turn.outcome in (Outcome.HEARD, Outcome.INTERRUPTED) for turn in ended) >= 0.7 * len(ended)


def test_everything_comes_back_when_everybody_has_gone() -> None:
    """Voices, half the replies interrupted, listeners who vanish, stages that fail: nothing is held afterwards."""
    faults = Faults(stage_failure=0.01, vanish=0.1, silent_page=0.2)
    simulation = run(closed(load("voices", duration_s=60.0, faults=faults), 4), seed=3)
    stores = simulation.core.stores
    outcomes = {turn.outcome for turn in simulation.world.turns}

    assert {Outcome.HEARD, Outcome.INTERRUPTED, Outcome.VANISHED, Outcome.FAILED} <= outcomes
    assert not simulation.core.sessions
    assert stores.pages.usage().free == stores.pages.spec.count - 1  # The anchor's page stays.
    assert len(stores.out_slots) == stores.out_slots_count
    assert stores.latents.free_count == stores.latents.spec.count


def test_an_interruption_keeps_what_was_heard_and_the_next_turn_is_answered() -> None:
    simulation = run(closed(load("voices", duration_s=60.0, barge_in=1.0, faults=Faults()), 2))
    turns = [turn for turn in simulation.world.turns if turn.outcome is Outcome.INTERRUPTED]

    assert len(turns) > 3
    assert simulation.world.overheard == 0
    assert simulation.core.monitor["interruptions"] == len(turns)
    assert all(0 <= turn.heard <= turn.reply for turn in turns)


def test_every_policy_meets_the_same_people() -> None:
    """The same words are said and the same lengths are wanted, whoever serves them, however well."""
    one = closed(load("voices", duration_s=60.0, faults=Faults()), 3)
    seen = []
    for policy in ("fcfs", "interaction"):
        turns = sorted(run(one, policy=policy).world.turns, key=lambda turn: (turn.visit, turn.index))
        seen.append({(turn.visit, turn.index): turn.reply for turn in turns})
    common = seen[0].keys() & seen[1].keys()

    assert len(common) > 5
    assert all(seen[0][turn] == seen[1][turn] for turn in common)


def test_a_seed_is_a_run_whatever_the_hash_seed() -> None:
    code = (
        "import sys; from pathlib import Path; import msgspec\n"
        "from duplexd.simulation import scenario; from duplexd.simulation.command import report_of, text_of\n"
        "one = msgspec.structs.replace(scenario.load(Path(sys.argv[1])), duration_s=20.0, warmup_s=0.0)\n"
        "print(text_of(report_of(one, policy='interaction', seed=9)))\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code, str(SCENARIOS / "voices.toml")],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path.cwd())},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hash_seed in ("0", "1", "4242")
    }

    assert len(printed) == 1
    assert len(printed.pop()) > 1000


def test_another_seed_is_another_run() -> None:
    one = load("voices", duration_s=20.0)

    assert report_of(one, policy="interaction", seed=1) != report_of(one, policy="interaction", seed=2)


def test_reports_in_company_change_next_to_nothing() -> None:
    """What lets an hour fit into a minute: of four reports that tell nothing new the engine gets the newest."""
    one = closed(load("listeners", duration_s=120.0), 6)
    found = [
        report_of(msgspec.structs.replace(one, network=Network(report_batch=batch)), policy="interaction", seed=1)
        for batch in (1, 4)
    ]

    assert found[1]["turns"] == pytest.approx(found[0]["turns"], abs=2)
    assert found[1]["ttfp_server_ms"]["p50"] == pytest.approx(found[0]["ttfp_server_ms"]["p50"], rel=0.1)
    assert abs(found[1]["continuity"] - found[0]["continuity"]) <= 0.05
    assert found[1]["events"] < 0.6 * found[0]["events"]


# The lookahead gate -----------------------------------------------------------------------------------------------


class Overrun(Exception):
    """A chunk was started beyond the budget."""


#: DESIGN §5 rule 1: nothing is heard later than so long after it was begun, whatever it rides on.
BUDGET_MOST = ticks_from_ms(1500)
#: `interaction` in company: how much earlier than it must a chunk may be begun, docs/simulation.md.
COMPANY = ticks_from_ms(300)
#: How long a clause takes to be thought and talked, at most as it is measured (session.py `_clause_pace`).
CLAUSE_PACE_MOST = ticks_from_ms(800)
#: Where launches are shared, clauses beyond the one that rule 1 grants upstream stages.
UPSTREAM = {Role.THINK: 2, Role.TALK: 1}


def check_lookahead(simulation: Simulation) -> list[int]:
    """Check every started chunk against its own budget and what may ride in company on top of it, and every clause that
    is thought or talked against the longest; returns what each chunk leaves, in ticks. The limits are written here by
    hand: nothing is asked of the policy.
    """
    left: list[int] = []
    unit = simulation.core.plan.clause_max

    def overrun(job: Job, ahead: int, limit: int, now: Nanos) -> None:
        if ahead > limit:
            raise Overrun(f"session {job.session}: {type(job).__name__} {ahead} ticks ahead at {now}, limit {limit}")

    def check_upstream(job: Job, role: Role, pending: int, now: Nanos) -> None:
        session = simulation.core.sessions[job.session]
        reply = session._making
        if reply is None or (not reply.words if role is Role.TALK else not reply.chunks_published):
            return  # Until something can be heard nothing is held back.
        limit = BUDGET_MOST + CLAUSE_PACE_MOST + (1 + UPSTREAM[role]) * unit
        ahead = reply.talked_until + pending * unit + unit - session.timeline.playback(now)
        overrun(job, ahead, limit, now)

    def watch(launch: Launch, now: Nanos) -> None:
        for job in launch.jobs:
            session = simulation.core.sessions.get(job.session)
            if session is None:
                continue  # The anchor's.
            if isinstance(job, TalkJob):
                check_upstream(job, Role.TALK, 0, now)
            elif isinstance(job, ThinkJob) and job.steps and session._making is not None:
                check_upstream(job, Role.THINK, len(session._making.to_talk), now)
            elif isinstance(job, RenderJob):
                timeline = session.timeline
                budget = timeline.budget(job.length, session._chunk_pace.worst)
                assert budget <= BUDGET_MOST
                limit = min(BUDGET_MOST, budget + COMPANY)
                ahead = timeline.generation - timeline.playback(now)
                left.append(limit - ahead)
                overrun(job, ahead, limit, now)

    simulation.world.watch = watch
    return left


def stormy(seed: int) -> Scenario:
    """Everything that moves a cursor, often: short replies, interruptions, faults, bad reports."""
    shipped = closed(load("voices", duration_s=150.0, barge_in=0.6), 12)
    return msgspec.structs.replace(
        shipped,
        talk=msgspec.structs.replace(
            shipped.talk, reply_s=Spread(4, 12, 0.3, 40), gap_ms=Spread(600, 1500, 300, 4000), turns_mean=4.0
        ),
        network=Network(delay_ms=60, jitter_ms=40, report_loss=0.2, report_late=0.2, report_late_ms=400),
        faults=Faults(stage_failure=0.003, vanish=0.03, silent_page=0.15),
    )


@pytest.mark.slow
def test_the_lookahead_is_within_its_budget_in_a_hundred_thousand_steps() -> None:
    """DESIGN §5 rule 1, under late, lost and reordered reports, silent pages, interruptions and faults."""
    steps, chunks = 0, 0
    for seed in range(1, 30):
        simulation = Simulation(stormy(seed), policy="interaction", seed=seed)
        left = check_lookahead(simulation)
        simulation.run()
        steps, chunks = steps + simulation.world.events, chunks + len(left)
        assert min(left) >= 0
        if steps >= 100_000:
            break

    assert steps >= 100_000
    assert chunks > 3000


def test_without_a_gate_the_same_check_fails() -> None:
    """The check above can fail: `fcfs` generates at full speed."""
    simulation = Simulation(stormy(1), policy="fcfs", seed=1)
    check_lookahead(simulation)

    with pytest.raises(Overrun):
        simulation.run()


# Calibrations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("requests", "first_packet_ms", "rtf"), [(1, 234, 0.47), (4, 728, 0.56), (6, 1172, 0.66)])
def test_the_report_of_qwen3_omni_is_reproduced(requests: int, first_packet_ms: float, rtf: float) -> None:
    """Table 2, all requests at once: mean first packet and mean generation RTF within 8 %."""
    once = Spread(1, 1, 1, 1)
    one = scenario.check(
        Scenario(
            calibration="qwen3-omni-report",
            # Short enough that nobody is eight seconds behind what was made: no policy hands over more.
            talk=scenario.Talk("text", Spread(12, 12, 12, 12), Spread(40, 40, 40, 40), once),
            arrivals=scenario.Arrivals("closed", concurrency=requests, ramp_s=0.0),
            duration_s=0.5,
            warmup_s=0.0,
            network=Network(delay_ms=0, jitter_ms=0, buffer_ms=0),
        )
    )
    turns = run(one, policy="fcfs").world.turns
    firsts = [(turn.published_at - turn.ended_at) / 1e6 for turn in turns]
    rtfs = [
        (turn.made_at - turn.published_at) / NANOS_PER_SECOND * 48_000 / (turn.reply - turn.published[0][1])
        for turn in turns
    ]

    assert len(turns) == requests
    assert sum(firsts) / len(firsts) == pytest.approx(first_packet_ms, rel=0.08)
    assert sum(rtfs) / len(rtfs) == pytest.approx(rtf, rel=0.08)


#: (listeners, chance of an interruption, figure, published)
PUBLISHED = [
    (8, 0.0, "ttfp_server_ms_p90", 1380),
    (16, 0.0, "with_gaps", 1 - 0.766),
    (8, 1.0, "waste", 0.4406),
]


@pytest.mark.slow
@pytest.mark.parametrize(("listeners", "chance", "figure", "published"), PUBLISHED)
def test_the_published_baseline_is_reproduced(listeners: int, chance: float, figure: str, published: float) -> None:
    """LiveServe's baseline (first come first served, LRU) within 20 %: until it is, no comparison with it counts.

    Of continuity the share of replies with gaps is compared: 20 % of a share near one would hide everything.
    """
    assert baseline(listeners, chance)[figure] == pytest.approx(published, rel=0.2)


@pytest.mark.slow
def test_at_twelve_listeners_the_baseline_has_fewer_gaps_than_the_published_one() -> None:
    """Published: 18.7 % of replies have gaps at 12 listeners and 23.4 % at 16. Here a queue grows in between: the first
    of the two is not reproduced, and docs/simulation.md says so.
    """
    assert 0.02 < baseline(12, 0.0)["with_gaps"] < 0.15


def baseline(listeners: int, chance: float) -> dict[str, Any]:
    shipped = scenario.load(SCENARIOS / "listeners.toml")
    found = report_of(
        closed(msgspec.structs.replace(shipped, duration_s=400.0, barge_in=chance), listeners), policy="fcfs", seed=1
    )
    return {**found, "ttfp_server_ms_p90": found["ttfp_server_ms"]["p90"], "with_gaps": 1 - found["continuity"]}


@pytest.mark.slow
def test_one_simulated_hour_of_thirty_two_people_completes() -> None:
    """Where nobody is turned away, everybody is answered for an hour, and nothing is held when they have gone."""
    simulation = run(closed(load("listeners", duration_s=3600.0), 32), policy="interaction admission=false")
    outcomes = {turn.outcome for turn in simulation.world.turns}

    assert len(simulation.world.turns) > 2000
    assert outcomes <= {Outcome.HEARD, Outcome.UNANSWERED}
    assert not simulation.core.sessions


def test_more_listeners_than_the_device_can_serve_are_told_busy_and_the_others_hear_no_gaps() -> None:
    """Thirty-two on lanes for about sixteen: with admission some turns are refused by name; without, half have gaps."""
    shipped = closed(load("listeners", duration_s=240.0), 32)
    admitted, crowded = (run(shipped, policy=f"interaction admission={on}") for on in ("true", "false"))
    continuous = [
        sum(map(is_continuous, heard)) / len(heard)
        for heard in ([turn for turn in one.world.turns if turn.heard_at] for one in (admitted, crowded))
    ]

    assert admitted.core.monitor["responses_busy"] == admitted.core.monitor["responses_failed"] > 0
    assert crowded.core.monitor["responses_failed"] == 0
    assert continuous[0] > 0.75
    assert continuous[1] < 0.65


@pytest.mark.parametrize("name", calibration.names())
def test_a_calibration_says_where_its_figures_are_from(name: str) -> None:
    found = calibration.load(name)

    assert found.name == name
    assert len(found.source) > 40
    assert len(found.fitted) > 40


# Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("durations_s = 3", "unknown field `durations_s`"),
        ("[network]\nspeed = 1", "unknown field `speed`"),
        ("barge_in = 2", "barge_in is 2"),
        ('calibration = "lpm"', "has no speech: it describes video stages only, which a scenario with a table `face`"),
        ('calibration = "none"', "there is no calibration 'none'; there are"),
        ("[network]\nreport_batch = 9", "report_batch"),
    ],
)
def test_a_bad_scenario_is_refused_in_words(tmp_path: Path, text: str, wrong: str) -> None:
    whole = (SCENARIOS / "listeners.toml").read_text().partition("[network]")[0]
    key = text.split()[0]
    others = "\n".join(line for line in whole.splitlines() if not line.startswith(key))
    file = tmp_path / "bad.toml"
    file.write_text(f"{others}\n{text}\n" if key == "[network]" else f"{text}\n{others}\n")

    with pytest.raises(ConfigError, match=wrong):
        Simulation(scenario.load(file), policy="interaction", seed=1)


def test_an_unknown_policy_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="there is no policy 'luck'; there are"):
        Simulation(load("listeners", duration_s=10.0), policy="luck", seed=1)
