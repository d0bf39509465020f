"""Ears: the person's audio in a ring of the arena, and the words in a stretch of it (Moonshine tiny-en).

1. The ring holds absolute sample i at i modulo RING_SAMPLES, float32 at 16 kHz; whoever reads more than RING_SAMPLES
   behind the newest sample reads something else, so a job names at most WINDOW_SAMPLES.
2. The encoder looks both ways and is normalised over its whole input: nothing can be kept between two partials. Its
   cost follows the audio, so a growing utterance is encoded again, within a bounded window (DESIGN §5 rule 7).
3. Words that nobody said are worse than none: silence and noise give an empty text, a loop is cut at its first turn,
   and no stretch has more tokens than a person can speak in it.
4. Moonshine: Jeffries et al. 2024; weights int8, MIT (duplexd/weights.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import onnxruntime

from duplexd.errors import ModelError, WeightsError
from duplexd.ids import SlotId
from duplexd.media.network import load_network
from duplexd.streams.stage import (
    CopyJob,
    CopyResult,
    CostModel,
    Failed,
    ListenJob,
    ListenResult,
    PayloadKind,
    Result,
    Role,
    StageSpec,
)

RATE = 16_000
WINDOW_SAMPLES = 8 * RATE  #: longest stretch of one job
RING_SAMPLES = 10 * RATE  #: the window, and room for what arrives while it is read
SAMPLES_MIN = 1600  #: the encoder's strides leave no frame of less than this

Audio = npt.NDArray[np.float32]

_BEGIN, _END = 1, 2
_ENCODER_STRIDE = 384
_LAYERS, _HEADS, _HEAD_DIM = 6, 8, 36
_TOKENS_PER_SECOND = 6.5  #: bound that Moonshine's authors use; quick English speech is below 6
_TOKENS_SPARE = 4
_LOUDNESS_MIN = 10 ** (-60 / 20)  #: loudest 100 ms below -60 dBFS: nobody speaks


class ArenaView(Protocol):
    """What stages need of the arena; memory/arena.py gives it."""

    def field(self, partition: str, name: str) -> Any: ...


class SlotReader(Protocol):
    def read(self, slot: int, samples: int) -> npt.NDArray[np.int16]: ...


def read_ring(ring: Any, slot: SlotId, start: int, samples: int) -> Audio:
    """A stretch of one session's ring as float32 on the host, a copy where it wraps.

    Args:   ring: tensor (sessions, RING_SAMPLES).    start: absolute sample index.
    Raises: ValueError when the stretch is empty, longer than the ring or starts before the session.
    """
    length = ring.shape[1]
    if not 0 < samples <= length or start < 0:
        raise ValueError(f"a ring of {length} samples cannot give {samples} from {start}")
    first = start % length
    head = ring[slot, first : min(length, first + samples)].cpu().numpy()
    tail = ring[slot, : max(0, first + samples - length)].cpu().numpy()
    return np.concatenate((head, tail)) if len(tail) else np.asarray(head, np.float32)


class CopyIn:
    """Person's audio: shared-memory slot (int16) -> the session's ring (float32, full scale 1.0)."""

    def __init__(self, *, lane: str = "copy") -> None:
        self.spec = StageSpec(
            name="copy",
            role=Role.COPY,
            lane=lane,
            takes=PayloadKind.AUDIO,
            gives=PayloadKind.AUDIO,
            cost=CostModel(fixed_us=20, per_row_us=20),
            load=0.01,
            batch_max=64,
        )

    def load(self, arena: ArenaView) -> None:
        self._ring = arena.field("ingest", "pcm")

    def run(self, jobs: Sequence[CopyJob], media: SlotReader) -> list[Result]:
        return [self._copy(job, media) for job in jobs]

    def _copy(self, job: CopyJob, media: SlotReader) -> Result:
        length = self._ring.shape[1]
        pcm = media.read(job.slot, job.samples)
        if len(pcm) != job.samples or job.samples > length or job.start < 0:
            reason = f"slot {job.slot} gave {len(pcm)} samples for {job.samples} at {job.start}, ring {length}"
            return Failed(job.session, reason)
        audio = self._ring.new_tensor(pcm.astype(np.float32) / 32768.0)
        first = job.start % length
        head = min(length - first, job.samples)
        self._ring[job.ring, first : first + head] = audio[:head]
        self._ring[job.ring, : job.samples - head] = audio[head:]
        return CopyResult(job.session, job.samples)


class Transcript(msgspec.Struct, frozen=True):
    text: str
    certainty: float  #: mean log-probability of the tokens; 0 is certain
    tokens: int


class Transcriber:
    """Moonshine tiny-en through ONNX Runtime: audio in, words out; keeps nothing between two calls.

    Raises: WeightsError when a file cannot be loaded, ModelError when it is another model.
    Cost:   about 9 ms a second of audio and 4.5 ms a token on one core; 35 ms for 1 s of speech, 120 ms for 4 s.
    """

    def __init__(self, encoder: Path, decoder: Path, vocabulary: Path, *, threads: int = 1) -> None:
        self._encoder = load_network(encoder, called="the ears' network", threads=threads)
        self._decoder = load_network(decoder, called="the ears' network", threads=threads)
        self._pieces = read_vocabulary(vocabulary)
        self._past = [one.name for one in self._decoder.get_inputs() if one.name.startswith("past_key_values")]
        self._outputs = [one.name for one in self._decoder.get_outputs()]
        if len(self._past) != _LAYERS * 4 or len(self._outputs) != _LAYERS * 4 + 1:
            raise ModelError(f"{decoder} is not Moonshine tiny-en: {len(self._past)} past inputs, 24 expected")

    def transcribe(self, audio: Audio) -> Transcript:
        """Words of a stretch of 16 kHz audio, empty when nobody speaks.

        Args:   audio: float32 (n,), full scale 1.0; less than 0.1 s gives an empty text.
        Raises: ValueError when it is not finite mono audio of at most WINDOW_SAMPLES.
        """
        if audio.ndim != 1 or len(audio) > WINDOW_SAMPLES or not np.isfinite(audio).all():
            raise ValueError(f"ears take finite mono audio of at most {WINDOW_SAMPLES} samples, got {audio.shape}")
        if len(audio) < SAMPLES_MIN or loudness(audio) < _LOUDNESS_MIN:
            return Transcript("", 0.0, 0)
        tokens, certainty = self._decode(self._encode(audio), _tokens_max(len(audio)))
        text = clean("".join(self._words(uncoil(tokens))))
        return Transcript("" if is_doubtful(text, certainty) else text, certainty, len(tokens))

    def _encode(self, audio: Audio) -> Any:
        feeds = {"input_values": audio[None], "attention_mask": np.ones((1, len(audio)), np.int64)}
        return self._encoder.run(None, feeds)[0]

    def _decode(self, heard: Any, tokens_max: int) -> tuple[list[int], float]:
        """Greedy decoding; keys and values stay in the runtime's own buffers from step to step."""
        value = onnxruntime.OrtValue.ortvalue_from_numpy
        empty = value(np.zeros((1, _HEADS, 0, _HEAD_DIM), np.float32))
        feeds = dict.fromkeys(self._past, empty)
        feeds["encoder_hidden_states"] = value(heard)
        feeds["encoder_attention_mask"] = value(np.ones((1, heard.shape[1] * _ENCODER_STRIDE), np.int64))
        feeds["use_cache_branch"] = value(np.array([False]))
        feeds["input_ids"] = value(np.array([[_BEGIN]], np.int64))
        tokens: list[int] = []
        certainty = 0.0
        while len(tokens) < tokens_max:
            answer = dict(zip(self._outputs, self._decoder.run_with_ort_values(self._outputs, feeds), strict=True))
            logits = answer["logits"].numpy()[0, -1]
            token = int(logits.argmax())
            certainty += _log_probability(logits, token)
            if token == _END:
                break
            tokens.append(token)
            if is_coiled(tokens):
                break
            for name, present in answer.items():
                past = name.replace("present", "past_key_values")
                # The merged decoder returns empty encoder keys once it reads the cache: the first ones stay.
                if name != "logits" and (len(tokens) == 1 or ".encoder." not in name):
                    feeds[past] = present
            feeds["use_cache_branch"] = value(np.array([True]))
            feeds["input_ids"] = value(np.array([[token]], np.int64))
        return tokens, certainty / max(1, len(tokens) + 1)

    def _words(self, tokens: Sequence[int]) -> str:
        spelled = b"".join(self._pieces[token] for token in tokens)
        return spelled.decode("utf-8", "ignore").replace("\u2581", " ")


class Ears:
    """Stage: a stretch of the person's audio -> its words. A bad row fails alone."""

    def __init__(self, transcriber: Transcriber, *, lane: str = "listen") -> None:
        self._transcriber = transcriber
        self.spec = StageSpec(
            name="listen",
            role=Role.LISTEN,
            lane=lane,
            takes=PayloadKind.AUDIO,
            gives=PayloadKind.TEXT,
            cost=CostModel(fixed_us=8_000, per_unit_us=28_000),  # the unit is a second of audio
            load=0.06,
        )

    def load(self, arena: ArenaView) -> None:
        self._ring = arena.field("ingest", "pcm")

    def run(self, jobs: Sequence[ListenJob], media: object) -> list[Result]:
        return [self._listen(job) for job in jobs]

    def _listen(self, job: ListenJob) -> Result:
        try:
            audio = read_ring(self._ring, job.ring, job.start, job.samples)
            transcript = self._transcriber.transcribe(audio)
            return ListenResult(job.session, transcript.text, transcript.certainty)
        except ValueError as fault:
            return Failed(job.session, str(fault))


# Pure helpers -------------------------------------------------------------------------------------------------------


def read_vocabulary(path: Path) -> list[bytes]:
    """Pieces of tokenizer.bin: records of one length byte (two, base 128, when the first is >= 128) and the bytes."""
    try:
        data = path.read_bytes()
    except OSError as fault:
        raise WeightsError(f"the vocabulary {path} cannot be read: {fault}; run `duplexd fetch`") from fault
    pieces: list[bytes] = []
    at = 0
    while at < len(data):
        length, at = data[at], at + 1
        if length >= 128:
            length, at = length - 128 + data[at] * 128, at + 1
        pieces.append(data[at : at + length])
        at += length
    # `<s>`, `</s>` and their like are marks, not words.
    return [b"" if re.fullmatch(rb"<[^<> ]+>", piece) else piece for piece in pieces]


def loudness(audio: Audio) -> float:
    """Root mean square of the loudest 100 ms, 0..1, without its constant part (a DC offset says nothing)."""
    pieces = audio[: len(audio) // SAMPLES_MIN * SAMPLES_MIN].reshape(-1, SAMPLES_MIN)
    return float(pieces.std(axis=1).max())


def is_coiled(tokens: Sequence[int]) -> bool:
    """The newest tokens say the same 2..8 tokens for the third time, or one token for the fifth ("no no no no")."""
    return any(_turns(tokens, period) >= (5 if period == 1 else 3) for period in range(1, 9))


def _turns(tokens: Sequence[int], period: int) -> int:
    loop, turns = list(tokens[-period:]), 0
    while len(tokens) >= period * (turns + 1) and list(tokens[-period * (turns + 1) :][:period]) == loop:
        turns += 1
    return turns


def uncoil(tokens: Sequence[int]) -> list[int]:
    """Cut a coiled end after its first turn."""
    for period in range(1, 9):
        turns = _turns(tokens, period)
        if turns >= (5 if period == 1 else 3):
            return list(tokens[: len(tokens) - period * (turns - 1)])
    return list(tokens)


def clean(text: str) -> str:
    """Words with single spaces; marks of the model and control characters are no words."""
    return " ".join("".join(ch if ch.isprintable() else " " for ch in text).split())


#: What this network writes for sound without speech; as a whole utterance it is taken for that.
_SAID_OF_NOISE = frozenset({"you", "thankyoufor", "thankyouforwatching", "thanksforwatching"})
_CERTAINTY_MIN = -0.85


def is_doubtful(text: str, certainty: float) -> bool:
    """Nothing pronounceable, a song, or words the model itself does not believe: what it makes of noise."""
    if "♪" in text:
        return True
    spoken = "".join(ch for ch in text.lower() if ch.isalnum())
    return not spoken or spoken in _SAID_OF_NOISE or certainty < _CERTAINTY_MIN


def _tokens_max(samples: int) -> int:
    return int(samples / RATE * _TOKENS_PER_SECOND) + _TOKENS_SPARE


def _log_probability(logits: npt.NDArray[np.float32], token: int) -> float:
    top = float(logits[token])
    return -float(np.log(np.exp(logits - top).sum()))
