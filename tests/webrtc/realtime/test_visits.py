"""Visits of a front end whose engine is not there: what is forgotten, and what a fault of one ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from duplexd.config import Config
from duplexd.ids import SessionId
from duplexd.media.line import Line
from duplexd.messages import EngineReady, Modality
from duplexd.units import Nanos, Ticks
from duplexd.webrtc.frontend import STALL_BYTES, Frontend
from duplexd.webrtc.peer import Peer
from duplexd.webrtc.realtime.broadcast import WhipVisit
from duplexd.webrtc.realtime.live import LiveRoutes, LiveVisit
from duplexd.webrtc.realtime.routes import Door, RealtimeRoutes
from duplexd.webrtc.realtime.session import RealtimeSession, Transport
from duplexd.webrtc.realtime.settings import Settings
from duplexd.webrtc.realtime.visit import RealtimeVisit


class Place:
    """A front end and its routes."""

    def __init__(self) -> None:
        self.frontend = Frontend(Config(model="clock", voice_detector="energy"))
        self.frontend.supervisor.ready = EngineReady("clock", 4, 24_000, (Modality.AUDIO,), "at_cursor", "energy")
        self.realtime = RealtimeRoutes(self.frontend, Door(self.frontend))

    def parts(self, number: int) -> tuple[SessionId, Line, RealtimeSession]:
        session = SessionId(number)
        settings = Settings.default(model="clock")
        core = self.realtime.protocol(session, settings, frozenset(), Transport.WEBRTC)
        return session, self.frontend._line(session), core


def at(story: Callable[[Place], Awaitable[None]]) -> None:
    async def run() -> None:
        place = Place()
        await story(place)
        await place.frontend.stop()

    asyncio.run(run())


def test_live_calls_that_have_ended_are_forgotten_when_the_next_one_comes() -> None:
    """Nobody but a WebSocket's end took them out: a daemon that has calls alone kept all of them."""

    async def story(place: Place) -> None:
        live = LiveRoutes(place.realtime)
        for number in range(1, 4):
            session, line, core = place.parts(number)
            visit = LiveVisit(place.frontend, session, line, core, start={"model": "clock"}, rate=0)
            live._remember(visit)
            assert list(live._sessions.values()) == [visit]
            await visit.hang_up("the page left")

    at(story)


class Publisher:
    """The connection of one who publishes."""

    takes_camera = False

    def __init__(self) -> None:
        self.closed: list[str] = []

    async def close(self, reason: str) -> None:
        self.closed.append(reason)


class Broken(WhipVisit):
    def pull(self, pts: Ticks) -> NDArray[np.int16]:
        raise ValueError("no sound")


def test_a_published_session_whose_playout_fails_ends_and_says_why() -> None:
    """Its track has no peer to fail; it went on, silent, for ever."""

    async def story(place: Place) -> None:
        visit, publisher = Broken(place.frontend, *place.parts(7)), Publisher()
        place.frontend.visits[visit.session] = visit
        visit.begin(cast(Peer, publisher))
        await asyncio.wait_for(visit.finished.wait(), 5)
        assert place.frontend.visits == {}
        assert publisher.closed == ["internal error in playout: ValueError: no sound"]

    at(story)


class Reader:
    """A connection that has read nothing of what it was told."""

    def __init__(self, backlog_bytes: int) -> None:
        self.backlog_bytes = backlog_bytes

    def tell(self, text: str) -> None:
        pass

    async def close(self, code: int, reason: str) -> None:
        pass


@pytest.mark.parametrize(
    ("own", "joined", "waits"),
    [
        pytest.param(0, STALL_BYTES + 1, False, id="who-joined-reads-nothing"),
        pytest.param(STALL_BYTES + 1, 0, True, id="its-client-reads-nothing"),
    ],
)
def test_generation_waits_for_the_client_that_does_not_read_and_for_nobody_who_joined(
    own: int, joined: int, waits: bool
) -> None:
    async def story(place: Place) -> None:
        session, line, core = place.parts(2)
        visit = RealtimeVisit(place.frontend, session, line, core)
        visit.sinks.append(Reader(own))
        assert visit.join(Reader(joined))
        visit.tick(Nanos(0))
        assert visit.stalled is waits

    at(story)
