"""Containers for sound that is streamed: WAV whose length nobody knows yet, and Ogg Opus (RFC 3533, RFC 7845)."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from duplexd.units import Ticks
from duplexd.webrtc.opus import VOICE_FRAME, VOICE_RATE, OpusEncoder

UNKNOWN_BYTES = 0x7FFFFFFF  #: what streaming writers put where the length belongs
_PRESKIP = 312  #: look-ahead of the encoder, 48 kHz samples
_CRC_POLYNOMIAL = 0x04C11DB7
_PACKETS_PER_PAGE = 10  #: 200 ms
_FIRST, _LAST = 2, 4


def wav_header(*, rate: int, data_bytes: int = UNKNOWN_BYTES) -> bytes:
    """16-bit mono PCM."""
    size = min(0xFFFFFFFF, data_bytes + 36)
    head = struct.pack("<4sI4s4sIHHIIHH", b"RIFF", size, b"WAVE", b"fmt ", 16, 1, 1, rate, rate * 2, 2, 16)
    return head + struct.pack("<4sI", b"data", data_bytes)


class OggOpus:
    """int16 at 24 kHz in, pages of Ogg Opus out."""

    def __init__(self, *, serial: int = 1) -> None:
        self._encoder = OpusEncoder(bitrate=48_000, loss_percent=0)
        self._serial = serial
        self._sequence = 0
        self._rest = np.zeros(0, np.int16)
        self._packets: list[bytes] = []
        self._granule = 0  #: samples of 48 kHz that a decoder has made by the end of a page, pre-skip included

    def begin(self) -> bytes:
        head = struct.pack("<8sBBHIHB", b"OpusHead", 1, 1, _PRESKIP, VOICE_RATE, 0, 0)
        vendor = b"duplexd"
        tags = struct.pack("<8sI", b"OpusTags", len(vendor)) + vendor + struct.pack("<I", 0)
        return self._page([head], 0, _FIRST) + self._page([tags], 0, 0)

    def push(self, pcm: NDArray[np.int16]) -> bytes:
        """Whole pages that these samples complete; may be empty."""
        sound = np.concatenate([self._rest, pcm])
        whole = len(sound) // VOICE_FRAME * VOICE_FRAME
        self._rest = sound[whole:]
        out = b""
        for start in range(0, whole, VOICE_FRAME):
            self._encode(sound[start : start + VOICE_FRAME])
            if len(self._packets) == _PACKETS_PER_PAGE:
                out += self._flush(0)
        return out

    def finish(self) -> bytes:
        """The last page; its position cuts the padding off."""
        padding = (VOICE_FRAME - len(self._rest)) % VOICE_FRAME
        if 2 * padding < _PRESKIP:
            padding += VOICE_FRAME  # The encoder still holds the end of the sound.
        tail = np.concatenate([self._rest, np.zeros(padding, np.int16)])
        for start in range(0, len(tail), VOICE_FRAME):
            self._encode(tail[start : start + VOICE_FRAME])
        self._granule += _PRESKIP - 2 * padding  # Where the sound ends; what is decoded behind it is padding.
        page = self._flush(_LAST)
        self._encoder.close()
        return page

    def _encode(self, frame: NDArray[np.int16]) -> None:
        self._packets.append(bytes(self._encoder.encode(frame, pts=Ticks(0))))
        self._granule += 2 * VOICE_FRAME

    def _flush(self, flags: int) -> bytes:
        packets, self._packets = self._packets, []
        return self._page(packets, self._granule, flags)

    def _page(self, packets: list[bytes], granule: int, flags: int) -> bytes:
        lacing = b"".join(b"\xff" * (len(packet) // 255) + bytes([len(packet) % 255]) for packet in packets)
        head = struct.pack("<4sBBqIII", b"OggS", 0, flags, granule, self._serial, self._sequence, 0)
        page = head + bytes([len(lacing)]) + lacing + b"".join(packets)
        self._sequence += 1
        return page[:22] + struct.pack("<I", _crc(page)) + page[26:]


def _table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte << 24
        for _ in range(8):
            value = (value << 1) ^ (_CRC_POLYNOMIAL if value & 0x80000000 else 0)
        table.append(value & 0xFFFFFFFF)
    return table


_CRC = _table()


def _crc(data: bytes) -> int:
    value = 0
    for byte in data:
        value = ((value << 8) & 0xFFFFFFFF) ^ _CRC[(value >> 24) ^ byte]
    return value
