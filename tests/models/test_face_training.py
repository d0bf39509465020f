"""Teaching: resumable to the bit, and figures that find what they should."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from faces import TINY, made_up_lessons, random_face, random_net

from duplexd.models.face import evaluate
from duplexd.models.face.checkpoint import load_face
from duplexd.models.face.contract import FaceSuite
from duplexd.models.face.evaluate import Sentence, blinks_per_minute, boundary_jump_ratio, lip_figures
from duplexd.models.face.motion import CHANNELS, CHUNK_FRAMES, SPEECH, Channel
from duplexd.models.face.net import blended
from duplexd.models.face.performer import Part, Performer
from duplexd.models.face.training import teach
from duplexd.models.face.training.lessons import Lesson, Sampler, statistics
from duplexd.models.face.training.mouth import Phone
from duplexd.models.face.training.teach import GENERATOR_TIMES, Course, School


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_a_course_that_was_stopped_ends_as_if_it_had_not_been(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teach, "SAVE_STEPS", 1)
    monkeypatch.setattr(teach, "CLIPS", 2)
    monkeypatch.setattr(teach, "CHUNKS", 3)
    lessons, course = made_up_lessons(), Course(flow=2, distil=2, refine=1)
    ends = []
    for name, stops in (("whole", ()), ("stopped", ((1, 0, 0), (2, 1, 0)))):
        folder = tmp_path / name
        folder.mkdir()
        for done in stops:
            school = School(lessons, course, folder)
            monkeypatch.setattr(
                school,
                "course",
                msgspec.structs.replace(course, **dict(zip(("flow", "distil", "refine"), done, strict=True))),
            )
            monkeypatch.setattr(school, "_rate", lambda step, count, *, first: first * 0.5)
            school.teach(lambda: 0.0)
            state = torch.load(folder / "state.pt", weights_only=True)
            torch.save({**state, "course": msgspec.to_builtins(course)}, folder / "state.pt")
        school = School(lessons, course, folder)
        monkeypatch.setattr(school, "_rate", lambda step, count, *, first: first * 0.5)
        school.teach(lambda: 0.0)
        ends.append(teach.graduate(school))

    for one, other in zip(ends[0].refiner.parameters(), ends[1].refiner.parameters(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(ends[0].generator.parameters(), ends[1].generator.parameters(), strict=True):
        assert torch.equal(one, other)


def test_another_course_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teach, "CLIPS", 2)
    monkeypatch.setattr(teach, "CHUNKS", 2)
    lessons = made_up_lessons(1)
    School(lessons, Course(flow=1, distil=0, refine=0), tmp_path).teach(lambda: 0.0)
    entry = json.loads((tmp_path / "curve.jsonl").read_text().splitlines()[0])

    assert entry["phase"] == "flow"
    with pytest.raises(SystemExit, match="belongs to another course"):
        School(lessons, Course(flow=9), tmp_path)


def test_a_further_course_begins_where_the_earlier_one_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All three networks go on from their own ends: a refiner is not made from a generator again."""
    monkeypatch.setattr(teach, "CLIPS", 2)
    monkeypatch.setattr(teach, "CHUNKS", 2)
    lessons, first, second = made_up_lessons(1), tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    earlier = School(lessons, Course(flow=1, distil=1, refine=1), first)
    earlier.teach(lambda: 0.0)
    later = School(lessons, Course(flow=0, distil=0, refine=1, lips=8.0), second, after=first)
    generator, refiner = later.ema["distil"].state_dict(), later.ema["refine"].state_dict()
    before = {key: value.clone() for key, value in refiner.items()}
    later.teach(lambda: 0.0)

    for key, value in earlier.ema["distil"].state_dict().items():
        assert torch.equal(generator[key], value)
    for key, value in earlier.ema["refine"].state_dict().items():
        assert torch.equal(before[key], value)
    assert not torch.equal(later.ema["refine"].last.weight, before["last.weight"])


def test_errors_of_the_lips_count_as_much_as_a_course_says() -> None:
    one, more = (teach.weights_of(Course(lips=lips)) for lips in (3.0, 8.0))

    assert one.mean() == pytest.approx(1.0)
    assert more.mean() == pytest.approx(1.0)
    assert more[Channel.OPENING] / more[Channel.YAW] == pytest.approx(8.0)
    assert one[Channel.OPENING] / one[Channel.YAW] == pytest.approx(3.0)


def test_a_batch_has_the_windows_of_the_live_stages() -> None:
    """One chunk after another from memory gives what all chunks side by side give: training sees what serving does."""
    lessons = made_up_lessons()
    rng = np.random.default_rng(0)
    clip = Sampler(lessons, TINY, *statistics(lessons), rng).draw(3, 5, cuts=0.4)
    lesson = Lesson(random_net(), clip)
    torch.manual_seed(0)
    with torch.no_grad():
        history = blended(clip.motion, torch.randn_like(clip.motion), GENERATOR_TIMES[-1])
        lesson.remember(history, GENERATOR_TIMES[-1])
        x = torch.randn_like(clip.motion)
        together = lesson.velocity(x, torch.full(clip.kept.shape, 0.7))
        for chunk in range(5):
            alone = lesson.one(x[:, chunk], 0.7, chunk, keep=False)
            torch.testing.assert_close(alone, together[:, chunk], atol=1e-5, rtol=0)


def test_chunks_of_a_batch_do_not_see_what_comes_later() -> None:
    lessons = made_up_lessons()
    clip = Sampler(lessons, TINY, *statistics(lessons), np.random.default_rng(0)).draw(2, 4, cuts=0.0)
    with torch.no_grad():
        outputs = []
        for later in (clip.motion[:, 3], -clip.motion[:, 3]):
            motion = torch.cat([clip.motion[:, :3], later[:, None]], 1)
            lesson = Lesson(random_net(), clip)
            lesson.remember(motion, 0.0)
            outputs.append(lesson.velocity(motion, torch.full(clip.kept.shape, 0.5)))

    assert torch.equal(outputs[0][:, :3], outputs[1][:, :3])
    assert not torch.equal(outputs[0][:, 3], outputs[1][:, 3])


# Figures --------------------------------------------------------------------------------------------------------------


def sentence(seed: int) -> tuple[Sentence, np.ndarray]:
    """Smooth noise as truth, and what a perfect face would do."""
    rng = np.random.default_rng(seed)
    truth = np.zeros((80, len(SPEECH)), np.float32)
    truth[20:70, SPEECH.index(Channel.OPENING)] = np.abs(np.convolve(rng.normal(size=54), np.ones(5) / 3, mode="valid"))
    phones = (Phone("b", 1.6, 1.68),)
    truth[40:43, SPEECH.index(Channel.OPENING)] = 0.0
    motion = np.zeros((80, CHANNELS), np.float32)
    motion[:, Channel.OPENING] = truth[:, SPEECH.index(Channel.OPENING)]
    return Sentence(np.zeros(1, np.float32), phones, truth, slice(20, 70)), motion


def test_lips_that_are_right_score_one_and_late_lips_are_told() -> None:
    said, right = zip(*(sentence(seed) for seed in range(6)), strict=True)
    figures = lip_figures(said, right)
    late = lip_figures(said, [np.roll(motion, 2, axis=0) for motion in right])

    assert figures["lip_corr"] == 1.0
    assert figures["lip_lag_frames"] == 0
    assert figures["bilabial_closed"] == 1.0
    assert abs(figures["lip_corr_shuffled"]) < 0.4
    assert late["lip_lag_frames"] == 2


def test_the_onset_of_lips_counts_from_the_first_sound() -> None:
    """Sound from 0.82 s on, lips apart from frame 22 (0.88 s) on; a mouth that stays shut is left out."""
    said, _ = sentence(1)
    voice = np.zeros(80 * 960, np.float32)
    voice[round(0.82 * 24_000) :] = 0.1
    said = msgspec.structs.replace(said, voice=voice)
    gap = np.zeros(80, np.float32)
    gap[22:] = 0.5

    assert evaluate.onsets_ms([said, said], [gap, np.zeros(80, np.float32)]) == [pytest.approx(60.0, abs=0.1)]


def test_lips_that_never_close_are_told() -> None:
    said, motion = sentence(1)
    motion[:, Channel.OPENING] = np.maximum(motion[:, Channel.OPENING], 0.2)

    assert lip_figures([said, said], [motion, motion])["bilabial_closed"] == 0.0


def test_blinks_are_counted() -> None:
    motion = np.zeros((25 * 60, CHANNELS), np.float32)
    motion[:, [Channel.LID_LEFT, Channel.LID_RIGHT]] = 1.0
    for at in range(50, 1500, 150):
        motion[at : at + 4, [Channel.LID_LEFT, Channel.LID_RIGHT]] = 0.1
    motion[1495:, Channel.LID_LEFT] = 0.0  # a wink is no blink

    assert blinks_per_minute([motion]) == pytest.approx(10.0)


def test_a_jump_between_chunks_is_told() -> None:
    weights = random_face()
    even = np.cumsum(np.full((800, CHANNELS), 0.01), 0).astype(np.float32)
    jumping = even + 0.03 * (np.arange(800) // CHUNK_FRAMES)[:, None].astype(np.float32)

    assert boundary_jump_ratio([even], weights) == pytest.approx(1.0, abs=0.01)
    assert boundary_jump_ratio([jumping], weights) == pytest.approx(4.0, abs=0.1)


# The checkpoint that comes with duplexd -------------------------------------------------------------------------------


def test_the_checkpoint_keeps_the_contract() -> None:
    torch.set_num_threads(1)
    findings = FaceSuite(load_face()).findings()

    assert [finding for finding in findings if finding.fault] == []


@pytest.mark.slow
def test_anchors_hold_who_it_is() -> None:
    """Twenty-five seconds of silence: beside its anchors the face stays who it is, without them it is somebody else."""
    on, off = (evaluate.drift(load_face(), 0.4, anchored=anchored) for anchored in (True, False))

    assert on["off_identity_last"] < 0.5
    assert off["off_identity_last"] > 2 * on["off_identity_last"]
    assert on["moved"] < 0.5


def test_drift_is_also_looked_at_in_drafts() -> None:
    """What a face without its refiner would show is another motion, of the same names."""
    weights = random_face()
    shown, drafts = (evaluate.drift(weights, 0.1, anchored=True, refined=refined) for refined in (True, False))

    assert shown["minutes"] == drafts["minutes"]
    assert shown["off_identity_first"] != drafts["off_identity_first"]


def test_drift_is_also_looked_at_while_both_talk() -> None:
    """The sounds are heard again and again: the mouth moves to the end, and the face is somebody's all the time."""
    rng = np.random.default_rng(0)
    sounds = (
        (0.2 * rng.normal(size=24_000)).astype(np.float32),
        (0.2 * rng.normal(size=16_000)).astype(np.float32),
    )
    weights = random_face()
    calm, talk = (evaluate.drift(weights, 0.1, anchored=True, sounds=given) for given in (None, sounds))

    assert calm["minutes"] == talk["minutes"]
    assert calm != talk


def test_a_recorded_voice_is_compared_with_its_loudness() -> None:
    """By an untaught network, whose opening has nothing to do with the voice: no correlation to speak of."""
    rng = np.random.default_rng(1)
    voice = (0.2 * rng.normal(size=8 * 16_000) * (np.arange(8 * 16_000) // 4000 % 2)).astype(np.float32)
    figures = evaluate.recorded_figures(random_face(), [voice])

    assert set(figures) == {"loudness_corr", "lag_frames", "loudness_corr_shuffled"}
    assert abs(figures["loudness_corr_shuffled"]) < 0.3


@pytest.mark.weights
@pytest.mark.slow
def test_the_checkpoint_keeps_the_bounds_of_its_examination() -> None:
    """On all sentences never said in training; the whole examination is `duplexd bench face`."""
    from duplexd.models.face.training.narrator import Narrator

    weights, narrator = load_face(), Narrator()
    said = evaluate.sentences(narrator)
    spoken = evaluate._play(weights, said)
    figures = lip_figures(said, spoken)
    acted = Performer(weights, evaluate._parts(*evaluate.conversation(narrator))).play(evaluate.chunks_of(60))

    assert figures["lip_corr"] >= 0.85
    assert abs(figures["lip_lag_frames"]) <= 1
    assert abs(figures["lip_corr_shuffled"]) < 0.2
    assert figures["bilabial_closed"] >= 0.95
    # Both at once: who talks over it is heard, and moves no lips.
    overlap = evaluate.overlap_figures(weights, said, spoken)
    assert overlap["lip_corr"] >= 0.85
    assert overlap["opening_changed"] <= 0.25
    assert evaluate.listening_mouth_ratio(weights, said) <= 0.05
    assert boundary_jump_ratio(acted, weights) <= 1.3
    # Nine of these minutes give 8.2: three of them scatter by two.
    assert 5 <= blinks_per_minute(acted) <= 25


@pytest.mark.weights
@pytest.mark.slow
def test_the_checkpoint_shuts_its_lips_when_its_voice_is_cut() -> None:
    """In the middle of a word, wherever in a chunk: 0.32 s later they are shut, in all of eight sentences."""
    from duplexd.models.face.training.corpus import HELD_OUT
    from duplexd.models.face.training.narrator import Narrator

    weights = load_face()
    said = evaluate.sentences(Narrator(), HELD_OUT[:8])
    before, after = [], []
    for sentence, motion in zip(said, evaluate._play(weights, said), strict=True):
        frame = 4 * CHUNK_FRAMES + int(motion[4 * CHUNK_FRAMES : 6 * CHUNK_FRAMES, Channel.OPENING].argmax())
        performer = Performer(weights, [Part(voice=sentence.voice)])
        last = performer.play(frame // CHUNK_FRAMES + 1)[0][-CHUNK_FRAMES:]
        kept = frame % CHUNK_FRAMES + 1
        performer.interrupt(0, frames=kept)
        before.append(float(last[kept - 1, Channel.OPENING]))
        after.append(float(performer.play(2)[0][CHUNK_FRAMES:, Channel.OPENING].max()))

    assert min(before) > 0.15
    assert max(after) < 0.12
    assert np.mean(after) < 0.1 * np.mean(before)
