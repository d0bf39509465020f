"""The private sound server: what it accepts, and that what is said arrives."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from duplexd.bench.programs import ProgramMissing, RigError
from duplexd.bench.pulse import Echo, PulseRig, to_rig
from duplexd.bench.tap import RATE

noise = np.random.default_rng(5).normal(0, 3000, 14_400).astype(np.int16)


def test_a_sound_at_the_rigs_rate_is_not_touched() -> None:
    assert np.array_equal(to_rig(noise, RATE), noise)


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 24_000, 44_100])
def test_a_sound_at_another_rate_keeps_its_length_and_its_tone(rate: int) -> None:
    tone = np.sin(2 * np.pi * 1000 * np.arange(rate) / rate).astype(np.float32) * 0.5
    heard = to_rig(tone, rate)
    spectrum = np.abs(np.fft.rfft(heard[:RATE].astype(np.float64) * np.hanning(len(heard[:RATE]))))

    assert abs(len(heard) - RATE) <= 48
    assert spectrum.argmax() * RATE / len(heard[:RATE]) == pytest.approx(1000, abs=2)
    assert np.abs(heard[4800:-4800]).max() == pytest.approx(16384, rel=0.02)


def test_a_float_sound_is_clipped_and_scaled() -> None:
    assert to_rig(np.array([0.0, 1.0, -1.0, 2.0]), RATE).tolist() == [0, 32767, -32767, 32767]


@pytest.mark.parametrize(
    "sound",
    [np.zeros((2, 10)), np.zeros(0), np.array([0.0, np.nan]), np.zeros(10, np.int32)],
    ids=["stereo", "empty", "nan", "int32"],
)
def test_what_is_no_sound_is_refused(sound: np.ndarray) -> None:
    with pytest.raises(ValueError, match="a sound"):
        to_rig(sound, RATE)


@pytest.mark.parametrize("values", [{"latency_ms": 0}, {"gain": 0.0}, {"gain": 1.5}], ids=str)
def test_an_impossible_echo_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="echo needs"):
        Echo(**values)  # type: ignore[arg-type]


def test_a_missing_sound_server_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("duplexd.bench.programs._SEARCH_ALSO", ())

    with pytest.raises(ProgramMissing, match="apt-get install --no-install-recommends pulseaudio"), PulseRig():
        pass


def test_a_server_that_does_not_start_says_why_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A program that fails stands in for the server; its last words are in the error."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("pulseaudio", "pactl", "pacat", "parec"):
        (programs / name).write_text("#!/bin/sh\necho no sound today >&2\nexit 3\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    with pytest.raises(RigError, match="exit status 3, its log: no sound today"), PulseRig():
        pass
    assert list(tmp_path.iterdir()) == [programs]


@pytest.fixture(scope="module")
def rig() -> Iterator[PulseRig]:
    if shutil.which("pulseaudio") is None:
        pytest.skip("pulseaudio is not installed")
    with PulseRig() as rig:
        yield rig


@pytest.mark.slow
def test_what_is_said_arrives_sample_for_sample(rig: PulseRig) -> None:
    said = rig.say(noise)
    said.finish()
    recording = rig.microphone.recording()
    begin = said.first_sample - recording.first_sample

    assert np.array_equal(recording.pcm[begin : begin + len(noise)], noise)
    assert abs(recording.time_of(said.first_sample) - said.start) < 1_000_000
    assert recording.first_audible(after=said.start, dbfs=-60) is not None
    assert recording.clock.steps_count == 0


@pytest.mark.slow
def test_a_steady_tone_is_found_where_it_begins(rig: PulseRig) -> None:
    """One period later it would be as like itself; only the silence before it tells the beginning."""
    tone = (8000 * np.sin(2 * np.pi * 440 * np.arange(1, 14_401) / RATE)).astype(np.int16)
    said = rig.say(tone)
    said.finish()
    recording = rig.microphone.recording()
    begin = said.first_sample - recording.first_sample

    assert not recording.pcm[begin - 240 : begin].any()
    assert np.array_equal(recording.pcm[begin : begin + len(tone)], tone)


@pytest.mark.slow
def test_an_utterance_can_be_broken_off(rig: PulseRig) -> None:
    """The speaker stops after a fifth of a second; the rest of three seconds is never heard."""
    said = rig.say(np.tile(noise, 10))
    said.stop()
    rig.microphone.wait_for(said.first_sample + 2 * RATE, limit_s=5)

    assert not rig.microphone.since(said.first_sample + RATE).any()
    with pytest.raises(RigError, match=r"was broken|was not over"):
        said.finish(limit_s=3)


@pytest.mark.slow
def test_silence_cannot_be_said(rig: PulseRig) -> None:
    with pytest.raises(ValueError, match="not zero"):
        rig.say(np.zeros(100, np.int16))


@pytest.mark.slow
def test_two_rigs_do_not_hear_each_other_and_leave_nothing(rig: PulseRig) -> None:
    others: list[PulseRig] = []

    def break_inside() -> None:
        with PulseRig() as other:
            others.append(other)
            rig.say(noise).finish()
            assert not other.microphone.since(0).any()
            raise KeyError

    with pytest.raises(KeyError):
        break_inside()
    (other,) = others

    assert not Path(other.env["XDG_RUNTIME_DIR"]).exists()
    assert other.microphone.has_ended
    assert other.loudspeaker.has_ended
