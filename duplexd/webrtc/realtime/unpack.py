"""Large events of a socket, and large recordings in a request, taken apart in pieces, between which everybody else has
their turn.

1. To undo the base64 of 15 MiB of sound at once takes 0.18 s, in which no session's voice leaves. In pieces of `PIECE`
   the longest that one event holds up the loop is the 20 ms that its JSON takes.
2. An event is unpacked whole before any of it is taken: what is wrong with its end leaves nothing of its beginning.
3. A socket's events are taken one after the other; nothing of it overtakes one that is being unpacked.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Iterator
from typing import Any

import msgspec

LARGE = 256 * 1024  #: characters; what is smaller is undone at once, in 2 ms
PIECE = 256 * 1024  #: characters of base64 undone at a time, whole groups of 4
PART_BYTES = 64 * 1024
NOT_BASE64 = "="  #: stands in for sound that is not base64: whoever takes the event says what is wrong with it
APPENDS = ("input_audio_buffer.append", "session.input_audio.append")


async def unpack(text: str, *, longest: int) -> str | dict[str, Any]:
    """The event of a frame, `audio` as bytes, if it is a large one that brings sound; else what came.

    Args:    longest: characters of an event that is taken. What is longer is left unread for whoever refuses it.
    """
    if len(text) < LARGE:
        return text
    event = event_of(text, longest=longest)
    if event is None:
        return text
    if event.get("type") in APPENDS and isinstance(event.get("audio"), str):
        await asyncio.sleep(0)
        event["audio"] = await undone(event["audio"])
    return event


async def undone(audio: str) -> bytes | str:
    """The bytes of base64, undone in pieces; `NOT_BASE64` where it is none."""
    pieces = []
    try:
        for start in range(0, len(audio), PIECE):
            piece = audio[start : start + PIECE]
            if piece.endswith("=") and start + PIECE < len(audio):
                return NOT_BASE64  # Padding stands at the end of the whole.
            pieces.append(base64.b64decode(piece, validate=True))
            await asyncio.sleep(0)
    except (binascii.Error, ValueError):
        return NOT_BASE64
    return b"".join(pieces)


def event_of(text: str | bytes | dict[str, Any], *, longest: int) -> dict[str, Any] | None:
    """The event of a text, or that was unpacked already; None when it is too long or no object of JSON."""
    if isinstance(text, dict):
        return text
    if len(text) > longest:
        return None
    try:
        event = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None
    return event if isinstance(event, dict) else None


def parts(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One unpacked event as several, each with at most `PART_BYTES` of its sound."""
    audio = event.get("audio")
    if not isinstance(audio, bytes):
        yield event
        return
    for start in range(0, len(audio), PART_BYTES):
        yield {**event, "audio": audio[start : start + PART_BYTES]}
