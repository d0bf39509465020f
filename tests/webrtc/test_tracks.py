"""The voice on its way out: paced by one clock, never silent by accident, never ahead, never catching up for long."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from aiortc import RTCPeerConnection
from aiortc.mediastreams import MediaStreamError
from aiortc.rtp import RtcpByePacket, RtcpSenderInfo, RtcpSrPacket

from duplexd.errors import ConfigError
from duplexd.units import NANOS_PER_MS, Nanos, Ticks
from duplexd.webrtc.opus import EAR_RATE, VOICE_FRAME, OpusDecoder, Pcm
from duplexd.webrtc.tracks import (
    BURST_MAX,
    NTP_BEFORE_UNIX,
    MediaClock,
    VoiceTrack,
    check_sender,
    next_pts,
    report_by,
    rtp_origin,
)

FRAME = 960
MS = NANOS_PER_MS


class ManualClock(MediaClock):
    """A clock that stands still until somebody waits; `stall` makes the loop come back late once."""

    def __init__(self) -> None:
        self.time = 1_000_000_007
        self.stall_ns = 0
        super().__init__(now=lambda: Nanos(self.time))

    async def wait_until(self, due: Nanos) -> Nanos:
        self.time = max(self.time, due) + self.stall_ns
        self.stall_ns = 0
        return Nanos(self.time)


def silence(pts: Ticks) -> Pcm:
    return np.zeros(VOICE_FRAME, np.int16)


def take(track: VoiceTrack, count: int) -> list[int]:
    async def run() -> list[int]:
        return [(await track.recv()).pts for _ in range(count)]

    return asyncio.run(run())


def test_packets_are_due_every_20_ms_from_one_origin() -> None:
    """However late each one is made, the next is due on the grid: lateness is not added up."""
    media_clock = ManualClock()
    track = VoiceTrack(media_clock, silence)
    for n in range(5):
        media_clock.stall_ns = 7 * MS
        assert take(track, 1) == [n * FRAME]
        assert media_clock.origin is not None
        assert media_clock.time == media_clock.origin + n * 20 * MS + 7 * MS


def test_pull_is_asked_for_exactly_what_is_sent() -> None:
    asked: list[int] = []

    def pull(pts: Ticks) -> Pcm:
        asked.append(pts)
        return silence(pts)

    sent = take(VoiceTrack(ManualClock(), pull), 4)

    assert sent == asked == [0, 960, 1920, 2880]


def test_a_short_stall_is_caught_up() -> None:
    media_clock = ManualClock()
    track = VoiceTrack(media_clock, silence)
    take(track, 2)
    media_clock.stall_ns = 60 * MS
    before = media_clock.time

    assert take(track, 4) == [2 * FRAME, 3 * FRAME, 4 * FRAME, 5 * FRAME]
    assert media_clock.time - before == 80 * MS
    assert track.skipped_count == 0


def test_after_a_long_stall_at_most_60_ms_are_sent_at_once_and_pts_follows_the_clock() -> None:
    media_clock = ManualClock()
    track = VoiceTrack(media_clock, silence)
    take(track, 2)
    media_clock.stall_ns = 500 * MS
    first = take(track, 1)[0]
    stalled = media_clock.time
    late = media_clock.position(Nanos(stalled)) - first
    burst = 0
    while media_clock.time == stalled:
        last = take(track, 1)[0]
        burst += media_clock.time == stalled

    assert late <= BURST_MAX
    assert burst <= BURST_MAX // FRAME
    assert last == media_clock.position(Nanos(media_clock.time))
    assert track.skipped_count == 22


@pytest.mark.parametrize(
    ("late_ms", "expected"), [(0, 0), (60, 0), (61, 1), (80, 1), (81, 2), (1000, 47)], ids=lambda value: str(value)
)
def test_what_is_skipped_is_whole_frames_and_no_more_than_needed(late_ms: int, expected: int) -> None:
    late = Ticks(late_ms * 48)

    assert next_pts(Ticks(0), late=late, frame=Ticks(FRAME), burst_max=BURST_MAX) == expected * FRAME


@pytest.mark.parametrize(
    "wrong", [np.zeros(10, np.int16), np.zeros(VOICE_FRAME, np.float32), None], ids=["short", "float", "none"]
)
def test_a_playout_that_fails_is_silence_and_is_reported(wrong: object) -> None:
    """A sender that stops would make the browser drone on with the last pitch for most of a second."""
    faults: list[Exception] = []
    track = VoiceTrack(ManualClock(), lambda pts: wrong, on_fault=faults.append)  # type: ignore[arg-type, return-value]

    assert take(track, 3) == [0, 960, 1920]
    assert len(faults) == track.fault_count == 3


def test_what_is_pulled_is_what_is_heard() -> None:
    time = np.arange(VOICE_FRAME * 20) / 24_000
    wave = np.asarray(8000 * np.sin(2 * np.pi * 500 * time), np.int16)
    track = VoiceTrack(ManualClock(), lambda pts: wave[pts // 2 : pts // 2 + VOICE_FRAME])
    decoder = OpusDecoder()

    async def run() -> Pcm:
        return np.concatenate([_heard(decoder, bytes(await track.recv())) for _ in range(20)])

    tail = asyncio.run(run())[EAR_RATE // 5 :].astype(np.float64)
    peak = np.argmax(np.abs(np.fft.rfft(tail * np.hanning(len(tail))))) * EAR_RATE / len(tail)

    assert abs(peak - 500) < 5


def _heard(decoder: OpusDecoder, payload: bytes) -> Pcm:
    pcm = decoder.decode(payload)
    assert pcm is not None
    return pcm


def test_work_that_blocks_all_of_the_loops_threads_delays_no_packet() -> None:
    """T-CON-04: aiortc encodes on the loop's own threads; the voice must not wait for them."""
    over = threading.Event()

    async def run() -> list[int]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2))
        blocked = [loop.run_in_executor(None, over.wait) for _ in range(64)]
        track = VoiceTrack(ManualClock(), silence)
        try:
            return [(await asyncio.wait_for(track.recv(), 5)).pts for _ in range(50)]
        finally:
            over.set()
            await asyncio.gather(*blocked)

    assert asyncio.run(run()) == [n * FRAME for n in range(50)]


def test_a_stopped_track_ends() -> None:
    track = VoiceTrack(ManualClock(), silence)
    track.stop()

    with pytest.raises(MediaStreamError):
        take(track, 1)


class FakeSender:
    _RTCRtpSender__packet_count = 0
    _RTCRtpSender__rtp_timestamp = 0


def test_the_rtp_origin_is_known_once_a_packet_has_left() -> None:
    sender = FakeSender()
    assert rtp_origin(sender, Ticks(0)) is None
    sender._RTCRtpSender__packet_count = 3
    sender._RTCRtpSender__rtp_timestamp = 1000

    assert rtp_origin(sender, Ticks(1920)) == 2**32 - 920


def test_the_pinned_aiortc_still_has_the_counters_that_are_read() -> None:
    async def run() -> None:
        connection = RTCPeerConnection()
        sender = connection.addTransceiver("audio").sender
        check_sender(sender)
        report_by(ManualClock(), sender, rate=48_000, origin=lambda: None)
        await connection.close()

    asyncio.run(run())
    with pytest.raises(ConfigError, match="rtp_timestamp"):
        check_sender(object())


# Reports ------------------------------------------------------------------------------------------------------------


class ReportingSender:
    """aiortc's sender as `report_by` knows it."""

    _RTCRtpSender__lsr: int | None = None

    def __init__(self) -> None:
        self.sent: list[list[Any]] = []

    async def _send_rtcp(self, packets: list[Any]) -> None:
        self.sent.append(packets)


def reports(*, rate: int, origin: int | None, at_ms: int) -> tuple[ReportingSender, list[Any]]:
    """One report, sent `at_ms` after the origin; aiortc believes its last packet left at NTP 77 with timestamp 5."""
    media_clock = ManualClock()
    media_clock._wall_seconds = lambda: 1000.5
    media_clock.begin()
    sender = ReportingSender()
    report_by(media_clock, sender, rate=rate, origin=lambda: origin)
    info = RtcpSenderInfo(ntp_timestamp=77, rtp_timestamp=5, packet_count=9, octet_count=99)
    media_clock.time += at_ms * MS
    asyncio.run(sender._send_rtcp([RtcpSrPacket(ssrc=1, sender_info=info)]))
    return sender, sender.sent


@pytest.mark.parametrize("rate", [48_000, 90_000], ids=["voice", "face"])
@pytest.mark.parametrize("at_ms", [0, 20, 3_600_000])
def test_every_track_reports_the_same_line_from_its_timestamps_to_wall_time(rate: int, at_ms: int) -> None:
    """aiortc's own reports say when the last packet left: a picture's is late by its encoding, and the browser would
    hold the voice back for it."""
    sender, sent = reports(rate=rate, origin=2**32 - 3, at_ms=at_ms)
    info = sent[0][0].sender_info

    assert info.rtp_timestamp == (2**32 - 3 + at_ms * rate // 1000) % 2**32
    assert info.ntp_timestamp / 2**32 == pytest.approx(NTP_BEFORE_UNIX + 1000.5 + at_ms / 1000, abs=1e-5)
    assert (info.packet_count, info.octet_count) == (9, 99)
    assert sender._RTCRtpSender__lsr == (info.ntp_timestamp >> 16) & 0xFFFFFFFF


def test_no_report_is_sent_before_its_line_is_known_and_a_goodbye_always_is() -> None:
    _, sent = reports(rate=48_000, origin=None, at_ms=100)
    assert sent == []

    sender = ReportingSender()
    report_by(ManualClock(), sender, rate=48_000, origin=lambda: None)
    goodbye = RtcpByePacket(sources=[1])
    asyncio.run(sender._send_rtcp([goodbye]))

    assert sender.sent == [[goodbye]]


def test_a_jump_of_the_wall_clock_moves_no_report() -> None:
    walls = iter([1000.0, 4000.0])
    media_clock = ManualClock()
    media_clock._wall_seconds = lambda: next(walls)
    media_clock.begin()

    assert media_clock.ntp(Ticks(96_000)) - media_clock.ntp(Ticks(48_000)) == 2**32
