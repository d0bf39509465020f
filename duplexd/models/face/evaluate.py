"""The examination of the face: figures of `duplexd bench face` that need no browser.

Everything is measured on the whole way of a live face (stages, arena, histories), on sentences never said in training,
in the pocket voice. Truth is what the mouth of the teacher does for the phonemes (training/mouth.py); no person was
filmed, so figures say how well the sound is followed, not how a person would look.

    lip_corr               opening against truth while something is said, all sentences together, at the best lag
    lip_lag_frames         that lag; + : the lips are late
    lip_onset_offline_ms   from the first sound of a sentence to an opening of 0.3, of face and truth: a mouth
                           that is in time is later than its voice by as much
    lip_corr_shuffled      the same against the truth of another sentence
    bilabial_closed        share of "p b m" at which the lips are seen shut (opening at most 0.06) within a frame
    listening_mouth_ratio  how much the mouth moves while the person talks, over how much while talking
    overlap                the lips again while the person says something else at the same time
    confirming             the lips again on sentences by which nothing was ever chosen
    blinks_per_min         in a conversation
    boundary_jump_ratio    median change from frame to frame across chunks, over that inside chunks
    listening              a listener with the person's sound and without it (`listening_figures`)
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
from duplexd.models.face import audio
from duplexd.models.face.checkpoint import FaceWeights, load_face
from duplexd.models.face.drawing.character import character_names
from duplexd.models.face.drawing.picture import Studio
from duplexd.models.face.identity import SPREAD
from duplexd.models.face.motion import CHUNK_FRAMES, FRAMES_PER_SECOND, IDENTITY, SPEECH, Channel, Motion
from duplexd.models.face.performer import Part, Performer, chunks_of
from duplexd.models.face.training import listening
from duplexd.models.face.training.corpus import CONFIRMING, HELD_OUT, HELD_OUT_LAUGH
from duplexd.models.face.training.mouth import BILABIALS, STEPS_PER_SECOND, Phone, Track, closures, mouth_track
from duplexd.models.face.training.narrator import RATE, Narrator
from duplexd.units import INPUT_RATE

Sound = npt.NDArray[np.float32]
LEAD = 1.0  #: seconds of silence before a sentence
SHUT = 0.06
APART = 0.3  #: an opening that is seen from afar: what `bench face` finds in a browser's picture
AUDIBLE = 10 ** (-45 / 20)
_LAGS = range(-4, 5)
_LAUGH_AT = 4.0
#: A nod that is seen: so many degrees down.
_NOD = 1.5
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
    *,
    drift_minutes: float = 0.0,
    drift_talking: bool = False,
    people: Sequence[Sound] = (),
    told: Callable[[str], None] = print,
) -> dict[str, Any]:
    """All figures; with `drift_minutes` also the drift of identity with and without anchors over so long, in silence or
    in a conversation.

    Args:    people: recordings of people, 16 kHz, at whose loudness the lips are looked at.
    Raises:  ModelError when the checkpoint is missing; WeightsError when the voice is.
    """
    torch.set_num_threads(1)
    report = examine(load_face(), drift_minutes=drift_minutes, drift_talking=drift_talking, told=told)
    if people:
        report["recorded_person"] = recorded_figures(load_face(), people)
    return report


def examine(
    weights: FaceWeights,
    *,
    drift_minutes: float = 0.0,
    drift_talking: bool = False,
    told: Callable[[str], None] = print,
) -> dict[str, Any]:
    narrator = Narrator()
    said = sentences(narrator)
    told(f"{len(said)} held-out sentences")
    spoken = _play(weights, said)
    report: dict[str, Any] = lip_figures(said, spoken)
    told("the same while the person talks over them")
    report["overlap"] = overlap_figures(weights, said, spoken)
    report["lip_onset_offline_ms"] = _onset_figures(said, spoken)
    told(f"{len(CONFIRMING)} confirming sentences")
    confirming = sentences(narrator, CONFIRMING)
    report["confirming"] = lip_figures(confirming, _play(weights, confirming))
    talk, person = conversation(narrator)
    told("a conversation of a minute, each of three characters three times: of fewer blinks are a matter of chance")
    acted = Performer(weights, 3 * _parts(talk, person)).play(chunks_of(60))
    report["listening_mouth_ratio"] = listening_mouth_ratio(weights, said)
    report["blinks_per_min"] = round(blinks_per_minute(acted), 1)
    report["boundary_jump_ratio"] = round(boundary_jump_ratio(acted, weights), 3)
    report |= costs(weights, said[0])
    report["ablations"] = ablations(weights, said, talk, person, told=told)
    told("two minutes of listening, with the person's sound and without")
    _, person = conversation(narrator, seconds=120.0)
    report["ablations"]["listening"] = {
        name: listening_figures(weights, person, laughed(narrator), heard=on)
        for name, on in (("on", True), ("off", False))
    }
    if drift_minutes:
        sounds = conversation(narrator, seconds=120.0) if drift_talking else None
        report["ablations"]["anchors in talk" if drift_talking else "anchors"] = {
            name: drift(weights, drift_minutes, anchored=anchored, refined=refined, sounds=sounds, told=told)
            for name, anchored, refined in (("on", True, True), ("off", False, True), ("on, no refiner", True, False))
        }
    return report


def _play(
    weights: FaceWeights, said: Sequence[Sentence], persons: Sequence[Sound] = (), **switches: Any
) -> list[Motion]:
    """Every sentence, `_TOGETHER` at a time, cut to its own length. `persons`: who talks meanwhile; none: nobody."""
    played: list[Motion] = []
    for at in range(0, len(said), _TOGETHER):
        some = said[at : at + _TOGETHER]
        longest = max(len(sentence.truth) for sentence in some) // CHUNK_FRAMES
        parts = [Part(voice=one.voice) for one in some]
        if persons:
            heard = persons[at : at + _TOGETHER]
            parts = [Part(voice=one.voice, person=person) for one, person in zip(some, heard, strict=True)]
        motions = Performer(weights, parts, **switches).play(longest)
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


def overlap_figures(weights: FaceWeights, said: Sequence[Sentence], alone: Sequence[Motion]) -> dict[str, float]:
    """Both talk at once: the person says another sentence over every one of the character's.

    Returns: the lips against their own truth, p b m shut, and how much of the opening is another than without the
             person: RMS, over that of the opening itself.
    """
    persons = [_lower(one.voice) for one in (*said[1:], said[0])]
    both = _play(weights, said, persons)
    lips = lip_figures(said, both)
    gaps = [
        (one[sentence.frames, Channel.OPENING], other[sentence.frames, Channel.OPENING])
        for sentence, one, other in zip(said, both, alone, strict=True)
    ]
    moved = np.concatenate([one - other for one, other in gaps])
    usual = np.concatenate([other for _, other in gaps])
    return {
        "lip_corr": lips["lip_corr"],
        "bilabial_closed": lips["bilabial_closed"],
        "opening_changed": round(float(np.sqrt(np.mean(moved**2)) / np.sqrt(np.mean(usual**2))), 3),
    }


def onsets_ms(said: Sequence[Sentence], openings: Sequence[npt.NDArray[np.floating[Any]]]) -> list[float]:
    """Of each sentence whose lips part by `APART`: from the first audible sample to the frame in which they are."""
    found = []
    for sentence, gap in zip(said, openings, strict=True):
        sound = int((np.abs(sentence.voice) > AUDIBLE).argmax()) / RATE
        apart = np.flatnonzero(gap[sentence.frames.start - 3 :] > APART)
        if len(apart):
            found.append(1000 * ((sentence.frames.start - 3 + int(apart[0])) / FRAMES_PER_SECOND - sound))
    return found


def _onset_figures(said: Sequence[Sentence], spoken: Sequence[Motion]) -> dict[str, dict[str, float]]:
    both = {
        "face": [motion[:, Channel.OPENING] for motion in spoken],
        "truth": [sentence.truth[:, SPEECH.index(Channel.OPENING)] for sentence in said],
    }
    return {
        name: {f"p{share}": round(float(np.percentile(onsets_ms(said, gaps), share)), 0) for share in (50, 95)}
        for name, gaps in both.items()
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
            lower = _lower(pcm)
            person[round(at * INPUT_RATE) :][: len(lower)] = lower
            length = len(lower) / INPUT_RATE
        at += length + (0.3 if turn % 2 == 0 else 1.2)
        turn += 1
    return own, person


def _lower(pcm: Sound) -> Sound:
    """15 % slower and lower, at the person's rate."""
    step = RATE / INPUT_RATE / 1.15
    lower: Sound = np.interp(np.arange(0, len(pcm), step), np.arange(len(pcm)), pcm).astype(np.float32)
    return lower


def laughed(narrator: Narrator) -> Sound:
    """The person laughs after `_LAUGH_AT` seconds and is then silent."""
    laugh = _lower(narrator.say(HELD_OUT_LAUGH)[0])
    return np.concatenate([np.zeros(round(_LAUGH_AT * INPUT_RATE), np.float32), laugh])


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


def costs(weights: FaceWeights, sentence: Sentence, *, runs: int = 5) -> dict[str, Any]:
    """CPU time of one session on one thread: the middle one of some runs, by the whole."""
    each = sorted((_costs(weights, sentence) for _ in range(runs)), key=lambda run: run["core_share"])
    return each[runs // 2]


def _costs(weights: FaceWeights, sentence: Sentence, *, chunks: int = 24) -> dict[str, Any]:
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
    switches: dict[str, dict[str, dict[str, Any]]] = {
        "refiner": {"on": {"refined": True}, "off": {"refined": False}},
        # What the governor's level `coarse` takes; its keys are those of pure noise, which training never kept.
        "steps": {"2": {}, "1": {"steps": 1}},
    }
    table: dict[str, Any] = {}
    for part, ways in switches.items():
        table[part] = {}
        for name, switch in ways.items():
            told(f"{part} {name}")
            lips = lip_figures(said, _play(weights, said, **switch))
            acted = Performer(weights, _parts(own, person), **switch).play(chunks_of(60))
            table[part][name] = {
                "lip_corr": lips["lip_corr"],
                "bilabial_closed": lips["bilabial_closed"],
                "boundary_jump_ratio": round(boundary_jump_ratio(acted, weights), 3),
            }
    return table


def listening_figures(weights: FaceWeights, person: Sound, laugh: Sound, *, heard: bool) -> dict[str, float]:
    """Three characters listen to a person and say nothing; then somebody laughs.

    nod_degrees       pitch of the head at 1.5 to 3.5 Hz, RMS: all the time; and while the person talks
    nods_answered     share of the ends of the person's phrases after which the head goes down by 1.5 degrees or more,
                      0.5 to 1.1 s after the last sound
    eye_contact       share of time in which the eyes look at the person: while that one talks; and otherwise
    brows, smile      how much further up 0.7 to 1.3 s after the end of a phrase, 1.3 to 2 s after a pause began
    smile_at_laugh    the same 1 to 2 s after a laugh ended
    """
    names = character_names()
    motions = Performer(weights, [Part(character=name, person=person) for name in names], heard=heard).play(
        chunks_of(len(person) / INPUT_RATE)
    )
    cast = [Part(character=name, person=laugh) for name in names for _ in range(2)]
    amused = Performer(weights, cast, heard=heard).play(chunks_of(len(laugh) / INPUT_RATE + 3))
    moments = listening.moments(listening.loudness(mels_of(person)))
    talks = attended(moments.voice, len(motions[0]))
    nods = np.concatenate([nod_band(motion) for motion in motions])
    # In contact the eyes undo the head's turning (scenes.GAZE_RADIANS).
    contact = np.concatenate(
        [np.abs(motion[:, Channel.GAZE_X] + motion[:, Channel.YAW] / 0.5) < 0.12 for motion in motions]
    )
    while_talking = np.tile(talks, len(motions))
    ends = [moment.at - listening.END_SECONDS for moment in moments.ends]
    pauses = [moment.at - listening.PAUSE_SECONDS for moment in moments.pauses]
    laugh_end = [len(laugh) / INPUT_RATE]
    return {
        "nod_degrees": round(float(np.sqrt(np.mean(nods**2))), 3),
        "nod_degrees_while_talking": round(float(np.sqrt(np.mean(nods[while_talking] ** 2))), 3),
        "nods_answered": round(nods_answered(motions, ends), 3),
        "eye_contact_while_talking": round(float(contact[while_talking].mean()), 3),
        "eye_contact_otherwise": round(float(contact[~while_talking].mean()), 3),
        "brows": round(_risen(motions, Channel.BROW_LEFT, ends, 0.7, 1.3), 3),
        "smile": round(_risen(motions, Channel.SMILE, pauses, 1.3, 2.0), 3),
        "smile_at_laugh": round(_risen(amused, Channel.SMILE, laugh_end, 0.5, 1.5, before=3.0), 3),
    }


def mels_of(person: Sound) -> npt.NDArray[np.float16]:
    before = np.zeros(audio.before_samples(INPUT_RATE), np.float32)
    mels = audio.mel_frames(torch.from_numpy(np.concatenate([before, person])), INPUT_RATE)
    return mels.numpy().astype(np.float16)


def attended(voice: npt.NDArray[np.float64], frames: int) -> npt.NDArray[np.bool_]:
    """Frames at which the person was heard between 0.6 and 1.5 s ago: an attentive listener shows it then."""
    first, last = (round(seconds * STEPS_PER_SECOND) for seconds in (listening.ANSWER_SECONDS, 1.5))
    per_frame = STEPS_PER_SECOND // FRAMES_PER_SECOND
    told = np.concatenate([np.zeros(last), voice, np.zeros(frames * per_frame)])
    return np.array([bool(told[(at := frame * per_frame) : at + last - first].any()) for frame in range(frames)])


def nod_band(motion: Motion) -> npt.NDArray[np.float64]:
    """What of the pitch lies at 1.5 to 3.5 Hz, degrees."""
    pitch = np.degrees(motion[:, Channel.PITCH].astype(np.float64))
    spectrum = np.fft.rfft(pitch - pitch.mean())
    hertz = np.fft.rfftfreq(len(pitch), 1 / FRAMES_PER_SECOND)
    spectrum[(hertz < 1.5) | (hertz > 3.5)] = 0
    nods: npt.NDArray[np.float64] = np.fft.irfft(spectrum, len(pitch))
    return nods


def nods_answered(motions: Sequence[Motion], ends: Sequence[float]) -> float:
    """Share of moments (seconds) 0.5 to 1.1 s after which the head is `_NOD` degrees lower than at 0.5 s."""
    seen = []
    for motion in motions:
        pitch = np.degrees(motion[:, Channel.PITCH])
        for end in ends:
            first, last = round((end + 0.5) * FRAMES_PER_SECOND), round((end + 1.1) * FRAMES_PER_SECOND)
            if last <= len(pitch):
                seen.append(pitch[first:last].min() <= pitch[first] - _NOD)
    return float(np.mean(seen))


def _risen(
    motions: Sequence[Motion],
    channel: Channel,
    moments: Sequence[float],
    start: float,
    stop: float,
    *,
    before: float = 0.0,
) -> float:
    """Mean of a channel from `start` to `stop` seconds after moments, over 0.3 s that begin `before` ahead of them."""
    risen = []
    for motion in motions:
        for at in moments:
            first, last = (round((at + seconds) * FRAMES_PER_SECOND) for seconds in (start, stop))
            base = max(0, round((at - before) * FRAMES_PER_SECOND))
            if last <= len(motion):
                risen.append(float(motion[first:last, channel].mean() - motion[base : base + 8, channel].mean()))
    return float(np.mean(risen))


def drift(
    weights: FaceWeights,
    minutes: float,
    *,
    anchored: bool,
    refined: bool = True,
    sounds: tuple[Sound, Sound] | None = None,
    told: Callable[[str], None] = print,
) -> dict[str, float]:
    """Where identity is at the start and at the end of a long session, as seen beside its anchors.

    Args:    refined: False: of the generator's drafts, which follow from each other alone.
             sounds: own voice and the person's, again and again for so long (`conversation`); None: silence. In talk
             mouths and brows move, so a median of a chunk is further from rest at both ends; what counts is `moved`.
    Figures are RMS over identity-bearing channels, in spreads of identities (identity.SPREAD).
    """
    own, person = (
        (np.zeros(0, np.float32),) * 2
        if sounds is None
        else (
            np.resize(sound, round(60 * minutes * rate)) for sound, rate in zip(sounds, (RATE, INPUT_RATE), strict=True)
        )
    )
    performer = Performer(weights, _parts(own, person), anchored=anchored, refined=refined)
    name = f"drift, anchors {'on' if anchored else 'off'}, refiner {'on' if refined else 'off'}"
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
            told(f"{name}: {(index + 1) * 0.32 / 60:.0f} of {minutes:.0f} minutes")
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
