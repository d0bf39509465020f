"""Viewers of a session: what each is sent, and what is lost when one does not take it."""

from __future__ import annotations

import asyncio
import fractions
from collections.abc import Callable
from typing import Any, cast

import av
import pytest

from duplexd.webrtc.audience import (
    FACE_QUEUED_MAX,
    VIEWERS_MAX,
    VOICE_QUEUED_MAX,
    Audience,
    AudienceFull,
    Relay,
    RelayFace,
    RelayVoice,
)
from duplexd.webrtc.tracks import MediaClock, VoiceTrack
from duplexd.webrtc.video import VideoCounts, VideoTrack


class Source:
    """A track that makes packets when it is told to."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.on_packet: Callable[..., None] | None = None
        self.keys_wanted = 0
        self.counts = VideoCounts()
        self.stopped = False

    def want_keyframe(self) -> None:
        self.keys_wanted += 1
        self.counts.keyframes += 1

    async def recv(self) -> None:
        await asyncio.Event().wait()

    def stop(self) -> None:
        self.stopped = True

    def make(self, number: int, *rest: Any) -> None:
        if self.on_packet is not None:
            self.on_packet(packet(number), *rest)


def packet(number: int) -> av.Packet:
    made = av.Packet(bytes([number]))
    made.pts, made.time_base = number, fractions.Fraction(1, 48_000)
    return made


def join(stage: Stage, *, face: bool = True) -> Relay:
    """A viewer whose media path is up."""
    relay = stage.audience.join()
    relay.voice.begin()
    if face:
        relay.face.begin()
    return relay


async def taken(track: RelayVoice | RelayFace) -> list[int]:
    numbers = []
    while track._queue:
        numbers.append(bytes(await track.recv())[0])
    return numbers


class Stage:
    """A session with a voice, and a face if its client is sent one."""

    def __init__(self, *, face: bool = True) -> None:
        self.voice, self.face = Source("audio"), Source("video") if face else None
        self.made: list[Source] = []
        self.audience = Audience(
            clock=MediaClock(),
            voice=cast(VoiceTrack, self.voice),
            face=cast(VideoTrack, self.face),
            make_face=self._make,
        )

    def _make(self, clock: MediaClock) -> VideoTrack:
        self.made.append(Source("video"))
        return cast(VideoTrack, self.made[-1])


def test_all_viewers_get_the_same_packets_from_the_moment_they_come() -> None:
    async def story() -> None:
        stage = Stage()
        first = join(stage)
        stage.voice.make(1)
        second = join(stage)
        stage.voice.make(2)
        assert await taken(first.voice) == [1, 2]
        assert await taken(second.voice) == [2]
        stage.audience.part(first)
        stage.voice.make(3)
        assert await taken(first.voice) == []
        assert await taken(second.voice) == [3]

    asyncio.run(story())


def test_a_picture_begins_with_a_key_frame_which_is_asked_for() -> None:
    async def story() -> None:
        stage = Stage()
        assert stage.face is not None
        relay = join(stage)
        assert stage.face.keys_wanted == 1
        for number, key in ((1, False), (2, True), (3, False)):
            stage.face.make(number, key)
        assert await taken(relay.face) == [2, 3]

    asyncio.run(story())


def test_who_does_not_take_loses_the_oldest_sound_and_pictures_up_to_the_next_key_frame() -> None:
    async def story() -> None:
        stage = Stage()
        assert stage.face is not None
        relay = join(stage)
        for number in range(VOICE_QUEUED_MAX + 3):
            stage.voice.make(number)
        for number in range(FACE_QUEUED_MAX + 2):
            stage.face.make(number, number == 0)
        stage.face.make(100, True)
        assert await taken(relay.voice) == list(range(3, VOICE_QUEUED_MAX + 3))
        assert await taken(relay.face) == [100]
        assert stage.face.keys_wanted == 2

    asyncio.run(story())


def test_a_face_for_viewers_alone_lives_as_long_as_one_of_them() -> None:
    async def story() -> None:
        stage = Stage(face=False)
        first, second = join(stage), join(stage)
        assert len(stage.made) == 1
        stage.made[0].make(1, True)
        assert await taken(second.face) == [1]
        stage.audience.part(first)
        assert not stage.made[0].stopped
        stage.audience.part(second)
        assert stage.made[0].stopped
        third = join(stage)
        assert len(stage.made) == 2
        stage.audience.close("over")
        stage.audience.part(third)
        assert stage.made[1].stopped

    asyncio.run(story())


def test_before_its_path_is_up_a_viewer_keeps_no_packet_and_asks_for_no_key_frame() -> None:
    """A queue that nobody empties yet would ask for a key frame every half second, for everybody."""

    async def story() -> None:
        stage = Stage()
        assert stage.face is not None
        relay = stage.audience.join()
        for number in range(4 * FACE_QUEUED_MAX):
            stage.voice.make(number)
            stage.face.make(number, number == 0)
        assert stage.face.keys_wanted == 0
        relay.voice.begin()
        relay.face.begin()
        stage.voice.make(101)
        stage.face.make(102, False)
        stage.face.make(103, True)
        assert await taken(relay.voice) == [101]
        assert await taken(relay.face) == [103]
        assert stage.face.keys_wanted == 1

    asyncio.run(story())


def test_who_takes_the_voice_alone_has_no_face_made() -> None:
    async def story() -> None:
        stage = Stage(face=False)
        listener = join(stage, face=False)
        assert (stage.made, stage.audience.sees, stage.audience.count) == ([], False, 1)
        viewer = join(stage)
        assert stage.audience.sees
        stage.audience.part(viewer)
        assert stage.made[0].stopped
        stage.voice.make(7)
        assert await taken(listener.voice) == [7]

    asyncio.run(story())


def test_what_faces_for_viewers_counted_is_kept_when_they_go() -> None:
    async def story() -> None:
        stage = Stage(face=False)
        for seen in (1, 2, 3):
            viewer = join(stage)
            assert stage.audience.face_counts()["keyframes"] == seen
            stage.audience.part(viewer)
            assert stage.audience.face_counts()["keyframes"] == seen
        stage.audience.close("over")
        assert stage.audience.face_counts()["keyframes"] == 3

    asyncio.run(story())


def test_a_session_that_ends_while_a_viewer_connects_makes_no_face() -> None:
    async def story() -> None:
        stage = Stage(face=False)
        relay = stage.audience.join()
        stage.audience.close("over")
        relay.face.begin()
        assert stage.made == []

    asyncio.run(story())


def test_viewers_are_bounded_and_end_with_the_session() -> None:
    async def story() -> None:
        stage = Stage()
        ended: list[str] = []
        for _ in range(VIEWERS_MAX):
            stage.audience.bind(stage.audience.join(), ended.append)
        with pytest.raises(AudienceFull, match="8 people"):
            stage.audience.join()
        stage.audience.close("the person left")
        assert ended == ["the person left"] * VIEWERS_MAX
        assert (stage.audience.count, stage.voice.on_packet) == (0, None)

    asyncio.run(story())
