"""Identity: how one face is at rest and how much it moves, and the reference poses that anchor it (LPM Fig. 4).

1. An identity is numbers of motion, not of looks: two characters drawn differently may move alike.
2. Anchors are eight poses of the same face, one token each: neutral; four moods; an open mouth; two views. They are
   given to the model once per session, before the first chunk, and never move.
"""

from __future__ import annotations

import msgspec
import numpy as np

from duplexd.models.face.motion import CHANNELS, IDENTITY, Channel, Motion, at_rest, mood_motion

#: The poses of the anchors, in the order of their tokens.
REFERENCES = ("neutral", "joy", "sorrow", "surprise", "thought", "open", "left", "right")
_VIEW_YAW = 0.38


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """How somebody moves."""

    rest: dict[str, float] = {}  #: what is added to `IDENTITY` channels, by their names
    expression: float = 1.0  #: how strongly moods show
    liveliness: float = 1.0  #: how far the head moves
    articulation: float = 1.0  #: how wide the mouth opens in speech

    def neutral(self) -> Motion:
        """Raises ModelError for a channel that carries no identity."""
        return at_rest(**self.rest)


def anchor_poses(identity: Identity) -> Motion:
    """The reference poses, (len(REFERENCES), CHANNELS)."""
    poses = np.tile(identity.neutral(), (len(REFERENCES), 1))
    for index, name in enumerate(REFERENCES):
        if name in ("joy", "sorrow", "surprise", "thought"):
            poses[index] += identity.expression * mood_motion({name: 1.0})
    opened = poses[REFERENCES.index("open")]
    opened[[Channel.JAW, Channel.OPENING]] += identity.articulation * np.float32(0.8)
    for name, side in (("left", -1.0), ("right", 1.0)):
        poses[REFERENCES.index(name), Channel.YAW] += side * identity.liveliness * _VIEW_YAW
    return poses


#: Spread of identities that training draws, by channel of `IDENTITY`.
SPREAD = {
    Channel.ROLL: 0.03,
    Channel.LID_LEFT: 0.09,
    Channel.LID_RIGHT: 0.09,
    Channel.BROW_LEFT: 0.12,
    Channel.BROW_RIGHT: 0.12,
    Channel.KNIT: 0.07,
    Channel.WIDTH: 0.12,
    Channel.SMILE: 0.11,
}


def random_identity(rng: np.random.Generator) -> Identity:
    """Somebody new: lids and brows of the two sides mostly agree, as people's do."""
    draw = {channel: float(rng.normal()) for channel in IDENTITY}
    for left, right in ((Channel.LID_LEFT, Channel.LID_RIGHT), (Channel.BROW_LEFT, Channel.BROW_RIGHT)):
        draw[right] = 0.85 * draw[left] + 0.5 * draw[right]
    return Identity(
        rest={
            channel.name.lower(): float(
                np.clip(draw[channel] * SPREAD[channel], -2 * SPREAD[channel], 2 * SPREAD[channel])
            )
            for channel in IDENTITY
        },
        expression=float(rng.uniform(0.75, 1.2)),
        liveliness=float(rng.uniform(0.7, 1.3)),
        articulation=float(rng.uniform(0.85, 1.1)),
    )


assert (len(REFERENCES), CHANNELS) == (8, 24), "checkpoints know these numbers"
