"""The memory bench: both ways to choose agree while people come and go, and the report has what it promises."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from random import Random

import pytest

from duplexd.bench import command, memory


def test_the_index_and_the_full_sort_choose_the_same_sessions() -> None:
    """Otherwise their times would not be comparable."""
    crowd = memory.Crowd(50, Random(1))
    for _ in range(200):
        crowd.take_turns(crowd.draw_turns(3))
        chosen = crowd.choose()
        assert chosen == crowd.choose_by_sorting()
        crowd.evict(chosen)


def test_an_act_that_was_measured_leaves_the_context_as_it_was() -> None:
    """Or the second round would measure another length than the first."""
    dialogue = memory.Dialogue(256)
    before = dialogue.usage()
    for measured in memory.ACTS.values():
        measured(dialogue)

    assert dialogue.usage() == before


def test_the_report_is_written_with_the_figures_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = (lambda: memory.ledger_figures(rounds=2), lambda: memory.eviction_figures(sessions=20, choices=4, sorts=2))
    monkeypatch.setattr(memory, "GROUPS", groups)
    command.run_memory(Namespace(json=tmp_path / "report.json"))
    report = json.loads((tmp_path / "report.json").read_text())

    assert {"cut_ratio_32k_over_1k", "append_ratio_32k_over_1k", "fork_ratio_32k_over_1k"} <= set(report)
    assert set(report["evict_us"]) == set(report["full_sort_us"]) == {"mean", "p90"}
