"""Lanes: ordered queues of work with a priority, and the fences between them.

1. Work of one lane runs in the order it was submitted. Work of two lanes has no order but what `waits` says.
2. A fence passes when its work has ended, well or badly, or was cancelled before it began. The fence of work that never
   ends never passes: that work may still write, so what it writes to is never handed out again.
3. `finished` is told before the fence passes, so that whoever sees a fence passed can already have the result.
4. A queue that is full raises `LaneFull`; nothing is dropped and nothing waits.
5. `close` ends in bounded time and says whether the lane did.

    InlineLane     runs at once, on the caller's thread: the plain version
    HostLane       one worker thread
    StreamLane     one worker thread with a CUDA stream of its own, which it waits for at the end of each piece of work
    CudaLane       one CUDA stream; the caller's thread enqueues kernels and polls events
    AdversaryLane  runs as late as the fences allow, in an order drawn from a seed: finds missing waits without a device

`finished` is called on the worker thread of a HostLane or StreamLane, and on the submitting or polling thread of every
other lane.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from duplexd import clock
from duplexd.errors import DuplexdError, LedgerError
from duplexd.ids import FenceId
from duplexd.streams.fence import FenceBook
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos

if TYPE_CHECKING:
    from random import Random

T = TypeVar("T")
Now = Callable[[], Nanos]
Work = Callable[[], Any]


class LaneError(DuplexdError):
    """Base of lane errors."""


class LaneFull(LaneError):
    """The lane has as much queued work as it may; submit again once some of it has ended."""


class LaneClosed(LaneError):
    """The lane was closed before this work began."""


class WorkCancelled(LaneError):
    """The work was cancelled before it began."""


class DeviceLost(LaneError):
    """A fault of the device: its context is gone with everything in it, and the process has to end."""


class Finished(msgspec.Struct, frozen=True):
    """The end of one piece of work. Times are of the host's monotonic clock; equal when it never began."""

    fence: FenceId
    value: Any
    error: BaseException | None
    started: Nanos
    ended: Nanos


Sink = Callable[[Finished], None]


class Later(msgspec.Struct, frozen=True):
    """A value to be read once the fence has passed.

    Work on a device only enqueues: it copies its figures to pinned host memory and returns `Later(read)`, so that no
    stage waits for its own kernels. Every lane calls `read` at the right time and reports what it returns.
    """

    read: Callable[[], Any]


class Lane(Protocol):
    """One contract for all lanes; the rules are at the head of this file."""

    name: str
    priority: int  #: greater is more urgent; 0 is ordinary
    queue_max: int  #: pieces of work queued or running at once
    needs_poll: bool  #: True while the lane makes progress only in `poll`

    def open(self, finished: Sink) -> None:
        """Start; called once, before anything is submitted."""

    def submit(self, work: Callable[[], T], *, waits: Sequence[FenceId] = (), fence: FenceId | None = None) -> FenceId:
        """Queue work that begins only when every fence in `waits` has passed; returns the fence of its end.

        `fence` names it (see `FenceBook`). Raises LaneFull, LaneClosed, or LedgerError for a fence never issued.
        """

    def cancel(self, fence: FenceId) -> bool:
        """True when the work had not begun and never will; its fence passes in its turn, with WorkCancelled."""

    def poll(self) -> None:
        """Make what progress can be made without waiting."""

    @property
    def queued(self) -> int:
        """Pieces of work queued or running."""

    @property
    def busy_since(self) -> Nanos | None:
        """When the work that is running began; None when none is. The monitor measures wedges by it."""

    def close(self, *, within: Nanos) -> bool:
        """Run nothing that has not begun, wait for what has. False: the lane is wedged and its work still runs."""


class Fences:
    """The fence book, shared by the lanes of one engine and their threads.

    `events` holds the CUDA event of a fence while it is outstanding: another CUDA lane waits for that on the device.
    """

    def __init__(self) -> None:
        self.book = FenceBook()
        self.events: dict[FenceId, Any] = {}
        # Entered as a lock where nobody waits: entering a condition takes a call in Python, and a launch has several.
        self._lock = threading.RLock()
        self._passing = threading.Condition(self._lock)

    def issue(self, lane: str, fence: FenceId | None) -> FenceId:
        with self._lock:
            return self.book.issue(lane, fence)

    def passed(self, fence: FenceId) -> bool:
        return self.book.passed(fence)

    def all_passed(self, fences: Sequence[FenceId]) -> bool:
        return all(map(self.book.passed, fences))

    def mark_passed(self, fence: FenceId) -> None:
        with self._lock:
            self.book.mark_passed(fence)
            self.events.pop(fence, None)
            self._passing.notify_all()

    def wait(self, fences: Sequence[FenceId], *, unless: Callable[[], bool]) -> bool:
        """Block until all have passed (True), or `unless` turns true after a `wake` (False)."""
        with self._passing:
            while not self.all_passed(fences):
                if unless():
                    return False
                self._passing.wait()
            return True

    def wake(self) -> None:
        """Let waiters look at their `unless` again."""
        with self._passing:
            self._passing.notify_all()


class _Entry:
    """One piece of queued work."""

    __slots__ = ("cancelled", "fence", "waits", "work")

    def __init__(self, fence: FenceId, work: Work, waits: tuple[FenceId, ...]) -> None:
        self.fence = fence
        self.work = work
        self.waits = waits
        self.cancelled = False


class _QueuedLane:
    """What the lanes share: the queue and its bound, cancelling, running one entry, reporting its end."""

    needs_poll = True

    def __init__(self, name: str, fences: Fences, *, queue_max: int, priority: int, now: Now) -> None:
        self.name = name
        self.priority = priority
        self.queue_max = queue_max
        self.fences = fences
        self._now = now
        self._queue: deque[_Entry] = deque()
        self._finished: Sink | None = None
        self._closed = False
        self._running_since: Nanos | None = None

    def open(self, finished: Sink) -> None:
        if self._finished is not None:
            raise LaneError(f"lane {self.name} is already open")
        self._finished = finished

    @property
    def queued(self) -> int:
        return len(self._queue) + (self._running_since is not None)

    @property
    def busy_since(self) -> Nanos | None:
        return self._running_since

    def submit(self, work: Callable[[], T], *, waits: Sequence[FenceId] = (), fence: FenceId | None = None) -> FenceId:
        entry = self._accept(work, waits, fence)
        self._queue.append(entry)
        return entry.fence

    def _accept(self, work: Work, waits: Sequence[FenceId], fence: FenceId | None) -> _Entry:
        if self._closed or self._finished is None:
            raise LaneClosed(f"lane {self.name} is not open")
        if self.queued >= self.queue_max:
            raise LaneFull(f"lane {self.name} has {self.queued} pieces of work, queue_max is {self.queue_max}")
        pending = tuple(wait for wait in waits if not self.fences.passed(wait)) if waits else ()
        return _Entry(self.fences.issue(self.name, fence), work, pending)

    def cancel(self, fence: FenceId) -> bool:
        for entry in tuple(self._queue):
            if entry.fence == fence:
                entry.cancelled = True
                return True
        return False

    def poll(self) -> None:
        """Nothing: overridden by the lanes that make progress only when polled."""

    def _run(self, entry: _Entry) -> None:
        """Run one entry to its end on this thread."""
        if entry.cancelled:
            self._running_since = None
            self._end_unrun(entry, WorkCancelled(f"work {entry.fence} on lane {self.name} was cancelled"))
            return
        self._running_since = started = self._now()
        value, error = self._perform(entry.work)
        ended = self._now()
        self._running_since = None
        self._end(Finished(entry.fence, value, error, started, ended))

    def _perform(self, work: Work) -> tuple[Any, BaseException | None]:
        return _outcome(work)

    def _end_unrun(self, entry: _Entry, error: LaneError) -> None:
        now = self._now()
        self._end(Finished(entry.fence, None, error, now, now))

    def _end(self, end: Finished) -> None:
        assert self._finished is not None
        self._finished(end)
        self.fences.mark_passed(end.fence)

    def _drop_queue(self) -> None:
        while self._queue:
            self._end_unrun(self._queue.popleft(), LaneClosed(f"lane {self.name} was closed"))

    def close(self, *, within: Nanos) -> bool:
        self._closed = True
        self._drop_queue()
        return True


def _outcome(work: Work) -> tuple[Any, BaseException | None]:
    """Run work, and read what it left to be read; whatever it raises is its outcome, and the lane goes on."""
    try:
        value = work()
        return (value.read() if isinstance(value, Later) else value), None
    except (Exception, SystemExit) as error:
        return None, error


class InlineLane(_QueuedLane):
    """Runs work inside `submit`, on the caller's thread: the plain version the others are compared with.

    It cannot wait: a fence in `waits` that has not passed raises LedgerError.
    """

    needs_poll = False

    def __init__(
        self, name: str, fences: Fences, *, queue_max: int = 64, priority: int = 0, now: Now = clock.now
    ) -> None:
        super().__init__(name, fences, queue_max=queue_max, priority=priority, now=now)

    def submit(self, work: Callable[[], T], *, waits: Sequence[FenceId] = (), fence: FenceId | None = None) -> FenceId:
        late = [wait for wait in waits if not self.fences.passed(wait)]
        if late:
            raise LedgerError(f"inline lane {self.name} cannot wait for fence {late[0]}; it has not passed")
        entry = self._accept(work, waits, fence)
        self._run(entry)
        return entry.fence


class HostLane(_QueuedLane):
    """One worker thread. A priority below 0 lowers the thread's share of the processor (nice 5 per step, at most 19).

    Raising a thread's share needs rights that a daemon should not have, so 0 and above are alike.
    """

    needs_poll = False

    def __init__(
        self, name: str, fences: Fences, *, queue_max: int = 64, priority: int = 0, now: Now = clock.now
    ) -> None:
        super().__init__(name, fences, queue_max=queue_max, priority=priority, now=now)
        self._lock = threading.Lock()
        # Rung once for each piece of work and for the close: a wake-up costs less than a condition's, here and there.
        self._bell: SimpleQueue[None] = SimpleQueue()
        # A daemon thread: wedged work must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"lane-{name}", daemon=True)

    def open(self, finished: Sink) -> None:
        super().open(finished)
        self._thread.start()

    def submit(self, work: Callable[[], T], *, waits: Sequence[FenceId] = (), fence: FenceId | None = None) -> FenceId:
        with self._lock:
            entry = self._accept(work, waits, fence)
            self._queue.append(entry)
        self._bell.put(None)
        return entry.fence

    def cancel(self, fence: FenceId) -> bool:
        with self._lock:
            found = super().cancel(fence)
        self.fences.wake()
        return found

    def close(self, *, within: Nanos) -> bool:
        with self._lock:
            self._closed = True
        self._bell.put(None)
        self.fences.wake()
        if self._thread.ident is not None:
            self._thread.join(within / NANOS_PER_SECOND)
        return not self._thread.is_alive()

    def _work(self) -> None:
        self._name_thread()
        self._lower_priority()
        while (entry := self._next()) is not None:
            self._run(entry)
        self._drop_queue()

    def _next(self) -> _Entry | None:
        """The oldest entry once its waits have passed, taken off the queue; None when the lane closes."""
        self._bell.get()
        if self._closed:
            return None
        entry = self._queue[0]
        # Not under the lock: the engine goes on submitting and cancelling while this lane waits for another.
        if entry.waits:
            self.fences.wait(entry.waits, unless=lambda: self._closed or entry.cancelled)
        with self._lock:
            if self._closed:
                return None
            self._running_since = self._now()
            return self._queue.popleft()

    def _name_thread(self) -> None:
        """So that the lane is told apart in a list of threads, and its processor time can be read (Linux)."""
        with contextlib.suppress(OSError):
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(self._thread.name[:15])

    def _lower_priority(self) -> None:
        if self.priority < 0:
            # Linux: a thread has its own nice value, addressed by its native id.
            thread = threading.get_native_id()
            nice = os.getpriority(os.PRIO_PROCESS, thread) - 5 * self.priority
            os.setpriority(os.PRIO_PROCESS, thread, min(19, nice))


class StreamLane(HostLane):
    """A worker thread with a CUDA stream of its own: the lane of stages that read figures back while they run.

    1. Work runs with the lane's stream as the current one. Its fence passes when the stream is idle, so whoever waits
       for the fence, on whatever lane, needs no event. Waiting for the stream costs this thread, not the engine's.
    2. Also work that raised is waited for: kernels enqueued before still run, and write.
    3. A device fault ends its work with `DeviceLost`; the executor raises that on the engine's thread.
    4. As with a CudaLane, only the arena is shared between streams.
    """

    def __init__(
        self,
        name: str,
        fences: Fences,
        *,
        queue_max: int = 64,
        priority: int = 0,
        device: str = "cuda",
        now: Now = clock.now,
    ) -> None:
        super().__init__(name, fences, queue_max=queue_max, priority=priority, now=now)
        self.stream = _stream(device, priority)

    def _perform(self, work: Work) -> tuple[Any, BaseException | None]:
        import torch

        with torch.cuda.stream(self.stream):
            value, error = _outcome(partial(self._waited, work))
            if error is not None:
                error = self._settled(error)
        return value, error

    def _waited(self, work: Work) -> Any:
        value = work()
        self.stream.synchronize()
        return value

    def _settled(self, error: BaseException) -> BaseException:
        """What an error is once the stream is idle: itself, or the loss of the device."""
        try:
            self.stream.synchronize()
        except RuntimeError as fault:
            lost = DeviceLost(f"lane {self.name}: {fault}")
            lost.__cause__ = error
            return lost
        return error


def _stream(device: str, priority: int) -> Any:
    """A CUDA stream. CUDA counts the other way round: lower numbers are more urgent, and torch has none above 0."""
    import torch  # here, so that a machine without a device can import this module

    return torch.cuda.Stream(device, priority=-max(0, priority))  # type: ignore[no-untyped-call]


class _InFlight(msgspec.Struct):
    """Work whose kernels are enqueued. `end` is None for cancelled work: it passes in its turn."""

    entry: _Entry
    begin: Any  # torch.cuda.Event
    end: Any
    value: Any
    error: BaseException | None
    enqueued: Nanos


class CudaLane(_QueuedLane):
    """A CUDA stream. `submit` runs the work on the caller's thread, which enqueues kernels and returns.

    1. A CUDA event after the work is its fence; `poll` asks the events, oldest first. CUDA offers no file descriptor
       for an event, so the engine's loop polls while work is in flight.
    2. A wait for another CUDA lane is a wait of the stream. Work that waits for a lane of another kind is held back,
       and what was submitted after it as well, until a `poll` finds that fence passed.
    3. Only the arena is shared between streams. A temporary that torch allocates inside the work belongs to this
       stream's pool and must not leave it: the caching allocator sees one stream only (pytorch#23729).
    4. A device fault raises out of `poll`. The context is lost with it, and the process has to end.
    """

    def __init__(
        self,
        name: str,
        fences: Fences,
        *,
        queue_max: int = 64,
        priority: int = 0,
        device: str = "cuda",
        now: Now = clock.now,
    ) -> None:
        super().__init__(name, fences, queue_max=queue_max, priority=priority, now=now)
        import torch

        self._cuda = torch.cuda
        self.stream = _stream(device, priority)
        self._in_flight: deque[_InFlight] = deque()

    @property
    def queued(self) -> int:
        return len(self._queue) + len(self._in_flight)

    @property
    def busy_since(self) -> Nanos | None:
        return self._in_flight[0].enqueued if self._in_flight else None

    def submit(self, work: Callable[[], T], *, waits: Sequence[FenceId] = (), fence: FenceId | None = None) -> FenceId:
        entry = self._accept(work, waits, fence)
        self._queue.append(entry)
        self._advance()
        return entry.fence

    def poll(self) -> None:
        while self._in_flight and (self._in_flight[0].end is None or self._in_flight[0].end.query()):
            self._retire(self._in_flight.popleft())
        self._advance()

    def close(self, *, within: Nanos) -> bool:
        self._closed = True
        deadline = self._now() + within
        pause = threading.Event()
        self.poll()
        while self._in_flight and self._now() < deadline:
            pause.wait(0.0002)
            self.poll()
        if self._in_flight:
            return False
        self._drop_queue()
        return True

    def _advance(self) -> None:
        while self._queue and not self._closed and self._may_enqueue(self._queue[0]):
            self._in_flight.append(self._enqueue(self._queue.popleft()))

    def _may_enqueue(self, entry: _Entry) -> bool:
        return entry.cancelled or all(self.fences.passed(wait) or wait in self.fences.events for wait in entry.waits)

    def _enqueue(self, entry: _Entry) -> _InFlight:
        now = self._now()
        if entry.cancelled:
            return _InFlight(entry, None, None, None, None, now)
        begin, end = self._event(), self._event()
        value: Any = None
        error: BaseException | None = None
        with self._cuda.stream(self.stream):
            for event in filter(None, map(self.fences.events.get, entry.waits)):
                self.stream.wait_event(event)
            begin.record(self.stream)
            try:
                value = entry.work()
            except Exception as raised:
                error = raised
            # Also after a failure: kernels enqueued before it still run, and write.
            end.record(self.stream)
        self.fences.events[entry.fence] = end
        return _InFlight(entry, begin, end, value, error, now)

    def _event(self) -> Any:
        return self._cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def _retire(self, flight: _InFlight) -> None:
        if flight.end is None:
            self._end_unrun(flight.entry, WorkCancelled(f"work {flight.entry.fence} on lane {self.name} was cancelled"))
            return
        value, error = flight.value, flight.error
        if isinstance(value, Later):
            value, error = _outcome(value.read)
        ended = self._now()
        started = Nanos(ended - round(flight.begin.elapsed_time(flight.end) * NANOS_PER_MS))
        self._end(Finished(flight.entry.fence, value, error, started, ended))


class Adversary:
    """Finds missing fences without a device: of all orders the fences allow, it runs one that hurts.

    It starves some lanes for as long as others have work that may run, and changes its mind at seeded moments. A read
    that does not wait for its write then comes first; work whose slots were given away runs after their next owner's.

    Args:    rng: the only source of its choices; same seed, same order.
             fill: fills slots with NaN (`Arena.fill_nan`). Give `freed` to the ledgers: what they free is filled before
             they hand it out again.
    """

    #: How often, in one of so many steps, the order of favour changes.
    PATIENCE = 6

    def __init__(self, rng: Random, *, fill: Callable[[str, Sequence[int]], None]) -> None:
        self.rng = rng
        self.lanes: list[AdversaryLane] = []
        self.filled = 0  #: slots filled so far
        self._fill = fill
        self._favour: list[AdversaryLane] = []

    def freed(self, partition: str, slots: Sequence[int]) -> None:
        """A ledger's `freed` hook."""
        self.filled += len(slots)
        self._fill(partition, slots)

    def step(self) -> bool:
        """Run one piece of work that its fences allow; False when there is none."""
        if len(self._favour) != len(self.lanes) or self.rng.randrange(self.PATIENCE) == 0:
            self._favour = list(self.lanes)
            self.rng.shuffle(self._favour)
        for lane in self._favour:
            if lane.may_run():
                lane.run_next()
                return True
        return False


class AdversaryLane(_QueuedLane):
    """A lane without a thread whose work runs when the adversary likes, within what the fences allow."""

    def __init__(
        self,
        name: str,
        fences: Fences,
        *,
        adversary: Adversary,
        queue_max: int = 64,
        priority: int = 0,
        now: Now = clock.now,
    ) -> None:
        super().__init__(name, fences, queue_max=queue_max, priority=priority, now=now)
        self._adversary = adversary
        adversary.lanes.append(self)

    def poll(self) -> None:
        """One step of the adversary for each round of polls: its first lane asks for all of them."""
        if self._adversary.lanes[0] is self:
            self._adversary.step()

    def may_run(self) -> bool:
        return bool(self._queue) and (self._queue[0].cancelled or self.fences.all_passed(self._queue[0].waits))

    def run_next(self) -> None:
        self._run(self._queue.popleft())
