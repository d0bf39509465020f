"""What the core must know of the word clock's face (face.py): sizes, stages, partitions. No tensor is needed for it."""

from __future__ import annotations

from duplexd.config import AUTO_FACE, NO_FACE
from duplexd.errors import ConfigError
from duplexd.memory.histories import HistoryShape
from duplexd.memory.layout import FieldSpec, PartitionKind, PartitionSpec, Section
from duplexd.streams.graph import FacePlan
from duplexd.streams.stage import CostModel, PayloadKind, Role, StageSpec
from duplexd.units import Ticks, ticks_from_ms

FLASH = "flash"
SIDE = 64
FRAME = ticks_from_ms(40)
FRAMES = 8
ANCHOR_TOKENS = 4
RATE = 24_000  #: of own voice
RING_SAMPLES = 6 * RATE
MOTIONS_PER_SESSION = 6
HISTORY = HistoryShape(chunk_tokens=FRAMES, anchor_tokens=(ANCHOR_TOKENS,), recent=2, lookahead=6)

STAGES = (
    StageSpec("overhear", Role.OVERHEAR, "copy", PayloadKind.AUDIO, PayloadKind.AUDIO, CostModel(50, 20), batch_max=8),
    StageSpec(
        "generate", Role.GENERATE, "face", PayloadKind.AUDIO, PayloadKind.LATENT, CostModel(2000, 500), batch_max=4
    ),
    StageSpec("refine", Role.REFINE, "face", PayloadKind.LATENT, PayloadKind.LATENT, CostModel(2000, 500), batch_max=4),
    StageSpec("decode", Role.DECODE, "draw", PayloadKind.LATENT, PayloadKind.IMAGE, CostModel(4000)),
)
EDGES = (("generate", "refine"), ("refine", "decode"))


def face_plan(name: str) -> FacePlan | None:
    """The face by name; None: the clock has none. Raises ConfigError for another name."""
    if name == NO_FACE:
        return None
    if name not in (FLASH, AUTO_FACE):
        raise ConfigError(f"model clock has no face {name!r}; it has {FLASH} and none")
    return FacePlan(
        character=FLASH,
        size=(SIDE, SIDE),
        frame=FRAME,
        frames=FRAMES,
        frame_tokens=1,
        history=HISTORY,
        conditions=("thought", "look_x", "look_y"),
        look_max=0.6,
        moods=(),
        voice_before=Ticks(0),
        voice_after=Ticks(0),
        listen_delay=ticks_from_ms(320),
    )


def partitions(sessions: int) -> tuple[PartitionSpec, ...]:
    fields = (FieldSpec("frame", (FRAMES,), "int64"),)
    slots = PartitionKind.SLOTS
    return (
        HISTORY.partition("noisy", fields, sessions=sessions),
        HISTORY.partition("clean", fields, sessions=sessions),
        PartitionSpec(
            "voice", slots, sessions, (FieldSpec("pcm", (RING_SAMPLES,)),), session_slots=1, section=Section.INGEST
        ),
        PartitionSpec(
            "motion",
            slots,
            sessions * MOTIONS_PER_SESSION,
            (FieldSpec("draft", (FRAMES,)), FieldSpec("motion", (FRAMES,))),
            session_slots=MOTIONS_PER_SESSION,
        ),
    )
