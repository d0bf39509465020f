"""What a listener answers: moments in the person's sound, and how strongly each asks for an answer.

1. A moment is known from sound that was heard by then: nothing ahead, two seconds back. That is what the model hears,
   so whatever the listener does for a moment can be learned from the sound. A nod by chance could not be.
2. An answer begins `ANSWER_SECONDS` after its moment. A chunk hears the person until 0.32 s before it begins and is as
   long; so only what is 0.6 s old is known to every frame of it.

    said     ######### ####### #####______________________________
    moments         peak            end   pause
    answers           '--0.6 s--> nod '--0.6 s--> nods, brows  '-0.6 s-> smile
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from duplexd.models.face.training.mouth import STEPS_PER_SECOND

Series = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

#: From a moment to the first frame of its answer.
ANSWER_SECONDS = 0.6
#: Loudness that is a voice: 26 dB below the loudest.
_VOICE = 0.16
#: So long silent after so much of a voice is the end of a phrase; so long, a pause in which it is one's turn to smile.
_END_STEPS, _END_VOICE = 12, 50
_PAUSE_STEPS, _PAUSE_VOICE = 50, 70
_BACK_STEPS = 150
END_SECONDS = _END_STEPS / STEPS_PER_SECOND
PAUSE_SECONDS = _PAUSE_STEPS / STEPS_PER_SECOND
#: The loudest for so long, with so much of a fall after it, is a stressed word.
_PEAK_STEPS, _FALL_STEPS, _FALL = 110, 14, 0.75


class Moment(msgspec.Struct, frozen=True):
    at: float  #: seconds; nothing later was needed to know it
    strength: float  #: 0 to 1


class Moments(msgspec.Struct, frozen=True):
    """In what the person says, in order of time."""

    ends: tuple[Moment, ...]  #: of phrases
    peaks: tuple[Moment, ...]  #: stressed words
    pauses: tuple[Moment, ...]
    voice: Series  #: per step, 1 while a voice is heard


def loudness(mels: npt.NDArray[np.float16]) -> Series:
    """Of normalised log energies (steps, MELS), per step: about 1 where it is loudest, as ears take it (power^0.3)."""
    power = np.exp(6.0 * mels.astype(np.float64)).mean(1)
    loud: Series = np.clip((power / max(float(np.quantile(power, 0.95)), 1e-9)) ** 0.3, 0.0, 1.3)
    return loud


def moments(loud: Series) -> Moments:
    """Of a person's loudness."""
    smooth = _before(loud, 5) / 5
    voice = smooth > _VOICE
    heard = _before(voice.astype(np.float64), _BACK_STEPS)
    return Moments(
        ends=_silences(voice, heard, _END_STEPS, _END_VOICE),
        peaks=_peaks(_before(loud, 12) / 12, heard),
        pauses=_silences(voice, heard, _PAUSE_STEPS, _PAUSE_VOICE),
        voice=voice.astype(np.float64),
    )


def _silences(voice: Flags, heard: Series, steps: int, least: float) -> tuple[Moment, ...]:
    """Moments at which it has just been silent for so many steps after `least` steps with a voice, or more."""
    found = []
    for end in np.flatnonzero(voice[:-1] & ~voice[1:]) + 1:
        known = end + steps
        if known <= len(voice) and not voice[end:known].any() and heard[known - 1] >= least:
            strength = min(1.0, 0.4 + 0.6 * (heard[known - 1] - least) / (110 - least))
            found.append(Moment(known / STEPS_PER_SECOND, float(strength)))
    return tuple(found)


def _peaks(smooth: Series, heard: Series) -> tuple[Moment, ...]:
    found = []
    for at in range(_PEAK_STEPS, len(smooth) - _FALL_STEPS):
        top = smooth[at]
        if top < 0.5 or heard[at] < 80 or top <= smooth[at + 1] or top < smooth[at - _PEAK_STEPS : at].max():
            continue
        after = smooth[at + 1 : at + 1 + _FALL_STEPS]
        fallen = np.flatnonzero(after < _FALL * top)
        if len(fallen) and after.max() <= top:
            found.append(Moment((at + 2 + int(fallen[0])) / STEPS_PER_SECOND, float(min(1.0, top))))
    return tuple(found)


def _before(x: Series, steps: int) -> Series:
    """Sum of x over the `steps` steps that end with each."""
    total = np.concatenate([np.zeros(steps), np.cumsum(x)])
    out: Series = total[steps:] - total[:-steps]
    return out
