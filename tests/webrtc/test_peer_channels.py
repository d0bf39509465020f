"""Data channels of calls: what they take, and what becomes of a call whose channel is closed."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from aiortc import RTCPeerConnection, RTCSessionDescription
from aiortc.rtp import RtcpReceiverInfo, RtcpRrPacket

from duplexd.units import NANOS_PER_MS, Nanos
from duplexd.webrtc import wire
from duplexd.webrtc.peer import PENDING_MAX, Peer, PeerConfig
from duplexd.webrtc.realtime.visit import CHANNEL_BYTES_MAX, ChannelSink
from duplexd.webrtc.tracks import jitter_ms
from tests.webrtc.client import TestClient
from tests.webrtc.test_peer import Host, session, until

RELIABLE = wire.RELIABLE_CHANNEL
CALL = PeerConfig(
    loopback_only=True,
    heartbeat_ns=Nanos(0),
    message_bytes_max=CHANNEL_BYTES_MAX,
    channel_grace_ns=Nanos(200 * NANOS_PER_MS),
)


def test_a_call_whose_channel_is_closed_ends_after_its_grace() -> None:
    """Its sound went on for ever, and every event was lost (T-RC-04)."""

    async def story(host: Host, page: TestClient) -> None:
        page.channels[RELIABLE].close()
        await until(lambda: host.reasons)

    host = Host(CALL)
    session(story, host=host)

    assert host.reasons == [f"the channel '{RELIABLE}' was closed"]


def test_a_channel_that_comes_back_in_time_is_told_what_was_said_meanwhile() -> None:
    async def story(host: Host, page: TestClient) -> list[str]:
        got: list[str] = []
        page.channels[RELIABLE].close()
        await until(lambda: not host.peer._channels[RELIABLE].is_open)
        host.peer.send(RELIABLE, "1")
        again = page.connection.createDataChannel(RELIABLE)
        again.on("message", got.append)
        host.peer.send(RELIABLE, "2")
        await until(lambda: len(got) >= 2)
        await asyncio.sleep(0.25)  # Longer than the grace: nothing ends.
        assert host.peer.is_connected
        return got

    assert session(story, host=Host(CALL)) == ["1", "2"]


def test_a_call_without_a_channel_is_not_ended_for_what_it_is_not_told() -> None:
    """After 256 events it was closed, as one that does not read."""

    async def story() -> None:
        page = RTCPeerConnection()
        page.addTransceiver("audio", direction="recvonly")
        host = Host(CALL)
        await page.setLocalDescription(await page.createOffer())
        answer = await host.answer(page.localDescription.sdp)
        await page.setRemoteDescription(RTCSessionDescription(sdp=answer, type="answer"))
        told = [host.peer.send(RELIABLE, "x") for _ in range(PENDING_MAX + 10)]
        assert host.reasons == []
        assert not any(told)
        await page.close()
        await host.peer.close("end of test")

    asyncio.run(story())


class Wire:
    """What a sink needs of a peer."""

    def __init__(self, message_bytes_max: int) -> None:
        self.message_bytes_max = message_bytes_max
        self.sent: list[str] = []

    def send(self, label: str, text: str) -> bool:
        self.sent.append(text)
        return True


def sink_of(made: Any) -> ChannelSink:
    peer: Peer = made
    return ChannelSink(lambda: peer)


def test_an_event_that_is_too_large_is_named_under_its_own_id() -> None:
    """Its id was "event_too_large": the count of ids had a gap, and nobody knew what was missing."""
    line = Wire(1000)
    event = {"type": "session.updated", "event_id": "event_7", "session": {"instructions": "x" * 1000}}
    sink_of(line).tell(json.dumps(event))
    told = json.loads(line.sent[0])

    assert (told["type"], told["event_id"], told["error"]["code"]) == ("error", "event_7", "event_too_large")
    assert "session.updated" in told["error"]["message"]


def test_a_client_that_takes_next_to_nothing_is_told_nothing_it_does_not_take() -> None:
    line = Wire(64)
    sink_of(line).tell(json.dumps({"type": "session.updated", "event_id": "event_7", "session": "x" * 100}))
    sink_of(line).tell("{}")

    assert line.sent == ["{}"]


class Announcing(Host):
    """Its client announces that it takes messages of so many bytes."""

    def __init__(self, announced: str) -> None:
        super().__init__(CALL)
        self.announced = announced

    async def answer(self, offer_sdp: str) -> str:
        assert "a=max-message-size:" in offer_sdp
        return await super().answer(re.sub(r"a=max-message-size:\d+", self.announced, offer_sdp))


@pytest.mark.parametrize(
    ("announced", "longest"),
    [
        pytest.param("a=max-message-size:100000", 100_000, id="less"),
        pytest.param("a=max-message-size:9000000", CHANNEL_BYTES_MAX, id="more"),
        pytest.param("a=max-message-size:0", CHANNEL_BYTES_MAX, id="any"),
        pytest.param("a=x", 65_536, id="nothing"),  # RFC 8841 §6.1
    ],
)
def test_events_are_as_large_as_the_other_side_takes_and_no_larger(announced: str, longest: int) -> None:
    """All of 65,537 bytes were replaced, whatever the browser took: session.updated with many tools never came."""

    async def story(host: Host, page: TestClient) -> int:
        got: list[str] = []
        page.channels[RELIABLE].on("message", got.append)
        host.peer.send(RELIABLE, "x" * longest)
        await until(lambda: longest in map(len, got))
        return int(host.peer.message_bytes_max)

    assert session(story, host=Announcing(announced)) == longest


def test_a_receivers_jitter_is_told_in_milliseconds() -> None:
    async def story() -> tuple[float | None, float | None]:
        connection = RTCPeerConnection()
        sender = connection.addTransceiver("audio").sender
        before = jitter_ms(sender)
        about = RtcpReceiverInfo(
            ssrc=sender._ssrc, fraction_lost=0, packets_lost=0, highest_sequence=1, jitter=480, lsr=0, dlsr=0
        )
        await sender._handle_rtcp_packet(RtcpRrPacket(ssrc=7, reports=[about]))
        after = jitter_ms(sender)
        await connection.close()
        return before, after

    assert asyncio.run(story()) == (None, 10.0)
