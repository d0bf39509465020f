"""Phonemes and when they are spoken -> what the mouth does, at 100 steps a second.

1. Every phoneme has a target for some channels and a strength for each; between them the strongest near ones win
   (dominance functions: Cohen & Massaro 1993). A channel that a phoneme does not care about is left to its neighbours:
   the "t" of "two" is rounded already, that of "tea" is not.
2. What makes a sound possible is not blended: lips close in "p b m", whatever stands beside them, and the lower lip
   touches the teeth in "f v".
3. A mouth begins to move at most 80 ms before its sound, which the model can hear coming.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from duplexd.models.face.motion import SPEECH, Channel

Track = npt.NDArray[np.float32]  #: (steps, len(SPEECH))

STEPS_PER_SECOND = 100
_TAU_BEFORE, _TAU_AFTER = 0.042, 0.034  #: seconds a phoneme is felt before and after itself
_SMOOTH = 0.018  #: seconds; muscles have mass


class Phone(msgspec.Struct, frozen=True):
    """One phoneme of a clause, in seconds."""

    symbol: str
    start: float
    stop: float
    stress: float = 0.0  #: 0 none, 0.5 secondary, 1 primary


class Target(msgspec.Struct, frozen=True):
    aims: dict[Channel, float]
    strength: float = 1.0
    strengths: dict[Channel, float] = {}  #: where it differs


_J, _O, _W, _P = Channel.JAW, Channel.OPENING, Channel.WIDTH, Channel.PUCKER
_L, _T, _G, _E, _R = Channel.LIFT, Channel.TUCK, Channel.TONGUE, Channel.TEETH, Channel.PRESS


def _vowel(jaw: float, opening: float, width: float, pucker: float, lift: float = 0.2, strength: float = 1.0) -> Target:
    return Target({_J: jaw, _O: opening, _W: width, _P: pucker, _L: lift, _T: 0, _G: 0, _E: 0, _R: 0}, strength)


def _consonant(strength: float, strengths: dict[Channel, float] | None = None, **aims: float) -> Target:
    named = {Channel[name.upper()]: value for name, value in aims.items()}
    rest = {_T: 0.0, _G: 0.0, _E: 0.0, _R: 0.0}
    return Target({**rest, **named}, strength, strengths or {})


_LIPS_SHUT = _consonant(0.8, {_O: 6.0, _R: 4.0, _E: 0.4}, jaw=0.12, opening=0.0, lift=0.0, press=0.85)
_LIP_TEETH = _consonant(0.9, {_O: 3.0, _T: 5.0, _L: 2.0}, jaw=0.10, opening=0.12, tuck=1.0, lift=0.30, teeth=0.3)
_HISS = _consonant(1.2, {_E: 3.0, _J: 1.6}, jaw=0.06, opening=0.26, width=0.28, lift=0.38, teeth=1.0)
_HUSH = _consonant(1.4, {_E: 2.6, _P: 2.0}, jaw=0.08, opening=0.34, width=-0.25, pucker=0.55, lift=0.42, teeth=0.9)
_TIP = _consonant(0.6, {_G: 2.0, _E: 1.2}, jaw=0.12, opening=0.24, lift=0.25, tongue=0.55, teeth=0.35)
_BACK = _consonant(0.35, jaw=0.20, opening=0.28, lift=0.2)

TARGETS: dict[str, Target] = {
    # vowels: jaw, opening, width, pucker
    "ɑ": _vowel(0.78, 0.82, 0.02, 0.00, 0.22),
    "æ": _vowel(0.66, 0.72, 0.34, 0.00, 0.36),
    "ʌ": _vowel(0.52, 0.56, 0.06, 0.00, 0.22),
    "ɐ": _vowel(0.34, 0.42, 0.06, 0.00, 0.20, 0.7),
    "ə": _vowel(0.26, 0.34, 0.04, 0.04, 0.18, 0.5),
    "ᵊ": _vowel(0.18, 0.26, 0.02, 0.04, 0.16, 0.35),
    "ᵻ": _vowel(0.20, 0.30, 0.22, 0.00, 0.22, 0.5),
    "ɛ": _vowel(0.50, 0.56, 0.34, 0.00, 0.34),
    "ɪ": _vowel(0.26, 0.38, 0.40, 0.00, 0.32),
    "i": _vowel(0.16, 0.34, 0.72, 0.00, 0.40),
    "u": _vowel(0.16, 0.24, -0.62, 0.95, 0.08),
    "ʊ": _vowel(0.26, 0.34, -0.34, 0.60, 0.12),
    "ɔ": _vowel(0.60, 0.62, -0.32, 0.48, 0.12),
    "ɜ": _vowel(0.32, 0.40, -0.18, 0.34, 0.20),
    "a": _vowel(0.74, 0.78, 0.08, 0.00, 0.24),
    "e": _vowel(0.42, 0.48, 0.42, 0.00, 0.34),
    "o": _vowel(0.48, 0.50, -0.42, 0.66, 0.10),
    # consonants
    "p": _LIPS_SHUT, "b": _LIPS_SHUT, "m": _LIPS_SHUT,
    "f": _LIP_TEETH, "v": _LIP_TEETH,
    "s": _HISS, "z": _HISS,
    "ʃ": _HUSH, "ʒ": _HUSH, "ʧ": _HUSH, "ʤ": _HUSH,
    "θ": _consonant(0.9, {_G: 4.0}, jaw=0.16, opening=0.30, lift=0.25, tongue=1.0),
    "ð": _consonant(0.8, {_G: 3.5}, jaw=0.18, opening=0.30, lift=0.22, tongue=0.9),
    "t": _TIP, "d": _TIP, "n": _TIP,
    "ɾ": _consonant(0.4, {_G: 1.2}, jaw=0.22, opening=0.30, lift=0.22, tongue=0.5),
    "T": _consonant(0.4, {_G: 1.2}, jaw=0.22, opening=0.30, lift=0.22, tongue=0.5),
    "l": _consonant(0.7, {_G: 3.0}, jaw=0.28, opening=0.36, lift=0.24, tongue=0.85),
    "ɹ": _consonant(0.9, {_P: 1.6}, jaw=0.22, opening=0.30, width=-0.30, pucker=0.52, lift=0.20),
    "w": _consonant(1.2, {_P: 2.6, _O: 2.0}, jaw=0.12, opening=0.15, width=-0.70, pucker=1.0, lift=0.02),
    "j": _consonant(0.8, jaw=0.14, opening=0.30, width=0.55, lift=0.32),
    "k": _BACK, "ɡ": _BACK, "ŋ": _BACK,
    "h": _consonant(0.15, jaw=0.30, opening=0.38),
    "ʔ": _consonant(0.1, jaw=0.25, opening=0.30),
}  # fmt: skip
#: Sounds that glide from one vowel to another, and where the second begins, as a share of the whole.
GLIDES = {
    "A": ("e", "i", 0.55),
    "I": ("a", "i", 0.6),
    "W": ("a", "ʊ", 0.6),
    "Y": ("ɔ", "i", 0.55),
    "O": ("o", "u", 0.6),
}
BILABIALS = frozenset("pbm")
LABIODENTALS = frozenset("fv")
_STILL = Target(dict.fromkeys(SPEECH, 0.0), 0.9, {_O: 1.8, _J: 0.8, _R: 0.3})


def mouth_track(phones: Sequence[Phone], *, steps: int, offset: float = 0.0) -> Track:
    """What the mouth does, (steps, len(SPEECH)).

    Args:    phones: in order, silences left out; offset: seconds of the first step's middle.
    """
    times = offset + (np.arange(steps) + 0.5) / STEPS_PER_SECOND
    spoken = [part for phone in phones for part in _parts(phone)]
    quiet = _silences(spoken, times[0] - 1.0, times[-1] + 1.0)
    everything = sorted(
        [*((phone, _target(phone)) for phone in spoken), *((phone, _STILL) for phone in quiet)], key=_at
    )
    aims, strengths = _tables([target for _, target in everything])
    felt = _felt([phone for phone, _ in everything], times)
    weights = felt[:, :, None] * strengths[:, None]
    track = (weights * aims[:, None]).sum(0) / (weights.sum(0) + 1e-6)
    track = _smoothed(track)
    _enforce(track, spoken, times)
    return track.astype(np.float32)


def _at(entry: tuple[Phone, Target]) -> float:
    return entry[0].start


def _parts(phone: Phone) -> list[Phone]:
    if phone.symbol not in GLIDES:
        return [phone]
    first, second, share = GLIDES[phone.symbol]
    middle = phone.start + share * (phone.stop - phone.start)
    return [Phone(first, phone.start, middle, phone.stress), Phone(second, middle, phone.stop, phone.stress)]


def _target(phone: Phone) -> Target:
    """A stressed vowel opens wider."""
    target = TARGETS.get(phone.symbol)
    if target is None:
        return Target({}, 0.0)
    if phone.symbol in "ɑæʌɐəɛɪiuʊɔɜaeo":
        wider = 0.88 + 0.22 * phone.stress
        return Target({**target.aims, _J: target.aims[_J] * wider, _O: target.aims[_O] * wider}, target.strength)
    return target


def _silences(spoken: Sequence[Phone], start: float, stop: float) -> list[Phone]:
    """Stretches without a phoneme, as phones of rest; a gap of less than 60 ms is no rest."""
    quiet, at = [], start
    for phone in spoken:
        if phone.start - at > 0.06:
            quiet.append(Phone("", at, phone.start))
        at = max(at, phone.stop)
    quiet.append(Phone("", at, max(stop, at + 0.1)))
    return quiet


def _tables(targets: Sequence[Target]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Aims and strengths, (targets, channels); a channel that is not named has no strength to speak of."""
    aims = np.zeros((len(targets), len(SPEECH)))
    strengths = np.zeros_like(aims)
    for row, target in enumerate(targets):
        for column, channel in enumerate(SPEECH):
            if channel in target.aims:
                aims[row, column] = target.aims[channel]
                strengths[row, column] = target.strengths.get(channel, target.strength)
    return aims, strengths


def _felt(phones: Sequence[Phone], times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """How strongly a phone of strength 1 is felt at every time, (phones, times)."""
    start = np.array([phone.start for phone in phones])[:, None]
    stop = np.array([phone.stop for phone in phones])[:, None]
    # A phone is fully itself in its middle half only.
    edge = 0.25 * np.minimum(stop - start, 0.12)
    before = np.clip(start + edge - times, 0, None)
    after = np.clip(times - (stop - edge), 0, None)
    felt: npt.NDArray[np.float64] = np.exp(-before / _TAU_BEFORE - after / _TAU_AFTER)
    return np.where(before > 0.08 + edge, 0.0, felt) + 1e-9


def _smoothed(track: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    reach = 4
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / (_SMOOTH * STEPS_PER_SECOND)) ** 2)
    kernel /= kernel.sum()
    padded = np.pad(track, ((reach, reach), (0, 0)), mode="edge")
    return np.stack([np.convolve(column, kernel, mode="valid") for column in padded.T], axis=1)


def closures(phones: Sequence[Phone], symbols: frozenset[str]) -> list[tuple[float, float]]:
    """When lips are shut, seconds: long enough that a picture of 40 ms sees it."""
    shut = []
    for phone in phones:
        if phone.symbol in symbols:
            middle, half = (phone.start + phone.stop) / 2, max(0.024, (phone.stop - phone.start) * 0.4)
            shut.append((middle - half, middle + half))
    return shut


def _enforce(track: npt.NDArray[np.float64], phones: Sequence[Phone], times: npt.NDArray[np.float64]) -> None:
    channel = SPEECH.index
    for start, stop in closures(phones, BILABIALS):
        shut = _bump(times, start, stop)
        track[:, channel(_O)] *= 1 - shut
        track[:, channel(_R)] = np.maximum(track[:, channel(_R)], 0.8 * shut)
    for start, stop in closures(phones, LABIODENTALS):
        touching = _bump(times, start, stop)
        track[:, channel(_T)] = np.maximum(track[:, channel(_T)], 0.95 * touching)
        track[:, channel(_O)] += (0.12 - track[:, channel(_O)]) * touching * 0.8


def _bump(times: npt.NDArray[np.float64], start: float, stop: float, *, ramp: float = 0.036) -> npt.NDArray[np.float64]:
    """1 from start to stop, 0 beyond, with soft sides."""
    away = np.maximum(start - times, times - stop)
    bump: npt.NDArray[np.float64] = 0.5 + 0.5 * np.cos(np.pi * np.clip(away / ramp, 0, 1))
    return bump
