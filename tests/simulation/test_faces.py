"""LPM's figures through the engine's pipeline and gate, as `duplexd simulate` shows them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from duplexd.errors import ConfigError
from duplexd.ids import ChunkId, SessionId
from duplexd.simulation import calibration, faces
from duplexd.simulation.command import simulate
from duplexd.simulation.faces import FaceScenario, FaceWorld, figures
from duplexd.simulation.link import Network
from duplexd.units import NANOS_PER_MS, Ticks

LPM = Path("demos/scenarios/lpm.toml")
FILL_MS = 700 + 700 + 180


def load(*, network: Network | None = None, duration_s: float = 60.0, **face: Any) -> FaceScenario:
    """The shipped scenario with what a test changes; nobody wishes or interrupts unless it says so."""
    shipped = faces.load(LPM)
    quiet = msgspec.structs.replace(shipped.face, condition_every_s=0.0, interrupt_every_s=0.0)
    return msgspec.structs.replace(
        shipped,
        face=msgspec.structs.replace(quiet, **face),
        duration_s=duration_s,
        network=network or shipped.network,
    )


def run(scenario: FaceScenario, policy: str = "interaction", *, seed: int = 1) -> FaceWorld:
    world = FaceWorld(scenario, policy=policy, seed=seed)
    world.run()
    return world


def test_at_full_speed_the_period_is_that_of_the_slowest_stage_and_the_first_pixel_takes_all_three() -> None:
    """LPM: 700 ms +- 2 %, 1.58 s +- 2 %, on devices that share nothing."""
    found = figures(run(load(), "fcfs"))

    assert found["first_pixel_ms"]["p50"] == pytest.approx(1580, rel=0.02)
    assert found["period_ms"]["p50"] == pytest.approx(700, rel=0.02)
    assert found["period_ms"]["p95"] == pytest.approx(700, rel=0.02)


def test_behind_the_gate_the_period_is_that_of_playback_and_nothing_stands_still() -> None:
    found = figures(run(load(), "interaction"))

    assert found["first_pixel_ms"]["p50"] == pytest.approx(1580, rel=0.02)
    assert found["period_ms"]["p50"] == pytest.approx(1000, rel=0.02)
    assert (found["gaps"], found["over_gate"]) == (0, 0)


def test_a_reaction_is_the_wait_for_a_boundary_and_the_way_through() -> None:
    """Whatever the phase of a wish: one launch of the generator at most, then all three stages."""
    world = run(load(condition_every_s=3.0, duration_s=120.0), "fcfs")
    reactions = world.links[SessionId(1)].reactions
    waits = [(one.begun - one.changed) / NANOS_PER_MS for one in reactions]

    assert len(reactions) > 20
    assert all(0 <= wait <= 700 for wait in waits)
    assert max(waits) - min(waits) > 300
    assert all(one.published - one.begun == FILL_MS * NANOS_PER_MS for one in reactions)


def test_what_is_far_ahead_of_the_eye_is_long_in_reacting() -> None:
    """Both have the new condition made as fast; without a gate it lies behind all that was made before it."""
    scenario = load(condition_every_s=3.0)
    free, gated = (figures(run(scenario, policy)) for policy in ("fcfs", "interaction"))

    assert free["lookahead_ms"]["p95"] > 3 * gated["lookahead_ms"]["p95"]
    assert free["reaction_seen_ms"]["p50"] > 2 * gated["reaction_seen_ms"]["p50"]


def test_an_interruption_takes_away_what_was_made_ahead_and_a_new_epoch_begins_where_the_picture_stood() -> None:
    scenario = load(interrupt_every_s=10.0, duration_s=600.0)
    free, gated = run(scenario, "fcfs"), run(scenario, "interaction")
    link = gated.links[SessionId(1)]
    again = [took / NANOS_PER_MS for took in link.again]

    assert len(again) > 30
    # The old epoch's launch holds the generator for its time, and nothing else stands in the way but the network. What
    # the old epoch still publishes until the engine has learnt of it (seed 1: 5 and 14 ms later) is no answer.
    assert all(FILL_MS <= ms <= 700 + FILL_MS + 100 for ms in again)
    assert {epoch for epoch, _ in link.published} == set(range(len(again) + 1))
    assert figures(free)["waste"] > 4 * figures(gated)["waste"] > 0


def test_two_people_are_more_than_the_devices_can_do() -> None:
    """Each needs .7 of a generator: they share it fairly, and both pictures stand still again and again."""
    world = run(load(people=2))
    found = figures(world)
    chunks = Counter({session: len(link.published) for session, link in world.links.items()})

    assert found["device_busy"]["generator"] > 0.99
    assert found["gaps"] > 40
    assert max(chunks.values()) - min(chunks.values()) <= 1


def test_on_one_device_the_stages_take_turns(tmp_path: Path) -> None:
    """What `capacities` and `device` are for: 1.58 s for every second of picture."""
    file = tmp_path / "one.toml"
    stages = calibration.load("lpm").stages.items()
    file.write_text(
        "name = 'one'\nsource = ''\nfitted = ''\n"
        + "".join(f"[stages.{name}]\ndevice = 'one'\nfixed_us = {one.fixed_us}\n" for name, one in stages)
    )
    found = figures(run(msgspec.structs.replace(load(), calibration=str(file)), "fcfs"))

    assert found["period_ms"]["p50"] == pytest.approx(1580, rel=0.02)
    assert found["device_busy"] == {"one": pytest.approx(1.0, abs=0.01)}


def test_a_bad_network_never_moves_generation_past_the_gate() -> None:
    """A third of the reports is lost, a third overtaken; two people interrupt and wish for something else."""
    network = Network(jitter_ms=30.0, report_loss=0.33, report_late=0.33)
    found = figures(
        run(load(people=2, network=network, condition_every_s=2.0, interrupt_every_s=4.0, duration_s=300.0), seed=7)
    )

    assert found["chunks"] > 250
    assert found["over_gate"] == 0


def test_a_chunk_beyond_the_gate_is_counted() -> None:
    world = run(load(duration_s=10.0))
    link = world.links[SessionId(1)]
    link.begin(ChunkId(999), Ticks(0), world.now)

    assert figures(world)["over_gate"] == 1


def test_a_seed_is_a_run_whatever_the_order_of_hashes(tmp_path: Path) -> None:
    """Two processes with two hash seeds write the same bytes; another seed writes others."""
    written = []
    for number, (seed, hashes) in enumerate((("3", "0"), ("3", "77"), ("4", "0"))):
        file = tmp_path / f"{number}.json"
        command = [sys.executable, "-m", "duplexd", "simulate", str(LPM), "--seed", seed, "--json", str(file)]
        env = {**os.environ, "PYTHONHASHSEED": hashes}
        subprocess.run(command, check=True, capture_output=True, env=env, timeout=60)
        written.append(file.read_text())

    assert written[0] == written[1]
    assert json.loads(written[0])["reaction_ms"] != json.loads(written[2])["reaction_ms"]


def test_the_command_shows_what_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lpm.json"
    simulate(LPM, policy="fcfs", seed=1, output=file)
    report, shown = json.loads(file.read_text()), capsys.readouterr().out

    assert report["calibration"] == "lpm"
    assert all(name in report for name in faces.SHOWN)
    assert all(name in shown for name in ("first_pixel_ms", "period_ms", "reaction_ms", "lookahead_ms"))


@pytest.mark.parametrize(
    ("before", "after", "wrong"),
    [
        ('"lpm"', '"pocket"', "pocket has no stage 'generate': it describes no video"),
        ('"lpm"', '"none"', "there is no calibration 'none'"),
        ("people = 1", "people = 0", "face.people is 0; it lies in 1..64"),
        ("chunk_ms = 1000", "chunk_ms = 2000", "face.chunk_ms is 2000"),
        ("interrupt_every_s = 30", "interrupt_every_s = 0.1", "0 or at least 1"),
        ("people = 1", "persons = 1", "unknown field `persons`"),
        ("duration_s = 600", "duration_s = 0", "duration_s is 0"),
    ],
)
def test_a_bad_scenario_is_refused_in_words(tmp_path: Path, before: str, after: str, wrong: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(LPM.read_text().replace(before, after))

    with pytest.raises(ConfigError, match=wrong):
        FaceWorld(faces.load(file), policy="interaction", seed=1)
