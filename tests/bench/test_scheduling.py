"""The scheduler bench: what it measures happens, and the report has the figures promised."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from duplexd.bench import command, scheduling
from duplexd.engine.policy import policy_of


def test_every_round_is_measured_whatever_the_policy() -> None:
    for name in ("fcfs", "edf", "interaction"):
        assert len(list(scheduling.rounds_of(policy_of(name), 20, 4, 15))) == 15


def test_reports_are_measured_on_sessions_that_play() -> None:
    """Otherwise the figure of an event would be that of an idle engine."""
    crowd = scheduling.PlayingCrowd(5)
    for _ in range(20):
        crowd.report()

    assert all(session.reply is not None for session in crowd._core.sessions.values())


def test_a_live_engine_answers_the_audience_and_ends_with_it() -> None:
    figures = scheduling.overhead_figures(sessions=2, replies=4)

    assert figures["overhead_us_per_step"] > 0
    assert figures["overhead_steps"] >= 4 * 3  # at least a thought, a clause and a chunk for each reply


def test_the_report_is_written_with_the_figures_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "round_figures", lambda: {"round_us_1000_sessions": 1.0})
    monkeypatch.setattr(scheduling, "event_figures", lambda: {"event_us_1000_sessions": 1.0})
    overheads = iter([{"overhead_us_per_step": us} for us in (5.0, 1.0, 2.0, 9.0, 3.0)])
    monkeypatch.setattr(scheduling, "overhead_figures", lambda: next(overheads))
    command.run_scheduler(Namespace(json=tmp_path / "report.json"))
    report = json.loads((tmp_path / "report.json").read_text())

    assert report["round_us_1000_sessions"] == 1.0
    assert report["overhead_us_per_step"] == 3.0
    assert report["overhead_us_runs"] == [5.0, 1.0, 2.0, 9.0, 3.0]
