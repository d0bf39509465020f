"""What the engine knows about itself: counters, stage times, an event ring, a pressure snapshot.

Nothing here decides anything, and nothing here knows of transports. Policies read `Load`, the half of a `Pressure`
that all sessions share. Its other half is O(sessions) to make, and an order is made offer by offer: so each offer
brings what is needed of its own session (`Work`, `Moment`; policy.py says which figure is where). The whole `Pressure`
and the ring are for whoever looks at the engine from outside: a test, a debugger, a simulation.

1. The ring keeps the newest events and counts those that fell out; it never grows.
2. A `Pressure` is a value, mappings included: whoever holds one sees the engine as it was `at` that moment.
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
#: Deviations beyond the mean that one must expect (RFC 6298: a timeout is the mean and four deviations).
DEVIATIONS = 4
#: The same for launches of as many rows, whose spread is small; what it is taken for at first, and the newest's share.
STRAYS, STRAYED_FIRST, STRAYED_WEIGHT = 3, 0.25, 16
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
    """One session, as whoever looks at the engine sees it; what policies see of it comes with each offer (`Work`)."""

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
    pages: float | None  #: share of the page pool that is taken and cannot leave; None: not known
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
    """How long launches of each stage take, and everything after a stage: on average, and as long as one must expect.

    Args:    edges: (source, target) of the plan; a stage's successors are what a chunk still passes through.
    """

    def __init__(self, edges: Iterable[tuple[str, str]]) -> None:
        self._next: dict[str, list[str]] = {}
        for source, target in edges:
            self._next.setdefault(source, []).append(target)
        self._mean: dict[str, Nanos] = {}
        self._deviation: dict[str, int] = {}
        self._reach: dict[str, Nanos] = {}  # see `reach`
        self._of_rows: dict[tuple[str, int], int] = {}
        self._strayed: dict[str, float] = {}  # from the mean of launches of as many rows, as a share of it
        self._running: dict[str, tuple[int, Nanos]] = {}  # rows, begun at

    def begin(self, stage: str, rows: int, now: Nanos) -> None:
        """A launch of so many rows was ordered."""
        self._running[stage] = (rows, now)

    def end(self, stage: str) -> int:
        """It has come back, well or not; returns its rows."""
        return self._running.pop(stage, (1, Nanos(0)))[0]

    def note(self, stage: str, took: Nanos, *, rows: int = 1) -> None:
        """A launch that came back well took so long."""
        usual = self._of_rows.get((stage, rows), took)
        strayed = self._strayed.get(stage, STRAYED_FIRST)
        self._of_rows[stage, rows] = usual + (took - usual) // TIME_WEIGHT
        self._strayed[stage] = strayed + (abs(took - usual) / max(1, usual) - strayed) / STRAYED_WEIGHT
        mean = self._mean.get(stage)
        if mean is None:
            mean, deviation = took, took // 2  # RFC 6298 §2.2
        else:
            deviation = self._deviation[stage]
            deviation += (abs(took - mean) - deviation) // TIME_WEIGHT
            mean = Nanos(mean + (took - mean) // TIME_WEIGHT)
        self._mean[stage], self._deviation[stage] = mean, deviation
        self._reach[stage] = Nanos(2 * mean + DEVIATIONS * deviation)

    def mean(self, stage: str) -> Nanos | None:
        """Moving average of one launch; None while nothing was measured."""
        return self._mean.get(stage)

    def reach(self, stage: str) -> Nanos | None:
        """From wanting a launch to its end, as long as one must expect: one that runs is waited for, then comes one's
        own, and they stray. None while nothing was measured.
        """
        return self._reach.get(stage)

    def after(self, stage: str) -> Nanos | None:
        """The longest way from this stage to the output; 0 after the last, None while a part of it is unmeasured."""
        return self._way(stage, self._mean)

    def reach_after(self, stage: str) -> Nanos | None:
        """The same, as long as one must expect."""
        return self._way(stage, self._reach)

    def _way(self, stage: str, own: Mapping[str, Nanos]) -> Nanos | None:
        longest = Nanos(0)
        for follower in self._next.get(stage, ()):
            took, rest = own.get(follower), self._way(follower, own)
            if took is None or rest is None:
                return None
            longest = max(longest, Nanos(took + rest))
        return longest

    def of_rows(self, stage: str, rows: int) -> Nanos | None:
        """Moving average of launches of so many rows; None while there was none."""
        usual = self._of_rows.get((stage, rows))
        return None if usual is None else Nanos(usual)

    def at_worst(self, stage: str, rows: int) -> Nanos | None:
        """What nearly all launches of so many rows stay within; None while there was none."""
        usual = self._of_rows.get((stage, rows))
        return None if usual is None else Nanos(usual + self.stray(stage, usual))

    def stray(self, stage: str, took: int) -> int:
        """How much longer than `took` a launch may become that is expected to take that long."""
        return int(STRAYS * self._strayed.get(stage, STRAYED_FIRST) * took)

    def lane_free_at(self, stage: str, now: Nanos) -> tuple[Nanos, int]:
        """When the stage's running launch is expected to end, and how long such a launch takes; (now, 0): none runs.

        One that runs over is expected to take a quarter of its usual time more, whenever one asks.
        """
        if stage not in self._running:
            return now, 0
        rows, begun = self._running[stage]
        usual = self._of_rows.get((stage, rows), 0)
        return Nanos(max(begun + usual, now + usual // 4)), usual


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

    def ran(self, lane: str, stage: str, took: Nanos, *, rows: int = 1) -> None:
        """A launch of so many rows that came back well worked for so long."""
        self._counts["launches"] += 1
        self._counts[f"busy_us_{lane}"] += took // 1000
        self.times.note(stage, took, rows=rows)

    def utilisation(self, now: Nanos) -> Mapping[str, float | None]:
        """By lane, of those that have worked."""
        return MappingProxyType({lane: used.value(now) for lane, used in self._lanes.items()})

    def late(self, at: Nanos, session: SessionId, late: Nanos) -> None:
        """A chunk was published after its predecessor had been heard to its end: somebody heard a gap."""
        self._counts["chunks_late"] += 1
        self._counts["chunks_late_ms"] += max(0, late) // NANOS_PER_MS
        self.note(at, session, "chunk_late", late)
