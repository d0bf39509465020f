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
    RelayFace,
    RelayVoice,
)
from duplexd.webrtc.tracks import MediaClock, VoiceTrack
from duplexd.webrtc.video import VideoTrack


class Source:
    """A track that makes packets when it is told to."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.on_packet: Callable[..., None] | None = None
        self.keys_wanted = 0
        self.stopped = False

    def want_keyframe(self) -> None:
        self.keys_wanted += 1

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
        first = stage.audience.join()
        stage.voice.make(1)
        second = stage.audience.join()
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
        relay = stage.audience.join()
        assert stage.face.keys_wanted == 1
        for number, key in ((1, False), (2, True), (3, False)):
            stage.face.make(number, key)
        assert await taken(relay.face) == [2, 3]

    asyncio.run(story())


def test_who_does_not_take_loses_the_oldest_sound_and_pictures_up_to_the_next_key_frame() -> None:
    async def story() -> None:
        stage = Stage()
        assert stage.face is not None
        relay = stage.audience.join()
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
        first, second = stage.audience.join(), stage.audience.join()
        assert len(stage.made) == 1
        stage.made[0].make(1, True)
        assert await taken(second.face) == [1]
        stage.audience.part(first)
        assert not stage.made[0].stopped
        stage.audience.part(second)
        assert stage.made[0].stopped
        third = stage.audience.join()
        assert len(stage.made) == 2
        stage.audience.close("over")
        stage.audience.part(third)
        assert stage.made[1].stopped

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
