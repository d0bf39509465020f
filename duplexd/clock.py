"""The one place that reads the machine's clock. Everything else takes `now` as an argument."""

from __future__ import annotations

import time

from duplexd.units import Nanos


def now() -> Nanos:
    """Monotonic nanoseconds; comparable between the processes of one host (CLOCK_MONOTONIC)."""
    return Nanos(time.monotonic_ns())


def thread_time() -> Nanos:
    """Processor time of the calling thread, for benches: what other programs do meanwhile is not in it."""
    return Nanos(time.thread_time_ns())


def wall_seconds() -> float:
    """Seconds since 1970, for certificates and file names only; it may jump, so nothing is ordered by it."""
    return time.time()
