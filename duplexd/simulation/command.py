"""`duplexd simulate SCENARIO.toml --policy P --seed S`: one run as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from duplexd.simulation import faces
from duplexd.simulation import scenario as scenarios
from duplexd.simulation.report import figures
from duplexd.simulation.run import Simulation
from duplexd.simulation.scenario import Scenario
from duplexd.units import NANOS_PER_SECOND, Nanos

#: What the table shows, in its order; the JSON holds everything.
SHOWN = (
    *(
        "turns",
        "outcomes",
        "ttfp_ms",
        "ttfp_server_ms",
        "ttft_ms",
        "ttft_away_ms",
        "jct_ms",
        "jitter_ms",
        "continuity",
        "gaps",
    ),
    *("waste", "waste_per_stage", "guesses", "useful_rps", "replies_per_second", "rtf", "pacing", "device_busy"),
    *("refused_sessions", "overheard_turns"),
)


def simulate(file: Path, *, policy: str, seed: int, output: Path | None) -> int:
    """Run, print, write; a file with a table `face` is a scenario of faces without a voice.

    Raises:  ConfigError for a bad scenario, calibration, trace or policy.
    """
    shown: Sequence[str] = SHOWN
    if faces.describes(file):
        report, shown = faces.report_of(faces.load(file), policy=policy, seed=seed), faces.SHOWN
    else:
        report = report_of(scenarios.load(file), policy=policy, seed=seed, folder=file.parent)
    Console(soft_wrap=True).print(_table(file, report, shown))
    if output is not None:
        output.write_text(text_of(report))
    return 0


def report_of(scenario: Scenario, *, policy: str, seed: int, folder: Path = Path()) -> dict[str, Any]:
    simulation = Simulation(scenario, policy=policy, seed=seed, folder=folder)
    simulation.run()
    found = figures(
        simulation.world,
        since=Nanos(round(scenario.warmup_s * NANOS_PER_SECOND)),
        counters=simulation.core.monitor.values(),
    )
    return {"policy": policy, "seed": seed, "calibration": scenario.calibration, **found}


def text_of(report: dict[str, Any]) -> str:
    return json.dumps(report, indent=1, sort_keys=False) + "\n"


def _table(file: Path, report: dict[str, Any], shown: Sequence[str]) -> Table:
    title = f"{file.name}: policy {report['policy']}, seed {report['seed']}, calibration {report['calibration']}"
    table = Table("figure", "value", show_header=False, title=title, title_justify="left")
    for name in shown:
        table.add_row(name, _shown(report[name]))
    return table


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {_shown(figure)}" for name, figure in value.items())
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, int | float) else str(value)
