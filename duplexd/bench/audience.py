"""A front end and its listeners, as a process of its own: who is answered asks again, and all is heard at once.

Started by `scheduling.overhead_figures`, so that what it does takes neither time nor interpreter from the engine.
"""

from __future__ import annotations

import argparse
import select
import socket
import subprocess
import sys
from typing import Any

from duplexd.channel import Channel
from duplexd.clock import now
from duplexd.errors import ChannelClosed
from duplexd.ids import SessionId
from duplexd.messages import (
    Cursor,
    CursorReported,
    EngineReady,
    PublishChunk,
    ResponseChanged,
    ResponseState,
    SessionOpened,
    SlotsFreed,
    TextArrived,
    pack,
    unpack_news,
)
from duplexd.units import Nanos, Ticks

_TERMINAL = {ResponseState.COMPLETED, ResponseState.CANCELLED, ResponseState.FAILED}
_QUIET_MAX_MS = 10_000


class Audience:
    """Args: sessions to open; replies, of all together, after which they leave."""

    def __init__(self, channel: Channel, *, sessions: int, replies: int) -> None:
        self._channel = channel
        self._sessions = sessions
        self._replies = replies
        self._asked = 0

    def listen(self) -> None:
        """Until enough was heard, or the engine is gone or silent for too long."""
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        try:
            while self._replies > 0 and poll.poll(_QUIET_MAX_MS):
                for packet in self._channel.receive():
                    self._answer(unpack_news(packet))
        except ChannelClosed:
            return

    def _answer(self, news: Any) -> None:
        if isinstance(news, EngineReady):
            for session in range(1, self._sessions + 1):
                self._send(SessionOpened(SessionId(session)))
                self._ask(SessionId(session))
        elif isinstance(news, PublishChunk):
            self._send(SlotsFreed((news.slot,)))
            cursor, zero = Cursor(news.epoch, news.span.end, now()), Ticks(0)
            self._send(CursorReported(news.session, cursor, zero, Nanos(0), zero, False))
        elif isinstance(news, ResponseChanged) and news.state in _TERMINAL:
            self._replies -= 1
            self._ask(news.session)

    def _ask(self, session: SessionId) -> None:
        self._asked += 1
        self._send(TextArrived(session, "go", str(self._asked)))

    def _send(self, fact: Any) -> None:
        self._channel.send(pack(fact))


def start(sock: socket.socket, *, sessions: int, replies: int) -> subprocess.Popen[bytes]:
    """An audience at the other end of a channel."""
    arguments = ["--channel", str(sock.fileno()), "--sessions", str(sessions), "--replies", str(replies)]
    return subprocess.Popen(
        [sys.executable, "-m", "duplexd.bench.audience", *arguments],
        pass_fds=(sock.fileno(),),
        stdin=subprocess.DEVNULL,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="listeners for `duplexd bench scheduler`; started by it")
    for name in ("channel", "sessions", "replies"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    channel = Channel(socket.socket(fileno=options.channel))
    Audience(channel, sessions=options.sessions, replies=options.replies).listen()


if __name__ == "__main__":
    main()
