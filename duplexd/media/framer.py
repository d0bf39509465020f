"""Frames with RTP timestamps in, exact 32 ms blocks of 16 kHz audio with their spans out.

1. A sample's place is its RTP timestamp, never its arrival: late, lost, doubled or reordered packets move nothing.
2. Samples that never came are zeros inside a block that says so; the timeline keeps its length.
3. Input tick = RTP timestamp - first timestamp (RTP audio clock of Opus is 48 kHz, RFC 7587 §4.1).
4. A block leaves when it is full, or when something `wait` later has come: what is missing then is a gap for good.
5. At the bound: of a gap longer than `gap_max` only the last `gap_max` leaves as blocks; the spans show the step.
6. A timestamp further away than `stream_gap_max`, or a run of frames that are all late, is another stream (a new SSRC
   starts at a random timestamp, RFC 3550 §5.1): it goes on right after the newest sample.

      next block                      newest sample
    ──┴────────────┬─────────────────┴──────────▶  sample index of the session, blocks on a grid of 512
      │ 512        │ at most gap_max + wait + one frame; `came` marks what came
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from duplexd.units import BLOCK_SAMPLES, INPUT_RATE, RTP_WRAP, Span, Ticks, rtp_distance, ticks_from_samples

_TICKS_PER_SAMPLE = 3  #: 48 kHz ticks in one 16 kHz sample
FRAME_SAMPLES_MAX = 1920
_BEHIND_SAMPLES_MAX = 3200

Samples = npt.NDArray[np.int16]


class AudioBlock(msgspec.Struct, frozen=True):
    """512 samples of the person's audio at 16 kHz, int16; zeros where nothing came."""

    pcm: Samples
    span: Span  #: on the input timeline; its start is a multiple of 1536 ticks
    missing: int  #: samples that never came, 0..512

    @property
    def gap(self) -> bool:
        """More than half of it is missing: no judgement should be based on it."""
        return self.missing * 2 > BLOCK_SAMPLES

    @property
    def start(self) -> int:
        """Absolute sample index since the session opened."""
        return self.span.start // _TICKS_PER_SAMPLE


class FramerCounts(msgspec.Struct):
    """What happened to samples; for metrics."""

    late: int = 0  #: came after their block had left
    doubled: int = 0  #: came twice; the first copy stays
    missing: int = 0  #: never came
    skipped: int = 0  #: part of a gap that did not even leave as blocks
    streams: int = 0  #: times another stream took over


class Framer:
    """Puts one person's decoded audio on the session's input timeline. One a session; not thread-safe.

    Args:   wait: samples a block waits for what is missing, once something newer has come (default 40 ms).
            gap_max: samples of a gap that leave as blocks of zeros (default 2 s).
    Bound:  the buffer is fixed; one call returns at most `2 * gap_max / 512 + 8` blocks.
    """

    def __init__(self, *, wait: int = 640, gap_max: int = 32_000, stream_gap_max: int = 120 * INPUT_RATE) -> None:
        if not 0 <= wait < gap_max < stream_gap_max or gap_max < 2 * BLOCK_SAMPLES:
            raise ValueError(
                f"need 0 <= wait < gap_max < stream_gap_max, gap_max >= 1024: {wait=} {gap_max=} {stream_gap_max=}"
            )
        self.counts = FramerCounts()
        self._wait = wait
        self._gap_max = gap_max
        self._stream_gap_max = stream_gap_max
        room = gap_max + wait + FRAME_SAMPLES_MAX + 2 * BLOCK_SAMPLES
        self._pcm = np.zeros(room, np.int16)
        self._came = np.zeros(room, np.bool_)
        self._next = 0  #: sample index of the next block, and of `_pcm[0]`
        self._newest = 0  #: end of the newest sample
        self._rtp: int | None = None  #: newest timestamp of the stream, for unwrapping
        self._rtp_tick = 0  #: tick it stands for
        self._behind_rtp = 0  #: newest timestamp of a run of late frames
        self._behind = 0  #: samples in that run

    @property
    def position(self) -> Ticks:
        """Start of the next block: everything before it has left."""
        return ticks_from_samples(self._next, INPUT_RATE)

    @property
    def newest(self) -> Ticks:
        """End of the newest sample."""
        return ticks_from_samples(self._newest, INPUT_RATE)

    def push(self, pcm: Samples, rtp: int) -> list[AudioBlock]:
        """One decoded frame with the RTP timestamp of its first sample; returns the blocks that are ready, in order.

        Args:   pcm: int16 (n,), 16 kHz mono, n <= 1920 (120 ms, Opus' longest packet).    rtp: u32, 48 kHz.
        Raises: ValueError for another shape or length; then nothing has changed.
        """
        if pcm.ndim != 1 or len(pcm) > FRAME_SAMPLES_MAX:
            raise ValueError(f"a frame is at most {FRAME_SAMPLES_MAX} mono samples, got shape {pcm.shape}")
        if len(pcm) == 0:
            return []
        at = self._locate(rtp % RTP_WRAP, len(pcm))
        blocks = self._reach(at)
        self._place(pcm, at)
        return blocks + self._take(self._newest - self._wait)

    def advance(self, until: Ticks) -> list[AudioBlock]:
        """The timeline has reached `until` and nothing came (a muted track): blocks before it leave, flagged.

        Give it a position behind the live edge by the worst delay of the network: what comes later than this is late.
        """
        end = until // _TICKS_PER_SAMPLE
        if self._rtp is None or end <= self._newest:
            return []
        blocks = self._reach(end)
        self._newest = end
        return blocks + self._take(end)

    def _locate(self, rtp: int, samples: int) -> int:
        """Sample index of a timestamp, or the newest one when another stream takes over."""
        if self._rtp is None:
            self._rtp = rtp
        step = rtp_distance(rtp, self._rtp)
        at = (self._rtp_tick + step) // _TICKS_PER_SAMPLE
        if abs(at - self._newest) > self._stream_gap_max or self._is_left_behind(at, rtp, samples):
            self.counts.streams += 1
            self._rtp, self._rtp_tick, self._behind = rtp, self._newest * _TICKS_PER_SAMPLE, 0
            return self._newest
        if step > 0:
            self._rtp, self._rtp_tick = rtp, self._rtp_tick + step
        return at

    def _is_left_behind(self, at: int, rtp: int, samples: int) -> bool:
        """A stream whose frames are all late for 200 ms would never be heard again.

        Doubles and reorderings do not count: only timestamps that keep growing do.
        """
        if at + samples > self._next:
            self._behind = 0
            return False
        if self._behind == 0 or rtp_distance(rtp, self._behind_rtp) > 0:
            self._behind_rtp, self._behind = rtp, self._behind + samples
        return self._behind > _BEHIND_SAMPLES_MAX

    def _reach(self, end: int) -> list[AudioBlock]:
        """Make room for a place that may lie far ahead."""
        if end - self._newest <= self._gap_max:
            return []
        blocks = self._take(self._newest + BLOCK_SAMPLES - 1)
        ahead = (end - self._gap_max) // BLOCK_SAMPLES * BLOCK_SAMPLES
        self.counts.skipped += max(0, ahead - self._next)
        self._next = max(self._next, ahead)
        self._newest = self._next
        return blocks

    def _place(self, pcm: Samples, at: int) -> None:
        late = min(len(pcm), max(0, self._next - at))
        self.counts.late += late
        first = at + late - self._next
        room, came = self._pcm[first : first + len(pcm) - late], self._came[first : first + len(pcm) - late]
        self.counts.doubled += int(came.sum())
        np.copyto(room, pcm[late:], where=~came)
        came[:] = True
        self._newest = max(self._newest, at + len(pcm))

    def _take(self, overdue: int) -> list[AudioBlock]:
        """Blocks that are whole, or that end at or before `overdue`."""
        blocks: list[AudioBlock] = []
        while self._next + BLOCK_SAMPLES <= overdue or bool(self._came[:BLOCK_SAMPLES].all()):
            blocks.append(self._first())
            used = max(0, self._newest - self._next - BLOCK_SAMPLES)
            for held in (self._pcm, self._came):
                held[:used] = held[BLOCK_SAMPLES : BLOCK_SAMPLES + used]
                held[used : used + BLOCK_SAMPLES] = 0
            self._next += BLOCK_SAMPLES
        return blocks

    def _first(self) -> AudioBlock:
        missing = BLOCK_SAMPLES - int(self._came[:BLOCK_SAMPLES].sum())
        self.counts.missing += missing
        end = ticks_from_samples(self._next + BLOCK_SAMPLES, INPUT_RATE)
        return AudioBlock(self._pcm[:BLOCK_SAMPLES].copy(), Span(self.position, end), missing)
