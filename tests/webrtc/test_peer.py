"""One connection from offer to close, against an aiortc client in this process, on loopback."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest
import uvloop
from aiortc.rtcsctptransport import (
    SCTP_DATA_FIRST_FRAG,
    SCTP_DATA_LAST_FRAG,
    WEBRTC_DCEP,
    WEBRTC_STRING,
    DataChunk,
)
from aiortc.rtp import RtcpByePacket

from duplexd import clock
from duplexd.errors import ConfigError, InputRefused
from duplexd.units import NANOS_PER_MS, Nanos
from duplexd.webrtc import wire
from duplexd.webrtc.opus import Pcm
from duplexd.webrtc.peer import (
    CHANNELS_MAX,
    REASSEMBLY_BYTES_MAX,
    TSN_WRAP,
    Channel,
    Heartbeat,
    MessageFault,
    Peer,
    PeerConfig,
    Sight,
    _coalesce,
    _rtc_configuration,
    bind_addresses,
    guard_loop,
)
from duplexd.webrtc.video import Still, i420, portrait
from tests.webrtc.client import TestClient, silence, tone

RELIABLE, FAST = wire.RELIABLE_CHANNEL, wire.FAST_CHANNEL
CONFIG = PeerConfig(loopback_only=True)
T = TypeVar("T")


class Host:
    """The front end's side: makes a peer for each offer and remembers what it was told."""

    def __init__(self, config: PeerConfig = CONFIG, **options: Any) -> None:
        self.config = config
        self.options = options
        self.peer: Any = None
        self.voice: list[tuple[Pcm, int, str]] = []
        self.messages: list[tuple[str, str | MessageFault]] = []
        self.opened: list[str] = []
        self.reasons: list[str] = []
        self.answer_sdp = ""

    async def answer(self, offer_sdp: str) -> str:
        settings: dict[str, Any] = {
            "on_audio": lambda pcm, rtp, how: self.voice.append((pcm, rtp, how)),
            "pull_audio": silence,
            "on_message": lambda label, data: self.messages.append((label, data)),
            "on_closed": self.reasons.append,
            "on_open": self.opened.append,
        }
        self.peer = await Peer.accept(offer_sdp, config=self.config, **(settings | self.options))
        self.answer_sdp = self.peer.answer_sdp
        return str(self.answer_sdp)

    def faults(self) -> list[str]:
        return [data.code for _, data in self.messages if isinstance(data, MessageFault)]

    def texts(self) -> list[str]:
        return [data for _, data in self.messages if isinstance(data, str)]


async def until(condition: Callable[[], object], *, seconds: float = 5.0) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    await asyncio.wait_for(wait(), seconds)


def session(
    story: Callable[[Host, TestClient], Awaitable[T]],
    *,
    host: Host | None = None,
    use_uvloop: bool = False,
    **client: Any,
) -> T:
    """Connect, run a story, take both ends down."""

    async def run() -> T:
        made = host or Host()
        page = await TestClient.connect(made.answer, **client)
        try:
            return await asyncio.wait_for(story(made, page), 20)
        finally:
            await page.close()
            await made.peer.close("end of test")

    return run_loop(run(), use_uvloop=use_uvloop)


def run_loop(coroutine: Coroutine[Any, Any, T], *, use_uvloop: bool = False) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if use_uvloop else None) as runner:
        return runner.run(coroutine)


def pitch(pcm: Pcm) -> float:
    tail = pcm[-4800:].astype(np.float64)
    return float(np.argmax(np.abs(np.fft.rfft(tail * np.hanning(len(tail))))) * 16_000 / len(tail))


# Media --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_both_hear_each_other(use_uvloop: bool) -> None:
    async def story(host: Host, page: TestClient) -> tuple[float, float]:
        heard = await page.hear(8000)
        await until(lambda: len(host.voice) >= 25)
        return pitch(np.concatenate([pcm for pcm, _, _ in host.voice])), pitch(heard)

    from_page, from_host = session(story, host=Host(pull_audio=tone(700)), mic=tone(440), use_uvloop=use_uvloop)

    assert abs(from_page - 440) < 5
    assert abs(from_host - 700) < 5


def test_the_wire_carries_origin_plus_pts_exactly() -> None:
    """Every position the page reports is an RTP timestamp: one sample of doubt here is one in all cursors."""
    asked: list[int] = []

    def pull(pts: int) -> Pcm:
        asked.append(pts)
        return np.zeros(480, np.int16)

    async def story(host: Host, page: TestClient) -> tuple[int, list[int]]:
        await page.hear(6400)
        return host.peer.rtp_origin, [rtp for _, rtp, _ in page.heard]

    origin, wire_timestamps = session(story, host=Host(pull_audio=pull))

    assert wire_timestamps == [origin + pts for pts in asked[: len(wire_timestamps)]]


def test_a_lossy_line_is_mended() -> None:
    """Every ninth packet of the person is lost; the listener gets every place of the timeline all the same."""

    async def story(host: Host, page: TestClient) -> None:
        page.lose = lambda index: index % 9 == 8
        await until(lambda: len(host.voice) >= 60)

    host = Host()
    session(story, host=host, mic=_babble)
    places = [rtp - host.voice[0][1] for _, rtp, _ in host.voice]

    assert places == [n * 960 for n in range(len(places))]
    assert host.peer.stats().voice_in.fec >= 3
    assert {how for _, _, how in host.voice} <= {"ok", "fec", "plc"}


def _babble(pts: int) -> Pcm:
    time = (pts / 2 + np.arange(480)) / 24_000
    wave = sum(np.sin(2 * np.pi * 150 * k * time) / k for k in range(1, 16))
    return np.asarray(7000 * wave * np.abs(np.sin(2 * np.pi * 3 * time)), np.int16)


def test_a_goodbye_of_the_old_source_does_not_make_us_deaf() -> None:
    """aiortc ends its decoder at an RTCP BYE; a page that swaps its microphone sends one and goes on talking."""

    async def story(host: Host, page: TestClient) -> None:
        receiver = host.peer._connection.getTransceivers()[0].receiver
        await until(lambda: len(host.voice) >= 3)
        await receiver._handle_rtcp_packet(RtcpByePacket(sources=[1]))
        before = len(host.voice)
        await until(lambda: len(host.voice) >= before + 5)

    session(story, mic=tone(440))


def test_the_portrait_is_sent_and_a_camera_is_not_taken() -> None:
    """A page that offers its camera gets the face; nothing of the camera is sent or decoded for nobody."""

    async def story(host: Host, page: TestClient) -> list[str]:
        await until(lambda: len(page.frames) >= 2, seconds=10)
        return [thread.name for thread in threading.enumerate() if thread.name.endswith("-decoder")]

    with ThreadPoolExecutor(1) as pool:
        host = Host(sight=Sight(Still(i420(portrait())), pool, shown=True))
        decoders = session(story, host=host, video="sendrecv")
    video_section = host.answer_sdp[host.answer_sdp.index("m=video") :]

    assert "a=sendonly" in video_section
    assert decoders == ["video-decoder"]  # the page's own, for the portrait


def test_a_page_without_a_microphone_listens() -> None:
    async def story(host: Host, page: TestClient) -> int:
        await page.hear(3200)
        return len(host.voice)

    assert session(story, munge=lambda sdp: sdp.replace("a=sendrecv", "a=recvonly", 1)) == 0


# Signalling ---------------------------------------------------------------------------------------------------------


def without_candidates(sdp: str) -> str:
    return "".join(line for line in sdp.splitlines(keepends=True) if "candidate:" not in line)


def with_multicast_names(sdp: str) -> str:
    return "".join(
        line.replace("127.0.0.1", "8e1f3b0a-0000-4000-8000-00000000beef.local") if "candidate:" in line else line
        for line in sdp.splitlines(keepends=True)
    )


@pytest.mark.parametrize("munge", [without_candidates, with_multicast_names])
def test_a_page_that_hides_its_addresses_connects(munge: Callable[[str], str]) -> None:
    """The page's own checks tell where it is; the mark of the end of candidates must not end the attempt."""

    async def story(host: Host, page: TestClient) -> None:
        await page.hear(640)

    session(story, munge=munge)


def broken_format(sdp: str) -> str:
    return sdp.replace("a=mid:0", "a=mid:0\r\na=fmtp:77 x=1", 1)


def foreign_video(sdp: str) -> str:
    return sdp.replace("VP8/90000", "AV1/90000").replace("H264/90000", "VP9/90000")


@pytest.mark.parametrize(
    "munge",
    [
        pytest.param(lambda sdp: "hello", id="no-sdp"),
        pytest.param(broken_format, id="unknown-format"),
        pytest.param(foreign_video, id="no-common-video-codec"),
        pytest.param(lambda sdp: sdp.replace("a=rtcp-mux", "a=x"), id="no-rtcp-mux"),
        pytest.param(lambda sdp: sdp.replace("a=ice-ufrag", "a=x"), id="no-ice"),
    ],
)
def test_a_refused_offer_leaves_nothing_behind(munge: Callable[[str], str]) -> None:
    async def run() -> tuple[list[int], list[int], Host]:
        page, host = TestClient(video="recvonly"), Host()
        offer = munge(await _offer_of(page))
        before = await _resources()
        with pytest.raises(InputRefused):
            await host.answer(offer)
        after = await _resources()
        await page.close()
        return before, after, host

    before, after, host = asyncio.run(run())

    assert before == after
    assert host.reasons == []


async def _offer_of(page: TestClient) -> str:
    bind_addresses(page.connection, ["127.0.0.1"])
    await page.connection.setLocalDescription(await page.connection.createOffer())
    return str(page.connection.localDescription.sdp)


def test_nothing_outside_is_asked_unless_configured() -> None:
    """Left alone, aiortc asks a public STUN server for every connection."""
    assert _rtc_configuration(()).iceServers == []


def test_only_the_addresses_that_were_named_are_offered() -> None:
    host = Host(PeerConfig(addresses=("127.0.0.1",), public_address="198.51.100.4"))

    async def run() -> None:
        page = TestClient()
        await host.answer(await _offer_of(page))
        await host.peer.close("enough")
        await page.close()

    asyncio.run(run())
    candidates = [line.split()[4] for line in host.answer_sdp.splitlines() if line.startswith("a=candidate")]

    assert set(candidates) == {"198.51.100.4"}


def test_a_host_without_an_address_to_offer_says_so() -> None:
    host = Host(PeerConfig(addresses=("203.0.113.77",)))

    async def run() -> tuple[list[int], list[int]]:
        page = TestClient()
        offer = await _offer_of(page)
        before = await _resources()
        with pytest.raises(ConfigError, match=r"203\.0\.113\.77"):
            await host.answer(offer)
        after = await _resources()
        await page.close()
        return before, after

    before, after = asyncio.run(run())

    assert before == after


def test_another_aioice_is_refused_with_its_name() -> None:
    class Ice:
        class iceGatherer:
            _connection = object()

    class Connection:
        sctp = None

        @staticmethod
        def getTransceivers() -> list[Any]:
            transceiver = type("Transceiver", (), {})()
            transceiver.receiver = type("Receiver", (), {})()
            transceiver.receiver.transport = type("Transport", (), {"transport": Ice()})()
            return [transceiver]

    with pytest.raises(ConfigError, match="gather_candidates"):
        bind_addresses(Connection(), ["127.0.0.1"])


# Data channels ------------------------------------------------------------------------------------------------------


def test_messages_go_both_ways_and_pings_are_answered_here() -> None:
    async def story(host: Host, page: TestClient) -> str:
        page.send(RELIABLE, '{"t":"say","text":"hello","id":"1"}')
        host.peer.send(RELIABLE, '{"t":"closed","reason":"no"}')
        await until(lambda: host.messages and page.pongs)
        return await page.next_message(RELIABLE)

    host = Host()

    assert session(story, host=host) == '{"t":"closed","reason":"no"}'
    assert host.messages == [(RELIABLE, '{"t":"say","text":"hello","id":"1"}')]
    assert sorted(host.opened) == [RELIABLE, FAST]


def test_what_is_sent_before_the_channel_opens_arrives() -> None:
    """`ready` is said as soon as the session exists; a fast message that early would be stale, and is dropped."""
    sent: list[bool] = []

    class Eager(Host):
        async def answer(self, offer_sdp: str) -> str:
            answered = await super().answer(offer_sdp)
            sent.extend(self.peer.send(label, f'{{"early":"{label}"}}') for label in (RELIABLE, FAST))
            return answered

    async def story(host: Host, page: TestClient) -> str:
        return await page.next_message(RELIABLE)

    assert session(story, host=Eager()) == f'{{"early":"{RELIABLE}"}}'
    assert sent == [True, False]


def test_hostile_messages_are_reported_and_the_voice_goes_on() -> None:
    """Binary, oversized, no UTF-8, a channel opened twice, a channel nobody serves: none ends the session."""

    async def story(host: Host, page: TestClient) -> None:
        sctp = page.connection.sctp
        channel = page.channels[RELIABLE]
        sctp._remote_max_message_size = 0  # a hostile page ignores what we announced
        page.send(RELIABLE, b"\x00\x01")
        page.send(RELIABLE, "x" * (wire.MESSAGE_BYTES_MAX + 1))
        await sctp._send(channel.id, WEBRTC_STRING, b'{"t":"\xff\xfe"}')
        await sctp._send(channel.id, WEBRTC_DCEP, b"\x03" + bytes(11))
        page.connection.createDataChannel("gossip")
        await until(lambda: len(host.faults()) >= 5)
        page.send(RELIABLE, '{"t":"set"}')
        await until(host.texts)
        before = len(host.voice)
        await until(lambda: len(host.voice) > before + 3)

    host = Host()
    session(story, host=host, mic=tone(440))

    assert sorted(host.faults()) == ["malformed", "not_text", "not_utf8", "too_large", "unknown_channel"]
    assert host.texts() == ['{"t":"set"}']
    assert host.peer.stats().fault_count == 5


def test_a_message_of_a_megabyte_is_refused_and_the_window_opens_again() -> None:
    """One of the greatest length arrives whole before it, and another after it."""
    most = "y" * wire.MESSAGE_BYTES_MAX
    windows: list[int] = []

    async def story(host: Host, page: TestClient) -> None:
        sctp = host.peer._connection.sctp
        page.connection.sctp._remote_max_message_size = 0
        for text in (most, "x" * 1_000_000, most):
            windows.append(sctp._advertised_rwnd)
            before = len(host.texts()) + len(host.faults())
            page.send(RELIABLE, text)
            await until(lambda before=before: len(host.texts()) + len(host.faults()) > before, seconds=20)
        windows.append(sctp._advertised_rwnd)

    host = Host()
    session(story, host=host)

    assert host.texts() == [most, most]
    assert host.faults() == ["too_large"]
    assert len(set(windows)) == 1


def fragment(number: int, flags: int = 0) -> DataChunk:
    chunk = DataChunk(flags=flags)
    chunk.tsn, chunk.user_data = (TSN_WRAP - 5 + number) % TSN_WRAP, bytes([number % 256]) * 1200
    return chunk


@pytest.mark.parametrize("gap", [None, 30], ids=["whole", "with a gap"])
def test_fragments_of_an_unfinished_message_become_one_and_no_byte_is_lost(gap: int | None) -> None:
    """Also where their numbers wrap. What lies behind a gap waits for it."""
    fragments = [fragment(n, SCTP_DATA_FIRST_FRAG if n == 0 else 0) for n in range(40) if n != gap]
    before = b"".join(one.user_data for one in fragments)
    forgotten = _coalesce(fragments)

    assert forgotten == 0
    assert b"".join(one.user_data for one in fragments) == before
    assert len(fragments) == (1 if gap is None else 10)
    assert fragments[0].tsn == fragment(39 if gap is None else 29).tsn
    assert fragments[0].flags == SCTP_DATA_FIRST_FRAG


def test_of_a_message_that_is_too_long_the_rest_is_forgotten_and_given_back_to_the_window() -> None:
    fragments = [fragment(n, SCTP_DATA_FIRST_FRAG if n == 0 else 0) for n in range(100)]

    assert _coalesce(fragments) == 120_000 - (wire.MESSAGE_BYTES_MAX + 1)
    assert [len(one.user_data) for one in fragments] == [wire.MESSAGE_BYTES_MAX + 1]


@pytest.mark.parametrize("flags", [0, SCTP_DATA_FIRST_FRAG | SCTP_DATA_LAST_FRAG], ids=["headless", "whole already"])
def test_what_is_no_beginning_of_a_message_is_left_as_it_is(flags: int) -> None:
    fragments = [fragment(n, flags if n == 0 else 0) for n in range(40)]

    assert _coalesce(fragments) == 0
    assert len(fragments) == 40


def test_fragments_that_never_become_a_message_end_the_session() -> None:
    """A page that opens a message and never ends it would fill our memory: it is cut a little beyond its window."""

    async def story(host: Host, page: TestClient) -> None:
        sctp = host.peer._connection.sctp
        sctp._advertised_rwnd = -REASSEMBLY_BYTES_MAX - 1
        page.send(RELIABLE, "more")
        await until(lambda: host.reasons)

    host = Host()
    session(story, host=host)

    assert "fragments" in host.reasons[0]


def test_too_many_channels_end_the_session() -> None:
    async def story(host: Host, page: TestClient) -> None:
        for n in range(CHANNELS_MAX + 1):
            page.connection.createDataChannel(f"extra {n}")
        await until(lambda: host.reasons)

    host = Host()
    session(story, host=host)

    assert "data channels" in host.reasons[0]


class FakeRaw:
    readyState = "open"

    def __init__(self) -> None:
        self.bufferedAmount = 0
        self.sent: list[str] = []

    def send(self, text: str) -> None:
        self.sent.append(text)
        self.bufferedAmount += len(text.encode())


def test_a_full_fast_channel_drops_and_recovers() -> None:
    channel, raw = Channel(backlog_max=100, droppable=True), FakeRaw()
    channel.open(raw)
    results = [channel.send("x" * 40, droppable=False) for _ in range(4)]
    raw.bufferedAmount = 0

    assert results == [True, True, False, False]
    assert channel.send("y", droppable=False)
    assert (channel.dropped_count, len(raw.sent)) == (2, 3)


def test_on_a_reliable_channel_droppable_messages_give_way_first() -> None:
    channel, raw = Channel(backlog_max=100, droppable=False), FakeRaw()
    channel.open(raw)

    assert [channel.send("x" * 20, droppable=True) for _ in range(2)] == [True, False]
    assert [channel.send("x" * 40, droppable=False) for _ in range(2)] == [True, True]
    with pytest.raises(OverflowError):
        channel.send("x", droppable=False)


def test_a_page_that_does_not_read_is_let_go() -> None:
    async def story(host: Host, page: TestClient) -> None:
        page.vanish()
        for _ in range(100):
            host.peer.send(RELIABLE, "x" * 1000)
        await until(lambda: host.reasons)

    host = Host(PeerConfig(loopback_only=True, reliable_backlog_bytes=50_000))
    session(story, host=host)

    assert "does not read" in host.reasons[0]


def test_a_message_no_page_takes_is_our_own_mistake() -> None:
    async def story(host: Host, page: TestClient) -> None:
        with pytest.raises(ValueError, match="65536"):
            host.peer.send(RELIABLE, "ä" * (wire.MESSAGE_BYTES_MAX // 2 + 1))
        with pytest.raises(KeyError):
            host.peer.send("gossip", "x")

    session(story)


# The end ------------------------------------------------------------------------------------------------------------


def test_a_page_that_leaves_is_known_at_once() -> None:
    async def story(host: Host, page: TestClient) -> float:
        before = clock.now()
        await page.close()
        await until(lambda: host.reasons)
        return (clock.now() - before) / NANOS_PER_MS

    host = Host()

    assert session(story, host=host) < 1000
    assert host.reasons == ["the page left"]


def test_a_page_that_vanishes_is_missed_by_its_heartbeat() -> None:
    """A killed tab says nothing; ICE alone would notice after 30 s."""

    async def story(host: Host, page: TestClient) -> None:
        await until(lambda: page.pongs)
        page.vanish()
        await until(lambda: host.reasons)

    config = PeerConfig(loopback_only=True, heartbeat_ns=Nanos(250 * NANOS_PER_MS))
    host = Host(config)
    session(story, host=host)

    assert host.reasons == ["heartbeat lost"]


def test_a_heartbeat_counts_from_the_last_sign_of_life() -> None:
    heartbeat = Heartbeat(period_ns=Nanos(300), grace_ns=Nanos(1000))
    heartbeat.beat(Nanos(5))
    assert heartbeat.deadline is None

    heartbeat.begin(Nanos(100))
    assert not heartbeat.is_lost(Nanos(1099))
    assert heartbeat.is_lost(Nanos(1100))
    assert heartbeat.wait_ns(Nanos(100)) == 300
    heartbeat.beat(Nanos(900))

    assert not heartbeat.is_lost(Nanos(1199))
    assert heartbeat.is_lost(Nanos(1200))


def test_a_heartbeat_of_zero_is_never_lost() -> None:
    heartbeat = Heartbeat(period_ns=Nanos(0), grace_ns=Nanos(1000))
    heartbeat.begin(Nanos(0))

    assert not heartbeat.is_lost(Nanos(10**15))


def test_an_offer_nobody_follows_up_is_given_up() -> None:
    host = Host(PeerConfig(loopback_only=True, connect_timeout_ns=Nanos(100 * NANOS_PER_MS)))

    async def run() -> None:
        page = TestClient()
        await host.answer(await _offer_of(page))
        await until(lambda: host.reasons)
        await page.close()

    asyncio.run(run())

    assert len(host.reasons) == 1
    assert "TURN" in host.reasons[0]


def test_closing_is_idempotent_and_the_first_reason_counts() -> None:
    async def story(host: Host, page: TestClient) -> None:
        await asyncio.gather(*(host.peer.close(reason) for reason in ("first", "second", "third")))
        await host.peer.close("fourth")
        assert not host.peer.is_connected
        assert not host.peer.send(RELIABLE, "too late")

    host = Host()
    session(story, host=host)

    assert host.reasons == ["first"]


def test_close_is_bounded_when_aiortc_hangs() -> None:
    """aiortc#283: its close can wait for ever. Ours cuts the sockets and says why it was closed."""

    async def story(host: Host, page: TestClient) -> tuple[float, list[bool]]:
        connection = host.peer._connection
        protocols = connection.getTransceivers()[0].receiver.transport.transport._connection._protocols
        sockets = [protocol.transport for protocol in protocols]
        proper, connection.close = connection.close, _never
        before = clock.now()
        await host.peer.close("stuck")
        elapsed = (clock.now() - before) / NANOS_PER_MS
        await asyncio.wait_for(proper(), 2)
        return elapsed, [transport.is_closing() for transport in sockets]

    host = Host(PeerConfig(loopback_only=True, close_timeout_ns=Nanos(100 * NANOS_PER_MS)))
    elapsed, closing = session(story, host=host)

    assert elapsed < 1000
    assert closing == [True]
    assert host.reasons == ["stuck"]


async def _never() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("which", ["on_audio", "pull_audio", "on_message"])
def test_a_fault_of_our_own_ends_its_session_with_its_name(which: str) -> None:
    def fail(*arguments: Any) -> Any:
        raise RuntimeError("broken part")

    async def run(host: Host) -> None:
        page = TestClient(mic=tone(440))
        page.channels[RELIABLE].on("open", lambda: page.send(RELIABLE, "hello"))
        await page.offer(host.answer)
        await until(lambda: host.reasons)
        await page.close()

    host = Host(CONFIG, **{which: fail})
    asyncio.run(run(host))

    assert len(host.reasons) == 1
    assert "broken part" in host.reasons[0]


@pytest.mark.slow
@pytest.mark.parametrize("use_uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_twenty_sessions_leave_no_thread_task_or_descriptor(use_uvloop: bool) -> None:
    async def one(n: int) -> None:
        host = Host(sight=Sight(Still(i420(portrait(64))), pool, shown=True))
        page = await TestClient.connect(host.answer, mic=tone(440), video="recvonly")
        await page.hear(320)
        ends = [page.close(), host.peer.close("done")]
        for end in ends if n % 2 else reversed(ends):
            await end
        await until(lambda: host.reasons)

    async def run() -> tuple[list[int], list[int]]:
        await one(0)  # the executor's threads and the first imports stay
        await one(1)
        before = await _resources()
        for n in range(20):
            await one(n)
        return before, await _resources()

    with ThreadPoolExecutor(1) as pool:
        before, after = run_loop(run(), use_uvloop=use_uvloop)

    assert before == after


async def _resources() -> list[int]:
    for _ in range(5):
        await asyncio.sleep(0)
    gc.collect()
    workers = ("asyncio_", "ThreadPoolExecutor")  # of the loop's executor: they stay, and are bounded
    threads = sum(not thread.name.startswith(workers) for thread in threading.enumerate())
    return [threads, len(asyncio.all_tasks()), _descriptors()]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# The loop -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_what_aioice_leaves_on_the_loop_stops_nothing(use_uvloop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """pipecat#2488: a STUN retry timer answered a future that was answered already, after two minutes under uvloop."""

    async def run() -> tuple[int, int, list[str]]:
        loop = asyncio.get_running_loop()
        guard = guard_loop(loop)
        loud: list[str] = []
        monkeypatch.setattr(guard, "report", lambda _, context: loud.append(str(context["exception"])))
        loop.call_soon(_raised_in, "aioice.stun", asyncio.InvalidStateError("answered twice"))
        loop.call_soon(_raised_in, "aiortc.rtcsctptransport", ConnectionError("gone"))
        loop.call_soon(_raised_in, "aioice.stun", KeyError("a bug"))
        loop.call_soon(_raised_in, "duplexd.webrtc.peer", asyncio.InvalidStateError("ours"))
        done = loop.create_future()
        loop.call_later(0.01, done.set_result, "still here")
        assert await done == "still here"
        return guard.expected_count, guard.unexpected_count, loud

    assert run_loop(run(), use_uvloop=use_uvloop) == (2, 2, ["'a bug'", "ours"])


def _raised_in(module: str, error: Exception) -> None:
    """Raise from a function that belongs to `module`, as far as its traceback can tell."""
    scope: dict[str, Any] = {"__name__": module}
    exec("def fail(error):\n    raise error\n", scope)
    scope["fail"](error)
