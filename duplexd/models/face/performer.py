"""A performer: a face played from sound, offline, through the same stages, histories and arena as a live one.

For evaluation, for the contract suite and for pictures; a live session is driven by the engine instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from duplexd.errors import ModelError
from duplexd.ids import ChunkId, ConditionVersion, Epoch, FenceId, SessionId, SlotId
from duplexd.memory.arena import Arena
from duplexd.memory.histories import GENERATE, REFINE, Histories, HistoryStage
from duplexd.memory.layout import ArenaLayout, FieldSpec, PartitionKind, PartitionSpec, Section
from duplexd.memory.ledger import SlotLedger
from duplexd.memory.window import Window
from duplexd.models.face.checkpoint import FaceWeights
from duplexd.models.face.motion import CHUNK_FRAMES, CHUNK_TICKS, CONDITION, FRAME_TICKS, Motion
from duplexd.models.face.stages import VOICE_RATE, VOICE_SAMPLES, Generator, Refiner, history_shape, partitions
from duplexd.streams.stage import Failed, GenerateJob, MotionJob, ReferenceJob, RefineJob, Spoken
from duplexd.units import INPUT_RATE, Span, Ticks

J = TypeVar("J", bound=MotionJob)
Sound = npt.NDArray[np.float32]
PERSON_SAMPLES = 8 * INPUT_RATE
#: Own voice that is there already when a chunk is made, beyond what it hears.
AHEAD_FRAMES = 25


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one session is played to."""

    character: str = "mira"
    voice: Sound = np.zeros(0, np.float32)  #: own, 24 kHz, from the start of the timeline; silence after its end
    person: Sound = np.zeros(0, np.float32)  #: the person's, 16 kHz
    moods: Sequence[npt.NDArray[np.float32]] = ()  #: one for each chunk; the last one holds on; none: calm


class Performer:
    """Sessions of a face, played together.

    Args:    parts: one a session.
             refined: show refined motion; False: the generator's drafts.
             anchored: False: no anchors are written or read.
             heard: False: the person is not heard.
    """

    def __init__(
        self,
        weights: FaceWeights,
        parts: Sequence[Part],
        *,
        refined: bool = True,
        anchored: bool = True,
        heard: bool = True,
        device: str = "cpu",
    ) -> None:
        self.weights, self.parts, self.refined, self.anchored, self.heard = (
            weights,
            list(parts),
            refined,
            anchored,
            heard,
        )
        self.shape = weights.shape
        sessions = len(self.parts)
        specs = partitions(self.shape, sessions)
        person = FieldSpec("pcm", (PERSON_SAMPLES,))
        ingest = PartitionSpec(
            "ingest", PartitionKind.SLOTS, sessions, (person,), session_slots=1, section=Section.INGEST
        )
        self.arena = Arena(ArenaLayout([*specs, ingest]), device)
        # What nobody wrote is unusable, so that whoever reads it is found out.
        for spec in (*specs, ingest):  # weights too: stages put them there when they load
            self.arena.fill_nan(spec.name, range(spec.rows))
        named = {spec.name: spec for spec in specs}
        self.ledgers = [
            SlotLedger(named[name], passed=lambda fence: True, freed=self.arena.fill_nan) for name in ("noisy", "clean")
        ]
        shape = history_shape(self.shape)
        noisy, clean = self.ledgers
        self.histories = [Histories(noisy, clean, SessionId(1 + index), shape) for index in range(sessions)]
        self.generator = Generator(weights, batch_max=sessions)
        self.refiner = Refiner(weights, batch_max=sessions)
        for stage in (self.generator, self.refiner):
            stage.load(self.arena)
        self._fences = count(1)
        self._chunks = count(1)
        self._written = [(0, 0) for _ in self.parts]  #: samples of own voice and of the person that lie in the rings
        self.frame = [0] * sessions  #: where the next chunk begins
        self._mood_at = 0
        if anchored:
            self._refer()

    def play(self, chunks: int) -> list[Motion]:
        """So many chunks of every session: (chunks * CHUNK_FRAMES, CHANNELS) each."""
        made = [self.chunk() for _ in range(chunks)]
        return [np.concatenate([chunk[index] for chunk in made]) for index in range(len(self.parts))]

    def chunk(self) -> list[Motion]:
        """The next chunk of every session, seen as soon as it is made."""
        chunk, epochs = ChunkId(next(self._chunks)), [history.epoch for history in self.histories]
        begun = [history.begin(chunk, history.epoch, fence=self.fence()) for history in self.histories]
        windows = [window for window in begun if window is not None]
        assert len(windows) == len(begun), [history.refusal for history in self.histories]
        self._launch(self.generator, GENERATE, [self.job(GenerateJob, at, chunk, w) for at, w in enumerate(windows)])
        windows = [
            history.refine(chunk, epoch, fence=self.fence())
            for history, epoch in zip(self.histories, epochs, strict=True)
        ]
        self._launch(self.refiner, REFINE, [self.job(RefineJob, at, chunk, w) for at, w in enumerate(windows)])
        for history in self.histories:
            history.hear(chunk, history.epoch)
            history.slide()
        shown = self.arena.field("motion", "motion" if self.refined else "draft")[: len(self.parts)]
        if not self.refined:
            shown = shown * self.weights.deviation.to(shown.device) + self.weights.mean.to(shown.device)
        self.frame = [frame + CHUNK_FRAMES for frame in self.frame]
        self._mood_at += 1
        return list(shown.cpu().numpy().copy())

    def interrupt(self, index: int, *, frames: int) -> None:
        """Session `index` goes on from frame `frames` (1 to 8) of its last chunk; what it said after that is gone."""
        history = self.histories[index]
        last = max(history.chunks())
        history.interrupt(Epoch(history.epoch + 1), keep=last, tokens=frames if frames < CHUNK_FRAMES else None)
        self.frame[index] += frames - CHUNK_FRAMES
        cut = self.frame[index] * VOICE_RATE * FRAME_TICKS // 48_000
        part = self.parts[index]
        self.parts[index] = msgspec.structs.replace(part, voice=part.voice[:cut])

    # Parts

    def fence(self) -> FenceId:
        return FenceId(next(self._fences))

    def _refer(self) -> None:
        for stage, name in ((self.generator, GENERATE), (self.refiner, REFINE)):
            jobs = []
            for index, history in enumerate(self.histories):
                slots = tuple(SlotId(lease.slot) for lease in history.anchors(name))
                names = (history.session, history.epoch, ChunkId(0), ConditionVersion(0))
                jobs.append(ReferenceJob(*names, slots, self.parts[index].character))
            stage.run(jobs, None)

    def _launch(self, stage: Generator | Refiner, name: HistoryStage, jobs: Sequence[MotionJob]) -> None:
        for job, result in zip(jobs, stage.run(jobs, None), strict=True):
            if isinstance(result, Failed):
                raise ModelError(f"chunk {job.chunk} of session {job.session}: {result.reason}")
            self.histories[job.session - 1].finish(job.chunk, job.epoch, name)

    def job(self, kind: type[J], index: int, chunk: ChunkId, window: Window) -> J:
        frame, part = self.frame[index], self.parts[index]
        own_end, heard_end = self._write(index)
        pairs = list(zip(window.leases, window.tokens, strict=True))
        if not self.anchored:
            pairs = pairs[len(self.shape.anchors) :]
        return kind(
            self.histories[index].session,
            self.histories[index].epoch,
            chunk,
            ConditionVersion(0),
            window=tuple(SlotId(lease.slot) for lease, _ in pairs),
            tokens=tuple(tokens for _, tokens in pairs),
            motion=SlotId(index),
            start=Ticks(frame * FRAME_TICKS),
            voice=SlotId(index),
            spoken=(Spoken(Span(Ticks(0), Ticks(own_end * 2)), Ticks(0)),),
            ring=SlotId(index),
            heard_end=heard_end,
            heard_from=max(0, heard_end - PERSON_SAMPLES) if self.heard else heard_end,
            mood=self._mood(part),
        )

    def _mood(self, part: Part) -> tuple[float, ...]:
        if not part.moods:
            return (0.0,) * len(CONDITION)
        return tuple(part.moods[min(self._mood_at, len(part.moods) - 1)].tolist())

    def _write(self, index: int) -> tuple[int, int]:
        """What has come by now, into the rings: (end of own voice, end of the person's sound), in samples."""
        part, frame = self.parts[index], self.frame[index]
        hear = (frame - self.shape.listen_delay) * INPUT_RATE // 25
        # A voice is made ahead of its face; nobody may hear further than a chunk does.
        say = (frame + CHUNK_FRAMES + self.shape.speak_after + AHEAD_FRAMES) * VOICE_RATE // 25
        said, heard = self._written[index]
        for field, sound, begin, end, size in (
            ("voice", part.voice, said, min(say, len(part.voice)), VOICE_SAMPLES),
            ("ingest", part.person, heard, hear, PERSON_SAMPLES),
        ):
            if end > begin:
                ring = self.arena.field(field, "pcm")[index]
                new = np.zeros(end - begin, np.float32)
                piece = sound[begin:end]
                new[: len(piece)] = piece
                at = torch.arange(begin, end) % size
                ring[at[-size:]] = torch.from_numpy(new)[-size:].to(ring.device)
        self._written[index] = (max(said, min(say, len(part.voice))), max(heard, hear))
        return min(say, len(part.voice)), hear


def chunks_of(seconds: float) -> int:
    """Whole chunks that cover so many seconds."""
    return -(-round(seconds * 48_000) // CHUNK_TICKS)
