"""Flashes against tones: what the bench makes of frames and sounds, without a browser."""

from __future__ import annotations

from typing import Any

import pytest

from duplexd.bench.face import Shown, Skews, flashes, frames_between, is_open, is_white, skews_ms, stop_ms
from duplexd.bench.programs import RigError
from duplexd.units import NANOS_PER_MS, Nanos


def at(*moments_ms: float) -> list[Nanos]:
    return [Nanos(round(ms * NANOS_PER_MS)) for ms in moments_ms]


def test_a_flash_begins_where_the_picture_turns_white() -> None:
    lumas = [110, 110, 235, 235, 110, 235, 110]
    frames = [Shown(moment, 0, luma) for moment, luma in zip(at(*range(0, 280, 40)), lumas, strict=True)]

    assert flashes(frames) == at(80, 200)


def test_a_flash_that_is_late_is_positive_and_an_early_one_negative() -> None:
    assert skews_ms(at(0, 480, 960), at(30, 460, 960)) == pytest.approx([30, -20, 0])


def test_a_tone_without_a_flash_of_its_own_has_no_skew() -> None:
    """Half of the clock's word away, a flash may belong to the tone before or after."""
    assert skews_ms(at(0, 480), at(470)) == pytest.approx([-10])
    assert skews_ms(at(0), []) == []


def test_figures_are_of_the_difference_of_two_readings() -> None:
    before: dict[str, Any] = {"timestamp": 1000.0, "framesReceived": 10, "bytesReceived": 1000}
    after: dict[str, Any] = {"timestamp": 3000.0, "framesReceived": 60, "bytesReceived": 9000, "freezeCount": 1}
    found = frames_between(before, after)

    assert (found["fps"], found["seconds"], found["freezeCount"], found["bytesReceived"]) == (25.0, 2.0, 1.0, 8000.0)


def test_a_browser_that_has_seen_nothing_gives_no_figure() -> None:
    with pytest.raises(RigError, match="no picture"):
        frames_between({}, {"timestamp": 1.0})


def test_percentiles_of_no_tone_are_nothing() -> None:
    assert (Skews((), 0).p05, Skews((), 0).p95) == (None, None)
    assert Skews((-20.0, 5.0, 30.0), 3).p95 == 30.0


def mouth(*luma_at: tuple[float, float]) -> list[Shown]:
    return [Shown(at(ms)[0], 0, luma) for ms, luma in luma_at]


def test_a_stop_is_measured_to_the_last_frame_that_speaks() -> None:
    frames = mouth((0, 235), (40, 110), (520, 235), (560, 235), (600, 110))

    assert stop_ms(frames, at(500)[0], is_white) == pytest.approx(60)
    assert stop_ms(frames[:2], at(500)[0], is_white) == 0


def test_a_still_picture_proves_nothing() -> None:
    """The governor had stopped the face: its mouth did not stop, it had never moved."""
    assert stop_ms(mouth((0, 110), (600, 110)), at(500)[0], is_white) is None
    assert stop_ms(mouth((0, 110), (600, 235)), at(500)[0], is_white) is None
    assert stop_ms([], at(500)[0], is_open) is None
