"""Starts the engine process, carries messages to and from it, and starts it again when it dies.

1. End of file on the channel is the death of the engine, however it died; its sessions end with a typed reason.
2. The shared memory has no name: when both processes are gone, so is it.
3. A restart waits a little longer after every death (1 to 30 s), and sessions opened meanwhile are refused with the
   reason.

    STARTING -> READY -> GONE -> STARTING
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any

import msgspec

from duplexd import clock
from duplexd.channel import PICTURES_PER_SLOT, Channel, MediaShape, SharedMedia
from duplexd.config import NO_FACE, Config, face_of, named_options
from duplexd.errors import ChannelClosed, ChannelFull, DuplexdError
from duplexd.messages import EngineReady, FreeSlots, MediaArrived, Metrics, SessionBytes, pack, unpack_news
from duplexd.units import BLOCK_SAMPLES, NANOS_PER_SECOND, Nanos, bytes_from_text

IN_SLOTS_PER_SESSION = 24
OUT_SLOTS_PER_SESSION = 8
CHUNK_SAMPLES_MAX = 24_000
#: Pictures on their way to the front end; a page that is seen has three fifths of a second of them.
PICTURE_SLOTS_PER_SESSION = 12
PICTURE_BYTES_MAX = 512 * 512 * 3 // 2
#: Packets that may wait for an engine that does not read: what its sessions can say in the time until it counts as
#: wedged. Media blocks are bounded by their slots already.
BACKLOG_MIN, BACKLOG_PER_SESSION = 1024, 256
DEAD_WITHIN_S = 1.0  #: an engine that closed its channel has nothing left to do; then it is killed
STOP_WITHIN_S = 5.0  #: the same for one that is asked to leave while it works
RESTART_MIN_S, RESTART_MAX_S = 1.0, 30.0
#: A loaded engine answers every message within milliseconds; one that says nothing for this long while media flows to
#: it is wedged, and is killed so that its people get an answer.
SILENT_MAX = Nanos(10 * NANOS_PER_SECOND)
FIGURES_AGE_MAX = Nanos(3 * NANOS_PER_SECOND)
WATCH_GAP_MAX = Nanos(2 * NANOS_PER_SECOND)

log = logging.getLogger("duplexd.supervisor")


class EngineState(Enum):
    STARTING = "starting"
    READY = "ready"
    GONE = "gone"


class Supervisor:
    """One engine process and its successors."""

    def __init__(self, config: Config, *, on_news: Callable[[Any], None], on_gone: Callable[[str], None]) -> None:
        self.config = config
        self.state = EngineState.GONE
        self.ready: EngineReady | None = None
        self.metrics: dict[str, float] = {}
        self._metrics_at = Nanos(0)
        self._lane_shares: dict[str, float] = {}
        self.session_bytes: tuple[SessionBytes, ...] = ()  #: of those that hold most
        self.restarts = 0
        self._on_news = on_news
        self._on_gone = on_gone
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self.media: SharedMedia | None = None
        self._free_in: list[int] = []
        self._became_ready = asyncio.Event()
        self._was_ready = False
        self.failure = ""  #: why the first start failed; an engine that never came up is not started again
        self._stopping = False
        self._burial: asyncio.Task[None] | None = None
        self._restart: asyncio.Task[None] | None = None
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="duplexd-engine-end")
        self._backoff_s = RESTART_MIN_S
        self._silent_since = Nanos(0)
        self._watched_at = Nanos(0)

    # Life -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Raises DuplexdError when this machine has no memory, no descriptor or no process to give; nothing is left."""
        try:
            self._launch()
        except OSError as error:
            self._drop()
            raise DuplexdError(f"the engine process could not be started ({error})") from error

    def _launch(self) -> None:
        face = face_of(self.config)
        shape = MediaShape(
            in_slots=IN_SLOTS_PER_SESSION * self.config.sessions_max,
            in_samples=BLOCK_SAMPLES,
            out_slots=OUT_SLOTS_PER_SESSION * self.config.sessions_max,
            out_samples=CHUNK_SAMPLES_MAX,
            picture_slots=PICTURE_SLOTS_PER_SESSION * self.config.sessions_max if face != NO_FACE else 0,
            picture_bytes=PICTURES_PER_SLOT * PICTURE_BYTES_MAX if face != NO_FACE else 0,
        )
        self.media = SharedMedia.create(shape)
        self._free_in = list(range(shape.in_slots))
        ours, theirs = Channel.pair()
        with theirs:
            self._channel = Channel(ours, backlog_max=BACKLOG_MIN + BACKLOG_PER_SESSION * self.config.sessions_max)
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "duplexd.engine.process"),
                    *("--channel", str(theirs.fileno())),
                    *("--media", str(self.media.fd)),
                    *("--config", self._engine_config(shape)),
                ],
                pass_fds=(theirs.fileno(), self.media.fd),
                env={**os.environ, "OMP_NUM_THREADS": "1", "DUPLEXD_LOG_LEVEL": self.config.log_level},
                stdin=subprocess.DEVNULL,
            )
        self.state = EngineState.STARTING
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._read)

    def _engine_config(self, shape: MediaShape) -> str:
        """The engine's own configuration struct lives in its process; here it is plain JSON."""
        config = self.config
        options = {"thinker": config.thinker} if config.thinker else {}
        if face_of(config) != NO_FACE:
            options["face"] = config.face
        if config.batch_max:
            options["batch_max"] = str(config.batch_max)
        if config.long_term:
            options["long_term"] = str(config.long_term)
        return msgspec.json.encode(
            {
                "model": config.model,
                "media": shape,
                "sessions_max": config.sessions_max,
                "sessions_resident": config.sessions_resident,
                "memory_bytes": bytes_from_text(config.memory) if config.memory else 0,
                "face_least": config.face_least,
                "place_wait_ms": config.place_wait_ms,
                "lanes_target": config.lanes_target,
                "policy": config.policy,
                "policy_options": named_options(config.policy_options),
                "device": config.device,
                "speculation": config.speculation,
                "model_options": options,
                "silence_max_ms": config.silence_max_ms,
                "voice_min_ms": config.voice_min_ms,
                "voice_end_ms": config.voice_end_ms,
                "judge_max_ms": config.judge_max_ms,
                "trace": config.trace,
                "trace_bytes_max": config.trace_mb_max * 1_000_000,
            }
        ).decode()

    async def wait_ready(self) -> None:
        """Until the engine is loaded, or `failure` says why it never will be."""
        await self._became_ready.wait()

    async def stop(self) -> None:
        """End the engine: it leaves by itself when the channel closes; killed when it does not."""
        self._stopping = True
        if self._restart is not None:
            self._restart.cancel()
        if self._burial is not None:
            await self._burial
        process = self._process
        self._drop()
        if process is not None:
            await self._ended(process, STOP_WITHIN_S)
        self._waiter.shutdown(wait=False)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    # Messages ---------------------------------------------------------------------------------------------

    def send(self, fact: Any) -> bool:
        """False when there is no engine to tell."""
        if self._channel is None:
            return False
        try:
            self._channel.send(pack(fact))
        except (ChannelClosed, ChannelFull) as error:
            self._die(str(error))
            return False
        if self._channel.wants_write:
            asyncio.get_running_loop().add_writer(self._channel.fileno(), self._flush)
        return True

    def _flush(self) -> None:
        assert self._channel is not None
        try:
            self._channel.flush()
        except ChannelClosed as error:
            self._die(str(error))
            return
        if not self._channel.wants_write:
            asyncio.get_running_loop().remove_writer(self._channel.fileno())

    def take_input_slot(self) -> int | None:
        """A free input slot; None when the engine has not given any back: the block is lost, and counted by the
        caller.
        """
        return self._free_in.pop() if self._free_in else None

    def send_media(self, fact: MediaArrived) -> None:
        if not self.send(fact):
            self._free_in.append(fact.slot)

    def _read(self) -> None:
        assert self._channel is not None
        try:
            packets = self._channel.receive()
        except ChannelClosed as error:
            self._die(str(error))
            return
        self._silent_since = Nanos(0)
        for packet in packets:
            if self._channel is None:
                return  # The engine was lost over the packet before.
            self._take(unpack_news(packet))

    def _take(self, news: Any) -> None:
        if isinstance(news, EngineReady):
            self.ready, self.state = news, EngineState.READY
            self._backoff_s = RESTART_MIN_S
            self._became_ready.set()
            self._was_ready = True
        elif isinstance(news, FreeSlots):
            self._free_in.extend(news.slots)
        elif isinstance(news, Metrics):
            self._measure(news.values, clock.now())
            self.session_bytes = news.sessions
        self._on_news(news)

    def _measure(self, values: dict[str, float], now: Nanos) -> None:
        if self._metrics_at:
            self._lane_shares = _shares(self.metrics, values, Nanos(now - self._metrics_at))
        self.metrics, self._metrics_at = values, now

    def lane_shares(self, now: Nanos) -> dict[str, float]:
        """Share of the last second in which each lane worked; nothing when the engine has said nothing lately."""
        return dict(self._lane_shares) if now - self._metrics_at <= FIGURES_AGE_MAX else {}

    # Death ------------------------------------------------------------------------------------------------

    def watch(self, now: Nanos, *, busy: bool) -> None:
        """Called now and then: an engine that is fed and says nothing is wedged.

        After a moment in which this process stood still itself (a suspended machine) nothing is known of the engine.
        """
        stood_still = now - self._watched_at > WATCH_GAP_MAX
        self._watched_at = now
        if stood_still or not busy or self.state is not EngineState.READY:
            self._silent_since = Nanos(0)
        elif not self._silent_since:
            self._silent_since = now
        elif now - self._silent_since > SILENT_MAX and self._process is not None:
            log.error("the engine has said nothing for %d s; killing it", SILENT_MAX // NANOS_PER_SECOND)
            self._process.kill()
            self._silent_since = now

    def _drop(self) -> None:
        if self._channel is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._channel.fileno())
            loop.remove_writer(self._channel.fileno())
            self._channel.close()
            self._channel = None
        if self.media is not None:
            self.media.close()
            self.media = None
        self.state, self.ready = EngineState.GONE, None
        self._metrics_at, self._lane_shares = Nanos(0), {}
        self._became_ready.clear()

    def _die(self, reason: str) -> None:
        """The channel is of no more use. The process is waited for beside the loop: others' media flows through it."""
        process, self._process = self._process, None
        self._drop()
        self.session_bytes = ()  # Its sessions are gone with it.
        if not self._stopping:
            self._burial = asyncio.get_running_loop().create_task(self._bury(process, reason))

    async def _bury(self, process: subprocess.Popen[bytes] | None, reason: str) -> None:
        """See the dead engine off, tell its people why, start its successor; one that never came up has none."""
        cause = _cause(await self._ended(process, DEAD_WITHIN_S) if process is not None else None)
        if not self._was_ready:
            self.failure = f"the engine could not start ({cause}); its message stands above"
            self._became_ready.set()
            return
        log.error("the engine process ended (%s): %s", cause, reason)
        if self._stopping:
            return
        self._restart = asyncio.get_running_loop().create_task(self._start_again())
        self._on_gone(f"the engine process ended ({cause}); it is being restarted")

    async def _ended(self, process: subprocess.Popen[bytes], within_s: float) -> int | None:
        """In a thread of its own: a slow name lookup in the shared pool must not keep people waiting for the news."""
        return await asyncio.get_running_loop().run_in_executor(self._waiter, _end, process, within_s)

    async def _start_again(self) -> None:
        """Tries until there is a process: a machine that is short of memory now may not be so in a minute."""
        while self.state is EngineState.GONE:
            await asyncio.sleep(self._backoff_s)
            self._backoff_s = min(RESTART_MAX_S, 2 * self._backoff_s)
            try:
                self.start()
            except DuplexdError as error:
                log.error("%s; trying again in %.1f s", error, self._backoff_s)
                continue
            self.restarts += 1


def _shares(before: dict[str, float], after: dict[str, float], passed: Nanos) -> dict[str, float]:
    """By lane, from the engine's counters of busy time. A step is counted at its end, so one may seem to exceed 1."""
    prefix = "busy_us_"
    lanes = [name for name in after if name.startswith(prefix)]
    busy = {name.removeprefix(prefix): after[name] - before.get(name, 0.0) for name in lanes}
    return {lane: min(1.0, max(0.0, 1000 * us / passed)) for lane, us in busy.items()}


def _end(process: subprocess.Popen[bytes], within_s: float) -> int | None:
    """Wait for a process whose channel is closed, then kill it. Returns its exit code; None if even that took long."""
    for _ in range(2):
        try:
            return process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.poll()


def _cause(code: int | None) -> str:
    if code is None:
        return "unknown"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
