"""Function calls inside a reply: taken out of the text before it is spoken.

1. A call is what stands between `<tool_call>` and `</tool_call>`: JSON with `name` and `arguments`, as the templates of
   Qwen, Hermes and SmolLM have it.
2. Text that may be the beginning of the mark waits; everything else passes at once.
3. What stands between the marks and is no call is dropped and counted: read aloud it would be noise.
4. At the bound (`call_max` characters without an end) the call is dropped in the same way.
"""

from __future__ import annotations

import json

import msgspec

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALL_MAX = 8192


class Call(msgspec.Struct, frozen=True):
    """One function the model wants called."""

    name: str
    arguments: str  #: JSON, an object


class CallFilter:
    """Push text, get the text that is to be spoken; calls gather in `calls`."""

    def __init__(self, *, call_max: int = CALL_MAX) -> None:
        self.calls: list[Call] = []
        self.dropped = 0  #: stretches between marks that were no call
        self._call_max = call_max
        self._held = ""
        self._inside = False

    def push(self, piece: str) -> str:
        self._held += piece
        spoken = ""
        while True:
            mark = CLOSE if self._inside else OPEN
            before, found, after = self._held.partition(mark)
            if not found:
                break
            if self._inside:
                self._take(before)
            else:
                spoken += before
            self._held, self._inside = after, not self._inside
        if self._inside:
            self._bound()
            return spoken
        kept = _overlap(self._held, OPEN)
        spoken += self._held[: len(self._held) - kept]
        self._held = self._held[len(self._held) - kept :]
        return spoken

    def finish(self) -> str:
        """No more text comes: what was held back and is no call after all."""
        held, self._held = self._held, ""
        if self._inside:
            self._inside = False
            self._take(held)  # A model may stop without its closing mark; a whole call is a call.
            return ""
        return held

    def _bound(self) -> None:
        if len(self._held) > self._call_max:
            self.dropped += 1
            self._held, self._inside = "", False

    def _take(self, text: str) -> None:
        call = _call_of(text)
        if call is None:
            self.dropped += 1
        else:
            self.calls.append(call)


def _call_of(text: str) -> Call | None:
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        return None
    arguments = found.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return Call(found["name"], json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str, mark: str) -> int:
    """How many last characters of the text may be the beginning of the mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
