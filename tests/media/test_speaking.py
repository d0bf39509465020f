"""A session that says that it speaks is heard, or says something else (T-PP-04)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from duplexd.media.line import HOLD_MAX, StateShown
from duplexd.media.speaking import SILENT_MAX
from duplexd.messages import ResumePlayback, TurnState
from duplexd.units import NANOS_PER_MS, Nanos, ms_from_nanos
from tests.media.test_line import SESSION, Scene

SILENT_MS = ms_from_nanos(SILENT_MAX)


def speaks(length_ms: float, *, last: bool = False) -> Scene:
    """Sound of that length begins now; more is to follow unless it is the `last`."""
    scene = Scene()
    scene.line.enter(TurnState.SPEAKING, scene.now)
    scene.publish(length_ms, last=last)
    return scene


def shown(scene: Scene) -> list[TurnState]:
    return [item.state for item in scene.take(StateShown)]


def test_who_speaks_and_is_not_heard_for_two_seconds_shows_that_it_thinks_and_is_counted() -> None:
    """T-PP-04: after 400 ms nothing more is made; with the next sound the session speaks again."""
    scene = speaks(400)
    scene.run(400 + 110 + SILENT_MS)  # The page's ear is 110 ms behind the track.
    before = shown(scene)
    scene.run(60)
    lapsed = shown(scene)
    scene.publish(400)
    scene.run(300)

    assert (before, lapsed, shown(scene)) == ([], [TurnState.THINKING], [TurnState.THINKING, TurnState.SPEAKING])
    assert scene.line.speaking.lapses == 1


def test_a_page_that_stays_mute_does_not_pass_for_one_that_hears() -> None:
    """After an interruption the page's gate does not open: all that was made ahead goes to a mute page."""
    scene = speaks(1500)
    scene.reports = False
    for _ in range(45):
        scene.run(100)
        scene.report(muted=True)

    assert shown(scene) == [TurnState.THINKING]
    assert scene.line.speaking.lapses == 1


def test_a_state_without_any_sound_is_not_believed_for_longer() -> None:
    scene = Scene()
    scene.line.enter(TurnState.SPEAKING, scene.now)
    scene.run(SILENT_MS + 40)

    assert shown(scene) == [TurnState.THINKING]


def test_a_reply_whose_end_the_engine_knows_late_is_one_lapse_and_no_more() -> None:
    scene = speaks(400, last=True)
    scene.run(20_000)
    scene.line.enter(TurnState.LISTENING, scene.now)
    scene.run(5000)

    assert scene.line.speaking.shown is TurnState.LISTENING
    assert scene.line.speaking.lapses == 1


# Silences with a reason -----------------------------------------------------------------------------------------------


def thinks(scene: Scene) -> None:
    scene.line.enter(TurnState.THINKING, scene.now)
    scene.run(10_000)


def pauses(scene: Scene) -> None:
    """The voice itself is silent for five seconds: that is content, and the timeline goes on."""
    scene.publish(5000)
    for piece in scene.line.playout._queue:
        piece.pcm[:] = 0
    scene.run(5000)
    assert not any(frame.any() for frame in scene.frames[-200:])


def is_held(scene: Scene) -> None:
    """A voice over the reply, which the engine judges; then the reply goes on after a pause of its own."""
    scene.run(200, voice=True)
    scene.run(ms_from_nanos(HOLD_MAX) - 200)
    assert scene.line.hold is not None
    scene.line.resume(ResumePlayback(SESSION, scene.line.hold.hold, scene.line.playout.epoch), scene.now)
    scene.run(SILENT_MS - 200)


def is_blocked(scene: Scene) -> None:
    """The browser waits for a gesture, and says so on the page."""
    scene.reports = False
    for _ in range(60):
        scene.run(100)
        scene.report(silent=True)


def is_gone(scene: Scene) -> None:
    """The client's connection broke, and may come back."""
    scene.line.client_stalled = True
    scene.run(20_000)


@pytest.mark.parametrize("act", [thinks, pauses, is_held, is_blocked, is_gone])
def test_a_silence_with_a_reason_is_no_lapse(act: Callable[[Scene], None]) -> None:
    scene = speaks(400)
    scene.run(400)
    act(scene)

    assert TurnState.THINKING not in shown(scene)
    assert scene.line.speaking.lapses == 0


def test_a_client_that_is_sent_everything_ahead_is_heard_by_its_own_clock() -> None:
    """A WebSocket: six seconds of sound are taken at once; the ear is through with them six seconds later."""
    scene = speaks(1000)
    for _ in range(5):
        scene.publish(1000, last=False)
    line = scene.line
    while line.take(scene.now) is not None:
        pass
    at = scene.now
    heard_ms = 6000 + 250  # Without reports the ear is taken to be so far behind.
    found = []
    while not found:
        at = Nanos(at + 20 * NANOS_PER_MS)
        line.tick(at)
        found = [item for item in line.drain() if isinstance(item, StateShown)]

    assert abs((at - scene.now) / NANOS_PER_MS - heard_ms - SILENT_MS) <= 20
