"""The live world: the channel to the front end, lanes that really run, the machine's clock."""

from __future__ import annotations

import logging
import select
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from duplexd import clock
from duplexd.channel import Channel
from duplexd.engine.work import Launch, StageFailed, StageFinished
from duplexd.errors import ChannelClosed
from duplexd.messages import Metrics, Progress, ResponseChanged, ResponseState, pack, unpack_fact
from duplexd.streams.executor import POLL_NS, Completion, Executor
from duplexd.streams.stage import Failed
from duplexd.units import NANOS_PER_MS, Nanos

IDLE_WAIT_MAX = Nanos(1000 * NANOS_PER_MS)
FIGURES = (Progress, Metrics)

Measured = Callable[[], Mapping[str, float]]

log = logging.getLogger("duplexd.engine")


class LiveWorld:
    """Waits for packets and completions at once. Ends when the front end is gone.

    Args:    measured: figures of the machine's time, which go out beside those of the core.
    """

    def __init__(self, channel: Channel, executor: Executor, measured: Measured = dict) -> None:
        self._channel = channel
        self._executor = executor
        self._measured = measured
        self._events: deque[Any] = deque()
        self._ended = False
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        self._poll.register(executor.fileno(), select.POLLIN)
        self._watches_writes = False

    @property
    def ended(self) -> bool:
        return self._ended

    now = staticmethod(clock.now)

    def wait(self, until: Nanos | None) -> Any | None:
        """A due timer goes before the next event, so that a flood of events cannot starve it."""
        if until is not None and self.now() >= until:
            return None
        if not self._events:
            self._gather(until)
        return self._events.popleft() if self._events else None

    def _gather(self, until: Nanos | None) -> None:
        remaining = IDLE_WAIT_MAX if until is None else min(IDLE_WAIT_MAX, max(0, until - self.now()))
        if polled := self._executor.needs_poll:
            remaining = min(remaining, POLL_NS)  # CUDA events have no descriptor.
        self._watch_writes()
        # poll() takes whole milliseconds: round up, or the last fraction would be spun away.
        ready = {descriptor for descriptor, _ in self._poll.poll(-(-remaining // NANOS_PER_MS))}
        if polled or self._executor.fileno() in ready:
            self._events.extend(map(_fact, self._executor.completions()))
        if self._channel.fileno() in ready:
            self._exchange()

    def _exchange(self) -> None:
        """The channel is readable or writable, or its other end is gone."""
        try:
            self._channel.flush()
            self._events.extend(map(unpack_fact, self._channel.receive()))
        except ChannelClosed:
            self._ended = True

    def _watch_writes(self) -> None:
        if self._channel.wants_write is not self._watches_writes:
            self._watches_writes = not self._watches_writes
            writes = select.POLLOUT if self._watches_writes else 0
            self._poll.modify(self._channel.fileno(), select.POLLIN | writes)

    def execute(self, command: Any, now: Nanos) -> None:
        if isinstance(command, Launch):
            self._executor.launch(command.work, command.stage, command.jobs)
            return
        if isinstance(command, ResponseChanged) and command.state is ResponseState.FAILED:
            log.warning("session %d: response %d failed: %s", command.session, command.response, command.reason)
        if isinstance(command, FIGURES):
            if self._channel.wants_write:
                return  # The front end lags; the next figure says it better, and what must not be lost keeps its room.
            if isinstance(command, Metrics):
                command = Metrics({**command.values, **self._measured()}, command.sessions)
        try:
            self._channel.send(pack(command))
        except ChannelClosed:
            self._ended = True


def _fact(completion: Completion) -> StageFinished | StageFailed:
    for result in completion.results:
        if isinstance(result, Failed):
            log.warning("session %d: stage %s: %s", result.session, completion.stage, result.reason)
    if completion.failure is None:
        return StageFinished(completion.work, completion.results, completion.started, completion.ended)
    failure = completion.failure
    log.error("stage %s failed", completion.stage, exc_info=failure)
    return StageFailed(completion.work, f"{type(failure).__name__}: {failure}")
