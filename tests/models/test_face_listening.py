"""What a listener answers: rules of the teaching scenes, and the figures that look for answers in a face."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from duplexd.models.face import evaluate
from duplexd.models.face.audio import MELS, SILENCE
from duplexd.models.face.checkpoint import load_face
from duplexd.models.face.identity import Identity
from duplexd.models.face.motion import CHANNELS, CONDITION, FRAMES_PER_SECOND, SPEECH, Channel, Motion
from duplexd.models.face.training.lessons import load_pool, save_pool
from duplexd.models.face.training.listening import ANSWER_SECONDS, Series, loudness, moments
from duplexd.models.face.training.scenes import MARGIN, Said, Utterance, act

#: Phrases of a person, seconds: begin and end.
PHRASES = tuple((at, at + 1.6) for at in range(4, 56, 4))


def talk(*phrases: tuple[float, float], seconds: float = 10.0) -> Series:
    """Loudness of phrases with a stressed word in the middle of each."""
    loud = np.zeros(round(seconds * 100))
    for begin, end in phrases:
        loud[round(begin * 100) : round(end * 100)] = 0.6
        middle = round((begin + end) * 50)
        loud[middle - 8 : middle + 8] = 1.0
    return loud


def pool() -> list[Utterance]:
    """A sentence of 1.6 s and a laugh of 1 s: loud, then nothing."""
    voiced = [np.full((steps, MELS), -0.2, np.float16) for steps in (160, 100)]
    tracks = [np.zeros((len(mels) + 2 * MARGIN, len(SPEECH)), np.float32) for mels in voiced]
    return [Utterance(voiced[0], tracks[0], ()), Utterance(voiced[1], tracks[1], (), laugh=True)]


def listener(*said: Said, seed: int = 3) -> Motion:
    calm = np.zeros((60 * FRAMES_PER_SECOND, len(CONDITION)), np.float32)
    return act(pool(), (), said, Identity(), np.random.default_rng(seed), seconds=60, conditions=calm).motion


def phrases() -> tuple[Said, ...]:
    return tuple(Said(0, round(begin * 100), round(end * 100)) for begin, end in PHRASES)


# Moments --------------------------------------------------------------------------------------------------------------


def test_a_phrase_ends_once_and_a_word_is_stressed_once() -> None:
    found = moments(talk((2.0, 4.0)))

    assert [round(one.at, 1) for one in found.ends] == [4.2]
    assert [round(one.at, 1) for one in found.pauses] == [4.5]
    assert len(found.peaks) == 1
    assert 3.0 < found.peaks[0].at < 3.4


def test_a_word_is_no_phrase_and_a_breath_no_end() -> None:
    word = moments(talk((2.0, 2.3)))
    breath = moments(talk((2.0, 3.0), (3.08, 4.0)))

    assert word.ends == ()
    assert len(breath.ends) == 1
    assert breath.ends[0].at > 4.0


@pytest.mark.parametrize("at", [3.05, 4.1, 4.13, 4.3, 4.6])
def test_what_comes_later_changes_no_moment(at: float) -> None:
    """A model that has heard the person until `at` could know every moment that is answered from then on."""
    loud = talk((2.0, 4.0), (5.0, 7.0))
    cut = loud.copy()
    cut[round(at * 100) :] = np.random.default_rng(1).uniform(0, 1.3, len(cut) - round(at * 100))
    found, known = moments(loud), moments(cut)
    for name in ("ends", "peaks", "pauses"):
        before = [[one for one in getattr(each, name) if one.at <= at] for each in (found, known)]
        assert before[0] == before[1], name


def test_two_seconds_are_enough_to_know_a_moment() -> None:
    loud = talk((1.0, 3.0), (5.0, 7.0))
    forgotten = loud.copy()
    forgotten[:480] = 0.0
    whole, part = moments(loud), moments(forgotten)

    assert [one for one in whole.ends if one.at > 6.8] == list(part.ends)
    assert [one for one in whole.pauses if one.at > 6.8] == list(part.pauses)


def test_a_soft_voice_is_listened_to_as_a_loud_one_is() -> None:
    mels = np.random.default_rng(0).uniform(-0.6, 0.2, (200, MELS)).astype(np.float16)
    mels[150:] = SILENCE

    np.testing.assert_allclose(loudness(mels), loudness(mels - np.float16(0.25)), atol=0.01)


# Answers in scenes ----------------------------------------------------------------------------------------------------


def test_most_phrases_are_answered_by_a_nod_in_time() -> None:
    """In scenes with different seeds the head goes down after nearly every phrase, and hardly ever without one."""
    ends = [end for _, end in PHRASES]
    heard = [listener(*phrases(), seed=seed) for seed in range(4)]
    idle = [listener(seed=seed) for seed in range(4)]

    assert evaluate.nods_answered(heard, ends) > 0.9
    assert evaluate.nods_answered(idle, ends) < 0.1


def test_nods_are_the_same_each_time() -> None:
    """What differs from scene to scene after the same phrase is less than what is the same: it can be learned."""
    after = np.stack(
        [
            listener(*phrases(), seed=seed)[round(end * 25) : round((end + 2) * 25), Channel.PITCH]
            for seed in range(4)
            for _, end in PHRASES
        ]
    )
    after -= after[:, :10].mean(1, keepdims=True)

    assert after.mean(0).var() > after.var(0).mean()


def test_a_listener_looks_at_who_talks() -> None:
    heard = np.concatenate([listener(*phrases(), seed=seed) for seed in range(4)])
    alone = np.concatenate([listener(seed=seed) for seed in range(4)])
    contact = [np.abs(motion[:, Channel.GAZE_X] + 2 * motion[:, Channel.YAW]) < 0.12 for motion in (heard, alone)]
    times = np.tile(np.arange(1500) / 25, 4)
    talks = np.any([(times > begin + 1.0) & (times < end + 1.2) for begin, end in PHRASES], axis=0)

    assert contact[0][talks].mean() > 0.9
    assert contact[1].mean() < 0.8


def test_nothing_is_answered_before_it_could_be_heard() -> None:
    """With the same chance, a listener and who is alone move alike until 0.6 s after the first word."""
    alone, heard = listener(), listener(*phrases())
    first = round((PHRASES[0][0] + ANSWER_SECONDS) * FRAMES_PER_SECOND)

    assert np.array_equal(alone[:first, Channel.LEAN], heard[:first, Channel.LEAN])
    assert np.array_equal(alone[:first, Channel.BROW_LEFT], heard[:first, Channel.BROW_LEFT])
    assert heard[first + 20, Channel.LEAN] > alone[first + 20, Channel.LEAN] + 0.1


def test_a_laugh_is_answered_by_a_smile() -> None:
    laughs = listener(Said(1, 1000, 1100))[:, Channel.SMILE]
    talks = listener(Said(0, 1000, 1160))[:, Channel.SMILE]
    after = slice(round(11.6 * 25), round(12.2 * 25))

    assert laughs[: round(11.0 * 25)].max() == 0
    assert laughs[after].mean() > 0.5
    assert talks[after].mean() < 0.4


def test_who_talks_does_not_nod_for_what_was_said_before() -> None:
    """The person ends and the character begins at once: its head is its own."""
    said = (Said(0, 1000, 1160),)
    calm = np.zeros((60 * FRAMES_PER_SECOND, len(CONDITION)), np.float32)
    smiles = [
        act(pool(), own, said, Identity(), np.random.default_rng(1), seconds=60, conditions=calm).motion[
            :, [Channel.SMILE, Channel.BROW_LEFT]
        ]
        for own in ((), (Said(0, 1165, 1325),))
    ]
    after = slice(round(12.5 * 25), round(13.2 * 25))

    assert smiles[0][after, 0].mean() > 0.1
    assert smiles[1][after, 0].mean() < 0.02


# Pool and figures -----------------------------------------------------------------------------------------------------


def test_a_pool_that_was_kept_is_the_pool_that_was_made(tmp_path: Path) -> None:
    path = tmp_path / "pool.pt"
    save_pool(pool(), path)
    for one, other in zip(pool(), load_pool(path), strict=True):
        assert np.array_equal(one.mels, other.mels)
        assert np.array_equal(one.track, other.track)
        assert (one.stresses, one.own, one.laugh) == (other.stresses, other.own, other.laugh)


def test_nods_are_counted_where_they_are_due() -> None:
    """A nod of three degrees 0.6 s after each of two moments; a third one is not answered."""
    motion = np.zeros((250, CHANNELS), np.float32)
    for end in (2.0, 5.0):
        since = np.arange(250) / 25 - end - 0.6
        inside = (since >= 0) & (since < 0.5)
        motion[inside, Channel.PITCH] -= np.radians(1.5) * (1 - np.cos(4 * np.pi * since[inside]))

    assert evaluate.nods_answered([motion], [2.0, 5.0]) == 1.0
    assert evaluate.nods_answered([motion], [2.0, 5.0, 7.0]) == pytest.approx(2 / 3)


def test_a_person_is_attended_to_a_little_later_and_a_little_longer() -> None:
    voice = np.zeros(1000)
    voice[300:500] = 1.0
    told = evaluate.attended(voice, 250)

    assert np.flatnonzero(told)[0] == pytest.approx((3.0 + ANSWER_SECONDS) * 25, abs=1)
    assert np.flatnonzero(told)[-1] == pytest.approx((5.0 + 1.5) * 25, abs=1)


@pytest.mark.weights
@pytest.mark.slow
def test_the_checkpoint_is_seen_to_listen() -> None:
    """The same face with and without the person's sound: only the first one nods, looks and smiles back."""
    from duplexd.models.face.training.narrator import Narrator

    narrator = Narrator()
    person, laugh = evaluate.conversation(narrator)[1], evaluate.laughed(narrator)
    with_sound, without = (
        evaluate.listening_figures(load_face(), person, laugh, heard=heard) for heard in (True, False)
    )

    assert with_sound["nods_answered"] > without["nods_answered"] + 0.4
    assert with_sound["nod_degrees_while_talking"] > 1.6 * without["nod_degrees_while_talking"]
    assert with_sound["eye_contact_while_talking"] > without["eye_contact_while_talking"] + 0.1
    assert with_sound["smile_at_laugh"] > without["smile_at_laugh"] + 0.15
