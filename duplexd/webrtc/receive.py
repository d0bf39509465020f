"""The person's voice, from RTP packets to PCM, with the least waiting that still mends a lossy line.

aiortc's own path holds 80 ms back for ever, 280-320 ms once a packet was lost (aiortc#543), knows no redundancy, and
its decoder thread dies of an empty payload (aiortc#1349). This one waits only for a missing packet, for two
packets' time at most:

    missing, and two packets of the future are here -> concealment, a gap, then the redundancy inside the next packet
    missing, and nothing follows                    -> wait at most `wait_ns`, then the same
    sequence complete, timestamp jumps              -> the sender was silent (DTX): a gap
    other SSRC, sequence or timestamp from nowhere  -> a gap as long as the arrival clock says, then on

1. Pieces tile a timeline: each begins where the one before it ended. It counts RTP ticks (1/48000 s) from the first
   packet's timestamp and does not wrap at 2^32; a stream that starts anew goes on where the old one ended.
2. The timeline follows the arrival clock: a timestamp that would run it more than a second ahead is not believed, and
   packets that have run it two seconds ahead are dropped. Nobody can make a gap of hours or send speech in fast motion.
3. Nothing from the network raises. What is wrong is counted and, if it left a hole, concealed.
4. `ReorderBuffer` is pure: packets and `now` in, steps out. `VoiceReceiver` decodes; `install` puts it under aiortc.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from duplexd import clock
from duplexd.errors import ConfigError
from duplexd.units import (
    NANOS_PER_MS,
    NANOS_PER_SECOND,
    TICKS_PER_MS,
    TICKS_PER_SECOND,
    Nanos,
    rtp_distance,
    ticks_from_nanos,
)
from duplexd.webrtc.opus import (
    CONCEAL_QUANTUM,
    PACKET_TICKS_MAX,
    TICKS_PER_EAR_SAMPLE,
    OpusDecoder,
    Pcm,
    packet_ticks,
)

logger = logging.getLogger(__name__)

How: TypeAlias = Literal["ok", "fec", "plc", "gap"]
Deliver: TypeAlias = Callable[[Pcm, int, How], None]

WAIT_PACKETS = 2  #: packets of the future that prove a missing one lost
WAIT_NS = Nanos(45 * NANOS_PER_MS)  #: two packets and some jitter; a missing packet holds its successors no longer
MISORDER_MAX = 100  #: RFC 3550 §A.1: older than this is not late but another count
DROPOUT_MAX = 3000  #: RFC 3550 §A.1: newer than this is not after a loss but another count
CONCEAL_MAX = 100 * TICKS_PER_MS  #: concealment longer than this is invention
BELIEF_MARGIN = TICKS_PER_SECOND  #: how far a timestamp may run the timeline ahead of the arrival clock
FLOOD_MARGIN = 2 * TICKS_PER_SECOND  #: how far packets may
DRIFT_DIVISOR = 1000  #: a sender's clock may be one part in this fast, for ever
FOREIGN_NS = Nanos(2 * NANOS_PER_SECOND)  #: how long packets of a replaced SSRC may straggle in
GAP_PCM_MAX = TICKS_PER_SECOND  #: a longer gap is delivered without samples


class VoicePacket(msgspec.Struct, frozen=True):
    ssrc: int
    sequence: int  #: u16
    timestamp: int  #: u32, 1/48000 s
    payload: bytes
    ticks: int  #: how long it plays, 0 if it cannot be decoded


class Decode(msgspec.Struct, frozen=True):
    """Decode a packet; its first `skip` ticks have been delivered already."""

    at: int
    ticks: int  #: delivered, after `skip`
    payload: bytes
    skip: int = 0


class Recover(msgspec.Struct, frozen=True):
    """Take the `ticks` before this packet from the redundancy inside it."""

    at: int
    ticks: int
    payload: bytes


class Conceal(msgspec.Struct, frozen=True):
    at: int
    ticks: int


class Gap(msgspec.Struct, frozen=True):
    """Nothing was sent, or too much was lost to be made up."""

    at: int
    ticks: int


class Restart(msgspec.Struct, frozen=True):
    """The next packet is from another encoder."""

    at: int
    ticks: int = 0


Step: TypeAlias = Decode | Recover | Conceal | Gap | Restart


class ReceiveCounts(msgspec.Struct):
    received: int = 0
    late: int = 0  #: came after their place had been filled
    duplicate: int = 0
    damaged: int = 0  #: no Opus, or refused by libopus
    stray: int = 0  #: a sequence number from nowhere that nothing followed
    foreign: int = 0  #: of an SSRC that had been replaced
    flooded: int = 0  #: more sound than time
    restarts: int = 0  #: streams that began anew
    disbelieved: int = 0  #: timestamps that contradicted the arrival clock
    ok: int = 0  #: pieces delivered, by how they were made
    fec: int = 0
    plc: int = 0
    gap: int = 0


class ReorderBuffer:
    """Puts packets in order and says, step by step, how the timeline is filled. Holds fewer than `wait_packets`."""

    def __init__(self, *, counts: ReceiveCounts, wait_packets: int = WAIT_PACKETS, wait_ns: Nanos = WAIT_NS) -> None:
        self._counts = counts
        self._wait_packets = wait_packets
        self._wait_ns = wait_ns
        self._held: dict[int, tuple[VoicePacket, Nanos]] = {}  # by sequence, with arrival
        self._recent: deque[int] = deque(maxlen=64)  # sequences emitted lately, to tell duplicates from latecomers
        self._ssrc: int | None = None
        self._retired: tuple[int, Nanos] | None = None  # the SSRC before, and until when it may straggle in
        self._suspect: int | None = None  # RFC 3550 §A.1 bad_seq: one more like it and we follow
        self._next = 0  # sequence of the next packet in order
        self._at = 0  # where on the timeline the next piece begins
        self._timestamp = 0  # the RTP timestamp that belongs there
        self._lost = 0  # sequence numbers given up since the last decoded packet
        self._arrived = Nanos(0)  # arrival of the last decoded packet
        self._origin = 0  # where the timeline began,
        self._originated = Nanos(0)  # and when

    @property
    def deadline(self) -> Nanos | None:
        """When `expire` has something to do; None while nothing is missing."""
        return Nanos(min(arrival for _, arrival in self._held.values()) + self._wait_ns) if self._held else None

    def push(self, packet: VoicePacket, *, now: Nanos) -> list[Step]:
        """Take one packet in; the steps that have become certain."""
        self._counts.received += 1
        if self._ssrc is None:
            self._at = self._origin = packet.timestamp
            self._originated = now
            return self._begin(packet, now=now)
        if self._lead(now) > FLOOD_MARGIN:
            self._counts.flooded += 1
            return []
        if packet.ssrc != self._ssrc:
            return self._push_foreign(packet, now=now)
        distance = _signed16(packet.sequence - self._next)
        if not -MISORDER_MAX <= distance <= DROPOUT_MAX:
            return self._push_stray(packet, now=now)
        self._suspect = None
        if distance < 0 or packet.sequence in self._held:
            self._count_behind(packet)
            return []
        self._held[packet.sequence] = (packet, now)
        return self._release(now)

    def expire(self, *, now: Nanos) -> list[Step]:
        """Give up waiting for what is missing, if its time has come."""
        return self._release(now)

    # Streams that begin ---------------------------------------------------------------------------------------------

    def _begin(self, packet: VoicePacket, *, now: Nanos) -> list[Step]:
        self._ssrc, self._next, self._timestamp = packet.ssrc, packet.sequence, packet.timestamp
        self._lost, self._suspect, self._arrived = 0, None, now
        self._recent.clear()
        self._held[packet.sequence] = (packet, now)
        return self._release(now)

    def _begin_anew(self, packet: VoicePacket, *, now: Nanos) -> list[Step]:
        """Everything of the old stream that is still here, a gap by the arrival clock, then the new one."""
        steps = self._drain(now)
        self._counts.restarts += 1
        steps.append(Restart(at=self._at))
        steps += self._gap(self._ticks_since_arrival(now) - packet.ticks)
        return steps + self._begin(packet, now=now)

    def _push_foreign(self, packet: VoicePacket, *, now: Nanos) -> list[Step]:
        if self._retired is not None and packet.ssrc == self._retired[0] and now < self._retired[1]:
            self._counts.foreign += 1
            return []
        assert self._ssrc is not None
        self._retired = (self._ssrc, Nanos(now + FOREIGN_NS))
        return self._begin_anew(packet, now=now)

    def _push_stray(self, packet: VoicePacket, *, now: Nanos) -> list[Step]:
        if packet.sequence == self._suspect:
            return self._begin_anew(packet, now=now)
        self._counts.stray += 1
        self._suspect = (packet.sequence + 1) & 0xFFFF
        return []

    def _count_behind(self, packet: VoicePacket) -> None:
        if packet.sequence in self._held or packet.sequence in self._recent:
            self._counts.duplicate += 1
        else:
            self._counts.late += 1

    # In order -------------------------------------------------------------------------------------------------------

    def _release(self, now: Nanos) -> list[Step]:
        steps: list[Step] = []
        while self._held:
            if self._next not in self._held:
                if not self._must_give_up(now):
                    break
                self._give_up()
            steps += self._emit_next()
        return steps

    def _drain(self, now: Nanos) -> list[Step]:
        steps: list[Step] = []
        while self._held:
            self._give_up()
            steps += self._emit_next()
        return steps

    def _must_give_up(self, now: Nanos) -> bool:
        deadline = self.deadline
        return len(self._held) >= self._wait_packets or (deadline is not None and now >= deadline)

    def _give_up(self) -> None:
        distance = min((sequence - self._next) & 0xFFFF for sequence in self._held)
        self._lost += distance
        self._next = (self._next + distance) & 0xFFFF

    def _emit_next(self) -> list[Step]:
        packet, arrival = self._held.pop(self._next)
        self._recent.append(self._next)
        self._next = (self._next + 1) & 0xFFFF
        if packet.ticks == 0:
            # Undecodable is as good as lost: the next packet's redundancy may still mend it.
            self._counts.damaged += 1
            self._lost += 1
            return []
        steps = self._fill_hole(packet, arrival)
        steps.append(self._decode(packet))
        self._lost, self._arrived = 0, arrival
        return steps

    def _fill_hole(self, packet: VoicePacket, arrival: Nanos) -> list[Step]:
        hole = rtp_distance(packet.timestamp, self._timestamp)
        if hole > max(0, BELIEF_MARGIN - self._lead(arrival)) or hole < -PACKET_TICKS_MAX:
            self._counts.disbelieved += 1
            self._timestamp = packet.timestamp
            return self._gap(self._ticks_since_arrival(arrival) - packet.ticks)
        if hole <= 0:
            return []
        self._timestamp = packet.timestamp
        return self._mend(hole, packet) if self._lost else self._gap(hole)

    def _mend(self, hole: int, packet: VoicePacket) -> list[Step]:
        """Concealment carries the last sound on, redundancy leads into the next one; what is between is a gap."""
        lost = _whole(min(hole, self._lost * packet.ticks), CONCEAL_QUANTUM)
        recovered = _whole(min(lost, packet.ticks), CONCEAL_QUANTUM)
        concealed = min(lost - recovered, CONCEAL_MAX)
        steps: list[Step] = []
        if concealed:
            steps.append(Conceal(at=self._take(concealed), ticks=concealed))
        steps += self._gap(hole - concealed - recovered)
        if recovered:
            steps.append(Recover(at=self._take(recovered), ticks=recovered, payload=packet.payload))
        return steps

    def _decode(self, packet: VoicePacket) -> Decode:
        overlap = max(0, rtp_distance(self._timestamp, packet.timestamp))
        skip = min(packet.ticks, _whole(overlap + TICKS_PER_EAR_SAMPLE - 1, TICKS_PER_EAR_SAMPLE))
        end = (packet.timestamp + packet.ticks) & 0xFFFFFFFF
        if rtp_distance(end, self._timestamp) > 0:
            self._timestamp = end
        ticks = packet.ticks - skip
        return Decode(at=self._take(ticks), ticks=ticks, payload=packet.payload, skip=skip)

    def _gap(self, ticks: int) -> list[Step]:
        """Whole samples only, so that pieces go on tiling the timeline exactly (module rule 1)."""
        whole = _whole(ticks, TICKS_PER_EAR_SAMPLE) if ticks > 0 else 0
        return [Gap(at=self._take(whole), ticks=whole)] if whole else []

    def _take(self, ticks: int) -> int:
        at = self._at
        self._at += ticks
        return at

    def _lead(self, now: Nanos) -> int:
        """How far the timeline is ahead of the arrival clock."""
        elapsed = int(ticks_from_nanos(max(0, now - self._originated)))
        return self._at - self._origin - elapsed - elapsed // DRIFT_DIVISOR

    def _ticks_since_arrival(self, arrival: Nanos) -> int:
        return int(ticks_from_nanos(max(0, arrival - self._arrived)))


def _whole(ticks: int, quantum: int) -> int:
    return ticks - ticks % quantum


def _signed16(difference: int) -> int:
    return ((difference + 0x8000) & 0xFFFF) - 0x8000


# Decoding -----------------------------------------------------------------------------------------------------------


class VoiceReceiver:
    """Runs the steps: packets in, `deliver(pcm int16 16 kHz, rtp, how)` out, on the caller's thread, at once.

    `rtp` is where the piece begins on the timeline of module rule 1; `rtp + 3 * len(pcm)` is where the next one begins,
    except after a gap of more than a second, which carries no samples: there the next piece's `rtp` tells its length.
    An exception of `deliver` is given to `on_fault` and not raised: it would take the whole connection down.
    """

    def __init__(self, deliver: Deliver, *, on_fault: Callable[[Exception], None] | None = None) -> None:
        self.counts = ReceiveCounts()
        self._buffer = ReorderBuffer(counts=self.counts)
        self._decoder = OpusDecoder()
        self._deliver = deliver
        self._on_fault = on_fault
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def receive(self, packet: VoicePacket, *, now: Nanos) -> None:
        if self._closed:
            return
        self._run(self._buffer.push(packet, now=now))
        self._set_timer(now)

    def expire(self, *, now: Nanos) -> None:
        self._timer = None
        if self._closed:
            return
        self._run(self._buffer.expire(now=now))
        self._set_timer(now)

    def close(self) -> None:
        self._closed = True
        self._stop_timer()
        self._decoder.close()

    def _run(self, steps: list[Step]) -> None:
        for step in steps:
            pcm, how = self._perform(step)
            if how is not None and not self._closed:
                self._hand_over(pcm, step.at, how)

    def _perform(self, step: Step) -> tuple[Pcm, How | None]:
        match step:
            case Decode(ticks=ticks, payload=payload, skip=skip):
                return self._decode(payload, ticks=ticks, skip=skip)
            case Recover(ticks=ticks, payload=payload):
                how: How = "fec" if self._decoder.has_redundancy(payload) else "plc"
                return self._decoder.recover(payload, ticks=ticks), how
            case Conceal(ticks=ticks):
                return self._decoder.conceal(ticks=ticks), "plc"
            case Gap(ticks=ticks):
                return _silence(ticks if ticks <= GAP_PCM_MAX else 0), "gap"
            case Restart():
                self._decoder.restart()
                return _silence(0), None

    def _decode(self, payload: bytes, *, ticks: int, skip: int) -> tuple[Pcm, How | None]:
        how: How = "ok"
        pcm = self._decoder.decode(payload)
        if pcm is None:
            self.counts.damaged += 1
            pcm, how = self._decoder.conceal(ticks=skip + ticks), "plc"
        # A packet that was wholly delivered before is decoded only to keep the decoder's state.
        return pcm[skip // TICKS_PER_EAR_SAMPLE :], how if ticks else None

    def _hand_over(self, pcm: Pcm, at: int, how: How) -> None:
        setattr(self.counts, how, getattr(self.counts, how) + 1)
        try:
            self._deliver(pcm, at, how)
        except Exception as error:
            logger.exception("whoever takes the voice failed")
            if self._on_fault is not None:
                self._on_fault(error)

    def _set_timer(self, now: Nanos) -> None:
        self._stop_timer()
        deadline = self._buffer.deadline
        if deadline is None or self._closed:
            return
        delay = max(0, deadline - now) / NANOS_PER_SECOND
        self._timer = asyncio.get_running_loop().call_later(delay, lambda: self.expire(now=clock.now()))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _silence(ticks: int) -> Pcm:
    return np.zeros(ticks // TICKS_PER_EAR_SAMPLE, np.int16)


# Under aiortc -------------------------------------------------------------------------------------------------------

JITTER_BUFFER = "_RTCRtpReceiver__jitter_buffer"
DECODER_QUEUE = "_RTCRtpReceiver__decoder_queue"


class _NoJitterBuffer:
    """Stands where aiortc keeps its jitter buffer: takes every packet and never has a frame for the decoder thread."""

    def __init__(self, voice: VoiceReceiver) -> None:
        self._voice = voice

    def add(self, packet: Any) -> tuple[bool, None]:
        payload = bytes(packet.payload)
        self._voice.receive(
            VoicePacket(
                ssrc=packet.ssrc,
                sequence=packet.sequence_number,
                timestamp=packet.timestamp,
                payload=payload,
                ticks=packet_ticks(payload),
            ),
            now=clock.now(),
        )
        return False, None


class NoDecoderQueue:
    """Stands where aiortc's decoder thread waits for work: tells it at once that there will be none, so that it ends.

    Nothing is ever put here but aiortc's end mark; and a BYE, which ends aiortc's decoder for good, ends nothing here.
    """

    def get(self) -> None:
        return None

    def put(self, item: object) -> None:
        return None


def install(receiver: Any, deliver: Deliver, *, on_fault: Callable[[Exception], None] | None = None) -> VoiceReceiver:
    """Replace the audio receive path of an aiortc RTCRtpReceiver; call it before the receiver starts.

    Raises ConfigError if this aiortc keeps its jitter buffer or its decoder elsewhere: it is pinned to 1.16.
    """
    missing = [name for name in (JITTER_BUFFER, DECODER_QUEUE) if not hasattr(receiver, name)]
    if missing:
        raise ConfigError(f"This aiortc has no {', '.join(missing)}; duplexd's receive path knows aiortc 1.16.")
    voice = VoiceReceiver(deliver, on_fault=on_fault)
    setattr(receiver, JITTER_BUFFER, _NoJitterBuffer(voice))
    setattr(receiver, DECODER_QUEUE, NoDecoderQueue())
    return voice
