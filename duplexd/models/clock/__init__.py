"""The word clock: a model without weights whose every word is a tone of its own. The tests' main instrument."""

from __future__ import annotations

from collections.abc import Mapping

from duplexd.config import NO_FACE
from duplexd.errors import ConfigError
from duplexd.media.tones import CLOCK_WORD_MS
from duplexd.memory.layout import FieldSpec, PartitionKind, PartitionSpec, Section
from duplexd.models.clock import flash
from duplexd.models.clock.language import WORDS_PER_CLAUSE, ClockDialect
from duplexd.streams.graph import ModelPlan
from duplexd.streams.stage import CostModel, Cut, PayloadKind, Role, Stage, StageSpec
from duplexd.units import ticks_from_ms

RING_SAMPLES = 16_000 * 16
CONTEXT_TOKENS = 512
PAGE_TOKENS = 16
PAGES_PER_SESSION = 2 * CONTEXT_TOKENS // PAGE_TOKENS
CLAUSE_MAX = ticks_from_ms(CLOCK_WORD_MS * WORDS_PER_CLAUSE)


def plan(options: Mapping[str, str] | None = None) -> ModelPlan:
    """The plan of the word clock.

    Args:    options: `face`: "flash" (also as "auto"), or "none", as by default. `device`: any, the plan is the
             same.
    Raises:  ConfigError for another option, or another face.
    """
    options = dict(options or {})
    shown = flash.face_plan(options.pop("face", NO_FACE))
    options.pop("device", "")
    if options:
        raise ConfigError(f"model clock has no option {', '.join(sorted(options))}; it has: face, device")
    return ModelPlan(
        name="clock",
        stages=STAGES if shown is None else (*STAGES, *flash.STAGES),
        edges=[*EDGES, *(() if shown is None else flash.EDGES)],
        dialect=ClockDialect(),
        partitions=_partitions
        if shown is None
        else lambda sessions: _partitions(sessions) + flash.partitions(sessions),
        build=_build if shown is None else lambda: _build() | _build_face(),
        sample_rate=24_000,
        grain=ticks_from_ms(10),
        chunk_ramp=(ticks_from_ms(160), ticks_from_ms(240), ticks_from_ms(320)),
        clause_max=CLAUSE_MAX,
        context_tokens_max=CONTEXT_TOKENS,
        reply_tokens_max=33,
        reply_sentences_max=1,
        reply_words_enough=1,
        think_steps=4,
        ring_samples=RING_SAMPLES,
        listen_max=ticks_from_ms(8000),
        cut=Cut.AT_CURSOR,
        voice="energy",
        face=shown,
    )


EDGES = (("copy", "ears"), ("think", "talk"), ("talk", "render"))


STAGES = (
    StageSpec("copy", Role.COPY, "copy", PayloadKind.AUDIO, PayloadKind.AUDIO, CostModel(50, 20), batch_max=8),
    StageSpec("ears", Role.LISTEN, "listen", PayloadKind.AUDIO, PayloadKind.TEXT, CostModel(500, 0, 2000)),
    StageSpec("think", Role.THINK, "think", PayloadKind.TEXT, PayloadKind.TEXT, CostModel(200, 0, 50), batch_max=8),
    StageSpec("talk", Role.TALK, "voice", PayloadKind.TEXT, PayloadKind.LATENT, CostModel(200)),
    StageSpec("render", Role.RENDER, "voice", PayloadKind.LATENT, PayloadKind.AUDIO, CostModel(300, 0, 100)),
)


def _partitions(sessions: int) -> tuple[PartitionSpec, ...]:
    slots, pages = PartitionKind.SLOTS, PartitionKind.PAGES
    return (
        PartitionSpec(
            "state", slots, sessions, (FieldSpec("end", (1,), "int64"),), session_slots=1, section=Section.WINDOWS
        ),
        PartitionSpec(
            "ingest", slots, sessions, (FieldSpec("pcm", (RING_SAMPLES,)),), session_slots=1, section=Section.INGEST
        ),
        PartitionSpec("latents", slots, sessions * 4, (FieldSpec("words", (16,)),), session_slots=4),
        PartitionSpec(
            "pages",
            pages,
            sessions * PAGES_PER_SESSION + 1,
            (FieldSpec("k", (1,), "float64"),),
            page_tokens=PAGE_TOKENS,
            session_slots=PAGES_PER_SESSION,
            shared_slots=1,
        ),
    )


def _build_face() -> dict[str, Stage]:
    from duplexd.models.clock import face

    return face.build()


def _build() -> dict[str, Stage]:
    from duplexd.models.clock import stages

    kinds = {"copy": stages.Copy, "ears": stages.Ears, "think": stages.Thinker, "talk": stages.Talker}
    return {spec.name: kinds.get(spec.name, stages.Renderer)(spec) for spec in STAGES}
