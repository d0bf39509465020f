"""pocket: the default model. Real weights, small enough for two CPU cores.

    copy -> listen (Moonshine)          the person's words, re-encoded while they are spoken
         -> judge (Smart Turn)          whether the turn has ended
            thinker (SmolLM2)           tokens, keys in the arena's pages
            talk -> render (hibari)     a clause becomes latents, latents become sound in chunks
    overhear -> generate -> refine -> decode   the face, where one is asked for (models/face)

Text between thinker and talker is made of tokens by the dialect, in the core, which also keeps the history.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from duplexd import weights
from duplexd.config import AUTO_FACE, NO_FACE, OWN_FACES
from duplexd.errors import ConfigError
from duplexd.memory.layout import FieldSpec, PartitionKind, PartitionSpec, Section
from duplexd.streams.graph import ModelPlan
from duplexd.streams.stage import Cut, Stage
from duplexd.units import text_from_bytes, ticks_from_ms

PAGE_TOKENS = 16
#: Every kept cut or branch may leave one page partly filled. Some twenty interrupted turns fit; where there are more,
#: and shorter ones, the oldest slides out before the tokens are full.
SPARE_PAGES = 24
LATENTS_PER_SESSION = 3
CLAUSE_MAX = ticks_from_ms(3000)
REPLY_TOKENS_MAX = 72
REPLY_SENTENCES_MAX = 2
REPLY_WORDS_ENOUGH = 9
THINK_STEPS = 4
#: Enough to last while the next words are made; a voice that speaks clauses as parts of a phrase loses nothing by it.
FIRST_WORDS = 3
#: Files whose weights lie beside the arena: other libraries hold them, and not less than the file has.
FILES = ("moonshine-encoder", "moonshine-decoder", "moonshine-tokenizer", "smart-turn", "hibari-oov", "hibari-vocab")
CHUNK_RAMP = (ticks_from_ms(150), ticks_from_ms(200), ticks_from_ms(300))


def _number(options: dict[str, str], name: str, default: int, *, lowest: int) -> int:
    """Take a number out of the options. Raises ConfigError outside of lowest..64."""
    text = options.pop(name, str(default))
    if not (text.isdigit() and lowest <= int(text) <= 64):
        raise ConfigError(f"model pocket: {name} is {text!r}; it lies in {lowest}..64")
    return int(text)


def beside_of(rough_bytes: int, painter_bytes: int = 0) -> str:
    """Which weights lie beside the one allocation, and why, in words; with them the process that draws a face."""
    networks = "ears, judge and unknown words (ONNX Runtime has memory of its own)"
    rough = f"; rough head of the thinker, {text_from_bytes(rough_bytes)} (packed inside torch)" if rough_bytes else ""
    painter = f"; the process that draws the face, {text_from_bytes(painter_bytes)}" if painter_bytes else ""
    return f"beside the allocation: {networks}{rough}{painter}"


def plan(options: Mapping[str, str] | None = None) -> ModelPlan:
    """The plan of the pocket model.

    Args:    options: `thinker`: a GGUF file or Hugging Face folder to think with instead of SmolLM2.
             `batch_max`: sessions that think in one launch, 1 to 64. `long_term`: tokens that what slides out of a full
             context is folded into (average.py), 0 to 64; 0, as by default: it is forgotten.
             `face`: mira, theo, suna or the TOML file of a character; none, as by default; auto: mira, or none with
             the reason (`ModelPlan.faceless`) where this machine cannot draw.
             `device`: where the arena will lie, `cpu` or a CUDA device: it decides how the thinker's weights are held.
    Raises:  ConfigError for another option; ModelError, WeightsError as `load_thinker`.
    """
    from duplexd.models.pocket import ears, turn, voice
    from duplexd.models.pocket.thinker import BATCH_MAX, CONTEXT_MAX, load_thinker

    options = dict(options or {})
    path = options.pop("thinker", "")
    batch_max = _number(options, "batch_max", BATCH_MAX, lowest=1)
    long_term = _number(options, "long_term", 0, lowest=0)
    character, faceless = shown_face(options.pop("face", NO_FACE))
    device = options.pop("device", "cpu")
    if options:
        raise ConfigError(
            f"model pocket has no option {', '.join(sorted(options))}; "
            "it has: thinker, batch_max, long_term, face, device"
        )
    face = None if character == NO_FACE else FaceParts(character)
    mind = load_thinker(Path(path).expanduser() if path else None, lane="think", batch_max=batch_max, device=device)
    talker = voice.Talker(lane="talk", clause_max=CLAUSE_MAX)
    vocoder = voice.Vocoder(lane="vocode")
    transcriber = ears.Transcriber(
        weights.path("moonshine-encoder"), weights.path("moonshine-decoder"), weights.path("moonshine-tokenizer")
    )
    stages: list[Stage] = [
        ears.CopyIn(lane="copy"),
        ears.Ears(transcriber, lane="listen"),
        turn.Turn(turn.TurnJudge(weights.path("smart-turn")), lane="judge"),
        mind.thinker,
        talker,
        vocoder,
        *(face.stages if face is not None else ()),
    ]

    def partitions(sessions: int) -> tuple[PartitionSpec, ...]:
        slots = PartitionKind.SLOTS
        shared = len(mind.dialect.anchor())
        anchor = -(-shared // PAGE_TOKENS)
        pages = -(-(CONTEXT_MAX - shared) // PAGE_TOKENS) + SPARE_PAGES
        return (
            mind.thinker.shelf(),
            talker.shelf(),
            vocoder.shelf(),
            PartitionSpec("state", slots, sessions, voice.state_fields(), session_slots=1, section=Section.WINDOWS),
            PartitionSpec(
                "ingest",
                slots,
                sessions,
                (FieldSpec("pcm", (ears.RING_SAMPLES,)),),
                session_slots=1,
                section=Section.INGEST,
            ),
            PartitionSpec(
                "pages",
                PartitionKind.PAGES,
                sessions * pages + anchor,
                mind.thinker.page_fields(),
                page_tokens=PAGE_TOKENS,
                session_slots=pages,
                shared_slots=anchor,
            ),
            PartitionSpec(
                "latents",
                slots,
                sessions * LATENTS_PER_SESSION,
                voice.latent_fields(),
                session_slots=LATENTS_PER_SESSION,
            ),
            mind.thinker.workspace(sessions),
            *(face.partitions(sessions) if face is not None else ()),
        )

    return ModelPlan(
        name="pocket",
        stages=[stage.spec for stage in stages],
        edges=[
            *[("copy", "listen"), ("copy", "judge"), ("talk", "render")],
            *([("generate", "refine"), ("refine", "decode")] if face is not None else []),
        ],
        dialect=mind.dialect,
        partitions=partitions,
        build=lambda: {stage.spec.name: stage for stage in stages},
        sample_rate=voice.SAMPLE_RATE,
        grain=voice.FRAME_TICKS,
        chunk_ramp=CHUNK_RAMP,
        clause_max=CLAUSE_MAX,
        context_tokens_max=CONTEXT_MAX,
        reply_tokens_max=REPLY_TOKENS_MAX,
        reply_sentences_max=REPLY_SENTENCES_MAX,
        reply_words_enough=REPLY_WORDS_ENOUGH,
        think_steps=THINK_STEPS,
        first_words=FIRST_WORDS,
        ring_samples=ears.RING_SAMPLES,
        listen_max=ticks_from_ms(8000),
        cut=Cut.AT_CURSOR,
        voice="silero",
        long_term_tokens=long_term,
        weights_bytes=mind.thinker.beside_bytes
        + sum(weights.WEIGHTS[name].bytes for name in FILES)
        + (face.beside_bytes if face is not None else 0),
        weights_held=beside_of(mind.thinker.beside_bytes, face.beside_bytes if face is not None else 0),
        face=face.plan if face is not None else None,
        faceless=faceless,
    )


def shown_face(wanted: str) -> tuple[str, str]:
    """Whose face is shown, and why none is where `AUTO_FACE` was wanted and cannot be drawn. Takes 0.6 s then."""
    if wanted != AUTO_FACE:
        return wanted, ""
    from duplexd.models.face.painter import drawing_fault

    faceless = drawing_fault()
    return (NO_FACE if faceless else OWN_FACES["pocket"]), faceless


class FaceParts:
    """What a face adds to the plan: motion on one lane, drawing on another, own voice on that of the copies.

    Raises:  ConfigError for a character that does not exist; ModelError when its weights cannot be read.
    """

    def __init__(self, character: str) -> None:
        from duplexd.models.face import stages
        from duplexd.models.face.checkpoint import load_face
        from duplexd.models.face.painter import PAINTER_BYTES

        faces = load_face()
        self.beside_bytes = PAINTER_BYTES
        self._shape = faces.shape
        self._partitions = stages.partitions
        self.plan = stages.face_plan(faces.shape, character)
        self.stages: list[Stage] = [
            stages.Overhear(lane="copy"),
            stages.Generator(faces, lane="face"),
            stages.Refiner(faces, lane="face"),
            stages.Decoder(lane="draw"),
        ]

    def partitions(self, sessions: int) -> tuple[PartitionSpec, ...]:
        return self._partitions(self._shape, sessions)
