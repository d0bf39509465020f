"""The duplex dialect of the Realtime protocol, at `?duplex=1`: the same session, other words, and a connection that may
break.

1. The client speaks first: `session.update`; `session.created` answers it, with a token to come back with.
2. Every event carries `server_event_seq`, counted from 1 without a gap; what was not acknowledged is kept, within a
   bound, and told again under the same number after `session.resume`. Nothing older is claimed to exist.
3. Input is 16-bit PCM at the rate the session names (16 kHz unless it says otherwise); output is 24 kHz.
4. A broken connection keeps the session for `GRACE_S`; generation stops meanwhile, because nobody reports.
5. Audio is acknowledged by `playback.ack`; late ones change nothing.
"""

from __future__ import annotations

import hmac
from collections import deque
from typing import Any

import msgspec

from duplexd.webrtc.realtime import check as c
from duplexd.webrtc.realtime.faults import invalid
from duplexd.webrtc.realtime.formats import PCM
from duplexd.webrtc.realtime.secrets import Key
from duplexd.webrtc.realtime.settings import INSTRUCTIONS_MAX, Settings

GRACE_S = 30.0
REPLAY_EVENTS_MAX = 2048
REPLAY_BYTES_MAX = 8 * 1024 * 1024
RATES_IN = (8000, 16_000, 24_000, 48_000)
RATE_IN = 16_000  #: unless the session says otherwise
RATE_OUT = 24_000
#: Fields of a session that its client may send and that change nothing here (docs/realtime.md lists them): there is
#: one voice, the thinker decodes in one way, the engine judges voices over a reply, and history is what was heard.
IGNORED = ("ref_audio", "voice", "temperature", "overlap_policy", "playback_commit_policy", "idle_timeout_s")
_encoder = msgspec.json.Encoder()


class DuplexConfig(msgspec.Struct):
    """What the first `session.update` says, as far as it matters here."""

    rate_in: int = 16_000
    auto_response: bool = True
    ignored: tuple[str, ...] = ()  #: fields that were sent and change nothing here


class Replay:
    """Events with their numbers, until they are acknowledged."""

    def __init__(self, *, events_max: int = REPLAY_EVENTS_MAX, bytes_max: int = REPLAY_BYTES_MAX) -> None:
        self.last = 0  #: number of the newest event
        self._kept: deque[tuple[int, str]] = deque()
        self._bytes = 0
        self._events_max = events_max
        self._bytes_max = bytes_max

    def add(self, event: dict[str, Any]) -> str:
        """The event as text, with its number."""
        self.last += 1
        text = _encoder.encode({**event, "server_event_seq": self.last}).decode()
        self._kept.append((self.last, text))
        self._bytes += len(text)
        while len(self._kept) > self._events_max or self._bytes > self._bytes_max:
            self._drop()
        return text

    def acknowledge(self, seq: int) -> None:
        while self._kept and self._kept[0][0] <= seq:
            self._drop()

    def _drop(self) -> None:
        _, text = self._kept.popleft()
        self._bytes -= len(text)

    def since(self, seq: int) -> list[str] | None:
        """Everything behind number `seq`; None when some of it is not kept any more."""
        if seq > self.last or (seq < self.last and (not self._kept or self._kept[0][0] > seq + 1)):
            return None
        return [text for number, text in self._kept if number > seq]


_SIDE = c.nullable(c.loose({"sample_rate_hz": c.nullable(c.whole(1, 1_000_000))}))
_SESSION = c.loose(
    {
        "input_audio_format": c.nullable(c.one_of("pcm16")),
        "output_audio_format": c.nullable(c.one_of("pcm16")),
        "sample_rate_hz": c.nullable(c.whole(1, 1_000_000)),
        "audio": c.nullable(c.loose({"input": _SIDE, "output": _SIDE})),
        "modalities": c.nullable(c.many(c.one_of("audio", "text"), most=2)),
        "extra_body": c.nullable(c.loose({"auto_response": c.nullable(c.flag)})),
        "instructions": c.nullable(c.text(longest=INSTRUCTIONS_MAX)),
    }
)


def settings_of(session: Any, key: Key) -> tuple[Settings, DuplexConfig]:
    """The session that a first `session.update` asks for, within what its key allows. Raises Fault.

    What is not named here is dropped: `IGNORED`, and what other servers' models know.
    """
    given = _SESSION(session, "session")
    audio = given.get("audio") or {}
    out = (audio.get("output") or {}).get("sample_rate_hz") or RATE_OUT
    if out != RATE_OUT:
        raise invalid("session.audio.output.sample_rate_hz", out, str(RATE_OUT))
    rate = (audio.get("input") or {}).get("sample_rate_hz") or given.get("sample_rate_hz") or RATE_IN
    if rate not in RATES_IN:
        raise invalid("session.sample_rate_hz", rate, ", ".join(map(str, RATES_IN)))
    asked: dict[str, Any] = {"type": "realtime"}
    modalities = given.get("modalities")
    spoken = ["audio"] if not modalities or "audio" in modalities else ["text"]
    if modalities and spoken != key.settings.values["output_modalities"]:
        asked["output_modalities"] = spoken
    if given.get("instructions") is not None:
        asked["instructions"] = given["instructions"]
    if session.get("turn_detection") is not None:
        asked["audio"] = {"input": {"turn_detection": session["turn_detection"]}}
    settings = key.settings.change(asked, locked=key.locked)
    # Turns are the client's in this dialect, unless it or its key says otherwise; sound is 16-bit PCM.
    own: dict[str, Any] = {"transcription": {}, "format": {"type": PCM}}
    if "audio" not in asked and "audio" not in key.locked:
        own["turn_detection"] = None
    settings = settings.change({"audio": {"input": own, "output": {"format": {"type": PCM}}}})
    extra = given.get("extra_body") or {}
    ignored = tuple(name for name in IGNORED if session.get(name) is not None)
    config = DuplexConfig(rate_in=rate, auto_response=extra.get("auto_response") is not False, ignored=ignored)
    return settings.change({"duplexd": {"events": True}}), config


class Inbound:
    """Events of the dialect -> events of the protocol."""

    def __init__(self, config: DuplexConfig) -> None:
        self.frames_left = 0  #: appends whose video frames were not looked at
        self._config = config

    def translate(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """What the core is told for it, each if the one before was taken; an empty list for what ends here.

        Raises Fault.
        """
        kind = event.get("type")
        own = {"event_id": event["event_id"]} if isinstance(event.get("event_id"), str) else {}
        match kind:
            case "input_audio_buffer.append":
                # A frame that rides on sound is left: this model does not see, and the sound is what it came for.
                self.frames_left += bool(event.get("video_frames"))
                return [{"type": kind, "audio": event.get("audio"), **own}]
            case "input_audio_buffer.commit":
                wanted = event.get("response_create")
                asks = self._config.auto_response if wanted is None else bool(wanted)
                commit = {"type": kind, **own}
                return [commit, {"type": "response.create"}] if asks else [commit]
            case "input.text.append":
                part = {"type": "input_text", "text": event.get("text")}
                item = {"type": "message", "role": "user", "content": [part]}
                return [{"type": "conversation.item.create", "item": item, **own}]
            case "input.cancel":
                return [{"type": "input_audio_buffer.clear", **own}]
            case "barge_in":
                return [{"type": "output_audio_buffer.clear", **own}]
            case "session.update":
                session = event.get("session")
                if not isinstance(session, dict):
                    raise invalid("session", session, "an object")
                kept = {name: session[name] for name in ("instructions",) if session.get(name) is not None}
                return [{"type": kind, "session": {"type": "realtime", **kept}, **own}]
            case "session.heartbeat" | "session.event_ack" | "turn.signal":
                return []
        return [event]


class Outbound:
    """Events of the protocol -> events of the dialect."""

    def __init__(self, *, session_id: str) -> None:
        self._session_id = session_id
        self._made_ms: dict[str, float] = {}

    def translate(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        kind = event["type"]
        if kind.startswith("duplexd."):
            return self._own(event)
        told = [{**event, "session_id": self._session_id}]
        if kind == "error" and event["error"]["code"] == "session_expired":
            reason = event["error"]["message"]
            return [*told, {"type": "session.expired", "session_id": self._session_id, "reason": reason}]
        if kind == "response.content_part.added":
            speak = {"type": "response.speak", "response_id": event["response_id"], "session_id": self._session_id}
            return [*told, speak]
        if kind == "response.output_audio.delta":
            response = event["response_id"]
            made = self._made_ms.get(response, 0.0) + len(event["delta"]) * 3 / 4 / 48
            self._made_ms = {response: made}
            told[0] |= {"sample_rate_hz": 24_000, "metadata": {"audio_duration_ms": round(made, 1)}}
        return told

    def _own(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """Of duplexd's own events this dialect has a word for one: what was committed to the history."""
        if event["type"] != "duplexd.history" or not event["final"]:
            return []
        told = {
            "type": "playback.committed",
            "session_id": self._session_id,
            "response_id": event["response_id"],
            "text": event["text"],
            "history_committed": True,
            "estimated": event["estimated"],
        }
        return [told]


def token_matches(given: object, token: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given.encode(), token.encode())


__all__ = ["DuplexConfig", "Inbound", "Outbound", "Replay", "settings_of", "token_matches"]
