"""Units: media time in integer ticks, machine time in integer nanoseconds.

1. Media time is `Ticks`, 1/48000 s: exact at 8/16/24/48 kHz, at 24/25/30/50/60 fps and for 12.5 Hz codecs.
2. Machine time is `Nanos` of the host's monotonic clock; every process of one host shares its origin.
3. Floats of seconds appear only at the outermost edge (configuration, printed tables).
4. Sizes are integer bytes; as text they say GB (10^9) or GiB (2^30), never a bare G.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import NewType

import msgspec

from duplexd.errors import ConfigError

Nanos = NewType("Nanos", int)
Ticks = NewType("Ticks", int)

TICKS_PER_SECOND = 48_000
TICKS_PER_MS = 48
NANOS_PER_SECOND = 1_000_000_000
NANOS_PER_MS = 1_000_000
INPUT_RATE = 16_000  #: the person's audio inside duplexd: mono, 16 kHz, int16 or float32 at full scale 1.0
RTP_WRAP = 1 << 32
BLOCK_SAMPLES = 512  #: it travels in blocks of 32 ms, which is exactly what the voice detector takes


class Span(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A half-open stretch of media time, `start <= t < end`."""

    start: Ticks
    end: Ticks

    @property
    def length(self) -> Ticks:
        return Ticks(self.end - self.start)

    def __contains__(self, position: int) -> bool:
        return self.start <= position < self.end


def rtp_distance(a: int, b: int) -> int:
    """Signed distance a - b of two RTP timestamps, right across a wrap (u32, RFC 3550 §5.1)."""
    return (a - b + RTP_WRAP // 2) % RTP_WRAP - RTP_WRAP // 2


def ticks_from_samples(samples: int, rate: int) -> Ticks:
    """Media time of a sample count; the rate must divide 48000, so that nothing is rounded."""
    ticks_per_sample, rest = divmod(TICKS_PER_SECOND, rate)
    if rest:
        raise ValueError(f"sample rate {rate} does not divide {TICKS_PER_SECOND}")
    return Ticks(samples * ticks_per_sample)


def samples_from_ticks(ticks: int, rate: int) -> int:
    """Whole samples in a stretch of media time, rounded down."""
    return ticks * rate // TICKS_PER_SECOND


def ticks_from_ms(ms: float) -> Ticks:
    return Ticks(round(ms * TICKS_PER_MS))


def ms_from_ticks(ticks: int) -> float:
    return ticks / TICKS_PER_MS


def ticks_from_nanos(nanos: int) -> Ticks:
    return Ticks(nanos * TICKS_PER_SECOND // NANOS_PER_SECOND)


def nanos_from_ticks(ticks: int) -> Nanos:
    return Nanos(ticks * NANOS_PER_SECOND // TICKS_PER_SECOND)


def nanos_from_ms(ms: float) -> Nanos:
    return Nanos(round(ms * NANOS_PER_MS))


def ms_from_nanos(nanos: int) -> float:
    return nanos / NANOS_PER_MS


_DECIMAL = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES = _DECIMAL | {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def bytes_from_text(text: str) -> int:
    """`24GiB`, `80 GB`, `1.5 TB` or a plain number of bytes, rounded down.

    Raises:  ConfigError with the units there are.
    """
    found = _SIZE.fullmatch(text)
    units = {name.lower(): value for name, value in _SIZES.items()}
    if found is None or (found[2] or "B").lower() not in units:
        raise ConfigError(f"{text!r} is no size: write a number and one of {', '.join(_SIZES)}, such as 24GiB or 80GB")
    return int(Decimal(found[1]) * units[(found[2] or "B").lower()])


def text_from_bytes(count: int) -> str:
    """In the largest decimal unit that it fills, to a tenth: `68.0 GB`; whole GiB as they are: `24 GiB`."""
    if count and count % _SIZES["GiB"] == 0:
        return f"{count // _SIZES['GiB']} GiB"
    name, value = max(((n, v) for n, v in _DECIMAL.items() if v <= max(count, 1)), key=lambda unit: unit[1])
    return f"{count} B" if value == 1 else f"{count / value:.1f} {name}"
