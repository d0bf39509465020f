"""Limits of one connection and of one daemon, as buckets that fill with time. Time is an argument."""

from __future__ import annotations

import msgspec

from duplexd.units import NANOS_PER_SECOND, Nanos

EVENT_BYTES_MAX = 15 * 1024 * 1024 * 4 // 3 + 4096  #: 15 MiB of audio in base64, and what stands around it


class Bucket:
    """`burst` at once, `per_second` on average."""

    def __init__(self, *, per_second: float, burst: float) -> None:
        self.per_second = per_second
        self.burst = burst
        self._level = burst
        self._at = Nanos(0)

    def take(self, now: Nanos, count: float = 1.0) -> bool:
        """Whether `count` may pass; nothing is taken when not."""
        level = self.level(now)
        if level < count:
            return False
        self._level, self._at = level - count, now
        return True

    def level(self, now: Nanos) -> float:
        gained = max(0, now - self._at) / NANOS_PER_SECOND * self.per_second
        return min(self.burst, self._level + gained)

    def full_in_s(self, now: Nanos) -> float:
        return (self.burst - self.level(now)) / self.per_second


class Limits(msgspec.Struct, frozen=True):
    """What one connection may ask for."""

    events_per_second: float = 200.0  #: audio and acknowledgements do not count
    events_burst: float = 400.0
    responses_per_minute: float = 600.0
    event_bytes_max: int = EVENT_BYTES_MAX
    input_ms_max: float = 600_000.0  #: audio that waits to be listened to
    life_s: float = 0.0  #: a session ends after this; 0: never
