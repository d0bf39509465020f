"""The bench of policies: which runs there are, how they become a table, and that a stopped one goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from duplexd.bench import command, policies
from duplexd.bench.policies import CHANCES, CONCURRENCIES, Kept, Run
from duplexd.errors import ConfigError
from duplexd.simulation import scenario

LISTENERS = Path("demos/scenarios/listeners.toml")


def report(**changes: Any) -> dict[str, Any]:
    """A run's report with figures that are easy to follow."""
    shares = {"p50": 100.0, "p90": 200.0, "p95": 300.0, "count": 9}
    names = ("ttfp_ms", "ttfp_server_ms", "ttft_ms", "ttft_away_ms", "ttfas_ms", "jct_ms", "jitter_ms", "rtf")
    flat = dict.fromkeys(("waste", "useful_rps", "replies_per_second", "pacing", "gap_ms_longest"), 0.5)
    stages = {"waste_per_stage": {"think": 0.1, "talk": 0.2, "render": 0.3}}
    guesses = {"guesses": {"dropped_s": {"think": 1.0, "talk": 0.0, "render": 0.0}}}
    counted = {"continuity": 1.0, "turns": 10, "counters": {"pages_restored": 6.0}}
    return {**dict.fromkeys(names, shares), **flat, **stages, **guesses, **counted, **changes}


NOBODY = {"p50": None, "p90": None, "p95": None, "count": 0}


def test_every_cell_is_run_once_for_each_policy_and_seed() -> None:
    runs = policies.runs_of(["fcfs", "interaction"], [1, 2, 3])

    assert len(runs) == len(set(runs)) == 2 * 3 * (len(CONCURRENCIES) + len(CHANCES) - 1)


def test_the_table_has_the_keys_of_the_issue_and_means_over_seeds() -> None:
    runs = policies.runs_of(["fcfs", "interaction"], [1, 2])
    reports = {
        run.key: report(
            continuity=0.5 + 0.25 * run.seed if run.policy == "fcfs" else 1.0,
            useful_rps=run.concurrency / 10,
            waste=run.chance / (2 if run.policy == "fcfs" else 20),
            ttfp_ms={"p50": 1, "p90": 100.0 * run.seed * (2 if run.policy == "fcfs" else 1), "p95": 1},
        )
        for run in runs
    }
    table = policies.table_of(reports, ["fcfs", "interaction"], [1, 2], scenario.load(LISTENERS))
    fcfs, ours = table["policies"]["fcfs"], table["policies"]["interaction"]

    assert set(fcfs["c"]) == {str(c) for c in CONCURRENCIES}
    assert set(fcfs["p"]) == {"0", "0.3", "0.5", "0.7", "1"}
    assert {"ttfp_ms", "continuity", "waste", "useful_rps", "rtf"} <= set(fcfs["c"]["8"])
    assert fcfs["c"]["8"]["continuity"] == 0.875
    assert fcfs["c"]["8"]["spread"]["continuity"] == [0.75, 1.0]
    assert fcfs["c"]["8"]["pages_restored"] == 6.0
    assert fcfs["useful_rps_at_slo"] == 0.0
    assert ours["useful_rps_at_slo"] == 3.2
    assert table["against_fcfs"]["interaction"] == {
        "ttfp_p90_c8_by_seed": [-0.5, -0.5],
        "pacing_c8": 0.5,
        "ttfp_p90_c8": -0.5,
        "ttfp_server_p90_c8": 0.0,
        "continuity_c12": 1.0,
        "continuity_c16": 1.0,
        "waste_p0.5": 0.025,
        "useful_rps_p0.5": 1.0,
        "useful_rps_at_slo": 0.0,
    }
    rows = {row[:2]: row for row in policies.rows_of(table)}
    assert len(rows) == 2 * 13
    assert rows["fcfs", "c=12"][-1] == "continuity 0.813"
    assert rows["interaction", "p=1"][-1] == "waste_p1 0.1238"
    assert rows["interaction", "p=0.3"][-1] == ""


def test_a_table_of_the_goals_alone_has_their_loads_and_nothing_else() -> None:
    loads = policies.GRIDS["goals"]
    runs = policies.runs_of(["fcfs"], [1], loads)
    reports = {run.key: report() for run in runs}
    table = policies.table_of(reports, ["fcfs"], [1], scenario.load(LISTENERS), loads=loads)

    assert set(table["policies"]["fcfs"]["c"]) == {"8", "12", "16"}
    assert set(table["policies"]["fcfs"]["p"]) == {"0", "0.5"}
    assert table["against_fcfs"]["fcfs"]["waste_p0.5"] == 0.5
    assert policies.GRIDS["goals"] < policies.GRIDS["whole"] < policies.GRIDS["finer"]


def test_what_nobody_heard_to_its_end_has_no_figure() -> None:
    """With every reply interrupted, no reply has a last chunk that was wanted: that is no time of 0."""
    nothing = report(rtf=NOBODY, jct_ms=NOBODY, pacing=None)
    cell = policies.averaged([nothing, nothing])
    mixed = policies.averaged([nothing, report()])

    assert cell["rtf"] is cell["pacing"] is cell["jct_ms"]["p90"] is None
    assert (mixed["rtf"], mixed["pacing"]) == (100.0, 0.5)
    assert policies.rows_of({"policies": {"fcfs": {"p": {"1": cell}}}})[0][-3:-1] == ("-", "-")


def test_a_stopped_bench_goes_on_and_forgets_what_another_scenario_left(tmp_path: Path) -> None:
    file = tmp_path / "policies.runs.jsonl"
    one, other = Run("fcfs", 8, 0.0, 1), Run("fcfs", 8, 0.5, 1)
    Kept(file, "aaaa").keep(one, report())
    Kept(file, "bbbb").keep(other, report())

    assert list(Kept(file, "aaaa").reports) == [one.key]
    assert list(Kept(file, "cccc").reports) == []


def test_another_duration_is_another_digest() -> None:
    shipped = scenario.load(LISTENERS)
    longer = msgspec.structs.replace(shipped, duration_s=shipped.duration_s + 1)

    assert policies.digest_of(shipped) != policies.digest_of(longer)


def test_a_sweep_tries_each_constant_at_every_load_on_seeds_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not asked of the simulation again: the second sweep finds every run beside its output."""
    ran: list[Run] = []
    monkeypatch.setattr(policies, "run_one", lambda scenario, run: ran.append(run) or report())
    output = tmp_path / "sweep.json"
    found = [policies.sweep(LISTENERS, output=output, processes=1, said=lambda line: None) for _ in range(2)]
    others = sum(len(values) - 1 for values in policies.SWEEP.values())

    assert len(ran) == len(set(ran)) == (1 + others) * len(policies.SWEEP_LOADS) * len(policies.SWEEP_SEEDS)
    assert not {run.seed for run in ran} & set(policies.seeds_of(20))
    assert found[0] == found[1]
    assert set(found[0]["sweep"]["p_safe_ms"]["200"]) == {"c8 p0", "c12 p0", "c16 p0", "c8 p0.5", "c32 p0"}


def test_what_deciding_costs_stands_in_the_table() -> None:
    scheduler = {"round_us_1000_sessions": 400.0, "overhead_us_per_step": 90.0, "overhead_steps": 7}

    assert policies.costs_of(scheduler) == {"round_us_1000_sessions": 400.0, "overhead_us_per_step": 90.0}


def test_one_run_serves_the_people_of_its_cell() -> None:
    shipped = msgspec.structs.replace(scenario.load(LISTENERS), duration_s=30.0, warmup_s=0.0)
    found = policies.run_one(shipped, Run("fcfs", 2, 1.0, 5))

    assert found["turns"] > 2
    assert found["outcomes"]["interrupted"] == found["turns"]
    assert 0.1 < found["waste"] < 0.7


@pytest.mark.parametrize(
    ("file", "chosen", "wrong"),
    [
        (LISTENERS, ["luck"], "there is no policy 'luck'; there are"),
        (LISTENERS, ["interaction fortune=false"], "has no option 'fortune'"),
        (Path("demos/scenarios/burst-trace.toml"), ["fcfs"], "is trace; a sweep over concurrency needs a closed loop"),
    ],
)
def test_a_bench_that_makes_no_sense_is_refused(file: Path, chosen: list[str], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        policies.bench(file, output=None, policies=chosen, seeds=[1])


# Other loads, and what is taken away ----------------------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Run]]:
    """What was run: scenario and cell. Nothing is simulated."""
    found: list[tuple[str, Run]] = []

    def note(one: Any, run: Run) -> dict[str, Any]:
        found.append((one.about, run))
        return report(useful_rps=run.rate * (1.0 if run.chance == 0.0 or run.policy != "fcfs" else 0.5))

    monkeypatch.setattr(policies, "run_one", note)
    return found


def test_an_open_loop_is_swept_over_its_rate(ran: list[tuple[str, Run]]) -> None:
    file = Path("demos/scenarios/poisson.toml")
    chosen = ["fcfs", "interaction company=false"]
    found = policies.bench(file, output=None, policies=chosen, seeds=[1], processes=1, said=lambda line: None)
    against = found["against_fcfs"]["interaction company=false"]

    assert len(set(ran)) == len(ran) == 2 * len(policies.RATES) * len(policies.OPEN_CHANCES)
    assert {run.concurrency for _, run in ran} == {0}
    assert set(found["policies"]["fcfs"]["r"]["0.5"]) == {f"{rate:g}" for rate in policies.RATES}
    assert against == {"useful_rps_most_p0": 1.0, "useful_rps_most_p0.5": 2.0}
    assert len(policies.rows_of(found)) == len(ran)


def test_an_open_loop_comes_as_often_as_its_cell_says() -> None:
    one = msgspec.structs.replace(
        scenario.load(Path("demos/scenarios/poisson.toml")), duration_s=60.0, warmup_s=0.0, drain_s=10.0
    )
    few, many = (policies.run_one(one, Run("fcfs", 0, 0.0, 1, rate))["turns"] for rate in (0.1, 0.6))

    assert 0 < few < 15 < 25 < many


def test_each_mechanism_is_taken_away_once_on_a_load_that_can_show_it(ran: list[tuple[str, Run]]) -> None:
    report = policies.ablations(LISTENERS, output=None, processes=1, said=lambda line: None)
    found = report["ablations"]
    away = {policy.partition(" ")[2].partition("=")[0] for cells in found.values() for policy in cells} - {""}

    assert away == {
        *("order", "gate", "company", "beginnings", "feed", "admission", "misfit"),
        *("speculation", "slack_chunks", "prefill", "next_use", "preload"),
    }
    assert all("interaction" in cells for cells in found.values())
    assert len(ran) == len(set(ran))
    assert set(found["listeners"]["interaction"]) == {"c8 p0", "c12 p0", "c16 p0", "c32 p0", "c8 p0.5"}
    assert set(report["digests"]) == set(found)
    # What stands in for one another is taken away together as well.
    assert "interaction prefill=false preload=false" in found["returning"]


def test_turns_whose_memory_was_away_are_compared_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = next(iter(policies.WARM.values())), list(policies.WARM.values())[-1]

    def away(one: Any, run: Run) -> dict[str, Any]:
        return report(
            ttft_away_ms={"p50": {first: 300.0, last: 90.0}.get(run.policy, 200.0), "p90": 1, "p95": 1, "count": 4}
        )

    monkeypatch.setattr(policies, "run_one", away)
    file = Path("demos/scenarios/returning.toml")
    found = policies.warm(file, output=None, seeds=[1, 2], processes=1, said=lambda line: None)

    assert found["against"][next(iter(policies.WARM))]["p50"] == 0.0
    assert found["against"]["interaction"]["p50"] == -0.7
    assert found["warm"]["interaction"]["turns_away"] == 8
    assert found["published"] == {"baseline": 302.1, "liveserve": 127.8}


def test_what_an_ablation_costs_the_ear_stands_in_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    """A guess that was right shortens the wait at the ear, and nothing after the turn was taken."""
    spread = {"p50": 745.2, "p90": 838.0}
    cell = {
        **dict.fromkeys(("ttfp_ms", "ttfp_server_ms"), spread),
        "ttft_away_ms": {"p50": None, "p90": None},
        "continuity": 1.0,
        "waste": 0.02,
        "useful_rps": 0.2,
        "guesses_dropped_s": {"render": 17.1},
    }
    command._publish_cells({"pocket": {"interaction": {"c2 p0.3": cell}}}, {}, None)
    shown = capsys.readouterr().out

    assert "745/838" in shown
    assert "17.1" in shown
    assert "-/-" in shown
