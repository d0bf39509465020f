"""The Realtime protocol of one session, without sockets: events in, news of the engine in, events and orders out.

1. One order of events (notes of the protocol, O1-O10): whatever happens, an item is added before its parts, a part ends
   before its item, an item before its response; ids in `previous_item_id` make one list.
2. `event_id` counts from 1 without a gap; every `response.created` is followed by exactly one `response.done`.
3. What is wrong with an event is told in one `error`, and changes nothing.
4. Every stop (voice, `response.cancel`, `conversation.item.truncate`, `output_audio_buffer.clear`, `playback.ack` with
   `truncate`) is one operation of the engine: cut the session where the ear is. What the client says of its ear
   afterwards corrects an estimate.
5. A voice over a reply is told (`speech_started`) when it is known to be an interruption: clients throw their sound
   away at that event, and could not take it back after a cough.
6. A response is done when nothing more is made of it; what was heard of it is known later and changes its item.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import msgspec

from duplexd.errors import InputRefused
from duplexd.ids import ResponseId, SessionId, TurnId
from duplexd.media.playout import Pcm
from duplexd.messages import (
    AdvanceEpoch,
    CallMade,
    ConditionSet,
    EndSession,
    HistoryChanged,
    HistoryCut,
    HistorySet,
    InputRefusal,
    LatencyMeasured,
    PrefetchWanted,
    Progress,
    PublishChunk,
    ReplyUnwanted,
    ReplyWanted,
    ReplyWords,
    ResponseChanged,
    ResponseState,
    SettingChanged,
    TurnOpened,
    TurnOutcome,
    TurnSettingChanged,
    TurnSettled,
    TurnState,
)
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos, Ticks, ms_from_ticks, ticks_from_ms
from duplexd.webrtc.realtime import check as c
from duplexd.webrtc.realtime.faults import Fault, invalid, missing
from duplexd.webrtc.realtime.formats import PCM, WireIn, WireOut, base64_of
from duplexd.webrtc.realtime.items import Conversation, Item, parse_item, turns_of
from duplexd.webrtc.realtime.limits import Bucket, Limits
from duplexd.webrtc.realtime.orders import ClearInput, Cut, EndTurn, Feed, Goodbye, Heard, Listening
from duplexd.webrtc.realtime.prompt import condition_of
from duplexd.webrtc.realtime.responses import FinalObject, Response
from duplexd.webrtc.realtime.settings import (
    METADATA,
    OUTPUT,
    OUTPUT_TOKENS,
    SEMANTIC_PATIENCE_MS,
    TOOL_CHOICE,
    TOOLS,
    Settings,
    locked_field,
    modalities,
)

COMMIT_MS_MIN = 20.0  #: less sound than this in the buffer is no turn
TRUNCATE_SLACK = ticks_from_ms(20)  #: a client that counts whole frames may be one ahead
EVENT_IDS_KEPT = 256
FORGET_EVERY = Nanos(NANOS_PER_SECOND)
RESPONSES_KEPT = 64  #: responses whose items may still be truncated
RESPONSES_WAITING_MAX = 4
SCRIPT_MAX = 16_384  #: characters a client may have recited
FAULTS_PER_SECOND = 20.0  #: more errors than this, and four times as many at once, are told as a number
#: What is counted for the daemon's figures (docs/realtime.md, Metrics).
COUNTED = (
    "faults",  #: errors told to clients, and those that were not told
    "faults_untold",
    "repeated_events",  #: that made nothing again
    "acks_ignored",  #: playback.ack of a response that is over or unknown
    "acks_clamped",  #: playback.ack of more sound than was sent
    "replies_unwanted",  #: begun by the engine and withdrawn meanwhile
    "corrections_late",  #: of what was heard, of replies that the engine had forgotten
    "stray_samples",  #: of no response that is being made
)
EXPIRY_NOTICE = Nanos(60 * NANOS_PER_SECOND)


class Transport(Enum):
    WEBSOCKET = "websocket"
    WEBRTC = "webrtc"


class Voice(msgspec.Struct):
    """A turn of the person that is open."""

    turn: TurnId
    item_id: str
    at: Ticks
    over_reply: bool
    announced: bool = False
    commit: str = ""  #: key of the client's commit that is to end it; none: it ends by itself


class RealtimeSession:
    """Protocol state of one session.

    Args:    session: the engine's number; ids on the wire are built on it. takes: modalities the model reads.
             rate: of the model's voice. input_ms: input timeline to milliseconds of sound received (gaps excluded).
    """

    def __init__(
        self,
        *,
        session: SessionId,
        settings: Settings,
        transport: Transport,
        rate: int,
        takes: tuple[str, ...] = ("audio", "text"),
        limits: Limits | None = None,
        locked: frozenset[str] = frozenset(),
        public_id: str = "",
        expires_at: int | None = None,
        input_ms: Callable[[Ticks], float] = ms_from_ticks,
        input_rate: int = 0,
    ) -> None:
        self.session = session
        self.settings = settings
        self.transport = transport
        self.closed = False
        self.counts: Counter[str] = Counter()
        self._now = Nanos(0)  #: of what is being handled
        self._forget_at = Nanos(0)
        self._finals: OrderedDict[str, tuple[Nanos, list[FinalObject]]] = OrderedDict()  #: by response id
        self.way_by_reports = False  #: the network's part of an assumed position is measured, by RTCP
        self.conversation = Conversation()
        self._rate = rate
        self._takes = takes
        self.limits = limits or Limits()
        self._locked = locked
        self._public_id = public_id or f"sess_{session}"
        self._expires_at = expires_at
        self.input_ms = input_ms
        self._events: deque[dict[str, Any]] = deque()
        self._orders: deque[Any] = deque()
        self._event_count = 0
        self._ids: Counter[str] = Counter()
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._gone: OrderedDict[str, None] = OrderedDict()  #: items of the character that nobody can have heard
        self._unsaid: deque[str] = deque()  #: those of them the client is still to be told of
        self._bucket = Bucket(per_second=self.limits.events_per_second, burst=self.limits.events_burst)
        per_minute = self.limits.responses_per_minute
        self._response_bucket = Bucket(per_second=per_minute / 60, burst=per_minute)
        self._fault_bucket = Bucket(per_second=FAULTS_PER_SECOND, burst=4 * FAULTS_PER_SECOND)
        self._untold = 0  #: errors since the last one that was told
        self._input_rate = input_rate  #: of PCM; 0: the protocol's own
        self._wire_in = WireIn(settings.input_format, rate=input_rate)
        self._wire_out = WireOut(settings.output_format, rate=rate)
        self._buffered_ms = 0.0  #: appended since the last commit
        self._received_ms = 0.0
        self._voice: Voice | None = None
        self._commits: dict[str, Item] = {}
        self._responses: OrderedDict[str, Response] = OrderedDict()  #: by response id, the newest last
        self._asked: dict[str, Response] = {}  #: by key: wanted of the engine, not accepted yet
        self._live: dict[int, Response] = {}  #: by the engine's id: accepted, and not at its end
        self._waiting: deque[tuple[Response, list[Item] | None]] = deque()  #: need a setting of their own
        self._condition = ""
        self._opened_at: Nanos | None = None  #: until then no deadline runs
        self._idle_since: Nanos | None = None
        self._expiry_told = False
        self._chatty = transport is Transport.WEBRTC  #: tells of its output buffer

    # Out --------------------------------------------------------------------------------------------------------------

    def events(self) -> list[dict[str, Any]]:
        """Events for the client, in order."""
        out = list(self._events)
        self._events.clear()
        return out

    def orders(self) -> list[Any]:
        """Facts for the engine and orders for whoever carries this, in order."""
        out = list(self._orders)
        self._orders.clear()
        return out

    def _tell(self, kind: str, **fields: Any) -> None:
        if self.closed:
            return
        self._event_count += 1
        event = {"type": kind, "event_id": f"event_{self._event_count}"}
        for name, value in fields.items():
            if value is not None or name == "previous_item_id":
                event[name] = value
        self._events.append(event)

    def _tell_fault(self, fault: Fault, event_id: str | None, now: Nanos) -> None:
        self.counts["faults"] += 1
        if not self._fault_bucket.take(now):
            self.counts["faults_untold"] += 1
            self._untold += 1
            return
        self._own_up()
        error = {"type": fault.kind, "code": fault.code, "message": str(fault), "param": fault.param or None}
        error["event_id"] = event_id
        self._tell("error", error={name: value for name, value in error.items() if value is not None})

    def _own_up(self) -> None:
        """What was kept back is at least counted to the client."""
        if self._untold:
            said = f"{self._untold} errors were not told: there were more than {FAULTS_PER_SECOND:g} a second."
            self._tell("error", error={"type": "rate_limit_error", "code": "errors_untold", "message": said})
            self._untold = 0

    def _new_id(self, prefix: str) -> str:
        self._ids[prefix] += 1
        return f"{prefix}_{self.session}_{self._ids[prefix]}"

    def shown(self) -> dict[str, Any]:
        """The session as its client sees it."""
        own = self.settings.extended or self.settings.retention_s is not None
        values = {k: v for k, v in self.settings.values.items() if k != "duplexd" or own}
        values["id"] = self._public_id
        if self._expires_at is not None:
            values["expires_at"] = self._expires_at
        shown: dict[str, Any] = _without_none(values)
        return shown

    # Life -------------------------------------------------------------------------------------------------------------

    def open(self, now: Nanos) -> None:
        self._opened_at = now
        self._tell("session.created", session=self.shown())
        self._configure(None, self.settings)

    def greeting(self) -> dict[str, Any]:
        """What somebody who joins later is told first; it is no event of the others'."""
        return {"type": "session.created", "event_id": f"event_{self._public_id}_joined", "session": self.shown()}

    def close(self) -> None:
        """Nothing is told from here on."""
        self.closed = True

    def end(self, code: str, reason: str, *, close_code: int = 1000) -> None:
        """The session ends, says this side: every response ends, the reason is told, and then nothing."""
        if self.closed:
            return
        for response in [r for r in self._responses.values() if not r.done]:
            self._finish(response, "failed", {"type": "failed", "error": {"type": "server_error", "code": code}})
        self._tell("error", error={"type": "server_error", "code": code, "message": reason})
        self._orders.append(Goodbye(close_code, reason))
        self.closed = True

    def tick(self, now: Nanos) -> None:
        """Deadlines: a person who says nothing, what is kept no longer, a session that has lived long enough."""
        self._now = now
        if self._untold and self._fault_bucket.take(now, FAULTS_PER_SECOND):
            self._own_up()
        if now >= self._forget_at:
            self._forget_at = Nanos(now + FORGET_EVERY)
            self._forget_old(now)
        detection = self.settings.turn_detection
        idle_ms = detection.get("idle_timeout_ms") if detection else None
        if idle_ms and self._idle_since is not None and now - self._idle_since >= idle_ms * NANOS_PER_MS:
            self._time_out(idle_ms, now)
        life = Nanos(round(self.limits.life_s * NANOS_PER_SECOND))
        if not life or self._opened_at is None:
            return
        lived = now - self._opened_at
        if not self._expiry_told and lived >= life - EXPIRY_NOTICE:
            self._expiry_told = True
            self._tell_extra("duplexd.session.expiring", in_s=max(0.0, (life - lived) / NANOS_PER_SECOND))
        if lived >= life:
            said = f"The session has lived for {self.limits.life_s:g} s, which is as long as sessions live here."
            self.end("session_expired", said, close_code=1001)

    def _forget_old(self, now: Nanos) -> None:
        """What is over for longer than the session's retention leaves, the thinker's memory included."""
        if self.settings.retention_s is None or not self.is_idle or self._voice is not None or self._commits:
            return
        until = Nanos(now - self.settings.retention_s * NANOS_PER_SECOND)
        self._finals = OrderedDict((name, kept) for name, kept in self._finals.items() if kept[0] > until)
        old = self.conversation.older_than(until)
        for item in old:
            self.conversation.remove(item)
            self._tell("conversation.item.deleted", item_id=item.item_id)
        if old:
            self._responses = OrderedDict(
                (name, response)
                for name, response in self._responses.items()
                if not response.done or response.item is None or response.item not in old
            )
            self._set_history()

    def _time_out(self, idle_ms: int, now: Nanos) -> None:
        self._idle_since = None
        end = self._received_ms
        item = Item(self._new_id("item"), "message", role="user", parts=[{"type": "input_audio", "transcript": None}])
        self._tell(
            "input_audio_buffer.timeout_triggered",
            item_id=item.item_id,
            audio_start_ms=round(max(0.0, end - idle_ms)),
            audio_end_ms=round(end),
        )
        self._tell("input_audio_buffer.committed", item_id=item.item_id, previous_item_id=self.conversation.last_id)
        self._add_item(item)
        self._ask(self._begin(), None)

    def _tell_extra(self, kind: str, **fields: Any) -> None:
        """Events of duplexd's own, for clients that asked for them: others stop at an event they do not know."""
        if self.settings.extended:
            self._tell(kind, **fields)

    # The client -------------------------------------------------------------------------------------------------------

    def on_text(self, text: str | bytes | dict[str, Any], now: Nanos) -> bool:
        """One event as it came, or unpacked (unpack.py); whether it was taken. Whatever is wrong with it, the session
        goes on.
        """
        self._now = now
        if self.closed:
            return False
        event_id = None
        try:
            event = text if isinstance(text, dict) else _decode(text, self.limits.event_bytes_max)
            given = event.get("event_id")
            event_id = given[:512] if isinstance(given, str) else None
            self.on_event(event, now)
        except Fault as fault:
            self._tell_fault(fault, event_id, now)
            return False
        except InputRefused as refused:
            self._tell_fault(Fault("invalid_value", str(refused), param="audio"), event_id, now)
            return False
        return True

    def refuse(self, code: str, message: str, now: Nanos, *, event_id: str | None = None, param: str = "") -> None:
        """What came was no event of the protocol."""
        self._tell_fault(Fault(code, message, param=param), event_id, now)

    def on_event(self, event: dict[str, Any], now: Nanos) -> None:
        """One client event. Raises Fault; then nothing has changed."""
        kind = event.get("type")
        if not isinstance(kind, str):
            raise missing("type")
        known = _CLIENT_EVENTS.get(kind)
        if known is None:
            raise invalid("type", kind[:80], ", ".join(_CLIENT_EVENTS))
        if kind not in _UNCOUNTED and not self._bucket.take(now):
            said = f"More than {self.limits.events_per_second:g} events a second; this one is not taken."
            raise Fault("rate_limit_exceeded", said, kind="rate_limit_error")
        event_id = event.get("event_id") if kind in _IDEMPOTENT else None
        if isinstance(event_id, str) and event_id in self._seen:
            self.counts["repeated_events"] += 1
            return
        act, checks, required = known
        for name in required:
            if event.get(name) is None:
                raise missing(name)
        values = {name: check(event[name], name) for name, check in checks.items() if event.get(name) is not None}
        act(self, values, now)
        if isinstance(event_id, str) and event_id:
            self._remember_event(event_id)

    def _remember_event(self, event_id: str) -> None:
        """It made something: sent again under its id it makes nothing again. One that was refused may be retried."""
        self._seen[event_id] = None
        if len(self._seen) > EVENT_IDS_KEPT:
            self._seen.popitem(last=False)

    def _update_session(self, event: dict[str, Any], now: Nanos) -> None:
        before = self.settings
        after = before.change(event["session"], locked=self._locked)
        voice = after.values["audio"]["output"]["voice"]
        said = any(response.start is not None for response in self._responses.values())
        if said and voice != before.values["audio"]["output"]["voice"]:
            raise Fault(
                "cannot_update_voice", "The voice cannot change after it was heard.", param="session.audio.output"
            )
        self._configure(before, after)
        self.settings = after
        self._tell("session.updated", session=self.shown())

    def _configure(self, before: Settings | None, after: Settings) -> None:
        """What of a change the engine, the line and the codecs must know."""
        if before is None or before.input_format != after.input_format:
            self._wire_in = WireIn(after.input_format, rate=self._input_rate)
        if before is None or before.output_format != after.output_format:
            self._wire_out = WireOut(after.output_format, rate=self._rate)
        if before is None or before.turn_detection != after.turn_detection:
            self._configure_turns(after)
        if all(response.condition is None for response in (*self._live.values(), *self._asked.values())):
            self._set_condition(self._condition_of(after))  # Else when that response has ended.

    def _configure_turns(self, settings: Settings) -> None:
        detection = settings.turn_detection
        mine = detection is None
        creates = detection is not None and detection["create_response"] and not settings.is_transcription
        interrupts = detection is not None and detection["interrupt_response"]
        silence = float(detection.get("silence_duration_ms", 0)) if detection else 0.0
        patience = (
            float(SEMANTIC_PATIENCE_MS[detection["eagerness"]]) if detection and "eagerness" in detection else None
        )
        threshold = detection.get("threshold", 0.5) if detection else 0.5
        self._orders.append(Listening(interrupts, max(0.1, threshold)))
        self._orders.append(SettingChanged(self.session, barge_in=interrupts))
        self._orders.append(
            TurnSettingChanged(
                self.session,
                by_client=mine,
                auto_reply=creates,
                silence_ms=silence,
                patience_ms=patience,
                eager=self._is_eager(detection),
                overhears=False,  # Its client is told that such a voice came to nothing, and keeps the history itself.
            )
        )

    def _is_eager(self, detection: dict[str, Any] | None) -> bool:
        """`server_vad` means that any voice interrupts. Where a track can be held, it is judged first all the same."""
        plain = detection is not None and detection["type"] == "server_vad"
        return plain and self.transport is Transport.WEBSOCKET

    def _condition_of(self, settings: Settings) -> str:
        values = settings.values
        return condition_of(values["instructions"], values["tools"], values["tool_choice"])

    def _set_condition(self, text: str) -> None:
        if text != self._condition:
            self._condition = text
            self._orders.append(ConditionSet(self.session, text))

    # Sound in ---------------------------------------------------------------------------------------------------------

    def _append(self, event: dict[str, Any], now: Nanos) -> None:
        pcm, count = self._wire_in.decode(event["audio"])
        ms = count / self._wire_in.bytes_per_ms
        self._buffered_ms += ms
        self._received_ms += ms
        if len(pcm):
            self._orders.append(Feed(pcm, self._wire_in))

    def _commit(self, event: dict[str, Any], now: Nanos) -> None:
        if self._buffered_ms < COMMIT_MS_MIN:
            said = f"{self._buffered_ms:.2f} ms of sound lie in the buffer; a turn needs at least {COMMIT_MS_MIN:g} ms."
            raise Fault("input_audio_buffer_commit_empty", said)
        self._wire_in.begin_anew()
        key = self._new_id("commit")
        voice = self._voice if self._voice is not None and not self._voice.commit else None
        item_id = voice.item_id if voice is not None and voice.announced else self._new_id("item")
        if voice is not None:
            if voice.announced:
                self._tell("input_audio_buffer.speech_stopped", item_id=item_id, audio_end_ms=round(self._received_ms))
            voice.commit = key
        item = Item(
            item_id,
            "message",
            role="user",
            parts=[{"type": "input_audio", "transcript": None}],
            duration_ms=self._buffered_ms,
        )
        self._buffered_ms = 0.0
        self._commits[key] = item
        self._orders.append(EndTurn(key))
        self._tell("input_audio_buffer.committed", item_id=item_id, previous_item_id=self.conversation.last_id)
        self._add_item(item)

    def _clear_input(self, event: dict[str, Any], now: Nanos) -> None:
        self._buffered_ms = 0.0
        self._wire_in.begin_anew()
        self._orders.append(ClearInput())
        self._tell("input_audio_buffer.cleared")

    def _on_turn_opened(self, news: TurnOpened) -> None:
        self._idle_since = None
        self._voice = Voice(news.turn, self._new_id("item"), news.at, news.over_reply)
        self._voice.commit = next(iter(self._commits), "")  # It was committed before it was heard.
        if not news.over_reply:
            self._announce_voice()

    def _announce_voice(self) -> None:
        """`speech_started`, once; never while turns belong to the client."""
        voice, detection = self._voice, self.settings.turn_detection
        if voice is None or voice.announced or voice.commit or detection is None:
            return
        voice.announced = True
        start = self.input_ms(voice.at) - detection.get("prefix_padding_ms", 300)
        self._tell("input_audio_buffer.speech_started", item_id=voice.item_id, audio_start_ms=round(max(0.0, start)))

    def _on_turn_settled(self, news: TurnSettled) -> None:
        voice = self._voice
        if voice is not None and voice.turn == news.turn:
            self._voice = None
        else:
            voice = None
        # A turn may have ended by itself while its commit was on the way: then this is what was committed, and the
        # answer to the commit finds nothing any more. One that came to nothing leaves the commit to its own answer.
        overtaken = voice.commit if voice is not None and news.outcome is TurnOutcome.TAKEN else ""
        committed = self._commits.pop(news.key or overtaken, None)
        if committed is not None:
            self._understand(committed, news.text)
        elif news.outcome is TurnOutcome.TAKEN and voice is not None:
            self._voice = voice
            self._announce_voice()
            self._voice = None
            self._take_turn(voice, news)
        elif voice is not None and voice.announced and not voice.commit:
            self._stop_voice(voice, news)
            if news.outcome is not TurnOutcome.CLEARED:
                self._tell("input_audio_buffer.cleared")  # It came to nothing: nothing of it is committed.

    def _stop_voice(self, voice: Voice, news: TurnSettled) -> None:
        end = round(self.input_ms(news.span.end))
        self._tell("input_audio_buffer.speech_stopped", item_id=voice.item_id, audio_end_ms=end)

    def _take_turn(self, voice: Voice, news: TurnSettled) -> None:
        self._buffered_ms = 0.0
        if voice.announced:
            self._stop_voice(voice, news)
        length = ms_from_ticks(news.span.length)
        item = Item(
            voice.item_id,
            "message",
            role="user",
            parts=[{"type": "input_audio", "transcript": None}],
            duration_ms=length,
        )
        self._tell("input_audio_buffer.committed", item_id=item.item_id, previous_item_id=self.conversation.last_id)
        self._add_item(item)
        self._understand(item, news.text)

    def _understand(self, item: Item | None, text: str) -> None:
        """What was understood of a committed item."""
        if item is None:
            return
        item.told = text
        if not self.settings.transcribes:
            return
        item.parts[0]["transcript"] = text
        if text:
            self._tell(
                "conversation.item.input_audio_transcription.delta", item_id=item.item_id, content_index=0, delta=text
            )
        self._tell(
            "conversation.item.input_audio_transcription.completed",
            item_id=item.item_id,
            content_index=0,
            transcript=text,
            usage={"type": "duration", "seconds": round(item.duration_ms / 1000, 3)},
        )

    # Items ------------------------------------------------------------------------------------------------------------

    def _add_item(self, item: Item, after: str | None = None, *, is_done: bool = True) -> None:
        item.at = self._now
        before, left = self.conversation.add(item, after=after)
        # Told in this order, so that `before` is never the id of one that has left.
        if left is not None:
            self._tell("conversation.item.deleted", item_id=left.item_id)
        self._tell("conversation.item.added", item=item.wire(), previous_item_id=before)
        if is_done:
            self._tell("conversation.item.done", item=item.wire(), previous_item_id=before)

    def _create_item(self, event: dict[str, Any], now: Nanos) -> None:
        item = parse_item(event["item"], "item", new_id=self._new_id("item"), takes=self._takes)
        self._add_item(item, event.get("previous_item_id"))
        self._set_history()

    def _set_history(self) -> None:
        """Told at once: what the thinker is to know is read before it is asked."""
        if any(response.out_of_band for response in (*self._live.values(), *self._asked.values())):
            return  # Told when that response has ended.
        turns, user = self.conversation.turns(but=self._items_of_live())
        self._orders.append(HistorySet(self.session, turns, user))

    def _items_of_live(self) -> list[Item]:
        return [item for response in self._live.values() for item in response.output]

    def _need_item(self, event: dict[str, Any], act: str) -> Item:
        item = self.conversation.find(event["item_id"])
        if item is None:
            said = f"There is no item '{event['item_id'][:80]}' in this conversation."
            raise Fault(f"item_{act}_invalid_item_id", said, param="item_id")
        return item

    def _retrieve_item(self, event: dict[str, Any], now: Nanos) -> None:
        self._tell("conversation.item.retrieved", item=self._need_item(event, "retrieve").wire())

    def _delete_item(self, event: dict[str, Any], now: Nanos) -> None:
        if event["item_id"] in self._gone:
            self._tell("conversation.item.deleted", item_id=event["item_id"])
            return
        item = self._need_item(event, "delete")
        response = self._response_of(item)
        if response is not None and response.number in self._live:
            self._cut(response, Ticks(0))
        self.conversation.remove(item)
        self._tell("conversation.item.deleted", item_id=item.item_id)
        self._set_history()

    def _response_of(self, item: Item) -> Response | None:
        found = (response for response in reversed(self._responses.values()) if item in response.output)
        return next(found, None)

    def _truncate_item(self, event: dict[str, Any], now: Nanos) -> None:
        if event["item_id"] in self._gone:
            self._tell("conversation.item.truncated", item_id=event["item_id"], content_index=0, audio_end_ms=0)
            return
        item = self._need_item(event, "truncate")
        response = self._response_of(item)
        if item.role != "assistant" or response is None or response.item is not item:
            said = "Only model output audio messages can be truncated."
            raise Fault("item_truncate_invalid_item_id", said, param="item_id")
        if event.get("content_index", 0) != 0:
            raise invalid("content_index", event["content_index"], "0")
        wanted = ticks_from_ms(event["audio_end_ms"])
        if wanted > response.sent + TRUNCATE_SLACK:
            said = (
                f"Audio content of {response.sent_ms:.0f}ms is already shorter than {event['audio_end_ms']}ms; "
                "nothing was truncated."
            )
            raise Fault("invalid_value", said, param="audio_end_ms")
        at = Ticks(min(wanted, response.sent))
        self._tell(
            "conversation.item.truncated",
            item_id=item.item_id,
            content_index=0,
            audio_end_ms=event["audio_end_ms"],
        )
        self._cut(response, at)

    def _cut(self, response: Response, at: Ticks | None) -> None:
        """The one way a client stops a reply, or says afterwards how far it was heard. `at`: since its first sample."""
        response.cut_by_client = True
        if response.number in self._live:
            response.truncate_at = at
            known = at is not None and response.start is not None
            self._orders.append(Cut(Ticks(response.start + at) if known else None))  # type: ignore[operator]
        elif response.number and at is not None:
            self._orders.append(HistoryCut(self.session, ResponseId(response.number), at, response.response_id))

    # Responses --------------------------------------------------------------------------------------------------------

    def usage_of(self, response_id: str) -> dict[str, Any] | None:
        """What a response has taken so far; None of one that is not known."""
        response = self._responses.get(response_id)
        return None if response is None else response.usage.wire()

    @property
    def is_idle(self) -> bool:
        """No response is being made, none waits, and of none there is sound that has not been played."""
        return not (self._live or self._asked or self._waiting)

    @property
    def _active(self) -> Response | None:
        """The response of the conversation that is being made."""
        return next((r for r in reversed(self._responses.values()) if not r.done and not r.out_of_band), None)

    def _create_response(self, event: dict[str, Any], now: Nanos) -> None:
        if self.settings.is_transcription:
            raise Fault("invalid_request", "A transcription session makes no responses.", param="type")
        wanted = event.get("response", {})
        locked = next((name for name in wanted if name in self._locked), None)
        if locked is not None:
            raise locked_field(locked, param=f"response.{locked}")
        out_of_band = wanted.get("conversation") == "none"
        active = self._active
        if active is not None and not out_of_band:
            said = (
                f"Conversation already has an active response in progress: {active.response_id}. Wait until it is done."
            )
            raise Fault("conversation_already_has_active_response", said)
        if len(self._waiting) >= RESPONSES_WAITING_MAX:
            raise Fault("too_many_responses", f"{RESPONSES_WAITING_MAX} responses wait already.")
        form = (wanted.get("audio") or {}).get("output", {}).get("format")
        if form is not None and form != self.settings.values["audio"]["output"]["format"]:
            said = "A response speaks in the session's format; change it with session.update before the first one."
            raise Fault("unsupported_value", said, param="response.audio.output.format")
        items = self._input_items(wanted.get("input"))
        if not self._response_bucket.take(now):
            said = f"More than {self.limits.responses_per_minute:g} responses a minute."
            raise Fault("rate_limit_exceeded", said, kind="rate_limit_error")
        response = self._begin(wanted=wanted, out_of_band=out_of_band)
        self._ask(response, items if items is not None else ([] if out_of_band and "input" in wanted else None))

    def _input_items(self, given: list[Any] | None) -> list[Item] | None:
        """What a response is to answer in place of the conversation."""
        if given is None:
            return None
        items = []
        for index, value in enumerate(given):
            if isinstance(value, dict) and value.get("type") == "item_reference":
                found = self.conversation.find(str(value.get("id")))
                if found is None:
                    raise Fault(
                        "item_not_found", f"There is no item '{value.get('id')}'.", param=f"response.input[{index}]"
                    )
                items.append(found)
            else:
                new_id = self._new_id("item")
                items.append(parse_item(value, f"response.input[{index}]", new_id=new_id, takes=self._takes))
        return items

    def _begin(self, *, wanted: dict[str, Any] | None = None, out_of_band: bool = False) -> Response:
        """A response that is told from now on."""
        wanted, values = wanted or {}, self.settings.values
        spoken = wanted.get("output_modalities", values["output_modalities"]) == ["audio"]
        own = any(name in wanted for name in ("instructions", "tools", "tool_choice"))
        condition = None
        if own:
            condition = condition_of(
                wanted.get("instructions", values["instructions"]),
                wanted.get("tools", values["tools"]),
                wanted.get("tool_choice", values["tool_choice"]),
            )
        output = values["audio"]["output"]
        response = Response(
            response_id=self._new_id("resp"),
            key=self._new_id("key"),
            spoken=spoken,
            metadata=wanted.get("metadata"),
            out_of_band=out_of_band,
            tokens_max=wanted.get("max_output_tokens", values["max_output_tokens"]),
            audio={"output": {"format": output["format"], "voice": output["voice"]}},
            conversation_id=f"conv_{self.session}",
            condition=condition,
            script=wanted.get("duplexd", {}).get("script", ""),
        )
        self._idle_since = None
        self._responses[response.response_id] = response
        while len(self._responses) > RESPONSES_KEPT:
            oldest = next(iter(self._responses))
            if not self._responses[oldest].done:
                break
            del self._responses[oldest]
        self._tell("response.created", response=_response_wire(response))
        return response

    def _ask(self, response: Response, items: list[Item] | None) -> None:
        """Have the engine make it; one that needs a setting of its own waits until nothing else is being made."""
        special = items is not None or response.condition is not None or response.out_of_band
        if self._waiting or (special and (self._live or self._asked)):
            self._waiting.append((response, items))
            return
        if response.condition is not None:
            self._set_condition(response.condition)
        if items is not None:
            turns, user = turns_of(items)
            self._orders.append(HistorySet(self.session, turns, user))
        self._asked[response.key] = response
        limit = response.tokens_max if isinstance(response.tokens_max, int) else 0
        self._orders.append(
            ReplyWanted(self.session, response.key, spoken=response.spoken, script=response.script, tokens_max=limit)
        )

    def _ask_next(self) -> None:
        """Nothing is being made: the session's own setting holds again, and who waited has its turn."""
        if self._live or self._asked:
            return
        self._set_condition(self._condition_of(self.settings))
        if self._waiting:
            response, items = self._waiting.popleft()
            waiting, self._waiting = self._waiting, deque()
            self._ask(response, items)
            self._waiting = waiting

    def _cancel_response(self, event: dict[str, Any], now: Nanos) -> None:
        wanted = event.get("response_id")
        response = self._responses.get(wanted) if wanted is not None else self._active
        if response is None or response.done:
            raise Fault("response_cancel_not_active", "Cancellation failed: no active response found")
        self._withdraw(response)

    def _withdraw(self, response: Response) -> None:
        """Stop a response that is not done, wherever it is on its way."""
        if response.number in self._live:
            self._cut(response, None)
        elif response.key in self._asked:
            # Should the engine have begun it already, what it says of it is nobody's (`_of_engine`).
            self._orders.append(ReplyUnwanted(self.session, response.key))
            self._drop_asked(response)
        else:
            self._waiting = deque((one, items) for one, items in self._waiting if one is not response)
        self._finish(response, "cancelled", {"type": "cancelled", "reason": "client_cancelled"})

    def _drop_asked(self, response: Response) -> None:
        self._asked.pop(response.key, None)
        self._ask_next()

    def _clear_output(self, event: dict[str, Any], now: Nanos) -> None:
        """What was not heard yet is not to be heard; a response that is being made ends by it."""
        playing = next(reversed(self._live.values()), None)
        if playing is not None:
            self._cut(playing, None)
            self._clear_playing(playing)
        elif not self._chatty:
            self._tell("output_audio_buffer.cleared")
        if not self._chatty and playing is not None:
            self._tell("output_audio_buffer.cleared", response_id=playing.response_id)

    def _acknowledge(self, event: dict[str, Any], now: Nanos) -> None:
        """What the client has played. Late, unknown or impossible ones are counted, never an error (T-BI-38)."""
        response = self._acknowledged(event)
        if response is None or response.number not in self._live or response.start is None:
            self.counts["acks_ignored"] += 1
            return
        played = ticks_from_ms(event["played_ms"])
        if played > response.sent:
            self.counts["acks_clamped"] += 1
            played = response.sent
        if event.get("truncate"):
            self._cut(response, played)
        else:
            self._orders.append(Heard(Ticks(response.start + played)))
        self._tell_extra(
            "playback.acknowledged",
            response_id=response.response_id,
            playback={"sent_ms": round(response.sent_ms), "played_ms": round(ms_from_ticks(played))},
        )

    def _acknowledged(self, event: dict[str, Any]) -> Response | None:
        if (response_id := event.get("response_id")) is not None:
            return self._responses.get(response_id)
        if (item_id := event.get("item_id")) is not None:
            item = self.conversation.find(item_id)
            return None if item is None else self._response_of(item)
        return next(reversed(self._live.values()), None)

    def _prefetch(self, event: dict[str, Any], now: Nanos) -> None:
        """Have all that the next reply will read in the arena, and read; what is there already costs nothing."""
        self._set_history()
        self._orders.append(PrefetchWanted(self.session))
        self._tell_extra("duplexd.prefetching")

    # The engine -------------------------------------------------------------------------------------------------------

    def on_news(self, news: Any, now: Nanos) -> None:
        """News of the engine. Chunks come by `on_chunk`, once they are accepted for playing."""
        self._now = now
        if self.closed:
            return
        match news:
            case TurnOpened():
                self._on_turn_opened(news)
            case TurnSettled():
                self._on_turn_settled(news)
            case ResponseChanged():
                self._on_response(news, now)
            case ReplyWords():
                self._on_words(news)
            case CallMade():
                self._on_call(news)
            case HistoryChanged():
                self._on_history(news)
            case AdvanceEpoch():
                for response in self._live.values():
                    start = response.start if response.start is not None else news.at
                    response.cut_at = Ticks(max(0, min(news.at - start, response.sent)))
            case InputRefusal():
                self._on_refusal(news, now)
            case EndSession():
                self.end("session_ended", news.reason, close_code=1011)
            case Progress():
                self._on_progress(news)
            case LatencyMeasured():
                self._tell_extra("duplexd.latency", turn=news.turn, engine_ms=_latency(news))

    def show(self, state: TurnState) -> None:
        self._tell_extra("duplexd.state", state=state.value)

    def _on_response(self, news: ResponseChanged, now: Nanos) -> None:
        response = self._of_engine(news)
        if response is None:
            return
        usage = response.usage
        usage.context, usage.cached, usage.written = news.context, news.cached, news.written
        usage.audio_out = news.written if response.spoken else 0
        state = news.state
        if state is ResponseState.CANCELLING and not response.cut_by_client:
            self._announce_voice()
        elif state is ResponseState.COMPLETED:
            self._complete(response, cut_short=news.cut_short)
            if response.playing:
                response.playing = False
                self._tell("output_audio_buffer.stopped", response_id=response.response_id)
            self._idle_since = now
        elif state is ResponseState.CANCELLED:
            self._interrupt(response)
        elif state is ResponseState.FAILED:
            code = "busy" if news.reason.startswith("busy") else "response_failed"
            error = {"type": "server_error", "code": code, "message": news.reason}
            self._finish(response, "failed", {"type": "failed", "error": error})
            self._clear_playing(response)
        if state in _ENDS:
            self._leave(response)

    def _of_engine(self, news: ResponseChanged) -> Response | None:
        """The response that a reply of the engine is; one that a turn of the person asked for is begun here."""
        if (found := self._live.get(news.response)) is not None:
            return found
        if news.state is not ResponseState.ACCEPTED:
            return None
        if news.key:
            response = self._asked.pop(news.key, None)
            if response is None:
                self.counts["replies_unwanted"] += 1
                return None
        else:
            pending = self._active
            response = pending if pending is not None and pending.key in self._asked else None
            if response is not None:
                # The turn's own reply came first: it is the one the client asked for.
                self._orders.append(ReplyUnwanted(self.session, response.key))
                del self._asked[response.key]
            else:
                response = self._begin()
        response.number = news.response
        self._live[news.response] = response
        return response

    def _leave(self, response: Response) -> None:
        """The engine is through with it: what was heard of it is final, but for what its client says of it."""
        self._live.pop(response.number, None)
        if response.truncate_at is not None:
            at = response.truncate_at
            self._orders.append(HistoryCut(self.session, ResponseId(response.number), at, response.response_id))
        if response.out_of_band:
            self._set_history()
        self._ask_next()

    def _on_words(self, news: ReplyWords) -> None:
        response = self._live.get(news.response)
        if response is None or response.done:
            return
        item = self._say(response)
        response.usage.written = max(response.usage.written, news.tokens)
        response.text += news.text
        item.parts[0]["transcript" if response.spoken else "text"] = response.text
        kind = "response.output_audio_transcript.delta" if response.spoken else "response.output_text.delta"
        self._tell(kind, **self._part_of(response), delta=news.text)

    def _say(self, response: Response) -> Item:
        """The item of what is said, begun with the first of it."""
        if response.item is not None:
            return response.item
        kind = {"type": "output_audio", "transcript": ""} if response.spoken else {"type": "output_text", "text": ""}
        item = Item(self._new_id("item"), "message", role="assistant", parts=[], status="in_progress")
        item.response = response.number
        response.item, response.item_index = item, len(response.output)
        self._put_out(response, item)
        item.parts.append(kind)
        part = {"type": "audio", "transcript": ""} if response.spoken else {"type": "text", "text": ""}
        self._tell("response.content_part.added", **self._part_of(response), part=part)
        return item

    def _put_out(self, response: Response, item: Item) -> None:
        response.output.append(item)
        index = len(response.output) - 1
        self._tell("response.output_item.added", response_id=response.response_id, output_index=index, item=item.wire())
        if not response.out_of_band:
            self._add_item(item, is_done=False)

    def _part_of(self, response: Response) -> dict[str, Any]:
        assert response.item is not None
        return {
            "response_id": response.response_id,
            "item_id": response.item.item_id,
            "output_index": response.item_index,
            "content_index": 0,
        }

    def _on_call(self, news: CallMade) -> None:
        response = self._live.get(news.response)
        if response is None or response.done:
            return
        item = Item(
            self._new_id("item"),
            "function_call",
            name=news.name,
            call_id=self._new_id("call"),
            arguments=news.arguments,
            status="in_progress",
            response=response.number,
        )
        self._put_out(response, item)
        index = len(response.output) - 1
        where = {"response_id": response.response_id, "item_id": item.item_id, "output_index": index}
        where["call_id"] = item.call_id
        self._tell("response.function_call_arguments.delta", **where, delta=item.arguments)
        self._tell("response.function_call_arguments.done", **where, name=item.name, arguments=item.arguments)
        self._end_item(response, item, index, "completed")

    def _end_item(self, response: Response, item: Item, index: int, status: str) -> None:
        item.status, item.at = status, self._now
        self._tell("response.output_item.done", response_id=response.response_id, output_index=index, item=item.wire())
        if self.conversation.find(item.item_id) is item:  # Its client may have deleted it meanwhile.
            self._tell("conversation.item.done", item=item.wire(), previous_item_id=self._before(item))

    def _before(self, item: Item) -> str | None:
        before = None
        for one in self.conversation:
            if one is item:
                break
            before = one.item_id
        return before

    def on_chunk(self, news: PublishChunk, pcm: Pcm) -> None:
        """A chunk of the voice that will be played, unless something happens."""
        response = self._live.get(news.response)
        if response is None or self.closed:
            return
        if response.start is None:
            response.start = news.span.start
        response.end, response.all_made = news.span.end, news.last
        if self.transport is Transport.WEBRTC:
            response.sent = Ticks(response.end - response.start)
            if not response.done:
                response.add_sound(pcm.astype("<i2").tobytes())
                self._say(response)
            if not response.playing and not response.cut_by_client:
                response.playing = True
                self._tell("output_audio_buffer.started", response_id=response.response_id)
            if response.all_made:
                self._complete(response)

    def on_sound(self, position: Ticks, pcm: Pcm) -> None:
        """Sound leaves for the client, from `position` of the output timeline on; only where no track carries it."""
        response = next((r for r in self._live.values() if r.start is not None and r.start <= position < r.end), None)
        if response is None or response.done or self.closed:
            self.counts["stray_samples"] += len(pcm)
            return
        data = self._wire_out.push(pcm)
        response.add_sound(data)
        response.sent = Ticks(position + round(len(pcm) * 48_000 / self._rate) - (response.start or 0))
        self._say(response)
        self._tell("response.output_audio.delta", **self._part_of(response), delta=base64_of(data))
        if response.all_made and (response.start or 0) + response.sent >= response.end:
            self._complete(response)

    def _complete(self, response: Response, *, cut_short: bool = False) -> None:
        status, details = "completed", None
        if cut_short:
            status, details = "incomplete", {"type": "incomplete", "reason": "max_output_tokens"}
        self._finish(response, status, details)

    def _clear_playing(self, response: Response) -> None:
        if response.playing:
            response.playing = False
            self._tell("output_audio_buffer.cleared", response_id=response.response_id)

    def _interrupt(self, response: Response) -> None:
        by_voice = not response.cut_by_client
        self._finish(
            response,
            "cancelled",
            {"type": "cancelled", "reason": "turn_detected" if by_voice else "client_cancelled"},
        )
        self._clear_playing(response)
        if self._unsaid:
            while self._unsaid:
                self._tell("conversation.item.deleted", item_id=self._unsaid.popleft())
            return
        item = response.item
        there = item is not None and self.conversation.find(item.item_id) is item
        if item is not None and there and response.spoken and response.truncate_at is None:
            cut = round(ms_from_ticks(response.cut_at or 0))
            self._tell("conversation.item.truncated", item_id=item.item_id, content_index=0, audio_end_ms=cut)

    def _on_history(self, news: HistoryChanged) -> None:
        """What was heard: the item says no more than that."""
        response = self._live.get(news.response) or self._by_number(news.response)
        if response is None:
            return
        if news.final and response.item is not None:
            item = response.item
            item.parts[0]["transcript" if response.spoken else "text"] = news.text
            if news.text != response.text.strip():
                item.status = "incomplete"
            if not news.words and not response.sent and not response.out_of_band:
                self._forget(item)
        self._tell_extra(
            "duplexd.history",
            response_id=response.response_id,
            item_id=response.item.item_id if response.item is not None else None,
            text=news.text,
            words=news.words,
            ambiguous=list(news.ambiguous),
            estimated=news.estimated,
            final=news.final,
        )

    def _forget(self, item: Item) -> None:
        """Not a sample of it was sent: it was never said (T-BI-14). A client that did not know may still name it."""
        if self.conversation.find(item.item_id) is item:
            self.conversation.remove(item)
            self._gone[item.item_id] = None
            if len(self._gone) > RESPONSES_KEPT:
                self._gone.popitem(last=False)
            self._unsaid.append(item.item_id)

    def _by_number(self, number: int) -> Response | None:
        return next((r for r in reversed(self._responses.values()) if r.number == number), None)

    def _on_refusal(self, news: InputRefusal, now: Nanos) -> None:
        response = self._asked.pop(news.key, None)
        if response is not None:
            error = {"type": "server_error", "code": news.code, "message": news.reason}
            self._finish(response, "failed", {"type": "failed", "error": error})
            self._ask_next()
        elif news.code == "unknown_response":
            self.counts["corrections_late"] += 1
        else:
            self._tell_fault(Fault(news.code, news.reason), None, now)

    def _on_progress(self, news: Progress) -> None:
        response = next(reversed(self._live.values()), None)
        self._tell_extra(
            "duplexd.cursor",
            epoch=news.epoch,
            response_id=response.response_id if response is not None else None,
            generation_ms=round(ms_from_ticks(news.generation)),
            playback_ms=round(ms_from_ticks(news.playback)),
            budget_ms=round(ms_from_ticks(news.budget)),
            assumed=news.assumed,
            basis="client" if not news.assumed else "reports" if self.way_by_reports else "clock",
        )

    # Ends -------------------------------------------------------------------------------------------------------------

    def _finish(self, response: Response, status: str, details: dict[str, Any] | None) -> None:
        """The terminal event of a response, behind those of everything that is open in it; once."""
        if response.done:
            return
        if response.item is not None:
            self._end_parts(response)
            self._end_item(
                response, response.item, response.item_index, "completed" if status == "completed" else "incomplete"
            )
        response.status, response.details = status, details
        self._tell("response.done", response=_response_wire(response))
        self._tell("rate_limits.updated", rate_limits=self._rate_limits())
        by_track = self.transport is Transport.WEBRTC
        sound = {"type": PCM, "rate": self._rate} if by_track else self.settings.values["audio"]["output"]["format"]
        finals = response.finals(sound=sound, by_track=by_track)
        self._finals[response.response_id] = (self._now, finals)
        if len(self._finals) > RESPONSES_KEPT:
            self._finals.popitem(last=False)
        for final in finals:
            self._tell_extra("duplexd.output", **final.wire())

    def _retrieve_output(self, event: dict[str, Any], now: Nanos) -> None:
        """The final objects of a response again, as they were told when it was done."""
        _, finals = self._finals.get(event["response_id"], (now, None))
        if finals is None:
            said = (
                f"Of response '{event['response_id'][:80]}' no output is kept: it is not done, not one of the last "
                f"{RESPONSES_KEPT}, or older than the session's retention."
            )
            raise Fault("output_not_found", said, param="response_id")
        for final in finals:
            self._tell("duplexd.output", **final.wire())

    def _end_parts(self, response: Response) -> None:
        where = self._part_of(response)
        if response.spoken:
            self._tell("response.output_audio.done", **where)
            self._tell("response.output_audio_transcript.done", **where, transcript=response.text)
            part = {"type": "audio", "transcript": response.text}
        else:
            self._tell("response.output_text.done", **where, text=response.text)
            part = {"type": "text", "text": response.text}
        self._tell("response.content_part.done", **where, part=part)

    def _rate_limits(self) -> list[dict[str, Any]]:
        bucket, now = self._response_bucket, self._response_bucket._at
        return [
            {
                "name": "requests",
                "limit": int(bucket.burst),
                "remaining": int(bucket.level(now)),
                "reset_seconds": round(bucket.full_in_s(now), 3),
            }
        ]


_ENDS = (ResponseState.COMPLETED, ResponseState.CANCELLED, ResponseState.FAILED)
_ITEM_ID = c.text(longest=256, shortest=1)
_RESPONSE = c.fields(
    {
        "output_modalities": modalities,
        "instructions": c.nullable(c.text(longest=32_768)),
        "audio": c.nullable(c.fields({"output": OUTPUT})),
        "tools": TOOLS,
        "tool_choice": TOOL_CHOICE,
        "parallel_tool_calls": c.nullable(c.flag),
        "max_output_tokens": OUTPUT_TOKENS,
        "conversation": c.text(longest=64),
        "input": c.many(c.anything, most=256),
        "metadata": METADATA,
        "prompt": c.plain,
        "reasoning": c.plain,
        "duplexd": c.fields({"script": c.text(longest=SCRIPT_MAX, shortest=1)}),
    }
)


def _response_params(value: Any, param: str) -> Any:
    if isinstance(value, dict):
        value = {name: one for name, one in value.items() if one is not None}
    return _RESPONSE(value, param)


def _sound(value: Any, param: str) -> Any:
    """Base64, or what was unpacked already: in JSON there are no bytes."""
    return value if isinstance(value, bytes) else _BASE64(value, param)


_BASE64 = c.text(longest=30_000_000)
_Act = Callable[[RealtimeSession, dict[str, Any], Nanos], None]
_CLIENT_EVENTS: dict[str, tuple[_Act, dict[str, c.Check], tuple[str, ...]]] = {
    "session.update": (RealtimeSession._update_session, {"session": c.anything}, ("session",)),
    "input_audio_buffer.append": (RealtimeSession._append, {"audio": _sound}, ("audio",)),
    "input_audio_buffer.commit": (RealtimeSession._commit, {}, ()),
    "input_audio_buffer.clear": (RealtimeSession._clear_input, {}, ()),
    "conversation.item.create": (
        RealtimeSession._create_item,
        {"item": c.anything, "previous_item_id": c.text(longest=256)},
        ("item",),
    ),
    "conversation.item.retrieve": (RealtimeSession._retrieve_item, {"item_id": _ITEM_ID}, ("item_id",)),
    "conversation.item.truncate": (
        RealtimeSession._truncate_item,
        {"item_id": _ITEM_ID, "content_index": c.whole(0, 1000), "audio_end_ms": c.number(0, 1e9)},
        ("item_id", "audio_end_ms"),
    ),
    "conversation.item.delete": (RealtimeSession._delete_item, {"item_id": _ITEM_ID}, ("item_id",)),
    "response.create": (RealtimeSession._create_response, {"response": _response_params}, ()),
    "response.cancel": (RealtimeSession._cancel_response, {"response_id": c.text(longest=256)}, ()),
    "output_audio_buffer.clear": (RealtimeSession._clear_output, {}, ()),
    "playback.ack": (
        RealtimeSession._acknowledge,
        {
            "response_id": c.text(longest=256),
            "item_id": c.text(longest=256),
            "played_ms": c.number(0, 1e9),
            "committed_ms": c.number(0, 1e9),
            "truncate": c.flag,
        },
        ("played_ms",),
    ),
    "duplexd.prefetch": (RealtimeSession._prefetch, {}, ()),
    "duplexd.output.retrieve": (
        RealtimeSession._retrieve_output,
        {"response_id": c.text(longest=256)},
        ("response_id",),
    ),
}
_UNCOUNTED = frozenset(("input_audio_buffer.append", "playback.ack"))
_IDEMPOTENT = frozenset(("response.create", "conversation.item.create"))


def _decode(text: str | bytes, longest: int) -> dict[str, Any]:
    if len(text) > longest:
        raise Fault("event_too_large", f"An event of {len(text)} bytes; at most {longest} are taken.")
    try:
        event = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise Fault("invalid_json", f"The event is not JSON: {error}.") from error
    if not isinstance(event, dict):
        raise Fault("invalid_event", f"An event is a JSON object, not {type(event).__name__}.")
    return event


def _response_wire(response: Response) -> dict[str, Any]:
    wire = response.wire()
    return {name: value for name, value in wire.items() if value is not None or name == "status_details"}


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(one) for name, one in value.items() if one is not None}
    return value


def _latency(news: LatencyMeasured) -> dict[str, float]:
    marks = (news.ended_at, news.decided_at, news.prefilled_at, news.worded_at, news.published_at)
    names = ("end_of_turn", "prefill", "first_word", "first_audio")
    pairs = zip(names, marks, marks[1:], strict=False)
    return {name: round(max(0, later - earlier) / NANOS_PER_MS, 1) for name, earlier, later in pairs}
