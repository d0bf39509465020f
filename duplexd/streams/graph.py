"""What a model family hands to the engine: its stages and edges, its sizes, and the pure half of its language.

1. A plan is data plus pure functions; building it reads headers and vocabularies, never tensors.
2. The core reads the plan to schedule and to keep history; `build` makes the stages that run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from duplexd.errors import ConfigError
from duplexd.memory.histories import HistoryShape
from duplexd.memory.layout import PartitionSpec
from duplexd.streams.stage import FACE_ROLES, Cut, Role, Stage, StageSpec
from duplexd.units import INPUT_RATE, Ticks, samples_from_ticks


class TextStream(Protocol):
    """Token ids in, text out, never breaking a character."""

    def push(self, token: int) -> str: ...


class Dialect(Protocol):
    """Tokens of a conversation: the template of a thinker, as pure functions of text.

    A conversation is `anchor [instruct] ([sight] open_user words close_user_open_reply reply close_reply)*`. Words are
    given piecewise as they become stable: the ids of "a b" followed by those of "c" (not first) are the ids of "a b c".
    `sight` says, between two turns, that the person came into view or left it; empty: this thinker is not told.
    """

    stop: tuple[int, ...]

    def anchor(self) -> list[int]: ...

    def instruct(self, text: str) -> list[int]: ...

    def sight(self, *, present: bool) -> list[int]: ...

    def open_user(self) -> list[int]: ...

    def words(self, text: str, *, first: bool) -> list[int]: ...

    def close_user_open_reply(self) -> list[int]: ...

    def close_reply(self) -> list[int]: ...

    def stream(self) -> TextStream: ...


class MoodWords(msgspec.Struct, frozen=True):
    """Words that tell one mood of a face (engine/feeling.py), in lower case."""

    mood: str  #: one of the face's conditions
    sure: tuple[str, ...]  #: tell it wherever they stand
    mild: tuple[str, ...] = ()  #: tell it where somebody speaks of themselves or to somebody
    asked: str = ""  #: what is felt where they are asked after; '': nothing


class FacePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the core must know of a family's face. Lengths of sound and motion are whole frames.

    Its stages play the roles OVERHEAR, GENERATE, REFINE and DECODE; its partitions are `noisy`, `clean` (histories),
    `voice` (own voice) and `motion` (chunks between generator and decoder).
    """

    character: str
    size: tuple[int, int]  #: of a picture: width and height, even numbers
    frame: Ticks  #: how long one frame is shown at full fidelity
    frames: int  #: of a chunk
    frame_tokens: int  #: of one frame in a history
    history: HistoryShape
    #: Names of a condition's numbers: moods, `look_x` and `look_y` (+ to the right of the picture, + up).
    conditions: tuple[str, ...]
    look_max: float  #: the furthest `look_x` and `look_y` the family was taught, 0..1
    moods: tuple[MoodWords, ...]  #: what words say a mood; none: it speaks with a straight face
    voice_before: Ticks  #: how much of its own voice before a chunk is heard, what an encoder looks back included
    voice_after: Ticks  #: how far beyond a frame its own voice is heard
    listen_delay: Ticks  #: between the end of the person's sound that is heard and the chunk

    def __post_init__(self) -> None:
        """Raises ConfigError for histories that compress: nobody launches the folds of a face in the engine."""
        if self.history.long_term_tokens:
            raise ConfigError(
                f"face {self.character}: its history folds into {self.history.long_term_tokens} long-term tokens, and "
                "the engine orders no folds of a face; set long_term_tokens to 0"
            )

    @property
    def chunk(self) -> Ticks:
        return Ticks(self.frames * self.frame)


class ModelPlan:
    """One model family, ready to be laid out and scheduled."""

    def __init__(
        self,
        *,
        name: str,
        stages: Sequence[StageSpec],
        edges: Sequence[tuple[str, str]],
        dialect: Dialect,
        partitions: Callable[[int], tuple[PartitionSpec, ...]],
        build: Callable[[], dict[str, Stage]],
        sample_rate: int,
        grain: Ticks,
        chunk_ramp: tuple[Ticks, ...],
        clause_max: Ticks,
        context_tokens_max: int,
        reply_tokens_max: int,
        reply_sentences_max: int,
        reply_words_enough: int,
        think_steps: int,
        first_steps: int = 2,
        first_words: int = 0,
        ring_samples: int,
        listen_max: Ticks,
        cut: Cut,
        takes: tuple[str, ...] = ("audio", "text"),
        voice: str = "silero",
        long_term_tokens: int = 0,
        weights_bytes: int = 0,
        weights_held: str = "",
        face: FacePlan | None = None,
        faceless: str = "",
    ) -> None:
        self.name = name
        self.stages = {spec.name: spec for spec in stages}
        self.edges = tuple(edges)
        self.dialect = dialect
        self.partitions = partitions  #: sessions -> partitions of the arena
        self.build = build  #: stage name -> the stage that runs
        self.sample_rate = sample_rate  #: of the voice output
        self.grain = grain  #: chunk lengths are multiples of this, but for the last of a clause
        self.chunk_ramp = chunk_ramp  #: lengths of the first chunks of a reply; the last one repeats
        self.clause_max = clause_max  #: worst-case playback length of one clause
        self.context_tokens_max = context_tokens_max
        self.reply_tokens_max = reply_tokens_max
        self.reply_sentences_max = reply_sentences_max
        self.reply_words_enough = reply_words_enough  #: a sentence that ends after so many words is the last
        self.think_steps = think_steps  #: tokens of one think step: what an interruption waits for at most
        self.first_steps = first_steps  #: the same until the first clause of a reply is thought
        #: The first clause of a reply may end after so many words, within a phrase, for a voice that goes on where it
        #: has stopped (`TalkJob.before`, `after`); 0: it ends where the others do.
        self.first_words = first_words
        self.ring_samples = ring_samples  #: 16 kHz samples of one session's ingest ring
        self.listen_max = listen_max  #: longest window the ears re-encode
        self.cut = cut
        self.takes = takes
        self.long_term_tokens = long_term_tokens  #: that what slides out of a context is folded into; 0: forgotten
        self.voice = voice  #: what tells voice in the person's audio: "silero" or "energy"
        self.weights_bytes = weights_bytes  #: of weights that lie beside the arena, as far as headers and files tell
        self.weights_held = weights_held  #: which these are and why, in words
        self.face = face  #: None: a voice without a face
        self.faceless = faceless  #: why there is no face although the model's own was wanted; empty: nothing is amiss
        self._by_role = {spec.role: spec for spec in reversed(stages)}
        _check(self)

    def stage(self, role: Role) -> StageSpec | None:
        """The stage that plays a role, or None when this family has none."""
        return self._by_role.get(role)

    def need(self, role: Role) -> StageSpec:
        try:
            return self._by_role[role]
        except KeyError:
            raise ValueError(f"model {self.name} has no stage for {role.value}") from None


def face_lanes(stages: Iterable[StageSpec]) -> frozenset[str]:
    """Lanes on which nothing but a face is made: nobody who speaks waits for them."""
    specs = tuple(stages)
    shared = {spec.lane for spec in specs if spec.role not in FACE_ROLES}
    return frozenset({spec.lane for spec in specs} - shared)


def _check(plan: ModelPlan) -> None:
    """Edges join stages that exist and carry one kind of payload."""
    for source, target in plan.edges:
        gives, takes = plan.stages[source].gives, plan.stages[target].takes
        if gives is not takes:
            raise ValueError(f"model {plan.name}: {source} gives {gives.value}, {target} takes {takes.value}")
    if samples_from_ticks(plan.listen_max, INPUT_RATE) > plan.ring_samples:
        raise ValueError(f"model {plan.name}: its ears read further back than its ring of {plan.ring_samples} samples")
    for role in (Role.COPY, Role.LISTEN, Role.THINK, Role.TALK, Role.RENDER):
        plan.need(role)
    if plan.face is not None:
        _check_face(plan, plan.face)


def _check_face(plan: ModelPlan, face: FacePlan) -> None:
    for role in FACE_ROLES:
        plan.need(role)
    for words in face.moods:
        for name in (words.mood, words.asked):
            if name and name not in face.conditions:
                raise ValueError(f"model {plan.name}: words tell {name!r}; its face has {', '.join(face.conditions)}")
