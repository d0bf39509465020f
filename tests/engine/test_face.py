"""A session's face in virtual time: the word clock flashes while it speaks, and every frame is compared with the sound
that was sent at its time.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from duplexd.engine.face import DRAWN_IDLE, DRAWN_VOICE
from duplexd.engine.feeling import SURE
from duplexd.engine.governor import LEVELS
from duplexd.engine.replay import replay
from duplexd.engine.simulator import SimListener
from duplexd.engine.story import tell
from duplexd.engine.trace import Trace, decode_command
from duplexd.engine.work import Launch
from duplexd.ids import ConditionVersion, SessionId
from duplexd.media.pictures import PICTURES_BEHIND
from duplexd.messages import (
    CutFrames,
    PersonSeen,
    PicturesFreed,
    PictureShortage,
    PublishChunk,
    PublishFrames,
    ResponseState,
    SessionClosed,
)
from duplexd.models.clock import plan as clock_plan
from duplexd.models.clock.face import WHITE
from duplexd.models.clock.flash import FRAME, FRAMES, HISTORY
from duplexd.streams.graph import MoodWords
from duplexd.streams.stage import CostModel, DecodeJob, Failed, GenerateJob, OverhearJob, RefineJob
from duplexd.units import NANOS_PER_MS, Ticks
from tests.engine import simulation as simulations
from tests.engine.simulation import Simulation, beep, heard_words, ms
from tests.engine.test_trace import traced

CHUNK = Ticks(FRAMES * FRAME)
FRAME_SAMPLES = FRAME // 2
#: Frames on both sides of a change where a picture may still be another: half a frame's rounding, and at the beginning
#: of a voice the way through the stages, which no frame that is due can wait for.
EDGE = 2


def watched(*, until_ms: float = 9000, sessions: int = 1, **settings: Any) -> tuple[Simulation, list[SimListener]]:
    """People who look from 0.4 s on."""
    simulation = Simulation(face="flash", until_ms=until_ms, **settings)
    for name in ("noisy", "clean"):
        # What nobody wrote reads like a frame of the far future, which the stages refuse.
        simulation.arena.field(name, "frame").fill_(2**40)
    people = [simulation.connect(session) for session in range(1, sessions + 1)]
    for person in people:
        person.look(at=ms(400))
    return simulation, people


def slow(simulation: Simulation, **costs_us: int) -> None:
    """What stages of the face cost from now on, in a launch."""
    for name, cost in costs_us.items():
        stage: Any = simulation.world.stages[name]
        stage.spec = msgspec.structs.replace(stage.spec, cost=CostModel(cost))


def levels(person: SimListener) -> dict[int, bool]:
    """Whether a tone was sent in most of a frame, by number of the frame."""
    sent = np.concatenate(person.sent)
    whole = len(sent) // FRAME_SAMPLES
    loud = np.abs(sent[: whole * FRAME_SAMPLES].reshape(whole, -1, 48)).max(2) > 1000
    return {frame: bool(share > 0.6) for frame, share in enumerate(loud.mean(1))}


def picture(person: SimListener) -> dict[int, bool]:
    """Whether what was on the screen was white, by number of the frame; the last picture stays."""
    shown = {int(pts // FRAME): frame.level == WHITE for pts, frame in person.view.shown}
    held: dict[int, bool] = {}
    for frame in range(min(shown), max(shown) + 1):
        held[frame] = shown.get(frame, held.get(frame - 1, False))
    return held


def wrong(person: SimListener, *, allowed: int = EDGE) -> list[int]:
    """Frames whose picture is not that of the sound, nor of a frame within `allowed` of it."""
    truth, seen = levels(person), picture(person)
    return [
        frame
        for frame, white in seen.items()
        if all(truth.get(frame + off, white) is not white for off in range(-allowed, allowed + 1))
    ]


def missing(person: SimListener) -> list[int]:
    shown = [int(pts // FRAME) for pts, _ in person.view.shown]
    return sorted(set(range(min(shown), max(shown) + 1)) - set(shown))


def orders(simulation: Simulation, kind: type[Any], session: int = 1) -> list[tuple[float, Any]]:
    return [(at / NANOS_PER_MS, n) for at, n in simulation.world.news if isinstance(n, kind) and n.session == session]


def jobs(simulation: Simulation, kind: type[Any], session: int = 1) -> list[tuple[float, Any]]:
    return [
        (at / NANOS_PER_MS, job)
        for at, launch in simulation.world.launches
        for job in launch.jobs
        if isinstance(job, kind) and job.session == session
    ]


def held(simulation: Simulation) -> dict[str, int]:
    """Slots of faces in use; `pictures` as well."""
    own = simulation.core.stores.face
    assert own is not None
    ledgers = {"noisy": own.noisy, "clean": own.clean, "voice": own.voice, "motion": own.motion}
    return {name: ledger.spec.count - ledger.free_count for name, ledger in ledgers.items()} | {
        "pictures": own.pictures.count - own.pictures.free_count
    }


# Without a voice -----------------------------------------------------------------------------------------------------


def test_a_face_lives_on_by_itself() -> None:
    """25 frames a second, none late, none left out, no chunk twice; the keys of what was seen slide out."""
    simulation, (person,) = watched(until_ms=30_000)
    simulation.run()
    published = orders(simulation, PublishFrames)
    chunks = [news.chunk for _, news in published]

    assert len(person.view.shown) > 29 * 25
    assert missing(person) == []
    assert person.view.late == 0
    assert chunks == sorted(chunks)
    assert all(a.start + a.count * a.frame == b.start for (_, a), (_, b) in pairwise(published))
    assert orders(simulation, CutFrames) == []
    assert held(simulation)["noisy"] <= len(HISTORY.anchor_tokens) + HISTORY.recent + HISTORY.lookahead


def test_anchors_are_written_once_and_first_in_every_window() -> None:
    simulation, (person,) = watched()
    person.look_away(at=ms(3000))
    person.look(at=ms(4000))
    simulation.run()
    anchors = [
        job for _, launch in simulation.world.launches for job in launch.jobs if type(job).__name__ == "ReferenceJob"
    ]
    windows = [job.window for kind in (GenerateJob, RefineJob) for _, job in jobs(simulation, kind)]

    assert len(anchors) == 2
    assert {window[0] for window in windows} == {anchor.slots[0] for anchor in anchors}
    assert person.view.shown[-1][0] > 8 * 48_000  # It lives after the second look as well.
    assert simulation.core.monitor["face_faults"] == 0


def test_the_face_hears_the_person_while_they_speak() -> None:
    """What a chunk hears of the person is what had been said 320 ms before it, as far as it had come by then."""
    simulation, (person,) = watched()
    person.say(beep(2000), at=ms(3000))
    simulation.run()
    for at, job in jobs(simulation, GenerateJob):
        said_until = (job.start / 48 - 320) + 50  # on the input timeline, which begins with the session at 50 ms
        arrived = at - 50
        assert job.heard_end / 16 <= arrived + 2
        assert job.heard_end / 16 == pytest.approx(min(said_until, arrived), abs=110)


# With a voice --------------------------------------------------------------------------------------------------------


def test_flashes_stand_where_the_tones_do() -> None:
    simulation, (person,) = watched()
    person.type("say 9", at=ms(1500), key="a")
    simulation.run()

    assert heard_words(person) == list(range(9))
    assert sum(picture(person).values()) > 9 * 9
    assert wrong(person) == []
    assert len(missing(person)) <= 3
    assert person.view.late == 0


@pytest.mark.parametrize(
    ("motion_ms", "draw_ms", "late_frames"), [(9, 8, [0, 1, 1]), (20, 20, [1, 1, 1])], ids=["quiet", "busy"]
)
def test_lips_begin_at_most_a_frame_after_a_voice(motion_ms: int, draw_ms: int, late_frames: list[int]) -> None:
    """A picture leaves a frame after the voice of its moment, so that much of the way through the stages is hidden."""
    simulation, (person,) = watched(until_ms=20_000)
    slow(simulation, generate=1000 * motion_ms, refine=1000 * motion_ms, decode=1000 * draw_ms)
    for number, at in enumerate((1500, 6510, 11_523)):
        person.type("say 3", at=ms(at), key=f"k{number}")
    simulation.run()
    truth, seen = levels(person), picture(person)
    onsets = [at for at in sorted(truth) if truth[at] and not any(truth.get(at - back, False) for back in range(1, 20))]
    found = [next(at for at in range(onset - 3, onset + 20) if seen[at]) - onset for onset in onsets]

    assert found == late_frames
    assert person.view.late == 0


def test_a_voice_that_is_placed_before_the_face_has_heard_it_is_waited_for() -> None:
    """Placement and sound race each other: a frame that stays is better than a mouth that is shut for a chunk."""
    simulation, (person,) = watched(until_ms=14_000)
    slow(simulation, overhear=50_000)
    person.type("say 5", at=ms(1500), key="a")
    person.type("say 9", at=ms(6500), key="b")
    simulation.run()
    truth, seen = levels(person), picture(person)
    onsets = [next(frame for frame in sorted(truth) if frame > at / 40 and truth[frame]) for at in (1000, 6000)]
    begin = {onset + frame for onset in onsets for frame in range(4)}

    assert [frame for frame in wrong(person) if frame not in begin] == []
    assert all(any(seen[onset + frame] for frame in range(5)) for onset in onsets)


def test_unsent_frames_are_made_again_when_the_voice_begins() -> None:
    """New ids, the same span, and nothing of the old epoch at or after the cut is published from then on."""
    simulation, (person,) = watched()
    person.type("say 9", at=ms(1500), key="a")
    simulation.run()
    (at, cut), *_ = orders(simulation, CutFrames)
    later = [news for when, news in orders(simulation, PublishFrames) if when >= at]
    earlier = [news for when, news in orders(simulation, PublishFrames) if when < at]
    again = [news for news in later if news.start >= cut.at]

    assert max(news.start + news.count * news.frame for news in earlier) > cut.at, "nothing was there to be cut"
    assert {news.epoch for news in again} >= {cut.epoch}
    assert min(news.epoch for news in again) == cut.epoch
    assert min(news.chunk for news in again) > max(news.chunk for news in earlier)
    assert min(news.start for news in again) == cut.at
    assert all(news.start + news.count * news.frame <= cut.at for news in later if news.epoch < cut.epoch)


def test_motion_goes_on_from_the_last_frame_that_was_seen() -> None:
    """Cut by frames: of the chunk that the cut is in, the frames before it are read, and no other."""
    simulation, (person,) = watched()
    person.type("say 9", at=ms(1500), key="a")
    simulation.run()
    (at, cut), *_ = orders(simulation, CutFrames)
    begun = [job for when, job in jobs(simulation, GenerateJob) if when >= at]
    before = [job for when, job in jobs(simulation, GenerateJob) if when < at and job.start < cut.at]
    first, last = begun[0], before[-1]

    assert first.start >= cut.at
    assert first.tokens[-2] == min(FRAMES, (cut.at - last.start) // FRAME)
    assert first.window[-2] == last.window[-1]
    assert simulation.core.monitor["face_faults"] == 0  # The stages refuse a window whose frames do not rise.


def test_a_sound_over_the_reply_holds_the_flashes_and_a_false_alarm_lets_them_go_on() -> None:
    """A click: the voice is held, the picture is grey within a chunk; then both go on, from the same sample."""
    simulation, (person,) = watched(until_ms=14_000)
    person.type("say 20", at=ms(600), key="a")
    person.say(beep(60), at=ms(3100))
    simulation.run()
    truth, seen = levels(person), picture(person)

    assert simulation.core.monitor.events("resumed")
    assert len(orders(simulation, CutFrames)) >= 2, "begun, held"
    assert wrong(person, allowed=CHUNK // FRAME) == []
    assert sum(white is not truth.get(frame, white) for frame, white in seen.items()) <= 3 * CHUNK // FRAME
    assert heard_words(person) == list(range(20))


def test_an_interruption_shuts_the_mouth_within_a_chunk_and_the_next_reply_opens_it() -> None:
    simulation, (person,) = watched(until_ms=16_000)
    person.type("say 20", at=ms(600), key="a")
    person.say(beep(1200), at=ms(3500))
    simulation.run()
    truth, seen = levels(person), picture(person)
    silent = [f for f in seen if not any(truth.get(f - back, False) for back in range(CHUNK // FRAME + 1))]

    assert simulation.core.monitor["interruptions"] == 1
    assert not any(seen[frame] for frame in silent)
    assert sum(seen[frame] for frame in seen if frame > 6000 / 40) > 9
    assert len(missing(person)) <= 12


moments = st.lists(
    st.tuples(
        st.sampled_from(["type", "click", "speak", "away", "look", "stop", "gone", "seen"]), st.integers(500, 9000)
    ),
    max_size=8,
)


def act(person: SimListener, action: str, at: int, key: str) -> None:
    world = person._world
    match action:
        case "type":
            person.type("say 6", at=ms(at), key=key)
        case "click":
            person.say(beep(60), at=ms(at))
        case "speak":
            person.say(beep(900), at=ms(at))
        case "away":
            person.look_away(at=ms(at))
        case "look":
            person.look(at=ms(at))
        case "stop":
            person.stop(at=ms(at))
        case "gone" | "seen":
            world.at(ms(at), lambda: PersonSeen(person.session, action == "seen", 0.3, -0.1))


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # A second of work each: shrinking would take an hour.
)
@given(moments, moments, st.integers(0, 2**16), st.sampled_from([1, 8, 30]))
def test_whatever_happens_the_picture_keeps_its_promises(
    one: list[tuple[str, int]], other: list[tuple[str, int]], seed: int, slowness: int
) -> None:
    """Never further ahead than it may be; nothing of a cut future is published; pts rise; the two people's slots come
    back; the voice is whole.
    """
    simulation, people = watched(until_ms=11_000, sessions=2, seed=seed)
    slow(simulation, generate=1000 * slowness, refine=1000 * slowness, decode=700 * slowness)
    for person, plan in zip(people, (one, other), strict=True):
        for number, (action, at) in enumerate(plan):
            act(person, action, at, f"k{number}")
        simulation.world.at(ms(10_500), lambda person=person: person.view.end() if person.view.on else None)
    simulation.run()

    for person in people:
        origin = ms(50) + 1 + PICTURES_BEHIND
        loud = {frame for frame, white in levels(person).items() if white}
        newest: dict[int, int] = {}
        epoch, floor = 0, 0
        for at, news in simulation.world.news:
            if getattr(news, "session", None) != person.session:
                continue
            if isinstance(news, CutFrames):
                assert news.epoch > epoch
                epoch, floor = news.epoch, news.at
            elif isinstance(news, PublishFrames):
                end = news.start + news.count * news.frame
                playback = (at - origin) * 48 // 1_000_000
                # While a voice stands at the eye or after it pictures may lie twice as far ahead as without one.
                assert end - playback <= DRAWN_VOICE
                assert end - playback <= DRAWN_IDLE or loud & set(range(playback // FRAME - 2, end // FRAME + 12))
                assert news.epoch >= epoch or end <= floor
                assert news.start >= newest.get(news.epoch, 0)
                newest[news.epoch] = end
        assert simulation.core.monitor["face_faults"] == 0
    after = held(simulation)
    assert after["pictures"] == 0
    assert after["motion"] == 0
    assert after["noisy"] <= 2 * (len(HISTORY.anchor_tokens) + HISTORY.recent)


def test_while_a_first_sound_is_awaited_there_are_fewer_pictures() -> None:
    """The thinker takes a second: from then on every second picture until it speaks, drawn no earlier than needed."""
    simulation, (person,) = watched(until_ms=8000)
    simulation.world.at(ms(2000), lambda: slow(simulation, think=1_000_000))
    person.type("say 9", at=ms(2500), key="a")
    simulation.run()
    (voice,) = [at for at, news in orders(simulation, PublishChunk)][:1]
    before = {job.stride for at, job in jobs(simulation, DecodeJob) if at < 2500}
    strides = {job.stride for at, job in jobs(simulation, DecodeJob) if 2900 < at < voice}
    after = [job.stride for at, job in jobs(simulation, DecodeJob) if at > voice + 700]
    meanwhile = [news for at, news in orders(simulation, PublishFrames) if 3200 < at < voice]

    assert voice > 4000
    assert before == {1}
    assert strides == {2}
    assert {news.frame for news in meanwhile} == {2 * FRAME}
    assert set(after) == {1}
    assert person.view.late == 0
    assert simulation.core.governor.level == 0


def test_while_the_person_speaks_there_are_all_pictures() -> None:
    """Two seconds of voice: every picture to its end, and then for a moment every second one."""
    simulation, (person,) = watched(until_ms=10_000)
    person.say(beep(2000), at=ms(3000))
    simulation.run()
    strides = [(at, job.stride) for at, job in jobs(simulation, DecodeJob)]

    assert {stride for at, stride in strides if at < 5000} == {1}
    assert {stride for at, stride in strides if 5000 < at < 7000} == {1, 2}


def test_while_a_first_sound_is_awaited_drawing_may_take_longer() -> None:
    """Two busy cores: a launch of the drawing takes 70 ms. Pictures are drawn one at a time then, each 120 ms before it
    is due; two at a time would have 40.
    """
    simulation, (person,) = watched(until_ms=6000)
    simulation.world.at(ms(2000), lambda: slow(simulation, think=2_000_000))
    simulation.world.at(ms(3000), lambda: slow(simulation, decode=70_000))
    person.type("say 9", at=ms(2500), key="a")
    simulation.run()

    assert {job.stride for at, job in jobs(simulation, DecodeJob) if 3000 < at < 4400} == {2}
    assert simulation.core.monitor["face_frames_late"] == 0


def test_pictures_that_were_planned_are_counted_and_those_of_a_hush() -> None:
    """Half of the pictures while the first sound is awaited: the rest of the time all of them."""
    simulation, (person,) = watched(until_ms=8000)
    simulation.world.at(ms(2000), lambda: slow(simulation, think=1_000_000))
    person.type("say 9", at=ms(2500), key="a")
    simulation.run()
    count = simulation.core.monitor
    published = sum(news.count for _, news in orders(simulation, PublishFrames))

    assert count["face_frames_dropped"] == 0
    assert count["face_pictures_planned"] == published
    assert count["face_frames"] - count["face_frames_hushed"] // 2 == published


def test_a_face_that_cannot_listen_costs_the_voice_nothing() -> None:
    """What hears the voice for the face takes five seconds a piece, and there are six output slots: every word is heard
    without a gap, and what the face missed is counted.
    """
    simulation, (person,) = watched(until_ms=12_000)
    slow(simulation, overhear=5_000_000)
    slots = simulation.core.stores.out_slots
    while len(slots) > 6:
        slots.pop()
    person.type("say 12", at=ms(1500), key="a")
    simulation.run()

    assert heard_words(person) == list(range(12))
    assert person.line.playout.underruns == 0
    assert simulation.core.monitor["face_voice_missed"] > 0


# Conditions ----------------------------------------------------------------------------------------------------------


def test_where_the_person_is_counts_from_the_next_chunk_on() -> None:
    """Chunk n ends with the old condition in every stage, n+1 begins with the new one."""
    simulation, (person,) = watched()
    for number, x in enumerate((0.2, -0.5, 0.9)):
        simulation.world.at(ms(2000 + 777 * number), lambda x=x: PersonSeen(person.session, True, x, 0.1))
    simulation.world.at(ms(6000), lambda: PersonSeen(person.session, False))
    simulation.run()
    felt: dict[int, set[tuple[ConditionVersion, float]]] = {}
    for kind in (GenerateJob, RefineJob):
        for _, job in jobs(simulation, kind):
            felt.setdefault(job.chunk, set()).add((job.condition, job.mood[1]))
    seen = [next(iter(both))[1] for _, both in sorted(felt.items())]

    assert all(len(both) == 1 for both in felt.values())
    # The character looks out of the screen: somebody to its right is on the left of its picture. Eyes go no further
    # than they were taught to.
    assert list(dict.fromkeys(seen)) == [0.0, -0.2, 0.5, -0.6]
    assert seen[-1] == 0.0


def test_who_is_interrupted_stops_laughing(monkeypatch: Any) -> None:
    """Every word of the reply is a merry one, until the person stops it: the next chunk that is begun feels nothing."""

    def plan(options: Any) -> Any:
        found = clock_plan(options)
        moods = (MoodWords("joy", sure=tuple(f"0-{word}" for word in range(12))),)
        found.face = msgspec.structs.replace(found.face, conditions=("joy", *found.face.conditions), moods=moods)
        return found

    monkeypatch.setattr(simulations, "clock_plan", plan)
    simulation, (person,) = watched()
    person.type("say 12", at=ms(1500), key="a")
    person.stop(at=ms(5000))
    simulation.run()
    joys = [(at, job.mood[0]) for at, job in jobs(simulation, GenerateJob)]

    assert {joy for at, joy in joys if 3500 < at < 5000} == {SURE}
    assert {joy for at, joy in joys if at > 5100} == {0.0}


# Bounds, faults, leaving ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["overhear", "generate", "refine", "decode"])
@pytest.mark.parametrize("way", ["raised", "failed"])
def test_a_fault_in_a_stage_ends_the_face_and_not_the_voice(stage: str, way: str, monkeypatch: Any) -> None:
    """The picture stays as it is, which is counted; the reply is heard to its end; nothing is held any more."""
    simulation, people = watched(until_ms=12_000, sessions=1 if way == "raised" else 2)
    target = simulation.world.stages[stage]
    run = target.run

    def faulty(found: Any, media: Any) -> list[Any]:
        if way == "raised":
            return run(found, media)
        made = run(found, media)
        return [
            Failed(job.session, "made to fail") if job.session == 1 and simulation.world.now() > ms(3000) else one
            for job, one in zip(found, made, strict=True)
        ]

    monkeypatch.setattr(target, "run", faulty)
    if way == "raised":
        simulation.world._fails = lambda launch: (
            "made to raise" if launch.stage == stage and simulation.world.now() > ms(3000) else ""
        )
    for person in people:
        person.type("say 9", at=ms(2500), key="a")
        person.type("say 5", at=ms(8000), key="b")
    simulation.run()
    own = simulation.core.stores.face
    assert own is not None

    assert simulation.core.monitor["face_faults"] == 1
    assert max(at for at, _ in orders(simulation, PublishFrames, 1)) < 4500
    for other in people[1:]:
        assert max(at for at, _ in orders(simulation, PublishFrames, 2)) > 11_500
        assert wrong(other) == []
    for person in people:
        assert heard_words(person)[:9] == list(range(9))
        assert person.line.playout.underruns == 0
    assert simulation.final_states(1) == {1: [ResponseState.COMPLETED], 2: [ResponseState.COMPLETED]}
    assert own.motion.owned(SessionId(1)) == own.noisy.owned(SessionId(1)) == own.pictures.held(SessionId(1)) == 0


def test_a_view_that_ends_gives_back_all_that_was_not_seen() -> None:
    simulation, (person,) = watched()
    person.type("say 9", at=ms(1500), key="a")
    person.look_away(at=ms(3000))
    simulation.run()

    assert max(at for at, _ in orders(simulation, PublishFrames)) < 3100
    assert held(simulation)["pictures"] == held(simulation)["motion"] == 0
    assert held(simulation)["noisy"] <= len(HISTORY.anchor_tokens) + HISTORY.recent
    assert heard_words(person) == list(range(9))


def test_a_view_in_the_middle_of_a_reply_shows_it() -> None:
    """A page that was hidden comes back while the character speaks."""
    simulation, (person,) = watched(until_ms=12_000)
    person.look_away(at=ms(1000))
    person.type("say 16", at=ms(1500), key="a")
    person.look(at=ms(4000))
    simulation.run()
    late = {frame: white for frame, white in picture(person).items() if frame > 5000 / 40}

    assert sum(late.values()) > 60
    assert [frame for frame in wrong(person) if frame > 5000 / 40] == []
    (_, first), *_ = jobs(simulation, OverhearJob)
    assert min(s.position for _, job in jobs(simulation, GenerateJob) for s in job.spoken) >= first.start, (
        "what was said while nobody looked does not lie in the ring"
    )


@pytest.mark.parametrize("cost_ms", [60, 200, 700])
@pytest.mark.parametrize("act", ["close", "look_away", "stop", "speak"])
def test_output_slots_come_back_whenever_the_face_was_still_to_hear_them(act: str, cost_ms: int) -> None:
    for at in range(2000, 5000, 400):
        simulation, (person,) = watched(until_ms=16_000)
        slow(simulation, overhear=cost_ms * 1000)
        person.type("say 20", at=ms(1500), key="a")
        match act:
            case "close":
                simulation.world.at(ms(at), lambda person=person: SessionClosed(person.session, "left"))
            case "look_away":
                person.look_away(at=ms(at))
            case "stop":
                person.stop(at=ms(at))
            case _:
                person.say(beep(1000), at=ms(at))
        simulation.run()
        stores = simulation.core.stores

        assert len(stores.out_slots) == stores.out_slots_count, at
        assert not stores._overheard
        assert not stores._freed_early


def test_a_lane_of_the_face_that_is_busy_is_seen_whatever_the_others_did_before() -> None:
    simulation, _ = watched(until_ms=2000)
    simulation.run()
    core, looks = simulation.core, []
    core.governor.look = looks.append  # type: ignore[method-assign, assignment]
    core._face_lanes = frozenset({"draw", "face"})
    core.monitor.count("busy_us_draw", 50_000_000)
    core._govern()
    core.monitor.count("busy_us_face", 990_000)
    core._govern()

    assert looks[-1].busy == pytest.approx(0.99)


def test_a_coarser_level_takes_fewer_steps_and_a_front_end_in_need_costs_one() -> None:
    simulation, (person,) = watched(until_ms=5000)
    coarse = next(index for index, level in enumerate(LEVELS) if level.steps == 1)
    simulation.core.governor.level = coarse
    simulation.run()
    assert {job.steps for _, job in jobs(simulation, GenerateJob)} >= {1}

    simulation, (person,) = watched(until_ms=5000)
    for at in range(500, 4500, 400):
        simulation.world.at(ms(at), lambda: PictureShortage(person.session, 0.5))
    simulation.run()
    assert simulation.core.governor.level > 0


@pytest.mark.parametrize("at_ms", [430, 2210, 2777, 3001, 3333])
def test_a_session_that_closes_leaves_nothing(at_ms: int) -> None:
    simulation, (person,) = watched(until_ms=6000)
    slow(simulation, generate=25_000, refine=25_000, decode=25_000)
    person.type("say 20", at=ms(1500), key="a")
    simulation.world.at(ms(at_ms), lambda: SessionClosed(person.session, "left"))
    simulation.run()
    stores = simulation.core.stores

    assert set(held(simulation).values()) == {0}
    assert len(stores.out_slots) == stores.out_slots_count
    assert not simulation.core._closing


def test_a_front_end_that_copies_nothing_out_stalls_its_own_pictures_only() -> None:
    simulation, people = watched(until_ms=8000, sessions=2)
    execute = simulation.world.execute

    def deaf(command: Any, now: Any) -> None:
        if isinstance(command, PublishFrames) and command.session == 1:
            simulation.world.news.append((now, command))
            return
        execute(command, now)

    simulation.world.execute = deaf  # type: ignore[method-assign]
    people[0].type("say 9", at=ms(1500), key="a")
    simulation.run()

    assert len(orders(simulation, PublishFrames, 1)) == held(simulation)["pictures"] == 12
    assert missing(people[1]) == []
    assert heard_words(people[0]) == list(range(9))


def test_whoever_finds_the_last_slot_taken_waits_for_the_next() -> None:
    """People who left still have most slots, and the front end is slow with the rest: two want the same one."""
    simulation, people = watched(until_ms=8000, sessions=3)
    slow(simulation, decode=24_000)
    own = simulation.core.stores.face
    assert own is not None
    own.pictures._session_max = own.pictures.count
    taken: list[int] = []
    execute = simulation.world.execute

    def slowly(command: Any, now: Any) -> None:
        if not isinstance(command, PublishFrames):
            execute(command, now)
            return
        simulation.world.news.append((now, command))
        simulation.world.at(now + ms(40), lambda: PicturesFreed((command.slot,)))

    simulation.world.execute = slowly  # type: ignore[method-assign]
    simulation.world.at(ms(2000), lambda: taken.extend(own.pictures.take(SessionId(99)) or 0 for _ in range(46)))
    simulation.world.at(ms(4000), lambda: PicturesFreed(tuple(taken)))
    people[0].type("say 9", at=ms(1500), key="a")
    simulation.run()

    assert simulation.core.monitor["face_launches_short_of_slots"] > 0
    assert heard_words(people[0]) == list(range(9))
    for person in people:
        assert max(at for at, _ in orders(simulation, PublishFrames, person.session)) > 7800


def test_a_face_without_time_gives_way_step_by_step_and_comes_back() -> None:
    """Drawing takes twice the time there is, for six seconds: fewer pictures, never one too late for long, a whole
    voice, and all of them again afterwards.
    """
    simulation, (person,) = watched(until_ms=44_000)
    simulation.world.at(ms(4000), lambda: slow(simulation, decode=160_000))
    simulation.world.at(ms(10_000), lambda: slow(simulation, decode=4000))
    person.type("say 20", at=ms(4500), key="a")
    found: list[int] = []
    for second in range(1, 44):
        simulation.world.at(ms(1000 * second), lambda: found.append(simulation.core.governor.level))
    simulation.run()

    assert max(found[4:10]) >= 1
    assert found[-1] == 0
    assert heard_words(person) == list(range(20))
    assert person.line.playout.underruns == 0
    assert {news.frame for _, news in orders(simulation, PublishFrames)} >= {FRAME, 2 * FRAME}
    assert not [f for f in missing(person) if f > 38_000 / 40]


def test_every_second_picture_is_of_the_right_frame() -> None:
    """At half the pictures a flash is at most a frame further off."""
    simulation, (person,) = watched()
    simulation.core.governor.level = 1
    person.type("say 9", at=ms(1500), key="a")
    simulation.run()

    assert {job.stride for _, job in jobs(simulation, DecodeJob)} >= {2}
    assert wrong(person, allowed=3) == []


def test_own_voice_is_read_before_its_slot_is_written_again() -> None:
    """Copying into the ring takes longer than the front end does: an output slot stays until both are done."""
    simulation, (person,) = watched(until_ms=9000)
    slow(simulation, overhear=200_000)
    person.type("say 9", at=ms(1500), key="a")
    slots: dict[int, str] = {}
    broken: list[int] = []

    def watch(launch: Launch) -> str:
        for job in launch.jobs:
            if type(job).__name__ == "OverhearJob":
                slots.pop(job.slot, None)
        return ""

    simulation.world._fails = watch
    execute = simulation.world.execute

    def seen(command: Any, now: Any) -> None:
        if isinstance(command, Launch):
            for job in command.jobs:
                if type(job).__name__ == "RenderJob" and job.slot in slots:
                    broken.append(job.slot)
        elif isinstance(command, PublishChunk):
            slots[command.slot] = "published"
        execute(command, now)

    simulation.world.execute = seen  # type: ignore[method-assign]
    simulation.run()

    assert broken == []
    assert heard_words(person) == list(range(9))
    assert len(simulation.core.stores.out_slots) == simulation.core.stores.out_slots_count


def test_a_trace_with_a_face_is_run_again_to_the_byte(tmp_path: Path) -> None:
    simulation, people = watched(until_ms=9000, sessions=2)
    for person in people:
        person.type("say 9", at=ms(1500), key="a")
        person.say(beep(900), at=ms(3600))
        person.look_away(at=ms(6000))
    path = traced(simulation, tmp_path / "a.trace")
    replayed = replay(Trace(path))

    told = tell(Trace(path).header, Trace(path).records())
    found = [decode_command(command) for record in Trace(path).records() for command in record.commands]
    drawn = {type(job) for launch in found if isinstance(launch, Launch) for job in launch.jobs}

    assert replayed.difference is None
    assert len(orders(simulation, PublishFrames)) > 50
    assert drawn >= {GenerateJob, RefineJob, DecodeJob}
    assert "generate" in {launch.role for launch in told.launches}
