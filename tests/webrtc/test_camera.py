"""The person's camera: five small frames a second at most, whatever is sent; and what is seen reaches the daemon."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from aiortc.mediastreams import VideoStreamTrack
from aiortc.rtp import RtpPacket
from hypothesis import given
from hypothesis import strategies as st

from duplexd.errors import ConfigError
from duplexd.media.person import PersonFinder, Place, Sighting
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos
from duplexd.webrtc.camera import (
    ASKED_EVERY,
    BURST,
    FRAME_BYTES_MAX,
    CameraCounts,
    CameraDoor,
    CameraReceiver,
    Size,
    _Assembly,
    install,
    key_frame_size,
)
from duplexd.webrtc.peer import Sight
from duplexd.webrtc.video import Still, Vp8Encoder, i420, portrait
from tests.media.faces import with_a_face
from tests.webrtc.test_peer import Host, session, until

KEY = bytes([0x10, 0, 0, 0x9D, 0x01, 0x2A, 64, 1, 240, 0])  # 320 x 240
HUGE = bytes([0x10, 0, 0, 0x9D, 0x01, 0x2A, 0, 5, 208, 2])  # 1280 x 720
DELTA = bytes([0x11, 0, 0, 1, 2, 3, 4, 5, 6, 7])
MS = NANOS_PER_MS


def taken(frames: list[tuple[bytes, int]], *, busy: bool = False) -> tuple[list[bool], CameraCounts]:
    """Which of these (frame, arrival in ms) a door takes."""
    door = CameraDoor(CameraCounts())
    return [door.takes(frame, Nanos(at * MS), busy=busy) for frame, at in frames], door.counts


def encoded(*pictures: np.ndarray[Any, np.dtype[np.uint8]]) -> list[bytes]:
    encoder, frames = Vp8Encoder(), []
    for index, grey in enumerate(pictures):
        planes = np.full((grey.shape[0] * 3 // 2, grey.shape[1]), 128, np.uint8)
        planes[: grey.shape[0]] = grey
        frames.append(encoder.encode(planes, bitrate=400_000, keyframe=False, at=index * 18_000))
    return frames


# The door -----------------------------------------------------------------------------------------------------------


def test_the_size_stands_in_a_key_frame() -> None:
    real = encoded(np.zeros((96, 128), np.uint8), np.zeros((96, 128), np.uint8))

    assert key_frame_size(KEY) == Size(320, 240)
    assert [key_frame_size(frame) for frame in real] == [Size(128, 96), None]
    assert key_frame_size(b"") is None


def test_five_frames_a_second_are_taken() -> None:
    found, counts = taken([(KEY if n == 0 else DELTA, 200 * n) for n in range(50)])

    assert all(found)
    assert counts.frames == 50


def test_nothing_is_taken_before_the_first_key_frame_or_behind_a_dropped_one() -> None:
    found, counts = taken([(DELTA, 0), (KEY, 200), *[(DELTA, 400)] * 4, (DELTA, 2000), (KEY, 2200), (DELTA, 2400)])

    assert found == [False, True, True, True, True, False, False, True, True]
    assert counts.dropped == 3


def test_a_frame_is_dropped_while_another_is_looked_at() -> None:
    found, counts = taken([(KEY, 0)], busy=True)

    assert found == [False]
    assert counts.dropped == 1


@pytest.mark.parametrize("frame", [HUGE, KEY + bytes(FRAME_BYTES_MAX)], ids=["pixels", "bytes"])
def test_a_large_picture_is_never_decoded(frame: bytes) -> None:
    found, counts = taken([(frame, 0), (DELTA, 200), (KEY, 400)])

    assert found == [False, False, True]
    assert counts.refused == 1


@given(st.lists(st.tuples(st.sampled_from([KEY, DELTA, HUGE]), st.integers(0, 300)), max_size=120))
def test_no_page_makes_us_decode_more_than_five_a_second(frames: list[tuple[bytes, int]]) -> None:
    at, arrivals = 0, []
    for frame, passed in frames:
        at += passed
        arrivals.append((frame, at))
    found, _ = taken(arrivals)
    times = [arrival for (_, arrival), taken_ in zip(arrivals, found, strict=True) if taken_]

    for first in range(len(times)):
        within = sum(times[first] <= time <= times[first] + 1000 for time in times)
        assert within <= BURST + 5


def test_a_key_frame_is_asked_for_at_most_every_two_seconds() -> None:
    door = CameraDoor(CameraCounts())
    asked = [at for at in range(0, 6000, 100) if door.asks_for_key_frame(Nanos(at * MS))]
    door.takes(KEY, Nanos(7 * NANOS_PER_SECOND), busy=False)

    assert asked == [0, 2000, 4000]
    assert ASKED_EVERY == 2 * NANOS_PER_SECOND
    assert not door.asks_for_key_frame(Nanos(9 * NANOS_PER_SECOND))


# The receiver -------------------------------------------------------------------------------------------------------


class Finder:
    """Finds somebody in bright pictures."""

    def find(self, grey: np.ndarray[Any, np.dtype[np.uint8]]) -> Place | None:
        return Place(0.0, 0.0) if grey.mean() > 100 else None


def looked(frames: list[bytes], finder: Any) -> tuple[list[Sighting], CameraCounts]:
    async def run(pool: ThreadPoolExecutor) -> tuple[list[Sighting], CameraCounts]:
        told: list[Sighting] = []
        camera = CameraReceiver(told.append, finder=finder, pool=pool)
        camera.switch(on=True, now=Nanos(0))
        for index, frame in enumerate(frames):
            camera.take(frame, Nanos(index * 200 * MS))
            while camera._looking is not None:
                await asyncio.sleep(0)
        camera.close()
        return told, camera.counts

    with ThreadPoolExecutor(1) as pool:
        return asyncio.run(run(pool))


def test_a_person_in_the_picture_is_told() -> None:
    frames = encoded(*[np.full((96, 128), 200, np.uint8)] * 3)
    told, counts = looked(frames, Finder())

    assert told == [Sighting(True, Place(0.0, 0.0))]
    assert counts.decoded == 3


def test_damaged_frames_are_counted_and_the_next_key_frame_is_looked_at() -> None:
    good = encoded(np.full((96, 128), 200, np.uint8))[0]
    broken = good[:10] + bytes(3)
    told, counts = looked([broken, good, good], Finder())

    assert (counts.decoded, counts.damaged) == (2, 1)
    assert told == [Sighting(True, Place(0.0, 0.0))]


def test_nothing_is_looked_at_before_the_camera_is_on_nor_kept_when_it_is_off() -> None:
    """The decoder remembers the last picture: with the camera off it goes too (a delta frame would bring it back)."""
    frames = encoded(*[np.full((96, 128), 200, np.uint8)] * 3)

    async def run(pool: ThreadPoolExecutor) -> None:
        told: list[Sighting] = []
        camera = CameraReceiver(told.append, finder=Finder(), pool=pool)
        camera.take(frames[0], Nanos(0))
        assert camera._looking is None
        assert not camera.asks_for_key_frame(Nanos(0))

        camera.switch(on=True, now=Nanos(0))
        for frame in frames[:2]:
            camera.take(frame, Nanos(200 * MS))
            while camera._looking is not None:
                await asyncio.sleep(0)
        assert told == [Sighting(True, Place(0.0, 0.0))]

        camera.switch(on=False, now=Nanos(400 * MS))
        pool.submit(int).result()
        assert camera._decoder is None
        assert not told[-1].present
        camera.switch(on=True, now=Nanos(600 * MS))
        camera.take(frames[2], Nanos(600 * MS))
        assert camera._looking is None, "a difference to a picture that is gone"
        assert camera.asks_for_key_frame(Nanos(600 * MS))

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(run(pool))


def test_a_line_that_loses_everything_is_asked_for_no_more_key_frames() -> None:
    """Packets whose numbers jump: each looks like a loss."""
    with ThreadPoolExecutor(1) as pool:
        camera = CameraReceiver(print, finder=Finder(), pool=pool)
        camera.switch(on=True, now=Nanos(0))
        assembly = _Assembly(camera)
        asked = 0
        for number in range(200):
            packet = RtpPacket(sequence_number=number * 1000 & 0xFFFF, timestamp=number * 6000)
            packet._data = DELTA
            asked += assembly.add(packet)[0]

    assert asked == 1


def test_an_unknown_aiortc_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"1\.16"):
        install(object(), CameraReceiver(print, finder=PersonFinder(), pool=ThreadPoolExecutor(1)))


class Webcam(VideoStreamTrack):  # type: ignore[misc]
    """Somebody to the right of the camera, at 15 frames a second."""

    def __init__(self, still: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        super().__init__()
        self._planes = np.full((still.shape[0] * 3 // 2, still.shape[1]), 128, np.uint8)
        self._planes[: still.shape[0]] = still
        self._count = 0

    async def recv(self) -> Any:
        await asyncio.sleep(1 / 15)
        frame = av.VideoFrame.from_ndarray(self._planes, format="yuv420p")
        self._count += 1
        frame.pts, frame.time_base = self._count * 6000, Fraction(1, 90_000)
        return frame


def test_a_camera_that_is_too_fast_is_looked_at_all_the_same_and_nothing_else_decodes_it() -> None:
    """Through a whole connection: 15 frames a second come, at most 5 are decoded, and the person is where they are."""
    told: list[Sighting] = []

    async def story(host: Host, page: Any) -> CameraCounts:
        await until(lambda: told and host.options["eye"].counts.dropped >= 5, seconds=15)
        counts: CameraCounts = host.options["eye"].counts
        return counts

    with ThreadPoolExecutor(1) as pool:
        eye = CameraReceiver(told.append, finder=PersonFinder(), pool=pool)
        eye.switch(on=True, now=Nanos(0))
        host = Host(sight=Sight(Still(i420(portrait())), pool, shown=True), eye=eye)
        counts = session(story, host=host, video=Webcam(with_a_face(320, 240, x=0.4)))

    assert "a=sendrecv" in host.answer_sdp[host.answer_sdp.index("m=video") :]
    assert told[0].present
    assert told[0].place.x == pytest.approx(0.4, abs=0.12)
    assert counts.decoded + counts.dropped <= counts.frames
