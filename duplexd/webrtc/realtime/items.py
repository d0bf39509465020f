"""Items of a conversation: what a client may put in, how they look on the wire, and what the thinker is told of them.

1. An item is what was said, called or answered; its place in the list is its place in time.
2. The thinker knows turns of two people. Words of the person, system messages and results of functions make the
   person's side of a turn; heard words and calls make the character's.
3. An item of the character holds what was *heard*. `spoken` keeps everything, for whoever asks how much was made.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import msgspec

from duplexd.messages import PastTurn
from duplexd.units import Nanos
from duplexd.webrtc.realtime import check as c
from duplexd.webrtc.realtime.faults import Fault, invalid, missing

ITEMS_MAX = 1024  #: of one conversation; at the bound the oldest leaves, and the client is told
TEXT_MAX = 65_536
IMAGE_BYTES_MAX = 8 * 1024 * 1024
HEADER_MAX = 1024 * 1024  #: characters of base64, whole groups of 4, in which a picture says its size
IMAGE_PIXELS_MAX = 16_000_000
_ID = c.text(longest=64, shortest=1)
_STATUS = c.nullable(c.one_of("completed", "incomplete", "in_progress"))


class Item(msgspec.Struct):
    """One item. `parts` are of the wire: {"type": "input_text", "text": ...} and so on."""

    item_id: str
    kind: str  #: "message", "function_call" or "function_call_output"
    role: str = ""
    parts: list[dict[str, Any]] = []
    status: str = "completed"
    name: str = ""
    call_id: str = ""
    arguments: str = ""
    output: str = ""
    response: int = 0  #: the engine's id of the reply it belongs to
    duration_ms: float = 0.0  #: of its sound
    at: Nanos = Nanos(0)  #: when it was added, or ended
    told: str = ""  #: what the thinker is told, where that differs from the parts

    def wire(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "id": self.item_id,
            "object": "realtime.item",
            "type": self.kind,
            "status": self.status,
        }
        if self.kind == "message":
            return {**shown, "role": self.role, "content": [dict(part) for part in self.parts]}
        shown["call_id"] = self.call_id
        if self.kind == "function_call":
            return {**shown, "name": self.name, "arguments": self.arguments}
        return {**shown, "output": self.output}

    @property
    def by_character(self) -> bool:
        return self.role == "assistant" or self.kind == "function_call"

    def text(self) -> str:
        """What the thinker is told of it."""
        if self.kind == "function_call":
            return f'<tool_call>{{"name": {json.dumps(self.name)}, "arguments": {self.arguments or "{}"}}}</tool_call>'
        if self.kind == "function_call_output":
            return f"<tool_response>{self.output}</tool_response>"
        return self.told or " ".join(found for part in self.parts if (found := _words_of(part)))


def _words_of(part: dict[str, Any]) -> str:
    return " ".join(str(part.get("text") or part.get("transcript") or "").split())


# In ------------------------------------------------------------------------------------------------------------------

_CONTENT_TYPES = {
    "system": ("input_text",),
    "user": ("input_text", "input_audio", "input_image"),
    "assistant": ("output_text", "output_audio"),
}
_MESSAGE = c.fields(
    {
        "id": c.nullable(_ID),
        "object": c.anything,
        "type": c.one_of("message"),
        "status": _STATUS,
        "role": c.one_of(*_CONTENT_TYPES),
        "content": c.many(c.anything, most=64),
        "phase": c.anything,
    },
    required=("role", "content"),
)
_CALL = c.fields(
    {
        "id": c.nullable(_ID),
        "object": c.anything,
        "type": c.anything,
        "status": _STATUS,
        "call_id": c.text(longest=256, shortest=1),
        "name": c.text(longest=64, shortest=1),
        "arguments": c.text(longest=TEXT_MAX),
    },
    required=("name", "arguments"),
)
_OUTPUT = c.fields(
    {
        "id": c.nullable(_ID),
        "object": c.anything,
        "type": c.anything,
        "status": _STATUS,
        "call_id": c.text(longest=256, shortest=1),
        "output": c.text(longest=TEXT_MAX),
    },
    required=("call_id", "output"),
)


def parse_item(value: Any, param: str, *, new_id: str, takes: Iterable[str]) -> Item:
    """An item as a client gives it. `takes`: modalities the model reads. Raises Fault."""
    if not isinstance(value, dict):
        raise invalid(param, value, "an object")
    kind = value.get("type")
    if kind is None:
        raise missing(f"{param}.type")
    if kind == "message":
        return _message(value, param, new_id, frozenset(takes))
    if kind == "function_call":
        made = _CALL(value, param)
        call_id = made.get("call_id") or f"call_{new_id}"
        item_id = made.get("id") or new_id
        return Item(item_id, kind, name=made["name"], call_id=call_id, arguments=made["arguments"])
    if kind == "function_call_output":
        made = _OUTPUT(value, param)
        return Item(made.get("id") or new_id, kind, call_id=made["call_id"], output=made["output"])
    raise invalid(f"{param}.type", kind, "message, function_call, function_call_output")


def _message(value: dict[str, Any], param: str, new_id: str, takes: frozenset[str]) -> Item:
    made = _MESSAGE(value, param)
    role = made["role"]
    parts = [
        _part(part, f"{param}.content[{index}]", role=role, takes=takes) for index, part in enumerate(made["content"])
    ]
    return Item(made.get("id") or new_id, "message", role=role, parts=parts)


def _part(value: Any, param: str, *, role: str, takes: frozenset[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(param, value, "an object")
    kind = value.get("type")
    if kind == "text":
        kind = "output_text" if role == "assistant" else "input_text"
    if kind not in _CONTENT_TYPES[role]:
        raise invalid(f"{param}.type", kind, ", ".join(_CONTENT_TYPES[role]))
    if kind in ("input_text", "output_text"):
        if "text" not in value:
            raise missing(f"{param}.text")
        return {"type": kind, "text": c.text(longest=TEXT_MAX)(value["text"], f"{param}.text")}
    if kind == "input_image":
        _refuse_image(value, param, takes)
    transcript = value.get("transcript")
    if not isinstance(transcript, str) or not transcript.strip():
        said = (
            "Sound inside an item is not listened to: append it to the input audio buffer and commit it, or give its "
            "transcript."
        )
        raise Fault("unsupported_content_type", said, param=f"{param}.audio")
    return {"type": kind, "transcript": c.text(longest=TEXT_MAX)(transcript, f"{param}.transcript")}


def _refuse_image(value: dict[str, Any], param: str, takes: frozenset[str]) -> NoReturn:
    """Say what is wrong with the picture; if nothing is, that nobody here looks at it."""
    url = value.get("image_url")
    if not isinstance(url, str):
        raise missing(f"{param}.image_url")
    check_image(url, f"{param}.image_url")
    # No thinker is told a picture (`Item.text`): one that was taken would be forgotten without a word.
    said = f"This model does not read images; it takes {', '.join(sorted(takes - {'image'}))}."
    raise Fault("unsupported_content_type", said, param=param)


def check_image(url: str, param: str) -> tuple[int, int]:
    """(width, height) of a data URI, from its header alone: nothing is decoded before its size is known.

    Raises Fault for another scheme or type, a header that is none, and for more bytes or pixels than are taken.
    """
    head, comma, body = url.partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise invalid(param, url[:60], "a data URI: data:image/png;base64,... or data:image/jpeg;base64,...")
    if len(body) > IMAGE_BYTES_MAX * 4 // 3:
        raise Fault("image_too_large", f"The image has more than {IMAGE_BYTES_MAX} bytes.", param=param)
    try:
        data = base64.b64decode(body[:HEADER_MAX], validate=True)
    except (binascii.Error, ValueError) as error:
        raise Fault("invalid_image", f"The image is not base64: {error}.", param=param) from error
    size = _png_size(data) or _jpeg_size(data)
    if size is None:
        raise Fault("invalid_image", "The image is neither PNG nor JPEG.", param=param)
    width, height = size
    if not 0 < width * height <= IMAGE_PIXELS_MAX:
        said = f"The image has {width} x {height} pixels; it may have 1 to {IMAGE_PIXELS_MAX}."
        raise Fault("image_too_large", said, param=param)
    return size


def _png_size(data: bytes) -> tuple[int, int] | None:
    if data[:8] != b"\x89PNG\r\n\x1a\n" or data[12:16] != b"IHDR" or len(data) < 24:
        return None
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    if data[:2] != b"\xff\xd8":
        return None
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if marker in (0xC0, 0xC1, 0xC2, 0xC3):
            height, width = struct.unpack(">HH", data[at + 5 : at + 9])
            return width, height
        if length < 2:
            return None
        at += 2 + length
    return None


# The list ------------------------------------------------------------------------------------------------------------


class Conversation:
    """Items in order; no two have one id."""

    def __init__(self, *, items_max: int = ITEMS_MAX) -> None:
        self._items: list[Item] = []
        self._items_max = items_max

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def find(self, item_id: str) -> Item | None:
        return next((item for item in reversed(self._items) if item.item_id == item_id), None)

    def add(self, item: Item, *, after: str | None = None) -> tuple[str | None, Item | None]:
        """Put it behind `after` (None: at the end, "root": first). Returns (id before it, the item that left for it).

        At the bound the oldest of those that were there leaves, never the new one. Raises Fault for an id that is
        there already, or an `after` that is not.
        """
        if self.find(item.item_id) is not None:
            raise Fault("item_already_exists", f"There is an item '{item.item_id}' already.", param="item.id")
        at = self._place(after)
        left = self._items.pop(0) if len(self._items) >= self._items_max else None
        at -= 1 if left is not None and at else 0
        self._items.insert(at, item)
        return self._items[at - 1].item_id if at else None, left

    def _place(self, after: str | None) -> int:
        if after is None:
            return len(self._items)
        if after == "root":
            return 0
        for index, item in enumerate(self._items):
            if item.item_id == after:
                return index + 1
        raise Fault("item_not_found", f"There is no item '{after[:80]}' to stand behind.", param="previous_item_id")

    def remove(self, item: Item) -> None:
        self._items.remove(item)

    def older_than(self, at: Nanos) -> list[Item]:
        """Those that were over by then."""
        return [item for item in self._items if item.at <= at and item.status != "in_progress"]

    @property
    def last_id(self) -> str | None:
        return self._items[-1].item_id if self._items else None

    def turns(self, *, but: Iterable[Item] = ()) -> tuple[tuple[PastTurn, ...], str]:
        """(closed turns, words of the open one), as the thinker is told. `but`: items of a reply that lives."""
        return turns_of(item for item in self._items if item not in tuple(but))


def turns_of(items: Iterable[Item]) -> tuple[tuple[PastTurn, ...], str]:
    turns: list[PastTurn] = []
    said: list[str] = []
    for item in items:
        words = item.text()
        if not words:
            continue
        if not item.by_character:
            said.append(words)
        elif said or not turns:
            turns.append(PastTurn(" ".join(said), words))
            said = []
        else:
            last = turns[-1]
            turns[-1] = PastTurn(last.user, f"{last.reply} {words}".strip())
    return tuple(turns), " ".join(said)
