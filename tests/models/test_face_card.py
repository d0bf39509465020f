"""The card of a checkpoint, and where further courses find what they share."""

from __future__ import annotations

import json
from argparse import Namespace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

from duplexd.models.face.checkpoint import CHECKPOINT, card_of, load_face
from duplexd.models.face.training import lessons
from duplexd.models.face.training.card import course_entry, make_card, thinned
from duplexd.models.face.training.corpus import CONFIRMING, HELD_OUT


def entry(phase: str, step: int, loss: float) -> dict[str, Any]:
    return {"phase": phase, "step": step, "seconds": 3.0, "flow": loss}


def test_a_curve_keeps_its_shape_in_few_points() -> None:
    curve = [entry("flow", step, 10.0 - step // 25) for step in range(100)] + [entry("refine", 0, 0.5)]
    found = thinned(curve, points=4)

    assert found["minutes"] == {"flow": 5.0, "refine": 0.1}
    assert found["curves"]["flow"] == {"step": [24, 49, 74, 99], "flow": [10.0, 9.0, 8.0, 7.0]}
    assert found["curves"]["refine"] == {"step": [0], "flow": [0.5]}


def test_a_card_has_every_course_and_no_time_of_a_machine(tmp_path: Path) -> None:
    (tmp_path / "curve.jsonl").write_text(json.dumps(entry("flow", 0, 1.0)) + "\n")
    course = course_entry({"flow": 1}, tmp_path)
    card = make_card([{"flow": 9}, course], "ten sentences", {"lip_corr": 0.9, "core_share": 0.4, "parts_ms": {}})

    assert [one["flow"] for one in card["courses"]] == [9, 1]
    assert card["figures"] == {"lip_corr": 0.9}
    assert card["limits"]


def test_the_checkpoint_has_a_card_with_courses_curves_figures_and_limits() -> None:
    card = load_face().card

    assert card_of(CHECKPOINT).exists()
    assert set(card) == {"courses", "data", "figures", "limits"}
    assert len(card["courses"]) == 3
    assert all(course["minutes"].keys() == course["curves"].keys() for course in card["courses"])
    assert card["figures"]["confirming"]["lip_corr"] >= 0.85
    assert "core_share" not in card["figures"]


def test_sentences_that_confirm_are_in_no_other_list() -> None:
    assert len(set(CONFIRMING) | set(HELD_OUT)) == len(CONFIRMING) + len(HELD_OUT) == 48


def test_every_course_takes_the_lessons_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the recipe at the script's head: folders differ, sentences are said once."""
    script = _script()
    made: list[str] = []
    for name in ("make_pool", "make_lessons"):
        monkeypatch.setattr(lessons, name, lambda *args, name=name: made.append(name) or name)
    for name in ("save", "save_pool"):
        monkeypatch.setattr(lessons, name, lambda what, path: path.write_text(str(what)))
    for name in ("load", "load_pool"):
        monkeypatch.setattr(lessons, name, lambda path: path.read_text())
    after = None
    for name in ("first", "second", "third"):
        options = script._parser().parse_args(["--folder", str(tmp_path / name), "--data", str(tmp_path / "data")])
        options.after = after
        assert isinstance(options, Namespace)
        assert script._lessons(options) == "make_lessons"
        after = options.folder

    assert made == ["make_pool", "make_lessons"]


def _script() -> Any:
    path = Path(__file__).parents[2] / "scripts" / "train_face"
    loader = SourceFileLoader("train_face", str(path))
    spec = spec_from_loader("train_face", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
