"""The spoken test material is what its manifest says."""

from __future__ import annotations

import numpy as np
import pytest

from duplexd.bench import recordings
from duplexd.bench.recordings import noises

FLOOR = 10 ** (-45 / 20)


@pytest.mark.parametrize("recording", recordings.load(), ids=lambda one: one.name)
def test_voice_lies_where_the_manifest_says(recording: recordings.Recording) -> None:
    audio = recording.audio()
    quiet = np.sqrt((audio[: len(audio) // 160 * 160].reshape(-1, 160) ** 2).mean(axis=1)) < FLOOR

    assert quiet[: recording.voiced_start_ms // 10].all()
    assert quiet[recording.voiced_end_ms // 10 :].all()
    assert not quiet[recording.voiced_start_ms // 10]
    assert not quiet[recording.voiced_end_ms // 10 - 1]
    for start, end in recording.pauses_ms:
        assert quiet[start // 10 : end // 10].all()


def test_there_is_enough_of_each_kind_and_it_is_small() -> None:
    kinds = {kind: len(recordings.load(kind)) for kind in ("question", "paused", "acknowledgement", "reader")}

    assert kinds == {"question": 20, "paused": 20, "acknowledgement": 8, "reader": 2}
    assert sum(one.path.stat().st_size for one in recordings.load()) < 2_500_000
    assert all(300 <= end - start <= 600 for one in recordings.load("paused") for start, end in one.pauses_ms)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match="question-01"):
        recordings.find("nothing")


@pytest.mark.parametrize("kind", sorted(noises.NOISES))
def test_noise_comes_from_its_seed(kind: str) -> None:
    first, again, other = (noises.NOISES[kind](32_000, np.random.default_rng(seed)) for seed in (1, 1, 2))

    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert 0.9 <= float(np.abs(first).max()) <= 1.0


def test_noise_is_added_at_the_ratio_asked_for() -> None:
    speech = recordings.find("question-01").audio()
    noise = noises.room(len(speech), np.random.default_rng(1))
    added = noises.at_snr(speech, noise, 20) - speech
    loud = speech[np.abs(speech) > FLOOR]

    assert 10 * np.log10((loud**2).mean() / (added**2).mean()) == pytest.approx(20, abs=0.1)
