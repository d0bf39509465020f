"""Keys that are turned again at every slide drift away; keys stored before rotation do not."""

from __future__ import annotations

import pytest
import torch

from duplexd.bench.drift import measure_drift


@pytest.mark.parametrize("seed", range(3))
def test_raw_keys_stay_at_one_rounding_and_turned_ones_drift(seed: int) -> None:
    """bfloat16: half a unit in the last place is 0.2 %; over hundreds of slides it adds up for turned keys alone."""
    few, many = (measure_drift(slides=slides, tokens=256, seed=seed) for slides in (1, 400))

    assert max(few.pre_rope, many.pre_rope) < 0.01
    assert many.post_rope > 5 * many.pre_rope
    assert many.post_rope > 3 * few.post_rope


def test_without_rounding_there_is_nothing_to_drift() -> None:
    """float64 storage over float32 rotation: both ways agree with the exact window, so the measure itself is right."""
    drift = measure_drift(slides=50, tokens=64, seed=0, dtype=torch.float64)

    assert max(drift.pre_rope, drift.post_rope) < 1e-5
