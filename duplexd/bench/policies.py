"""`duplexd bench policies`: every policy on the same people, over concurrency and over the chance of an interruption.

1. One scenario, one calibration, no constant of which depends on policy, concurrency or p. Seeds of this table differ
   from those of any sweep that chose constants (`SWEEP_SEEDS`).
2. A figure is the mean over seeds; the smallest and largest stand beside it under `spread`.
3. Runs are independent: they go to as many processes as asked for, seed by seed, and every finished one is kept beside
   the output. A bench that was stopped goes on where it stopped, and one for more seeds adds to what is there. What was
   kept of another scenario, calibration or engine is not used.
4. `sweep` chooses the constants of `interaction`, on seeds and loads of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec

import duplexd
from duplexd import __version__
from duplexd.bench import scheduling
from duplexd.engine.policy import POLICIES, Interaction
from duplexd.errors import ConfigError
from duplexd.simulation import calibration as calibrations
from duplexd.simulation import scenario as scenarios
from duplexd.simulation.command import report_of
from duplexd.simulation.scenario import Scenario

CONCURRENCIES = (1, 2, 4, 8, 12, 16, 24, 32)
CHANCES = (0.0, 0.3, 0.5, 0.7, 1.0)
CHANCES_AT = 8  #: concurrency of the sweep over the chance of an interruption
SEED_FIRST = 101  #: of the table; further ones count up
SWEEP_SEEDS = (1, 2, 3)  #: of fits and sweeps
#: What the sweep tries, one constant at a time beside the defaults, and the loads (listeners, chance) it tries them at.
SWEEP = {
    "p_safe_ms": (50.0, 100.0, 200.0, 300.0, 400.0),
    "alpha": (0.0, 1.0, 4.0),
    "beta": (0.0, 1.0, 4.0),
}
SWEEP_S = 300.0  #: of people coming, in each of its runs
SWEEP_LOADS = ((8, 0.0), (12, 0.0), (16, 0.0), (8, 0.5))
#: Whose code a run depends on.
PACKAGES = ("engine", "media", "memory", "simulation", "streams")
CONTINUITY_MIN = 0.95  #: a load counts for `useful_rps_at_slo` while so many replies are without a gap
PERCENTILES = ("p50", "p90", "p95")
#: What LiveServe prints (arXiv 2606.22983, figures 11, 13 and 16), for its baseline (vLLM-Omni, LRU offload) and
#: itself. Its load is ShareGPT on eight H200; ours is drawn, on a fitted calibration: shapes and ratios compare,
#: seconds do not.
PUBLISHED: dict[str, dict[str, float]] = {
    "baseline": {
        "ttfp_ms_p50_c8": 860,
        "ttfp_ms_p90_c8": 1380,
        "ttfp_ms_p95_c8": 1450,
        "continuity_c12": 0.813,
        "continuity_c16": 0.766,
        "waste_p1": 0.4406,
    },
    "liveserve": {
        "ttfp_ms_p50_c8": 530,
        "ttfp_ms_p90_c8": 840,
        "ttfp_ms_p95_c8": 920,
        "continuity_c12": 0.918,
        "continuity_c16": 0.875,
        "waste_p1": 0.1238,
        "useful_rps_ratio_p0.5": 2.6,
    },
}


class Run(msgspec.Struct, frozen=True, order=True):
    """One cell of the table for one seed."""

    policy: str
    concurrency: int
    chance: float
    seed: int

    @property
    def key(self) -> str:
        return f"{self.policy}/c{self.concurrency}/p{self.chance:g}/s{self.seed}"


def seeds_of(count: int) -> tuple[int, ...]:
    """The first `count` seeds of the table. Raises ConfigError below one."""
    if count < 1:
        raise ConfigError(f"{count} seeds were asked for; at least one is needed")
    return tuple(range(SEED_FIRST, SEED_FIRST + count))


#: Loads of the table, each once: p = 0 at the common concurrency belongs to both of its halves.
LOADS = frozenset({(c, 0.0) for c in CONCURRENCIES} | {(CHANCES_AT, p) for p in CHANCES})


def runs_of(policies: Sequence[str], seeds: Sequence[int], loads: Iterable[tuple[int, float]] = LOADS) -> list[Run]:
    """All cells."""
    return sorted(Run(policy, c, p, seed) for policy in policies for c, p in loads for seed in seeds)


def bench(
    file: Path,
    *,
    output: Path | None,
    policies: Sequence[str] = (),
    seeds: Sequence[int],
    processes: int = 2,
    said: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run what is missing and put the table together.

    Raises:  ConfigError for an unknown policy or a scenario that is no closed loop.
    """
    chosen = list(policies) or list(POLICIES)
    if unknown := [name for name in chosen if name not in POLICIES]:
        raise ConfigError(f"there is no policy {', '.join(unknown)}; there are {', '.join(POLICIES)}")
    scenario = _closed(file)
    kept = run_all(scenario, runs_of(chosen, seeds), output=output, processes=processes, said=said)
    return {**table_of(kept.reports, chosen, seeds, scenario), **costs_of(scheduling.bench())}


def sweep(
    file: Path, *, output: Path | None, processes: int = 2, said: Callable[[str], None] = print
) -> dict[str, Any]:
    """The constants of `interaction`, one at a time: {"sweep": {constant: {value: {load: figures}}}}."""
    scenario = msgspec.structs.replace(_closed(file), duration_s=SWEEP_S)
    defaults = Interaction.__init__.__kwdefaults__ or {}
    spelled = {
        (name, value): "interaction" if value == defaults[name] else f"interaction {name}={value:g}"
        for name, values in SWEEP.items()
        for value in values
    }
    wanted = runs_of(sorted(set(spelled.values())), SWEEP_SEEDS, SWEEP_LOADS)
    reports = run_all(scenario, wanted, output=output, processes=processes, said=said).reports

    def cells(policy: str) -> dict[str, Any]:
        return {
            f"c{c} p{p:g}": averaged([reports[Run(policy, c, p, seed).key] for seed in SWEEP_SEEDS])
            for c, p in SWEEP_LOADS
        }

    return {
        "calibration": scenario.calibration,
        "seeds": list(SWEEP_SEEDS),
        "duration_s": scenario.duration_s,
        "sweep": {
            name: {f"{value:g}": cells(spelled[name, value]) for value in values} for name, values in SWEEP.items()
        },
    }


def _closed(file: Path) -> Scenario:
    scenario = scenarios.load(file)
    if scenario.arrivals.kind != "closed":
        raise ConfigError(f"scenario {file}: a sweep over concurrency needs a closed loop")
    return scenario


def run_all(
    scenario: Scenario, wanted: Sequence[Run], *, output: Path | None, processes: int, said: Callable[[str], None]
) -> Kept:
    """Do what is missing of the runs that are wanted, and keep it; one process: in this one."""
    kept = Kept(None if output is None else output.with_suffix(".runs.jsonl"), digest_of(scenario))
    missing = [run for run in wanted if run.key not in kept.reports]
    said(f"{len(wanted)} runs, {len(missing)} of them still to do, on {processes} processes")
    # Whole seeds first; of each the longest first, so that no process is left alone with one at the end.
    todo = sorted(missing, key=lambda run: (run.seed, -run.concurrency, run))
    if processes == 1:
        for run in todo:
            kept.keep(run, run_one(scenario, run))
        return kept
    with ProcessPoolExecutor(processes) as pool:
        futures = {pool.submit(run_one, scenario, run): run for run in todo}
        for future in as_completed(futures):
            kept.keep(futures[future], future.result())
    return kept


def costs_of(scheduler: dict[str, Any]) -> dict[str, Any]:
    """What deciding costs on the machine of the bench, out of `duplexd bench scheduler`."""
    return {name: scheduler[name] for name in ("round_us_1000_sessions", "overhead_us_per_step")}


def run_one(scenario: Scenario, run: Run) -> dict[str, Any]:
    arrivals = msgspec.structs.replace(scenario.arrivals, concurrency=run.concurrency)
    changed = msgspec.structs.replace(scenario, arrivals=arrivals, barge_in=run.chance)
    return report_of(changed, policy=run.policy, seed=run.seed)


def digest_of(scenario: Scenario) -> str:
    """Names everything a run depends on but its own cell: version, code, scenario, calibration."""
    calibration = calibrations.load(scenario.calibration)
    digest = hashlib.sha256(msgspec.json.encode([__version__, scenario, calibration], order="deterministic"))
    home = Path(duplexd.__file__).parent
    for file in sorted(file for package in PACKAGES for file in (home / package).glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


class Kept:
    """Finished runs, one a line beside the output."""

    def __init__(self, file: Path | None, digest: str) -> None:
        self._file = file
        self._digest = digest
        self.reports: dict[str, dict[str, Any]] = {}
        for line in file.read_text().splitlines() if file is not None and file.exists() else ():
            entry = json.loads(line)
            if entry["digest"] == digest:
                self.reports[entry["run"]] = entry["report"]

    def keep(self, run: Run, report: dict[str, Any]) -> None:
        self.reports[run.key] = report
        if self._file is not None:
            with self._file.open("a") as out:
                out.write(json.dumps({"digest": self._digest, "run": run.key, "report": report}) + "\n")


# The table ------------------------------------------------------------------------------------------------------------


def table_of(
    reports: dict[str, dict[str, Any]], policies: Sequence[str], seeds: Sequence[int], scenario: Scenario
) -> dict[str, Any]:
    """The JSON of the bench; concurrency at p = 0, chances at concurrency 8, keys as text."""

    def cell(policy: str, concurrency: int, chance: float) -> dict[str, Any]:
        return averaged([reports[Run(policy, concurrency, chance, seed).key] for seed in seeds])

    tables: dict[str, Any] = {
        policy: {
            "c": {str(c): cell(policy, c, 0.0) for c in CONCURRENCIES},
            "p": {f"{p:g}": cell(policy, CHANCES_AT, p) for p in CHANCES},
        }
        for policy in policies
    }
    for table in tables.values():
        table["useful_rps_at_slo"] = max(
            (cell["useful_rps"] for cell in table["c"].values() if cell["continuity"] >= CONTINUITY_MIN), default=0.0
        )
    return {
        "scenario": scenario.about.strip(),
        "calibration": scenario.calibration,
        "seeds": list(seeds),
        "duration_s": scenario.duration_s,
        "continuity_slo": CONTINUITY_MIN,
        "policies": tables,
        "published": PUBLISHED,
        "against_fcfs": {policy: compared(tables[policy], tables["fcfs"]) for policy in policies if "fcfs" in tables},
    }


def averaged(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean over seeds of every figure, with the smallest and largest of the ones the goals are about."""
    cell: dict[str, Any] = {}
    for name in ("ttfp_ms", "ttfp_server_ms", "ttft_ms", "ttfas_ms", "jct_ms", "jitter_ms"):
        cell[name] = {share: _mean((r[name][share] for r in reports), 2) for share in PERCENTILES}
    cell["rtf"] = _mean((r["rtf"]["p50"] for r in reports), 4)
    for name in ("continuity", "waste", "useful_rps", "replies_per_second", "pacing", "gap_ms_longest"):
        cell[name] = _mean((r[name] for r in reports), 5)
    cell["waste_per_stage"] = {
        stage: _mean((r["waste_per_stage"][stage] for r in reports), 5) for stage in reports[0]["waste_per_stage"]
    }
    cell["turns"] = sum(r["turns"] for r in reports)
    cell["spread"] = {
        "ttfp_ms_p90": _ends(r["ttfp_ms"]["p90"] for r in reports),
        "continuity": _ends(r["continuity"] for r in reports),
        "waste": _ends(r["waste"] for r in reports),
        "useful_rps": _ends(r["useful_rps"] for r in reports),
    }
    return cell


def compared(table: dict[str, Any], baseline: dict[str, Any]) -> dict[str, float]:
    """The goals' figures against the baseline in the same runs; negative is less."""
    eight, half = str(CHANCES_AT), "0.5"
    return {
        "ttfp_p90_c8": _change(table["c"][eight]["ttfp_ms"]["p90"], baseline["c"][eight]["ttfp_ms"]["p90"]),
        "ttfp_server_p90_c8": _change(
            table["c"][eight]["ttfp_server_ms"]["p90"], baseline["c"][eight]["ttfp_server_ms"]["p90"]
        ),
        "continuity_c12": table["c"]["12"]["continuity"],
        "continuity_c16": table["c"]["16"]["continuity"],
        "waste_p0.5": table["p"][half]["waste"],
        "useful_rps_p0.5": _ratio(table["p"][half]["useful_rps"], baseline["p"][half]["useful_rps"]),
        "useful_rps_at_slo": _ratio(table["useful_rps_at_slo"], baseline["useful_rps_at_slo"]),
    }


def _mean(values: Iterable[float], digits: int) -> float:
    return round(mean(values), digits)


def _ends(values: Iterable[float]) -> list[float]:
    found = sorted(values)
    return [round(found[0], 5), round(found[-1], 5)]


def _change(value: float, before: float) -> float:
    return round(value / before - 1, 4) if before else 0.0


def _ratio(value: float, before: float) -> float:
    return round(value / before, 3) if before else 0.0


def rows_of(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table for people: one line a policy and load."""
    rows: list[tuple[str, ...]] = []
    for policy, table in report["policies"].items():
        for kind in ("c", "p"):
            for key, cell in table[kind].items():
                ear = "/".join(f"{cell['ttfp_ms'][share]:.0f}" for share in PERCENTILES)
                server = "/".join(f"{cell['ttfp_server_ms'][share]:.0f}" for share in PERCENTILES)
                rows.append(
                    (
                        policy,
                        f"{kind}={key}",
                        ear,
                        server,
                        f"{cell['continuity']:.1%}",
                        f"{cell['waste']:.1%}",
                        f"{cell['useful_rps']:.3f}",
                        f"{cell['rtf']:.3f}",
                        f"{cell['pacing']:.2f}",
                    )
                )
    return rows


HEADINGS = ("policy", "load", "ttfp ms", "server ms", "continuity", "waste", "useful/s", "rtf", "pacing")
