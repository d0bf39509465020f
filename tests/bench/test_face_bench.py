"""Flashes against tones: what the bench makes of frames and sounds, without a browser."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from duplexd.bench.face import (
    ALIKE,
    UNSEEN,
    Lips,
    Shown,
    Skews,
    Talk,
    cpu_s,
    flashes,
    frames_between,
    is_open,
    is_white,
    lip_onset_ms,
    lips_of,
    planned_between,
    planned_share,
    skews_ms,
    stop_ms,
    stops_of,
)
from duplexd.bench.programs import RigError
from duplexd.bench.tap import ClockMap, Recording
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


def test_planned_are_those_that_were_made_or_missed_and_not_taken_back() -> None:
    """Ten of a hundred were made again, and a picture that stayed was sent twice: 92 had to arrive, 69 did."""
    before = {"duplexd_engine_face_pictures_planned": 40.0, "duplexd_frontend_pictures_repeated_total": 1.0}
    after = {
        "duplexd_engine_face_pictures_planned": 140.0,
        "duplexd_frontend_pictures_cut_total": 10.0,
        "duplexd_frontend_pictures_repeated_total": 3.0,
    }
    planned = planned_between(before, after)

    assert planned == 92.0
    assert planned_share({"framesReceived": 69.0, "planned": planned}) == 0.75
    assert planned_share({"framesReceived": 0.0, "planned": 0.0}) is None


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


def test_stops_of_a_still_mouth_are_counted_and_so_are_replies_in_which_it_did_not_move_again() -> None:
    stops = stops_of([0.0, None, 80.0], [True, False, True])

    assert stops.figures() == {
        "p50": 0.0, "p95": 80.0, "count": 2, "still": 1, "moved_again": 2, "replies": 3,
    }  # fmt: skip


# Lips -----------------------------------------------------------------------------------------------------------------

SYLLABLE_MS = 150.0
VOICE_MS, LENGTH_MS = 1000.0, 4000.0


def opened(ms: float) -> bool:
    """Syllables of uneven length, as a mouth says them from the first sound on."""
    said = ms - VOICE_MS
    return 0 <= said < 2000 and np.sin(2 * np.pi * said / SYLLABLE_MS / 2 + 2 * np.sin(said / 377)) > 0


def spoken(*, late_ms: float) -> tuple[Recording, list[Shown]]:
    """Noise at the loudspeaker wherever a mouth is open, and the mouth on the screen, `late_ms` behind."""
    rate = 8000
    times = np.arange(round(LENGTH_MS * rate / 1000)) / rate * 1000
    gate = np.array([opened(ms) for ms in times])
    gate[round(VOICE_MS * rate / 1000)] = True
    pcm = (np.random.default_rng(1).normal(0, 3000, len(times)) * gate).astype(np.int16)
    recording = Recording(pcm, rate, 0, ClockMap(rate=rate, starts=(0,), origins_ns=(0,), spread_ns=0))
    frames = [
        Shown(at(ms)[0], 0, 110, 0.08 if opened(ms + 20 - late_ms) else 0.001) for ms in np.arange(7, LENGTH_MS, 40)
    ]
    return recording, frames


@pytest.mark.parametrize("late_ms", [-80.0, 0.0, 120.0])
def test_lips_that_follow_the_voice_are_as_late_as_they_are(late_ms: float) -> None:
    """To the grid of ten milliseconds and the half of a frame that nobody can know."""
    found = lips_of(*spoken(late_ms=late_ms), after=at(200)[0])

    assert found is not None
    assert found.likeness > 0.6
    assert found.skew_ms == pytest.approx(late_ms, abs=20)
    assert found.onset_ms == pytest.approx(late_ms, abs=40)


def test_a_mouth_that_does_not_follow_the_voice_has_no_skew() -> None:
    """It opens now and then, but by chance; a mouth that stays shut has none either."""
    recording, frames = spoken(late_ms=0)
    rng = np.random.default_rng(3)
    chance = [Shown(frame.at, 0, 110, 0.08 * float(rng.random() < 0.3)) for frame in frames]
    shut = [Shown(frame.at, 0, 110, 0.001) for frame in frames]
    found = [lips_of(recording, mouth, after=at(200)[0]) for mouth in (chance, shut)]

    assert [one.skew_ms for one in found if one is not None] == [None, None]
    assert found[1] is not None
    assert (found[1].onset_ms, found[1].skew_ms, found[1].likeness) == (None, None, 0.0)
    assert found[0] is not None
    assert found[0].likeness < ALIKE


def test_lips_that_were_open_before_have_no_onset_and_early_ones_a_negative_one() -> None:
    def opens(*moments_ms: float) -> list[Shown]:
        return [Shown(at(ms)[0], 0, 110, 0.08 if ms in moments_ms else 0.0) for ms in range(700, 2000, 40)]

    voice = at(1000)[0]
    assert lip_onset_ms(opens(1100), voice) == 100
    assert lip_onset_ms(opens(940), voice) == -60
    assert lip_onset_ms(opens(700, 1100), voice) is None
    assert lip_onset_ms(opens(), voice) is None


def test_silence_has_no_lips() -> None:
    recording, frames = spoken(late_ms=0)

    assert lips_of(recording, frames, after=at(3500)[0]) is None


def test_talk_says_how_many_replies_its_figures_are_of() -> None:
    nothing = (np.zeros(0), np.zeros(0))
    late = [lips_of(*spoken(late_ms=ms), after=at(200)[0]) for ms in (80.0, 80.0)]
    lips = (*(one for one in late if one is not None), Lips(None, None, 0.1, nothing))
    figures = Talk({}, lips, 0.31).figures()

    assert figures["lip_onset_ms"]["count"] == figures["lip_skew_ms"]["count"] == 2
    assert figures["lip_skew_ms"]["together"] == pytest.approx(80, abs=20)
    assert figures["replies_with_lips"] == 3


def test_processor_time_is_read_behind_a_name_of_any_kind() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    stat = f"7 (lane-draw (a) b) S 1 7 7 0 -1 64 0 0 0 0 {3 * ticks} {ticks} 0 0 20 0 1 0"

    assert cpu_s(stat) == 4.0


def test_what_is_not_seen_without_a_browser_is_there_and_empty() -> None:
    assert {"fps_received", "skew_ms", "mouth_stop_ms", "lip_onset_ms"} <= set(UNSEEN)
    assert set(UNSEEN.values()) == {None}
