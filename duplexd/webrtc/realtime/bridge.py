"""One person's line and its protocol, joined; without sockets.

    text of the client -> RealtimeSession -> orders -> Line, facts for the engine
    news of the engine -> Line, RealtimeSession -> events for the client

1. On a WebSocket there is no track: sound that was appended is fed to the line at most `FEED_SPEED` times as fast as it
   was spoken, and the character's sound leaves as soon as there is any.
2. A turn the client ends is ended behind all sound that was appended before; so is what the client orders after it.
3. Everything that waits has a bound; what goes beyond it is refused with an error.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duplexd.media.line import FlushOrder, HoldOrder, LatencyReady, Line, ResumeOrder, StateShown
from duplexd.messages import (
    AdvanceEpoch,
    InputCleared,
    LatencyMeasured,
    PublishChunk,
    ReplyUnwanted,
    ResponseChanged,
    ResponseState,
    ResumePlayback,
    StateChanged,
    TurnEnded,
)
from duplexd.units import INPUT_RATE, NANOS_PER_MS, Nanos, Ticks, ms_from_ticks, ticks_from_samples
from duplexd.webrtc.realtime.orders import ClearInput, Cut, EndTurn, Feed, Goodbye, Heard, Listening
from duplexd.webrtc.realtime.session import RealtimeSession, Transport

FEED_SPEED = 4.0  #: times real time
FEED_BURST_MS = 200.0  #: that may be fed at once
FEED_FRAME_MS = 20  #: handed to the line at a time
GAPS_KEPT = 64


class InputQueue:
    """Sound that waits to be heard, and what must not overtake it."""

    def __init__(self, *, ms_max: float) -> None:
        self._items: deque[Any] = deque()
        self._ms = 0.0
        self._ms_max = ms_max
        self._credit = FEED_BURST_MS
        self._at = Nanos(0)
        self.marks = 0  #: items that are no sound

    def __len__(self) -> int:
        return len(self._items)

    def push(self, sound: Feed) -> bool:
        """False when there is no room for it."""
        ms = 1000 * len(sound.pcm) / sound.wire.rate
        if self._ms + ms > self._ms_max:
            return False
        self._items.append(sound)
        self._ms += ms
        return True

    def mark(self, item: Any) -> None:
        self._items.append(item)
        self.marks += 1

    def clear_sound(self) -> None:
        self._items = deque(item for item in self._items if not isinstance(item, Feed))
        self._ms = 0.0

    def pop(self, now: Nanos) -> Any | None:
        """The next piece of sound that may be heard by now, int16 at 16 kHz, or the mark that comes before it."""
        gained = max(0, now - self._at) / NANOS_PER_MS * FEED_SPEED
        self._credit, self._at = min(FEED_BURST_MS, self._credit + gained), now
        if not self._items:
            return None
        first = self._items[0]
        if not isinstance(first, Feed):
            self.marks -= 1
            return self._items.popleft()
        count = min(len(first.pcm), first.wire.rate * FEED_FRAME_MS // 1000)
        ms = 1000 * count / first.wire.rate
        if self._credit < ms:
            return None
        self._credit -= ms
        self._ms -= ms
        if count == len(first.pcm):
            self._items.popleft()
        else:
            self._items[0] = Feed(first.pcm[count:], first.wire)
        return first.wire.resample(first.pcm[:count])


class Bridge:
    """Everything of one session that is not a socket.

    `facts()` are for the engine (blocks of sound among them), `events()` for the client, `goodbye` says that both are
    the last.
    """

    def __init__(self, *, line: Line, session: RealtimeSession, fed: bool = False) -> None:
        self.line = line
        self.session = session
        self.goodbye: Goodbye | None = None
        self._by_socket = session.transport is Transport.WEBSOCKET
        self._fed = fed or self._by_socket  #: the person's sound is appended; no track brings it
        self._queue = InputQueue(ms_max=session.limits.input_ms_max)
        self._facts: deque[Any] = deque()
        self._heard = Ticks(0)  #: of what was appended
        self._gaps: deque[tuple[Ticks, Ticks]] = deque(maxlen=GAPS_KEPT)  #: (where, all gaps up to there)
        self.latencies: deque[LatencyReady] = deque(maxlen=16)
        session.input_ms = self.input_ms
        line.holds = not self._by_socket

    def open(self, now: Nanos) -> None:
        self.session.open(now)
        self._carry(now)

    # In ---------------------------------------------------------------------------------------------------------------

    def on_text(self, text: str | bytes | dict[str, Any], now: Nanos) -> bool:
        """One event of the client, perhaps unpacked; whether it was taken."""
        taken = self.session.on_text(text, now)
        self._carry(now)
        self._feed(now)
        return taken

    def on_audio(self, pcm: NDArray[np.int16], rtp: int, now: Nanos) -> None:
        """Sound of a track, 16 kHz."""
        self.line.on_audio(pcm, rtp, now)
        self._carry(now)

    def take(self, news: Any, now: Nanos, pcm: NDArray[np.int16] | None = None) -> None:
        """News of the engine; the sound of a chunk comes with it."""
        match news:
            case PublishChunk():
                assert pcm is not None
                if self.line.publish(news, pcm):
                    self.session.on_chunk(news, pcm)
                self._pump(now)
            case AdvanceEpoch():
                self.line.advance(news)
                self.session.on_news(news, now)
            case ResumePlayback():
                self.line.resume(news, now)
                self._pump(now)
            case LatencyMeasured():
                self.line.measure(news)
                self.session.on_news(news, now)
            case StateChanged():
                self.line.enter(news.state, now)
                self.session.show(news.state)
            case ResponseChanged():
                if news.state is ResponseState.COMPLETED:
                    self.line.playout.finish()
                self.session.on_news(news, now)
            case _:
                self.session.on_news(news, now)
        self._carry(now)

    def end(self, code: str, reason: str, now: Nanos, *, close_code: int) -> None:
        """This side ends the session and says why."""
        self.session.end(code, reason, close_code=close_code)
        self._carry(now)

    def tick(self, now: Nanos) -> None:
        """Every 20 ms."""
        self._feed(now)
        self.line.tick(now)
        self._note_gap()
        self._pump(now)
        self.session.tick(now)
        self._carry(now)

    # Out --------------------------------------------------------------------------------------------------------------

    def events(self) -> list[dict[str, Any]]:
        return self.session.events()

    def facts(self) -> list[Any]:
        out = list(self._facts)
        self._facts.clear()
        return out

    def input_ms(self, at: Ticks) -> float:
        """A place of the input timeline as sound received: what was filled in while nothing came does not count."""
        gap = next((total for where, total in reversed(self._gaps) if where <= at), Ticks(0))
        return ms_from_ticks(at - gap)

    # Within -----------------------------------------------------------------------------------------------------------

    def _feed(self, now: Nanos) -> None:
        while (item := self._queue.pop(now)) is not None:
            if isinstance(item, np.ndarray):
                at = self.line.framer.newest
                self._heard = Ticks(self._heard + ticks_from_samples(len(item), INPUT_RATE))
                self.line.on_audio(item, at, now)
            elif isinstance(item, EndTurn):
                self._end_turn(item, now)
            else:
                self._facts.append(item)
            self._drain_line()
        self._carry(now)

    def _note_gap(self) -> None:
        if not self._fed:
            return
        newest = self.line.framer.newest
        total = Ticks(newest - self._heard)
        if total > (self._gaps[-1][1] if self._gaps else 0):
            self._gaps.append((newest, total))

    def _end_turn(self, order: EndTurn, now: Nanos) -> None:
        self.line.end_input(now)
        self._note_gap()
        self.line.listen_anew()
        self._drain_line()
        self._facts.append(TurnEnded(self.session.session, self.line.framer.position, order.key))

    def _pump(self, now: Nanos) -> None:
        if not self._by_socket:
            return
        while (taken := self.line.take(now)) is not None:
            self.session.on_sound(taken.position, taken.pcm)

    def _carry(self, now: Nanos) -> None:
        for order in self.session.orders():
            self._obey(order, now)
        self._drain_line()

    def _drain_line(self) -> None:
        for item in self.line.drain():
            match item:
                case HoldOrder():
                    self.line.answer_hold(item.hold, self._hold_since())
                case LatencyReady():
                    self.latencies.append(item)
                case StateShown():
                    self.session.show(item.state)
                case ResumeOrder() | FlushOrder():
                    pass  # Nobody at the other end mutes: silence simply turns into sound, or into nothing.
                case _:
                    self._facts.append(item)
        for item in self.line.drain():
            self._facts.append(item)

    def _hold_since(self) -> Nanos:
        return self.line.hold.since if self.line.hold is not None else Nanos(0)

    def _obey(self, order: Any, now: Nanos) -> None:
        match order:
            case Feed():
                if not self._queue.push(order):
                    said = "The input audio buffer is full: this sound is not taken. Append more slowly."
                    self.session.refuse("input_audio_buffer_full", said, now)
            case EndTurn():
                self._queue.mark(order)
            case ClearInput():
                self._queue.clear_sound()
                self.line.listen_anew()
                self._facts.append(InputCleared(self.session.session))
            case Cut():
                self.line.cut(order.position, now)
            case Heard():
                self.line.heard_until(order.position, now)
            case Listening():
                self.line.allow_barge_in = order.interrupts
                self.line.listen_anew(threshold=order.threshold)
            case Goodbye():
                self.goodbye = order
            case ReplyUnwanted():
                self._facts.append(order)
            case _ if self._queue.marks:
                self._queue.mark(order)  # It was ordered after the end of a turn that is still being heard.
            case _:
                self._facts.append(order)
