"""The channel and the shared slots between front end and engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from duplexd.channel import PACKET_BYTES_MAX, Channel, MediaShape, SharedMedia
from duplexd.errors import ChannelClosed, ChannelFull

SHAPE = MediaShape(in_slots=3, in_samples=512, out_slots=2, out_samples=1000)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = Channel.pair()
    pair = Channel(one, backlog_max=8), Channel(other, backlog_max=8)
    yield pair
    for end in pair:
        end.close()


def everything(channel: Channel) -> list[bytes]:
    """Receive until nothing is there."""
    packets: list[bytes] = []
    while more := channel.receive():
        packets += more
    return packets


def fill(channel: Channel) -> int:
    """Send numbered packets of 8 KiB until the bound; returns how many were taken."""
    for count in range(100_000):
        try:
            channel.send(count.to_bytes(4, "big") * 2048)
        except ChannelFull:
            return count
    raise AssertionError("the channel has no bound")


def test_packets_arrive_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    front, engine = ends
    sent = [bytes([number]) * (1 + 17 * number) for number in range(100)]
    for packet in sent:
        front.send(packet)

    assert everything(engine) == sent
    assert engine.receive() == []


def test_both_ends_send_and_receive(ends: tuple[Channel, Channel]) -> None:
    front, engine = ends
    front.send(b"fact")
    engine.send(b"news")

    assert (engine.receive(), front.receive()) == ([b"fact"], [b"news"])


def test_one_call_returns_a_bounded_number(ends: tuple[Channel, Channel]) -> None:
    front, engine = ends
    for number in range(5):
        front.send(bytes([number]))

    assert [len(engine.receive(packets_max=2)) for _ in range(3)] == [2, 2, 1]


def test_a_reader_that_sleeps_fills_the_backlog_and_then_the_sender_is_told(ends: tuple[Channel, Channel]) -> None:
    """At the bound nothing is lost or blocked: the packet is refused, and those before it arrive in order."""
    front, engine = ends
    count = fill(front)
    with pytest.raises(ChannelFull, match="8 packets wait"):
        front.send(b"one more")
    assert front.wants_write
    arrived: list[bytes] = []
    while front.wants_write:
        arrived += everything(engine)
        front.flush()
    arrived += everything(engine)

    assert [int.from_bytes(packet[:4], "big") for packet in arrived] == list(range(count))


def test_after_the_reader_woke_up_packets_are_taken_again(ends: tuple[Channel, Channel]) -> None:
    front, engine = ends
    fill(front)
    everything(engine)
    front.flush()
    front.send(b"on")

    assert everything(engine)[-1] == b"on"


def test_the_longest_packet_arrives_whole(ends: tuple[Channel, Channel]) -> None:
    front, engine = ends
    packet = os.urandom(PACKET_BYTES_MAX)
    front.send(packet)

    assert engine.receive() == [packet]


@pytest.mark.parametrize(("size", "says"), [(PACKET_BYTES_MAX + 1, "65537 bytes"), (0, "empty")], ids=["long", "empty"])
def test_a_packet_that_could_not_be_read_is_refused(ends: tuple[Channel, Channel], size: int, says: str) -> None:
    """A longer one would arrive cut off; an empty one looks like the end of the file to the other side."""
    front, engine = ends
    with pytest.raises((ChannelFull, ValueError), match=says):
        front.send(bytes(size))

    assert engine.receive() == []
    assert not front.wants_write


def test_the_end_comes_after_the_last_packet(ends: tuple[Channel, Channel]) -> None:
    """The other process says its last words and dies: they are read first, then ChannelClosed, for ever."""
    front, engine = ends
    for packet in (b"last", b"words"):
        front.send(packet)
    front.close()

    assert engine.receive() == [b"last", b"words"]
    for _ in range(2):
        with pytest.raises(ChannelClosed):
            engine.receive()


def test_sending_to_a_dead_process_says_so(ends: tuple[Channel, Channel]) -> None:
    front, engine = ends
    engine.close()
    with pytest.raises(ChannelClosed):
        front.send(b"anyone?")


# Shared memory ------------------------------------------------------------------------------------------------------


@pytest.fixture
def views() -> Iterator[tuple[SharedMedia, SharedMedia]]:
    """The same slots seen by the front end and, through its own descriptor, by the engine."""
    front = SharedMedia.create(SHAPE)
    engine = SharedMedia(SHAPE, os.dup(front.fd))
    yield front, engine
    for view in (front, engine):
        if os.path.exists(f"/proc/self/fd/{view.fd}"):
            view.close()


def noise(seed: int, samples: int) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    return np.random.default_rng(seed).integers(-32768, 32768, samples).astype(np.int16)


def test_both_sides_see_the_same_slots(views: tuple[SharedMedia, SharedMedia]) -> None:
    """Every slot holds its own sound: none lies over another, the last input slot not over the first output slot."""
    front, engine = views
    heard = [noise(slot, 512) for slot in range(3)]
    said = [noise(10 + slot, 1000) for slot in range(2)]
    for slot, pcm in enumerate(heard):
        front.write_input(slot, pcm)
    for slot, pcm in enumerate(said):
        engine.write(slot, pcm)

    assert [engine.read(slot, 512).tolist() for slot in range(3)] == [pcm.tolist() for pcm in heard]
    assert [front.read_output(slot, 1000).tolist() for slot in range(2)] == [pcm.tolist() for pcm in said]


def test_what_the_front_end_took_out_is_its_own(views: tuple[SharedMedia, SharedMedia]) -> None:
    """The slot is given back at once and written again; the copy does not change."""
    front, engine = views
    engine.write(0, noise(1, 800))
    taken = front.read_output(0, 800)
    engine.write(0, noise(2, 800))

    assert taken.tolist() == noise(1, 800).tolist()


def test_a_chunk_longer_than_its_slot_is_refused(views: tuple[SharedMedia, SharedMedia]) -> None:
    front, engine = views
    engine.write(1, noise(1, 1000))
    with pytest.raises(ValueError, match="1001 samples"):
        engine.write(0, noise(2, 1001))
    with pytest.raises(ValueError, match="513"):
        front.write_input(2, noise(3, 513))

    assert front.read_output(1, 1000).tolist() == noise(1, 1000).tolist()
    assert not front.read_output(0, 1000).any()


def test_pictures_lie_behind_the_sound_one_after_another() -> None:
    """No slot of pictures lies over another or over sound, and what was read out is a copy."""
    shape = MediaShape(in_slots=3, in_samples=512, out_slots=2, out_samples=1000, picture_slots=3, picture_bytes=4 * 24)
    front = SharedMedia.create(shape)
    engine = SharedMedia(shape, os.dup(front.fd))
    frames = np.arange(3 * 2 * 24, dtype=np.uint8).reshape(3, 2, 6, 4)
    engine.write(1, noise(1, 1000))
    for slot in range(3):
        for at in range(2):
            engine.write_picture(slot, at, frames[slot, at])
    taken = front.read_pictures(1, 2, width=4, height=4)
    engine.write_picture(1, 0, frames[2, 1])

    assert taken.tolist() == frames[1].tolist()
    assert front.read_pictures(0, 2, width=4, height=4).tolist() == frames[0].tolist()
    assert front.read_output(1, 1000).tolist() == noise(1, 1000).tolist()
    for view in (front, engine):
        view.close()


def test_a_picture_beyond_its_slot_is_refused() -> None:
    shape = MediaShape(in_slots=1, in_samples=4, out_slots=1, out_samples=4, picture_slots=2, picture_bytes=2 * 24)
    media = SharedMedia.create(shape)
    with pytest.raises(ValueError, match="frame 2"):
        media.write_picture(0, 2, np.ones((6, 4), np.uint8))

    assert not media.read_pictures(1, 2, width=4, height=4).any()
    media.close()


def test_the_memory_has_no_name_and_goes_with_its_descriptors() -> None:
    """Nothing is left in /dev/shm, whoever dies how: only descriptors hold the memory."""
    before = sorted(os.listdir("/dev/shm"))
    front = SharedMedia.create(SHAPE)
    engine = SharedMedia(SHAPE, os.dup(front.fd))
    descriptors = [Path(f"/proc/self/fd/{view.fd}") for view in (front, engine)]
    named = [os.readlink(path) for path in descriptors]
    during = sorted(os.listdir("/dev/shm"))
    front.close()
    kept = noise(4, 10)
    engine.write(0, kept)
    alive = engine._out[0, :10].tolist()
    engine.close()

    assert during == before
    assert all("memfd:duplexd-media" in name for name in named)
    assert alive == kept.tolist()
    assert "duplexd-media" not in Path("/proc/self/maps").read_text()
    assert not any("duplexd-media" in os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists())
