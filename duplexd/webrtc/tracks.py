"""The character's voice on its way out: one clock for all tracks of a peer, and 20 ms of Opus at each of its ticks.

1. Packet n is due at origin + n x 20 ms (DESIGN §5 rule 14); lateness is never added up.
2. Something is sent at every tick: a sender that stops makes the browser repeat the last pitch for up to 0.9 s. Silence
   is what `pull` returns when there is nothing to say.
3. After a stall of the loop at most `BURST_MAX` of old packets follow at once; the ticks before them are skipped, and
   pts goes on following the clock. Who fills `pull` sees the jump in its argument.
4. The voice is `av.Packet`: aiortc sends it with the RTP timestamp origin + pts exactly, and uses no thread for it.
5. Sender reports of all tracks say one and the same line from media time to wall time. aiortc's own say when the last
   packet left: late by the encoder's time for a picture, and moved by every jump of the wall clock, both of which the
   browser would mend by holding the voice back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import av
import numpy as np
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from aiortc.rtp import RtcpSrPacket

from duplexd import clock
from duplexd.errors import ConfigError
from duplexd.units import (
    NANOS_PER_SECOND,
    TICKS_PER_MS,
    TICKS_PER_SECOND,
    Nanos,
    Ticks,
    nanos_from_ticks,
    ticks_from_nanos,
)
from duplexd.webrtc.opus import VOICE_FRAME, VOICE_FRAME_TICKS, OpusEncoder, Pcm

logger = logging.getLogger(__name__)

Pull: TypeAlias = Callable[[Ticks], Pcm]  #: pts of a packet -> its int16 (480,) at 24 kHz

BURST_MAX = Ticks(60 * TICKS_PER_MS)
NTP_BEFORE_UNIX = 2_208_988_800  #: seconds from 1900 to 1970 (RFC 3550 §4)


class MediaClock:
    """When a pts is due. All tracks of a peer share one, so that equal pts are equal moments (lip sync).

    The origin is the moment the first track asks: before that nobody could have been sent anything.
    """

    def __init__(
        self, *, now: Callable[[], Nanos] = clock.now, wall_seconds: Callable[[], float] = clock.wall_seconds
    ) -> None:
        self._now = now
        self._wall_seconds = wall_seconds
        self._wall_origin = 0.0  # seconds since 1970 at the origin; read once, so that its jumps move nothing
        self.origin: Nanos | None = None

    def now(self) -> Nanos:
        return self._now()

    def begin(self) -> Nanos:
        if self.origin is None:
            self.origin = self._now()
            self._wall_origin = self._wall_seconds()
        return self.origin

    def due(self, pts: Ticks) -> Nanos:
        return Nanos(self.begin() + nanos_from_ticks(pts))

    def position(self, now: Nanos) -> Ticks:
        """The pts that is due at `now`."""
        return ticks_from_nanos(now - self.begin())

    def ntp(self, pts: Ticks) -> int:
        """NTP time at which a pts is due, 32.32 fixed point (RFC 3550 §4)."""
        self.begin()
        seconds = self._wall_origin + NTP_BEFORE_UNIX
        return round(seconds * (1 << 32)) + pts * (1 << 32) // TICKS_PER_SECOND

    async def wait_until(self, due: Nanos) -> Nanos:
        """Returns the time it is then, `due` or later; an overdue moment does not yield to the loop."""
        now = self._now()
        while now < due:
            await asyncio.sleep((due - now) / NANOS_PER_SECOND)
            now = self._now()
        return now


def next_pts(pts: Ticks, *, late: Ticks, frame: Ticks, burst_max: Ticks) -> Ticks:
    """Where to go on when `pts` is `late`: at the first whole frame not later than `burst_max`."""
    if late <= burst_max:
        return pts
    skipped = -(-(late - burst_max) // frame)
    return Ticks(pts + skipped * frame)


class VoiceTrack(MediaStreamTrack):  # type: ignore[misc]
    """20 ms packets of the character's voice, for one aiortc sender.

    `pull(pts)` is called once per packet, in order, on the loop, and must return int16 (480,) at 24 kHz at once. If it
    raises or returns anything else, silence is sent in its place and `on_fault` is told.
    """

    kind = "audio"

    def __init__(
        self,
        media_clock: MediaClock,
        pull: Pull,
        *,
        on_fault: Callable[[Exception], None] | None = None,
        bitrate: int = 32_000,
    ) -> None:
        super().__init__()
        self._clock = media_clock
        self._pull = pull
        self._on_fault = on_fault
        self._encoder = OpusEncoder(bitrate=bitrate)
        self._next = Ticks(0)
        self._returned: Ticks | None = None
        self.sender: Any = None  #: the aiortc sender it feeds; without one `rtp_origin` stays unknown
        self.rtp_origin: int | None = None  #: RTP timestamp of pts 0, known once the first packet has left
        self.on_packet: Callable[[av.Packet], None] | None = None  #: sees every packet
        self.packet_count = 0
        self.skipped_count = 0  #: packets not sent because the loop stalled
        self.fault_count = 0  #: frames that `pull` failed to give
        self.late_max = Ticks(0)

    async def recv(self) -> av.Packet:
        self._learn_origin()
        due = self._clock.due(self._next)
        now = await self._clock.wait_until(due)
        if self.readyState != "live":
            raise MediaStreamError
        pts = self._catch_up(late=ticks_from_nanos(now - due))
        packet = self._encoder.encode(self._frame(pts), pts=pts)
        self._next, self._returned = Ticks(pts + VOICE_FRAME_TICKS), pts
        self.packet_count += 1
        if self.on_packet is not None:
            self.on_packet(packet)
        return packet

    def _catch_up(self, *, late: Ticks) -> Ticks:
        self.late_max = max(self.late_max, late)
        pts = next_pts(self._next, late=late, frame=VOICE_FRAME_TICKS, burst_max=BURST_MAX)
        self.skipped_count += (pts - self._next) // VOICE_FRAME_TICKS
        return pts

    def _frame(self, pts: Ticks) -> Pcm:
        try:
            pcm = self._pull(pts)
            if pcm.shape != (VOICE_FRAME,) or pcm.dtype != np.int16:
                raise ValueError(f"pull({pts}) must return int16 ({VOICE_FRAME},), not {pcm.dtype} {pcm.shape}")
        except Exception as error:
            self._report(error)
            return np.zeros(VOICE_FRAME, np.int16)
        return pcm

    def _report(self, error: Exception) -> None:
        self.fault_count += 1
        if self.fault_count == 1:
            logger.error("playout failed; silence is sent", exc_info=error)
        if self._on_fault is not None:
            self._on_fault(error)

    def _learn_origin(self) -> None:
        # aiortc asks for packet n+1 when packet n is on the wire: only then do the two numbers belong together.
        if self.rtp_origin is None and self._returned is not None and self.sender is not None:
            self.rtp_origin = rtp_origin(self.sender, self._returned)


_SENDER_NAMES = (
    "_RTCRtpSender__rtp_timestamp",
    "_RTCRtpSender__packet_count",
    "_RTCRtpSender__rtt",
    "_RTCRtpSender__stats",
)


def check_sender(sender: Any) -> None:
    """Raises ConfigError if this aiortc keeps its sender's counters elsewhere: it is pinned to 1.16."""
    missing = [name for name in _SENDER_NAMES if not hasattr(sender, name)]
    if missing:
        raise ConfigError(f"This aiortc has no {', '.join(missing)}; duplexd's send path knows aiortc 1.16.")


def rtp_origin(sender: Any, pts: int) -> int | None:
    """RTP timestamp (u32) of pts 0, given the pts, in RTP ticks, of the packet sent last; None if none was sent.

    aiortc adds a random origin and keeps it in a local variable; the timestamp it sent last it keeps in the sender.
    """
    if not sender._RTCRtpSender__packet_count:
        return None
    timestamp: int = sender._RTCRtpSender__rtp_timestamp
    return (timestamp - pts) & 0xFFFFFFFF


def report_by(media_clock: MediaClock, sender: Any, *, rate: int, origin: Callable[[], int | None]) -> None:
    """Make the sender reports of an aiortc sender say what time it is on the media clock, now (module rule 5).

    Args:    rate: RTP ticks per second; origin: RTP timestamp of pts 0, None while unknown: no report is sent then,
             because one without a true line would be believed. Raises ConfigError for an unknown aiortc.
    """
    if not hasattr(sender, "_send_rtcp") or not hasattr(sender, "_RTCRtpSender__lsr"):
        raise ConfigError("This aiortc sends its reports elsewhere; duplexd's send path knows aiortc 1.16.")
    send = sender._send_rtcp

    async def mended(packets: list[Any]) -> None:
        at, told = media_clock.position(media_clock.now()), []
        for packet in packets:
            if isinstance(packet, RtcpSrPacket):
                first = origin()
                if first is None:
                    return
                packet.sender_info.ntp_timestamp = media_clock.ntp(at)
                packet.sender_info.rtp_timestamp = (first + at * rate // TICKS_PER_SECOND) & 0xFFFFFFFF
                # By this the receiver's answer is known again, for the round trip.
                sender._RTCRtpSender__lsr = (packet.sender_info.ntp_timestamp >> 16) & 0xFFFFFFFF
            told.append(packet)
        await send(told)

    sender._send_rtcp = mended


def round_trip_ms(sender: Any) -> float | None:
    """Round trip by the receiver reports of what this sender sent (a browser's first comes after about 6 s)."""
    seconds: float | None = sender._RTCRtpSender__rtt
    return None if seconds is None else seconds * 1000


def jitter_ms(sender: Any) -> float | None:
    """Jitter of arrival (RFC 3550 §6.4.1), by the newest receiver report of what this sender sent."""
    report = sender._RTCRtpSender__stats.get(f"remote-inbound-rtp_{id(sender)}")
    return None if report is None else 1000 * report.jitter / TICKS_PER_SECOND
