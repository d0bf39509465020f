"""What the engine knows about itself: counters, stage times, an event ring, a pressure snapshot.

Policies, benches and whoever watches read it; nothing here decides anything, and nothing here knows of transports.

1. The ring keeps the newest events and counts those that fell out; it never grows.
2. A `Pressure` is a value: whoever holds one sees the engine as it was `at` that moment.
3. What was not measured is None, so that a policy can turn off exactly the term that needs it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from duplexd.ids import Epoch, SessionId
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos, Ticks

EVENTS_MAX = 4096
#: The newest launch has this share of a stage's average time, as a divisor.
TIME_WEIGHT = 8
#: A lane's utilisation is the mean of so many whole windows: long enough that one reply's burst is not an overload.
WINDOW = Nanos(NANOS_PER_SECOND)
WINDOWS = 10


class Event(msgspec.Struct, frozen=True):
    """Something that happened to a session, for the ring."""

    at: Nanos
    session: SessionId
    kind: str  #: voice_started, interrupted, resumed, turn_ended, chunk_late, starved, underran, ...
    value: int = 0  #: what goes with it: ticks, nanoseconds or a count


class SessionPressure(msgspec.Struct, frozen=True):
    """One session as policies see it."""

    session: SessionId
    epoch: Epoch
    playback: Ticks  #: where the ear is
    generation: Ticks
    measured: bool  #: the ear's position is the listener's own
    person_speaks: bool
    interrupted_at: Nanos | None  #: the last barge-in
    replies: bool  #: a reply is under way
    started: bool  #: and its first sound is out
    buffers: Mapping[str, Ticks]  #: by stage: what it has made and nobody has heard


class Load(msgspec.Struct, frozen=True):
    """What all sessions share, at one moment."""

    at: Nanos
    pages: float | None  #: share of the page pool that is taken; None: not known
    latents: float
    out_slots: float  #: share of the output slots that are taken
    lanes: Mapping[str, float | None]  #: share of its time each lane worked lately; None: not measured yet
    places_taken: int
    places_free: int
    places_waited_for: int

    @property
    def busiest(self) -> float | None:
        """Utilisation of the busiest lane; None while none was measured."""
        return max((value for value in self.lanes.values() if value is not None), default=None)


class Pressure(msgspec.Struct, frozen=True):
    """The whole engine at one moment."""

    load: Load
    sessions: Mapping[SessionId, SessionPressure]


class StageTimes:
    """How long launches of each stage take, and how long everything after a stage takes.

    Args:    edges: (source, target) of the plan; a stage's successors are what a chunk still passes through.
    """

    def __init__(self, edges: Iterable[tuple[str, str]]) -> None:
        self._next: dict[str, list[str]] = {}
        for source, target in edges:
            self._next.setdefault(source, []).append(target)
        self._mean: dict[str, int] = {}

    def note(self, stage: str, took: Nanos) -> None:
        mean = self._mean.get(stage)
        self._mean[stage] = took if mean is None else mean + (took - mean) // TIME_WEIGHT

    def mean(self, stage: str) -> Nanos | None:
        """Moving average of one launch; None while nothing was measured."""
        mean = self._mean.get(stage)
        return None if mean is None else Nanos(mean)

    def after(self, stage: str) -> Nanos | None:
        """The longest way from this stage to the output; 0 after the last, None while a part of it is unmeasured."""
        longest = 0
        for follower in self._next.get(stage, ()):
            own, rest = self._mean.get(follower), self.after(follower)
            if own is None or rest is None:
                return None
            longest = max(longest, own + rest)
        return Nanos(longest)


class Utilisation:
    """Share of its time that one lane was taken, as the mean of the last whole windows."""

    def __init__(self) -> None:
        self._running = 0  # launches ordered and not come back
        self._taken_since = Nanos(0)  # while something runs: what came before this is counted already
        self._busy = 0
        self._window_at: Nanos | None = None  # where the window under way began
        self._whole: deque[float] = deque(maxlen=WINDOWS)

    def begin(self, now: Nanos) -> None:
        """A launch was ordered."""
        self._roll(now)
        if self._window_at is None:
            self._window_at = now
        if self._running == 0:
            self._taken_since = now
        self._running += 1

    def end(self, now: Nanos) -> None:
        """A launch has come back."""
        self._roll(now)
        self._running -= 1
        if self._running == 0:
            self._busy += now - self._taken_since

    def value(self, now: Nanos) -> float | None:
        """None until a whole window has passed since the lane's first launch."""
        self._roll(now)
        return sum(self._whole) / len(self._whole) if self._whole else None

    def _roll(self, now: Nanos) -> None:
        """Close the windows that have passed; a lane that slept for long has as many empty ones as are kept."""
        if self._window_at is None:
            return
        if now - self._window_at > (WINDOWS + 2) * WINDOW:
            self._close_window()
            self._window_at = Nanos(now - (now - self._window_at) % WINDOW - WINDOWS * WINDOW)
            self._taken_since = max(self._taken_since, self._window_at)
        while now >= self._window_at + WINDOW:
            self._close_window()

    def _close_window(self) -> None:
        assert self._window_at is not None
        ends = Nanos(self._window_at + WINDOW)
        if self._running:
            self._busy += ends - self._taken_since
            self._taken_since = ends
        self._whole.append(self._busy / WINDOW)
        self._busy, self._window_at = 0, ends


class Monitor:
    """Monotonic counters by name, and what the engine measures of itself. Names are nouns; the unit stands last."""

    def __init__(self, edges: Iterable[tuple[str, str]] = (), *, events_max: int = EVENTS_MAX) -> None:
        self._counts: Counter[str] = Counter()
        self._events: deque[Event] = deque(maxlen=events_max)
        self._lanes: dict[str, Utilisation] = {}
        self.times = StageTimes(edges)

    # Counters --------------------------------------------------------------------------------------------------------

    def count(self, name: str, by: int = 1) -> None:
        self._counts[name] += by

    def values(self) -> dict[str, float]:
        return {name: float(self._counts[name]) for name in sorted(self._counts)}

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    # Events ----------------------------------------------------------------------------------------------------------

    def note(self, at: Nanos, session: SessionId, kind: str, value: int = 0) -> None:
        """Put an event into the ring; the oldest leaves when it is full, which is counted."""
        if len(self._events) == self._events.maxlen:
            self._counts["events_overwritten"] += 1
        self._events.append(Event(at, session, kind, value))

    def events(self, *kinds: str) -> Sequence[Event]:
        """Oldest first; of all kinds when none is named."""
        return tuple(event for event in self._events if not kinds or event.kind in kinds)

    # Lanes -----------------------------------------------------------------------------------------------------------

    def began(self, lane: str, now: Nanos) -> None:
        """A launch was ordered."""
        if lane not in self._lanes:
            self._lanes[lane] = Utilisation()
        self._lanes[lane].begin(now)

    def ended(self, lane: str, now: Nanos) -> None:
        """A launch has come back, well or not."""
        self._lanes[lane].end(now)

    def ran(self, lane: str, stage: str, took: Nanos) -> None:
        """A launch that came back well worked for so long."""
        self.count("launches")
        self.count(f"busy_us_{lane}", took // 1000)
        self.times.note(stage, took)

    def utilisation(self, now: Nanos) -> Mapping[str, float | None]:
        """By lane, of those that have worked."""
        return MappingProxyType({lane: used.value(now) for lane, used in self._lanes.items()})

    def late(self, at: Nanos, session: SessionId, late: Nanos) -> None:
        """A chunk was published after its predecessor had been heard to its end: somebody heard a gap."""
        self.count("chunks_late")
        self.count("chunks_late_ms", max(0, late) // NANOS_PER_MS)
        self.note(at, session, "chunk_late", late)
