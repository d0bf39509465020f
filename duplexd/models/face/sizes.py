"""The face at other sizes: the same classes, built on the meta device, and what they take of a GPU (`duplexd plan`).

1. Parameters are counted on the modules themselves, so the table cannot drift from the code.
2. `face-17b` is LPM's pair as far as it is published (papers §1.2, §1.3): Wan2.1-14B's widths, keys and values of one
   audio in every layer, text beside it, 480x832 at 24 fps in chunks of a second. `face-1.3b` is the same at the widths
   of Wan2.1-1.3B. Their decoder is a VAE, which is not counted and stands where pocket's drawing does.
3. Workspace is an estimate, as in models/published.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from duplexd.errors import ConfigError
from duplexd.memory.layout import FieldSpec, PartitionKind, PartitionSpec, Section
from duplexd.memory.sizing import Footprint
from duplexd.models.face.net import FaceShape, parameter_count
from duplexd.models.face.stages import history_fields, history_shape, partitions

POCKET = FaceShape()
#: 480x832 through a VAE of stride 8 and patches of 2: 30 x 52 tokens of a latent frame, six frames a second
#: (papers §1.5); a token is a patch of 2 x 2 x 16 channels.
_LPM = FaceShape(
    latent=64,
    frames=6,
    places=(30, 52),
    width=5120,
    heads=40,
    layers=40,
    mlp=13824,
    audio=0,
    audio_given=5120,
    text=5120,
    anchors=(9360, 9360, 9360),
    speak_before=2,
    speak_after=1,
    listen_frames=18,
    listen_delay=6,
    feature_rate=8,
)
LPM_17B = _LPM
LPM_1_3B = msgspec.structs.replace(_LPM, width=1536, heads=12, layers=30, mlp=8960, audio_given=1536, text=1536)
_WORKSPACE = {"face-17b": 10 * 10**9, "face-1.3b": 4 * 10**9}
_BYTES = 2


def face(options: Mapping[str, str]) -> Footprint:
    """The pocket face, float32; the person's sound lies in the ring it shares with the ears and is not counted."""
    _none("face", options)
    return Footprint("face", lambda sessions: partitions(POCKET, sessions))


def face_17b(options: Mapping[str, str]) -> Footprint:
    """An LPM-shaped pair of 17 billion parameters each, bfloat16."""
    return _published("face-17b", LPM_17B, options)


def face_1_3b(options: Mapping[str, str]) -> Footprint:
    """An LPM-shaped pair at the widths of Wan2.1-1.3B, bfloat16."""
    return _published("face-1.3b", LPM_1_3B, options)


def _published(name: str, shape: FaceShape, options: Mapping[str, str]) -> Footprint:
    _none(name, options)
    # A chunk in work and one of lookahead (DESIGN §5 rule 1), as in models/published.py.
    history = history_shape(shape, lookahead=2)
    count = parameter_count(shape)

    def parts(sessions: int) -> tuple[PartitionSpec, ...]:
        fields = history_fields(shape, "bfloat16")
        estimate = (FieldSpec("bytes", (_WORKSPACE[name],), "uint8"),)
        return (
            history.partition("noisy", fields, sessions=sessions),
            history.partition("clean", fields, sessions=sessions),
            PartitionSpec("estimate", PartitionKind.SLOTS, 1, estimate, section=Section.WORKSPACE),
        )

    return Footprint(
        name, parts, 2 * count * _BYTES, f"generator and refiner, {count / 1e9:.2f} billion each, bfloat16"
    )


def _none(model: str, options: Mapping[str, str]) -> None:
    if options:
        raise ConfigError(f"{model} has no option {', '.join(sorted(options))}; it takes none")
