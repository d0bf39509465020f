"""`duplexd bench policies`: every policy on the same people, over concurrency and over the chance of an interruption.

1. One scenario, one calibration, no constant of which depends on policy, concurrency or p. Seeds of this table differ
   from those of any sweep that chose constants (`SWEEP_SEEDS`).
2. A figure is the mean over seeds; the smallest and largest stand beside it under `spread`.
3. Runs are independent: they go to as many processes as asked for, seed by seed, and every finished one is kept beside
   the output. A bench that was stopped goes on where it stopped, and one for more seeds adds to what is there. What was
   kept of another scenario, calibration or engine is not used.
4. `sweep` chooses the constants of `interaction`, on seeds and loads of its own; `ablations` takes its mechanisms away
   one by one, each on a load where it could show something; `warm` compares turns whose memory was away.
5. A policy is written as `duplexd simulate` takes it: a name, and options behind it ("interaction company=false").
6. An open loop (`kind = "poisson"` or `"gamma"`) is swept over its rate instead of over concurrency.
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
from duplexd.engine.policy import POLICIES, Interaction, policy_of
from duplexd.engine.policy import spelled as taken_apart
from duplexd.errors import ConfigError
from duplexd.simulation import calibration as calibrations
from duplexd.simulation import scenario as scenarios
from duplexd.simulation.command import report_of
from duplexd.simulation.scenario import Scenario

CONCURRENCIES = (1, 2, 4, 8, 12, 16, 24, 32)
CHANCES = (0.0, 0.3, 0.5, 0.7, 1.0)
CHANCES_AT = 8  #: concurrency of the sweep over the chance of an interruption
FINER = (9, 10, 11, 14, 18, 20)  #: concurrencies between them, for whoever asks where continuity is lost
RATES = (0.4, 0.6, 0.8, 1.0)  #: visits a second of an open loop
OPEN_CHANCES = (0.0, 0.5)
SEED_FIRST = 101  #: of the table; further ones count up
SWEEP_SEEDS = (1, 2, 3)  #: of fits and sweeps
#: What the sweep tries, one constant at a time beside the defaults, and the loads (listeners, chance) it tries them at.
SWEEP = {
    "p_safe_ms": (50.0, 100.0, 200.0, 300.0, 400.0),
    "alpha": (0.0, 1.0, 4.0),
    "beta": (0.0, 1.0, 4.0),
}
SWEEP_S = 300.0  #: of people coming, in each of its runs
GOAL_LOADS = ((8, 0.0), (12, 0.0), (16, 0.0), (8, 0.5))
SWEEP_LOADS = (*GOAL_LOADS, (32, 0.0))  #: what is best for those whom the lanes can serve may be worst for a crowd
#: What is taken away, and on which scenarios beside the bench's own that could show something.
ABLATIONS: dict[str, tuple[str, ...]] = {
    "listeners": (
        *("order=false", "gate=false", "company=false", "beginnings=false", "feed=false", "admission=false"),
        "misfit=stop",
    ),
    "pocket": ("speculation=false", "slack_chunks=false", "prefill=false"),
    "returning": (
        *("next_use=false", "preload=false", "prefill=false", "misfit=stop"),
        "prefill=false preload=false",  # They stand in for one another: with either gone the other does its work.
    ),
}
#: `interaction` without everything but bringing memory back early: an engine of requests, and that alone.
PRELOAD_ALONE = (
    "interaction order=false gate=false next_use=false speculation=false slack_chunks=false admission=false "
    "company=false beginnings=false feed=false prefill=false"
)
#: Turns whose memory was away: what stands for an engine of requests, then what each part is worth.
WARM = {
    "fcfs, all at the end of the turn": "fcfs prefill=false",
    "and memory comes back at speech onset": PRELOAD_ALONE,
    "fcfs, speech prefilled as it comes": "fcfs",
    "interaction, nothing guessed": "interaction speculation=false",
    "interaction": "interaction",
}
#: Whose code a run depends on.
PACKAGES = ("engine", "media", "memory", "simulation", "streams")
CONTINUITY_MIN = 0.95  #: a load counts for `useful_rps_at_slo` while so many replies are without a gap
PERCENTILES = ("p50", "p90", "p95")
#: What LiveServe prints (arXiv 2606.22983, figures 11 to 16), for its baseline (vLLM-Omni, LRU offload) and
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
        "pacing": 0.124,
        "ttft_away_ms": 302.1,
        "poisson_ttfp_ms_p90": 1130,
        "poisson_useful_rps": 0.82,
    },
    "liveserve": {
        "ttfp_ms_p50_c8": 530,
        "ttfp_ms_p90_c8": 840,
        "ttfp_ms_p95_c8": 920,
        "continuity_c12": 0.918,
        "continuity_c16": 0.875,
        "waste_p1": 0.1238,
        "useful_rps_ratio_p0.5": 2.6,
        "pacing": 0.839,
        "ttft_away_ms": 127.8,
        "poisson_ttfp_ms_p90": 680,
        "poisson_useful_rps": 1.18,
        "ttfp_p90_change_p0": -0.298,
        "ttfp_p90_change_p0.5": -0.398,
    },
}
#: Which published figure stands beside which cell of the table: (policy, kind, key) -> names of `PUBLISHED`.
BESIDE = {
    ("c", "8"): "ttfp_ms_p90_c8",
    ("c", "12"): "continuity_c12",
    ("c", "16"): "continuity_c16",
    ("p", "1"): "waste_p1",
}
STANDS_FOR = {"fcfs": "baseline", "interaction": "liveserve"}


class Run(msgspec.Struct, frozen=True, order=True):
    """One cell of the table for one seed."""

    policy: str
    concurrency: int
    chance: float
    seed: int
    rate: float = 0.0  #: of an open loop; then there is no concurrency

    @property
    def key(self) -> str:
        load = f"r{self.rate:g}" if self.rate else f"c{self.concurrency}"
        return f"{self.policy}/{load}/p{self.chance:g}/s{self.seed}"


def seeds_of(count: int) -> tuple[int, ...]:
    """The first `count` seeds of the table. Raises ConfigError below one."""
    if count < 1:
        raise ConfigError(f"{count} seeds were asked for; at least one is needed")
    return tuple(range(SEED_FIRST, SEED_FIRST + count))


#: Loads of the table, each once: p = 0 at the common concurrency belongs to both of its halves.
LOADS = frozenset({(c, 0.0) for c in CONCURRENCIES} | {(CHANCES_AT, p) for p in CHANCES})
#: How much of it: those that goals are about, all, and more where continuity is lost.
GRIDS: dict[str, frozenset[tuple[int, float]]] = {
    "goals": frozenset(GOAL_LOADS),
    "whole": LOADS,
    "finer": LOADS | {(c, 0.0) for c in FINER},
}


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
    grid: str = "whole",
    said: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run what is missing and put the table together: over concurrency, or over the rate of an open loop.

    Args:    policies: by name, or with options behind it; none: all. grid: which loads of a closed loop, see `GRIDS`.

    Raises:  ConfigError for an unknown policy or option, or a scenario that plays a trace.
    """
    chosen = list(policies) or list(POLICIES)
    for policy in chosen:
        policy_of(*taken_apart(policy))
    scenario = scenarios.load(file)
    if scenario.arrivals.kind in ("poisson", "gamma"):
        return _bench_open(scenario, chosen, seeds, output=output, processes=processes, said=said)
    scenario = _closed(file)
    loads = GRIDS[grid]
    kept = run_all(scenario, runs_of(chosen, seeds, loads), output=output, processes=processes, said=said)
    table = table_of(kept.reports, chosen, seeds, scenario, loads=loads)
    return {**table, **costs_of(scheduling.bench())}


def _bench_open(
    scenario: Scenario,
    policies: Sequence[str],
    seeds: Sequence[int],
    *,
    output: Path | None,
    processes: int,
    said: Callable[[str], None],
) -> dict[str, Any]:
    """{"policies": {policy: {"r": {chance: {rate: figures}}}}}, and the most useful replies a second beside `fcfs`."""
    runs = [Run(policy, 0, p, seed, r) for policy in policies for r in RATES for p in OPEN_CHANCES for seed in seeds]
    reports = run_all(scenario, runs, output=output, processes=processes, said=said).reports
    tables = {
        policy: {
            "r": {
                f"{p:g}": {f"{r:g}": averaged([reports[Run(policy, 0, p, s, r).key] for s in seeds]) for r in RATES}
                for p in OPEN_CHANCES
            }
        }
        for policy in policies
    }

    def most(policy: str, chance: float) -> float:
        return max(float(cell["useful_rps"]) for cell in tables[policy]["r"][f"{chance:g}"].values())

    against = {
        policy: {f"useful_rps_most_p{p:g}": _ratio(most(policy, p), most("fcfs", p)) for p in OPEN_CHANCES}
        for policy in policies
        if "fcfs" in tables
    }
    return {**_about(scenario, seeds), "policies": tables, "published": PUBLISHED, "against_fcfs": against}


def _about(scenario: Scenario, seeds: Sequence[int]) -> dict[str, Any]:
    return {
        "scenario": scenario.about.strip(),
        "calibration": scenario.calibration,
        "seeds": list(seeds),
        "duration_s": scenario.duration_s,
        "digest": digest_of(scenario),
    }


def ablations(
    file: Path, *, output: Path | None, processes: int = 2, said: Callable[[str], None] = print
) -> dict[str, Any]:
    """Each mechanism of `interaction` taken away alone, and those that stand in for one another together:
    {"ablations": {scenario: {policy: {load: figures}}}}, and what each scenario's runs rest on under `digests`.

    Args:    file: the closed loop of listeners; the other scenarios lie beside it.
    """
    found: dict[str, Any] = {}
    digests: dict[str, str] = {}
    for name, options in ABLATIONS.items():
        scenario = _closed(file if name == "listeners" else file.parent / f"{name}.toml")
        if name == "listeners":
            scenario = msgspec.structs.replace(scenario, duration_s=SWEEP_S)
            loads: tuple[tuple[int, float], ...] = SWEEP_LOADS
        else:
            loads = ((scenario.arrivals.concurrency, scenario.barge_in),)
        policies = ["interaction", *(f"interaction {option}" for option in options)]
        wanted = runs_of(policies, SWEEP_SEEDS, loads)
        reports = run_all(scenario, wanted, output=output, processes=processes, said=said).reports
        found[name] = {policy: _cells(reports, policy, SWEEP_SEEDS, loads) for policy in policies}
        digests[name] = digest_of(scenario)
    return {"seeds": list(SWEEP_SEEDS), "digests": digests, "ablations": found}


def warm(
    file: Path,
    *,
    output: Path | None,
    seeds: Sequence[int],
    processes: int = 2,
    said: Callable[[str], None] = print,
) -> dict[str, Any]:
    """First tokens of turns whose memory was in host memory when they began, part by part; the change of each median
    against the first row. Args: file: a closed loop with few resident sessions.
    """
    scenario = _closed(file)
    load = (scenario.arrivals.concurrency, scenario.barge_in)
    wanted = runs_of(list(WARM.values()), seeds, (load,))
    reports = run_all(scenario, wanted, output=output, processes=processes, said=said).reports
    cells = {name: averaged([reports[Run(policy, *load, seed).key] for seed in seeds]) for name, policy in WARM.items()}
    first = next(iter(cells.values()))["ttft_away_ms"]
    return {
        **_about(scenario, seeds),
        "policies_of": WARM,
        "warm": cells,
        "against": {
            name: {share: _change(cell["ttft_away_ms"][share], first[share]) for share in PERCENTILES}
            for name, cell in cells.items()
        },
        "published": {side: figures["ttft_away_ms"] for side, figures in PUBLISHED.items()},
    }


def _cells(
    reports: dict[str, dict[str, Any]], policy: str, seeds: Sequence[int], loads: Iterable[tuple[int, float]]
) -> dict[str, Any]:
    """One policy's figures by load, means over seeds."""
    return {f"c{c} p{p:g}": averaged([reports[Run(policy, c, p, seed).key] for seed in seeds]) for c, p in loads}


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
    return {
        **_about(scenario, SWEEP_SEEDS),
        "sweep": {
            name: {f"{value:g}": _cells(reports, spelled[name, value], SWEEP_SEEDS, SWEEP_LOADS) for value in values}
            for name, values in SWEEP.items()
        },
    }


def _closed(file: Path) -> Scenario:
    scenario = scenarios.load(file)
    if scenario.arrivals.kind != "closed":
        raise ConfigError(f"scenario {file} is {scenario.arrivals.kind}; a sweep over concurrency needs a closed loop")
    return scenario


def run_all(
    scenario: Scenario, wanted: Sequence[Run], *, output: Path | None, processes: int, said: Callable[[str], None]
) -> Kept:
    """Do what is missing of the runs that are wanted, and keep it; one process: in this one."""
    kept = Kept(None if output is None else output.with_suffix(".runs.jsonl"), digest_of(scenario))
    missing = [run for run in wanted if run.key not in kept.reports]
    said(f"{len(wanted)} runs, {len(missing)} of them still to do, on {processes} processes")
    # Whole seeds first; of each the longest first, so that no process is left alone with one at the end.
    todo = sorted(missing, key=lambda run: (run.seed, -run.concurrency, -run.rate, run))
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
    load = {"rate": run.rate} if run.rate else {"concurrency": run.concurrency}
    arrivals = msgspec.structs.replace(scenario.arrivals, **load)
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
    reports: dict[str, dict[str, Any]],
    policies: Sequence[str],
    seeds: Sequence[int],
    scenario: Scenario,
    *,
    loads: Iterable[tuple[int, float]] = LOADS,
) -> dict[str, Any]:
    """The JSON of the bench; concurrency at p = 0, chances at concurrency 8, keys as text."""
    concurrencies = sorted(c for c, p in loads if p == 0.0)
    chances = sorted(p for c, p in loads if c == CHANCES_AT)

    def cell(policy: str, concurrency: int, chance: float) -> dict[str, Any]:
        return averaged([reports[Run(policy, concurrency, chance, seed).key] for seed in seeds])

    tables: dict[str, Any] = {
        policy: {
            "c": {str(c): cell(policy, c, 0.0) for c in concurrencies},
            "p": {f"{p:g}": cell(policy, CHANCES_AT, p) for p in chances},
        }
        for policy in policies
    }
    for table in tables.values():
        table["useful_rps_at_slo"] = max(
            (cell["useful_rps"] for cell in table["c"].values() if (cell["continuity"] or 0.0) >= CONTINUITY_MIN),
            default=0.0,
        )
    return {
        **_about(scenario, seeds),
        "continuity_slo": CONTINUITY_MIN,
        "policies": tables,
        "published": PUBLISHED,
        "against_fcfs": {policy: compared(tables[policy], tables["fcfs"]) for policy in policies if "fcfs" in tables},
    }


def averaged(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean over seeds of every figure, with the smallest and largest of the ones the goals are about, and the P90s of
    the first audio seed by seed. A figure that a seed has nothing to count for is left out of the mean; None: no seed
    has any.
    """
    cell: dict[str, Any] = {}
    for name in ("ttfp_ms", "ttfp_server_ms", "ttft_ms", "ttft_away_ms", "ttfas_ms", "jct_ms", "jitter_ms"):
        cell[name] = {share: _mean((r[name][share] for r in reports), 2) for share in PERCENTILES}
    cell["rtf"] = _mean((r["rtf"]["p50"] for r in reports), 4)
    for name in ("continuity", "waste", "useful_rps", "replies_per_second", "pacing", "gap_ms_longest"):
        cell[name] = _mean((r[name] for r in reports), 5)
    cell["waste_per_stage"] = {
        stage: _mean((r["waste_per_stage"][stage] for r in reports), 5) for stage in reports[0]["waste_per_stage"]
    }
    cell["turns"] = sum(r["turns"] for r in reports)
    cell["turns_away"] = sum(r["ttft_away_ms"]["count"] for r in reports)
    cell["pages_restored"] = _mean((r["counters"].get("pages_restored", 0.0) for r in reports), 1)
    cell["guesses_dropped_s"] = {
        stage: _mean((r["guesses"]["dropped_s"][stage] for r in reports), 2) for stage in reports[0]["waste_per_stage"]
    }
    cell["by_seed"] = {
        "ttfp_ms_p90": [r["ttfp_ms"]["p90"] for r in reports],
        "ttfp_server_ms_p90": [r["ttfp_server_ms"]["p90"] for r in reports],
        "useful_rps": [r["useful_rps"] for r in reports],
    }
    cell["spread"] = {
        "ttfp_ms_p90": _ends(r["ttfp_ms"]["p90"] for r in reports),
        "continuity": _ends(r["continuity"] for r in reports),
        "waste": _ends(r["waste"] for r in reports),
        "useful_rps": _ends(r["useful_rps"] for r in reports),
    }
    return cell


def compared(table: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    """The goals' figures against the baseline in the same runs; negative is less. `by_seed`: the same, seed by seed."""
    eight, half = str(CHANCES_AT), "0.5"
    ours, theirs = table["c"][eight]["by_seed"], baseline["c"][eight]["by_seed"]
    return {
        "ttfp_p90_c8_by_seed": [
            _change(value, before) for value, before in zip(ours["ttfp_ms_p90"], theirs["ttfp_ms_p90"], strict=True)
        ],
        "pacing_c8": table["c"][eight]["pacing"],
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


def _mean(values: Iterable[float | None], digits: int) -> float | None:
    """Of those that there are."""
    found = [value for value in values if value is not None]
    return round(mean(found), digits) if found else None


def _ends(values: Iterable[float | None]) -> list[float]:
    found = sorted(value for value in values if value is not None)
    return [round(found[0], 5), round(found[-1], 5)] if found else []


def _change(value: float | None, before: float | None) -> float | None:
    return round(value / before - 1, 4) if before and value is not None else None


def _ratio(value: float, before: float) -> float:
    return round(value / before, 3) if before else 0.0


def rows_of(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table for people: one line a policy and load, with what LiveServe prints for its baseline or itself there."""
    rows: list[tuple[str, ...]] = []
    for policy, table in report["policies"].items():
        for kind, cells in table.items():
            if kind in ("c", "p"):
                rows += [
                    (policy, f"{kind}={key}", *_row(cell), _beside(policy, kind, key)) for key, cell in cells.items()
                ]
            elif kind == "r":
                for chance, by_rate in cells.items():
                    rows += [(policy, f"{key}/s p={chance}", *_row(cell), "") for key, cell in by_rate.items()]
    return rows


def _row(cell: dict[str, Any]) -> tuple[str, ...]:
    return (
        "/".join(shown(cell["ttfp_ms"][share], ".0f") for share in PERCENTILES),
        "/".join(shown(cell["ttfp_server_ms"][share], ".0f") for share in PERCENTILES),
        shown(cell["continuity"], ".1%"),
        shown(cell["waste"], ".1%"),
        shown(cell["useful_rps"], ".3f"),
        shown(cell["rtf"], ".3f"),
        shown(cell["pacing"], ".2f"),
    )


def shown(value: float | None, form: str) -> str:
    """A dash where nothing was counted."""
    return "-" if value is None else format(value, form)


def _beside(policy: str, kind: str, key: str) -> str:
    """What LiveServe prints at this load for what the policy stands for; '': nothing."""
    name, side = BESIDE.get((kind, key)), STANDS_FOR.get(policy)
    if name is None or side is None or name not in PUBLISHED[side]:
        return ""
    value = PUBLISHED[side][name]
    return f"{name.removesuffix(f'_c{key}')} {value:g}"


HEADINGS = (
    *("policy", "load", "ttfp ms", "server ms", "continuity", "waste", "useful/s", "rtf", "pacing", "LiveServe prints"),
)
