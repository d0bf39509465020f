"""Packets as networks deliver them: late, twice, not at all, out of order, from somewhere else."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiortc import RTCPeerConnection
from aiortc import rtcrtpreceiver as aiortc_receiver
from hypothesis import given
from hypothesis import strategies as st

from duplexd.errors import ConfigError
from duplexd.units import NANOS_PER_MS, Nanos, Ticks, ticks_from_nanos
from duplexd.webrtc.opus import VOICE_FRAME, OpusEncoder, packet_ticks
from duplexd.webrtc.receive import (
    CONCEAL_MAX,
    FLOOD_MARGIN,
    WAIT_NS,
    WAIT_PACKETS,
    Conceal,
    Decode,
    Gap,
    How,
    ReceiveCounts,
    Recover,
    ReorderBuffer,
    Restart,
    Step,
    VoicePacket,
    VoiceReceiver,
    install,
)

FRAME = 960
FRAME_NS = 20 * NANOS_PER_MS


def packet(n: int, *, sequence: int = 0, timestamp: int = 0, ssrc: int = 1, ticks: int = FRAME) -> VoicePacket:
    """The n-th 20 ms packet of a stream that begins at `sequence` and `timestamp`; its payload is its number."""
    return VoicePacket(
        ssrc=ssrc,
        sequence=(sequence + n) & 0xFFFF,
        timestamp=(timestamp + n * FRAME) & 0xFFFFFFFF,
        payload=str(n).encode(),
        ticks=ticks,
    )


class Line:
    """A buffer and the packets that reach it, each at its own time unless told otherwise."""

    def __init__(self) -> None:
        self.counts = ReceiveCounts()
        self.buffer = ReorderBuffer(counts=self.counts)
        self.steps: list[Step] = []

    def arrive(self, *packets: VoicePacket, at: int | None = None) -> list[Step]:
        new: list[Step] = []
        for one in packets:
            now = int(one.payload) * FRAME_NS if at is None else at
            new += self.buffer.push(one, now=Nanos(now))
        self.steps += new
        return new


def arrivals(numbers: Iterable[int], **stream: int) -> Line:
    """Packets in the given order, one every 20 ms."""
    line = Line()
    for slot, n in enumerate(numbers):
        line.arrive(packet(n, **stream), at=slot * FRAME_NS)
    return line


def kinds(steps: Iterable[Step]) -> str:
    letters = {Decode: "d", Recover: "r", Conceal: "c", Gap: "g", Restart: "|"}
    return "".join(letters[type(step)] for step in steps)


def decoded(steps: Iterable[Step]) -> list[int]:
    return [int(step.payload) for step in steps if isinstance(step, Decode)]


def assert_tiled(steps: list[Step]) -> None:
    for before, after in itertools.pairwise(steps):
        assert before.at + before.ticks == after.at


# Order --------------------------------------------------------------------------------------------------------------


def test_a_clean_line_waits_for_nothing() -> None:
    line = Line()
    for n in range(5):
        assert kinds(line.arrive(packet(n))) == "d"

    assert line.buffer.deadline is None


def test_swapped_neighbours_are_put_in_order() -> None:
    line = arrivals([0, 2, 1, 3])

    assert decoded(line.steps) == [0, 1, 2, 3]
    assert kinds(line.steps) == "dddd"


def test_a_lost_packet_is_mended_from_the_next_once_two_have_come() -> None:
    line = Line()
    line.arrive(packet(0), packet(2))
    assert decoded(line.steps) == [0]

    steps = line.arrive(packet(3))

    assert steps == [
        Recover(at=FRAME, ticks=FRAME, payload=b"2"),
        Decode(at=2 * FRAME, ticks=FRAME, payload=b"2"),
        Decode(at=3 * FRAME, ticks=FRAME, payload=b"3"),
    ]


def test_of_two_lost_packets_the_first_is_concealed_and_the_second_mended() -> None:
    line = arrivals([0, 3, 4])

    assert kinds(line.steps) == "dcrdd"
    assert_tiled(line.steps)


def test_a_long_loss_is_not_invented_speech() -> None:
    """Half a second is lost: what sounded last goes on for 100 ms, the rest is a gap, the end is mended."""
    line = Line()
    line.arrive(packet(0), packet(26), packet(27))
    lost = 25 * FRAME

    assert kinds(line.steps) == "dcgrdd"
    assert [step.ticks for step in line.steps[1:4]] == [CONCEAL_MAX, lost - CONCEAL_MAX - FRAME, FRAME]
    assert_tiled(line.steps)


def test_waiting_ends_when_nothing_follows() -> None:
    line = Line()
    line.arrive(packet(0), packet(2))
    deadline = line.buffer.deadline
    assert deadline == 2 * FRAME_NS + WAIT_NS

    assert line.buffer.expire(now=Nanos(deadline - 1)) == []
    assert kinds(line.buffer.expire(now=deadline)) == "rd"
    assert line.buffer.deadline is None


def test_a_packet_after_its_place_was_filled_is_late() -> None:
    line = arrivals([0, 2, 3, 1, 4])

    assert decoded(line.steps) == [0, 2, 3, 4]
    assert (line.counts.late, line.counts.duplicate) == (1, 0)


def test_duplicates_are_heard_once() -> None:
    line = arrivals([0, 0, 1, 3, 3, 1, 2, 3])

    assert decoded(line.steps) == [0, 1, 2, 3]
    assert (line.counts.late, line.counts.duplicate) == (0, 4)


def test_sequence_and_timestamp_wrap() -> None:
    line = arrivals([0, 1, 3, 2, 5, 6], sequence=0xFFFE, timestamp=0xFFFFFFFF - 1000)

    assert kinds(line.steps) == "ddddrdd"
    assert line.steps[-1].at + line.steps[-1].ticks == 0xFFFFFFFF - 1000 + 7 * FRAME
    assert_tiled(line.steps)


# Time ---------------------------------------------------------------------------------------------------------------


def test_silence_that_was_not_sent_is_a_gap() -> None:
    """DTX: sequence numbers go on, the timestamp has jumped by 400 ms, and so has the clock."""
    line = Line()
    line.arrive(packet(0), packet(1))
    after = VoicePacket(ssrc=1, sequence=2, timestamp=21 * FRAME, payload=b"21", ticks=FRAME)
    steps = line.arrive(after)

    assert steps == [Gap(at=2 * FRAME, ticks=19 * FRAME), Decode(at=21 * FRAME, ticks=FRAME, payload=b"21")]


@pytest.mark.parametrize("jump", [10**7, 0x7FFFFFFF, -(10**6)], ids=["minutes", "half-a-day", "backwards"])
def test_a_timestamp_from_nowhere_moves_the_timeline_as_far_as_the_clock_has_gone(jump: int) -> None:
    line = Line()
    line.arrive(packet(0))
    line.arrive(
        VoicePacket(ssrc=1, sequence=1, timestamp=(FRAME + jump) & 0xFFFFFFFF, payload=b"1", ticks=FRAME),
        VoicePacket(ssrc=1, sequence=2, timestamp=(2 * FRAME + jump) & 0xFFFFFFFF, payload=b"2", ticks=FRAME),
    )

    assert kinds(line.steps) == "ddd"
    assert [step.at for step in line.steps] == [0, FRAME, 2 * FRAME]
    assert line.counts.disbelieved == 1


def test_a_jump_is_believed_no_further_than_a_second_however_often_it_comes() -> None:
    """Each packet claims 0.9 s of silence before it; together they may not outrun the clock by more than a second."""
    line = Line()
    for n in range(50):
        jumping = VoicePacket(ssrc=1, sequence=n, timestamp=n * 43_200, payload=str(n).encode(), ticks=FRAME)
        line.arrive(jumping)

    assert line.steps[-1].at < 50 * FRAME + 48_000 + FRAME


def test_speech_in_fast_motion_is_dropped() -> None:
    """A client that sends ten times more sound than time cannot make the listeners work ten times."""
    line = Line()
    for n in range(1000):
        line.arrive(packet(n), at=n * FRAME_NS // 10)

    assert line.counts.flooded > 500
    assert line.steps[-1].at < 100 * FRAME + FLOOD_MARGIN + 10 * FRAME


def test_overlapping_packets_do_not_repeat_sound() -> None:
    """A packet said it lasts 60 ms, the next begins 20 ms later: what has been delivered is skipped."""
    line = Line()
    line.arrive(VoicePacket(ssrc=1, sequence=0, timestamp=0, payload=b"0", ticks=3 * FRAME))
    line.arrive(packet(1), packet(2), packet(3))

    assert [(step.at, step.ticks, step.skip) for step in line.steps if isinstance(step, Decode)] == [
        (0, 3 * FRAME, 0),
        (3 * FRAME, 0, FRAME),
        (3 * FRAME, 0, FRAME),
        (3 * FRAME, FRAME, 0),
    ]


# Streams ------------------------------------------------------------------------------------------------------------


def test_another_source_takes_over_where_the_clock_is() -> None:
    """The page swapped its microphone 200 ms ago: other SSRC, other sequence, other timestamps, same timeline."""
    line = Line()
    line.arrive(packet(0), packet(1))
    other = VoicePacket(ssrc=2, sequence=40_000, timestamp=3_000_000_000, payload=b"11", ticks=FRAME)
    steps = line.arrive(other)

    assert kinds(steps) == "|gd"
    assert steps[-1].at == 11 * FRAME
    assert_tiled(line.steps)


def test_stragglers_of_the_old_source_do_not_win_it_back() -> None:
    line = Line()
    line.arrive(packet(0), packet(0, ssrc=2, sequence=500), at=0)
    line.arrive(packet(1), at=FRAME_NS)
    line.arrive(packet(1, ssrc=2, sequence=500), at=FRAME_NS)

    assert kinds(line.steps) == "d|dd"
    assert (line.counts.foreign, line.counts.restarts) == (1, 1)


def test_what_was_waiting_is_heard_before_another_source_begins() -> None:
    line = Line()
    line.arrive(packet(0), packet(2))
    line.arrive(packet(0, ssrc=2), at=2 * FRAME_NS)

    assert kinds(line.steps) == "drd|d"


def test_a_sequence_that_begins_anew_is_followed_at_its_second_packet() -> None:
    """RFC 3550 §A.1: one number from nowhere is noise, two in a row are a sender that has restarted."""
    line = Line()
    line.arrive(packet(0), packet(1))
    assert line.arrive(packet(2, sequence=30_000)) == []

    steps = line.arrive(packet(3, sequence=30_000))

    assert kinds(steps) == "|gd"
    assert steps[-1].at == 3 * FRAME
    assert line.counts.stray == 1


def test_one_stray_sequence_number_changes_nothing() -> None:
    line = Line()
    line.arrive(packet(0), packet(1), packet(2, sequence=30_000), packet(2), packet(3))

    assert kinds(line.steps) == "dddd"


def test_a_damaged_packet_is_mended_like_a_lost_one() -> None:
    line = Line()
    line.arrive(packet(0), packet(1, ticks=0), packet(2))

    assert kinds(line.steps) == "drd"
    assert line.counts.damaged == 1


# Any network --------------------------------------------------------------------------------------------------------

hostile = st.lists(
    st.tuples(
        st.sampled_from([1, 1, 1, 1, 1, 2, 3]),  # ssrc
        st.one_of(st.integers(-3, 4), st.integers(0, 0xFFFF)),  # sequence step
        st.one_of(st.integers(-3, 4).map(lambda n: n * FRAME), st.integers(-(2**31), 2**31)),  # timestamp step
        st.sampled_from([0, 120, 480, FRAME, FRAME, FRAME, 2880, 5760]),  # length
        st.integers(0, 400),  # ms until it arrives
    ),
    max_size=60,
)


@given(hostile)
def test_the_timeline_has_no_hole_no_overlap_and_no_hurry(stream: list[tuple[int, int, int, int, int]]) -> None:
    counts = ReceiveCounts()
    buffer = ReorderBuffer(counts=counts)
    steps: list[Step] = []
    sequence, timestamp, now = 65_530, 2**32 - 5000, 0
    for ssrc, sequence_step, timestamp_step, ticks, wait in stream:
        sequence, timestamp = (sequence + sequence_step) & 0xFFFF, (timestamp + timestamp_step) & 0xFFFFFFFF
        now += wait * NANOS_PER_MS
        one = VoicePacket(ssrc=ssrc, sequence=sequence, timestamp=timestamp, payload=b"x", ticks=ticks)
        steps += buffer.push(one, now=Nanos(now))
        assert len(buffer._held) < WAIT_PACKETS
    while (deadline := buffer.deadline) is not None:
        steps += buffer.expire(now=deadline)
    assert_tiled(steps)
    assert all(step.ticks > 0 for step in steps if not isinstance(step, Decode | Restart))
    assert all(step.ticks % 120 == 0 for step in steps if isinstance(step, Recover | Conceal))
    if steps:
        length = steps[-1].at + steps[-1].ticks - steps[0].at
        assert length < ticks_from_nanos(now) * 1.001 + FLOOD_MARGIN + 3 * 5760 + CONCEAL_MAX


@given(st.lists(st.booleans(), min_size=1, max_size=80), st.integers(0, 0xFFFF), st.integers(0, 0xFFFFFFFF))
def test_every_packet_that_came_is_heard_and_every_other_is_filled(
    came: list[bool], sequence: int, timestamp: int
) -> None:
    """Losses of any pattern, no reordering: each place of the timeline is filled exactly once, with what there is."""
    numbers = [0, *(n for n, here in enumerate(came, start=1) if here), len(came) + 1]
    line = Line()
    for n in numbers:
        line.arrive(packet(n, sequence=sequence, timestamp=timestamp))
    while (deadline := line.buffer.deadline) is not None:
        line.steps += line.buffer.expire(now=deadline)

    assert decoded(line.steps) == numbers
    assert_tiled(line.steps)
    assert [step.at for step in line.steps if isinstance(step, Decode)] == [timestamp + n * FRAME for n in numbers]
    assert kinds(line.steps).count("r") == sum(after > before + 1 for before, after in itertools.pairwise(numbers))


@given(st.permutations(range(4)), st.integers(0, 0xFFFF))
def test_packets_at_most_one_place_early_lose_nothing(order: list[int], sequence: int) -> None:
    """Blocks of two, swapped or not: the reorder wait covers them without concealment."""
    swapped = [n for pair in order for n in ((2 * pair + 1, 2 * pair) if pair % 2 else (2 * pair, 2 * pair + 1))]
    numbers = sorted(swapped, key=lambda n: n // 2)
    line = arrivals(numbers, sequence=sequence)

    assert kinds(line.steps) == "d" * 8


# Decoding -----------------------------------------------------------------------------------------------------------


def voice_packets(count: int) -> list[VoicePacket]:
    encoder = OpusEncoder()
    time = np.arange(count * VOICE_FRAME) / 24_000
    pitch = 150 + 40 * np.sin(2 * np.pi * 3 * time)
    phase = 2 * np.pi * np.cumsum(pitch) / 24_000
    pcm = np.asarray(8000 * sum(np.sin(phase * k) / k for k in range(1, 16)) * np.sin(2 * np.pi * 4 * time), np.int16)
    made = []
    for n, frame in enumerate(pcm.reshape(-1, VOICE_FRAME)):
        payload = bytes(encoder.encode(frame, pts=Ticks(n * FRAME)))
        made.append(VoicePacket(ssrc=1, sequence=n, timestamp=n * FRAME, payload=payload, ticks=packet_ticks(payload)))
    return made


VOICE = voice_packets(40)


class Ear:
    def __init__(self) -> None:
        self.pieces: list[tuple[int, int, How]] = []
        self.pcm: list[Any] = []
        self.faults: list[Exception] = []
        self.receiver = VoiceReceiver(self.take, on_fault=self.faults.append)

    def take(self, pcm: Any, rtp: int, how: How) -> None:
        self.pieces.append((rtp, len(pcm), how))
        self.pcm.append(pcm)

    def listen(self, packets: Iterable[VoicePacket]) -> None:
        """Inside a loop, because a missing packet sets a timer."""

        async def run() -> None:
            for one in packets:
                self.receiver.receive(one, now=Nanos(one.sequence * FRAME_NS))
            self.receiver.close()

        asyncio.run(run())

    def hows(self) -> str:
        return "".join(how[0] for _, _, how in self.pieces)


def test_losses_are_mended_and_told_apart() -> None:
    ear = Ear()
    ear.listen(one for n, one in enumerate(VOICE[:20]) if n not in (8, 12, 13))

    assert ear.hows() == "oooooooofooopfoooooo"
    assert ear.pieces == [(n * FRAME, 320, how) for n, (_, _, how) in enumerate(ear.pieces)]
    assert (ear.receiver.counts.fec, ear.receiver.counts.plc) == (2, 1)


@pytest.mark.parametrize("payload", [b"", b"\x00", b"\xff", b"\x03\x01", bytes(range(200))])
def test_a_hostile_payload_makes_nobody_deaf(payload: bytes) -> None:
    """aiortc#1349, and worse: the packets after it are heard in full."""
    hostile_packet = VoicePacket(ssrc=1, sequence=5, timestamp=5 * FRAME, payload=payload, ticks=packet_ticks(payload))
    ear = Ear()
    ear.listen([*VOICE[:5], hostile_packet, *VOICE[6:20]])
    alone = Ear()
    alone.listen(VOICE[:20])

    assert ear.receiver.counts.received == 20
    assert ear.pieces[-10:] == alone.pieces[-10:]
    assert np.abs(ear.pcm[-1]).max() > 0.5 * np.abs(alone.pcm[-1]).max() > 100


def test_a_short_gap_is_silence_of_its_length_and_a_long_one_has_no_samples() -> None:
    ear = Ear()
    later = [VOICE[n] for n in (0, 1)]
    short = VoicePacket(ssrc=1, sequence=2, timestamp=22 * FRAME, payload=VOICE[2].payload, ticks=FRAME)
    long = VoicePacket(ssrc=1, sequence=3, timestamp=523 * FRAME, payload=VOICE[3].payload, ticks=FRAME)

    async def run() -> None:
        for one in (*later, short, long):
            ear.receiver.receive(one, now=Nanos(one.timestamp // FRAME * FRAME_NS))
        ear.receiver.close()

    asyncio.run(run())

    assert ear.pieces[2] == (2 * FRAME, 20 * 320, "gap")
    assert not ear.pcm[2].any()
    assert ear.pieces[4] == (23 * FRAME, 0, "gap")
    assert ear.pieces[5] == (523 * FRAME, 320, "ok")


def test_a_failing_listener_is_reported_and_the_line_goes_on() -> None:
    def fail(pcm: Any, rtp: int, how: How) -> None:
        raise RuntimeError("listener")

    faults: list[Exception] = []
    receiver = VoiceReceiver(fail, on_fault=faults.append)
    for one in VOICE[:3]:
        receiver.receive(one, now=Nanos(one.sequence * FRAME_NS))

    assert [str(fault) for fault in faults] == ["listener"] * 3


def test_the_wait_for_a_missing_packet_ends_by_itself() -> None:
    """The person stops talking right after a loss: what was held comes out although no packet pushes it."""

    async def run() -> Ear:
        ear = Ear()
        base = Nanos(0)
        ear.receiver.receive(VOICE[0], now=base)
        ear.receiver.receive(VOICE[2], now=base)
        assert ear.receiver._timer is not None
        ear.receiver.expire(now=Nanos(base + WAIT_NS))
        assert ear.receiver._timer is None
        ear.receiver.close()
        return ear

    assert [rtp for rtp, _, _ in asyncio.run(run()).pieces] == [0, FRAME, 2 * FRAME]


def test_of_eight_people_at_once_nothing_waits_longer_than_for_a_lost_packet() -> None:
    """T-CON-01: nothing lies between a packet and its detector but the search for a lost one."""
    ears = [Ear() for _ in range(8)]
    behind: dict[bool, set[int]] = {False: set(), True: set()}

    async def run() -> None:
        for n, one in enumerate(VOICE):
            for index, ear in enumerate(ears):
                loses = index % 2 == 1
                if loses and (n + index) % 9 == 0:
                    continue
                ear.receiver.receive(one, now=Nanos(n * FRAME_NS))
                rtp, samples, _ = ear.pieces[-1]
                behind[loses].add((n + 1) * FRAME - (rtp + samples * 3))
        for ear in ears:
            ear.receiver.close()

    asyncio.run(run())

    assert behind[False] == {0}
    assert max(behind[True]) <= WAIT_PACKETS * FRAME


def test_nothing_is_delivered_after_close() -> None:
    ear = Ear()
    ear.receiver.close()
    ear.receiver.receive(VOICE[0], now=Nanos(0))

    assert ear.pieces == []


# Under aiortc -------------------------------------------------------------------------------------------------------


def test_the_pinned_aiortc_still_has_what_is_replaced() -> None:
    """If this fails, aiortc has changed: read its RTCRtpReceiver and decoder_worker before the pin moves."""
    source = inspect.getsource(aiortc_receiver.RTCRtpReceiver._handle_rtp_packet)
    worker = inspect.getsource(aiortc_receiver.decoder_worker)

    assert "pli_flag, encoded_frame = self.__jitter_buffer.add(packet)" in source
    assert "if encoded_frame is not None and self.__decoder_thread" in source
    assert "task = input_q.get()" in worker
    assert "if task is None" in worker


def test_another_aiortc_is_refused_with_its_name() -> None:
    with pytest.raises(ConfigError, match="jitter_buffer"):
        install(SimpleNamespace(), lambda pcm, rtp, how: None)


def test_packets_given_to_aiortc_arrive_decoded_and_its_thread_ends() -> None:
    async def run() -> tuple[list[tuple[int, How]], bool]:
        connection = RTCPeerConnection()
        receiver = connection.addTransceiver("audio").receiver
        heard: list[tuple[int, How]] = []
        voice = install(receiver, lambda pcm, rtp, how: heard.append((rtp, how)))
        queue, buffer = receiver._RTCRtpReceiver__decoder_queue, receiver._RTCRtpReceiver__jitter_buffer
        tracks: asyncio.Queue[Any] = asyncio.Queue()
        aiortc_receiver.decoder_worker(asyncio.get_running_loop(), queue, tracks, None)
        for one in VOICE[:3]:
            rtp = SimpleNamespace(ssrc=1, sequence_number=one.sequence, timestamp=one.timestamp, payload=one.payload)
            assert buffer.add(rtp) == (False, None)
        ended = await asyncio.wait_for(tracks.get(), 1) is None
        voice.close()
        await connection.close()
        return heard, ended

    heard, ended = asyncio.run(run())

    assert heard == [(0, "ok"), (FRAME, "ok"), (2 * FRAME, "ok")]
    assert ended
