"""The simulated world: virtual time, lanes that cost what their models say, listeners with a network between.

1. Same seed, same trace: time jumps from event to event, ties are broken by a serial number, and the only randomness
   is the one generator handed in.
2. Stages really run (on the word clock they cost nothing), at the *end* of their virtual time: as late as they may.
3. A `SimListener` is the front end's own `Line` behind a simulated network, loudspeaker and microphone. What it really
   heard is recorded sample by sample: that is the truth every history is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from duplexd.engine.core import EngineCore
from duplexd.engine.virtual import VirtualTime
from duplexd.engine.work import Launch, StageFailed, StageFinished
from duplexd.errors import LedgerError
from duplexd.ids import Epoch, SessionId
from duplexd.media.energy import EnergyDetector
from duplexd.media.line import (
    Block,
    EarReport,
    FlushOrder,
    HoldOrder,
    LatencyReady,
    Line,
    Muted,
    ResumeOrder,
)
from duplexd.media.pictures import PICTURES_BEHIND
from duplexd.media.playout import FRAME, Playout
from duplexd.messages import (
    AdvanceEpoch,
    CutFrames,
    FramesSent,
    FreeSlots,
    LatencyMeasured,
    MediaArrived,
    PicturesFreed,
    PublishChunk,
    PublishFrames,
    ResponseChanged,
    ResponseState,
    ResumePlayback,
    SessionClosed,
    SessionOpened,
    SlotsFreed,
    TurnSettled,
    ViewEnded,
    ViewStarted,
    VoicePlaced,
    VoiceStopped,
)
from duplexd.streams.stage import DecodeJob, Stage
from duplexd.units import NANOS_PER_MS, Nanos, Ticks, nanos_from_ticks, ticks_from_ms, ticks_from_nanos

TICK = Nanos(20 * NANOS_PER_MS)
REPORT_EVERY = Nanos(100 * NANOS_PER_MS)
PICTURE_TICK = ticks_from_ms(40)
FRAMES_SENT_EVERY = ticks_from_ms(80)
INPUT_FRAME = 320  #: samples of 20 ms at 16 kHz
ROOM_NOISE = 40.0  #: peak of the microphone's noise, int16


class SimMedia:
    """Slots of shared memory without the memory."""

    def __init__(self) -> None:
        self.inputs: dict[int, NDArray[np.int16]] = {}
        self.outputs: dict[int, NDArray[np.int16]] = {}
        self.pictures: dict[tuple[int, int], NDArray[np.uint8]] = {}  #: by slot and place in it

    def read(self, slot: int, samples: int) -> NDArray[np.int16]:
        return self.inputs[slot][:samples]

    def write(self, slot: int, pcm: NDArray[np.int16]) -> None:
        self.outputs[slot] = np.array(pcm, dtype=np.int16)

    def read_output(self, slot: int, samples: int) -> NDArray[np.int16]:
        return self.outputs[slot][:samples]

    def write_picture(self, slot: int, at: int, picture: NDArray[np.uint8]) -> None:
        self.pictures[slot, at] = picture


class SimNetwork(msgspec.Struct, frozen=True):
    """One listener's path; delays are one way."""

    delay: Nanos = Nanos(10 * NANOS_PER_MS)
    buffer: Nanos = Nanos(60 * NANOS_PER_MS)  #: jitter buffer and output device
    report_loss: float = 0.0


class SimWorld:
    """Runs a core in virtual time.

    Args:    stages: by name, loaded; `fails(launch)` may return a reason for a launch to fail (seeded faults).
    """

    def __init__(
        self,
        *,
        stages: Mapping[str, Stage],
        rng: Random,
        until: Nanos,
        in_slots: int = 256,
        fails: Callable[[Launch], str] | None = None,
    ) -> None:
        self.media = SimMedia()
        self.rng = rng
        self.news: list[tuple[Nanos, Any]] = []
        self.launches: list[tuple[Nanos, Launch]] = []
        self.listeners: dict[SessionId, SimListener] = {}
        self.stages = stages
        self._until = until
        self._time = VirtualTime()
        self._free_in = list(range(in_slots))
        self._fails = fails or (lambda launch: "")

    # The World contract ---------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self.now() >= self._until or self._time.next_at() is None

    def now(self) -> Nanos:
        return self._time.now

    def wait(self, until: Nanos | None) -> Any | None:
        """The next event in virtual time; None when the timer comes first."""
        while (at := self._time.next_at()) is not None:
            if until is not None and until < at:
                self._time.pass_to(until)
                return None
            event = self._time.step()
            if event is not None:
                return event
        return None

    def execute(self, command: Any, now: Nanos) -> None:
        if isinstance(command, Launch):
            self._launch(command, now)
            return
        self.news.append((now, command))
        if isinstance(command, FreeSlots):
            self._free_in.extend(command.slots)
            return
        listener = self.listeners.get(getattr(command, "session", SessionId(-1)))
        if isinstance(command, PublishChunk):
            pcm = self.media.outputs[command.slot]
            self.at(now, lambda: SlotsFreed((command.slot,)))
            if listener is not None:
                listener.publish(command, pcm)
        elif isinstance(command, PublishFrames):
            self.at(now, lambda: PicturesFreed((command.slot,)))
            if listener is not None:
                listener.view.publish(command, [self.media.pictures[command.slot, at] for at in range(command.count)])
        elif isinstance(command, CutFrames) and listener is not None:
            listener.view.cut(command)
        elif listener is not None:
            listener.take(command, now)

    # Events ---------------------------------------------------------------------------------------------

    def at(self, when: int, happen: Callable[[], Any]) -> None:
        """`happen` is called at `when`; what it returns, if anything, is the core's next event."""
        self._time.at(when, happen)

    def _launch(self, launch: Launch, now: Nanos) -> None:
        if self.launches and launch.work <= self.launches[-1][1].work:
            # As the fence book of a live engine does: its lanes would refuse the launch, and the engine would die.
            last = self.launches[-1][1].work
            raise LedgerError(f"work {launch.work} was launched after work {last}; names only grow")
        self.launches.append((now, launch))
        stage = self.stages[launch.stage]
        cost = stage.spec.cost.predict_us(rows=len(launch.jobs), units=_units(launch)) * 1000
        self.at(now + max(1, cost), lambda: self._finish(launch, stage, now))

    def _finish(self, launch: Launch, stage: Stage, started: Nanos) -> StageFinished | StageFailed:
        reason = self._fails(launch)
        if reason:
            return StageFailed(launch.work, reason)
        results = tuple(stage.run(launch.jobs, self.media))
        return StageFinished(launch.work, results, started, self.now())

    # Sessions -------------------------------------------------------------------------------------------

    def connect(
        self, session: SessionId, *, at: Nanos, rate: int, network: SimNetwork | None = None, barge_in: bool = True
    ) -> SimListener:
        listener = SimListener(self, session, rate=rate, network=network or SimNetwork(), barge_in=barge_in)
        self.listeners[session] = listener
        self.at(at, lambda: SessionOpened(session, barge_in=barge_in))
        self.at(at + 1, listener.begin)
        return listener

    def put_input(self, block: Block, session: SessionId) -> MediaArrived | None:
        if not self._free_in:
            return None
        slot = self._free_in.pop()
        self.media.inputs[slot] = block.pcm
        return MediaArrived(session, slot, block.span, block.captured_at, block.voice, block.echo, block.gap)


def _units(launch: Launch) -> int:
    job = launch.jobs[0]
    if isinstance(job, DecodeJob):
        return len(range(job.first, job.stop, job.stride))
    return int(getattr(job, "steps", 0)) + len(getattr(job, "feed", ())) + len(getattr(job, "moves", ())) or 1


class SimFrame(msgspec.Struct, frozen=True):
    """One picture, as it was published."""

    start: Ticks
    frame: Ticks
    chunk: int
    epoch: int
    level: int  #: luma of its first pixel


class SimView:
    """The front end's half of the pictures: what is due is shown, what is late is dropped, what is cut is not shown.

    Voice is placed by looking at what the playout sent.
    """

    def __init__(self, world: SimWorld, session: SessionId, playout: Playout) -> None:
        self.session = session
        self.shown: list[tuple[Ticks, SimFrame]] = []  #: (pts of the tick, picture), as the encoder got them
        self.published: list[tuple[Nanos, SimFrame]] = []
        self.cuts: list[CutFrames] = []
        self.late = 0
        self.on = False
        self._world = world
        self._playout = playout
        self._origin = Nanos(0)
        self._queue: dict[Ticks, SimFrame] = {}
        self._told_at = Ticks(-FRAMES_SENT_EVERY)
        self._follows: tuple[int, int, int] | None = None  # (epoch, pts, position) where the voice goes on

    def start(self, origin: Nanos) -> ViewStarted:
        """`origin`: of the clock of both tracks; pictures leave `PICTURES_BEHIND` after the voice of their moment."""
        self.on, self._origin, self._follows = True, Nanos(origin + PICTURES_BEHIND), None
        self._world.at(self._origin + nanos_from_ticks(self._next(self._pts())), self._tick)
        return ViewStarted(self.session, self._origin)

    def end(self) -> ViewEnded:
        self.on = False
        self._queue.clear()
        return ViewEnded(self.session)

    def _pts(self) -> Ticks:
        return ticks_from_nanos(self._world.now() - self._origin)

    def _next(self, pts: Ticks) -> Ticks:
        return Ticks((pts // PICTURE_TICK + 1) * PICTURE_TICK)

    def publish(self, news: PublishFrames, pictures: list[NDArray[np.uint8]]) -> None:
        for at, picture in enumerate(pictures):
            start = Ticks(news.start + at * news.frame)
            frame = SimFrame(start, news.frame, news.chunk, news.epoch, int(picture[0, 0]))
            self.published.append((self._world.now(), frame))
            if start < self._pts():
                self.late += 1
            elif self.on:
                self._queue[start] = frame

    def cut(self, news: CutFrames) -> None:
        self.cuts.append(news)
        self._queue = {
            start: frame for start, frame in self._queue.items() if frame.epoch >= news.epoch or start < news.at
        }

    def _tick(self) -> FramesSent | None:
        if not self.on:
            return None
        pts = Ticks(round(self._pts() / PICTURE_TICK) * PICTURE_TICK)
        frame = self._queue.pop(pts, None)
        if frame is not None:
            self.shown.append((pts, frame))
        self._world.at(self._origin + nanos_from_ticks(Ticks(pts + PICTURE_TICK)), self._tick)
        if pts - self._told_at < FRAMES_SENT_EVERY:
            return None
        self._told_at = pts
        return FramesSent(self.session, Ticks(pts + PICTURE_TICK))

    def sent_voice(self, pts: int) -> VoicePlaced | VoiceStopped | None:
        """The playout has been asked for the frame at `pts`: where its voice stands, if that is news."""
        place, after = self._playout.place(pts), self._playout.place(pts + 2)
        before, self._follows = self._follows, None
        if place is None or after is None or after.past:
            stopped = before is not None and (self._playout.held or before[0] != self._playout.epoch)
            return VoiceStopped(self.session, Epoch(before[0]), Ticks(pts)) if before and stopped else None
        self._follows = (place.epoch, pts + FRAME, place.position + FRAME)
        if before == (place.epoch, pts, place.position):
            return None
        return VoicePlaced(self.session, place.epoch, place.position, Ticks(pts))


class SimListener:
    """A person: a microphone that can be made to speak, a loudspeaker whose sound is recorded, a page that reports."""

    def __init__(self, world: SimWorld, session: SessionId, *, rate: int, network: SimNetwork, barge_in: bool) -> None:
        self.session = session
        self.network = network
        self.connected = False
        self.reports = True  #: False: a page that never says what it hears
        self.muted_until_pts: int | None = None
        self.muted = False
        self._muted_at = 0  #: pts at which the sound ended
        self.sent: list[NDArray[np.int16]] = []  #: what the transport was given, frame by frame
        self.heard: list[NDArray[np.int16]] = []  #: what left the loudspeaker, frame by frame
        self.latencies: list[LatencyReady] = []
        self._world = world
        self._rate = rate
        self._origin = Nanos(0)
        self._pts = 0
        self._speech: list[tuple[int, NDArray[np.int16]]] = []
        self._input_sample = 0
        self._stops = 0
        self.line = Line(
            session=session,
            rate=rate,
            detector=EnergyDetector(),
            echo=None,
            allow_barge_in=barge_in,
            pts_at=self._pts_at,
        )
        self.view = SimView(world, session, self.line.playout)

    def _pts_at(self, now: Nanos) -> int:
        return int(ticks_from_nanos(now - self._origin))

    # Life -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.connected = True
        self._origin = self._world.now()
        self._step()
        if self.reports:
            self._report_later()

    def leave(self, reason: str = "left") -> SessionClosed:
        self.connected = False
        return SessionClosed(self.session, reason)

    def say(self, pcm: NDArray[np.int16], *, at: Nanos) -> None:
        """Speak into the microphone: int16 at 16 kHz, from `at` on."""
        self._world.at(at, lambda: self._speech.append((self._input_sample, pcm)))

    def type(self, text: str, *, at: Nanos, key: str) -> None:
        self._world.at(at, lambda: self._flush_after(lambda now: self.line.say(text, key, now)))

    def look(self, *, at: Nanos) -> None:
        """Pictures are wanted from now on; their clock is that of the voice."""
        self._world.at(at, lambda: self.view.start(self._origin))

    def look_away(self, *, at: Nanos) -> None:
        self._world.at(at, self.view.end)

    def stop(self, *, at: Nanos) -> None:
        """The page mutes itself and says where the ear stood."""
        self._world.at(at, self._stop)

    def _stop(self) -> None:
        self._stops += 1
        stop_id = self._stops
        pts = self.ear_pts()
        self._mute()
        later = self._world.now() + self.network.delay
        self._world.at(later, lambda: self._flush_after(lambda now: self.line.on_stop(stop_id, at=Muted(pts), now=now)))

    # Every 20 ms ----------------------------------------------------------------------------------------

    def _step(self) -> None:
        if not self.connected:
            return
        now = self._world.now()
        frame = self.line.pull(self._pts, now)
        self.sent.append(frame)
        heard_at = now + self.network.delay + self.network.buffer
        pts = self._pts
        self._world.at(heard_at, lambda: self._hear(frame, pts))
        if (placed := self.view.sent_voice(pts)) is not None:
            self._world.at(now, lambda: placed)
        self._pts += FRAME
        self._microphone()
        self._flush_after(self.line.tick)
        self._world.at(now + TICK, self._step)

    def _hear(self, frame: NDArray[np.int16], pts: int) -> None:
        if self.muted_until_pts is not None and pts >= self.muted_until_pts:
            self.muted, self.muted_until_pts = False, None
        self.heard.append(np.zeros_like(frame) if self.muted else frame)

    def _mute(self) -> None:
        """The element mutes between two frames here: a frame is heard whole or not at all."""
        self._muted_at = self.ear_pts()
        self.muted, self.muted_until_pts = True, None

    def ear_pts(self) -> int:
        """First pts that was not heard yet; while muted it stands where the sound ended, as the page's does."""
        return self._muted_at if self.muted else len(self.heard) * FRAME

    def _microphone(self) -> None:
        noise = self._world.rng.uniform(0, ROOM_NOISE)
        frame = np.full(INPUT_FRAME, noise, dtype=np.float64)
        frame[::2] *= -1
        for begin, pcm in self._speech:
            part = pcm[max(0, self._input_sample - begin) : max(0, self._input_sample - begin + INPUT_FRAME)]
            frame[: len(part)] += part
        self._speech = [(b, p) for b, p in self._speech if b + len(p) > self._input_sample]
        rtp = self._input_sample * 3
        self._input_sample += INPUT_FRAME
        pcm16 = np.clip(frame, -32768, 32767).astype(np.int16)
        later = self._world.now() + self.network.delay
        self._world.at(later, lambda: self._flush_after(lambda now: self.line.on_audio(pcm16, rtp, now)))

    def _report_later(self) -> None:
        if not self.connected:
            return
        now = self._world.now()
        if self._world.rng.random() >= self.network.report_loss:
            pts, muted = self.ear_pts(), self.muted
            self._world.at(
                now + self.network.delay,
                lambda: self._flush_after(lambda at: self._reported(pts, now, muted, at)),
            )
        self._world.at(now + REPORT_EVERY, self._report_later)

    def _reported(self, pts: int, observed: Nanos, muted: bool, now: Nanos) -> None:
        report = EarReport(
            pts=pts,
            observed_at=observed,
            network=ticks_from_nanos(self.network.delay),
            jitter_buffer=ticks_from_nanos(self.network.buffer),
            output=Ticks(0),
        )
        self.line.on_report(report, now, muted=muted, silent=False)

    # News and orders ------------------------------------------------------------------------------------

    def publish(self, news: PublishChunk, pcm: NDArray[np.int16]) -> None:
        self.line.publish(news, pcm)

    def take(self, news: Any, now: Nanos) -> None:
        if isinstance(news, AdvanceEpoch):
            self._world.at(now, lambda: self._flush_after(lambda at: self.line.advance(news)))
        elif isinstance(news, ResumePlayback):
            self._world.at(now, lambda: self._flush_after(lambda at: self.line.resume(news, at)))
        elif isinstance(news, TurnSettled):
            self.line.settle_turn(news)
        elif isinstance(news, LatencyMeasured):
            self.line.measure(news)
        elif isinstance(news, ResponseChanged) and news.state is ResponseState.COMPLETED:
            self.line.playout.finish()

    def _flush_after(self, act: Callable[[Nanos], Any]) -> None:
        """Do something with the line, then carry its facts to the engine and its orders to the page."""
        now = self._world.now()
        act(now)
        for item in self.line.drain():
            self._carry(item, now)

    def _carry(self, item: Any, now: Nanos) -> None:
        over = now + self.network.delay
        match item:
            case Block():
                fact = self._world.put_input(item, self.session)
                if fact is not None:
                    self._world.at(now, lambda: fact)
            case HoldOrder():
                self._world.at(over, lambda: self._hold(item))
            case ResumeOrder() | FlushOrder():
                self._world.at(over, lambda: self._unmute_at(item.pts))
            case LatencyReady():
                self.latencies.append(item)
            case _:
                self._world.at(now, lambda: item)

    def _hold(self, order: HoldOrder) -> None:
        pts = self.ear_pts()
        self._mute()
        self._world.at(
            self._world.now() + self.network.delay,
            lambda: self._flush_after(lambda now: self.line.on_hold_answer(order.hold, at=Muted(pts), now=now)),
        )

    def _unmute_at(self, pts: int) -> None:
        """Stay (or become) mute until `pts` is heard."""
        self.muted, self.muted_until_pts = True, pts

    def sound(self) -> NDArray[np.int16]:
        """Everything that left the loudspeaker, int16 at the model's rate."""
        return np.concatenate(self.heard) if self.heard else np.zeros(0, np.int16)


def simulate(core: EngineCore, world: SimWorld) -> None:
    """Drive a core until the world ends."""
    from duplexd.engine.loop import drive

    drive(core, world)


__all__ = ["SimListener", "SimMedia", "SimNetwork", "SimWorld", "nanos_from_ticks", "simulate"]
