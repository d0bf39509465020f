"""One response of the protocol: what was asked, what has come of it, and its terminal state.

    in_progress -> completed | cancelled | failed | incomplete        exactly one of them, told once (DESIGN §5 rule 12)

A response is done when nothing more is *made* of it. Its sound may play on for a while; what was heard of it is known
later, and changes its item, never its state.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from duplexd.units import Ticks
from duplexd.webrtc.realtime.items import Item


class Usage(msgspec.Struct):
    context: int = 0
    cached: int = 0
    written: int = 0
    audio_out: int = 0  #: of the tokens written, those that were spoken

    def wire(self) -> dict[str, Any]:
        return {
            "total_tokens": self.context + self.written,
            "input_tokens": self.context,
            "output_tokens": self.written,
            "input_token_details": {
                "text_tokens": self.context,
                "audio_tokens": 0,
                "image_tokens": 0,
                "cached_tokens": self.cached,
                "cached_tokens_details": {"text_tokens": self.cached, "audio_tokens": 0, "image_tokens": 0},
            },
            "output_token_details": {"text_tokens": self.written - self.audio_out, "audio_tokens": self.audio_out},
        }


class FinalObject(msgspec.Struct, frozen=True):
    """One output of a response that is done, as a whole: what can be checked against what was received."""

    response_id: str
    item_id: str
    modality: str  #: "audio" or "text"
    format: dict[str, Any]
    state: str  #: of the response: what is not "completed" is a part
    bytes: int | None  #: None where a part was sent and nobody knows which: a track that was cut
    sha256: str | None
    duration_ms: float | None = None  #: of sound

    def wire(self) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.structs.asdict(self)
        return fields


class Response:
    """`number` is the engine's id of the reply; 0 until it has accepted it."""

    def __init__(
        self,
        *,
        response_id: str,
        key: str,
        spoken: bool,
        metadata: dict[str, str] | None = None,
        out_of_band: bool = False,
        tokens_max: int | str = "inf",
        audio: dict[str, Any] | None = None,
        conversation_id: str = "",
        condition: str | None = None,
        script: str = "",
    ) -> None:
        self.response_id = response_id
        self.key = key
        self.spoken = spoken
        self.metadata = metadata
        self.out_of_band = out_of_band
        self.tokens_max = tokens_max
        self.audio = audio
        self.conversation_id = conversation_id
        self.condition = condition  #: instructions of its own; None: the session's
        self.script = script  #: words to recite, in place of thinking
        self.number = 0
        self.status = "in_progress"
        self.details: dict[str, Any] | None = None
        self.output: list[Item] = []
        self.usage = Usage()
        self.item: Item | None = None  #: what is being said
        self.item_index = 0
        self.text = ""  #: everything that was worded
        self.start: Ticks | None = None  #: of its sound, on the output timeline
        self.end = Ticks(0)
        self.sent = Ticks(0)  #: of its sound, since its start
        self.all_made = False  #: its last chunk has been published
        self.playing = False  #: on WebRTC: started, and neither stopped nor cleared
        self.cut_by_client = False
        self.cut_at: Ticks | None = None  #: where an interruption ended its sound, since its start
        self.truncate_at: Ticks | None = None  #: where the client says it was heard until; waits for the reply's end
        self.checksum = hashlib.sha256()  #: of its sound
        self.sound_bytes = 0

    @property
    def done(self) -> bool:
        return self.status != "in_progress"

    @property
    def sent_ms(self) -> float:
        return self.sent / 48

    def add_sound(self, data: bytes) -> None:
        self.checksum.update(data)
        self.sound_bytes += len(data)

    def finals(self, *, sound: dict[str, Any], by_track: bool) -> list[FinalObject]:
        """Its outputs as wholes. `sound`: their format; by_track: all that was made counts, if none of it was cut."""
        if self.item is None:
            return []
        names = (self.response_id, self.item.item_id)
        text = self.text.encode()
        written = FinalObject(
            *names, "text", {"type": "text/plain"}, self.status, len(text), hashlib.sha256(text).hexdigest()
        )
        if not self.spoken:
            return [written]
        known = self.status == "completed" or not by_track
        length = self.sent if self.cut_at is None else min(self.cut_at, self.sent)
        spoken = FinalObject(
            *names,
            "audio",
            sound,
            self.status,
            self.sound_bytes if known else None,
            self.checksum.hexdigest() if known else None,
            round(length / 48, 1),
        )
        return [spoken, written]

    def wire(self) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": "realtime.response",
            "status": self.status,
            "status_details": self.details,
            "output": [item.wire() for item in self.output],
            "conversation_id": None if self.out_of_band else self.conversation_id,
            "output_modalities": ["audio"] if self.spoken else ["text"],
            "max_output_tokens": self.tokens_max,
            "audio": self.audio if self.spoken else None,
            "metadata": self.metadata,
            "usage": self.usage.wire() if self.done else None,
        }
