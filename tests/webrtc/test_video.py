"""The face: on the clock of the voice, encoded beside the loop, within its bitrate, and nothing twice as fast."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import av
import numpy as np
import pytest
from aiortc.codecs import vpx
from aiortc.mediastreams import MediaStreamError

from duplexd.errors import ConfigError
from duplexd.media.pictures import I420, PICTURE_FRAME, PICTURES_BEHIND, Picture
from duplexd.units import NANOS_PER_MS, Ticks
from duplexd.webrtc.tracks import VoiceTrack
from duplexd.webrtc.video import (
    FAULTS_MAX,
    PORTRAIT_SIDE,
    RateRule,
    Still,
    VideoTrack,
    Vp8Encoder,
    bitrates,
    i420,
    portrait,
)
from tests.webrtc.test_tracks import ManualClock, silence

SIDE = 64
PERIOD_NS = 40 * NANOS_PER_MS


@pytest.fixture(name="pool")
def _pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def grey(value: int) -> I420:
    planes = np.full((SIDE * 3 // 2, SIDE), 128, np.uint8)
    planes[:SIDE] = value
    return planes


def picture(frame: int) -> Picture:
    return Picture(0, Ticks(frame * PICTURE_FRAME), Ticks((frame + 1) * PICTURE_FRAME), grey(40 + frame % 180))


def moving(pts: Ticks) -> Picture:
    return picture(pts // PICTURE_FRAME)


def only(*frames: int) -> Callable[[Ticks], Picture | None]:
    """New pictures at these ticks, nothing at others."""
    return lambda pts: moving(pts) if pts // PICTURE_FRAME in frames else None


def shown(media_clock: ManualClock, look: Callable[[Ticks], Picture | None], pool: ThreadPoolExecutor) -> VideoTrack:
    track = VideoTrack(media_clock, look, pool=pool)
    track.show()
    return track


async def take(track: VideoTrack, count: int) -> list[Any]:
    return [await track.recv() for _ in range(count)]


def frames_of(packets: list[Any]) -> list[int]:
    return [packet.pts // 3600 for packet in packets]


def is_key(packet: Any) -> bool:
    return not bytes(packet)[0] & 1


def test_frames_carry_the_voice_clock_in_video_units(pool: ThreadPoolExecutor) -> None:
    media_clock = ManualClock()
    packets = asyncio.run(take(shown(media_clock, moving, pool), 3))
    assert media_clock.origin is not None

    assert [packet.pts for packet in packets] == [0, 3600, 7200]
    assert [packet.pts * packet.time_base for packet in packets] == pytest.approx([0, 0.04, 0.08])
    assert media_clock.time == media_clock.origin + PICTURES_BEHIND + 2 * PERIOD_NS


def test_what_is_sent_can_be_decoded_and_is_the_picture(pool: ThreadPoolExecutor) -> None:
    packets = asyncio.run(take(shown(ManualClock(), moving, pool), 5))
    decoder: Any = av.CodecContext.create("vp8", "r")
    seen = [frame.to_ndarray()[:SIDE].mean() for packet in packets for frame in decoder.decode(packet)]

    assert seen == pytest.approx([40, 41, 42, 43, 44], abs=1.5)
    assert [is_key(packet) for packet in packets] == [True, False, False, False, False]


def test_nothing_new_sends_nothing_but_one_frame_a_second(pool: ThreadPoolExecutor) -> None:
    track = shown(ManualClock(), only(0, 1, 60), pool)
    packets = asyncio.run(take(track, 5))

    assert frames_of(packets) == [0, 1, 26, 51, 60]
    assert track.counts.repeated == 2


def test_a_key_frame_is_sent_when_asked_for_and_not_faster_than_its_bound(pool: ThreadPoolExecutor) -> None:
    """PLI while nothing moves: the picture that is held comes again as a key frame, at the next tick."""

    async def story(track: VideoTrack) -> list[Any]:
        packets = await take(track, 2)
        track.want_keyframe()
        packets += await take(track, 1)
        track.want_keyframe()
        return packets + await take(track, 1)

    packets = asyncio.run(story(shown(ManualClock(), only(0, 20), pool)))

    assert frames_of(packets) == [0, 20, 21, 29]
    assert [is_key(packet) for packet in packets] == [True, False, True, True]


def test_a_stalled_face_skips_and_never_catches_up(pool: ThreadPoolExecutor) -> None:
    media_clock = ManualClock()
    track = shown(media_clock, moving, pool)

    async def story() -> list[Any]:
        packets = await take(track, 2)
        media_clock.stall_ns = 1000 * NANOS_PER_MS
        return packets + await take(track, 3)

    packets = asyncio.run(story())

    assert frames_of(packets) == [0, 1, 27, 28, 29]
    assert track.counts.skipped == 25


def test_a_frame_that_waited_keeps_its_own_moment(pool: ThreadPoolExecutor) -> None:
    """After a stall the newest picture is older than its tick: its timestamp says when it belongs."""
    media_clock = ManualClock()
    pictures = {0: picture(0), 5: picture(4)}
    track = shown(media_clock, lambda pts: pictures.get(pts // PICTURE_FRAME), pool)

    assert frames_of(asyncio.run(take(track, 2))) == [0, 4]


def test_a_hidden_track_asks_for_nothing_and_begins_again_with_a_key_frame(pool: ThreadPoolExecutor) -> None:
    asked: list[Ticks] = []

    def look(pts: Ticks) -> Picture:
        asked.append(pts)
        return moving(pts)

    media_clock = ManualClock()

    async def story() -> list[Any]:
        track = shown(media_clock, look, pool)
        packets = await take(track, 2)
        track.hide()
        waiting = asyncio.ensure_future(track.recv())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        media_clock.time += 3000 * NANOS_PER_MS
        track.show()
        return [*packets, await waiting]

    packets = asyncio.run(story())

    assert frames_of(packets) == [0, 1, 76]
    assert is_key(packets[2])
    assert [pts // PICTURE_FRAME for pts in asked] == [0, 1, 76]


def test_a_picture_that_cannot_be_made_is_held_and_one_that_never_can_ends_the_track(pool: ThreadPoolExecutor) -> None:
    broken = Picture(0, Ticks(0), PICTURE_FRAME, np.zeros((7, 64), np.uint8))
    failing = {2, 3}

    def look(pts: Ticks) -> Picture:
        frame = pts // PICTURE_FRAME
        if frame == 1:
            raise RuntimeError("no picture")
        return broken if frame in failing else moving(pts)

    track = shown(ManualClock(), look, pool)
    assert frames_of(asyncio.run(take(track, 2))) == [0, 4]
    assert track.counts.faults == 3

    failing |= set(range(5, 5 + FAULTS_MAX))
    with pytest.raises(MediaStreamError):
        asyncio.run(take(track, 1))


def test_voice_and_face_share_an_origin(pool: ThreadPoolExecutor) -> None:
    """Whoever begins second is placed on the clock of whoever began first: equal pts are equal moments,
    and a picture leaves a frame after the voice of its own.
    """
    media_clock = ManualClock()
    origin = media_clock.time
    voice = VoiceTrack(media_clock, silence)

    async def run() -> tuple[int, int]:
        for _ in range(11):
            packet = await voice.recv()
        face = shown(media_clock, moving, pool)
        frame = await face.recv()
        return int(packet.pts), int(frame.pts) * 48 // 90

    assert asyncio.run(run()) == (9600, 9600 - PICTURE_FRAME)
    assert media_clock.origin == origin


# Bits ---------------------------------------------------------------------------------------------------------------


def test_a_face_of_512_begins_at_300_and_ends_at_600_kbit() -> None:
    bounds = bitrates(512, 512)

    assert (bounds.lowest, bounds.first, bounds.highest) == (60_000, 300_000, 600_000)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param([5_000_000], 600_000, id="a wide line gives the most"),
        pytest.param([200_000], 140_000, id="a narrow one less than it carries: the voice comes first"),
        pytest.param([30_000], 60_000, id="never below the least"),
        pytest.param([200_000, 215_000, 230_000], 140_000, id="a small rise is not worth a key frame"),
        pytest.param([200_000, 250_000], 190_000, id="a large one is"),
        pytest.param([5_000_000, 630_000, 600_000], 600_000, id="a small fall does not hurt"),
        pytest.param([5_000_000, 500_000], 440_000, id="a large one does"),
    ],
)
def test_the_bitrate_follows_the_line(lines: list[int], expected: int) -> None:
    rule = RateRule(bitrates(512, 512))

    assert [rule.estimate(line) for line in lines][-1] == expected


class _Sender:
    """What the track needs of aiortc's sender."""

    def __init__(self) -> None:
        self._RTCRtpSender__encoder: Any = None
        self._RTCRtpSender__packet_count = 0

    def _send_keyframe(self) -> None:
        raise AssertionError("the track answers for key frames")


def test_the_receivers_estimate_reaches_the_encoder(pool: ThreadPoolExecutor) -> None:
    """REMB: aiortc sets it on what it takes for its encoder, and never replaces that. If this fails, it has changed."""
    sender = _Sender()
    track = shown(ManualClock(), moving, pool)
    track.attach(sender)
    encoder: Any = sender._RTCRtpSender__encoder
    encoder.target_bitrate = 100_000
    packets = asyncio.run(take(track, 1))
    payloads, timestamp = encoder.pack(packets[0])

    assert encoder.bitrate_of(512, 512) == 60_000
    assert timestamp == 0
    assert b"".join(vpx.vp8_depayload(payload) for payload in payloads) == bytes(packets[0])


def test_a_key_frame_request_reaches_the_track(pool: ThreadPoolExecutor) -> None:
    sender = _Sender()
    track = shown(ManualClock(), only(0), pool)
    track.attach(sender)

    async def story() -> list[Any]:
        packets = await take(track, 1)
        sender._send_keyframe()
        return packets + await take(track, 1)

    packets = asyncio.run(story())

    assert frames_of(packets) == [0, 8]
    assert all(is_key(packet) for packet in packets)


def test_an_aiortc_with_another_encoder_is_refused(pool: ThreadPoolExecutor) -> None:
    with pytest.raises(ConfigError, match=r"1\.16"):
        VideoTrack(ManualClock(), moving, pool=pool).attach(object())


@pytest.mark.parametrize("bitrate", [400_000, 800_000])
def test_the_encoder_keeps_its_bitrate(bitrate: int) -> None:
    """Noise that moves, the worst picture there is: what is sent stays near what the line was promised to carry."""
    rng = np.random.default_rng(3)
    encoder, sizes = Vp8Encoder(), []
    base = rng.integers(0, 255, (128 * 3 // 2, 128), np.uint8)
    for n in range(75):
        planes = np.ascontiguousarray(np.roll(base, n, axis=1))
        sizes.append(len(encoder.encode(planes, bitrate=bitrate, keyframe=False, at=n * 3600)))

    assert sum(sizes[25:]) * 8 / 2 < 1.2 * bitrate


# The portrait -------------------------------------------------------------------------------------------------------


def test_a_still_is_sent_once_and_repeated_each_second(pool: ThreadPoolExecutor) -> None:
    track = shown(ManualClock(), Still(i420(portrait(SIDE))), pool)

    assert frames_of(asyncio.run(take(track, 3))) == [0, 25, 50]


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
