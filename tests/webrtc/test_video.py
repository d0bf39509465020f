"""The face: on the clock of the voice, within its bitrate, and a picture somebody could look at."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from aiortc.codecs import vpx

from duplexd.errors import ConfigError
from duplexd.units import NANOS_PER_MS, Ticks
from duplexd.webrtc import video
from duplexd.webrtc.tracks import VoiceTrack
from duplexd.webrtc.video import PORTRAIT_SIDE, PortraitTrack, bound_vp8_bitrate, portrait, still
from tests.webrtc.test_tracks import ManualClock, silence


def take(track: PortraitTrack, count: int) -> list[Any]:
    async def run() -> list[Any]:
        return [await track.recv() for _ in range(count)]

    return asyncio.run(run())


def test_frames_carry_the_voice_clock_in_video_units() -> None:
    track = PortraitTrack(ManualClock(), still(portrait(64)), fps=5)
    pictures = take(track, 3)

    assert [picture.pts for picture in pictures] == [0, 18_000, 36_000]
    assert [picture.pts * picture.time_base for picture in pictures] == pytest.approx([0, 0.2, 0.4])


def test_a_stalled_face_skips_and_never_catches_up() -> None:
    media_clock = ManualClock()
    track = PortraitTrack(media_clock, still(portrait(64)), fps=10)
    take(track, 2)
    media_clock.stall_ns = 1000 * NANOS_PER_MS
    take(track, 1)
    stalled = media_clock.time
    take(track, 2)

    assert media_clock.time > stalled
    assert track.skipped_count == 9


def test_voice_and_face_share_an_origin() -> None:
    """Whoever begins second is placed on the clock of whoever began first: equal pts are equal moments."""
    media_clock = ManualClock()
    voice, face = VoiceTrack(media_clock, silence), PortraitTrack(media_clock, still(portrait(64)), fps=5)

    async def run() -> int:
        for _ in range(11):
            packet = await voice.recv()
        await face.recv()
        picture = await face.recv()
        return int(packet.pts) - int(picture.pts) * 48 // 90

    origin = media_clock.time

    assert asyncio.run(run()) == 0
    assert media_clock.origin == origin
    assert media_clock.time == origin + 200 * NANOS_PER_MS


@pytest.mark.parametrize("fps", [0, 7, -1])
def test_a_frame_rate_that_is_no_whole_period_is_refused(fps: int) -> None:
    with pytest.raises(ConfigError, match="6000"):
        PortraitTrack(ManualClock(), still(portrait(64)), fps=fps)


def test_vp8_heeds_our_bitrates() -> None:
    """If this fails, aiortc has changed: the face would take 250-1500 kbit/s from the voice on a narrow line."""
    bound_vp8_bitrate()
    encoder = vpx.Vp8Encoder()
    assert encoder.target_bitrate == video.VP8_BITRATE_DEFAULT
    encoder.target_bitrate = 10
    assert encoder.target_bitrate == video.VP8_BITRATE_MIN
    encoder.target_bitrate = 10**9

    assert encoder.target_bitrate == video.VP8_BITRATE_MAX


def test_an_aiortc_that_ignores_the_bounds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn:
        target_bitrate = 500_000

    monkeypatch.setattr(vpx, "Vp8Encoder", Stubborn)

    with pytest.raises(ConfigError, match="500000"):
        bound_vp8_bitrate()


def test_the_portrait_is_a_face_in_the_light() -> None:
    """Not a flat card: a bright face in the middle, dark corners, skin redder than the background."""
    picture = portrait().astype(int)
    middle = picture[
        PORTRAIT_SIDE * 40 // 100 : PORTRAIT_SIDE * 60 // 100, PORTRAIT_SIDE * 4 // 10 : PORTRAIT_SIDE * 6 // 10
    ]
    corner = picture[: PORTRAIT_SIDE // 10, -PORTRAIT_SIDE // 10 :]

    assert picture.shape == (PORTRAIT_SIDE, PORTRAIT_SIDE, 3)
    assert middle.mean() > 3 * corner.mean()
    assert middle[..., 0].mean() > 1.2 * middle[..., 2].mean()
    assert corner[..., 2].mean() > corner[..., 0].mean()
    assert np.array_equal(portrait(), portrait())


def test_each_frame_is_an_object_of_its_own() -> None:
    """The encoder marks frames on another thread while the track stamps the next one."""
    frame = still(portrait(64))
    first, second = frame(Ticks(0)), frame(Ticks(0))
    first.pts = 7

    assert second.pts is None
    assert (first.width, first.height, first.format.name) == (64, 64, "yuv420p")
