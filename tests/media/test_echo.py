"""Echo: the character's own voice in the microphone starts nothing; a person over it does.

T-VAD-01, T-VAD-02. The signals are recordings of speech, the voice detector is the harshest there is: every block that
is not silent counts as speech.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from duplexd.bench import recordings
from duplexd.media.echo import BLOCK_SAMPLES, EchoReference, EchoReport
from duplexd.media.vad import Started, VoiceGate
from duplexd.units import Span, Ticks, ms_from_ticks

Audio = npt.NDArray[np.float32]
RATE = 16_000


@pytest.fixture(scope="module")
def character() -> Audio:
    """Eleven seconds of speech with pauses."""
    names = ("paused-01", "paused-04", "paused-11")
    return np.concatenate([recordings.find(name).audio() for name in names])


@pytest.fixture(scope="module")
def person() -> Audio:
    spoken = recordings.find("question-10")
    return spoken.audio()[spoken.voiced_start_ms * 16 : spoken.voiced_end_ms * 16]


def level(audio: Audio) -> float:
    return float(np.sqrt((audio[np.abs(audio) > 0.005] ** 2).mean()))


def echo_of(audio: Audio, *, gain_db: float, delay_ms: int, room: bool = False) -> Audio:
    delayed = np.concatenate((np.zeros(delay_ms * 16, np.float32), audio))[: len(audio)] * 10 ** (gain_db / 20)
    if room:
        rng = np.random.default_rng(5)
        tail = rng.standard_normal(2400) * np.exp(-np.arange(2400) / 400)
        tail[0] = 3.0
        delayed = np.convolve(delayed, tail / np.sqrt((tail**2).sum()))[: len(audio)]
    return np.asarray(delayed, np.float32)


def microphone(audio: Audio) -> Audio:
    rng = np.random.default_rng(6)
    return np.asarray(audio + rng.standard_normal(len(audio)) * 1e-4, np.float32)


def listen(heard: Audio, played: Audio) -> tuple[list[Started], list[EchoReport]]:
    """Run the gate with a detector to which every block above -60 dBFS is speech."""
    echo, gate = EchoReference(), VoiceGate()
    starts, reports = [], []
    for at in range(0, len(heard) - BLOCK_SAMPLES + 1, BLOCK_SAMPLES):
        block = heard[at : at + BLOCK_SAMPLES]
        echo.play(played[at : at + BLOCK_SAMPLES], at)
        reports.append(echo.hear(block, at))
        voice = 1.0 if math.sqrt(float((block**2).mean())) > 1e-3 else 0.0
        fact = gate.push(voice, Span(Ticks(at * 3), Ticks((at + BLOCK_SAMPLES) * 3)), echo=reports[-1].share)
        if isinstance(fact, Started):
            starts.append(fact)
    return starts, reports


@pytest.mark.parametrize("room", [False, True], ids=["dry", "room"])
@pytest.mark.parametrize("delay_ms", [30, 80, 140, 200, 300])
@pytest.mark.parametrize("gain_db", [-10, -20, -30, -40])
def test_the_characters_own_voice_is_no_onset(character: Audio, gain_db: float, delay_ms: int, room: bool) -> None:
    starts, _ = listen(microphone(echo_of(character, gain_db=gain_db, delay_ms=delay_ms, room=room)), character)

    assert starts == []


@pytest.mark.parametrize("delay_ms", [30, 140, 300])
def test_the_way_is_learned(character: Audio, delay_ms: int) -> None:
    _, reports = listen(microphone(echo_of(character, gain_db=-20, delay_ms=delay_ms)), character)

    assert abs(reports[-1].lag * 16 - delay_ms) <= 16
    assert max(report.agreement for report in reports) > 0.9


@pytest.mark.parametrize("room", [False, True], ids=["dry", "room"])
@pytest.mark.parametrize("gain_db", [-10, -20])
@pytest.mark.parametrize("onset_ms", [1500, 4200, 7300])
def test_a_person_6_db_over_the_echo_is_noticed_within_400_ms(
    character: Audio, person: Audio, onset_ms: int, gain_db: float, room: bool
) -> None:
    echo = echo_of(character, gain_db=gain_db, delay_ms=120, room=room)
    spoken = person * (level(echo) / level(person) * 2)
    heard = echo[: onset_ms * 16 + len(spoken)].copy()
    heard[onset_ms * 16 :] += spoken

    starts, _ = listen(microphone(heard), character)

    assert onset_ms - 32 <= ms_from_ticks(starts[0].at)
    assert ms_from_ticks(starts[0].noticed) - onset_ms <= 400


def test_behind_a_perfect_canceller_a_person_is_noticed_at_once(character: Audio, person: Audio) -> None:
    """Headphones, or a browser that leaves nothing: nothing comes back, so nothing is explained."""
    heard = np.zeros(5 * RATE, np.float32)
    heard[2 * RATE : 2 * RATE + len(person)] = person * 0.3

    starts, _ = listen(microphone(heard), character)

    assert ms_from_ticks(starts[0].noticed) - 2000 <= 300


def test_when_nothing_is_played_nothing_is_explained(person: Audio) -> None:
    _, reports = listen(microphone(person), np.zeros_like(person))

    assert [report.share for report in reports] == [0.0] * len(reports)


def test_what_was_cut_explains_nothing(character: Audio, person: Audio) -> None:
    """The character was announced two seconds ahead and then flushed; a person speaks into the silence."""
    echo = EchoReference()
    silence = np.zeros(BLOCK_SAMPLES, np.float32)
    echo.hear(silence, 0)
    echo.play(character[: 2 * RATE], BLOCK_SAMPLES)
    echo.cut(BLOCK_SAMPLES)
    shares = [
        echo.hear(person[at : at + BLOCK_SAMPLES], BLOCK_SAMPLES + at).share
        for at in range(0, len(person) - BLOCK_SAMPLES, BLOCK_SAMPLES)
    ]

    assert max(shares) == 0.0


def test_a_gap_in_the_input_does_not_lose_the_way(character: Audio) -> None:
    echo, heard = EchoReference(), echo_of(character, gain_db=-20, delay_ms=100)
    reports = []
    for at in range(0, len(heard) - BLOCK_SAMPLES, BLOCK_SAMPLES):
        echo.play(character[at : at + BLOCK_SAMPLES], at)
        if not 3 * RATE < at < 4 * RATE:
            reports.append(echo.hear(heard[at : at + BLOCK_SAMPLES], at))

    assert reports[-1].lag == 6
    assert reports[-20].share > 0.9


def test_a_block_that_is_no_number_is_silence(character: Audio) -> None:
    echo = EchoReference()
    echo.play(character[:RATE], 0)
    reports = [echo.hear(np.full(BLOCK_SAMPLES, np.nan, np.float32), at) for at in range(0, RATE, BLOCK_SAMPLES)]

    assert all(0.0 <= report.share <= 1.0 for report in reports)


def test_a_block_that_goes_back_or_is_short_is_refused() -> None:
    echo = EchoReference()
    echo.hear(np.zeros(BLOCK_SAMPLES, np.float32), BLOCK_SAMPLES)

    with pytest.raises(ValueError):
        echo.hear(np.zeros(BLOCK_SAMPLES, np.float32), 0)
    with pytest.raises(ValueError):
        echo.hear(np.zeros(100, np.float32), 4096)
