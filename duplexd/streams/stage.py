"""Stages: what one schedulable step of a model promises, and the jobs and results that cross its edge.

1. A stage enqueues work on its lane's device and returns; it never waits for another lane.
2. Everything a stage remembers between two jobs lies in the arena, in slots the core leased and named in the job.
3. Jobs and results are values. Bulk data (PCM, latents, keys) never crosses an edge: a job names where it lies.
4. This module imports no torch; the classes that run are in `models/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import exp
from typing import Any, Protocol

import msgspec

from duplexd.ids import ChunkId, ConditionVersion, Epoch, SessionId, SlotId
from duplexd.memory.pages import FoldTokens
from duplexd.units import Span, Ticks


class PayloadKind(Enum):
    """What an edge carries. Kinds do not interchange, even where the bytes look alike (seed 004 §5)."""

    TEXT = "text"
    AUDIO = "audio"
    IMAGE = "image"
    TOKEN = "token"
    MEDIA_FEATURE = "media_feature"
    HIDDEN_STATE = "hidden_state"
    CODEC_CODE = "codec_code"
    LATENT = "latent"
    KEYS = "keys"  #: keys and values of a context


class Role(Enum):
    """What the core uses a stage for."""

    COPY = "copy"  #: person's audio: shared-memory slot -> the session's ingest ring in the arena
    LISTEN = "listen"  #: person's audio -> words so far (re-encodes a bounded window)
    JUDGE = "judge"  #: person's audio -> probability that the turn has ended
    THINK = "think"  #: tokens in (prefill), tokens out (decode), one growing context
    TALK = "talk"  #: a clause of text -> latents and the span of every word
    RENDER = "render"  #: latents -> one chunk of PCM in an output slot
    GENERATE = "generate"  #: conditions -> a noisy chunk of the face, on the noisy history
    REFINE = "refine"  #: a noisy chunk -> a clean one, on the clean history
    DECODE = "decode"  #: a clean chunk -> frames
    MOVE = "move"  #: pages of a context between the arena and host memory
    OVERHEAR = "overhear"  #: own voice: output slot -> the session's voice ring in the arena

    # Members are singletons. Enum hashes names, in Python, and every offer is looked up by its role several times.
    __hash__ = object.__hash__


#: What a conversation without a face is made of, from the person's sound to the character's.
SPOKEN_ROLES = (Role.COPY, Role.LISTEN, Role.JUDGE, Role.THINK, Role.TALK, Role.RENDER)
#: What a face is made of. Nobody who speaks waits for any of it.
FACE_ROLES = frozenset({Role.OVERHEAR, Role.GENERATE, Role.REFINE, Role.DECODE})


class Cut(Enum):
    """How finely a model can be interrupted; published, never promised finer."""

    AT_CURSOR = "at_cursor"
    END_OF_CHUNK = "end_of_chunk"


class CostModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lane time of one launch, microseconds: `fixed + rows * per_row + units * per_unit + steps * per_step`."""

    fixed_us: int = 0
    per_row_us: int = 0
    per_unit_us: int = 0  #: the unit is the job's own: a token, a 20 ms frame, a second of audio; of all rows together
    per_step_us: int = 0  #: a step is a unit of the longest row: what a batch pays once, however many rows it has

    def predict_us(self, *, rows: int, units: int, steps: int = 0) -> int:
        whole = self.fixed_us + rows * self.per_row_us
        return whole + units * self.per_unit_us + steps * self.per_step_us


class Noise(Protocol):
    """Where simulated costs get their chance from; `random.Random` is one."""

    def gauss(self, mu: float, sigma: float) -> float: ...


class SimulatedCost(msgspec.Struct, frozen=True):
    """What a launch costs in a simulated world: an affine mean, a spread, and a claim on a device it shares.

    The spread is lognormal with mean 1, so that it changes no mean: `exp(sigma g - sigma^2 / 2)`, g standard normal.
    """

    mean: CostModel
    device: str
    share: float = 1.0  #: of the device's capacity while it runs alone; claims that exceed 1 together stretch all
    sigma: float = 0.0

    def draw_us(self, noise: Noise, *, rows: int, units: int, steps: int) -> int:
        mean = self.mean.predict_us(rows=rows, units=units, steps=steps)
        if not self.sigma:
            return max(1, mean)
        return max(1, round(mean * exp(self.sigma * noise.gauss(0.0, 1.0) - self.sigma**2 / 2)))


class StageSpec(msgspec.Struct, frozen=True):
    name: str  #: unique within a plan
    role: Role
    lane: str  #: stages that name the same lane run in order, one after the other
    takes: PayloadKind
    gives: PayloadKind
    cost: CostModel
    batch_max: int = 1  #: rows of one launch
    load: float = 0.0  #: lane time of one session in conversation, as a share of real time; 0: not counted


# Jobs -------------------------------------------------------------------------------------------------------------


class Job(msgspec.Struct, frozen=True, tag=True):
    """Names who a job is for. Every hand-off carries all four, so that a door can be shut on a stale one."""

    session: SessionId
    epoch: Epoch
    chunk: ChunkId  #: 0 for work that belongs to no chunk
    condition: ConditionVersion


class CopyJob(Job, frozen=True, tag=True):
    slot: int  #: shared-memory input slot
    ring: SlotId  #: the session's slot of the `ingest` partition
    start: int  #: absolute sample index since the session opened; the stage wraps it into the ring
    samples: int


class ListenJob(Job, frozen=True, tag=True):
    ring: SlotId
    start: int  #: absolute sample index, 16 kHz
    samples: int


class JudgeJob(Job, frozen=True, tag=True):
    ring: SlotId
    start: int
    samples: int


class ThinkJob(Job, frozen=True, tag=True):
    """Append `feed` to a context, then decode up to `steps` tokens (0: prefill only).

    `slots` are physical token slots of the arena's page partition, oldest first. The first `past` are in KV already;
    the next `len(feed)` take the feed; the last `max(0, steps - 1)` are room for decoded tokens. The last decoded token
    is returned but not appended: it is the head of the next feed. Positions are 0..len(slots)-1, given at read.
    """

    pieces: tuple[bytes, ...]  #: of `slots`, shared by all jobs of a context that have them in common
    past: int
    feed: tuple[int, ...]
    steps: int
    reply: tuple[int, ...] = ()  #: tokens of this reply so far, for the repetition penalty
    stop: tuple[int, ...] = ()  #: decoding ends after one of these; it is returned as the last token
    folds: tuple[FoldTokens, ...] = ()  #: what left the context since its last job, oldest first

    @property
    def slots(self) -> bytes:
        """Token slots, int64 little endian. O(context), on the lane's thread: whoever attends reads as many keys."""
        return b"".join(self.pieces)


class TalkJob(Job, frozen=True, tag=True):
    text: str  #: one clause
    latents: SlotId  #: slot of the `latents` partition to fill
    first: bool  #: first clause of a reply
    before: str = ""  #: words before it, when no pause lies between: it is spoken as if they had just been said
    after: str = ""  #: the word that follows without a pause, as far as it is known; not spoken with this clause


class RenderJob(Job, frozen=True, tag=True):
    latents: SlotId
    state: SlotId  #: the session's vocoder state (slot of the `state` partition)
    start: Ticks  #: where in the clause this chunk starts, 0 = first audible sample
    length: Ticks
    fresh: bool  #: True when the stage must not continue from `state`: first chunk of a clause
    slot: int  #: shared-memory output slot to fill with int16 PCM


class MoveJob(Job, frozen=True, tag=True):
    """Copy pages of one context to host memory, or back."""

    leaving: bool  #: True: arena -> host
    moves: tuple[tuple[int, SlotId], ...]  #: (page, host slot)


class OverhearJob(Job, frozen=True, tag=True):
    """The character hears its own voice, before it is played: what a face moves its lips to."""

    slot: int  #: shared-memory output slot with the PCM
    ring: SlotId  #: the session's slot of the `voice` partition
    start: Ticks  #: on the session's output timeline; the ring is addressed by it
    samples: int


class Spoken(msgspec.Struct, frozen=True, array_like=True):
    """Own voice on the picture's timeline: what stands at `span` lies in the voice ring from `position` on."""

    span: Span
    position: Ticks

    @property
    def shift(self) -> int:
        """Picture time less position."""
        return self.span.start - self.position


class ReferenceJob(Job, frozen=True, tag=True):
    """Write the anchors of one history: who this is. Once a session, before its first chunk."""

    slots: tuple[SlotId, ...]  #: anchor slots, in the order of the model's references
    character: str


class MotionJob(Job, frozen=True, tag=True):
    """One chunk of motion from one history. The window's last slot takes the chunk's keys; the others are read.

    `condition` is the version of `mood`, which holds for the whole chunk.
    """

    window: tuple[SlotId, ...]  #: oldest first, anchors before all; the chunk's own slot last
    tokens: tuple[int, ...]  #: visible in each
    motion: SlotId  #: slot of the `motion` partition: drafts are written and read, the final motion is written
    start: Ticks  #: on the picture's timeline, a whole number of frames
    voice: SlotId  #: own voice
    spoken: tuple[Spoken, ...]  #: where that ring holds what is, or will be, heard; elsewhere is silence
    ring: SlotId  #: the person's sound, 16 kHz
    heard_end: int  #: sample of it that had come when a chunk of this start could first be made (`listen_delay` before)
    heard_from: int  #: first sample the ring still holds
    mood: tuple[float, ...]


class GenerateJob(MotionJob, frozen=True, tag=True):
    steps: int = 0  #: of denoising, from the noisiest on; 0: as many as the model was made for


class RefineJob(MotionJob, frozen=True, tag=True):
    pass


class DecodeJob(Job, frozen=True, tag=True):
    motion: SlotId
    character: str
    first: int  #: frames of the chunk, half-open
    stop: int
    slot: int  #: shared-memory picture slot, filled with pictures in I420, one after another
    stride: int = 1  #: every so many frames one is drawn, the first among them


# Results ----------------------------------------------------------------------------------------------------------


class Result(msgspec.Struct, frozen=True, tag=True):
    session: SessionId


class CopyResult(Result, frozen=True, tag=True):
    samples: int


class ListenResult(Result, frozen=True, tag=True):
    text: str  #: words of the window, spaces between
    certainty: float = 0.0  #: mean log-probability of what was understood; 0 is certain


class JudgeResult(Result, frozen=True, tag=True):
    probability: float  #: that the turn has ended


class ThinkResult(Result, frozen=True, tag=True):
    tokens: tuple[int, ...]


class WordSpan(msgspec.Struct, frozen=True, array_like=True):
    """One whitespace-delimited word of a clause and when it is spoken."""

    start_char: int  #: half-open range of characters in the clause text, punctuation included
    end_char: int
    start: Ticks  #: relative to the clause's first audible sample
    end: Ticks


class TalkResult(Result, frozen=True, tag=True):
    length: Ticks  #: playback length of the clause after trimming
    words: tuple[WordSpan, ...]


class RenderResult(Result, frozen=True, tag=True):
    samples: int


class MoveResult(Result, frozen=True, tag=True):
    pages: int


class OverhearResult(Result, frozen=True, tag=True):
    samples: int


class ReferenceResult(Result, frozen=True, tag=True):
    pass


class MotionResult(Result, frozen=True, tag=True):
    frames: int


class DecodeResult(Result, frozen=True, tag=True):
    pictures: int


class Stage(Protocol):
    """One step of a model. `run` is called on the stage's lane only."""

    spec: StageSpec

    def load(self, arena: Any) -> None:
        """Take weights and the arena's typed views; called once, before the first job, on the lane."""

    def run(self, jobs: Sequence[Any], media: Any) -> list[Any]:
        """Run the jobs as one batch and return a result per job, in order.

        `media` is the shared memory of the engine: `media.read(slot, samples) -> int16 array` of what the person said,
        `media.write(slot, pcm: int16 array)` and `media.read_output(slot, samples)` of the character's own voice, and
        `media.write_picture(slot, at, picture: uint8 array)`. Raises any
        exception for the whole batch; a single bad row returns a `Failed` result instead, and its neighbours go on.
        """


class Failed(Result, frozen=True, tag=True):
    reason: str
