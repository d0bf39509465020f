"""The ears: a ring of samples in the arena, and words that somebody really said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duplexd import weights
from duplexd.bench import recordings
from duplexd.bench.recordings import noises
from duplexd.errors import WeightsError
from duplexd.ids import ChunkId, ConditionVersion, Epoch, SessionId, SlotId
from duplexd.models.pocket.ears import (
    RATE,
    WINDOW_SAMPLES,
    CopyIn,
    Ears,
    Transcriber,
    clean,
    is_coiled,
    is_doubtful,
    read_ring,
    read_vocabulary,
    uncoil,
)
from duplexd.streams.stage import CopyJob, CopyResult, Failed, ListenJob

WHO: tuple[SessionId, Epoch, ChunkId, ConditionVersion] = (SessionId(7), Epoch(0), ChunkId(0), ConditionVersion(0))


class FakeArena:
    """One partition, `ingest`, with a ring for each of two sessions."""

    def __init__(self, samples: int) -> None:
        self.pcm = torch.zeros((2, samples))

    def field(self, partition: str, name: str) -> Any:
        assert (partition, name) == ("ingest", "pcm")
        return self.pcm


class Slots:
    """Shared memory with one block in it."""

    def __init__(self, pcm: npt.NDArray[np.int16]) -> None:
        self.pcm = pcm

    def read(self, slot: int, samples: int) -> npt.NDArray[np.int16]:
        return self.pcm[:samples]


def copy_in(arena: FakeArena, pcm: npt.NDArray[np.int16], *, ring: int, start: int) -> Any:
    stage = CopyIn()
    stage.load(arena)
    return stage.run([CopyJob(*WHO, slot=3, ring=SlotId(ring), start=start, samples=len(pcm))], Slots(pcm))[0]


@given(st.integers(0, 5000), st.lists(st.integers(1, 512), min_size=1, max_size=12))
def test_what_was_copied_in_is_read_back_across_the_wrap(start: int, lengths: list[int]) -> None:
    """Blocks of any length one after the other; the newest ring full of them is what reading gives."""
    arena = FakeArena(1000)
    said = (np.arange(sum(lengths)) % 30_000 + 1).astype(np.int16)
    at = 0
    for length in lengths:
        copy_in(arena, said[at : at + length], ring=1, start=start + at)
        at += length
    kept = min(at, 1000)

    heard = read_ring(arena.pcm, SlotId(1), start + at - kept, kept)

    assert np.array_equal(np.round(heard * 32768).astype(np.int16), said[at - kept : at])
    assert not arena.pcm[0].any()


def test_copy_in_says_how_many_samples_it_took() -> None:
    assert copy_in(FakeArena(1000), np.ones(512, np.int16), ring=0, start=0) == CopyResult(SessionId(7), 512)


def test_a_slot_that_holds_less_than_it_should_fails_alone() -> None:
    stage = CopyIn()
    stage.load(FakeArena(1000))
    jobs = [CopyJob(*WHO, slot=0, ring=SlotId(0), start=0, samples=count) for count in (512, 100)]

    results = stage.run(jobs, Slots(np.ones(100, np.int16)))

    assert [type(one) for one in results] == [Failed, CopyResult]


@pytest.mark.parametrize(("start", "samples"), [(0, 0), (0, 1001), (-1, 10)], ids=["nothing", "too much", "before"])
def test_a_stretch_the_ring_cannot_hold_is_refused(start: int, samples: int) -> None:
    with pytest.raises(ValueError):
        read_ring(torch.zeros((1, 1000)), SlotId(0), start, samples)


@pytest.mark.parametrize(
    ("tokens", "cut"),
    [
        ([5, 6, 7, 6, 7, 6, 7], [5, 6, 7]),
        ([1, 1, 1, 1, 1], [1]),
        ([1, 1, 1, 1], [1, 1, 1, 1]),
        ([3, 4, 5, 3, 4, 5], [3, 4, 5, 3, 4, 5]),
        ([], []),
    ],
    ids=["a loop of two", "a word five times", "no no no no", "said twice", "nothing"],
)
def test_a_loop_is_cut_after_its_first_turn(tokens: list[int], cut: list[int]) -> None:
    assert uncoil(tokens) == cut
    assert is_coiled(tokens) == (tokens != cut)


@pytest.mark.parametrize(
    ("text", "certainty", "doubtful"),
    [
        ("You", -0.1, True),
        ("You are right.", -0.1, False),
        ("...", -0.1, True),
        ("♪ la la ♪", -0.1, True),
        ("Can also use the", -0.95, True),
        ("Yes.", -0.5, False),
    ],
)
def test_words_nobody_said_are_doubted(text: str, certainty: float, doubtful: bool) -> None:
    assert is_doubtful(text, certainty) == doubtful


def test_text_is_clean() -> None:
    assert clean("  a\tb \x07 c\n") == "a b c"


def test_a_vocabulary_is_read_with_long_pieces_and_without_marks(tmp_path: Path) -> None:
    long = b"x" * 300
    file = tmp_path / "tokenizer.bin"
    file.write_bytes(b"\x03<s>" + bytes([128 + 300 % 128, 300 // 128]) + long + b"\x04\xe2\x96\x81a")

    assert read_vocabulary(file) == [b"", long, "\u2581a".encode()]


def test_a_missing_vocabulary_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="duplexd fetch"):
        read_vocabulary(tmp_path / "none.bin")


# With the weights ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transcriber() -> Transcriber:
    return Transcriber(*(weights.path(f"moonshine-{part}") for part in ("encoder", "decoder", "tokenizer")))


def plain(text: str) -> str:
    return "".join(ch for ch in text.lower() if ch.isalpha() or ch == " ")


@pytest.mark.weights
@pytest.mark.parametrize("name", ["question-01", "question-06", "question-14", "paused-01", "paused-17"])
def test_speech_becomes_its_words(transcriber: Transcriber, name: str) -> None:
    spoken = recordings.find(name)

    assert plain(transcriber.transcribe(spoken.audio()).text) == plain(spoken.text)


@pytest.mark.weights
@pytest.mark.parametrize("kind", sorted(noises.NOISES))
@pytest.mark.parametrize("level", [0.5, 0.05])
def test_noise_has_no_words(transcriber: Transcriber, kind: str, level: float) -> None:
    noise = noises.NOISES[kind](3 * RATE, np.random.default_rng(2)) * np.float32(level)

    assert transcriber.transcribe(noise).text == ""


@pytest.mark.weights
@pytest.mark.parametrize(
    "audio",
    [np.zeros(RATE), np.full(RATE, 0.5), np.zeros(100)],
    ids=["silence", "a constant", "too short"],
)
def test_no_speech_has_no_words(transcriber: Transcriber, audio: npt.NDArray[np.float64]) -> None:
    assert transcriber.transcribe(audio.astype(np.float32)).text == ""


@pytest.mark.weights
def test_the_text_is_bounded_by_the_time(transcriber: Transcriber) -> None:
    spoken = recordings.find("reader-01").audio()[:WINDOW_SAMPLES]
    said = transcriber.transcribe(spoken)

    assert 10 < said.tokens <= len(spoken) / RATE * 6.5 + 4


@pytest.mark.weights
def test_the_stage_hears_what_lies_in_the_ring_and_a_bad_row_fails_alone(transcriber: Transcriber) -> None:
    arena = FakeArena(10 * RATE)
    pcm = recordings.find("question-05").pcm()
    start = 10 * RATE - 5000  # so that the words lie across the wrap
    copy_in(arena, pcm, ring=1, start=start)
    arena.pcm[0] = float("nan")
    ears = Ears(transcriber)
    ears.load(arena)

    results = ears.run(
        [ListenJob(*WHO, ring=SlotId(ring), start=start, samples=len(pcm)) for ring in (0, 1)], media=None
    )

    assert isinstance(results[0], Failed)
    assert (results[1].session, results[1].text) == (7, "Tell me something about the ocean.")
    assert -0.3 < results[1].certainty < 0


@pytest.mark.weights
def test_ears_remember_nothing(transcriber: Transcriber) -> None:
    first, second = (recordings.find(name).audio() for name in ("question-01", "question-13"))
    before = transcriber.transcribe(first)
    transcriber.transcribe(second)

    assert transcriber.transcribe(first) == before


@pytest.mark.weights
@pytest.mark.parametrize(
    "audio", [np.zeros((2, 100)), np.full(3200, np.nan), np.zeros(WINDOW_SAMPLES + 1)], ids=["stereo", "nan", "long"]
)
def test_audio_that_is_none_is_refused(transcriber: Transcriber, audio: npt.NDArray[np.float64]) -> None:
    with pytest.raises(ValueError):
        transcriber.transcribe(audio.astype(np.float32))


def test_a_damaged_network_says_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "encoder.ort"
    file.write_bytes(b"nothing")

    with pytest.raises(WeightsError, match="duplexd fetch"):
        Transcriber(file, file, file)
