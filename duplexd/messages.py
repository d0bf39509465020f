"""What the front end and the engine tell each other: facts go in, orders and news come out.

1. One msgpack struct a packet. New fields have defaults and stand last; the types of existing ones do not change.
2. Facts are in the past tense, orders in the imperative. Every message names its session.
3. Bulk media never travels here: a message names a slot of shared memory, and the slot belongs to whoever last
   received a message about it.
4. Positions are ticks of the output timeline (`Cursor`) or of the input timeline (`at`, `span`); see `units`.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from duplexd.ids import ChunkId, ConditionVersion, Epoch, ResponseId, SessionId, TurnId
from duplexd.units import Nanos, Span, Ticks


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    """A position on the output timeline with the epoch it belongs to."""

    epoch: Epoch
    position: Ticks
    observed_at: Nanos


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    session: SessionId


class Modality(Enum):
    AUDIO = "audio"
    TEXT = "text"
    IMAGE = "image"


# Facts: front end -> engine ---------------------------------------------------------------------------------------


class SessionOpened(Message, frozen=True):
    """A person connected and asks to be admitted."""

    barge_in: bool = True
    #: relative weight between sessions that are equally urgent; 1 is everybody's
    priority: int = 1
    #: a turn whose first sound is not published this long after its end fails; 0: never
    response_deadline: Nanos = Nanos(0)


#: Of `MediaArrived.voice`: from here on a block counts as voice.
VOICE_THRESHOLD = 0.5


class MediaArrived(Message, frozen=True):
    """One block of the person's audio, 16 kHz mono int16, lies in an input slot."""

    slot: int
    span: Span  #: on the input timeline
    captured_at: Nanos
    voice: float  #: probability that the block holds speech, 0..1
    echo: float = 0.0  #: share of the block explained by what the character itself played, 0..1
    gap: bool = False  #: the block is missing from the network and holds zeros


class VoiceStarted(Message, frozen=True):
    """Somebody speaks. When `held`, playout is frozen at `cursor` and waits for the engine's decision."""

    at: Ticks  #: onset on the input timeline
    cursor: Cursor
    held: bool
    hold: int = 0  #: id of the hold; 0 when nothing is held
    source: str = "server"  #: "page", "server", "stop"
    onset_at: Nanos = Nanos(0)  #: when the onset was noticed
    assumed: bool = False  #: the cursor is an estimate, not a measurement
    bound: Ticks = Ticks(0)  #: published error bound of the cursor


class HoldAnswered(Message, frozen=True):
    """The page's own answer to a hold: the authoritative position for the cut."""

    hold: int
    cursor: Cursor
    bound: Ticks
    assumed: bool = False


class HoldExpired(Message, frozen=True):
    """The engine did not decide within `hold_max`; the front end decided alone."""

    hold: int
    resumed: bool


class CursorReported(Message, frozen=True):
    """What has been heard of the output timeline."""

    cursor: Cursor
    buffer: Ticks  #: what lies between transport and ear
    age: Nanos  #: how old the report was when it came
    bound: Ticks  #: published error bound of the position
    assumed: bool  #: no report from the listener: a conservative clock


class TextArrived(Message, frozen=True):
    """Typed words of the person: a whole turn."""

    text: str
    key: str  #: idempotency key


class ImageArrived(Message, frozen=True):
    key: str
    byte_count: int


class SettingChanged(Message, frozen=True):
    barge_in: bool | None = None
    echo_cancellation: bool | None = None
    speculation: bool | None = None


class TurnSettingChanged(Message, frozen=True):
    """How turns of this session end and who answers them; absent ones stay."""

    by_client: bool | None = None  #: turns end when the client says so (`TurnEnded`), never by silence
    auto_reply: bool | None = None  #: a turn that has ended is answered; otherwise `ReplyWanted` is waited for
    silence_ms: float | None = None  #: silence alone ends a turn after this long; 0: the model's own rule
    patience_ms: float | None = None  #: with the model's own rule: silence that ends a turn whatever the judge says
    eager: bool | None = None  #: a voice over the reply interrupts once it is long enough, whatever it says
    overhears: bool | None = None  #: words over a reply that did not interrupt it are remembered behind it


class TurnEnded(Message, frozen=True):
    """The client says that the person's turn is over, at this place of the input timeline."""

    at: Ticks
    key: str  #: comes back in `TurnSettled`


class InputCleared(Message, frozen=True):
    """What was said since the last turn is to be forgotten."""


class ReplyWanted(Message, frozen=True):
    """The client asks for a reply now, to what the history holds."""

    key: str  #: comes back in every `ResponseChanged` of it
    spoken: bool = True  #: False: text alone; what is written counts as heard
    script: str = ""  #: the words to say, thought up by somebody else; empty: the thinker's own
    tokens_max: int = 0  #: 0: the model's own limit


class ReplyUnwanted(Message, frozen=True):
    """The reply asked for under this key is not wanted any more; one that lives is cut where the ear is."""

    key: str


class PrefetchWanted(Message, frozen=True):
    """The client expects to speak soon: what of its session is away comes back, what is unread is read."""


class ConditionSet(Message, frozen=True):
    """Instructions of the client; they stand behind the model's own anchor from the next reply on."""

    text: str


class PastTurn(msgspec.Struct, frozen=True, array_like=True):
    """One closed exchange, as text."""

    user: str
    reply: str


class HistorySet(Message, frozen=True):
    """The conversation is this from now on. What it has in common with the present one is kept, keys included."""

    turns: tuple[PastTurn, ...]
    user: str  #: words of the open turn; "": none is open


class HistoryCut(Message, frozen=True):
    """A reply that has ended was heard only so far, says whoever heard it."""

    response: ResponseId
    heard: Ticks  #: since its first sample
    key: str


class SlotsFreed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Output slots the front end has copied out."""

    slots: tuple[int, ...]


class SessionClosed(Message, frozen=True):
    """The person left, or the front end gave them up."""

    reason: str


class ClientStalled(Message, frozen=True):
    """The person's data channel does not drain; True until it does."""

    stalled: bool


class ViewStarted(Message, frozen=True):
    """A video track towards the person is up: pictures are wanted, and the picture of time 0 is due at `origin`.

    Picture time (`pts`) is that of the voice track as well, whatever plays; the picture of a pts leaves a little after
    the voice of it (`PICTURES_BEHIND`).
    """

    origin: Nanos


class ViewEnded(Message, frozen=True):
    """No pictures any more: the track has ended, or the page is hidden."""


class VoicePlaced(Message, frozen=True):
    """Voice sample `position` of the output timeline stands at `pts`, and what follows it is contiguous.

    Sent when sound enters the track after silence: the first chunk of a reply, after a gap, after a resume.
    """

    epoch: Epoch
    position: Ticks
    pts: Ticks


class VoiceStopped(Message, frozen=True):
    """From `pts` on nothing of this voice is sent: a hold began, or an interruption flushed it."""

    epoch: Epoch
    pts: Ticks


class FramesSent(Message, frozen=True):
    """Every frame before `until` is with the encoder, or will never be: only later ones may be made again."""

    until: Ticks


class PicturesFreed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Picture slots the front end has copied out."""

    slots: tuple[int, ...]


class PersonSeen(Message, frozen=True):
    """What the camera shows of the person, at most five times a second, when it has changed."""

    present: bool
    #: -1..1 from the middle, as the character sees it; to its own right is positive, which is the left of its picture.
    x: float = 0.0
    y: float = 0.0  #: up is positive


class PictureShortage(Message, frozen=True):
    """The front end cannot encode in time."""

    share: float  #: of the frames planned for the last two seconds that were sent, 0..1


Fact = (
    SessionOpened
    | MediaArrived
    | VoiceStarted
    | HoldAnswered
    | HoldExpired
    | CursorReported
    | TextArrived
    | ImageArrived
    | SettingChanged
    | TurnSettingChanged
    | TurnEnded
    | InputCleared
    | ReplyWanted
    | ReplyUnwanted
    | PrefetchWanted
    | ConditionSet
    | HistorySet
    | HistoryCut
    | SlotsFreed
    | SessionClosed
    | ClientStalled
    | ViewStarted
    | ViewEnded
    | VoicePlaced
    | VoiceStopped
    | FramesSent
    | PicturesFreed
    | PersonSeen
    | PictureShortage
)


# Orders and news: engine -> front end -----------------------------------------------------------------------------


class EngineReady(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The model is loaded and the arena laid out."""

    model: str
    sessions_max: int
    sample_rate: int  #: of published chunks
    takes: tuple[Modality, ...]
    cut: str
    voice: str  #: which detector tells voice in the person's audio: "silero" or "energy"
    picture: tuple[int, int] | None = None  #: width and height of a frame; None: this model has no face
    faceless: str = ""  #: why it has none although its own was wanted


class AdmitSession(Message, frozen=True):
    pass


class Shortage(msgspec.Struct, frozen=True, array_like=True):
    """What there is too little of, and by how much."""

    of: str  #: "sessions", "arena", "places", a lane or the cores
    needed: float
    available: float
    unit: str


class RefuseSession(Message, frozen=True):
    reason: str  #: names what is missing
    code: str = "busy"  #: "loading", "busy", "no_memory", "no_lane_time", "no_slot"
    shortage: Shortage | None = None


class PublishChunk(Message, frozen=True):
    """One chunk of the character's voice lies in an output slot, int16 mono at the engine's sample rate."""

    response: ResponseId
    chunk: ChunkId
    epoch: Epoch
    span: Span
    slot: int
    samples: int
    last: bool  #: nothing of this response follows
    sequence: int
    condition: ConditionVersion = ConditionVersion(0)  #: the words of it were thought under; see `ConditionSet`


class PublishFrames(Message, frozen=True):
    """Frames of the face lie in a picture slot, I420, one after another, width x height of `EngineReady.picture`."""

    chunk: ChunkId  #: of the face; several of these may belong to one chunk, their frames follow each other
    epoch: int  #: picture epoch: counts cuts of the picture, whatever the voice does
    start: Ticks  #: pts of the first frame
    count: int
    slot: int
    frame: Ticks  #: how long each frame is shown
    condition: ConditionVersion = ConditionVersion(0)  #: of the chunk, from the boundary where it began to its end


class CutFrames(Message, frozen=True):
    """Frames of picture epochs before `epoch` at or after pts `at` are never shown."""

    epoch: int
    at: Ticks


class FreeSlots(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Input slots the engine has copied out."""

    slots: tuple[int, ...]


class AdvanceEpoch(Message, frozen=True):
    """An interruption: nothing older than `epoch` is heard from now on; the timeline goes on at `at`."""

    epoch: Epoch
    at: Ticks
    hold: int
    decided_at: Nanos
    noticed_at: Nanos = Nanos(0)  #: when the voice that interrupts was noticed; 0: it was no voice


class ResumePlayback(Message, frozen=True):
    """A false alarm: go on where the hold froze playout."""

    hold: int
    epoch: Epoch


class Progress(Message, frozen=True):
    """Cursors of the voice output, for whoever shows them."""

    epoch: Epoch
    generation: Ticks
    playback: Ticks
    budget: Ticks
    assumed: bool
    urgency: str = ""  #: class of its most urgent step, as the policy calls it; "running", "ahead": none is offered


class TurnState(Enum):
    LISTENING = "listening"
    THINKING = "thinking"
    SPEAKING = "speaking"


class StateChanged(Message, frozen=True):
    state: TurnState


class UserWords(Message, frozen=True):
    turn: TurnId
    text: str
    stable: int
    final: bool  #: with an empty text: somebody spoke, and no word of it could be told


class TurnOpened(Message, frozen=True):
    """Somebody began to speak: a turn, unless it comes to nothing."""

    turn: TurnId
    at: Ticks  #: onset on the input timeline
    over_reply: bool  #: a reply lives: whether this is an interruption is being judged


class TurnOutcome(Enum):
    TAKEN = "taken"  #: its words are in the history
    EMPTY = "empty"  #: there were none
    OVERHEARD = "overheard"  #: a false alarm over a reply: nobody answers it
    CLEARED = "cleared"  #: the client threw it away


class TurnSettled(Message, frozen=True):
    """A spoken turn is over. `TAKEN` comes before the response that answers it."""

    turn: TurnId
    span: Span  #: on the input timeline, from the onset to where its end was decided
    text: str
    outcome: TurnOutcome
    key: str = ""  #: of the `TurnEnded` that ended it


class ResponseState(Enum):
    """Life of one response (DESIGN §9). Exactly one of the last three ends it."""

    ACCEPTED = "accepted"
    RUNNING = "running"
    STREAMING = "streaming"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


class OutputState(msgspec.Struct, frozen=True, array_like=True):
    """State of one output of a response: a voice that fails after its text was delivered is a partial result."""

    output: str  #: "text" or "voice"
    state: ResponseState


class ResponseChanged(Message, frozen=True):
    response: ResponseId
    epoch: Epoch
    state: ResponseState
    outputs: tuple[OutputState, ...]
    sequence: int
    reason: str = ""
    key: str = ""  #: of the `ReplyWanted` that asked for it; "" when a turn did
    context: int = 0  #: tokens the reply is an answer to,
    cached: int = 0  #: those among them whose keys were there when it was accepted,
    written: int = 0  #: and tokens thought so far
    cut_short: bool = False  #: it ended at its limit of tokens, not at its end


class SpokenWord(msgspec.Struct, frozen=True, array_like=True):
    text: str
    span: Span  #: on the output timeline


class ReplyWords(Message, frozen=True):
    response: ResponseId
    epoch: Epoch
    first: int  #: index of the first word within the response
    words: tuple[SpokenWord, ...]
    sequence: int
    text: str = ""  #: exactly the stretch of the reply's text that ends with the last of these words
    tokens: int = 0  #: of the reply, up to the last of these words


class CallMade(Message, frozen=True):
    """The model calls a function of the client."""

    response: ResponseId
    name: str
    arguments: str  #: JSON


class HistoryChanged(Message, frozen=True):
    """What of a response was heard: exactly what the thinker's history holds of it."""

    response: ResponseId
    words: int
    text: str
    ambiguous: tuple[int, ...]
    estimated: bool
    final: bool


class LatencyMeasured(Message, frozen=True):
    """Engine's part of one turn's latency; the front end adds what lies outside."""

    turn: TurnId
    response: ResponseId
    ended_at: Nanos  #: last voiced sample of the person, by the input timeline
    decided_at: Nanos  #: end of turn decided
    prefilled_at: Nanos  #: context complete
    worded_at: Nanos  #: first clause complete
    published_at: Nanos  #: first chunk published


class InputRefusal(Message, frozen=True):
    code: str
    reason: str
    key: str = ""


class EndSession(Message, frozen=True):
    """The engine ends a session; the front end tells the person why."""

    reason: str


class SessionBytes(msgspec.Struct, frozen=True, array_like=True):
    """What one session holds now, what still waits behind a fence included."""

    session: SessionId
    arena: int  #: bytes of its slots and pages in the arena; what all share is nobody's
    host: int  #: bytes in host memory beside it


class Metrics(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Counters and gauges of the engine, once a second and when asked."""

    values: dict[str, float]
    sessions: tuple[SessionBytes, ...] = ()  #: those that hold most; how many are not listed is one of the values


News = (
    EngineReady
    | AdmitSession
    | RefuseSession
    | PublishChunk
    | PublishFrames
    | CutFrames
    | FreeSlots
    | AdvanceEpoch
    | ResumePlayback
    | Progress
    | StateChanged
    | UserWords
    | TurnOpened
    | TurnSettled
    | ResponseChanged
    | ReplyWords
    | CallMade
    | HistoryChanged
    | LatencyMeasured
    | InputRefusal
    | EndSession
    | Metrics
)

_encoder = msgspec.msgpack.Encoder()
_fact_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Fact)
_news_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(News)


def pack(message: Fact | News) -> bytes:
    return _encoder.encode(message)


def unpack_fact(packet: bytes) -> Fact:
    fact: Fact = _fact_decoder.decode(packet)
    return fact


def unpack_news(packet: bytes) -> News:
    news: News = _news_decoder.decode(packet)
    return news
