"""One visit of the page in the front end, without sockets and without an engine: what is told to whom."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from duplexd import clock
from duplexd.config import Config
from duplexd.ids import Epoch, ResponseId, SessionId, TurnId
from duplexd.media.speaking import SILENT_MAX
from duplexd.messages import (
    ClientStalled,
    EngineReady,
    Modality,
    OutputState,
    ResponseChanged,
    ResponseState,
    ResumePlayback,
    StateChanged,
    TurnOutcome,
    TurnSettled,
    TurnState,
    VoiceStarted,
)
from duplexd.units import Nanos, Span, Ticks, nanos_from_ms, ticks_from_ms
from duplexd.webrtc import wire
from duplexd.webrtc.frontend import STALL_BYTES, Frontend, Visit
from duplexd.webrtc.peer import Peer
from duplexd.webrtc.tracks import MediaClock

READY = EngineReady("clock", 4, 24_000, (Modality.AUDIO,), "at_cursor", "energy")


class Page:
    """The connection of a page that reads what it wants."""

    takes_camera = False
    is_connected = False
    video = None
    rtp_origin = 0
    video_origin = None
    rtt_ms = 4.0

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.backlog_bytes = 0
        self.clock = MediaClock()

    def send(self, label: str, text: str, *, droppable: bool = False) -> None:
        self.told.append(json.loads(text))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.told if message["t"] == kind]


class Loud:
    """Voice is how loud it is."""

    def probability(self, block: NDArray[np.float32]) -> float:
        return float(np.abs(block).max())


class Scene:
    """A front end whose engine is replaced by a list of what it was told."""

    def __init__(self, ready: EngineReady = READY) -> None:
        self.frontend = Frontend(Config(model="clock", voice_detector="energy"))
        self.frontend.supervisor.ready = ready
        self.facts: list[Any] = []
        self.frontend.supervisor.send = self._note  # type: ignore[method-assign]

    def _note(self, fact: Any) -> bool:
        self.facts.append(fact)
        return True

    def visit(self, number: int) -> tuple[Visit, Page]:
        session, page = SessionId(number), Page()
        visit = Visit(self.frontend, session, self.frontend._line(session))
        visit.peer = cast(Peer, page)
        self.frontend.visits[session] = visit
        return visit, page

    def of(self, kind: type[Any]) -> list[Any]:
        return [fact for fact in self.facts if isinstance(fact, kind)]


def at(story: Callable[[Scene], Awaitable[None]], ready: EngineReady = READY) -> None:
    async def run() -> None:
        scene = Scene(ready)
        await story(scene)
        for visit in scene.frontend.visits.values():
            visit.cancel_timers()
        scene.frontend.visits.clear()
        await scene.frontend.stop()

    asyncio.run(run())


@pytest.mark.parametrize("reason", ["", "libGL.so.1 is missing"])
def test_a_page_learns_why_the_character_has_no_face(reason: str) -> None:
    async def story(scene: Scene) -> None:
        visit, page = scene.visit(1)
        visit.on_open(wire.RELIABLE_CHANNEL)
        assert [message["faceless"] for message in page.of("ready")] == [reason]

    at(story, EngineReady("clock", 4, 24_000, (Modality.AUDIO,), "at_cursor", "energy", faceless=reason))


def test_the_page_learns_that_the_words_are_whole_and_the_voice_failed() -> None:
    outputs = (OutputState("text", ResponseState.COMPLETED), OutputState("voice", ResponseState.FAILED))

    async def story(scene: Scene) -> None:
        visit, page = scene.visit(1)
        news = ResponseChanged(SessionId(1), ResponseId(1), Epoch(0), ResponseState.FAILED, outputs, 1, "no sound")
        visit.take(news)
        (reply,) = page.of("reply")
        assert (reply["state"], reply["outputs"]) == ("failed", {"text": "completed", "voice": "failed"})

    at(story)


def test_a_page_that_does_not_read_throttles_its_own_session_and_no_other() -> None:
    """Its reliable channel fills: the engine is told once, and once more when it drains; the neighbour not at all."""

    async def story(scene: Scene) -> None:
        (slow, page), (quick, _) = scene.visit(1), scene.visit(2)
        for backlog in (0, STALL_BYTES + 1, STALL_BYTES + 2, STALL_BYTES, 0):
            page.backlog_bytes = backlog
            for visit in (slow, quick):
                visit.tick(Nanos(0))
        assert scene.of(ClientStalled) == [ClientStalled(SessionId(1), True), ClientStalled(SessionId(1), False)]

    at(story)


@pytest.mark.parametrize(
    ("outcome", "voices"), [(TurnOutcome.TAKEN, 2), (TurnOutcome.EMPTY, 2), (TurnOutcome.OVERHEARD, 1)]
)
def test_who_goes_on_after_the_end_of_a_turn_is_heard_anew(outcome: TurnOutcome, voices: int) -> None:
    """Room noise keeps the detector's speech alive between two sentences; the engine has ended the turn."""

    async def story(scene: Scene) -> None:
        visit, _ = scene.visit(1)
        visit.line._detector = Loud()
        spoken(visit, 0, level=0.9)
        spoken(visit, 400, level=0.4)
        settled = TurnSettled(SessionId(1), TurnId(1), Span(Ticks(0), ticks_from_ms(750)), "", outcome)
        visit.take(settled)
        spoken(visit, 800, level=0.9)
        assert len(scene.of(VoiceStarted)) == voices

    at(story)


def test_after_a_false_alarm_the_page_shows_again_that_the_character_speaks() -> None:
    """To the engine it spoke all the while, so it says nothing: the page would show a pause until the reply is over."""

    async def story(scene: Scene) -> None:
        visit, page = scene.visit(1)
        visit.take(StateChanged(SessionId(1), TurnState.SPEAKING))
        visit.line._order_hold(Nanos(0), at=Ticks(0), source="server")
        visit.carry()
        visit.take(ResumePlayback(SessionId(1), 1, Epoch(0)))
        assert [message["state"] for message in page.of("state")] == ["speaking", "held", "speaking"]

    at(story)


def test_a_page_is_told_that_a_character_that_is_not_heard_does_not_speak(caplog: pytest.LogCaptureFixture) -> None:
    """T-PP-04, as a page and a daemon's figures have it; also after the session."""

    async def story(scene: Scene) -> None:
        visit, page = scene.visit(1)
        visit.take(StateChanged(SessionId(1), TurnState.SPEAKING))
        scene.frontend._tick_visit(visit, Nanos(clock.now() + SILENT_MAX))
        assert [message["state"] for message in page.of("state")] == ["speaking", "thinking"]
        assert scene.frontend.lapse_count == 1
        scene.frontend.hang_up(SessionId(1))
        assert scene.frontend.lapse_count == 1

    at(story)

    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "session 1 speaks, says the engine, and nothing was heard of it for 2 s"
    ]


def spoken(visit: Visit, from_ms: int, *, level: float) -> None:
    """Four tenths of a second from the microphone."""
    pcm = np.full(320, round(level * 32_767), np.int16)
    for start_ms in range(from_ms, from_ms + 400, 20):
        visit.line.on_audio(pcm, int(ticks_from_ms(start_ms)), nanos_from_ms(1000 + start_ms))
    visit.carry()
