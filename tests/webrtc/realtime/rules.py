"""The rules of order as a strict client would see them broken (notes of the protocol, 2.9): one `View` a connection."""

from __future__ import annotations

from typing import Any


class Broken(AssertionError):
    """An event that may not come here."""


class View:
    """Takes every event in order; raises `Broken` at the first one out of place."""

    def __init__(self, *, webrtc: bool = False) -> None:
        self.webrtc = webrtc
        self.session: dict[str, Any] = {}
        self.order: list[str] = []  #: ids of items, by previous_item_id
        self.items: dict[str, dict[str, Any]] = {}
        self.done: dict[str, dict[str, Any]] = {}  #: responses that are done, by id
        self.open: dict[str, dict[str, Any]] = {}
        self.errors: list[dict[str, Any]] = []
        self.deleted: set[str] = set()
        self.transcripts: dict[str, str] = {}
        self.speaking: str | None = None
        self.committed: list[str] = []
        self.closed = False  #: nothing may come any more
        self._count = 0
        self._parts: dict[str, dict[str, Any]] = {}  #: open content parts, by item
        self._out_of_band: set[str] = set()
        self._unadded: str | None = None  #: committed, and not an item yet
        self._put_out: dict[str, list[str]] = {}  #: items of a response that is open, in order
        self._item_done: set[str] = set()  #: of them, those whose `output_item.done` has come
        self._owes_limits = False  #: a response is done and `rate_limits.updated` has not come

    def take(self, event: dict[str, Any]) -> None:
        self._count += 1
        self._need(not self.closed, event, "nothing is told after the close")
        limits = event["type"] == "rate_limits.updated"
        self._need(limits == self._owes_limits, event, "rate limits follow a response that is done, and nothing else")
        self._owes_limits = False
        self._need(event["event_id"] == f"event_{self._count}", event, "event ids are contiguous")
        _no_nulls(event)
        self._need((self._count == 1) == (event["type"] == "session.created"), event, "session.created comes first")
        act = getattr(self, "_" + event["type"].replace(".", "_"), None)
        if act is not None:
            act(event)
        else:
            self._need(event["type"] in _PLAIN or event["type"].startswith(("duplexd.", "playback.")), event, "known")

    def _need(self, holds: bool, event: dict[str, Any], rule: str) -> None:
        if not holds:
            raise Broken(f"{rule}: {event}")

    # Session ----------------------------------------------------------------------------------------------------------

    def _session_created(self, event: dict[str, Any]) -> None:
        self.session = event["session"]

    _session_updated = _session_created

    def _error(self, event: dict[str, Any]) -> None:
        error = event["error"]
        self._need(bool(error["type"] and error["message"]), event, "an error says what is wrong")
        self.errors.append(error)

    # Turns ------------------------------------------------------------------------------------------------------------

    def _input_audio_buffer_speech_started(self, event: dict[str, Any]) -> None:
        self._need(self.speaking is None, event, "nobody starts to speak twice")
        self.speaking = event["item_id"]

    def _input_audio_buffer_speech_stopped(self, event: dict[str, Any]) -> None:
        self._need(self.speaking == event["item_id"], event, "who stops is who started")
        self.speaking = None

    def _input_audio_buffer_committed(self, event: dict[str, Any]) -> None:
        self._need(self.speaking is None, event, "speech stops before it is committed")
        self._need(event["previous_item_id"] == (self.order[-1] if self.order else None), event, "one list")
        self._unadded = event["item_id"]
        self.committed.append(event["item_id"])

    # Items ------------------------------------------------------------------------------------------------------------

    def _conversation_item_added(self, event: dict[str, Any]) -> None:
        item, before = event["item"], event["previous_item_id"]
        self._need(item["id"] not in self.items, event, "an item is added once")
        self._need(self._unadded in (None, item["id"]), event, "what is committed is added at once")
        self._unadded = None
        answers = item.get("role") == "assistant" and item["status"] == "in_progress"
        announced = any(item["id"] in ids for ids in self._put_out.values())
        self._need(announced or not answers, event, "an item of a response is put out before it is added")
        self._need(before is None or before in self.order, event, "it stands behind an item that is there")
        self.order.insert(0 if before is None else self.order.index(before) + 1, item["id"])
        self.items[item["id"]] = item

    def _conversation_item_done(self, event: dict[str, Any]) -> None:
        item = event["item"]
        self._need(item["id"] in self.items, event, "what is done was added")
        at = self.order.index(item["id"])
        self._need(event["previous_item_id"] == (self.order[at - 1] if at else None), event, "one list")
        self._need(item["status"] != "in_progress", event, "what is done is not in progress")
        self.items[item["id"]] = item

    def _conversation_item_deleted(self, event: dict[str, Any]) -> None:
        if event["item_id"] not in self.items and event["item_id"] in self.deleted:
            return  # A client that deletes it once more is told once more.
        self._need(event["item_id"] in self.items, event, "what is deleted was there")
        self.order.remove(event["item_id"])
        del self.items[event["item_id"]]
        self.deleted.add(event["item_id"])

    def _conversation_item_truncated(self, event: dict[str, Any]) -> None:
        was_there = event["item_id"] in self.items or event["item_id"] in self.deleted
        self._need(was_there, event, "what is truncated was there")

    def _conversation_item_retrieved(self, event: dict[str, Any]) -> None:
        self.items[event["item"]["id"]] = event["item"]

    def _conversation_item_input_audio_transcription_completed(self, event: dict[str, Any]) -> None:
        self._need(event["item_id"] not in self.transcripts, event, "understood once")
        self.transcripts[event["item_id"]] = event["transcript"]

    # Responses --------------------------------------------------------------------------------------------------------

    def _response_created(self, event: dict[str, Any]) -> None:
        response = event["response"]
        known = response["id"] in self.open or response["id"] in self.done
        self._need(not known and response["status"] == "in_progress", event, "a response is created once")
        self._need(self._unadded is None, event, "a turn is an item before it is answered")
        self._put_out[response["id"]] = []
        if "conversation_id" not in response:
            self._out_of_band.add(response["id"])
        mine = [one for one in self.open if one not in self._out_of_band]
        fine = response["id"] in self._out_of_band or not mine
        self._need(fine, event, "one response of the conversation at a time")
        self.open[response["id"]] = response

    def _response_done(self, event: dict[str, Any]) -> None:
        response = event["response"]
        self._need(response["id"] in self.open, event, "done once, and only what was created")
        self._need(response["status"] in _TERMINAL and "status_details" in response, event, "a terminal state")
        self._need(set(response["usage"]) >= _USAGE, event, "usage is told")
        for item in response["output"]:
            self._need(item["id"] not in self._parts, event, "parts end before their response")
            self._need(item["status"] != "in_progress", event, "items end before their response")
            self._need(item["id"] in self._item_done, event, "an item's end is told before its response's")
        told = [item["id"] for item in response["output"]]
        self._need(told == self._put_out.pop(response["id"]), event, "the output is what was put out")
        self._owes_limits = True
        del self.open[response["id"]]
        self.done[response["id"]] = response

    def _inside(self, event: dict[str, Any]) -> None:
        self._need(event["response_id"] in self.open, event, "only while its response is open")

    def _response_output_item_added(self, event: dict[str, Any]) -> None:
        self._inside(event)
        put_out, name = self._put_out[event["response_id"]], event["item"]["id"]
        self._need(name not in self.items and name not in put_out, event, "put out once, before it is added")
        self._need(event["output_index"] == len(put_out), event, "one after the other")
        put_out.append(name)

    def _response_output_item_done(self, event: dict[str, Any]) -> None:
        self._inside(event)
        name = event["item"]["id"]
        self._need(name in self._put_out[event["response_id"]], event, "what ends was put out")
        self._need(name not in self._item_done and name not in self._parts, event, "it ends once, after its parts")
        self._item_done.add(name)

    _response_function_call_arguments_delta = _inside
    _response_function_call_arguments_done = _inside

    def _response_content_part_added(self, event: dict[str, Any]) -> None:
        self._inside(event)
        inside = event["item_id"] in self.items or event["response_id"] in self._out_of_band
        self._need(inside and event["item_id"] not in self._parts, event, "its item was added, and it once")
        self._parts[event["item_id"]] = {"text": "", "done": set(), "spoken": event["part"]["type"] == "audio"}

    def _part(self, event: dict[str, Any]) -> dict[str, Any]:
        self._inside(event)
        self._need(event["item_id"] in self._parts, event, "inside an open part")
        return self._parts[event["item_id"]]

    def _response_output_audio_delta(self, event: dict[str, Any]) -> None:
        self._need(not self.webrtc, event, "a track carries the sound")
        self._need("audio" not in self._part(event)["done"], event, "no sound after its end")

    def _response_output_audio_done(self, event: dict[str, Any]) -> None:
        self._part(event)["done"].add("audio")

    def _response_output_audio_transcript_delta(self, event: dict[str, Any]) -> None:
        part = self._part(event)
        self._need("text" not in part["done"], event, "no words after their end")
        part["text"] += event["delta"]

    _response_output_text_delta = _response_output_audio_transcript_delta

    def _response_output_audio_transcript_done(self, event: dict[str, Any]) -> None:
        part = self._part(event)
        self._need(part["text"] == event["transcript"], event, "the deltas are the whole")
        part["done"].add("text")

    def _response_output_text_done(self, event: dict[str, Any]) -> None:
        part = self._part(event)
        self._need(part["text"] == event["text"], event, "the deltas are the whole")
        part["done"].add("text")

    def _response_content_part_done(self, event: dict[str, Any]) -> None:
        part = self._part(event)
        self._need("text" in part["done"], event, "its text ends before it")
        self._need(part["spoken"] == ("audio" in part["done"]), event, "its sound ends before it")
        del self._parts[event["item_id"]]

    def text(self, item_id: str) -> str:
        part = self.items[item_id]["content"][0]
        return str(part.get("transcript", part.get("text", "")))


_TERMINAL = ("completed", "cancelled", "failed", "incomplete")
_USAGE = {"total_tokens", "input_tokens", "output_tokens", "input_token_details", "output_token_details"}
_PLAIN = {
    "rate_limits.updated",
    "input_audio_buffer.cleared",
    "input_audio_buffer.timeout_triggered",
    "output_audio_buffer.started",
    "output_audio_buffer.stopped",
    "output_audio_buffer.cleared",
    "conversation.item.input_audio_transcription.delta",
}
_THEIR_OWN = {"parameters", "tracing", "truncation", "prompt", "reasoning"}  #: shown as the client gave them
_MAY_BE_NULL = {"status_details", "previous_item_id", "transcript"}


def _no_nulls(value: Any, name: str = "") -> None:
    """Strict clients take an absent field, and stop at a null (2.10). A session shows nothing that is not set."""
    if value is None and name not in _MAY_BE_NULL:
        raise Broken(f"{name} is null")
    if isinstance(value, dict):
        for key, one in value.items():
            if key not in _THEIR_OWN:
                _no_nulls(one, key)
    elif isinstance(value, list):
        for one in value:
            _no_nulls(one, name)
