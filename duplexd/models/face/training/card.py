"""The card of a checkpoint: how it was made, how that went, what it can do and cannot. Text, beside the weights.

courses    one after another, each with its steps, its minutes and its curves
data       what was said and played
figures    of the examination (models/face/evaluate.py); no times of a machine
limits     what no figure shows
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

#: Points of a curve that are kept of each phase, each the mean of as many steps.
POINTS = 20
LIMITS = (
    "Nobody was filmed: figures say how well the face follows its teacher's rules, not how like a person it looks.",
    "One English voice taught it; made-up shifts of that voice stand for all others.",
    "Which courses to keep was decided by the sentences of HELD_OUT, so their figures flatter it; those of CONFIRMING "
    "were never used for a choice.",
    "It was taught looks of at most 0.6 to a side, and moods of five words.",
)
#: Figures of the machine that made them, not of the weights.
_OF_MACHINES = ("core_share", "parts_ms")


def course_entry(course: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """One course with its minutes and curves. Raises OSError when the folder has no curve."""
    lines = (folder / "curve.jsonl").read_text().splitlines()
    return {**course, **thinned(json.loads(line) for line in lines)}


def thinned(curve: Iterable[Mapping[str, Any]], *, points: int = POINTS) -> dict[str, Any]:
    """Minutes and losses by phase: {"minutes": {phase: m}, "curves": {phase: {"step": [...], loss: [...], ...}}}."""
    phases: dict[str, list[Mapping[str, Any]]] = {}
    for entry in curve:
        phases.setdefault(entry["phase"], []).append(entry)
    return {
        "minutes": {name: round(sum(one["seconds"] for one in steps) / 60, 1) for name, steps in phases.items()},
        "curves": {name: _means(steps, points) for name, steps in phases.items()},
    }


def _means(steps: Sequence[Mapping[str, Any]], points: int) -> dict[str, list[float]]:
    losses = [key for key in steps[0] if key not in ("phase", "step", "seconds")]
    parts = np.array_split(np.arange(len(steps)), min(points, len(steps)))
    means: dict[str, list[float]] = {"step": [int(part[-1]) for part in parts]}
    for loss in losses:
        means[loss] = [round(float(np.mean([steps[index][loss] for index in part])), 4) for part in parts]
    return means


def make_card(courses: Sequence[Mapping[str, Any]], data: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in figures.items() if name not in _OF_MACHINES}
    return {"courses": list(courses), "data": data, "figures": kept, "limits": list(LIMITS)}
