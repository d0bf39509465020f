"""Ogg Opus and WAV as somebody else's library reads them."""

from __future__ import annotations

import io
import wave

import av
import numpy as np
import pytest

from duplexd.webrtc.realtime.container import OggOpus, wav_header


@pytest.mark.parametrize("samples", [100, 480, 481, 24_000, 24_313, 34_560])
@pytest.mark.parametrize("piece", [333, 100_000])
def test_an_ogg_file_is_exactly_as_long_as_its_sound(samples: int, piece: int) -> None:
    sound = np.rint(8000 * np.sin(2 * np.pi * 500 * np.arange(samples) / 24_000)).astype(np.int16)
    ogg = OggOpus()
    data = ogg.begin() + b"".join(ogg.push(sound[at : at + piece]) for at in range(0, samples, piece)) + ogg.finish()
    with av.open(io.BytesIO(data)) as file:
        made = np.concatenate([frame.to_ndarray().reshape(-1) for frame in file.decode(audio=0)])

    assert len(made) == 2 * samples
    if samples > 20_000:
        middle = made[4800:-4800]
        assert 0.95 < np.sqrt((middle**2).mean()) / (8000 / 32_768 / np.sqrt(2)) < 1.05


def test_a_wav_file_says_its_length() -> None:
    data = np.arange(100, dtype="<i2").tobytes()
    with wave.open(io.BytesIO(wav_header(rate=24_000, data_bytes=len(data)) + data)) as file:
        assert (file.getframerate(), file.getnframes(), file.readframes(100)) == (24_000, 100, data)
