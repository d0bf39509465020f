"""End of turn: features as the network was trained on, and what it says of recordings."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from duplexd import weights
from duplexd.bench import recordings
from duplexd.ids import ChunkId, ConditionVersion, Epoch, SessionId, SlotId
from duplexd.models.pocket.features import FRAME_SAMPLES, HOP_SAMPLES, RATE, WINDOW_SAMPLES, log_mel, mel_bands
from duplexd.models.pocket.turn import Turn, TurnJudge
from duplexd.streams.stage import Failed, JudgeJob, JudgeResult

Audio = npt.NDArray[np.float32]


def plain_log_mel(audio: Audio) -> npt.NDArray[np.float64]:
    """The definition, frame by frame: Whisper's log-mel of the normalised, left-padded 8 s window."""
    window = np.zeros(WINDOW_SAMPLES)
    heard = audio[-WINDOW_SAMPLES:]
    window[WINDOW_SAMPLES - len(heard) :] = heard
    window = (window - window.mean()) / np.sqrt(window.var() + 1e-7)
    padded = np.pad(window, FRAME_SAMPLES // 2, mode="reflect")
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME_SAMPLES) / FRAME_SAMPLES)
    frames = [padded[at : at + FRAME_SAMPLES] * hann for at in range(0, WINDOW_SAMPLES, HOP_SAMPLES)]
    power = np.abs(np.fft.rfft(np.array(frames))) ** 2
    logs = np.log10(np.maximum(power @ mel_bands().T, 1e-10)).T
    result: npt.NDArray[np.float64] = (np.maximum(logs, logs.max() - 8) + 4) / 4
    return result


@pytest.mark.parametrize("samples", [0, 1, 200, 399, 16_000, 127_640, 127_800, 127_841, 127_999, 128_000, 130_000])
@pytest.mark.parametrize("offset", [0.0, 0.05], ids=["centred", "with a constant"])
def test_features_equal_the_plain_definition(samples: int, offset: float) -> None:
    """Frames of padding are filled in and the mean is taken out in the spectrum: the result is the same."""
    audio = np.concatenate([one.audio() for one in recordings.load("reader")])[:samples] + np.float32(offset)

    assert np.abs(log_mel(audio) - plain_log_mel(audio)).max() < 1e-4


def test_bands_have_unit_area() -> None:
    bands = mel_bands()

    assert bands.shape == (80, 201)
    assert np.allclose(bands[40:].sum(axis=1) * RATE / FRAME_SAMPLES, 1.0, atol=0.1)


def test_audio_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError):
        log_mel(np.full(1000, np.nan, np.float32))


# With the weights ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judge() -> TurnJudge:
    return TurnJudge(weights.path("smart-turn"))


@pytest.mark.weights
def test_ends_of_questions_sound_finished_and_pauses_do_not(judge: TurnJudge) -> None:
    """Not for each recording (see scripts/evaluate_endpoint), but far apart on the whole."""
    ends = [judge.probability(one.audio()[: (one.voiced_end_ms + 200) * 16]) for one in recordings.load("question")]
    inner = [judge.probability(one.audio()[: (one.pauses_ms[0][0] + 200) * 16]) for one in recordings.load("paused")]

    assert np.median(ends) > 0.9
    assert np.median(inner) < 0.7
    assert np.mean(ends) - np.mean(inner) > 0.3


class FakeArena:
    def __init__(self) -> None:
        self.pcm = torch.zeros((2, 10 * RATE))

    def field(self, partition: str, name: str) -> Any:
        return self.pcm


@pytest.mark.weights
def test_the_stage_judges_what_lies_in_the_ring_and_a_bad_row_fails_alone(judge: TurnJudge) -> None:
    arena = FakeArena()
    audio = recordings.find("question-01").audio()
    arena.pcm[1, : len(audio)] = torch.from_numpy(audio)
    arena.pcm[0] = float("nan")
    stage = Turn(judge)
    stage.load(arena)
    who = (SessionId(7), Epoch(0), ChunkId(0), ConditionVersion(0))

    results = stage.run([JudgeJob(*who, ring=SlotId(ring), start=0, samples=len(audio)) for ring in (0, 1)], None)

    assert isinstance(results[0], Failed)
    assert results[1] == JudgeResult(SessionId(7), judge.probability(audio))
