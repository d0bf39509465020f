"""The codec, both ways: exact timestamps out, and nothing a network can deliver raises on the way in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplexd.units import Ticks
from duplexd.webrtc.opus import (
    TIME_BASE,
    VOICE_FRAME,
    VOICE_FRAME_TICKS,
    OpusDecoder,
    OpusEncoder,
    Pcm,
    _library,
    packet_ticks,
)

EAR_FRAME = 320


def voiced(frames: int) -> Pcm:
    """Something like babble: syllables of 125 ms, each with its own gliding pitch, so that Opus takes it for speech."""
    time = np.arange(frames * VOICE_FRAME) / 24_000
    syllable = (time * 8).astype(int)
    pitch = 110 + 50 * (syllable * 7 % 5) / 4 + 30 * (time * 8 - syllable)
    phase = 2 * np.pi * np.cumsum(pitch) / 24_000
    wave = sum(np.sin(phase * k) / k for k in range(1, 20))
    return np.asarray(7000 * wave * np.sin(np.pi * (time * 8 - syllable)), np.int16)


def encoded(pcm: Pcm) -> list[bytes]:
    encoder = OpusEncoder()
    frames = pcm.reshape(-1, VOICE_FRAME)
    return [bytes(encoder.encode(frame, pts=Ticks(n * VOICE_FRAME_TICKS))) for n, frame in enumerate(frames)]


PACKETS = encoded(voiced(30))


def test_every_frame_becomes_one_packet_with_exactly_its_pts() -> None:
    """After a stall pts jumps; the packet carries the jump, and the codec goes on as if nothing had happened."""
    encoder = OpusEncoder()
    places = [0, 960, 1920, 480_000, 480_960]

    packets = [encoder.encode(np.zeros(VOICE_FRAME, np.int16), pts=Ticks(pts)) for pts in places]

    assert places == [packet.pts for packet in packets]
    assert all(packet.time_base == TIME_BASE and packet_ticks(bytes(packet)) == 960 for packet in packets)


@pytest.mark.parametrize(
    "frame",
    [np.zeros(VOICE_FRAME - 1, np.int16), np.zeros(VOICE_FRAME, np.float32), np.zeros((1, VOICE_FRAME), np.int16)],
    ids=["short", "float", "two-dimensional"],
)
def test_a_frame_of_another_shape_is_refused(frame: Pcm) -> None:
    with pytest.raises(ValueError, match="voice frame"):
        OpusEncoder().encode(frame, pts=Ticks(0))


def test_speech_takes_about_its_bit_rate() -> None:
    bits = 8 * sum(map(len, PACKETS)) / (len(PACKETS) * 0.02)

    assert 16_000 < bits < 48_000


def test_what_is_encoded_is_heard() -> None:
    """A tone keeps its level and its pitch through 32 kbit/s and the change from 24 to 16 kHz."""
    time = np.arange(40 * VOICE_FRAME) / 24_000
    sent = np.asarray(8000 * np.sin(2 * np.pi * 440 * time), np.int16)
    decoder = OpusDecoder()
    pcm = np.concatenate([_not_none(decoder.decode(packet)) for packet in encoded(sent)])
    tail = pcm[-16_000 // 2 :].astype(np.float64)
    peak = np.argmax(np.abs(np.fft.rfft(tail * np.hanning(len(tail))))) * 16_000 / len(tail)

    assert len(pcm) == EAR_FRAME * 40
    assert abs(peak - 440) < 3
    assert 0.9 < tail.std() / sent.std() < 1.1


def test_redundancy_mends_better_than_concealment() -> None:
    """Packets are lost one at a time inside changing speech; mended frames come closer to the truth."""
    errors = {"fec": 0.0, "plc": 0.0}
    mendable = [n for n in range(8, 28) if OpusDecoder().has_redundancy(PACKETS[n + 1])]
    for lost in mendable:
        truth = _decode_with(lost, how="none")
        for how in errors:
            errors[how] += float(np.square(_decode_with(lost, how=how) - truth).sum())

    assert len(mendable) > 10
    assert errors["fec"] < 0.3 * errors["plc"]


def _decode_with(lost: int, *, how: str) -> np.ndarray:
    decoder = OpusDecoder()
    for packet in PACKETS[:lost]:
        decoder.decode(packet)
    if how == "fec":
        return decoder.recover(PACKETS[lost + 1], ticks=960).astype(np.float64)
    if how == "plc":
        return decoder.conceal(ticks=960).astype(np.float64)
    pcm = decoder.decode(PACKETS[lost])
    assert pcm is not None
    return pcm.astype(np.float64)


def test_speech_carries_redundancy_and_nothing_else_claims_to() -> None:
    decoder = OpusDecoder()

    assert sum(decoder.has_redundancy(packet) for packet in PACKETS) > len(PACKETS) // 2
    assert not decoder.has_redundancy(PACKETS[0])
    assert not decoder.has_redundancy(b"")


@pytest.mark.parametrize("payload", [b"", b"\x03", b"\x4f\x00", b"\xff" * 9], ids=["empty", "code3", "dense", "ff"])
def test_damage_is_counted_and_forgotten(payload: bytes) -> None:
    """aiortc#1349: an empty payload ended the decoder thread, and the person was not heard again."""
    decoder = OpusDecoder()
    decoder.decode(PACKETS[0])
    damaged = decoder.decode(payload)
    after = decoder.decode(PACKETS[1])

    assert damaged is None
    assert decoder.damaged_count == 1
    assert after is not None
    assert len(after) == EAR_FRAME


def test_a_packet_of_one_byte_is_a_frame_of_comfort() -> None:
    """DTX: a table-of-contents byte and nothing else is a legal, silent frame (RFC 6716 §3.2.1)."""
    pcm = OpusDecoder().decode(b"\x48")

    assert pcm is not None
    assert len(pcm) == packet_ticks(b"\x48") // 3


def test_after_a_restart_nothing_of_the_past_is_left() -> None:
    used, fresh = OpusDecoder(), OpusDecoder()
    for packet in PACKETS[:10]:
        used.decode(packet)
    used.restart()

    assert np.array_equal(_not_none(used.decode(PACKETS[20])), _not_none(fresh.decode(PACKETS[20])))


def _not_none(pcm: Pcm | None) -> Pcm:
    assert pcm is not None
    return pcm


@given(st.binary(max_size=60))
def test_packet_length_agrees_with_libopus(payload: bytes) -> None:
    """The receive path plans the timeline by our reading of the first two bytes; libopus fills it."""
    library = _library()
    expected = library.opus_packet_get_nb_samples(payload, len(payload), 48_000) if payload else -1

    assert packet_ticks(payload) == max(0, expected)


@given(st.lists(st.binary(max_size=80), max_size=6), st.sampled_from([120, 480, 960, 2880, 5760]))
def test_garbage_never_raises_and_lasts_as_long_as_it_says(payloads: list[bytes], ticks: int) -> None:
    decoder = OpusDecoder()
    for payload in payloads:
        pcm = decoder.decode(payload)
        assert pcm is None or len(pcm) * 3 == packet_ticks(payload)
        assert len(decoder.recover(payload, ticks=ticks)) * 3 == ticks
        assert len(decoder.conceal(ticks=ticks)) * 3 == ticks
