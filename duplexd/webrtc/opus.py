"""Opus, both ways, on the loop: 20 ms cost 0.2 ms to encode and 0.05 ms to decode, less than handing them to a thread.

1. Out: 24 kHz mono through an encoder of our own. aiortc's re-bases timestamps, swallows gaps and sends no redundancy.
2. Both ways libopus itself through ctypes: libav offers neither its error correction nor its concealment, and keeps two
   threads for every encoder (for a resampler nobody asked for). It is the library inside the `av` wheel, so that
   nothing is to be installed.
3. What comes from the network never raises: a damaged packet is counted, and the caller conceals it.
"""

from __future__ import annotations

import ctypes
import fractions
import functools
import weakref
from pathlib import Path
from typing import TypeAlias

import av
import numpy as np
from numpy.typing import NDArray

from duplexd.errors import ConfigError
from duplexd.units import TICKS_PER_MS, TICKS_PER_SECOND, Ticks

Pcm: TypeAlias = NDArray[np.int16]

VOICE_RATE = 24_000  #: what playout gives
VOICE_FRAME = 480  #: samples of one packet at VOICE_RATE
VOICE_FRAME_TICKS = Ticks(20 * TICKS_PER_MS)
EAR_RATE = 16_000  #: what listening takes
TICKS_PER_EAR_SAMPLE = TICKS_PER_SECOND // EAR_RATE
PACKET_TICKS_MAX = 120 * TICKS_PER_MS  #: RFC 6716 §3.2.5
CONCEAL_QUANTUM = 120  #: ticks, 2.5 ms: libopus conceals in multiples of it
TIME_BASE = fractions.Fraction(1, TICKS_PER_SECOND)

_OPUS_RESET_STATE = 4028  # opus_defines.h
_OPUS_APPLICATION_VOIP = 2048
_OPUS_SET_BITRATE = 4002
_OPUS_SET_INBAND_FEC = 4012
_OPUS_SET_PACKET_LOSS_PERC = 4014
_PACKET_BYTES_MAX = 1275  # RFC 6716 §3.2.1: the longest frame
_SILK_TICKS = (480, 960, 1920, 2880)
_HYBRID_TICKS = (480, 960)
_CELT_TICKS = (120, 240, 480, 960)


def packet_ticks(payload: bytes) -> int:
    """How long a packet plays, from its first two bytes; 0 if no decoder would take it.    Source: RFC 6716 §3.1"""
    if not payload:
        return 0
    config, code = payload[0] >> 3, payload[0] & 3
    frames = _frame_count(payload, code=code)
    ticks = frames * _frame_ticks(config)
    return ticks if ticks <= PACKET_TICKS_MAX else 0


def _frame_count(payload: bytes, *, code: int) -> int:
    if code == 0:
        return 1
    if code < 3:
        return 2
    return payload[1] & 0x3F if len(payload) > 1 else 0


def _frame_ticks(config: int) -> int:
    if config < 12:
        return _SILK_TICKS[config & 3]
    if config < 16:
        return _HYBRID_TICKS[config & 1]
    return _CELT_TICKS[config & 3]


class OpusEncoder:
    """24 kHz mono int16 in frames of 20 ms -> one packet each, tuned for a voice over a lossy line.

    A sample is heard 6.5 ms (312 ticks) after its place in the packet: the encoder's look-ahead.
    """

    def __init__(self, *, bitrate: int = 32_000, loss_percent: int = 15) -> None:
        self._opus = _library()
        error = ctypes.c_int()
        self._state = self._opus.opus_encoder_create(VOICE_RATE, 1, _OPUS_APPLICATION_VOIP, ctypes.byref(error))
        if not self._state:
            raise ConfigError(f"libopus makes no encoder at {VOICE_RATE} Hz (error {error.value}).")
        self._free = weakref.finalize(self, self._opus.opus_encoder_destroy, self._state)
        self._packet = ctypes.create_string_buffer(_PACKET_BYTES_MAX)
        settings = {
            _OPUS_SET_BITRATE: bitrate,
            _OPUS_SET_INBAND_FEC: 1,
            _OPUS_SET_PACKET_LOSS_PERC: loss_percent,
        }
        for request, value in settings.items():
            if self._opus.opus_encoder_ctl(self._state, request, value) != 0:
                raise ConfigError(f"libopus refuses setting {request} = {value}.")

    def encode(self, pcm: Pcm, *, pts: Ticks) -> av.Packet:
        """One frame, int16 (480,), to one packet whose pts is exactly `pts` in 1/48000 s.

        Raises ValueError for another shape or type: the packet would last longer or shorter than its place.
        """
        if pcm.shape != (VOICE_FRAME,) or pcm.dtype != np.int16:
            raise ValueError(f"a voice frame is int16 ({VOICE_FRAME},), not {pcm.dtype} {pcm.shape}")
        frame = np.ascontiguousarray(pcm)
        size = self._opus.opus_encode(self._state, frame.ctypes.data, VOICE_FRAME, self._packet, _PACKET_BYTES_MAX)
        if size < 0:
            raise ValueError(f"libopus cannot encode this frame (error {size})")
        packet = av.Packet(self._packet.raw[:size])
        packet.pts, packet.time_base = int(pts), TIME_BASE
        return packet

    def close(self) -> None:
        """Free libopus's state; an encoder that is not closed frees it when it is collected."""
        self._free()


class OpusDecoder:
    """Packets -> 16 kHz mono int16, with libopus's error correction and concealment. Never raises on what it is fed."""

    def __init__(self, *, rate: int = EAR_RATE) -> None:
        self._opus = _library()
        self._rate = rate
        self._pcm = np.zeros(rate * PACKET_TICKS_MAX // TICKS_PER_SECOND, np.int16)
        error = ctypes.c_int()
        self._state = self._opus.opus_decoder_create(rate, 1, ctypes.byref(error))
        if not self._state:
            raise ConfigError(f"libopus makes no decoder at {rate} Hz (error {error.value}).")
        self._free = weakref.finalize(self, self._opus.opus_decoder_destroy, self._state)
        self.damaged_count = 0  #: packets libopus refused

    def decode(self, payload: bytes) -> Pcm | None:
        """The packet's samples; None, and counted, if it is damaged."""
        count = self._run(payload, samples=len(self._pcm), fec=0) if payload else -1
        if count < 0:
            self.damaged_count += 1
            return None
        return self._pcm[:count].copy()

    def recover(self, payload: bytes, *, ticks: int) -> Pcm:
        """The `ticks` before a packet, from the redundancy inside it; concealed as far as there is none."""
        count = self._run(payload, samples=self._samples(ticks), fec=1)
        return self._pcm[:count].copy() if count >= 0 else self.conceal(ticks=ticks)

    def conceal(self, *, ticks: int) -> Pcm:
        """The last sound carried on and faded, `ticks` (a multiple of 2.5 ms, at most 120 ms) long."""
        samples = self._samples(ticks)
        count = self._run(None, samples=samples, fec=0)
        return self._pcm[:count].copy() if count >= 0 else np.zeros(samples, np.int16)

    def has_redundancy(self, payload: bytes) -> bool:
        """Whether the packet carries the one before it again (LBRR, RFC 6716 §4.2.4)."""
        return bool(payload) and self._opus.opus_packet_has_lbrr(payload, len(payload)) > 0

    def restart(self) -> None:
        """Forget the past: the next packet is from another encoder."""
        self._opus.opus_decoder_ctl(self._state, _OPUS_RESET_STATE)

    def close(self) -> None:
        """Free libopus's state; a decoder that is not closed frees it when it is collected."""
        self._free()

    def _samples(self, ticks: int) -> int:
        return ticks * self._rate // TICKS_PER_SECOND

    def _run(self, payload: bytes | None, *, samples: int, fec: int) -> int:
        size = len(payload) if payload is not None else 0
        count: int = self._opus.opus_decode(self._state, payload, size, self._pcm.ctypes.data, samples, fec)
        return count


@functools.cache
def _library() -> ctypes.PyDLL:
    """libopus of the `av` wheel. PyDLL keeps the GIL: giving it up for 50 us could cost a switch interval (5 ms)."""
    folder = Path(av.__file__).parent.parent / "av.libs"
    found = sorted(folder.glob("libopus-*.so*"))
    if not found:
        raise ConfigError(f"No libopus in {folder}: duplexd needs the binary wheel of av (pip install av==18.*).")
    opus = ctypes.PyDLL(str(found[0]))
    pointer, integer = ctypes.c_void_p, ctypes.c_int32
    opus.opus_encoder_create.restype = pointer
    opus.opus_encoder_create.argtypes = [integer, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
    opus.opus_encoder_destroy.restype = None
    opus.opus_encoder_destroy.argtypes = [pointer]
    opus.opus_encoder_ctl.restype = ctypes.c_int
    opus.opus_encoder_ctl.argtypes = [pointer, ctypes.c_int, integer]
    opus.opus_encode.restype = integer
    opus.opus_encode.argtypes = [pointer, pointer, ctypes.c_int, ctypes.c_char_p, integer]
    opus.opus_decoder_create.restype = pointer
    opus.opus_decoder_create.argtypes = [integer, ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
    opus.opus_decoder_destroy.restype = None
    opus.opus_decoder_destroy.argtypes = [pointer]
    opus.opus_decoder_ctl.restype = ctypes.c_int
    opus.opus_decoder_ctl.argtypes = [pointer, ctypes.c_int]
    opus.opus_decode.restype = ctypes.c_int
    opus.opus_decode.argtypes = [pointer, ctypes.c_char_p, integer, pointer, ctypes.c_int, ctypes.c_int]
    opus.opus_packet_has_lbrr.restype = ctypes.c_int
    opus.opus_packet_has_lbrr.argtypes = [ctypes.c_char_p, integer]
    return opus
