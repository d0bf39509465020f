"""The bench of costs: what is fitted from timed launches, and that the file it writes is a calibration."""

from __future__ import annotations

from math import exp
from pathlib import Path
from random import Random

import pytest

from duplexd.bench.costs import Sample, fit, toml_of
from duplexd.simulation import calibration, model


def launches(*, sigma: float) -> list[Sample]:
    rng = Random(3)
    found = []
    for _ in range(600):
        rows, units, steps = rng.randrange(1, 5), rng.randrange(1, 60), rng.randrange(0, 9)
        us = (900 + 300 * rows + 40 * units + 2000 * steps) * exp(sigma * rng.gauss(0, 1) - sigma**2 / 2)
        found.append(Sample(rows, units, steps, us))
    return found


def test_costs_that_made_the_launches_are_found_again() -> None:
    found = fit(launches(sigma=0.0))

    assert (found.fixed_us, found.per_row_us, found.per_unit_us, found.per_step_us) == (900, 300, 40, 2000)
    assert found.sigma == 0


def test_the_spread_around_them_is_found_too() -> None:
    found = fit(launches(sigma=0.2))

    assert found.sigma == pytest.approx(0.2, rel=0.1)
    assert found.per_step_us == pytest.approx(2000, rel=0.1)


def test_no_cost_is_ever_negative() -> None:
    """Launches that get cheaper with more rows: rows cost nothing, rather than less than nothing."""
    found = fit([Sample(rows, 10, 1, 1000.0 - 100 * rows) for rows in (1, 2, 3, 4) for _ in range(5)])

    assert min(found.fixed_us, found.per_row_us, found.per_unit_us, found.per_step_us) >= 0
    assert found.fixed_us + 10 * found.per_unit_us + found.per_step_us == pytest.approx(735, rel=0.1)


def test_launches_that_return_at_once_spoil_nothing() -> None:
    """A third of the launches find nothing to do and take a microsecond."""
    found = fit(launches(sigma=0.0) + [Sample(1, 30, 4, 1.0)] * 200)

    assert (found.fixed_us, found.per_step_us) == (900, 2000)
    assert found.idle_launches == 200


def test_what_it_writes_can_be_simulated(tmp_path: Path) -> None:
    costs = {
        "fixed_us": 10,
        "per_row_us": 1,
        "per_unit_us": 2,
        "per_step_us": 3,
        "sigma": 0.1,
        "batch_max": 4,
        "load": 0.2,
    }
    report = {
        "stages": dict.fromkeys(("copy", "ears", "think", "talk", "render"), costs),
        "frame_ms": 25,
        "word_ms": 310,
        "chunk_ms": 300,
        "chunk_ramp_ms": [160, 300],
        "think_steps": 4,
        "context_tokens_max": 1024,
        "token_bytes": 46080,
    }
    file = tmp_path / "pocket.toml"
    file.write_text(toml_of(report))
    found = calibration.load(str(file))

    assert found.speech is not None
    assert found.speech.word_ms == 300
    assert model.plan(found).stages["talk"].batch_max == 4
    assert model.plan(found).stages["talk"].load == 0.2
    assert found.speech.chunk_ramp_ms == (150, 300)
    assert found.cores == 2
