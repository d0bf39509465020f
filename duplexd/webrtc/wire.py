"""What the page and the front end say to each other: JSON objects with a field `t`, on two data channels.

1. Channel `duplexd` is reliable and ordered: words, states, settings, errors.
2. Channel `duplexd-fast` is unordered and never retransmitted: position reports, voice hints, hold, resume, flush. A
   lost packet on a reliable channel can cost a second (SCTP's minimum RTO), so each order of `duplexd-fast` carries
   an id, is sent up to three times (at 0, 20 and 60 ms) and is acted on once.
3. Times the page measures are milliseconds of its own clock; RTP timestamps are u32 of the downlink audio (48 kHz).
4. Positions on the session's timeline are ticks (1/48000 s) in whole numbers. Epochs only grow.
5. An unknown field or type gets an `error` with the reason; the session goes on.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

FAST_CHANNEL = "duplexd-fast"
RELIABLE_CHANNEL = "duplexd"
MESSAGE_BYTES_MAX = 65_536
TEXT_MAX = 8_000  #: characters of one typed message
Key = Annotated[str, msgspec.Meta(max_length=128)]


class FromPage(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True):
    """Base of what a page may send."""


class Pos(FromPage, frozen=True, tag="pos"):
    """What is being heard now: ten times a second while connected, at once when muted, unmuted or asked (`hold`)."""

    rtp: int  #: rtpTimestamp of the newest synchronization source
    age_ms: float  #: how long ago that packet went to the decoder's output
    playout_ms: float = 0.0  #: output device delay, from media-playout statistics over the last 200 ms
    buffer_ms: float = 0.0  #: jitter buffer delay, likewise
    input_ms: float = 0.0  #: from the microphone until a sample can leave with its packet
    muted: bool = False
    passed_ms: float = 0.0  #: `muted`: how much sound behind `rtp` was let through before
    bound_ms: float = 20.0  #: `muted`: error bound of that
    epoch: int = 0  #: newest epoch the page has been told of
    hold: int = 0  #: id of the hold this answers; `muted` must be true, and the answer is authoritative for the cut
    silent: bool = False  #: autoplay is blocked: nothing is being heard


class Voice(FromPage, frozen=True, tag="voice"):
    """The page's own voice detector. `on` with `muted`: the element is muted already and the position is what was
    heard.
    """

    on: bool
    id: int  #: counts voice hints of this page; repeats of one id are one hint
    rtp: int = 0
    muted: bool = False
    passed_ms: float = 0.0
    bound_ms: float = 20.0


class Say(FromPage, frozen=True, tag="say"):
    """Typed text. `id` is an idempotency key: a repeat is acknowledged and not said again."""

    text: str
    id: Key


class Image(FromPage, frozen=True, tag="image"):
    data: str  #: base64
    id: Key = ""


class Stop(FromPage, frozen=True, tag="stop"):
    """The person pressed stop: an interruption without words."""

    id: int
    rtp: int = 0
    muted: bool = False
    passed_ms: float = 0.0
    bound_ms: float = 20.0


class Set(FromPage, frozen=True, tag="set"):
    """Per-session settings; absent ones stay as they are."""

    barge_in: bool | None = None
    echo_cancellation: bool | None = None  #: what the page's microphone really has
    speculation: bool | None = None  #: False: answer no turn before it has certainly ended


class Seen(FromPage, frozen=True, tag="seen"):
    """Whether anybody can see the page: no picture is made for a hidden one."""

    on: bool


SKEW_MAX_MS = 2000.0  #: beyond it browsers say nothing themselves


class Picture(FromPage, frozen=True, tag="picture"):
    """What the browser counts of the character's picture, every two seconds; totals since the page connected."""

    received: int
    decoded: int
    dropped: int
    freezes: int
    skew_ms: float | None = None  #: how far the voice is ahead of the picture; None: the browser does not know yet


class Camera(FromPage, frozen=True, tag="camera"):
    """The person has switched the camera on or off."""

    on: bool


class Ping(FromPage, frozen=True, tag="ping"):
    """Heartbeat, once a second on the fast channel; three seconds without one and the session is closed."""

    n: int
    at: float


class Played(FromPage, frozen=True, tag="played"):
    """Acknowledges an order of the fast channel by its id, so that repeats can stop."""

    id: int


PageMessage = Pos | Voice | Say | Image | Stop | Set | Seen | Picture | Camera | Ping | Played


class ToPage(msgspec.Struct, frozen=True, tag_field="t", omit_defaults=False):
    """Base of what the front end sends."""


class Ready(ToPage, frozen=True, tag="ready"):
    session: int
    model: str
    epoch: int
    barge_in: bool
    takes: tuple[str, ...]  #: modalities the model reads: "audio", "text", "image"
    cut: str  #: how finely the character can be interrupted: "at_cursor" or "end_of_chunk"
    camera: bool = False  #: whether the character would look at the person
    faceless: str = ""  #: why the model's own face is not shown; empty: it is, or none was wanted


class Clocks(ToPage, frozen=True, tag="clocks"):
    """RTP timestamps of one and the same moment, so that the page can hold the picture against the voice."""

    voice: int  #: u32, 48 kHz
    face: int  #: u32, 90 kHz


class Hold(ToPage, frozen=True, tag="hold"):
    """Mute now, keep the buffer, answer with `pos{hold}` at once. Fast channel."""

    id: int
    hold: int
    epoch: int


class Resume(ToPage, frozen=True, tag="resume"):
    """A false alarm: unmute when the downlink's RTP timestamp reaches `rtp` (from there on the muted part is sent
    again).
    """

    id: int
    hold: int
    epoch: int
    rtp: int


class Flush(ToPage, frozen=True, tag="flush"):
    """The epoch has advanced: stay muted until the downlink's RTP timestamp reaches `rtp`, then unmute."""

    id: int
    hold: int
    epoch: int
    rtp: int
    position: int  #: where the old epoch was cut, in ticks of the session's timeline


class State(ToPage, frozen=True, tag="state"):
    state: str  #: "listening", "thinking", "speaking", "held"


class User(ToPage, frozen=True, tag="user"):
    """Words of the person so far. `stable` characters will not change any more."""

    turn: int
    text: str
    stable: int
    final: bool


class Word(msgspec.Struct, frozen=True):
    text: str
    start: int  #: ticks on the session's timeline
    end: int


class Reply(ToPage, frozen=True, tag="reply"):
    """State of one response: "created", then "completed", "cancelled" or "failed", exactly one of them."""

    response: int
    epoch: int
    state: str
    reason: str = ""
    #: states of its outputs, "text" and "voice": a voice that failed behind whole words is "completed" and "failed"
    outputs: dict[str, str] = {}


class Words(ToPage, frozen=True, tag="words"):
    """The next words of a response, with when they are spoken."""

    response: int
    first: int  #: index of the first of them within the response
    words: tuple[Word, ...]


class Heard(ToPage, frozen=True, tag="heard"):
    """History: of this response `words` words were heard; `final` when nothing more of it will be heard."""

    response: int
    words: int
    ambiguous: tuple[int, ...]  #: indexes of words inside the cursor's error bound
    estimated: bool  #: no measured cursor: a conservative clock
    final: bool


class CursorShown(ToPage, frozen=True, tag="cursor"):
    """Cursors for the page's moving bar, ten times a second while a reply is alive; ticks."""

    epoch: int
    generation: int
    delivery: int
    playback: int
    budget: int
    assumed: bool


class Latency(ToPage, frozen=True, tag="latency"):
    """Where the time of one turn went, in order; the parts sum to the total (milliseconds)."""

    turn: int
    response: int
    parts: tuple[tuple[str, float], ...]
    total_ms: float


class Error(ToPage, frozen=True, tag="error"):
    code: str
    message: str
    id: str = ""  #: id of the message that was refused


class Pong(ToPage, frozen=True, tag="pong"):
    n: int
    at: float


class Closed(ToPage, frozen=True, tag="closed"):
    reason: str


_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(PageMessage)
_encoder = msgspec.json.Encoder()


def decode(data: str | bytes) -> PageMessage:
    """Raises msgspec.ValidationError or msgspec.DecodeError with the place of the fault."""
    message: PageMessage = _decoder.decode(data)
    return message


def encode(message: ToPage) -> str:
    return _encoder.encode(message).decode()
