"""What the talk bench plays and keeps."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from duplexd.bench import recordings
from duplexd.bench.netem import Impairment
from duplexd.bench.programs import RigError
from duplexd.bench.stage import BAD, impairment_of, keep
from duplexd.bench.talk import NOISE_LEAD_MS, NOISE_TAIL_MS, Paused, _premature, in_a_room, report_from
from duplexd.bench.tap import RATE, ClockMap, Recording
from duplexd.units import NANOS_PER_MS


def test_a_room_is_as_loud_as_it_was_ordered_before_in_and_after_the_voice() -> None:
    """20 dB below the voice, everywhere; the same noise every time."""
    one = recordings.load("paused")[0]
    mixed = in_a_room(one, 20.0)
    lead, tail = (ms * recordings.RATE // 1000 for ms in (NOISE_LEAD_MS, NOISE_TAIL_MS))
    speech = np.concatenate([np.zeros(lead), one.audio(), np.zeros(tail)])
    noise = mixed / 32768 - speech
    voice = speech[np.abs(speech) > 10 ** (-45 / 20)]

    assert 10 * np.log10((voice**2).mean() / (noise**2).mean()) == pytest.approx(20, abs=0.2)
    for part in (noise[:lead], noise[lead:-tail], noise[-tail:]):
        assert 10 * np.log10((part**2).mean() / (noise**2).mean()) == pytest.approx(0, abs=3)  # It swells.
    assert np.array_equal(mixed, in_a_room(one, 20.0))
    assert not np.array_equal(mixed[:lead], in_a_room(recordings.load("paused")[1], 20.0)[:lead])


def test_premature_ends_are_counted_with_and_without_noise() -> None:
    paused = [
        Paused("a", False, True, ["whole"]),
        Paused("a", True, False, ["half", "half"], 20.0),
        Paused("b", True, True, ["half", "whole"], 20.0),
    ]

    assert _premature([p for p in paused if p.noise_db is None]) == {"count": 0, "of": 1, "merged": 0}
    assert _premature([p for p in paused if p.noise_db is not None]) == {"count": 2, "of": 2, "merged": 1}


def test_voice_to_voice_is_made_again_of_what_was_kept(tmp_path: Path) -> None:
    """A question ended at 300 ms, and the loudspeaker's first sound is at 700; the kept figure is not believed."""
    sound = np.zeros(RATE, np.int16)
    sound[RATE * 7 // 10 :] = 9000
    clock = ClockMap(rate=RATE, starts=(0,), origins_ns=(0,), spread_ns=0)
    keep(tmp_path, "talk-loudspeaker", Recording(pcm=sound, rate=RATE, first_sample=0, clock=clock))
    turns = [{"name": "q", "ended": 300 * NANOS_PER_MS, "v2v_ms": 1.0}, {"name": "r", "ended": 0, "v2v_ms": None}]
    (tmp_path / "talk.json").write_text(json.dumps({"each": turns, "v2v_ms": {}, "log": []}))
    report = report_from(tmp_path)

    assert report["v2v_ms"] == {"p50": 400.0, "p90": 400.0}
    assert [turn["v2v_ms"] for turn in report["each"]] == [400.0, None]


def test_a_folder_that_keeps_no_talk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RigError, match="holds nothing"):
        report_from(tmp_path)


def test_a_weak_link_is_an_impairment_with_or_without_the_bad_network() -> None:
    assert impairment_of(impaired=False, link_kbps=None) is None
    assert impairment_of(impaired=True, link_kbps=None) == BAD
    assert impairment_of(impaired=False, loss_percent=3) == Impairment(loss=0.03)
    assert impairment_of(impaired=True, loss_percent=0) == msgspec.structs.replace(BAD, loss=0.0)
    assert impairment_of(impaired=False, link_kbps=400) == Impairment(rate_kbps=400)
    both = impairment_of(impaired=True, link_kbps=400)
    assert both is not None
    assert both.text() == "40 ms round trip, jitter 10 ms, 3 % loss, 400 kbit/s"
