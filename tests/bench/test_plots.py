"""scripts/plots: every report of `bench policies` becomes pictures, from its JSON alone."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from duplexd.bench import policies
from duplexd.bench.policies import Run
from duplexd.simulation import scenario
from tests.bench.test_policies import LISTENERS, report

pytest.importorskip("matplotlib")
PNG = b"\x89PNG\r\n\x1a\n"


def table() -> dict[str, Any]:
    loads = policies.GRIDS["goals"]
    reports = {run.key: report() for run in policies.runs_of(["fcfs", "interaction"], [1], loads)}
    return policies.table_of(reports, ["fcfs", "interaction"], [1], scenario.load(LISTENERS), loads=loads)


def swept() -> dict[str, Any]:
    cells = {f"c{c} p{p:g}": policies.averaged([report()]) for c, p in policies.SWEEP_LOADS}
    return {"calibration": "liveserve", "seeds": [1, 2], "sweep": {"p_safe_ms": {"100": cells, "200": cells}}}


def opened() -> dict[str, Any]:
    cells = {f"{rate:g}": policies.averaged([report(useful_rps=rate)]) for rate in policies.RATES}
    return {"calibration": "liveserve", "seeds": [1], "policies": {"fcfs": {"r": {"0": cells, "0.5": cells}}}}


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (table, {"latency-load.png", "waste.png", "continuity.png"}),
        (swept, {"sweep.png"}),
        (opened, {"open-loop.png"}),
    ],
    ids=["table", "sweep", "open loop"],
)
def test_a_report_is_drawn(
    made: Callable[[], dict[str, Any]], names: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, folder = tmp_path / "report.json", tmp_path / "img"
    file.write_text(json.dumps(made()))
    monkeypatch.setattr(sys, "argv", ["plots", str(file), str(folder)])
    runpy.run_path("scripts/plots", run_name="__main__")

    assert {one.name for one in folder.iterdir()} == names
    assert all(one.read_bytes().startswith(PNG) for one in folder.iterdir())


def test_cells_that_counted_nothing_are_left_out() -> None:
    """A mean of no figure is null in the JSON, and no point in a picture."""
    plots = runpy.run_path("scripts/plots")

    assert plots["_percent"](0.5) == 50.0
    assert plots["_percent"](None) != plots["_percent"](None)
    assert Run("fcfs", 0, 0.5, 1, 0.4).key == "fcfs/r0.4/p0.5/s1"
