"""Motion, identity, mouths and scenes: the data of the face, without any network."""

from __future__ import annotations

import numpy as np
import pytest

from duplexd.errors import ModelError
from duplexd.models.face.identity import REFERENCES, Identity, anchor_poses, random_identity
from duplexd.models.face.motion import (
    CHANNELS,
    CONDITION,
    HIGHEST,
    LOWEST,
    SPEECH,
    Channel,
    at_rest,
    clamped,
    condition,
)
from duplexd.models.face.training.mouth import BILABIALS, STEPS_PER_SECOND, TARGETS, Phone, closures, mouth_track
from duplexd.models.face.training.scenes import MARGIN, Said, Utterance, act, make_scene

OPENING, PUCKER, TUCK = (SPEECH.index(channel) for channel in (Channel.OPENING, Channel.PUCKER, Channel.TUCK))


def spoken(symbols: str, *, step: float = 0.1) -> list[Phone]:
    return [Phone(symbol, 0.5 + step * at, 0.5 + step * (at + 1), 1.0) for at, symbol in enumerate(symbols)]


def test_a_condition_names_what_it_does_not_know() -> None:
    with pytest.raises(ModelError, match=r"no anger; it has joy"):
        condition(anger=1.0)
    with pytest.raises(ModelError, match=r"joy=2.0; each lies in -1..1"):
        condition(joy=2.0)
    assert condition(joy=0.5, look_y=-1.0)[[0, CONDITION.index("look_y")]].tolist() == [0.5, -1.0]


def test_only_channels_of_identity_differ_at_rest() -> None:
    with pytest.raises(ModelError, match="'jaw' is no channel of identity"):
        at_rest(jaw=0.1)


def test_motion_outside_its_ranges_is_drawn_at_their_edge() -> None:
    wild = np.full(CHANNELS, 9.0, np.float32)

    assert clamped(wild).tolist() == HIGHEST.tolist()
    assert clamped(-wild).tolist() == LOWEST.tolist()


def test_anchors_show_the_same_person() -> None:
    """Every pose has the identity's own offset, and the neutral one has nothing else."""
    somebody = Identity(rest={"smile": 0.2, "lid_left": -0.1})
    poses, usual = anchor_poses(somebody), anchor_poses(Identity())

    assert poses[REFERENCES.index("neutral")].tolist() == somebody.neutral().tolist()
    assert np.allclose((poses - usual)[:, Channel.SMILE], 0.2, atol=1e-6)
    assert np.allclose((poses - usual)[:, Channel.LID_LEFT], -0.1, atol=1e-6)


def test_random_people_are_different_people() -> None:
    rng = np.random.default_rng(0)
    people = np.stack([random_identity(rng).neutral() for _ in range(50)])

    assert (people.std(0)[[Channel.SMILE, Channel.BROW_LEFT]] > 0.05).all()
    assert people[:, Channel.JAW].std() == 0


# Mouths ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", sorted(BILABIALS))
@pytest.mark.parametrize("vowel", ["ɑ", "i", "u"])
def test_lips_close_between_any_vowels(closed: str, vowel: str) -> None:
    phones = spoken(vowel + closed + vowel)
    track = mouth_track(phones, steps=120)[:, OPENING]
    start, stop = (round(at * STEPS_PER_SECOND) for at in closures(phones, BILABIALS)[0])

    assert track[start : stop + 1].max() < 0.02
    assert track[50:60].max() > 0.1


def test_lips_round_before_the_vowel_that_wants_it() -> None:
    """The "t" of "two" is rounded, that of "tea" is not."""
    two, tea = (mouth_track(spoken("t" + vowel), steps=120)[50:60, PUCKER].mean() for vowel in "ui")

    assert two > tea + 0.3


def test_the_lower_lip_meets_the_teeth_in_f() -> None:
    assert mouth_track(spoken("ɑfɑ"), steps=120)[65, TUCK] > 0.9


def test_a_mouth_without_words_is_still_and_shut() -> None:
    assert np.abs(mouth_track([], steps=100)).max() < 1e-3


def test_a_mouth_moves_no_sooner_than_it_can_be_heard() -> None:
    """More than 80 ms (and the smoothing's 40) before a sound nothing moves: the model could not know."""
    track = mouth_track(spoken("ɑ"), steps=120)

    assert track[:38, OPENING].max() < 0.01
    assert track[48:60, OPENING].max() > 0.4


def test_every_vowel_and_consonant_of_the_voice_has_a_mouth() -> None:
    assert set("ɑæʌɐəɛɪiuʊɔɜpbmfvszʃʒʧʤθðtdnlɹwjkɡŋh") <= set(TARGETS)


# Scenes ---------------------------------------------------------------------------------------------------------------


def pool(steps: int = 150) -> list[Utterance]:
    track = np.zeros((steps + 2 * MARGIN, len(SPEECH)), np.float32)
    track[MARGIN:-MARGIN, OPENING] = 0.5
    return [Utterance(np.zeros((steps, 40), np.float16), track, (0.4,))]


def test_who_only_listens_keeps_the_mouth_shut() -> None:
    said = (Said(0, 200, 350), Said(0, 500, 650))
    scene = act(pool(), (), said, Identity(), np.random.default_rng(2), seconds=20)

    assert scene.motion[:, Channel.OPENING].max() == 0


def test_an_interrupted_mouth_shuts_within_a_chunk() -> None:
    """The voice is cut in the middle of a word; 0.28 s later the lips are closed."""
    scene = act(pool(300), (Said(0, 200, 300, cut=True),), (), Identity(), np.random.default_rng(2), seconds=20)
    opening = scene.motion[:, Channel.OPENING]

    assert opening[70] == pytest.approx(0.5, abs=0.01)
    assert opening[75 + 7 :].max() == 0


def test_people_blink_as_people_do() -> None:
    rng = np.random.default_rng(1)
    lids = np.stack([make_scene(pool(), rng).motion[:, Channel.LID_LEFT] for _ in range(12)])
    shut = lids < 0.4
    per_minute = (shut[:, 1:] & ~shut[:, :-1]).sum() / len(lids)

    assert 10 < per_minute < 22


def test_nods_answer_what_was_heard() -> None:
    """With somebody talking the head nods more than without."""
    said = tuple(Said(0, at, at + 150) for at in range(100, 5600, 300))
    moved = []
    for other in (said, ()):
        pitch = np.concatenate(
            [
                act(pool(), (), other, Identity(), np.random.default_rng(seed), seconds=60).motion[:, Channel.PITCH]
                for seed in range(4)
            ]
        )
        moved.append(np.abs(np.diff(pitch, 2)).mean())

    assert moved[0] > 1.5 * moved[1]
