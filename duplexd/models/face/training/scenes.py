"""Scenes: two people talk for a minute, and one of them is watched. Sound of both, and what the face does, 25 times a
second.

1. Who talks when is drawn first; everything the face does follows from it, from its mood and from chance.
2. What the listener does answers what was *heard*, by rule and not by chance (listening.py), and the head is calm while
   it listens: an answer that nothing in the sound tells, or that the head's own wander hides, cannot be learned.
3. Rates and sizes are those of people: 12 to 20 blinks a minute, more where somebody pauses; eye contact rather more
   than half of the time, and nearly always while listening (Argyle & Cook 1976: 40-60 % and 75 %; more here, since it
   is to be seen); nods of one or two strokes at 2 Hz, 2 to 4 degrees.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from duplexd.models.face.identity import Identity, random_identity
from duplexd.models.face.motion import (
    CONDITION,
    FRAMES_PER_SECOND,
    LOOK_MAX,
    MOODS,
    SPEECH,
    Channel,
    Motion,
    clamped,
    condition,
    mood_motion,
)
from duplexd.models.face.training.listening import ANSWER_SECONDS, Moment, loudness, moments
from duplexd.models.face.training.mouth import STEPS_PER_SECOND, Track

Series = npt.NDArray[np.float64]
STEPS_PER_FRAME = STEPS_PER_SECOND // FRAMES_PER_SECOND
SCENE_SECONDS = 60
#: How far eyes turn at 1.0, radians.
GAZE_RADIANS = 0.5
#: A listener attends so long after the last word, beyond `ANSWER_SECONDS`.
ATTENDS_SECONDS = 1.2
#: Nods begin so far apart at least: of phrases, and of a stressed word after any other.
_NOD_APART, _STRESS_NOD_APART = 0.7, 1.3
#: Steps of a mouth's track before and after the sound.
MARGIN = 12


class Utterance(msgspec.Struct, frozen=True):
    """Something said: sound and mouth, 100 steps a second."""

    mels: npt.NDArray[np.float16]  #: (steps, MELS)
    track: Track  #: (MARGIN + steps + MARGIN, len(SPEECH))
    stresses: tuple[float, ...]  #: seconds of stressed vowels
    own: bool = True  #: in the character's own voice; False: made higher or lower
    laugh: bool = False

    @property
    def steps(self) -> int:
        return len(self.mels)


class Said(msgspec.Struct, frozen=True):
    """An utterance on the timeline of a scene."""

    utterance: int  #: index into the pool
    start: int  #: step
    stop: int  #: step; before its end when it was interrupted
    gain: float = 0.0  #: added to normalised log energies
    cut: bool = False


class Scene(msgspec.Struct, frozen=True):
    motion: Motion  #: (frames, CHANNELS)
    conditions: npt.NDArray[np.float32]  #: (frames, len(CONDITION))
    own: tuple[Said, ...]
    other: tuple[Said, ...]
    identity: Identity


def make_scene(pool: Sequence[Utterance], rng: np.random.Generator, *, seconds: int = SCENE_SECONDS) -> Scene:
    own, other = _converse(pool, rng, seconds * STEPS_PER_SECOND)
    return act(pool, own, other, random_identity(rng), rng, seconds=seconds)


def act(
    pool: Sequence[Utterance],
    own: Sequence[Said],
    other: Sequence[Said],
    identity: Identity,
    rng: np.random.Generator,
    *,
    seconds: int,
    conditions: npt.NDArray[np.float32] | None = None,
) -> Scene:
    """What a face does in a conversation that is given."""
    frames = seconds * FRAMES_PER_SECOND
    given = _conditions(frames, rng) if conditions is None else conditions
    stage = _Stage(pool, own, other, identity, given, frames, rng)
    return Scene(clamped(stage.play()), given, tuple(own), tuple(other), identity)


# Who talks when -------------------------------------------------------------------------------------------------------


def _converse(pool: Sequence[Utterance], rng: np.random.Generator, steps: int) -> tuple[list[Said], list[Said]]:
    own: list[Said] = []
    other: list[Said] = []
    at = int(rng.integers(20, 250))
    mine = bool(rng.random() < 0.5)
    gain = float(rng.uniform(-0.6, 0.3))
    while at < steps:
        if rng.random() < 0.18:
            at += int(rng.integers(150, 800))
        if mine:
            said = _turn(pool, rng, at, steps, count=int(rng.integers(2, 5)), gain=float(rng.normal(0, 0.08)), own=0.65)
            if said and rng.random() < 0.22:
                said, at = _interrupted(said, rng)
                other += _turn(pool, rng, max(0, at - int(rng.integers(10, 60))), steps, count=1, gain=gain)
                own += said
                at = other[-1].stop if other else at
            else:
                own += said
                at = said[-1].stop if said else steps
        else:
            said = _turn(pool, rng, at, steps, count=int(rng.integers(1, 5)), gain=gain, laughs=0.14)
            other += said
            at = said[-1].stop if said else steps
        at += int(rng.integers(-40, 20)) if rng.random() < 0.12 else int(rng.integers(15, 110))
        mine = not mine if rng.random() < 0.85 else mine
    return own, other


def _turn(
    pool: Sequence[Utterance],
    rng: np.random.Generator,
    at: int,
    steps: int,
    *,
    count: int,
    gain: float,
    own: float = 0.0,
    laughs: float = 0.02,
) -> list[Said]:
    """Clauses with pauses between them; one voice for all, with probability `own` the character's own.

    `laughs`: how many of them are laughs, where the pool has any.
    """
    voice = bool(rng.random() < own)
    funny = {one.laugh for one in pool}
    said = []
    for _ in range(count):
        laugh = (True in funny and rng.random() < laughs) or False not in funny
        index = int(rng.integers(len(pool)))
        while pool[index].laugh != laugh or (voice and not pool[index].own):
            index = int(rng.integers(len(pool)))
        stop = at + pool[index].steps
        if stop + MARGIN >= steps:
            break
        said.append(Said(index, at, stop, gain))
        at = stop + int(rng.integers(2, 55))
    return said


def _interrupted(said: list[Said], rng: np.random.Generator) -> tuple[list[Said], int]:
    """The turn up to a moment in its middle, and that moment."""
    which = int(rng.integers(len(said)))
    one = said[which]
    stop = int(rng.integers(one.start + 20, max(one.start + 21, one.stop)))
    return [*said[:which], Said(one.utterance, one.start, stop, one.gain, cut=True)], stop


def _conditions(frames: int, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Moods that last 4 to 18 s, and somebody to look at who moves now and then."""
    given = np.zeros((frames, len(CONDITION)), np.float32)
    at = 0
    while at < frames:
        stop = at + int(rng.uniform(4, 18) * FRAMES_PER_SECOND)
        mood: dict[str, float] = {}
        if rng.random() < 0.62:
            for name in rng.choice(list(MOODS), size=1 if rng.random() < 0.85 else 2, replace=False):
                mood[str(name)] = float(rng.uniform(0.3, 1.0))
        given[at:stop] = condition(**mood)
        at = stop
    at = 0
    look = np.zeros(2, np.float32)
    while at < frames:
        stop = at + int(rng.uniform(6, 30) * FRAMES_PER_SECOND)
        given[at:stop, -2:] = look
        look = (
            np.zeros(2, np.float32) if rng.random() < 0.4 else np.clip(rng.normal(0, (0.25, 0.12)), -LOOK_MAX, LOOK_MAX)
        )
        at = stop
    return given


# What the face does ---------------------------------------------------------------------------------------------------


class _Stage:
    """One performance. Times are seconds; series have one value a frame."""

    def __init__(
        self,
        pool: Sequence[Utterance],
        own: Sequence[Said],
        other: Sequence[Said],
        identity: Identity,
        conditions: npt.NDArray[np.float32],
        frames: int,
        rng: np.random.Generator,
    ) -> None:
        self.pool, self.own, self.other = pool, own, other
        self.identity, self.conditions, self.rng = identity, conditions, rng
        self.frames = frames
        self.times = (np.arange(frames) + 0.5) / FRAMES_PER_SECOND
        self.motion = np.tile(identity.neutral().astype(np.float64), (frames, 1))
        self.talking = self._active(own)
        self.heard = moments(self._loudness(other))
        self.attentive = self._attentive() * (1 - self.talking)

    def play(self) -> Motion:
        self._head()
        self._moods()
        self._beats()
        self._answer()
        self._gaze()
        self._breath()
        self._blinks()
        self._mouth()
        return self.motion.astype(np.float32)

    def _active(self, said: Sequence[Said]) -> Series:
        """1 while somebody talks, short pauses included, with soft sides."""
        active = np.zeros(self.frames)
        for one in said:
            active[one.start // STEPS_PER_FRAME : -(-(one.stop + 30) // STEPS_PER_FRAME)] = 1.0
        return _eased(active, 0.25)

    def _loudness(self, said: Sequence[Said]) -> Series:
        loud = np.zeros(self.frames * STEPS_PER_FRAME)
        for one in said:
            here = loud[one.start : one.stop]
            here[:] = np.maximum(here, loudness(self.pool[one.utterance].mels)[: len(here)])
        return loud

    def _attentive(self) -> Series:
        """1 while the person was heard talking a moment ago."""
        late, long_ = (round(seconds * STEPS_PER_SECOND) for seconds in (ANSWER_SECONDS, ATTENDS_SECONDS))
        voice = np.concatenate([np.zeros(late + long_), self.heard.voice])
        lately = np.cumsum(voice)[long_:] - np.cumsum(voice)[:-long_] > 0
        return _eased(lately[: len(self.heard.voice) : STEPS_PER_FRAME].astype(np.float64), 0.3)

    def _add(self, channel: Channel, values: Series | float) -> None:
        self.motion[:, channel] += values

    def _bump(self, at: float, rise: float, hold: float, fall: float) -> Series:
        """0, up to 1, down to 0, without corners."""
        up = np.clip((self.times - at) / rise, 0, 1)
        down = np.clip((self.times - at - rise - hold) / fall, 0, 1)
        bump: Series = (up * up * (3 - 2 * up)) * (1 - down * down * (3 - 2 * down))
        return bump

    # Head

    def _head(self) -> None:
        calm = self.identity.liveliness * (0.75 - 0.5 * self.attentive)
        lively = self.identity.liveliness * 0.9 * self.talking
        sizes = {Channel.YAW: 0.060, Channel.PITCH: 0.034, Channel.ROLL: 0.028, Channel.SWAY: 0.035, Channel.LEAN: 0.12}
        for channel, size in sizes.items():
            self._add(channel, calm * size * _wander(self.frames, self.rng, seconds=1.1))
            self._add(channel, lively * size * _wander(self.frames, self.rng, seconds=0.6))
        look = (
            _eased(self.conditions[:, -2].astype(np.float64), 0.4),
            _eased(self.conditions[:, -1].astype(np.float64), 0.4),
        )
        self._add(Channel.YAW, 0.4 * GAZE_RADIANS * look[0])
        self._add(Channel.PITCH, 0.4 * GAZE_RADIANS * look[1])
        # Who attends comes nearer and tilts the head further to where it leans anyway.
        self._add(Channel.LEAN, 0.20 * self.attentive)
        side = 1.0 if self.identity.rest.get("roll", 0.0) >= 0 else -1.0
        self._add(Channel.ROLL, side * 0.03 * self.attentive)
        for brow in (Channel.BROW_LEFT, Channel.BROW_RIGHT):
            self._add(brow, 0.09 * self.attentive + 0.05 * _wander(self.frames, self.rng, seconds=1.2))

    def _moods(self) -> None:
        strengths = self.conditions[:, : len(MOODS)].astype(np.float64) * self.identity.expression
        strengths = np.stack([_eased(column, 0.30, delay=0.12) for column in strengths.T], 1)
        strengths *= 1 + 0.10 * _wander(self.frames, self.rng, seconds=2.0)[:, None]
        each = np.stack([mood_motion({name: 1.0}) for name in MOODS])
        self.motion += strengths @ each
        self.thinking = strengths[:, list(MOODS).index("thought")]

    def _beats(self) -> None:
        """Stressed words move the head and sometimes the brows."""
        for one in self.own:
            for stress in self.pool[one.utterance].stresses:
                at = one.start / STEPS_PER_SECOND + stress
                if stress * STEPS_PER_SECOND > one.stop - one.start:
                    continue
                if self.rng.random() < 0.45:
                    size = self.identity.liveliness * self.rng.uniform(0.02, 0.055)
                    self._add(Channel.PITCH, -size * self._bump(at - 0.10, 0.14, 0.02, 0.24))
                if self.rng.random() < 0.20:
                    raised = self.rng.uniform(0.12, 0.32) * self._bump(at - 0.08, 0.14, 0.10, 0.32)
                    self._add(Channel.BROW_LEFT, raised)
                    self._add(Channel.BROW_RIGHT, raised)

    def _answer(self) -> None:
        """Nods, brows and smiles for what the person says; who talks keeps them back."""
        ends = [(one, True) for one in self.heard.ends]
        peaks = [(one, False) for one in self.heard.peaks]
        last = -9.0
        for one, of_phrase in sorted(ends + peaks, key=lambda pair: pair[0].at):
            if one.at - last < (_NOD_APART if of_phrase else _STRESS_NOD_APART):
                continue
            last = one.at
            if of_phrase:
                self._nod(one, size=0.042 + 0.034 * one.strength, strokes=2)
                self._raise_brows(one, 0.08 + 0.12 * one.strength)
            else:
                self._nod(one, size=0.040 * one.strength, strokes=1)
                self._raise_brows(one, 0.10 * one.strength)
        for one in self.heard.pauses:
            if self.rng.random() < 0.85:
                self._smile(one.at, size=0.20 + 0.10 * one.strength, hold=0.7)
        for said in self.other:
            if self.pool[said.utterance].laugh:
                # Two syllables tell a laugh.
                length = (said.stop - said.start) / STEPS_PER_SECOND
                self._smile(said.start / STEPS_PER_SECOND + 0.5, size=0.6, hold=max(0.4, length - 0.4))

    def _nod(self, one: Moment, *, size: float, strokes: int) -> None:
        size *= self.identity.liveliness * self.rng.uniform(0.9, 1.1)
        pace = 2.1
        since = self.times - one.at - ANSWER_SECONDS
        inside = (since >= 0) & (since <= strokes / pace)
        stroke = -size * 0.5 * (1 - np.cos(2 * np.pi * pace * since)) * np.exp(-0.9 * np.clip(since, 0, None))
        self._add(Channel.PITCH, np.where(inside, stroke, 0.0) * (1 - self.talking))

    def _raise_brows(self, one: Moment, size: float) -> None:
        raised = size * self._bump(one.at + ANSWER_SECONDS, 0.18, 0.15, 0.45) * (1 - self.talking)
        self._add(Channel.BROW_LEFT, raised)
        self._add(Channel.BROW_RIGHT, raised)

    def _smile(self, at: float, *, size: float, hold: float) -> None:
        smile = size * self.identity.expression * self._bump(at + ANSWER_SECONDS, 0.35, hold, 0.9) * (1 - self.talking)
        self._add(Channel.SMILE, smile)
        self._add(Channel.SQUINT, 0.5 * smile)

    # Eyes

    def _gaze(self) -> None:
        """Contact and looking away, in jumps. In contact the eyes undo the turning of the head."""
        x, y = np.zeros(self.frames), np.zeros(self.frames)
        away = np.zeros(self.frames)
        at, contact = 0, True
        self.jumps: list[int] = []
        while at < self.frames:
            talking, listening = self.talking[at] > 0.5, self.attentive[at] > 0.5
            if contact:
                mean = 6.0 if listening else 1.7 if talking else 2.0
                shift = np.zeros(2)
            else:
                mean = 0.3 if listening else 0.9 if talking else 1.7
                side = self.rng.choice([-1, 1])
                shift = np.array([side * self.rng.uniform(0.2, 0.5), self.rng.uniform(-0.25, 0.25)])
            stop = min(self.frames, at + max(5, int(self.rng.exponential(mean) * FRAMES_PER_SECOND)))
            self.jumps.append(at)
            called = np.flatnonzero(self.attentive[at:stop] > 0.5) if not listening else np.zeros(0, int)
            if len(called):
                # Somebody begins to talk: look at them.
                stop = at + max(1, int(called[0]))
            while at < stop:
                end = min(stop, at + int(self.rng.uniform(0.35, 1.3) * FRAMES_PER_SECOND) + 2)
                small = self.rng.normal(0, 0.028, 2)
                x[at:end], y[at:end] = shift + small
                away[at:end] = not contact
                at = end
            contact = not contact or bool(len(called)) or self.rng.random() < 0.15
        x, y, away = (_saccade(series) for series in (x, y, away))
        # Who thinks looks at nobody.
        kept = np.clip(1 - away - np.clip(self.thinking, 0, 1), 0, 1)
        look_x, look_y = (_saccade(self.conditions[:, index].astype(np.float64)) for index in (-2, -1))
        self._add(Channel.GAZE_X, x + kept * (look_x - self.motion[:, Channel.YAW] / GAZE_RADIANS))
        self._add(Channel.GAZE_Y, y + kept * (look_y - self.motion[:, Channel.PITCH] / GAZE_RADIANS))

    def _blinks(self) -> None:
        lids = np.zeros(self.frames)
        ends = {(one.stop + 10) // STEPS_PER_FRAME for one in self.own if self.rng.random() < 0.35}
        for one in self.heard.ends:
            if self.rng.random() < 0.3:
                ends.add(round((one.at + ANSWER_SECONDS) * FRAMES_PER_SECOND))
        jumps = {at for at in self.jumps if self.rng.random() < 0.22}
        last = -1.0
        for frame in range(self.frames):
            at = frame / FRAMES_PER_SECOND
            due = frame in ends or frame in jumps or self.rng.random() < 0.18 / FRAMES_PER_SECOND
            if due and at - last > 0.7:
                last = at
                depth = 1.0 if self.rng.random() < 0.85 else self.rng.uniform(0.7, 0.9)
                lids = np.maximum(lids, depth * self._bump(at, 0.085, 0.03, 0.17))
        gaze_y, squint = self.motion[:, Channel.GAZE_Y], self.motion[:, Channel.SQUINT]
        for lid in (Channel.LID_LEFT, Channel.LID_RIGHT):
            open_ = self.motion[:, lid] + 0.28 * np.clip(gaze_y, -0.8, 0.6) - 0.16 * squint
            self.motion[:, lid] = np.clip(open_, 0.25, 1.25) * (1 - lids)

    def _breath(self) -> None:
        pace = 0.24 + 0.03 * _wander(self.frames, self.rng, seconds=3.0)
        calm = 0.35 * np.sin(2 * np.pi * np.cumsum(pace) / FRAMES_PER_SECOND + self.rng.uniform(0, 6.28))
        self._add(Channel.BREATH, calm * (1 - 0.5 * self.talking))
        before: Said | None = None
        for one in self.own:
            if before is None or one.start - before.stop > 40:
                self._add(Channel.BREATH, 0.5 * self._bump(one.start / STEPS_PER_SECOND - 0.25, 0.3, 0.1, 1.6))
            before = one

    # Mouth

    def _mouth(self) -> None:
        speech = np.zeros((self.frames * STEPS_PER_FRAME, len(SPEECH)))
        for one in self.own:
            _speak(speech, self.pool[one.utterance].track, one)
        middle = STEPS_PER_FRAME // 2
        sampled = 0.5 * (speech[middle - 1 :: STEPS_PER_FRAME] + speech[middle::STEPS_PER_FRAME])
        for column, channel in enumerate(SPEECH):
            wider = self.identity.articulation if channel in (Channel.JAW, Channel.OPENING) else 1.0
            self._add(channel, wider * sampled[:, column])
        # Rounded lips leave the corners no room to smile.
        self.motion[:, Channel.SMILE] *= 1 - 0.4 * np.clip(self.motion[:, Channel.PUCKER], 0, 1)


def _speak(speech: Series, track: Track, one: Said) -> None:
    """Lay a track on the timeline; where it overlaps its neighbour's margin the wider mouth wins."""
    length = one.stop - one.start + 2 * MARGIN
    part = track[:length].astype(np.float64)
    if one.cut:
        # The voice stops in the middle: the mouth shuts within 0.2 s.
        left = np.clip((one.stop - one.start + MARGIN - np.arange(len(track))) / 1.0 + 20, 0, 20) / 20
        part = (track * (left * left * (3 - 2 * left))[:, None])[: length + 20].astype(np.float64)
    start = one.start - MARGIN
    low, high = max(0, start), min(len(speech), start + len(part))
    piece, here = part[low - start : high - start], speech[low:high]
    here[:] = np.where(np.abs(piece) > np.abs(here), piece, here)


def _wander(frames: int, rng: np.random.Generator, *, seconds: float) -> Series:
    """Smooth noise of unit size that forgets itself in about so many seconds."""
    keep = np.exp(-1 / (seconds * FRAMES_PER_SECOND))
    noise = rng.normal(size=frames + 400)
    for _ in range(2):
        noise = _one_pole(noise, keep)
    noise = noise[400:]
    # Two poles of `keep` leave (1 + keep^2) / (1 + keep)^3 * (1 - keep) of the variance.
    out: Series = noise / np.sqrt((1 - keep) * (1 + keep**2) / (1 + keep) ** 3)
    return out


def _one_pole(x: Series, keep: float) -> Series:
    """y[n] = keep y[n-1] + (1 - keep) x[n]."""
    out = np.empty_like(x)
    y = 0.0
    for index, value in enumerate(x.tolist()):
        y = keep * y + (1 - keep) * value
        out[index] = y
    return out


def _eased(x: Series, seconds: float, *, delay: float = 0.0) -> Series:
    """Follow x without corners: two poles, so that speed is continuous too."""
    late = round(delay * FRAMES_PER_SECOND)
    if late:
        x = np.concatenate([np.full(late, x[0]), x[:-late]])
    keep = float(np.exp(-1 / (seconds * FRAMES_PER_SECOND / 2)))
    y = np.concatenate([np.full(1, x[0]), x]) - x[0]
    eased: Series = _one_pole(_one_pole(y, keep), keep)[1:] + x[0]
    return eased


def _saccade(x: Series) -> Series:
    """A jump takes two frames."""
    before = np.concatenate([x[:1], x[:-1]])
    out: Series = 0.55 * x + 0.45 * before
    return out
