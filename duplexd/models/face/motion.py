"""The motion vector: what a face does in one frame, 24 numbers, whoever's face it is.

1. A motion latent is one frame of 40 ms. It says what a face does, never how it looks: the decoder adds the looks.
2. Sides are the viewer's: left is the left of the picture. Angles are radians, shares run from 0 (not at all) to 1
   (fully), signed shares from -1 to 1. Nobody is refused for leaving these ranges; the decoder clamps.
3. `opening` is the gap between the lips as a share of the widest; it is what lip figures are measured on. `jaw` drops
   the chin and goes its own way: lips close over an open jaw in "b".
4. Channels that differ between people at rest (`IDENTITY`) carry identity: anchors hold them still over hours.

     0 yaw     3 sway     6 gaze_x    8 lid_left   11 brow_left   14 jaw       17 pucker  20 tongue  23 smile
     1 pitch   4 lean     7 gaze_y    9 lid_right  12 brow_right  15 opening   18 lift    21 teeth
     2 roll    5 breath              10 squint     13 knit        16 width     19 tuck    22 press
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from duplexd.errors import ModelError
from duplexd.units import Ticks, ticks_from_ms

Motion = npt.NDArray[np.float32]  #: (frames, CHANNELS)

FRAMES_PER_SECOND = 25
FRAME_TICKS = Ticks(ticks_from_ms(1000) // FRAMES_PER_SECOND)
#: A chunk is planned, generated, seen or dropped as one: 320 ms.
CHUNK_FRAMES = 8
CHUNK_TICKS = Ticks(CHUNK_FRAMES * FRAME_TICKS)


class Channel(IntEnum):
    YAW = 0  #: head turned, radians; + towards the right of the picture
    PITCH = 1  #: head raised, radians
    ROLL = 2  #: head tilted, radians; + clockwise in the picture
    SWAY = 3  #: head moved aside, shares of a face's width; + right
    LEAN = 4  #: nearer to the viewer, signed share
    BREATH = 5  #: shoulders raised, signed share
    GAZE_X = 6  #: eyes in the head, signed share of how far they turn; + right
    GAZE_Y = 7  #: the same, + up
    LID_LEFT = 8  #: how far the lids are open: 0 shut, 1 open, up to 1.3 wide
    LID_RIGHT = 9
    SQUINT = 10  #: lower lid and cheek raised
    BROW_LEFT = 11  #: raised, signed share
    BROW_RIGHT = 12
    KNIT = 13  #: brows drawn together
    JAW = 14  #: dropped
    OPENING = 15  #: gap between the lips
    WIDTH = 16  #: corners of the mouth apart (+) or together (-), signed share
    PUCKER = 17  #: lips rounded and pushed forward
    LIFT = 18  #: upper lip raised, so that its teeth show
    TUCK = 19  #: lower lip under the upper teeth ("f")
    TONGUE = 20  #: tip of the tongue up, at the teeth ("l", "th")
    TEETH = 21  #: teeth closed behind open lips ("s")
    PRESS = 22  #: lips pressed on each other ("m")
    SMILE = 23  #: corners up (+) or down (-), signed share


CHANNELS = len(Channel)
#: What the mouth does because of what is said, in this order in phoneme tables.
SPEECH = tuple(Channel(index) for index in range(Channel.JAW, Channel.PRESS + 1))
#: Where people differ at rest.
IDENTITY = (
    Channel.ROLL,
    Channel.LID_LEFT,
    Channel.LID_RIGHT,
    Channel.BROW_LEFT,
    Channel.BROW_RIGHT,
    Channel.KNIT,
    Channel.WIDTH,
    Channel.SMILE,
)
LOWEST = np.full(CHANNELS, -1.0, np.float32)
HIGHEST = np.full(CHANNELS, 1.0, np.float32)
for _channel in (*SPEECH, Channel.SQUINT, Channel.KNIT, Channel.LID_LEFT, Channel.LID_RIGHT):
    if _channel is not Channel.WIDTH:
        LOWEST[_channel] = 0.0
for _channel in (Channel.LID_LEFT, Channel.LID_RIGHT):
    HIGHEST[_channel] = 1.3

#: Moods by name: what each adds to a face at full strength. Moods add up.
MOODS: Mapping[str, Mapping[Channel, float]] = {
    "joy": {
        Channel.SMILE: 0.62, Channel.SQUINT: 0.45, Channel.WIDTH: 0.22, Channel.BROW_LEFT: 0.10,
        Channel.BROW_RIGHT: 0.10, Channel.LIFT: 0.12, Channel.PITCH: 0.02,
    },
    "sorrow": {
        Channel.SMILE: -0.45, Channel.KNIT: 0.40, Channel.BROW_LEFT: 0.18, Channel.BROW_RIGHT: 0.18,
        Channel.LID_LEFT: -0.22, Channel.LID_RIGHT: -0.22, Channel.PITCH: -0.07, Channel.GAZE_Y: -0.12,
    },
    "surprise": {
        Channel.BROW_LEFT: 0.75, Channel.BROW_RIGHT: 0.75, Channel.LID_LEFT: 0.22, Channel.LID_RIGHT: 0.22,
        Channel.PITCH: 0.03, Channel.LEAN: -0.15,
    },
    "thought": {
        Channel.GAZE_X: 0.30, Channel.GAZE_Y: 0.34, Channel.BROW_LEFT: 0.30, Channel.BROW_RIGHT: -0.08,
        Channel.KNIT: 0.18, Channel.ROLL: 0.05, Channel.SMILE: -0.06,
    },
    "concern": {
        Channel.KNIT: 0.55, Channel.BROW_LEFT: -0.05, Channel.BROW_RIGHT: -0.05, Channel.LEAN: 0.22,
        Channel.SMILE: -0.16, Channel.SQUINT: 0.12,
    },
}  # fmt: skip
#: A condition: strength of every mood, and where the person looked at is (signed shares of gaze, + right, + up).
CONDITION = (*MOODS, "look_x", "look_y")
#: Nobody in training stood further aside than this: what eyes would do there was never taught.
LOOK_MAX = 0.6


def condition(**given: float) -> npt.NDArray[np.float32]:
    """A condition vector, (len(CONDITION),); what is not given is 0.

    Raises:  ModelError for a name that does not exist or a number beyond -1..1.
    """
    unknown = sorted(set(given) - set(CONDITION))
    if unknown:
        raise ModelError(f"a condition of a face has no {', '.join(unknown)}; it has {', '.join(CONDITION)}")
    wild = sorted(name for name, value in given.items() if not -1.0 <= value <= 1.0)
    if wild:
        raise ModelError(f"condition {', '.join(f'{name}={given[name]}' for name in wild)}; each lies in -1..1")
    return np.array([given.get(name, 0.0) for name in CONDITION], np.float32)


def mood_motion(strengths: Mapping[str, float]) -> Motion:
    """What moods of these strengths add to a face at rest, (CHANNELS,)."""
    added = np.zeros(CHANNELS, np.float32)
    for name, strength in strengths.items():
        for channel, amount in MOODS[name].items():
            added[channel] += strength * amount
    return added


def at_rest(**offsets: float) -> Motion:
    """A face that does nothing, eyes open: (CHANNELS,). `offsets` are an identity's, by channel name in lower case.

    Raises:  ModelError for a channel that carries no identity.
    """
    rest = np.zeros(CHANNELS, np.float32)
    rest[[Channel.LID_LEFT, Channel.LID_RIGHT]] = 1.0
    allowed = {channel.name.lower(): channel for channel in IDENTITY}
    for name, offset in offsets.items():
        if name not in allowed:
            raise ModelError(f"{name!r} is no channel of identity; these are: {', '.join(allowed)}")
        rest[allowed[name]] += offset
    return rest


def clamped(motion: Motion) -> Motion:
    """Every channel inside its range."""
    return np.clip(motion, LOWEST, HIGHEST)
