"""The examination of the face: figures of `duplexd bench face` that need no browser.

Everything is measured on the whole way of a live face (stages, arena, histories), on sentences never said in training,
in the pocket voice. Truth is what the mouth of the teacher does for the phonemes (training/mouth.py); no person was
filmed, so figures say how well the sound is followed, not how a person would look.

    lip_corr               opening against truth while something is said, all sentences together, at the best lag
    lip_lag_frames         that lag; + : the lips are late
    lip_corr_shuffled      the same against the truth of another sentence
    bilabial_closed        share of "p b m" at which the lips are seen shut (opening at most 0.06) within a frame
    listening_mouth_ratio  how much the mouth moves while the person talks, over how much while talking
    blinks_per_min         in a conversation
    boundary_jump_ratio    median change from frame to frame across chunks, over that inside chunks
    core_share             generator, refiner and decoder of one session, as a share of one core
    parts_ms               the same apart: milliseconds of a chunk, and of a frame for the decoder
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from duplexd import clock
from duplexd.models.face.checkpoint import FaceWeights, load_face
from duplexd.models.face.drawing.character import character_names
from duplexd.models.face.drawing.picture import Studio
from duplexd.models.face.identity import SPREAD
from duplexd.models.face.motion import CHUNK_FRAMES, FRAMES_PER_SECOND, IDENTITY, SPEECH, Channel, Motion
from duplexd.models.face.performer import Part, Performer, chunks_of
from duplexd.models.face.training.corpus import HELD_OUT
from duplexd.models.face.training.mouth import BILABIALS, STEPS_PER_SECOND, Phone, Track, closures, mouth_track
from duplexd.models.face.training.narrator import RATE, Narrator
from duplexd.units import INPUT_RATE

Sound = npt.NDArray[np.float32]
LEAD = 1.0  #: seconds of silence before a sentence
SHUT = 0.06
_LAGS = range(-4, 5)
#: Sessions played side by side: as many as a bench machine holds easily.
_TOGETHER = 8


class Sentence(msgspec.Struct, frozen=True):
    voice: Sound  #: 24 kHz, `LEAD` seconds of silence before and one after
    phones: tuple[Phone, ...]  #: seconds from the start of `voice`
    truth: Track  #: 25 frames a second
    frames: slice  #: while something is said


def sentences(narrator: Narrator, texts: Sequence[str] = HELD_OUT) -> list[Sentence]:
    return [_sentence(*narrator.say(text)) for text in texts]


def _sentence(pcm: Sound, phones: Sequence[Phone]) -> Sentence:
    moved = tuple(Phone(phone.symbol, phone.start + LEAD, phone.stop + LEAD, phone.stress) for phone in phones)
    silence = np.zeros(round(LEAD * RATE), np.float32)
    voice = np.concatenate([silence, pcm, silence])
    chunks = chunks_of(len(voice) / RATE)
    per_frame = STEPS_PER_SECOND // FRAMES_PER_SECOND
    track = mouth_track(moved, steps=chunks * CHUNK_FRAMES * per_frame)
    truth = 0.5 * (track[per_frame // 2 - 1 :: per_frame] + track[per_frame // 2 :: per_frame])
    stop = moved[-1].stop
    return Sentence(voice, moved, truth, slice(round(LEAD * FRAMES_PER_SECOND) + 1, int(stop * FRAMES_PER_SECOND)))


# The examination ------------------------------------------------------------------------------------------------------


def bench(
    *, drift_minutes: float = 0.0, people: Sequence[Sound] = (), told: Callable[[str], None] = print
) -> dict[str, Any]:
    """All figures; with `drift_minutes` also the drift of identity with and without anchors over so long.

    Args:    people: recordings of people, 16 kHz, at whose loudness the lips are looked at.
    Raises:  ModelError when the checkpoint is missing; WeightsError when the voice is.
    """
    torch.set_num_threads(1)
    report = examine(load_face(), drift_minutes=drift_minutes, told=told)
    if people:
        report["recorded_person"] = recorded_figures(load_face(), people)
    return report


def examine(weights: FaceWeights, *, drift_minutes: float = 0.0, told: Callable[[str], None] = print) -> dict[str, Any]:
    narrator = Narrator()
    said = sentences(narrator)
    told(f"{len(said)} held-out sentences")
    spoken = _play(weights, said)
    report: dict[str, Any] = lip_figures(said, spoken)
    talk, person = conversation(narrator)
    told("a conversation of a minute, three characters")
    acted = Performer(weights, _parts(talk, person)).play(chunks_of(60))
    report["listening_mouth_ratio"] = listening_mouth_ratio(weights, said)
    report["blinks_per_min"] = round(blinks_per_minute(acted), 1)
    report["boundary_jump_ratio"] = round(boundary_jump_ratio(acted, weights), 3)
    report |= costs(weights, said[0])
    report["ablations"] = ablations(weights, said, talk, person, told=told)
    if drift_minutes:
        report["ablations"]["anchors"] = {
            name: drift(weights, drift_minutes, anchored=anchored, told=told)
            for name, anchored in (("on", True), ("off", False))
        }
    return report


def _play(weights: FaceWeights, said: Sequence[Sentence], **switches: bool) -> list[Motion]:
    """Every sentence, `_TOGETHER` at a time, cut to its own length."""
    played: list[Motion] = []
    for at in range(0, len(said), _TOGETHER):
        some = said[at : at + _TOGETHER]
        longest = max(len(sentence.truth) for sentence in some) // CHUNK_FRAMES
        motions = Performer(weights, [Part(voice=one.voice) for one in some], **switches).play(longest)
        played += [motion[: len(one.truth)] for motion, one in zip(motions, some, strict=True)]
    return played


def lip_figures(said: Sequence[Sentence], spoken: Sequence[Motion]) -> dict[str, Any]:
    opening = [motion[:, Channel.OPENING] for motion in spoken]
    truth = [sentence.truth[:, SPEECH.index(Channel.OPENING)] for sentence in said]
    frames = [sentence.frames for sentence in said]
    by_lag = {lag: _correlation(opening, truth, frames, lag) for lag in _LAGS}
    best = max(by_lag, key=lambda lag: by_lag[lag])
    turned = [*truth[1:], truth[0]]
    both = [slice(a.start, min(a.stop, b.stop)) for a, b in zip(frames, [*frames[1:], frames[0]], strict=True)]
    return {
        "lip_corr": round(by_lag[best], 3),
        "lip_lag_frames": best,
        "lip_corr_shuffled": round(_correlation(opening, turned, both, 0), 3),
        "bilabial_closed": round(_closed(said, opening), 3),
    }


def _correlation(found: Sequence[Motion], truth: Sequence[Track], frames: Sequence[slice], lag: int) -> float:
    """Of all frames together; lag: found[i + lag] against truth[i]."""
    pairs = [
        (one[window.start + lag : window.stop + lag], other[window])
        for one, other, window in zip(found, truth, frames, strict=True)
    ]
    one, other = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return float(np.corrcoef(one, other)[0, 1])


def _closed(said: Sequence[Sentence], opening: Sequence[Motion]) -> float:
    seen = []
    for sentence, gap in zip(said, opening, strict=True):
        for start, stop in closures(sentence.phones, BILABIALS):
            middle = int((start + stop) / 2 * FRAMES_PER_SECOND)
            seen.append(float(gap[max(0, middle - 1) : middle + 2].min()) <= SHUT)
    return float(np.mean(seen))


# A conversation -------------------------------------------------------------------------------------------------------


def conversation(narrator: Narrator, *, seconds: float = 60.0) -> tuple[Sound, Sound]:
    """Own voice at 24 kHz and a lower voice at 16 kHz, turn by turn with pauses, from held-out sentences."""
    own, person = np.zeros(round(seconds * RATE), np.float32), np.zeros(round(seconds * INPUT_RATE), np.float32)
    at, turn = 1.0, 0
    while at < seconds - 5.0:
        pcm = narrator.say(HELD_OUT[turn % len(HELD_OUT)])[0]
        if turn % 4 < 2:
            own[round(at * RATE) :][: len(pcm)] = pcm
            length = len(pcm) / RATE
        else:
            # 15 % slower and lower, at the person's rate.
            step = RATE / INPUT_RATE / 1.15
            lower = np.interp(np.arange(0, len(pcm), step), np.arange(len(pcm)), pcm).astype(np.float32)
            person[round(at * INPUT_RATE) :][: len(lower)] = lower
            length = len(lower) / INPUT_RATE
        at += length + (0.3 if turn % 2 == 0 else 1.2)
        turn += 1
    return own, person


def _parts(own: Sound, person: Sound) -> list[Part]:
    return [Part(character=name, voice=own, person=person) for name in character_names()]


def listening_mouth_ratio(weights: FaceWeights, said: Sequence[Sentence]) -> float:
    some = said[:_TOGETHER]
    talking = _play(weights, some)
    step = RATE / INPUT_RATE
    persons = [
        np.interp(np.arange(0, len(one.voice), step), np.arange(len(one.voice)), one.voice).astype(np.float32)
        for one in some
    ]
    longest = max(len(one.truth) for one in some) // CHUNK_FRAMES
    listening = Performer(weights, [Part(person=person) for person in persons]).play(longest)
    moves = [
        float(
            np.mean(
                [
                    np.abs(np.diff(motion[one.frames, Channel.OPENING])).mean()
                    for motion, one in zip(motions, some, strict=True)
                ]
            )
        )
        for motions in (listening, talking)
    ]
    return round(moves[0] / moves[1], 4)


def blinks_per_minute(motions: Sequence[Motion]) -> float:
    """Times that both lids fall below 0.4 of where they usually are."""
    count, frames = 0, 0
    for motion in motions:
        lids = motion[:, [Channel.LID_LEFT, Channel.LID_RIGHT]].max(1)
        shut = lids < 0.4 * np.median(lids)
        count += int((shut[1:] & ~shut[:-1]).sum())
        frames += len(motion)
    return count / frames * FRAMES_PER_SECOND * 60


def boundary_jump_ratio(motions: Sequence[Motion], weights: FaceWeights) -> float:
    """Change from frame to frame, all channels together in their own deviations."""
    across, inside = [], []
    for motion in motions:
        speed = np.linalg.norm(np.diff(motion, axis=0) / weights.deviation.numpy(), axis=1)
        border = np.arange(1, len(motion)) % CHUNK_FRAMES == 0
        across.append(speed[border])
        inside.append(speed[~border])
    return float(np.median(np.concatenate(across)) / np.median(np.concatenate(inside)))


def recorded_figures(weights: FaceWeights, people: Sequence[Sound]) -> dict[str, float]:
    """A person's recording as own voice. There is no truth of their mouth, so the opening is compared with loudness.

    Returns: correlation at its best lag, that lag, and the correlation with the same loudness turned around.
    """
    rate = RATE / INPUT_RATE
    voices = [
        np.interp(np.arange(0, len(pcm), 1 / rate), np.arange(len(pcm)), pcm).astype(np.float32) for pcm in people
    ]
    chunks = min(len(voice) for voice in voices) * FRAMES_PER_SECOND // RATE // CHUNK_FRAMES
    opening = [
        motion[:, Channel.OPENING]
        for motion in Performer(weights, [Part(voice=voice) for voice in voices]).play(chunks)
    ]
    frame = RATE // FRAMES_PER_SECOND
    loud = [
        np.log(np.sqrt((voice[: chunks * CHUNK_FRAMES * frame].reshape(-1, frame) ** 2).mean(1)) + 1e-3)
        for voice in voices
    ]
    inside = [slice(8, len(gap) - 8) for gap in opening]
    by_lag = {lag: _correlation(opening, loud, inside, lag) for lag in _LAGS}
    best = max(by_lag, key=lambda lag: by_lag[lag])
    return {
        "loudness_corr": round(by_lag[best], 3),
        "lag_frames": best,
        "loudness_corr_shuffled": round(_correlation(opening, [one[::-1] for one in loud], inside, 0), 3),
    }


# Costs ----------------------------------------------------------------------------------------------------------------


def costs(weights: FaceWeights, sentence: Sentence, *, chunks: int = 24) -> dict[str, Any]:
    """CPU time of one session on one thread."""
    performer = Performer(weights, [Part(voice=sentence.voice)])
    performer.play(4)
    began = clock.thread_time()
    motion = np.concatenate([performer.chunk()[0] for _ in range(chunks)])
    model_ms = (clock.thread_time() - began) / 1e6 / chunks
    studio = Studio(size=512, portraits_max=len(character_names()))
    frame_ms = {}
    for name in character_names():
        studio.picture(name, motion[0])
        began = clock.thread_time()
        for frame in motion[: 4 * CHUNK_FRAMES]:
            studio.picture(name, frame)
        frame_ms[name] = (clock.thread_time() - began) / 1e6 / (4 * CHUNK_FRAMES)
    slowest = max(frame_ms.values())
    chunk_ms = 1000 * CHUNK_FRAMES / FRAMES_PER_SECOND
    return {
        "core_share": round((model_ms + CHUNK_FRAMES * slowest) / chunk_ms, 3),
        "parts_ms": {
            "generator and refiner, a chunk": round(model_ms, 2),
            **{f"decoder, a frame of {name}": round(value, 2) for name, value in frame_ms.items()},
        },
    }


# Ablations ------------------------------------------------------------------------------------------------------------


def ablations(
    weights: FaceWeights, said: Sequence[Sentence], own: Sound, person: Sound, *, told: Callable[[str], None]
) -> dict[str, Any]:
    """What each part is worth: the same figures with it and without."""
    table: dict[str, Any] = {"refiner": {}, "listening": {}}
    for name, on in (("on", True), ("off", False)):
        told(f"refiner {name}, listening {name}")
        lips = lip_figures(said, _play(weights, said, refined=on))
        acted = Performer(weights, _parts(own, person), refined=on).play(chunks_of(60))
        table["refiner"][name] = {
            "lip_corr": lips["lip_corr"],
            "bilabial_closed": lips["bilabial_closed"],
            "boundary_jump_ratio": round(boundary_jump_ratio(acted, weights), 3),
        }
        listening = Performer(weights, [Part(character=name, person=person) for name in character_names()], heard=on)
        table["listening"][name] = listening_figures(listening.play(chunks_of(60)))
    return table


def listening_figures(motions: Sequence[Motion]) -> dict[str, float]:
    """How a listener moves: nods (pitch of the head at 1.5 to 3.5 Hz, degrees RMS) and looking at the person."""
    nods, contact = [], []
    for motion in motions:
        pitch = np.degrees(motion[:, Channel.PITCH])
        spectrum = np.fft.rfft(pitch - pitch.mean())
        hertz = np.fft.rfftfreq(len(pitch), 1 / FRAMES_PER_SECOND)
        spectrum[(hertz < 1.5) | (hertz > 3.5)] = 0
        nods.append(float(np.fft.irfft(spectrum, len(pitch)).std()))
        # In contact the eyes undo the head's turning (scenes.GAZE_RADIANS).
        off = motion[:, Channel.GAZE_X] + motion[:, Channel.YAW] / 0.5
        contact.append(float((np.abs(off) < 0.12).mean()))
    return {"nod_degrees": round(float(np.mean(nods)), 3), "eye_contact": round(float(np.mean(contact)), 3)}


def drift(weights: FaceWeights, minutes: float, *, anchored: bool, told: Callable[[str], None]) -> dict[str, float]:
    """Where identity is at the start and at the end of a long idle session, as seen beside its anchors.

    Figures are RMS over identity-bearing channels, in spreads of identities (identity.SPREAD).
    """
    performer = Performer(weights, [Part(character=name) for name in character_names()], anchored=anchored)
    window = max(1, chunks_of(min(300.0, minutes * 15)))
    chunks = max(2 * window, chunks_of(minutes * 60))
    spread = np.array([SPREAD[channel] for channel in IDENTITY], np.float32)
    sums = {
        "first": np.zeros((len(performer.parts), len(IDENTITY))),
        "last": np.zeros((len(performer.parts), len(IDENTITY))),
    }
    for index in range(chunks):
        where = "first" if index < window else "last" if index >= chunks - window else None
        medians = [np.median(motion[:, list(IDENTITY)], axis=0) for motion in performer.chunk()]
        if where:
            sums[where] += np.stack(medians) / window
        if (index + 1) % 1000 == 0:
            told(
                f"drift, anchors {'on' if anchored else 'off'}: {(index + 1) * 0.32 / 60:.0f} of {minutes:.0f} minutes"
            )
    from duplexd.models.face.drawing.character import load_character

    neutral = np.stack([load_character(name).identity.neutral()[list(IDENTITY)] for name in character_names()])

    def rms(x: npt.NDArray[Any]) -> float:
        return round(float(np.sqrt(np.mean((x / spread) ** 2))), 3)

    return {
        "minutes": round(chunks * 0.32 / 60, 1),
        "off_identity_first": rms(sums["first"] - neutral),
        "off_identity_last": rms(sums["last"] - neutral),
        "moved": rms(sums["last"] - sums["first"]),
    }
