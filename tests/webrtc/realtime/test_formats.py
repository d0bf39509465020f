"""Audio of the wire, both ways."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from duplexd.errors import InputRefused
from duplexd.webrtc.realtime.formats import ALAW, PCM, ULAW, WireIn, WireOut, alaw_encode, ulaw_encode


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def tone(rate: int = 24_000) -> np.ndarray:
    return np.rint(8000 * np.sin(2 * np.pi * 500 * np.arange(rate) / rate)).astype(np.int16)


@pytest.mark.parametrize("name", [PCM, ULAW, ALAW])
def test_what_goes_out_comes_back_as_the_same_sound(name: str) -> None:
    data = WireOut(name, rate=24_000).push(tone())
    heard, count = WireIn(name).push(b64(data))
    level = np.sqrt((heard[200:-200].astype(float) ** 2).mean())

    assert count == len(data)
    assert abs(len(heard) - 16_000) <= 2
    assert 0.97 < level / (8000 / np.sqrt(2)) < 1.03


def test_half_a_sample_waits_for_its_other_half() -> None:
    """4801 bytes at a time (T-GL-07)."""
    data = tone().tobytes()
    pieces = WireIn(PCM)
    heard = [pieces.push(b64(data[at : at + 4801]))[0] for at in range(0, len(data), 4801)]

    assert np.array_equal(np.concatenate(heard), WireIn(PCM).push(b64(data))[0])


@pytest.mark.parametrize("text", ["not base64!", "AAA", "\u00e4\u00f6", "AA==AA"])
def test_what_is_no_base64_is_refused_and_changes_nothing(text: str) -> None:
    wire = WireIn(PCM)
    with pytest.raises(InputRefused, match="base64"):
        wire.push(text)

    assert len(wire.push(b64(tone().tobytes()))[0]) == 16_000


#: Values of ITU-T G.711, tables 1a and 2a, in 16 bits.
@pytest.mark.parametrize(
    ("encode", "sample", "code"),
    [
        (ulaw_encode, 0, 0xFF),
        (ulaw_encode, 32_767, 0x80),
        (ulaw_encode, -32_768, 0x00),
        (ulaw_encode, 1000, 0xCE),
        (alaw_encode, 0, 0xD5),
        (alaw_encode, 32_767, 0xAA),
        (alaw_encode, -32_768, 0x2A),
        (alaw_encode, 1000, 0xFA),
    ],
)
def test_g711_codes_are_those_of_the_standard(encode: object, sample: int, code: int) -> None:
    assert callable(encode)
    assert int(encode(np.array([sample], np.int16))[0]) == code


@pytest.mark.parametrize("name", [ULAW, ALAW])
def test_every_g711_code_survives_a_round_trip(name: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    sound = WireIn(name)._samples(codes.tobytes())
    encoded = ulaw_encode(sound) if name == ULAW else alaw_encode(sound)
    back = WireIn(name)._samples(encoded.tobytes())

    assert np.array_equal(back, sound)
