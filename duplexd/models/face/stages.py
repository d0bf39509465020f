"""The face's stages: overhear, generate, refine, decode. All they remember lies in the arena.

1. `noisy` and `clean` are the histories of generator and refiner (memory/histories.py): keys before rotation and
   values of every layer, one chunk a slot. A stage writes the last slot of its window and reads the others.
2. The generator takes two steps and keeps the keys of the second, which saw noise; the refiner takes one and a pass
   over what it made, whose keys it keeps (LPM §4: noisy history, clean history).
3. The refiner reads the draft and never writes it, so a refinement that is thrown away can be made again.
4. Noise is drawn from the names of a chunk: the same job makes the same motion, in whatever batch.
5. Cut: at the cursor, by frames (tokens). Keys of the frames seen stay; chunks after the cut begin where those end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duplexd.errors import ModelError
from duplexd.memory.arena import Shelf, sizes_of
from duplexd.memory.histories import HistoryShape
from duplexd.memory.layout import FieldSpec, PartitionKind, PartitionSpec, Section, shelf_partition
from duplexd.models.face import audio
from duplexd.models.face.audio import AudioEncoder
from duplexd.models.face.checkpoint import FaceWeights
from duplexd.models.face.drawing.character import Character, load_character
from duplexd.models.face.identity import REFERENCES, anchor_poses
from duplexd.models.face.moods import MOOD_WORDS
from duplexd.models.face.motion import CHANNELS, CHUNK_FRAMES, CONDITION, FRAME_TICKS, LOOK_MAX
from duplexd.models.face.net import FaceNet, FaceShape, Heard, Places, Reader, blended, velocity_step
from duplexd.models.face.painter import Painter
from duplexd.streams.graph import FacePlan
from duplexd.streams.stage import (
    CostModel,
    DecodeJob,
    DecodeResult,
    Failed,
    GenerateJob,
    MotionJob,
    MotionResult,
    OverhearJob,
    OverhearResult,
    PayloadKind,
    ReferenceJob,
    ReferenceResult,
    RefineJob,
    Role,
    StageSpec,
)
from duplexd.units import INPUT_RATE, Ticks, samples_from_ticks, ticks_from_ms

VOICE_RATE = 24_000
VOICE_FRAME, INPUT_FRAME = (samples_from_ticks(FRAME_TICKS, rate) for rate in (VOICE_RATE, INPUT_RATE))
SIZE = 512  #: of a picture's side, pixels
#: Own voice that is kept: what a chunk hears of the past, and what may have been said ahead.
VOICE_SAMPLES = 6 * VOICE_RATE
#: Chunks of motion between generator and decoder, of one session: one at each stage, one waiting, and two that an
#: interruption has taken back while a lane still had them.
MOTIONS_PER_SESSION = 6
#: Chunks that are begun and not yet seen: two whole ones and what short ones there are between.
LOOKAHEAD = 6


def history_shape(shape: FaceShape, *, lookahead: int = LOOKAHEAD) -> HistoryShape:
    return HistoryShape(
        chunk_tokens=shape.tokens, anchor_tokens=shape.anchors, recent=shape.recent, lookahead=lookahead
    )


def history_fields(shape: FaceShape, dtype: str = "float32") -> tuple[FieldSpec, ...]:
    """Keys before rotation, then values, of every layer."""
    return (FieldSpec("kv", (shape.layers, shape.tokens, 2 * shape.width), dtype),)


def partitions(shape: FaceShape, sessions: int, *, lookahead: int = LOOKAHEAD) -> tuple[PartitionSpec, ...]:
    """Everything of a face that lies in the arena, but for the person's sound (`ingest`), which it shares."""
    slots, history = PartitionKind.SLOTS, history_shape(shape, lookahead=lookahead)
    motions = sessions * MOTIONS_PER_SESSION
    return (
        weights_shelf("generator", shape),
        weights_shelf("refiner", shape),
        history.partition("noisy", history_fields(shape), sessions=sessions),
        history.partition("clean", history_fields(shape), sessions=sessions),
        PartitionSpec(
            "voice", slots, sessions, (FieldSpec("pcm", (VOICE_SAMPLES,)),), session_slots=1, section=Section.INGEST
        ),
        PartitionSpec("motion", slots, motions, motion_fields(shape), session_slots=MOTIONS_PER_SESSION),
    )


def face_plan(shape: FaceShape, character: str, *, size: int = SIZE) -> FacePlan:
    """What the core must know. Raises ConfigError for a character that does not exist."""
    load_character(character)
    reach = Ticks(FRAME_TICKS * -(-AudioEncoder(1).reach // audio.FEATURES_PER_FRAME))
    return FacePlan(
        character=character,
        size=(size, size),
        frame=FRAME_TICKS,
        frames=shape.frames,
        frame_tokens=shape.tokens // shape.frames,
        history=history_shape(shape),
        conditions=CONDITION,
        look_max=LOOK_MAX,
        moods=MOOD_WORDS,
        voice_before=Ticks(shape.speak_before * FRAME_TICKS + reach + ticks_from_ms(25)),
        voice_after=Ticks(shape.speak_after * FRAME_TICKS),
        listen_delay=Ticks(shape.listen_delay * FRAME_TICKS),
    )


def weights_shelf(name: str, shape: FaceShape) -> PartitionSpec:
    """Where a network's weights lie, mean and deviation of motion with them."""
    with torch.device("meta"):
        sizes = sizes_of(FaceNet(shape))
    return shelf_partition(f"{name} weights", [*sizes, 4 * shape.latent, 4 * shape.latent])


def motion_fields(shape: FaceShape) -> tuple[FieldSpec, ...]:
    size = (shape.tokens, shape.latent)
    return (FieldSpec("draft", size), FieldSpec("motion", size))


class Overhear:
    """Stage: own voice from its output slot into the session's ring, where the face hears it."""

    def __init__(self, *, lane: str = "copy") -> None:
        kind = PayloadKind.AUDIO
        self.spec = StageSpec("overhear", Role.OVERHEAR, lane, kind, kind, CostModel(40, 30), batch_max=8, load=0.002)

    def load(self, arena: Any) -> None:
        self._ring: Tensor = arena.field("voice", "pcm")

    def run(self, jobs: Sequence[OverhearJob], media: Any) -> list[OverhearResult]:
        for job in jobs:
            pcm = torch.from_numpy(media.read_output(job.slot, job.samples).astype(np.float32) / 32768.0)
            start = samples_from_ticks(job.start, VOICE_RATE)
            at = torch.arange(start, start + job.samples) % VOICE_SAMPLES
            self._ring[job.ring].index_copy_(0, at.to(self._ring.device), pcm.to(self._ring.device))
        return [OverhearResult(job.session, job.samples) for job in jobs]


class _Batch:
    """The windows of some jobs, read once for all steps of a chunk; shorter ones are padded; padding is not seen."""

    def __init__(self, field: Tensor, jobs: Sequence[MotionJob], shape: FaceShape) -> None:
        self._field, self._heads, self._head_dim = field, shape.heads, shape.head_dim
        self._own = [job.window[-1] for job in jobs]
        lengths = [sum(job.tokens[:-1]) for job in jobs]
        longest = max(lengths)
        slots = torch.zeros(len(jobs), longest, dtype=torch.long)
        places = torch.zeros(len(jobs), longest, dtype=torch.long)
        for row, job in enumerate(jobs):
            at = 0
            for slot, tokens in zip(job.window[:-1], job.tokens[:-1], strict=True):
                slots[row, at : at + tokens] = slot
                places[row, at : at + tokens] = torch.arange(tokens)
                at += tokens
            slots[row, at:] = job.window[-1]  # never read: masked; a slot of the job's own in any case
        # (rows, tokens, layers, 2 * width): all layers in one read.
        self._past = field[slots.to(field.device), :, places.to(field.device)]
        ends = torch.tensor(lengths)[:, None]
        before = torch.arange(longest).expand(len(jobs), -1)
        new = ends + torch.arange(shape.tokens)
        ragged = min(lengths) < longest
        if ragged:
            # What is padding may be anything, NaN too, and 0 x NaN is NaN.
            self._past = torch.where((before < ends)[:, :, None, None].to(field.device), self._past, 0.0)
        seen = torch.cat([before < ends, torch.ones_like(new, dtype=torch.bool)], 1) if ragged else None
        keys = torch.cat([before, new], 1)
        self.places = Places(
            new.to(field.device), keys.to(field.device), None if seen is None else seen.to(field.device)
        )

    def reader(self, *, keep: bool) -> Reader:
        """`keep`: new keys and values are written into the jobs' own slots."""

        def read(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            if keep:
                new = torch.cat([keys.flatten(2), values.flatten(2)], 2)
                for row, slot in enumerate(self._own):
                    self._field[slot, layer, : new.shape[1]] = new[row]
            past_keys, past_values = self._past[:, :, layer].chunk(2, -1)
            return torch.cat([self._apart(past_keys), keys], 1), torch.cat([self._apart(past_values), values], 1)

        return read

    def _apart(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], self._heads, self._head_dim)


class _MotionStage:
    """What generator and refiner share: sounds, moods, windows, anchors."""

    def __init__(self, weights: FaceWeights, net: FaceNet, shelf: str, partition: str, spec: StageSpec) -> None:
        self.spec, self.shelf = spec, shelf
        self.weights, self.shape, self.net, self.partition = weights, weights.shape, net, partition

    def load(self, arena: Any) -> None:
        self._history: Tensor = arena.field(self.partition, "kv")
        self._draft: Tensor = arena.field("motion", "draft")
        self._motion: Tensor = arena.field("motion", "motion")
        self._voice: Tensor = arena.field("voice", "pcm")
        self._person: Tensor = arena.field("ingest", "pcm")
        self.device = self._history.device
        shelf = Shelf(arena, weights_shelf(self.shelf, self.shape))
        shelf.place_all(self.net)
        self._mean, self._deviation = (shelf.place(part) for part in (self.weights.mean, self.weights.deviation))
        shelf.close()
        self._identities: dict[str, Character] = {}

    @torch.inference_mode()
    def run(self, jobs: Sequence[Any], media: Any) -> list[Any]:
        references = [job for job in jobs if isinstance(job, ReferenceJob)]
        chunks = [job for job in jobs if not isinstance(job, ReferenceJob)]
        for job in references:
            self._refer(job)
        results: dict[int, Any] = {id(job): ReferenceResult(job.session) for job in references}
        faults = {id(job): self._fault(job) for job in chunks}
        sound = [job for job in chunks if not faults[id(job)]]
        made = self._make(sound) if sound else []
        results |= {id(job): result for job, result in zip(sound, made, strict=True)}
        results |= {id(job): Failed(job.session, faults[id(job)]) for job in chunks if faults[id(job)]}
        return [results[id(job)] for job in jobs]

    def _make(self, jobs: Sequence[MotionJob]) -> list[MotionResult | Failed]:
        raise NotImplementedError

    def _fault(self, job: MotionJob) -> str:
        """Why this chunk cannot be made, or nothing."""
        if job.start % FRAME_TICKS:
            return f"a chunk that starts at {job.start} ticks; motion starts at multiples of {FRAME_TICKS}"
        if len(job.window) != len(job.tokens) or not job.window or max(job.tokens) > self.shape.tokens:
            return f"a window of slots {job.window} with {job.tokens} tokens; a slot holds at most {self.shape.tokens}"
        if len(job.mood) != self.shape.condition:
            return f"a mood of {len(job.mood)} numbers; a face takes {self.shape.condition}"
        return ""

    def _ended(self, jobs: Sequence[MotionJob], motion: Tensor) -> list[MotionResult | Failed]:
        finite = torch.isfinite(motion).flatten(1).all(1).tolist()
        return [
            MotionResult(job.session, self.shape.frames)
            if fine
            else Failed(job.session, f"{self.spec.name} made motion that is not finite at {job.start} ticks")
            for job, fine in zip(jobs, finite, strict=True)
        ]

    # Anchors

    def _refer(self, job: ReferenceJob) -> None:
        """Anchors see themselves only, hear nothing and stand first in every window."""
        if job.character not in self._identities:
            self._identities = {job.character: load_character(job.character)}
        poses = anchor_poses(self._identities[job.character].identity)
        x = (torch.from_numpy(poses).to(self.device) - self._mean) / self._deviation
        slot, tokens = job.slots[0], len(REFERENCES)

        def read(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            self._history[slot, layer, :tokens] = torch.cat([keys.flatten(2), values.flatten(2)], 2)[0]
            return keys, values

        places = torch.arange(tokens, device=self.device)[None]
        nothing = torch.zeros(1, device=self.device)
        mood = torch.zeros(1, self.shape.condition, device=self.device)
        heard = self._silence()
        self.net(x[None], nothing, mood, heard, read, Places(places, places), anchors=torch.ones(1, device=self.device))

    def _silence(self) -> Heard:
        width = self.shape.audio_width
        speaking = torch.zeros(1, self.shape.speak_features, width, device=self.device)
        listening = torch.zeros(1, self.shape.listen_frames, width, device=self.device)
        return self.net.hear(speaking, listening, present=torch.zeros(1, device=self.device))

    # Sounds

    def _hear(self, jobs: Sequence[MotionJob]) -> Heard:
        own = torch.stack([self._own(job) for job in jobs])
        person = torch.stack([self._other(job) for job in jobs])
        speaking = self.net.speaking(audio.mel_frames(own, VOICE_RATE))
        listening = self.net.listening(audio.mel_frames(person, INPUT_RATE))
        # The second feature of every frame has heard the whole of it.
        return self.net.hear(speaking, listening[:, audio.FEATURES_PER_FRAME - 1 :: audio.FEATURES_PER_FRAME])

    def _own(self, job: MotionJob) -> Tensor:
        """Own voice around the chunk, and what its first feature needs from before."""
        shape, first = self.shape, job.start // FRAME_TICKS
        start = (first - shape.speak_before - _reach_frames(self.net.speaking)) * samples_from_ticks(
            FRAME_TICKS, VOICE_RATE
        )
        stop = (first + shape.frames + shape.speak_after) * VOICE_FRAME
        return audio.spoken_stretch(
            self._voice[job.voice], start - audio.before_samples(VOICE_RATE), stop, job.spoken, VOICE_RATE
        )

    def _other(self, job: MotionJob) -> Tensor:
        """The person until the chunk could first be made."""
        frames = self.shape.listen_frames + _reach_frames(self.net.listening)
        start = job.heard_end - frames * INPUT_FRAME
        valid = [(max(0, job.heard_from), max(0, job.heard_end))]
        return audio.valid_stretch(
            self._person[job.ring], start - audio.before_samples(INPUT_RATE), job.heard_end, valid
        )

    def _moods(self, jobs: Sequence[MotionJob]) -> Tensor:
        return torch.tensor([job.mood for job in jobs], dtype=torch.float32, device=self.device)

    def _noise(self, jobs: Sequence[MotionJob]) -> Tensor:
        return torch.stack([chunk_noise(job, self.spec.name, self.shape) for job in jobs]).to(self.device)

    def _times(self, jobs: Sequence[MotionJob], t: float) -> Tensor:
        return torch.full((len(jobs),), t, device=self.device)


class Generator(_MotionStage):
    """Stage: noise to a draft in two steps, on the noisy history."""

    def __init__(self, weights: FaceWeights, *, lane: str = "generate", batch_max: int = 4) -> None:
        spec = StageSpec(
            "generate", Role.GENERATE, lane, PayloadKind.AUDIO, PayloadKind.LATENT,
            CostModel(9_000, 4_000), batch_max=batch_max, load=0.04,
        )  # fmt: skip
        super().__init__(weights, weights.generator, "generator", "noisy", spec)

    def _make(self, jobs: Sequence[GenerateJob]) -> list[MotionResult | Failed]:  # type: ignore[override]
        # A neighbour in haste takes no step from anybody: rows of one launch that take as many are made together.
        by_steps: dict[int, list[GenerateJob]] = {}
        for job in jobs:
            by_steps.setdefault(job.steps or len(self.weights.generator_times), []).append(job)
        made = {id(job): draft for steps, rows in by_steps.items() for job, draft in self._drafts(rows, steps)}
        return self._ended(jobs, torch.stack([made[id(job)] for job in jobs]))

    def _drafts(self, jobs: Sequence[GenerateJob], steps: int) -> Iterator[tuple[GenerateJob, Tensor]]:
        batch, heard, moods = _Batch(self._history, jobs, self.shape), self._hear(jobs), self._moods(jobs)
        x = self._noise(jobs)
        times = (*self.weights.generator_times[:steps], 0.0)
        for step, (start, stop) in enumerate(pairwise(times)):
            reader = batch.reader(keep=step + 2 == len(times))
            x = velocity_step(x, self.net(x, self._times(jobs, start), moods, heard, reader, batch.places), start, stop)
        for job, draft in zip(jobs, x, strict=True):
            self._draft[job.motion] = draft
            yield job, draft


class Refiner(_MotionStage):
    """Stage: a draft made clean in one step, on the clean history, and remembered as it is shown."""

    def __init__(self, weights: FaceWeights, *, lane: str = "refine", batch_max: int = 4) -> None:
        spec = StageSpec(
            "refine", Role.REFINE, lane, PayloadKind.LATENT, PayloadKind.LATENT,
            CostModel(9_000, 4_000), batch_max=batch_max, load=0.04,
        )  # fmt: skip
        super().__init__(weights, weights.refiner, "refiner", "clean", spec)

    def _make(self, jobs: Sequence[RefineJob]) -> list[MotionResult | Failed]:  # type: ignore[override]
        batch, heard, moods = _Batch(self._history, jobs, self.shape), self._hear(jobs), self._moods(jobs)
        draft = torch.stack([self._draft[job.motion] for job in jobs])
        t = self.weights.refiner_time
        x = blended(draft, self._noise(jobs), t)
        x = velocity_step(
            x, self.net(x, self._times(jobs, t), moods, heard, batch.reader(keep=False), batch.places), t, 0.0
        )
        self.net(x, self._times(jobs, 0.0), moods, heard, batch.reader(keep=True), batch.places)
        shown = x * self._deviation + self._mean
        for row, job in enumerate(jobs):
            self._motion[job.motion] = shown[row]
        return self._ended(jobs, shown)


class Decoder:
    """Stage: motion to pictures, I420 in shared memory. Pocket draws, in a process of its own (painter.py); the network
    of a larger family stands here, on its stream.

    Args:    size: pixels of a side; characters_max: portraits kept ready, the least lately drawn gives way.
    """

    def __init__(self, *, lane: str = "decode", size: int = SIZE, characters_max: int = 4) -> None:
        self.spec = StageSpec(
            "decode", Role.DECODE, lane, PayloadKind.LATENT, PayloadKind.IMAGE,
            CostModel(700, 0, 7_600), load=0.19,
        )  # fmt: skip
        self.painter = Painter(size=size, frames_max=CHUNK_FRAMES, portraits_max=characters_max)

    def load(self, arena: Any) -> None:
        self._motion: Tensor = arena.field("motion", "motion")
        try:
            self.painter.start()
        except ModelError as error:
            raise ModelError(f"{error}. Without a face: --face none") from error

    def run(self, jobs: Sequence[DecodeJob], media: Any) -> list[DecodeResult | Failed]:
        return [self._decode(job, media) for job in jobs]

    def _decode(self, job: DecodeJob, media: Any) -> DecodeResult | Failed:
        if not 0 <= job.first < job.stop <= CHUNK_FRAMES or job.stride < 1:
            return Failed(job.session, f"frames {job.first} to {job.stop} of {CHUNK_FRAMES}, every {job.stride}th")
        motion = self._motion[job.motion].cpu().numpy()[job.first : job.stop : job.stride]
        try:
            pictures = self.painter.draw(job.character, motion)
        except ModelError as error:
            return Failed(job.session, str(error))
        for at, picture in enumerate(pictures):
            media.write_picture(job.slot, at, picture)
        return DecodeResult(job.session, len(pictures))


def chunk_noise(job: MotionJob, stage: str, shape: FaceShape) -> Tensor:
    """Noise of a chunk, (tokens, latent): of its names alone."""
    name = f"{stage} {job.session} {job.epoch} {job.chunk}".encode()
    seed = int.from_bytes(hashlib.blake2s(name, digest_size=8).digest(), "little") >> 1
    return torch.randn(shape.tokens, shape.latent, generator=torch.Generator().manual_seed(seed))


def _reach_frames(encoder: Any) -> int:
    """Frames before a stretch that its encoder needs."""
    return -(-int(encoder.reach) // audio.FEATURES_PER_FRAME)


assert FaceShape().latent == CHANNELS
