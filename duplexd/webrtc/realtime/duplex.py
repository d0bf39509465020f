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

from duplexd.webrtc.realtime.faults import Fault, invalid
from duplexd.webrtc.realtime.settings import Settings

GRACE_S = 30.0
REPLAY_EVENTS_MAX = 2048
REPLAY_BYTES_MAX = 8 * 1024 * 1024
RATES_IN = (8000, 16_000, 24_000, 48_000)
_encoder = msgspec.json.Encoder()


class DuplexConfig(msgspec.Struct):
    """What the first `session.update` says, as far as it matters here."""

    rate_in: int = 16_000
    auto_response: bool = True


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


def settings_of(session: Any, *, model: str) -> tuple[Settings, DuplexConfig]:
    """The session that a first `session.update` asks for. Raises Fault."""
    if not isinstance(session, dict):
        raise invalid("session", session, "an object")
    for name in ("input_audio_format", "output_audio_format"):
        if session.get(name, "pcm16") != "pcm16":
            raise invalid(f"session.{name}", session[name], "pcm16")
    audio: dict[str, Any] = session["audio"] if isinstance(session.get("audio"), dict) else {}
    out = (audio.get("output") or {}).get("sample_rate_hz", 24_000)
    if out != 24_000:
        raise invalid("session.audio.output.sample_rate_hz", out, "24000")
    rate = (audio.get("input") or {}).get("sample_rate_hz") or session.get("sample_rate_hz") or 16_000
    if rate not in RATES_IN:
        raise invalid("session.sample_rate_hz", rate, ", ".join(map(str, RATES_IN)))
    extra: dict[str, Any] = session["extra_body"] if isinstance(session.get("extra_body"), dict) else {}
    speaks = "audio" in session.get("modalities", ["audio"])
    wanted: dict[str, Any] = {
        "type": "realtime",
        "output_modalities": ["audio"] if speaks else ["text"],
        "audio": {"input": {"turn_detection": session.get("turn_detection"), "transcription": {}}},
        "duplexd": {"events": True},
    }
    if isinstance(session.get("instructions"), str):
        wanted["instructions"] = session["instructions"]
    settings = Settings.default(model=model).change(wanted)
    return settings, DuplexConfig(rate_in=rate, auto_response=extra.get("auto_response", True) is not False)


class Inbound:
    """Events of the dialect -> events of the protocol."""

    def __init__(self, config: DuplexConfig) -> None:
        self._config = config

    def translate(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """What the core is told for it; an empty list for what ends here. Raises Fault."""
        kind = event.get("type")
        own = {"event_id": event["event_id"]} if isinstance(event.get("event_id"), str) else {}
        match kind:
            case "input_audio_buffer.append":
                if event.get("video_frames"):
                    raise Fault("unsupported_content_type", "This model does not see; append sound alone.")
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
                kept = {name: session[name] for name in ("instructions",) if isinstance(session.get(name), str)}
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
