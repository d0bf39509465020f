"""A client of the Realtime protocol in virtual time: the whole bridge over the word clock's engine, no socket.

A `Client` keeps the view that a strict client would have of the conversation, and raises at the first event that breaks
the rules of order (notes of the protocol, O1-O9). What its loudspeaker plays is the sound of the deltas, one after the
other.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duplexd.ids import SessionId
from duplexd.media import tones
from duplexd.media.energy import EnergyDetector
from duplexd.media.line import Block, Detector, Line
from duplexd.messages import PublishChunk, SessionClosed, SessionOpened
from duplexd.units import NANOS_PER_MS, Nanos, ticks_from_nanos
from duplexd.webrtc.realtime.bridge import Bridge
from duplexd.webrtc.realtime.limits import Limits
from duplexd.webrtc.realtime.session import RealtimeSession, Transport
from duplexd.webrtc.realtime.settings import Settings
from tests.engine.simulation import RATE, Simulation, ms
from tests.webrtc.realtime.rules import View

TICK = Nanos(20 * NANOS_PER_MS)


class Client:
    """One connection. Say what it does and when, then run the simulation."""

    def __init__(
        self,
        simulation: Simulation,
        session: int = 1,
        *,
        at_ms: float = 50,
        transport: Transport = Transport.WEBSOCKET,
        limits: Limits | None = None,
        settings: dict[str, Any] | None = None,
        detector: Detector | None = None,
    ) -> None:
        self.world = simulation.world
        self.session = SessionId(session)
        self.view = View(webrtc=transport is Transport.WEBRTC)
        self.log: list[tuple[float, dict[str, Any]]] = []
        self.sound: list[NDArray[np.int16]] = []  #: of all deltas
        self.lead: list[float] = []
        self._origin = ms(at_ms)
        self._mic: list[NDArray[np.int16]] = []
        self._microphone_on = False
        wanted = Settings.default(model="clock")
        if settings:
            wanted = wanted.change(settings)
        self.line = Line(
            session=self.session,
            rate=RATE,
            detector=detector or EnergyDetector(),
            echo=None,
            allow_barge_in=True,
            pts_at=lambda now: int(ticks_from_nanos(max(0, now - self._origin))),
        )
        self.core = RealtimeSession(
            session=self.session, settings=wanted, transport=transport, rate=RATE, limits=limits
        )
        self.bridge = Bridge(line=self.line, session=self.core)
        self._ended = False
        self._pts = 0
        self.world.listeners[self.session] = self  # type: ignore[assignment]
        self.world.at(ms(at_ms), lambda: SessionOpened(self.session))
        self.world.at(ms(at_ms) + 1, self._begin)

    # Acts -------------------------------------------------------------------------------------------------------------

    def send(self, kind: str, *, at_ms: float, **fields: Any) -> None:
        self.do(at_ms, lambda: self.send_now(kind, **fields))

    def do(self, at_ms: float, act: Callable[[], Any]) -> None:
        def happen() -> None:
            act()

        self.world.at(ms(at_ms), happen)

    def send_now(self, kind: str, **fields: Any) -> None:
        self.raw(json.dumps({"type": kind, **fields}))

    def raw(self, text: str | bytes) -> None:
        self.bridge.on_text(text, self.world.now())
        self._flush()

    def microphone(self, *, at_ms: float = 60) -> None:
        """20 ms of sound in every 20 ms from now on: silence, and what `speak` says."""
        self._microphone_on = True
        self.do(at_ms, self._hum)

    def speak(self, pcm: NDArray[np.int16], *, at_ms: float) -> None:
        """int16 at 16 kHz, into the microphone."""
        self.do(at_ms, lambda: self._mic.append(pcm))

    def append(self, pcm: NDArray[np.int16], *, at_ms: float) -> None:
        """A whole recording at once, int16 at 24 kHz."""
        self.send("input_audio_buffer.append", at_ms=at_ms, audio=b64(pcm))

    def leave(self, *, at_ms: float) -> None:
        def happen() -> SessionClosed:
            self.core.close()
            self._ended = self.view.closed = True  # From here on news still come, and the view takes no event of them.
            return SessionClosed(self.session, "left")

        self.world.at(ms(at_ms), happen)

    # Time -------------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._origin = self.world.now()
        self.bridge.open(self.world.now())
        self._flush()
        self._tick()

    def _tick(self) -> None:
        if self._ended:
            return
        if self.core.transport is Transport.WEBRTC:
            frame = self.line.pull(self._pts, self.world.now())
            self._pts += 960
            self.sound.append(frame)
        self.bridge.tick(self.world.now())
        self._flush()
        self.world.at(self.world.now() + TICK, self._tick)

    def _hum(self) -> None:
        if self._ended or not self._microphone_on:
            return
        frame = np.full(320, 20, np.int16)
        frame[::2] = -20
        if self._mic:
            part = self._mic[0][:320]
            frame[: len(part)] += part
            self._mic[0] = self._mic[0][320:]
            if not len(self._mic[0]):
                self._mic.pop(0)
        if self.core.transport is Transport.WEBRTC:
            self._rtp = getattr(self, "_rtp", 0)
            self.bridge.on_audio(frame, self._rtp, self.world.now())
            self._rtp += 960
            self._flush()
        else:
            self.send_now("input_audio_buffer.append", audio=b64(at_24k(frame)))
        self.world.at(self.world.now() + TICK, self._hum)

    def take(self, news: Any, now: Nanos) -> None:
        """The simulator's news; chunks come through `publish`."""
        self._later(lambda: self.bridge.take(news, self.world.now()))

    def publish(self, news: PublishChunk, pcm: NDArray[np.int16]) -> None:
        self._later(lambda: self.bridge.take(news, self.world.now(), pcm))

    def _later(self, act: Callable[[], None]) -> None:
        def happen() -> None:
            act()
            self._flush()

        self.world.at(self.world.now(), happen)

    def _flush(self) -> None:
        for fact in self.bridge.facts():
            if not self._ended:
                self._to_engine(fact)
        for event in self.bridge.events():
            self.log.append((self.world.now() / NANOS_PER_MS, event))
            self.view.take(event)
            if event["type"] == "response.output_audio.delta":
                self.sound.append(np.frombuffer(base64.b64decode(event["delta"]), "<i2"))

    def _to_engine(self, fact: Any) -> None:
        if isinstance(fact, Block):
            arrived = self.world.put_input(fact, self.session)
            if arrived is not None:
                self.world.at(self.world.now(), lambda: arrived)
        else:
            self.world.at(self.world.now(), lambda: fact)

    # What happened ----------------------------------------------------------------------------------------------------

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for _, event in self.log if event["type"] == kind]

    def times(self, kind: str) -> list[float]:
        return [at for at, event in self.log if event["type"] == kind]

    def kinds(self, *, but: tuple[str, ...] = ()) -> list[str]:
        """Types in order; runs of the same type count once."""
        kinds: list[str] = []
        for _, event in self.log:
            if event["type"] not in but and kinds[-1:] != [event["type"]]:
                kinds.append(event["type"])
        return kinds

    def words(self) -> list[int]:
        """Numbers of the words in all sound that came."""
        pcm = np.concatenate(self.sound) if self.sound else np.zeros(0, np.int16)
        return [word.index for word in tones.decode(pcm, RATE)] if len(pcm) else []


def b64(pcm: NDArray[np.int16]) -> str:
    return base64.b64encode(pcm.astype("<i2").tobytes()).decode()


def at_24k(pcm: NDArray[np.int16]) -> NDArray[np.int16]:
    count = len(pcm) * 3 // 2
    at = np.arange(count) * (2 / 3)
    return np.rint(np.interp(at, np.arange(len(pcm)), pcm)).astype(np.int16)


def beep24(length_ms: float, level: int = 8000) -> NDArray[np.int16]:
    at = np.arange(round(24 * length_ms)) / 24_000
    return (np.sin(2 * np.pi * 700 * at) * level).astype(np.int16)
