"""The impaired wire: its arithmetic without a network, and the real one where it can be had."""

from __future__ import annotations

import os
import random
import socket
import subprocess
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplexd.bench import netem, selftest
from duplexd.bench.netem import LOSSES_KEPT, BadNetwork, Impairment, Link, require_tun, rtp_of
from duplexd.bench.programs import ProgramMissing, RigError
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND

MS = NANOS_PER_MS


def link(seed: int = 1, **values: float) -> Link:
    made = Link(rng=random.Random(seed))
    made.impairment = Impairment(**values)  # type: ignore[arg-type]
    return made


def test_a_perfect_wire_delivers_at_once() -> None:
    assert [link().due(1000, now) for now in (0, 5, 9)] == [0, 5, 9]


@given(delay=st.floats(0, 500), jitter=st.floats(0, 50), seed=st.integers(0, 99))
def test_packets_keep_their_order_and_are_never_early(delay: float, jitter: float, seed: int) -> None:
    wire = link(seed, delay_ms=delay, jitter_ms=jitter)
    sent = [number * 5 * MS for number in range(50)]
    due = [wire.due(100, now) for now in sent]
    arrived = [when for when in due if when is not None]

    assert arrived == sorted(arrived)
    assert all(when >= now + round(delay * MS) - 1 for now, when in zip(sent, arrived, strict=True))


def test_reordering_must_be_asked_for() -> None:
    wire = link(jitter_ms=20)
    wire.impairment = Impairment(jitter_ms=20, reorder=True)
    due = [wire.due(100, number * MS) or 0 for number in range(200)]

    assert due != sorted(due)


@pytest.mark.parametrize(("loss", "burst"), [(0.01, 1), (0.1, 1), (0.05, 4), (0.2, 10)])
def test_the_share_and_the_length_of_losses_are_as_ordered(loss: float, burst: float) -> None:
    wire = link(loss=loss, burst=burst)
    lost = [wire.due(100, number) is None for number in range(200_000)]
    runs = [len(list(group)) for is_lost, group in groupby(lost) if is_lost]
    independent = 1 / (1 - loss)  # mean run of independent losses

    assert sum(lost) / len(lost) == pytest.approx(loss, rel=0.1)
    assert sum(runs) / len(runs) == pytest.approx(burst if burst > 1 else independent, rel=0.1)
    assert wire.stats.packets_lost == sum(lost)


def test_a_slow_wire_queues_and_then_drops() -> None:
    """1000 bytes at 80 kbit/s take 100 ms each; a queue of 250 ms has room for three waiting ones."""
    wire = link(rate_kbps=80, queue_ms=250)
    due = [wire.due(1000, 0) for _ in range(6)]

    assert due == [100 * MS, 200 * MS, 300 * MS, None, None, None]
    assert wire.stats.packets_dropped == 3
    assert wire.due(1000, NANOS_PER_SECOND) == NANOS_PER_SECOND + 100 * MS


@pytest.mark.parametrize(
    "values", [{"loss": 1.0}, {"loss": -0.1}, {"burst": 0.5}, {"delay_ms": -1}, {"rate_kbps": -1}], ids=str
)
def test_an_impossible_impairment_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="an impairment needs"):
        Impairment(**values)  # type: ignore[arg-type]


def test_who_is_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netem, "find_program", lambda name: f"/bin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    with pytest.raises(RigError, match="needs root"):
        require_tun()


def test_a_missing_device_is_named_with_what_helps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(netem, "find_program", lambda name: f"/bin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(netem, "_TUN_DEVICE", tmp_path / "tun")

    with pytest.raises(RigError, match=r"No such file or directory.*modprobe tun"):
        require_tun()


def test_a_missing_ip_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("duplexd.bench.programs._SEARCH_ALSO", ())

    with pytest.raises(ProgramMissing, match="apt-get install --no-install-recommends iproute2"):
        require_tun()


def udp(payload: bytes, *, options: bytes = b"") -> bytes:
    """An IPv4 packet with it, as it comes from a TUN device."""
    words = 5 + len(options) // 4
    header = bytes([0x40 | words, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 10, 78, 0, 2, 10, 78, 0, 1])
    return header + options + bytes(8) + payload


RTP = bytes([0x80, 0x80 | 111, 0, 7]) + (0xFEDCBA98).to_bytes(4, "big") + bytes(4) + b"voice"


@pytest.mark.parametrize(
    ("packet", "found"),
    [
        (udp(RTP), (111, 0xFEDCBA98)),
        (udp(RTP, options=bytes(8)), (111, 0xFEDCBA98)),
        (udp(bytes([0x80, 200]) + RTP[2:]), None),
        (udp(bytes([22, 254, 253]) + bytes(20)), None),
        (udp(b"\0\1" + bytes(18)), None),
        (udp(RTP[:11]), None),
        (bytes([0x60]) + bytes(60), None),
        (b"", None),
    ],
    ids=["rtp", "behind options", "rtcp", "dtls", "stun", "cut short", "IPv6", "nothing"],
)
def test_lost_voice_packets_are_known_by_their_header(packet: bytes, found: tuple[int, int] | None) -> None:
    assert rtp_of(packet) == found


def test_the_relay_knows_its_last_losses_by_direction() -> None:
    near, wire_a = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    far, wire_b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with near, wire_a, far, wire_b, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
        wire_a.setblocking(False)
        relay = netem._Relay(wire_a.fileno(), wire_b.fileno(), control, seed=1)
        relay._obey(netem._Order("ab", Impairment(loss=1 - 1e-9)))
        for number in range(LOSSES_KEPT + 3):
            near.send(udp(RTP[:2] + number.to_bytes(2, "big") + RTP[4:]))
            near.send(udp(b"\0\1" + bytes(18)))
            relay._take(wire_a.fileno())
        forth, back = (relay._told(netem._Order(way, tells_losses=True)) for way in ("ab", "ba"))

    assert (len(forth), back) == (LOSSES_KEPT, ())
    assert {(loss.payload_type, loss.timestamp) for loss in forth} == {(111, 0xFEDCBA98)}
    assert relay._told(netem._Order("ab")) == ()


def namespaces() -> set[str]:
    return set(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else set()


@pytest.fixture
def network() -> BadNetwork:
    try:
        require_tun()
    except RigError as error:
        pytest.skip(str(error))
    return BadNetwork()


@pytest.mark.slow
def test_the_real_wire_delays_and_loses_as_ordered(network: BadNetwork, capsys: pytest.CaptureFixture[str]) -> None:
    report = selftest._Report()
    selftest.measure_network(report)

    assert report.failures == []
    assert "20 ms each way" in capsys.readouterr().out


@pytest.mark.slow
def test_nothing_is_left_of_a_network_after_an_error(network: BadNetwork) -> None:
    names: set[str] = set()

    def break_inside() -> None:
        with network:
            names.update((network.a, network.b))
            assert names <= namespaces()
            raise KeyError

    with pytest.raises(KeyError):
        break_inside()
    assert names
    assert not names & namespaces()


@pytest.mark.slow
def test_two_networks_do_not_meet(network: BadNetwork) -> None:
    with network, BadNetwork() as other:
        assert len({network.a, network.b, other.a, other.b}) == 4
        network.impair(Impairment(delay_ms=1))
        devices = subprocess.run([*other.inside("a"), "ip", "-o", "link"], capture_output=True, check=True).stdout

    assert {line.split()[1] for line in devices.decode().splitlines()} == {"lo:", "net0:"}
