"""One WebRTC connection: the person's voice in, the character's voice and face out, two data channels, one end.

    accept(offer) -> answer -> connected -> channels open -> ... -> closed(reason), exactly once
        |              |           |
        |              |           +- nothing heard for `heartbeat_ns` on the fast channel: "heartbeat lost"
        |              +- no media path within `connect_timeout_ns`: closed with that sentence
        +- InputRefused: nothing is left behind

1. The page creates both channels (wire.py); a peer only ever answers. Channels with other labels are closed.
2. Nothing a stranger sends raises here: what is wrong with a message arrives at `on_message` as a `MessageFault`.
3. An exception of a callback is a fault of this session: it is logged and closes this peer, never its neighbours.
4. No address outside is contacted unless configured (aiortc alone would ask a public STUN server).
5. `close` takes at most `close_timeout_ns`, then cuts: aiortc's own close can wait for ever (aiortc#283).
6. Voice and face are two media streams for the page, which brings the picture to the voice itself: of one stream a
   browser delays the voice until a late picture has come. Stock clients play the stream of the newest track and leave
   the lips to the browser: for them both are one (`PeerConfig.one_stream`).
"""

from __future__ import annotations

import asyncio
import logging
import struct
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any, TypeAlias

import msgspec
from aiortc import (
    RTCConfiguration,
    RTCIceServer,
    RTCPeerConnection,
    RTCRtpSender,
    RTCSessionDescription,
)
from aiortc.rtcsctptransport import SCTP_DATA_FIRST_FRAG, SCTP_DATA_LAST_FRAG, WEBRTC_DCEP, WEBRTC_STRING

from duplexd import clock
from duplexd.errors import ConfigError, InputRefused
from duplexd.units import NANOS_PER_SECOND, TICKS_PER_SECOND, Nanos, ms_from_ticks
from duplexd.webrtc import camera, wire
from duplexd.webrtc.audience import Relay, RelayFace
from duplexd.webrtc.camera import CameraReceiver
from duplexd.webrtc.receive import Deliver, ReceiveCounts, VoiceReceiver, install
from duplexd.webrtc.sdp import check_offer, clean_offer, finish_answer, takes_vp8
from duplexd.webrtc.tracks import MediaClock, Pull, VoiceTrack, check_sender, jitter_ms, report_by, round_trip_ms
from duplexd.webrtc.video import VIDEO_RATE, Look, VideoCounts, VideoTrack

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
CHANNELS_MAX = 8  #: a page needs two
PENDING_MAX = 256  #: messages kept for a reliable channel that has not opened yet
FRAGMENTS_MAX = 16  #: of an unfinished message, before they become one
TSN_WRAP = 1 << 32
REASSEMBLY_BYTES_MAX = 65_536  #: how far a stranger may overrun the window we announced


class IceServer(msgspec.Struct, frozen=True):
    url: str  #: "stun:host:port" or "turn:host:port?transport=udp"
    username: str = ""
    credential: str = ""


class PeerConfig(msgspec.Struct, frozen=True, kw_only=True):
    ice_servers: tuple[IceServer, ...] = ()  #: none: host candidates only, nothing outside is contacted
    public_address: str = ""  #: announced instead of this host's own addresses
    addresses: tuple[str, ...] = ()  #: local addresses to offer; none: all but loopback
    loopback_only: bool = False  #: offer 127.0.0.1 only
    labels: tuple[str, ...] = (wire.RELIABLE_CHANNEL, wire.FAST_CHANNEL)  #: channels that are accepted
    connect_timeout_ns: Nanos = Nanos(30 * NANOS_PER_SECOND)
    heartbeat_ns: Nanos = Nanos(3 * NANOS_PER_SECOND)  #: silence on the channels that means gone; 0: not watched
    heartbeat_grace_ns: Nanos = Nanos(10 * NANOS_PER_SECOND)  #: from connected to the first ping
    close_timeout_ns: Nanos = Nanos(3 * NANOS_PER_SECOND)
    fast_backlog_bytes: int = 16_384  #: above it, messages that may be dropped are dropped
    reliable_backlog_bytes: int = 1_048_576  #: above it, the peer is closed
    bitrate: int = 32_000  #: of the voice
    hears: bool = True  #: takes a voice; False: for one who only watches
    speaks: bool = True  #: sends voice and face; False: to one who only publishes
    one_stream: bool = False  #: voice and face in one media stream, for clients that know no other (module rule 6)
    message_bytes_max: int = wire.MESSAGE_BYTES_MAX  #: of a message we send; the other side may announce less
    channel_grace_ns: Nanos = Nanos(0)  #: a reliable channel that closed may come back for so long; 0: nobody waits


class MessageFault(msgspec.Struct, frozen=True):
    """What was wrong with something that came over a data channel; given to `on_message` in its place."""

    code: str  #: "too_large", "not_text", "not_utf8", "unknown_channel" or "malformed"
    message: str


class PeerStats(msgspec.Struct, frozen=True):
    connected: bool
    rtt_ms: float | None  #: by RTCP; None until the first report
    voice_in: ReceiveCounts
    packets_sent: int
    packets_skipped: int  #: voice packets not sent because the loop stalled
    late_ms_max: float  #: how late the latest voice packet was made
    video: VideoCounts
    backlog_bytes: int  #: over all channels
    dropped_count: int  #: outgoing messages dropped at the bound
    fault_count: int  #: incoming messages that were no messages


class Sight(msgspec.Struct, frozen=True):
    """What a peer may show: `look(pts)` is asked for a picture at each tick while it is shown (video.VideoTrack)."""

    look: Look
    pool: Executor  #: where frames are encoded
    shown: bool = False  #: from the start; else somebody calls `Peer.video.show`


OnMessage: TypeAlias = Callable[[str, "str | MessageFault"], None]


class Heartbeat:
    """When a page counts as gone. The page pings once a second; any message counts as a sign of life."""

    def __init__(self, *, period_ns: Nanos, grace_ns: Nanos) -> None:
        self._period_ns = period_ns
        self._grace_ns = grace_ns
        self.deadline: Nanos | None = None  #: None: not watched

    def begin(self, now: Nanos) -> None:
        if self._period_ns:
            self.deadline = Nanos(now + max(self._grace_ns, self._period_ns))

    def beat(self, now: Nanos) -> None:
        if self.deadline is not None:
            self.deadline = Nanos(now + self._period_ns)

    def wait_ns(self, now: Nanos) -> int:
        """When to ask `is_lost` again: before the deadline, because the first beat ends the grace and moves it."""
        return min(self._period_ns, (self.deadline or now) - now)

    def is_lost(self, now: Nanos) -> bool:
        return self.deadline is not None and now >= self.deadline


class Channel:
    """One data channel's outgoing side, with its bounds. Holds messages back until the page has opened it.

    Args:    returns: one that was closed may be opened again, and what was said meanwhile is told then.
    """

    def __init__(self, *, backlog_max: int, droppable: bool, returns: bool = False) -> None:
        self._backlog_max = backlog_max
        self._droppable = droppable
        self._returns = returns
        self._pending: deque[str] = deque()
        self._pending_bytes = 0
        self.raw: Any = None
        self.dropped_count = 0

    @property
    def backlog_bytes(self) -> int:
        return self._pending_bytes + (self.raw.bufferedAmount if self.is_open else 0)

    @property
    def is_open(self) -> bool:
        return self.raw is not None and self.raw.readyState == "open"

    def open(self, raw: Any) -> None:
        self.raw = raw
        while self._pending and self.is_open:
            raw.send(self._pending.popleft())
        self._pending_bytes = 0

    def send(self, text: str, *, droppable: bool) -> bool:
        """False if the message was dropped. Raises OverflowError when a message that must arrive finds no room."""
        may_drop = droppable or self._droppable
        size = len(text.encode())
        # A droppable message gives way long before a reliable one has to end the session.
        room = self._backlog_max // 4 if may_drop and not self._droppable else self._backlog_max
        if self.backlog_bytes + size > room or len(self._pending) >= PENDING_MAX:
            return self._at_bound(may_drop)
        if self.is_open:
            self.raw.send(text)
            return True
        return self._hold_back(text, size, may_drop)

    def _at_bound(self, may_drop: bool) -> bool:
        if not may_drop:
            raise OverflowError
        self.dropped_count += 1
        return False

    def _hold_back(self, text: str, size: int, may_drop: bool) -> bool:
        gone = self.raw is not None and not self._returns
        if may_drop or gone:  # stale by the time it could leave, or the channel is closing
            self.dropped_count += 1
            return False
        self._pending.append(text)
        self._pending_bytes += size
        return True


class _Tagged(msgspec.Struct):
    t: str = ""


_tag = msgspec.json.Decoder(_Tagged)
_ping = msgspec.json.Decoder(wire.Ping)


class Peer:
    """One connection. Made by `accept`; all methods belong to the loop it was made on."""

    answer_sdp: str

    def __init__(
        self,
        *,
        config: PeerConfig,
        on_audio: Deliver,
        pull_audio: Pull,
        on_message: OnMessage,
        on_closed: Callable[[str], None],
        on_open: Callable[[str], None] | None = None,
        sight: Sight | None = None,
        eye: CameraReceiver | None = None,
        relay: Relay | None = None,
    ) -> None:
        self._config = config
        self._on_message = on_message
        self._on_closed = on_closed
        self._on_open = on_open
        self._sight = sight
        self._eye = eye
        self.takes_camera = False  #: whether the page may send one
        self._relay = relay
        self.clock = MediaClock() if relay is None else relay.clock
        self.voice = VoiceTrack(self.clock, pull_audio, on_fault=self._fault_in("playout"), bitrate=config.bitrate)
        self._voice = self.voice if relay is None else relay.voice
        self.video: VideoTrack | None = None  #: the face, if the offer takes one; hidden until somebody shows it
        self._connection = RTCPeerConnection(_rtc_configuration(config.ice_servers))
        self._receiver: VoiceReceiver | None = None
        self._deliver = on_audio
        self._channels = {label: _channel(label, config) for label in config.labels}
        self._channel_count = 0
        self._graces: deque[asyncio.TimerHandle] = deque(maxlen=CHANNELS_MAX)  #: of channels that closed
        self._heartbeat = Heartbeat(period_ns=config.heartbeat_ns, grace_ns=config.heartbeat_grace_ns)
        self._connected = asyncio.Event()
        self._fault_count = 0
        self._watch: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def accept(
        cls,
        offer_sdp: object,
        *,
        config: PeerConfig,
        on_audio: Deliver,
        pull_audio: Pull,
        on_message: OnMessage,
        on_closed: Callable[[str], None],
        on_open: Callable[[str], None] | None = None,
        sight: Sight | None = None,
        eye: CameraReceiver | None = None,
        relay: Relay | None = None,
    ) -> Peer:
        """Answer an offer. `answer_sdp` is complete (all candidates); the media path comes up once it is applied.

        Args:    on_audio(pcm, rtp, how): see receive.VoiceReceiver. pull_audio(pts): see tracks.VoiceTrack.
                 on_message(label, text or MessageFault): in order per reliable channel; pings are answered here.
                 on_closed(reason): once, whoever closed. on_open(label): a channel of `config.labels` has opened.
                 sight: where the face comes from, if the offer takes video; None: no video is sent.
                 eye: takes the page's camera, if the offer has one; None: it is not taken.
                 relay: packets of another session to send instead of a voice and a face of its own.
        Raises:  InputRefused with a sentence, ConfigError if no local address can be offered; then nothing is left
                 behind and `on_closed` is not called.
        """
        check_offer(offer_sdp, receives=config.speaks)
        assert isinstance(offer_sdp, str)
        peer = cls(
            config=config,
            on_audio=on_audio,
            pull_audio=pull_audio,
            on_message=on_message,
            on_closed=on_closed,
            on_open=on_open,
            sight=sight,
            eye=eye,
            relay=relay,
        )
        try:
            await peer._answer(clean_offer(offer_sdp))
        except BaseException:
            peer._on_closed = _tell_nobody
            await peer.close("refused")
            raise
        peer._watch = asyncio.ensure_future(peer._supervise())
        return peer

    @property
    def rtp_origin(self) -> int | None:
        """RTP timestamp (u32) of the downlink's pts 0; None until the first packet has left."""
        return self._voice.rtp_origin

    @property
    def video_origin(self) -> int | None:
        """RTP timestamp (u32, 90 kHz) of the picture's pts 0; None until the first frame has left."""
        return self.video.rtp_origin if self.video is not None else None

    @property
    def is_connected(self) -> bool:
        return self._connected.is_set() and self._closing is None

    @property
    def message_bytes_max(self) -> int:
        """Of a message we may send: what we are configured for, or what the other side announces if that is less."""
        sctp = self._connection.sctp
        announced = _own(sctp, "_remote_max_message_size") if sctp is not None else 0
        return min(self._config.message_bytes_max, announced or self._config.message_bytes_max)  # RFC 8841 §6.1

    def send(self, label: str, text: str, *, droppable: bool = False) -> bool:
        """Queue a message on a channel. Never raises on the state of the network.

        At the bound, a message of the fast channel or one marked `droppable` is dropped (False); any other closes the
        peer, because a page that has missed one can no longer be told the truth. Where the offer has no data channels
        nobody is told anything (False).
        Raises KeyError for a label that is not in the configuration, ValueError for a message no page takes.
        """
        channel = self._channels[label]
        if len(text.encode()) > self.message_bytes_max:
            raise ValueError(f"a message of {len(text.encode())} bytes; {self.message_bytes_max} are taken")
        if self._closing is not None or self._connection.sctp is None:
            return False
        try:
            return channel.send(text, droppable=droppable)
        except OverflowError:
            self._begin_close(f"the page does not read: {channel.backlog_bytes} bytes wait on {label!r}")
            return False

    @property
    def rtt_ms(self) -> float | None:
        return round_trip_ms(self._voice.sender) if self._voice.sender is not None else None

    @property
    def jitter_ms(self) -> float | None:
        return jitter_ms(self._voice.sender) if self._voice.sender is not None else None

    @property
    def backlog_bytes(self) -> int:
        """What waits on all channels for the page to read it."""
        return sum(channel.backlog_bytes for channel in self._channels.values())

    def stats(self) -> PeerStats:
        return PeerStats(
            connected=self.is_connected,
            rtt_ms=self.rtt_ms,
            voice_in=self._receiver.counts if self._receiver is not None else ReceiveCounts(),
            packets_sent=self._voice.packet_count,
            packets_skipped=self._voice.skipped_count,
            late_ms_max=ms_from_ticks(self._voice.late_max),
            video=self.video.counts if self.video is not None else VideoCounts(),
            backlog_bytes=self.backlog_bytes,
            dropped_count=sum(channel.dropped_count for channel in self._channels.values()),
            fault_count=self._fault_count,
        )

    async def wait_connected(self) -> None:
        """Until media can flow; close cancels nobody, so give it a time limit of your own."""
        await self._connected.wait()

    async def close(self, reason: str) -> None:
        """End the connection and free everything; bounded, idempotent, the first reason counts."""
        await asyncio.shield(self._begin_close(reason))

    # Answering ------------------------------------------------------------------------------------------------------

    async def _answer(self, offer_sdp: str) -> None:
        connection = self._connection
        connection.on("connectionstatechange", self._connection_changed)
        connection.on("datachannel", self._channel_opened)
        direction = {(True, True): "sendrecv", (True, False): "recvonly", (False, True): "sendonly"}[
            self._config.hears, self._config.speaks
        ]
        voice = self._voice
        transceiver = connection.addTransceiver(voice if self._config.speaks else "audio", direction=direction)
        transceiver.setCodecPreferences(_codecs("audio/opus"))
        # Before the offer is applied: afterwards aiortc would heed no preference, and our frames are VP8 only.
        face = connection.addTransceiver("video", direction="sendonly") if takes_vp8(offer_sdp) else None
        if face is not None:
            face.setCodecPreferences(_codecs("video/vp8", "video/rtx"))
        await self._apply(offer_sdp)
        check_sender(transceiver.sender)
        if self._config.speaks:
            voice.sender = transceiver.sender
            report_by(self.clock, transceiver.sender, rate=TICKS_PER_SECOND, origin=lambda: voice.rtp_origin)
        if self._config.hears:
            self._receiver = install(transceiver.receiver, self._deliver, on_fault=self._fault_in("the listener"))
        self._direct_others(transceiver)
        if face is not None:
            self._direct_face(face)
        if connection.sctp is not None:
            self._guard_channels(connection.sctp)
        if self._config.loopback_only or self._config.addresses:
            bind_addresses(connection, self._config.addresses or (LOOPBACK,))
        await connection.setLocalDescription(await connection.createAnswer())
        if not any(transport.iceGatherer.getLocalCandidates() for transport in ice_transports(connection)):
            raise ConfigError(
                f"No address of this host can be offered (asked for: {', '.join(self._config.addresses) or 'all'}); "
                "on a host with loopback only, say loopback_only."
            )
        self.answer_sdp = finish_answer(connection.localDescription.sdp, public_address=self._config.public_address)

    async def _apply(self, offer_sdp: str) -> None:
        try:
            await self._connection.setRemoteDescription(RTCSessionDescription(sdp=offer_sdp, type="offer"))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # aiortc's parser asserts, indexes and converts: any exception means a text it cannot use.
            detail = f"{type(error).__name__}: {error}".rstrip(": ")
            raise InputRefused(f"The offer cannot be answered ({detail}).") from error

    def _direct_others(self, voice: Any) -> None:
        """Receive nothing that nobody reads: it would be decoded for nothing, into a queue without a bound
        (aiortc#554)."""
        for transceiver in self._connection.getTransceivers():
            if transceiver is not voice:
                transceiver.direction = "inactive"

    def _direct_face(self, transceiver: Any) -> None:
        """Send the face where it is wanted, and take the camera beside it where somebody looks."""
        asked = transceiver._offerDirection  # As seen from here.
        if self._eye is not None and asked == "recvonly":
            self._take_camera(transceiver, direction="recvonly")
        track = self._make_face() if asked in ("sendonly", "sendrecv") else None
        if track is None:
            return
        check_sender(transceiver.sender)
        track.attach(transceiver.sender)
        report_by(self.clock, transceiver.sender, rate=VIDEO_RATE, origin=lambda: track.rtp_origin)
        transceiver.sender.replaceTrack(track)
        if not self._config.one_stream:
            transceiver.sender._stream_id = str(uuid.uuid4())  # Module rule 6: the voice waits for nobody.
        transceiver.direction = "sendonly"
        if self._eye is not None and asked == "sendrecv":
            self._take_camera(transceiver, direction="sendrecv")

    def _make_face(self) -> VideoTrack | RelayFace | None:
        if self._relay is not None:
            return self._relay.face
        if self._sight is None:
            return None
        self.video = VideoTrack(self.clock, self._sight.look, pool=self._sight.pool)
        if self._sight.shown:
            self.video.show()
        return self.video

    def _take_camera(self, transceiver: Any, *, direction: str) -> None:
        assert self._eye is not None
        camera.install(transceiver.receiver, self._eye)
        transceiver.direction = direction
        self.takes_camera = True

    # Watching -------------------------------------------------------------------------------------------------------

    def _connection_changed(self) -> None:
        state = self._connection.connectionState
        if state == "connected" and not self._connected.is_set():
            self._connected.set()
            if self._connection.sctp is not None and wire.FAST_CHANNEL in self._channels:
                self._heartbeat.begin(clock.now())
        elif state == "failed":
            self._begin_close("the connection failed")
        elif state == "closed":
            self._begin_close("the page left")

    async def _supervise(self) -> None:
        seconds = self._config.connect_timeout_ns / NANOS_PER_SECOND
        try:
            await asyncio.wait_for(self._connected.wait(), seconds)
        except TimeoutError:
            self._begin_close(f"no media path within {seconds:g} s: UDP is blocked, or a TURN server is needed")
            return
        while self._heartbeat.deadline is not None:
            now = clock.now()
            if self._heartbeat.is_lost(now):
                self._begin_close("heartbeat lost")
                return
            await asyncio.sleep(self._heartbeat.wait_ns(now) / NANOS_PER_SECOND)

    def _fault_in(self, what: str) -> Callable[[Exception], None]:
        def on_fault(error: Exception) -> None:
            self._begin_close(f"internal error in {what}: {type(error).__name__}: {error}")

        return on_fault

    # Data channels --------------------------------------------------------------------------------------------------

    def _channel_opened(self, raw: Any) -> None:
        self._channel_count += 1
        if self._channel_count > CHANNELS_MAX:
            raw.close()
            self._begin_close(f"the page opened more than {CHANNELS_MAX} data channels")
            return
        label = raw.label
        channel = self._channels.get(label)
        if channel is None or channel.is_open:
            raw.close()
            self._fault(label, "unknown_channel", f"channel {label[:80]!r} is not served, or is open already")
            return
        raw.on("message", lambda data: self._message_arrived(label, data))
        if self._config.channel_grace_ns:
            raw.on("close", lambda: self._channel_closed(label))
        self._heartbeat.beat(clock.now())
        channel.open(raw)
        if self._on_open is not None:
            self._guarded(lambda on_open: on_open(label), self._on_open)

    def _channel_closed(self, label: str) -> None:
        """Media may live on, but nobody can be told of it any more: it ends, unless the channel comes back."""

        def judge() -> None:
            if not self._channels[label].is_open:
                self._begin_close(f"the channel {label!r} was closed")

        if self._closing is None:
            seconds = self._config.channel_grace_ns / NANOS_PER_SECOND
            self._graces.append(asyncio.get_running_loop().call_later(seconds, judge))

    def _message_arrived(self, label: str, data: str | bytes) -> None:
        self._heartbeat.beat(clock.now())
        if not isinstance(data, str):
            self._fault(label, "not_text", f"a binary message of {len(data)} bytes; only text is understood")
        elif not self._is_ping(label, data):
            self._guarded(lambda on_message: on_message(label, data), self._on_message)

    def _is_ping(self, label: str, text: str) -> bool:
        """Answers a ping. Whether anything else is well-formed is for whoever takes the messages to say."""
        try:
            if _tag.decode(text).t != "ping":
                return False
            ping = _ping.decode(text)
        except msgspec.DecodeError:
            return False
        self.send(label, wire.encode(wire.Pong(n=ping.n, at=ping.at)), droppable=True)
        return True

    def _fault(self, label: str, code: str, message: str) -> None:
        self._fault_count += 1
        fault = MessageFault(code=code, message=message)
        self._guarded(lambda on_message: on_message(label, fault), self._on_message)

    def _guarded(self, call: Callable[[Any], None], callback: Any) -> None:
        if self._closing is not None:
            return
        try:
            call(callback)
        except Exception as error:
            logger.exception("a callback of this peer failed")
            self._begin_close(f"internal error: {type(error).__name__}: {error}")

    def _guard_channels(self, sctp: Any) -> None:
        """Check messages before aiortc decodes them: a byte that is no UTF-8 would end its receive loop and the voice
        with it. And end a page that sends fragments for ever without completing a message."""
        receive, receive_chunk = _own(sctp, "_data_channel_receive"), _own(sctp, "_receive_data_chunk")

        async def checked(stream_id: int, protocol: int, data: bytes) -> None:
            fault = _message_fault(protocol, data)
            if fault is None:
                try:
                    await receive(stream_id, protocol, data)
                except (AssertionError, UnicodeDecodeError, struct.error) as error:
                    fault = MessageFault("malformed", f"a data channel message makes no sense: {error!r}")
            if fault is not None:
                self._heartbeat.beat(clock.now())
                raw = sctp._data_channels.get(stream_id)
                self._fault(raw.label if raw is not None else "", fault.code, fault.message)

        async def bounded(chunk: Any) -> None:
            if sctp._advertised_rwnd < -REASSEMBLY_BYTES_MAX:
                self._begin_close("the page sends fragments that never become a message")
                return
            await receive_chunk(chunk)
            sctp._advertised_rwnd += _coalesce(sctp._get_inbound_stream(chunk.stream_id).reassembly)
            if not chunk.flags & SCTP_DATA_LAST_FRAG:
                await asyncio.sleep(0)  # A page that sends a lot must not keep the voices waiting that are due now.

        sctp._data_channel_receive = checked
        sctp._receive_data_chunk = bounded

    # Closing --------------------------------------------------------------------------------------------------------

    def _begin_close(self, reason: str) -> asyncio.Task[None]:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close(reason))
        return self._closing

    async def _close(self, reason: str) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for grace in self._graces:
            grace.cancel()
        await self._dismantle()
        try:
            self._on_closed(reason)
        except Exception:
            logger.exception("on_closed failed")

    async def _dismantle(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        if self._eye is not None:
            self._eye.close()
        # The tracks are stopped by their senders: stopped before, they would leave aiortc waiting (aiortc#283).
        task = asyncio.ensure_future(self._connection.close())
        done, _ = await asyncio.wait([task], timeout=self._config.close_timeout_ns / NANOS_PER_SECOND)
        if not done:
            task.cancel()
            logger.warning("aiortc did not close within %g s; cut", self._config.close_timeout_ns / NANOS_PER_SECOND)
            await _cut(self._connection)
        elif (error := task.exception()) is not None:
            logger.warning("aiortc failed to close: %r", error)
            await _cut(self._connection)
        self._voice.stop()
        self.voice.stop()
        if self._relay is not None:
            self._relay.face.stop()
        if self.video is not None:
            self.video.stop()


# Pieces -------------------------------------------------------------------------------------------------------------


def bind_addresses(connection: Any, addresses: Iterable[str]) -> None:
    """Make an aiortc connection gather these local addresses only; before its local description is set.

    aioice leaves 127.0.0.1 out and takes every other address, container bridges included.
    Raises ConfigError if this aioice gathers otherwise than expected.
    """
    chosen = list(addresses)
    for transport in ice_transports(connection):
        ice = transport.iceGatherer._connection
        for name in ("gather_candidates", "get_component_candidates", "_local_candidates_start"):
            if not hasattr(ice, name):
                raise ConfigError(f"This aioice has no {name}; duplexd knows aioice 0.12 or newer of aiortc 1.16.")
        ice.gather_candidates = _gathering(ice, chosen)


def _gathering(ice: Any, addresses: list[str]) -> Callable[[], Any]:
    async def gather_candidates() -> None:
        if ice._local_candidates_start:
            return
        ice._local_candidates_start = True
        ice._local_candidates += await ice.get_component_candidates(component=1, addresses=addresses)
        ice._local_candidates_end = True

    return gather_candidates


def ice_transports(connection: Any) -> list[Any]:
    found = {transceiver.receiver.transport.transport for transceiver in connection.getTransceivers()}
    if connection.sctp is not None:
        found.add(connection.sctp.transport.transport)
    return list(found)


class LoopGuard:
    """The loop's exception handler: what aioice and aiortc leave behind is counted, the rest is logged as ever.

    aioice's STUN retry timer has been seen to answer a future twice (pipecat#2488), and aiortc sends from tasks nobody
    awaits, which fail when a connection has just gone. The same exceptions from anywhere else are bugs and stay loud.
    """

    def __init__(self) -> None:
        self.expected_count = 0
        self.unexpected_count = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if _is_left_behind(context.get("exception")):
            self.expected_count += 1
            logger.debug("ignored on the loop: %s", context)
            return
        self.unexpected_count += 1
        self.report(loop, context)

    def report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)


def _is_left_behind(error: object) -> bool:
    if not isinstance(error, asyncio.InvalidStateError | ConnectionError):
        return False
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(module.startswith(("aioice.", "aiortc.")) for module in modules)


def guard_loop(loop: asyncio.AbstractEventLoop) -> LoopGuard:
    guard = LoopGuard()
    loop.set_exception_handler(guard)
    return guard


def _private(connection: Any, *names: str) -> list[Any]:
    """What aiortc keeps under these names in senders and receivers, where it is there."""
    return [
        found
        for transceiver in connection.getTransceivers()
        for owner, kind in ((transceiver.sender, "Sender"), (transceiver.receiver, "Receiver"))
        for name in names
        if (found := getattr(owner, f"_RTCRtp{kind}__{name}", None)) is not None
    ]


async def _cut(connection: Any) -> None:
    """Close the sockets and stop the tasks aiortc was asked to close and did not."""
    for task in _private(connection, "rtp_task", "rtcp_task"):
        task.cancel()
    # A task that failed (a receiver report of more than 31 streams) never says that it has ended, and aiortc's own
    # `close`, which it begins when its other end goes, would wait for that for ever.
    for exited in _private(connection, "rtp_exited", "rtcp_exited"):
        exited.set()
    for transport in ice_transports(connection):
        for protocol in transport.iceGatherer._connection._protocols:
            protocol.transport.close()
    await asyncio.sleep(0)


def _tell_nobody(reason: str) -> None:
    return None


def _coalesce(fragments: list[Any]) -> int:
    """Put the beginning of an unfinished message into one fragment, and of one that is too long forget the rest.

    aiortc goes through all fragments of a message with each that comes: a message of a megabyte held the event loop,
    and everybody's voice, for a quarter of a second.

    Returns: bytes that were forgotten, for the window.
    """
    if len(fragments) <= FRAGMENTS_MAX:
        return 0
    first = fragments[0]
    run = 1
    while run < len(fragments) and _follows(fragments[run - 1], fragments[run]):
        run += 1
    ends = SCTP_DATA_FIRST_FRAG | SCTP_DATA_LAST_FRAG
    if run == 1 or first.flags & ends != SCTP_DATA_FIRST_FRAG:
        return 0
    whole = b"".join(fragment.user_data for fragment in fragments[:run])
    first.tsn, first.user_data = fragments[run - 1].tsn, whole[: wire.MESSAGE_BYTES_MAX + 1]
    del fragments[1:run]
    return len(whole) - len(first.user_data)


def _follows(before: Any, after: Any) -> bool:
    """`after` is the next fragment of the same message, and not its last one."""
    ends = SCTP_DATA_FIRST_FRAG | SCTP_DATA_LAST_FRAG
    return bool(after.tsn == (before.tsn + 1) % TSN_WRAP and not after.flags & ends)


def _message_fault(protocol: int, data: bytes) -> MessageFault | None:
    if protocol == WEBRTC_DCEP:
        return None
    if len(data) > wire.MESSAGE_BYTES_MAX:
        return MessageFault(
            "too_large", f"a message of more than {wire.MESSAGE_BYTES_MAX} bytes, the most one may have"
        )
    if protocol != WEBRTC_STRING:
        return None
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return MessageFault("not_utf8", f"a text message is not UTF-8: {error.reason} at byte {error.start}")
    return None


def _own(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise ConfigError(f"This aiortc has no {name} in its SCTP transport; duplexd knows aiortc 1.16.")
    return getattr(owner, name)


def _codecs(*names: str) -> list[Any]:
    """aiortc's capabilities of these names, such as "audio/opus", in their order."""
    found = RTCRtpSender.getCapabilities(names[0].partition("/")[0]).codecs
    return [codec for name in names for codec in found if codec.mimeType.lower() == name]


def _channel(label: str, config: PeerConfig) -> Channel:
    fast = label == wire.FAST_CHANNEL
    bound = config.fast_backlog_bytes if fast else config.reliable_backlog_bytes
    return Channel(backlog_max=bound, droppable=fast, returns=config.channel_grace_ns > 0)


def _rtc_configuration(servers: tuple[IceServer, ...]) -> Any:
    return RTCConfiguration(
        iceServers=[
            RTCIceServer(urls=server.url, username=server.username or None, credential=server.credential or None)
            for server in servers
        ]
    )
