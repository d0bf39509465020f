"""Clock maps, recordings and what is asked of them; all on made-up blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplexd.bench.programs import RigError
from duplexd.bench.tap import RATE, ClockMap, Device, Recording, fit_clock, locate
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND

BLOCK = 480
ORIGIN = 5 * NANOS_PER_SECOND
MS = NANOS_PER_MS


def arrivals(ends: list[int], *, late_ms: np.ndarray) -> list[int]:
    return [ORIGIN + end * NANOS_PER_SECOND // RATE + round(late * MS) for end, late in zip(ends, late_ms, strict=True)]


def recording(pcm: np.ndarray) -> Recording:
    clock = ClockMap(rate=RATE, starts=(0,), origins_ns=(ORIGIN,), spread_ns=0)
    return Recording(pcm=pcm.astype(np.int16), rate=RATE, first_sample=0, clock=clock)


def at_ms(ms: float) -> int:
    return ORIGIN + round(ms * MS)


def sound(*parts: tuple[int, int]) -> np.ndarray:
    """(level, ms) one after the other."""
    return np.concatenate([np.full(ms * RATE // 1000, level) for level, ms in parts])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), blocks=st.integers(60, 3000), busy_ms=st.floats(0, 30))
def test_late_blocks_do_not_move_the_clock(seed: int, blocks: int, busy_ms: float) -> None:
    """A busy machine delivers most blocks late; some are punctual, and those tell the time."""
    rng = np.random.default_rng(seed)
    late = rng.exponential(busy_ms, blocks) * (rng.random(blocks) < 0.7)
    ends = list(range(BLOCK, BLOCK * blocks + 1, BLOCK))
    clock = fit_clock(ends, arrivals(ends, late_ms=late), rate=RATE, device=Device.MICROPHONE)

    assert clock.steps_count == 0
    assert abs(clock.time_of(1000) - (ORIGIN + 1000 * NANOS_PER_SECOND // RATE)) <= 1000


def test_a_loudspeaker_begins_a_block_when_a_microphone_has_ended_it() -> None:
    ends = list(range(BLOCK, BLOCK * 100, BLOCK))
    times = arrivals(ends, late_ms=np.zeros(len(ends)))
    out, into = (fit_clock(ends, times, rate=RATE, device=device) for device in (Device.LOUDSPEAKER, Device.MICROPHONE))

    assert out.time_of(0) - into.time_of(0) == 10 * MS


def test_lost_samples_are_a_step_that_is_counted_and_followed() -> None:
    """100 ms of sound are lost after 10 s; whoever asks about 15 s gets the true time, and sees that it happened."""
    late = np.zeros(2000)
    late[1000:] = 100
    ends = list(range(BLOCK, BLOCK * 2000 + 1, BLOCK))
    clock = fit_clock(ends, arrivals(ends, late_ms=late), rate=RATE, device=Device.MICROPHONE)

    assert clock.steps_count == 1
    assert clock.time_of(15 * RATE) == ORIGIN + 15 * NANOS_PER_SECOND + 100 * MS
    assert clock.time_of(5 * RATE) == ORIGIN + 5 * NANOS_PER_SECOND
    assert clock.sample_at(clock.time_of(15 * RATE)) == 15 * RATE
    assert clock.sample_at(clock.time_of(5 * RATE)) == 5 * RATE


def test_one_busy_second_is_not_a_step() -> None:
    late = np.zeros(1000)
    late[400:500] = 60
    ends = list(range(BLOCK, BLOCK * 1000 + 1, BLOCK))

    assert fit_clock(ends, arrivals(ends, late_ms=late), rate=RATE, device=Device.MICROPHONE).steps_count == 0


def test_a_clock_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        fit_clock([], [], rate=RATE, device=Device.MICROPHONE)


def test_first_and_last_audible_samples_are_exact() -> None:
    taken = recording(sound((0, 100), (5000, 50), (0, 100), (5000, 25), (0, 100)))

    assert taken.first_audible() == at_ms(100)
    assert taken.first_audible(after=at_ms(200)) == at_ms(250)
    assert taken.last_audible(before=at_ms(200)) == taken.time_of(150 * 48 - 1)
    assert taken.first_audible(after=at_ms(300)) is None
    assert taken.first_audible(before=at_ms(100)) is None


def test_the_threshold_is_a_level_in_dbfs() -> None:
    quiet = recording(sound((0, 10), (round(32768 * 10 ** (-40 / 20)), 10)))

    assert quiet.first_audible(dbfs=-41) == at_ms(10)
    assert quiet.first_audible(dbfs=-39) is None
    assert quiet.level_dbfs(at_ms(10), at_ms(20)) == pytest.approx(-40, abs=0.1)
    assert quiet.level_dbfs(at_ms(0), at_ms(5)) == float("-inf")


def test_the_lowest_sample_is_loud() -> None:
    assert recording(np.full(10, -32768)).first_audible(dbfs=-0.1) == ORIGIN


def test_gaps_lie_between_sounds_only() -> None:
    taken = recording(sound((0, 500), (5000, 50), (0, 30), (5000, 50), (0, 120), (5000, 50), (0, 500)))

    assert [round(gap.length_ns / MS) for gap in taken.gaps()] == [30, 120]
    assert [round(gap.length_ns / MS) for gap in taken.gaps(longer_than_ms=100)] == [120]
    assert taken.gaps(before=at_ms(400)) == []


@pytest.mark.parametrize(
    ("after_ms", "stops_ms"),
    [(0, 0), (150, 330), (320, 330), (400, 400), (600, None), (900, None)],
    ids=["silent", "in the sound", "in its last word", "already over", "short rest", "not seen to end"],
)
def test_sound_stops_where_silence_is_long_enough(after_ms: int, stops_ms: int | None) -> None:
    """A reply from 150 to 330 ms with a pause of 50 ms in it; 370 ms later another one, cut off by the end."""
    taken = recording(sound((0, 160), (5000, 60), (0, 50), (5000, 60), (0, 370), (5000, 300)))
    stopped = taken.sound_stops(after=at_ms(after_ms))

    assert (stopped is None) == (stops_ms is None)
    if stopped is not None and stops_ms is not None:
        assert abs(stopped - at_ms(stops_ms)) < 0.1 * MS


def test_a_saved_recording_comes_back_the_same(tmp_path: Path) -> None:
    taken = recording(np.arange(-500, 500))
    taken.save(tmp_path / "ear")
    loaded = Recording.load(tmp_path / "ear")

    assert np.array_equal(loaded.pcm, taken.pcm)
    assert (loaded.clock, loaded.start, loaded.end) == (taken.clock, taken.start, taken.end)


def test_a_sidecar_of_another_sound_is_refused(tmp_path: Path) -> None:
    recording(np.zeros(10)).save(tmp_path / "ear")
    sidecar = tmp_path / "ear.json"
    sidecar.write_text(sidecar.read_text().replace('"rate": 48000', '"rate": 16000', 1))

    with pytest.raises(RigError, match="is not mono 16 bit at 16000"):
        Recording.load(tmp_path / "ear")


@settings(max_examples=30, deadline=None, derandomize=True)
@given(place=st.integers(0, 5000), gain=st.floats(0.1, 1.0), seed=st.integers(0, 99))
def test_a_sound_is_found_at_any_volume_and_place(place: int, gain: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    needle = rng.normal(0, 3000, 2000).astype(np.int16)
    haystack = rng.normal(0, 50, 8000)
    haystack[place : place + len(needle)] += gain * needle
    match = locate(needle, haystack.astype(np.int16))

    assert match is not None
    assert match.offset == place
    assert match.similarity > 0.9


def test_a_sound_that_is_not_there_is_not_found() -> None:
    rng = np.random.default_rng(3)
    match = locate(rng.normal(0, 3000, 2000).astype(np.int16), rng.normal(0, 3000, 8000).astype(np.int16))

    assert match is not None
    assert match.similarity < 0.2
    assert locate(np.ones(10, np.int16), np.ones(5, np.int16)) is None
    assert locate(np.zeros(10, np.int16), np.ones(50, np.int16)) is None
