"""The simulated model: no weights, no tensors; every token, clause and chunk is made up at once, of the asked length.

    token              text              meaning
    0                                    anchor
    1, 2, 3, 4                           person opens, person closes and reply opens, reply closes, end
    100 + n            "n," or "n."      of the person: the reply they want has n words
    10000 + r          "la" "la," "la."  of the reply: r words follow it

1. The thinker's memory is a row of integers, one a token slot of the arena's pages: what it says depends on what the
   ledgers let it read, so a slot of a dead epoch would be heard as a reply of a wrong length.
2. Results are values alone; what a launch costs is the calibration's business.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

from duplexd.errors import ConfigError
from duplexd.ids import SessionId
from duplexd.memory.layout import FieldSpec, PartitionKind, PartitionSpec, Section
from duplexd.simulation.calibration import Calibration, Speech, StageFigures
from duplexd.streams.graph import ModelPlan
from duplexd.streams.mover import mover_spec
from duplexd.streams.stage import (
    CopyJob,
    CopyResult,
    Cut,
    Failed,
    ListenJob,
    ListenResult,
    MoveJob,
    MoveResult,
    PayloadKind,
    RenderJob,
    RenderResult,
    Result,
    Role,
    Stage,
    StageSpec,
    TalkJob,
    TalkResult,
    ThinkJob,
    ThinkResult,
    WordSpan,
)
from duplexd.units import INPUT_RATE, Ticks, samples_from_ticks, ticks_from_ms

ANCHOR, OPEN_USER, CLOSE_USER, CLOSE_REPLY, END = range(5)
NUMBER = 100
SPOKEN = 10_000
WORD = "la"
OUTPUT_RATE = 24_000
PAGE_TOKENS = 16
RING_SAMPLES = INPUT_RATE * 16
LISTEN_MAX = ticks_from_ms(8000)
#: Every kept cut or branch may leave one page partly filled.
SPARE_PAGES = 64
#: A clause keeps its latents until its last chunk is made; a policy without a gate may have talked a whole reply ahead.
LATENTS_PER_SESSION = 512

STAGES: dict[str, tuple[Role, PayloadKind, PayloadKind]] = {
    "copy": (Role.COPY, PayloadKind.AUDIO, PayloadKind.AUDIO),
    "ears": (Role.LISTEN, PayloadKind.AUDIO, PayloadKind.TEXT),
    "think": (Role.THINK, PayloadKind.TEXT, PayloadKind.TEXT),
    "talk": (Role.TALK, PayloadKind.TEXT, PayloadKind.CODEC_CODE),
    "render": (Role.RENDER, PayloadKind.CODEC_CODE, PayloadKind.AUDIO),
}


class Transcript(Protocol):
    """Who knows what was said; the world passes itself to the ears as their `media`."""

    def words(self, session: SessionId, *, start: int, samples: int) -> str:
        """Words that end inside a stretch of a session's input, spaces between; 16 kHz samples since it opened."""


def speech_of(calibration: Calibration) -> Speech:
    """How tokens become sound. Raises ConfigError where nothing is spoken."""
    if calibration.speech is None:
        raise ConfigError(
            f"calibration {calibration.name} has no speech: it describes video stages only, which a scenario with a "
            "table `face` runs"
        )
    return calibration.speech


def plan(calibration: Calibration) -> ModelPlan:
    """The plan of the simulated model under one calibration. Raises ConfigError for one without speech or a stage."""
    speech = speech_of(calibration)
    missing = [name for name in STAGES if name not in calibration.stages]
    if missing:
        raise ConfigError(f"calibration {calibration.name} has no cost of {', '.join(missing)}")
    specs = tuple(_spec(name, calibration.stages[name]) for name in STAGES)
    clause = ticks_from_ms(speech.word_ms * speech.clause_words)
    return ModelPlan(
        name=f"sim-{calibration.name}",
        stages=specs,
        edges=[("copy", "ears"), ("talk", "render")],
        dialect=SimDialect(speech),
        partitions=lambda sessions: _partitions(sessions, speech),
        build=lambda: _build(specs, speech),
        sample_rate=OUTPUT_RATE,
        grain=ticks_from_ms(speech.frame_ms),
        chunk_ramp=tuple(map(ticks_from_ms, speech.chunk_ramp_ms or (speech.chunk_ms,))),
        clause_max=clause,
        context_tokens_max=speech.context_tokens_max,
        reply_tokens_max=speech.reply_words_max + 1,
        reply_sentences_max=speech.reply_words_max,
        reply_words_enough=speech.reply_words_max + 1,
        think_steps=speech.think_steps,
        ring_samples=RING_SAMPLES,
        listen_max=LISTEN_MAX,
        cut=Cut.AT_CURSOR,
        voice="energy",
    )


def _spec(name: str, figures: StageFigures) -> StageSpec:
    role, takes, gives = STAGES[name]
    return StageSpec(name, role, name, takes, gives, figures.mean, batch_max=figures.batch_max, load=figures.load)


def _partitions(sessions: int, speech: Speech) -> tuple[PartitionSpec, ...]:
    slots = PartitionKind.SLOTS
    pages = -(-speech.context_tokens_max // PAGE_TOKENS) + SPARE_PAGES
    keys = FieldSpec("kv", (speech.token_bytes // 2,), "bfloat16")
    return (
        PartitionSpec("state", slots, sessions, (FieldSpec("end", (1,)),), session_slots=1, section=Section.WINDOWS),
        PartitionSpec(
            "ingest", slots, sessions, (FieldSpec("pcm", (RING_SAMPLES,)),), session_slots=1, section=Section.INGEST
        ),
        PartitionSpec(
            "latents",
            slots,
            sessions * LATENTS_PER_SESSION,
            (FieldSpec("codes", (16,), "int16"),),
            session_slots=LATENTS_PER_SESSION,
        ),
        PartitionSpec(
            "pages",
            PartitionKind.PAGES,
            sessions * pages + 1,
            (keys,),
            page_tokens=PAGE_TOKENS,
            session_slots=pages,
            shared_slots=1,
        ),
    )


# Language ---------------------------------------------------------------------------------------------------------


class SimStream:
    """Tokens to text; the marks make the clauses."""

    def __init__(self, speech: Speech) -> None:
        self._speech = speech
        self._words = 0  #: of the clause under way
        self._first = True

    def push(self, token: int) -> str:
        space = "" if self._first and not self._words else " "
        self._words += 1
        length = self._speech.first_clause_words if self._first else self._speech.clause_words
        if token == SPOKEN or self._words >= length:
            # A comma needs two words before it; a full stop closes a clause of one.
            mark = "." if token == SPOKEN or self._words == 1 else ","
            self._words, self._first = 0, False
        else:
            mark = ""
        return f"{space}{WORD}{mark}"


class SimDialect:
    stop: tuple[int, ...] = (END,)

    def __init__(self, speech: Speech) -> None:
        self._speech = speech
        each = speech.input_tokens_per_word
        # The core asks for the same turn's tokens again and again while the turn is open.
        self._words = lru_cache(maxsize=256)(
            lambda text: tuple(NUMBER + int(word.rstrip(",.")) for word in text.split() for _ in range(each))
        )

    def anchor(self) -> list[int]:
        return [ANCHOR]

    def instruct(self, text: str) -> list[int]:
        return self.words(text, first=True)

    def sight(self, *, present: bool) -> list[int]:
        return []

    def open_user(self) -> list[int]:
        return [OPEN_USER]

    def words(self, text: str, *, first: bool) -> list[int]:
        """Raises ValueError for a word that is no number: the simulated person speaks in reply lengths."""
        return list(self._words(text))

    def close_user_open_reply(self) -> list[int]:
        return [CLOSE_USER]

    def close_reply(self) -> list[int]:
        return [CLOSE_REPLY]

    def stream(self) -> SimStream:
        return SimStream(self._speech)


# Stages -----------------------------------------------------------------------------------------------------------


class SimStage:
    """Common to all: a spec, nothing to load."""

    def __init__(self, spec: StageSpec) -> None:
        self.spec = spec

    def load(self, arena: Any) -> None:
        """`arena` is a `Memory`."""

    def run(self, jobs: Sequence[Any], media: Any) -> list[Any]:
        raise NotImplementedError


class Memory:
    """Integers in place of the arena: a token for every token slot of the pages and of their images in host memory."""

    def __init__(self, *, rows: int, host_slots: int) -> None:
        self.tokens = array("q", [-1]) * rows
        self.host = array("q", [-1]) * (host_slots * PAGE_TOKENS)


class Copy(SimStage):
    def run(self, jobs: Sequence[CopyJob], media: Any) -> list[Result]:
        return [CopyResult(job.session, job.samples) for job in jobs]


class Ears(SimStage):
    def run(self, jobs: Sequence[ListenJob], media: Transcript) -> list[Result]:
        return [
            ListenResult(job.session, media.words(job.session, start=job.start, samples=job.samples)) for job in jobs
        ]


class Thinker(SimStage):
    def __init__(self, spec: StageSpec) -> None:
        super().__init__(spec)
        self._tokens = array("q")

    def load(self, arena: Any) -> None:
        self._tokens = arena.tokens

    def run(self, jobs: Sequence[ThinkJob], media: Any) -> list[Result]:
        return [self._think(job) for job in jobs]

    def _think(self, job: ThinkJob) -> Result:
        slots = array("q")
        slots.frombytes(job.slots)
        tokens = self._tokens
        end = job.past + len(job.feed)
        for place, token in zip(range(job.past, end), job.feed, strict=True):
            tokens[slots[place]] = token
        if not job.steps:
            return ThinkResult(job.session, ())
        left = self._words_left(slots, end)
        if left is None:
            return Failed(job.session, "the context holds no number of words that the person asked for")
        # The last decoded token is returned, not appended: it heads the next feed.
        decoded = [SPOKEN + r if r >= 0 else END for r in range(left - 1, max(-1, left - 1 - job.steps) - 1, -1)]
        decoded = decoded[: job.steps]
        for place, token in zip(range(end, end + len(decoded) - 1), decoded, strict=False):
            tokens[slots[place]] = token
        return ThinkResult(job.session, tuple(decoded))

    def _words_left(self, slots: array[int], end: int) -> int | None:
        """Words still to say, by the newest token that tells it."""
        for place in range(end - 1, -1, -1):
            token = self._tokens[slots[place]]
            if token >= SPOKEN:
                return token - SPOKEN
            if token >= NUMBER:
                return token - NUMBER
            if token == OPEN_USER:
                return None
        return None


class Talker(SimStage):
    """A clause becomes as many frames as its words take."""

    def __init__(self, spec: StageSpec, speech: Speech) -> None:
        super().__init__(spec)
        self._word = ticks_from_ms(speech.word_ms)

    def run(self, jobs: Sequence[TalkJob], media: Any) -> list[Result]:
        return [self._talk(job) for job in jobs]

    def _talk(self, job: TalkJob) -> Result:
        spans, at = [], 0
        words = job.text.split()
        for index, word in enumerate(words):
            start = Ticks(index * self._word)
            spans.append(WordSpan(at, at + len(word), start, Ticks(start + self._word)))
            at += len(word) + 1
        return TalkResult(job.session, Ticks(len(words) * self._word), tuple(spans))


class Renderer(SimStage):
    def run(self, jobs: Sequence[RenderJob], media: Any) -> list[Result]:
        return [RenderResult(job.session, samples_from_ticks(job.length, OUTPUT_RATE)) for job in jobs]


class SimMover(SimStage):
    """Carries tokens between the pages and their images in host memory."""

    def load(self, arena: Any) -> None:
        self._memory: Memory = arena

    def run(self, jobs: Sequence[MoveJob], media: Any) -> list[Result]:
        for job in jobs:
            for page, slot in job.moves:
                here = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
                there = slice(slot * PAGE_TOKENS, (slot + 1) * PAGE_TOKENS)
                if job.leaving:
                    self._memory.host[there] = self._memory.tokens[here]
                else:
                    self._memory.tokens[here] = self._memory.host[there]
        return [MoveResult(job.session, len(job.moves)) for job in jobs]


def mover(pages: PartitionSpec, *, bandwidth: float) -> SimMover:
    return SimMover(mover_spec(pages, bandwidth=bandwidth))


def _build(specs: Sequence[StageSpec], speech: Speech) -> dict[str, Stage]:
    makers: dict[str, Callable[[StageSpec], Stage]] = {
        "copy": Copy,
        "ears": Ears,
        "think": Thinker,
        "talk": lambda spec: Talker(spec, speech),
        "render": Renderer,
    }
    return {spec.name: makers[spec.name](spec) for spec in specs}


# What a launch is made of -----------------------------------------------------------------------------------------


class Size(Protocol):
    """(units of all rows, steps of the longest row) of a launch's jobs."""

    def __call__(self, jobs: Sequence[Any], results: Sequence[Any]) -> tuple[int, int]: ...


def sizes_of(frame_ms: int) -> dict[Role, Size]:
    """What the costs of each role count, by a model whose codec frame is so long.

    think: a unit is a prefilled token, a step decodes one token of every row. talk, render: a unit is one codec frame
    of a row, a step one frame of the longest. ears: a unit is 20 ms of audio. move: a page. copy: nothing but rows.
    """
    frame = ticks_from_ms(frame_ms)

    def think(jobs: Sequence[Any], results: Sequence[Any]) -> tuple[int, int]:
        steps = max((len(result.tokens) for result in results if isinstance(result, ThinkResult)), default=0)
        return sum(len(job.feed) for job in jobs), steps

    def talk(jobs: Sequence[Any], results: Sequence[Any]) -> tuple[int, int]:
        frames = [result.length // frame for result in results if isinstance(result, TalkResult)]
        return sum(frames), max(frames, default=0)

    def render(jobs: Sequence[Any], results: Sequence[Any]) -> tuple[int, int]:
        frames = [job.length // frame for job in jobs]
        return sum(frames), max(frames)

    def listen(jobs: Sequence[Any], results: Sequence[Any]) -> tuple[int, int]:
        return sum(job.samples for job in jobs) // 320, 0

    def move(jobs: Sequence[Any], results: Sequence[Any]) -> tuple[int, int]:
        return sum(len(job.moves) for job in jobs), 0

    def copy(jobs: Sequence[Any], results: Sequence[Any]) -> tuple[int, int]:
        return len(jobs), 0

    return {
        Role.THINK: think,
        Role.TALK: talk,
        Role.RENDER: render,
        Role.LISTEN: listen,
        Role.MOVE: move,
        Role.COPY: copy,
    }
