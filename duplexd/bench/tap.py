"""Taps: what a sink plays, recorded, with the time of every sample on the host's clock.

    parec -> 10 ms blocks -> (samples so far, time of arrival) -> recording + clock map

1. A null sink runs on CLOCK_MONOTONIC, the clock of `duplexd.clock.now`: the slope is exactly the sample rate, and only
   the offset is measured. A block can arrive late and never early, so the offset is the lower envelope of arrivals.
2. Two conventions for the time of a sample, one per kind of device, chosen so that a latency is never flattered:
   MICROPHONE: a block holds what was captured before it arrived; its *last* sample is stamped with the arrival.
   LOUDSPEAKER: a block is rendered ahead and begins to play when it arrives; its *first* sample is stamped with it.
3. Samples lost on the way (an overrun of a starved reader) show as a step of the envelope. The map follows the step and
   counts it: a recording with steps says so, and a bench must not publish from it.
"""

from __future__ import annotations

import bisect
import enum
import os
import subprocess
import threading
import wave
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from duplexd.bench.programs import RigError, end, find_program, halt, start
from duplexd.clock import now
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos

Pcm = NDArray[np.int16]

RATE = 48_000
BLOCK_MS = 10
AUDIBLE_DBFS = -45.0  #: notes of the expected figures, 4.3: the assistant is heard above this peak level

_FULL_SCALE = 32_768.0
_WINDOW_BLOCKS = 50  # of the envelope: 0.5 s; a starved reader has at least one punctual block in it
_STEP_NS = 4 * NANOS_PER_MS  # below one block: a lost block is seen, scheduling noise of the envelope is not
_STEP_WINDOWS = 3  # a step must last, otherwise it was only a busy machine
_READ_BYTES = 65_536


class Device(enum.Enum):
    """What the tapped sink stands for; decides how its blocks are stamped (rule 2)."""

    MICROPHONE = "microphone"
    LOUDSPEAKER = "loudspeaker"


class ClockMap(msgspec.Struct, frozen=True):
    """Sample number <-> time: one line of slope 1/rate per stretch without lost samples."""

    rate: int
    starts: tuple[int, ...]  #: first sample of each stretch, ascending; the first stretch also covers what is before it
    origins_ns: tuple[int, ...]  #: time of sample number 0 on the line of each stretch
    spread_ns: int  #: 95th percentile of how late blocks arrived above the line

    @property
    def steps_count(self) -> int:
        """How often samples were lost; 0 in a sound recording."""
        return len(self.starts) - 1

    def time_of(self, sample: float) -> Nanos:
        stretch = max(0, bisect.bisect_right(self.starts, sample) - 1)
        return Nanos(self.origins_ns[stretch] + round(sample * NANOS_PER_SECOND / self.rate))

    def sample_at(self, time: int) -> int:
        """Number of the sample that is nearest to `time`; may lie outside of what was recorded."""
        stretch = 0
        for index in range(1, len(self.starts)):
            if self.time_of(self.starts[index]) <= time:
                stretch = index
        return round((time - self.origins_ns[stretch]) * self.rate / NANOS_PER_SECOND)


def fit_clock(ends: Sequence[int], arrivals_ns: Sequence[int], *, rate: int, device: Device) -> ClockMap:
    """The clock map of a stream of blocks.

    Args:    ends: samples received up to and with each block, ascending; arrivals_ns: when each block arrived.
    Raises:  ValueError without a block.
    """
    if not ends:
        raise ValueError("a clock map needs at least one block")
    end_array = np.asarray(ends, np.int64)
    offsets = np.asarray(arrivals_ns, np.int64) - end_array * NANOS_PER_SECOND // rate
    lows = np.array([int(part.min()) for part in np.split(offsets, range(_WINDOW_BLOCKS, len(ends), _WINDOW_BLOCKS))])
    windows, origins = _stretches(lows)
    starts = [0] + [int(end_array[window * _WINDOW_BLOCKS - 1]) for window in windows[1:]]
    which = np.searchsorted(np.asarray(windows), np.arange(len(ends)) // _WINDOW_BLOCKS, side="right") - 1
    spread = int(np.percentile(offsets - np.asarray(origins)[which], 95))
    sizes = np.diff(end_array, prepend=0)
    block = int(np.median(sizes)) if device is Device.LOUDSPEAKER else 0
    ahead = block * NANOS_PER_SECOND // rate
    return ClockMap(
        rate=rate, starts=tuple(starts), origins_ns=tuple(origin + ahead for origin in origins), spread_ns=spread
    )


def _stretches(lows: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """First window and offset of each stretch, from the lowest offset per window."""
    windows, origins = [0], [int(lows[0])]
    for index in range(1, len(lows)):
        ahead = lows[index : index + _STEP_WINDOWS]
        lost = len(ahead) == _STEP_WINDOWS and int(ahead.min()) > origins[-1] + _STEP_NS
        if lost or lows[index] < origins[-1] - _STEP_NS:
            windows.append(index)
            origins.append(int(lows[index]))
        else:
            origins[-1] = min(origins[-1], int(lows[index]))
    return windows, origins


@dataclass(frozen=True)
class Gap:
    """A stretch of silence at the tap."""

    start: Nanos
    end: Nanos

    @property
    def length_ns(self) -> int:
        return self.end - self.start


class _Sidecar(msgspec.Struct, frozen=True):
    """What stands in the .json beside the .wav, so that others can recompute every figure."""

    rate: int
    first_sample: int
    clock: ClockMap
    time_base: str = "nanoseconds of CLOCK_MONOTONIC of the recording host"


@dataclass(frozen=True)
class Recording:
    """A finished recording. Sample numbers count from the start of the tap; `pcm[0]` is `first_sample`."""

    pcm: Pcm  #: int16 (samples,), mono
    rate: int
    first_sample: int
    clock: ClockMap

    @property
    def start(self) -> Nanos:
        return self.time_of(self.first_sample)

    @property
    def end(self) -> Nanos:
        return self.time_of(self.first_sample + len(self.pcm))

    def time_of(self, sample: float) -> Nanos:
        """Time of a sample number."""
        return self.clock.time_of(sample)

    def between(self, after: int | None, before: int | None) -> tuple[int, int]:
        """Indexes into `pcm` of the recorded part of `after <= t < before`."""
        low = 0 if after is None else self.clock.sample_at(after) - self.first_sample
        high = len(self.pcm) if before is None else self.clock.sample_at(before) - self.first_sample
        low = min(max(low, 0), len(self.pcm))
        return low, min(max(high, low), len(self.pcm))

    def part(self, after: int | None, before: int | None) -> Pcm:
        low, high = self.between(after, before)
        return self.pcm[low:high]

    def first_audible(
        self, *, after: int | None = None, before: int | None = None, dbfs: float = AUDIBLE_DBFS
    ) -> Nanos | None:
        """Time of the first sample whose magnitude is above `dbfs`; None when all is quiet. Exact to the sample."""
        loud = self._loud(after, before, dbfs)
        return None if loud is None else self.time_of(int(loud[0]))

    def last_audible(
        self, *, after: int | None = None, before: int | None = None, dbfs: float = AUDIBLE_DBFS
    ) -> Nanos | None:
        """Time of the last sample whose magnitude is above `dbfs`; None when all is quiet. Exact to the sample."""
        loud = self._loud(after, before, dbfs)
        return None if loud is None else self.time_of(int(loud[-1]))

    def gaps(
        self,
        *,
        after: int | None = None,
        before: int | None = None,
        longer_than_ms: float = 20.0,
        dbfs: float = AUDIBLE_DBFS,
    ) -> list[Gap]:
        """Silences *between* audible samples of the stretch, so neither the one before the first nor after the last."""
        loud = self._loud(after, before, dbfs)
        if loud is None:
            return []
        wide = np.flatnonzero(np.diff(loud) > longer_than_ms * self.rate / 1000)
        return [Gap(self.time_of(int(loud[index] + 1)), self.time_of(int(loud[index + 1]))) for index in wide]

    def sound_stops(
        self, *, after: int, before: int | None = None, quiet_ms: float = 150.0, dbfs: float = AUDIBLE_DBFS
    ) -> Nanos | None:
        """When the sound that is on at `after` ends: its last audible sample before `quiet_ms` of silence.

        Returns: `after` itself when `quiet_ms` of silence begin there; None when the sound is not seen to end, because
                 it goes on to the end of the stretch or less than `quiet_ms` of silence was recorded behind it.
        """
        low, high = self.between(after, before)
        quiet = round(quiet_ms * self.rate / 1000)
        loud = self._loud(after, before, dbfs)
        heard = np.zeros(0, np.int64) if loud is None else loud
        edges = np.concatenate(([low + self.first_sample], heard, [high + self.first_sample]))
        wide = np.flatnonzero(np.diff(edges) > quiet)
        if not len(wide):
            return None
        return Nanos(after) if wide[0] == 0 else self.time_of(int(edges[wide[0]]))

    def level_dbfs(self, after: int | None = None, before: int | None = None) -> float:
        """RMS level of a stretch; -inf for digital silence or an empty stretch."""
        part = self.part(after, before).astype(np.float64)
        power = float(np.mean(part**2)) if len(part) else 0.0
        return 10 * float(np.log10(power / _FULL_SCALE**2)) if power else float("-inf")

    def _loud(self, after: int | None, before: int | None, dbfs: float) -> NDArray[np.int64] | None:
        low, high = self.between(after, before)
        threshold = _FULL_SCALE * 10 ** (dbfs / 20)
        loud = np.flatnonzero(np.abs(self.pcm[low:high].astype(np.int32)) > threshold)
        return loud + (low + self.first_sample) if len(loud) else None

    def save(self, stem: Path) -> None:
        """Writes STEM.wav (mono, 16 bit) and STEM.json (the clock map)."""
        with wave.open(str(stem.with_suffix(".wav")), "wb") as file:
            file.setparams((1, 2, self.rate, 0, "NONE", "not compressed"))
            file.writeframes(self.pcm.astype("<i2").tobytes())
        sidecar = _Sidecar(rate=self.rate, first_sample=self.first_sample, clock=self.clock)
        stem.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(sidecar)))

    @classmethod
    def load(cls, stem: Path) -> Recording:
        """Reads what `save` wrote.

        Raises:  RigError when the two files do not belong together.
        """
        sidecar = msgspec.json.decode(stem.with_suffix(".json").read_bytes(), type=_Sidecar)
        with wave.open(str(stem.with_suffix(".wav")), "rb") as file:
            if (file.getnchannels(), file.getsampwidth(), file.getframerate()) != (1, 2, sidecar.rate):
                raise RigError(f"{stem}.wav is not mono 16 bit at {sidecar.rate} Hz, as {stem}.json says")
            pcm = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.int16)
        return cls(pcm=pcm, rate=sidecar.rate, first_sample=sidecar.first_sample, clock=sidecar.clock)


@dataclass(frozen=True)
class Match:
    """Where a sound was found in another one."""

    offset: int  #: index in the haystack of the needle's first sample
    similarity: float  #: normalised correlation, 1.0 for a copy at any volume


def locate(needle: Pcm, haystack: Pcm) -> Match | None:
    """The place of `haystack` that is most like `needle`, which must lie in it whole; None if it is the longer one.

    Cost:    one FFT of the haystack's length.
    """
    if len(needle) > len(haystack) or not np.any(needle):
        return None
    small, large = needle.astype(np.float64), haystack.astype(np.float64)
    size = 1 << (len(large) + len(small)).bit_length()
    spectrum = np.fft.rfft(large, size) * np.conj(np.fft.rfft(small, size))
    products = np.fft.irfft(spectrum, size)[: len(large) - len(small) + 1]
    energy = np.cumsum(np.concatenate(([0.0], large**2)))
    under = energy[len(small) :] - energy[: -len(small)]
    # A haystack part with hardly any energy would turn rounding noise into a perfect match.
    floor = max(1.0, 1e-6 * float(np.sum(small**2)))
    likeness = products / np.sqrt(np.maximum(under, floor) * np.sum(small**2))
    offset = int(np.argmax(likeness))
    return Match(offset=offset, similarity=float(likeness[offset]))


class Tap:
    """Records one Pulse source from construction until `stop`; a context manager that stops at the end.

    Bound:   the last `seconds_max` seconds are kept; older sound is dropped, sample numbers and times stay right.
    Raises:  ProgramMissing without parec; RigError from `recording` when nothing was ever received.
    """

    def __init__(
        self,
        source: str,
        *,
        device: Device,
        env: Mapping[str, str] | None = None,
        seconds_max: float = 1200.0,
        block_ms: int = BLOCK_MS,
    ) -> None:
        self._source = source
        self._device = device
        blocks_max = max(_WINDOW_BLOCKS, round(seconds_max * 1000 / block_ms))
        self._blocks: deque[Pcm] = deque(maxlen=blocks_max)
        self._ends: deque[int] = deque(maxlen=blocks_max)
        self._arrivals: deque[int] = deque(maxlen=blocks_max)
        self._grown = threading.Condition()
        self._total = 0
        self._ended = False
        command = [find_program("parec"), "--raw", "--format=s16le", f"--rate={RATE}", "--channels=1"]
        self._process = start(
            [*command, f"--latency-msec={block_ms}", "--device", source], env=env, stdout=subprocess.PIPE
        )
        self._reader = threading.Thread(target=self._read, name=f"tap {source}", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def samples_count(self) -> int:
        """Samples received so far; also the number of the next sample."""
        return self._total

    @property
    def has_ended(self) -> bool:
        """True when the source went away or the tap was stopped."""
        return self._ended

    def wait_for(self, sample: int, *, limit_s: float) -> bool:
        """Waits until `sample` samples were received; False when the time is over or the tap has ended."""
        with self._grown:
            self._grown.wait_for(lambda: self._total >= sample or self._ended, timeout=limit_s)
            return self._total >= sample

    def recording(self) -> Recording:
        """A copy of all that is kept; the tap goes on.

        Raises:  RigError when nothing was received.
        """
        with self._grown:
            blocks, ends, arrivals = list(self._blocks), list(self._ends), list(self._arrivals)
        if not blocks:
            raise RigError(f"nothing was received from the source {self._source!r}")
        clock = fit_clock(ends, arrivals, rate=RATE, device=self._device)
        return Recording(pcm=np.concatenate(blocks), rate=RATE, first_sample=ends[0] - len(blocks[0]), clock=clock)

    def clock(self, *, blocks_max: int = 1000) -> ClockMap:
        """The clock map of the last `blocks_max` blocks (10 s); the one of `recording` differs by some 0.1 ms.

        Raises:  RigError when nothing was received.
        """
        with self._grown:
            ends = list(islice(reversed(self._ends), blocks_max))[::-1]
            arrivals = list(islice(reversed(self._arrivals), blocks_max))[::-1]
        if not ends:
            raise RigError(f"nothing was received from the source {self._source!r}")
        return fit_clock(ends, arrivals, rate=RATE, device=self._device)

    def since(self, sample: int) -> Pcm:
        """What was received from sample number `sample` on, as far as it is kept; cheap for a recent number."""
        parts: list[Pcm] = []
        with self._grown:
            for block, block_end in zip(reversed(self._blocks), reversed(self._ends), strict=True):
                if block_end <= sample:
                    break
                parts.append(block[max(0, sample - (block_end - len(block))) :])
        return np.concatenate(parts[::-1]) if parts else np.zeros(0, np.int16)

    def close(self) -> None:
        """Ends the tap; what it kept can still be read. Harmless when done twice."""
        halt(self._process, grace_s=1.0)
        self._reader.join(timeout=2.0)  # before the pipe is closed: its number could be reused under the reader
        end(self._process)

    def _read(self) -> None:
        assert self._process.stdout is not None
        handle = self._process.stdout.fileno()
        rest = b""
        while True:
            data = os.read(handle, _READ_BYTES)
            arrival = now()
            if not data:
                break
            data = rest + data
            whole = len(data) & ~1
            rest = data[whole:]
            if whole:
                self._append(np.frombuffer(data[:whole], "<i2").astype(np.int16), arrival)
        with self._grown:
            self._ended = True
            self._grown.notify_all()

    def _append(self, block: Pcm, arrival: int) -> None:
        with self._grown:
            self._total += len(block)
            self._blocks.append(block)
            self._ends.append(self._total)
            self._arrivals.append(arrival)
            self._grown.notify_all()
