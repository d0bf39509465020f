"""The word clock's stages. Their state lies in the arena like any model's; their costs are next to nothing.

The context's keys are the token ids themselves, so whoever reads a slot of a dead epoch says a wrong number aloud.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from duplexd.media import tones
from duplexd.memory.arena import Arena
from duplexd.models.clock import language
from duplexd.streams.stage import (
    CopyJob,
    CopyResult,
    Failed,
    ListenJob,
    ListenResult,
    RenderJob,
    RenderResult,
    Result,
    StageSpec,
    TalkJob,
    TalkResult,
    ThinkJob,
    ThinkResult,
    WordSpan,
)
from duplexd.units import INPUT_RATE, Ticks, samples_from_ticks, ticks_from_ms, ticks_from_samples

OUTPUT_RATE = 24_000
WORD = ticks_from_ms(tones.CLOCK_WORD_MS)  #: one word with its gap
WORD_SAMPLES = samples_from_ticks(WORD, OUTPUT_RATE)
TONE = Ticks(WORD - ticks_from_ms(tones.GAP_MS))
BURST_LEVEL = 10 ** (-40 / 20)


class ClockStage:
    """Common to all: the spec and the arena."""

    def __init__(self, spec: StageSpec) -> None:
        self.spec = spec
        self._arena: Arena | None = None

    def load(self, arena: Any) -> None:
        self._arena = arena

    def run(self, jobs: Sequence[Any], media: Any) -> list[Any]:
        raise NotImplementedError

    @property
    def arena(self) -> Arena:
        assert self._arena is not None, f"stage {self.spec.name} was not loaded"
        return self._arena


class Copy(ClockStage):
    """Shared memory -> the session's ring."""

    def run(self, jobs: Sequence[CopyJob], media: Any) -> list[Result]:
        ring = self.arena.field("ingest", "pcm")
        length = ring.shape[1]
        for job in jobs:
            pcm = torch.from_numpy(media.read(job.slot, job.samples).astype(np.float32) / 32768.0)
            at = torch.arange(job.start, job.start + job.samples) % length
            ring[job.ring].index_copy_(0, at.to(ring.device), pcm.to(ring.device))
        return [CopyResult(job.session, job.samples) for job in jobs]


class Ears(ClockStage):
    """Tone words are heard as their numbers; any other sound of 100 ms as "sound"."""

    def run(self, jobs: Sequence[ListenJob], media: Any) -> list[Result]:
        return [ListenResult(job.session, self._listen(job)) for job in jobs]

    def _listen(self, job: ListenJob) -> str:
        ring = self.arena.field("ingest", "pcm")
        at = torch.arange(job.start, job.start + job.samples) % ring.shape[1]
        pcm = ring[job.ring][at.to(ring.device)].cpu().numpy()
        words = [str(word.index) for word in tones.decode(pcm, INPUT_RATE)]
        return " ".join(words) if words else " ".join(["sound"] * _bursts(pcm))


def _bursts(pcm: np.ndarray[Any, np.dtype[np.float32]]) -> int:
    hop = INPUT_RATE // 50
    frames = pcm[: len(pcm) // hop * hop].reshape(-1, hop)
    loud = np.sqrt((frames**2).mean(axis=1)) > BURST_LEVEL if len(frames) else np.zeros(0, bool)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], loud.astype(np.int8), [0]])))
    return int(sum(end - begin >= 5 for begin, end in zip(edges[::2], edges[1::2], strict=True)))


class Thinker(ClockStage):
    def run(self, jobs: Sequence[ThinkJob], media: Any) -> list[Result]:
        return [self._think(job) for job in jobs]

    def _think(self, job: ThinkJob) -> Result:
        keys = self.arena.field("pages", "k")
        slots = self.arena.tensor_of(job.slots)
        end = job.past + len(job.feed)
        keys[slots[job.past : end]] = torch.tensor(job.feed, dtype=keys.dtype, device=keys.device).unsqueeze(1)
        decoded: list[int] = []
        for step in range(job.steps):
            held = keys[slots[: end + step]][:, 0]
            if bool(torch.isnan(held).any()):
                return Failed(job.session, "the context holds a key that is not a number")
            token = language.following([int(value) for value in held.tolist()])
            decoded.append(token)
            if token in job.stop or step + 1 == job.steps:
                break
            keys[slots[end + step]] = float(token)
        return ThinkResult(job.session, tuple(decoded))


class Talker(ClockStage):
    """A clause becomes the numbers of its words in a latent slot: [count, n0, n1, ...]."""

    def run(self, jobs: Sequence[TalkJob], media: Any) -> list[Result]:
        return [self._talk(job) for job in jobs]

    def _talk(self, job: TalkJob) -> Result:
        latents = self.arena.field("latents", "words")[job.latents]
        words = job.text.split()
        numbers = [_number(word) for word in words]
        latents[0] = len(numbers)
        latents[1 : 1 + len(numbers)] = torch.tensor(numbers, dtype=latents.dtype)
        spans, at = [], 0
        for index, word in enumerate(words):
            start = Ticks(index * WORD)
            spans.append(WordSpan(at, at + len(word), start, Ticks(start + TONE)))
            at += len(word) + 1
        return TalkResult(job.session, Ticks(len(words) * WORD), tuple(spans))


def _number(word: str) -> int:
    """Words of a reply have tones of their own; a number that is to be read aloud has its own, any other word none."""
    reply, dash, number = word.strip(",.").partition("-")
    if dash and reply.isdigit() and number.isdigit():
        return language.tone_index(int(reply), int(number))
    return min(int(reply), tones.WORDS_MAX - 1) if reply.isdigit() else 0


class Renderer(ClockStage):
    """Numbers to tones. The state slot holds where the last chunk ended, so that a chunk out of order is found out."""

    def run(self, jobs: Sequence[RenderJob], media: Any) -> list[Result]:
        return [self._render(job, media) for job in jobs]

    def _render(self, job: RenderJob, media: Any) -> Result:
        state = self.arena.field("state", "end")[job.state]
        if not job.fresh and int(state[0]) != job.start:
            return Failed(job.session, f"chunk starts at {job.start}, the one before it ended at {int(state[0])}")
        words = self.arena.field("latents", "words")[job.latents].tolist()
        start = samples_from_ticks(job.start, OUTPUT_RATE)
        samples = samples_from_ticks(job.length, OUTPUT_RATE)
        sound = np.concatenate(
            [
                tones.word_pcm(
                    int(words[1 + word]), samples=WORD_SAMPLES, start=first, stop=first + count, rate=OUTPUT_RATE
                )
                for word, first, count in _pieces(start, samples)
            ]
        )
        media.write(job.slot, np.rint(sound * 32767).astype(np.int16))
        state[0] = job.start + ticks_from_samples(samples, OUTPUT_RATE)
        return RenderResult(job.session, samples)


def _pieces(start: int, samples: int) -> list[tuple[int, int, int]]:
    """(word, first sample, count) of a stretch of a clause."""
    pieces = []
    while samples > 0:
        word, first = divmod(start, WORD_SAMPLES)
        count = min(samples, WORD_SAMPLES - first)
        pieces.append((word, first, count))
        start, samples = start + count, samples - count
    return pieces
