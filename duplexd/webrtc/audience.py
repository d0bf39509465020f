"""Who watches a session without taking part in it: one encoding, many viewers.

1. A viewer gets the very packets that were made for the session's own client. Where its client takes no face, the
   audience has a track of its own, on the same clock. So a cut is a cut for everybody, and no viewer moves a cursor.
2. A viewer's picture begins with a key frame, which is asked for when it comes and when a packet was lost; the track
   bounds how often.
3. Nothing waits for a viewer: of a voice that is not taken the oldest packets are lost, of a face everything up to the
   next key frame.
4. Viewers are bounded (`VIEWERS_MAX`); when their session ends, so do they.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import av
import msgspec
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack

from duplexd.units import Ticks
from duplexd.webrtc.tracks import MediaClock, VoiceTrack, rtp_origin
from duplexd.webrtc.video import Packer, VideoTrack, check_encoder

VIEWERS_MAX = 8  #: of one session
VOICE_QUEUED_MAX = 10  #: packets of 20 ms
FACE_QUEUED_MAX = 12  #: frames of 40 ms


class AudienceFull(Exception):
    """As many watch as may."""


class _RelayTrack(MediaStreamTrack):  # type: ignore[misc]
    """Packets made elsewhere, for one aiortc sender."""

    queued_max = 0

    def __init__(self) -> None:
        super().__init__()
        self.sender: Any = None
        self.rtp_origin: int | None = None  #: RTP timestamp of pts 0, known once the first packet has left
        self.packet_count = 0
        self.skipped_count = 0  #: packets that were not taken in time
        self.late_max = Ticks(0)
        self._queue: deque[av.Packet] = deque()
        self._wake = asyncio.Event()
        self._returned: int | None = None

    def put(self, packet: av.Packet) -> None:
        self._queue.append(packet)
        self._wake.set()

    async def recv(self) -> av.Packet:
        # aiortc asks for the next packet when this one is on the wire: then the two numbers belong together.
        if self.rtp_origin is None and self._returned is not None and self.sender is not None:
            self.rtp_origin = rtp_origin(self.sender, self._returned)
        while not self._queue:
            if self.readyState != "live":
                raise MediaStreamError
            self._wake.clear()
            await self._wake.wait()
        packet = self._queue.popleft()
        self.packet_count += 1
        self._returned = packet.pts
        return packet

    def stop(self) -> None:
        super().stop()
        self._queue.clear()
        self._wake.set()


class RelayVoice(_RelayTrack):
    kind = "audio"

    def put(self, packet: av.Packet) -> None:
        while len(self._queue) >= VOICE_QUEUED_MAX:
            self._queue.popleft()
            self.skipped_count += 1
        super().put(packet)


class RelayFace(_RelayTrack):
    """Args:    want_keyframe: asks whoever makes the frames."""

    kind = "video"

    def __init__(self, want_keyframe: Callable[[], None]) -> None:
        super().__init__()
        self._want_keyframe = want_keyframe
        self._broken = True  # until the first key frame

    def attach(self, sender: Any) -> None:
        """Take the encoder's place in an aiortc sender, before it starts. Raises ConfigError for an unknown aiortc."""
        check_encoder(sender)
        self.sender = sender
        sender._RTCRtpSender__encoder = Packer()
        sender._send_keyframe = self._want_keyframe

    def put_frame(self, packet: av.Packet, *, keyframe: bool) -> None:
        if len(self._queue) >= FACE_QUEUED_MAX:
            self.skipped_count += len(self._queue)
            self._queue.clear()
            self._broken = True
            self._want_keyframe()
        if keyframe:
            self._broken = False
        if self._broken:
            self.skipped_count += 1
        else:
            self.put(packet)


class Relay(msgspec.Struct, frozen=True, eq=False):
    """What one viewer is sent."""

    clock: MediaClock
    voice: RelayVoice
    face: RelayFace


class Audience:
    """The viewers of one session.

    Args:    clock: of its tracks. voice: whose packets are passed on; with `pumped` nobody else asks it for any.
             face: the one its client is sent; None: it takes none, and `make_face` gives one while somebody watches.
    """

    def __init__(
        self,
        *,
        clock: MediaClock,
        voice: VoiceTrack,
        face: VideoTrack | None,
        make_face: Callable[[MediaClock], VideoTrack],
        pumped: bool = False,
    ) -> None:
        self.clock = clock
        self.own_face: VideoTrack | None = None  #: made for viewers alone
        self._voice = voice
        self._face = face
        self._make_face = make_face
        self._relays: list[Relay] = []
        self._ends: dict[int, Callable[[str], None]] = {}  #: by relay: what ends its connection
        self._pumps: dict[str, asyncio.Task[None]] = {}
        voice.on_packet = self._pass_voice
        if face is not None:
            face.on_packet = self._pass_face
        if pumped:
            self._pump(voice)

    @property
    def count(self) -> int:
        return len(self._relays)

    def join(self) -> Relay:
        """Raises AudienceFull."""
        if len(self._relays) >= VIEWERS_MAX:
            raise AudienceFull(f"{VIEWERS_MAX} people watch this session already; that is the most")
        if self._face is None and self.own_face is None:
            self.own_face = self._make_face(self.clock)
            self.own_face.on_packet = self._pass_face
            self._pump(self.own_face)
        relay = Relay(self.clock, RelayVoice(), RelayFace(self._want_keyframe))
        self._relays.append(relay)
        self._want_keyframe()
        return relay

    def bind(self, relay: Relay, end: Callable[[str], None]) -> None:
        """`end(reason)` closes this viewer's connection when the session ends."""
        self._ends[id(relay)] = end

    def part(self, relay: Relay) -> None:
        """A viewer has gone; with the last one a face that nobody else sees."""
        self._ends.pop(id(relay), None)
        if relay in self._relays:
            self._relays.remove(relay)
        if not self._relays and self.own_face is not None:
            self._stop(self.own_face)
            self.own_face = None

    def close(self, reason: str) -> None:
        """The session has ended."""
        for end in list(self._ends.values()):
            end(reason)
        self._ends.clear()
        self._relays.clear()
        if self.own_face is not None:
            self._stop(self.own_face)
            self.own_face = None
        if self._voice.kind in self._pumps:
            self._stop(self._voice)
        self._voice.on_packet = None
        if self._face is not None:
            self._face.on_packet = None

    # Packets ----------------------------------------------------------------------------------------------------------

    def _pass_voice(self, packet: av.Packet) -> None:
        for relay in self._relays:
            relay.voice.put(packet)

    def _pass_face(self, packet: av.Packet, keyframe: bool) -> None:
        for relay in self._relays:
            relay.face.put_frame(packet, keyframe=keyframe)

    def _want_keyframe(self) -> None:
        face = self._face or self.own_face
        if face is not None:
            face.want_keyframe()

    def _pump(self, track: VoiceTrack | VideoTrack) -> None:
        self._pumps[track.kind] = asyncio.ensure_future(_draw(track))

    def _stop(self, track: VoiceTrack | VideoTrack) -> None:
        track.stop()
        self._pumps.pop(track.kind).cancel()


async def _draw(track: VoiceTrack | VideoTrack) -> None:
    """What a sender of aiortc would do: ask for the next packet. The track paces, and passes it on."""
    try:
        while True:
            await track.recv()
    except MediaStreamError:
        return
