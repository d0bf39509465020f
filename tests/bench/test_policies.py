"""The bench of policies: which runs there are, how they become a table, and that a stopped one goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from duplexd.bench import policies
from duplexd.bench.policies import CHANCES, CONCURRENCIES, Kept, Run
from duplexd.errors import ConfigError
from duplexd.simulation import scenario

LISTENERS = Path("demos/scenarios/listeners.toml")


def report(**changes: Any) -> dict[str, Any]:
    """A run's report with figures that are easy to follow."""
    shares = {"p50": 100.0, "p90": 200.0, "p95": 300.0}
    names = ("ttfp_ms", "ttfp_server_ms", "ttft_ms", "ttfas_ms", "jct_ms", "jitter_ms", "rtf")
    flat = dict.fromkeys(("waste", "useful_rps", "replies_per_second", "pacing", "gap_ms_longest"), 0.5)
    stages = {"waste_per_stage": {"think": 0.1, "talk": 0.2, "render": 0.3}}
    return {**dict.fromkeys(names, shares), **flat, **stages, "continuity": 1.0, "turns": 10, **changes}


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
    assert fcfs["useful_rps_at_slo"] == 0.0
    assert ours["useful_rps_at_slo"] == 3.2
    assert table["against_fcfs"]["interaction"]["waste_p0.5"] == 0.025
    assert len(policies.rows_of(table)) == 2 * 13


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
    assert set(found[0]["sweep"]["p_safe_ms"]["200"]) == {"c8 p0", "c12 p0", "c16 p0", "c8 p0.5"}


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
        (LISTENERS, ["luck"], "there is no policy luck; there are"),
        (Path("demos/scenarios/poisson.toml"), ["fcfs"], "needs a closed loop"),
    ],
)
def test_a_bench_that_makes_no_sense_is_refused(file: Path, chosen: list[str], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        policies.bench(file, output=None, policies=chosen, seeds=[1])
