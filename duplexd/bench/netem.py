"""A bad network between two network namespaces of our own, in user space, changed while it runs.

    namespace A:  net0 10.78.0.1/24 --TUN--> relay --TUN--> net0 10.78.0.2/24  :namespace B
                                     <-- delay, jitter, loss, rate, reordering -->

1. Kernels without sch_netem (containers, micro VMs) still have TUN: the relay is a process that reads packets from one
   device and writes them to the other when they are due. It needs root and /dev/net/tun, and says so.
2. Only our own namespaces are touched, under names no one else uses; the host's interfaces are never seen.
3. The relay makes the namespaces and removes them: it ends when its parent closes the pipe to it, so that even a killed
   bench leaves nothing. A program that still runs inside keeps its namespace's devices until it ends, not the name.
4. The last LOSSES_KEPT lost voice and video packets are known one by one, with their RTP timestamp: SRTP leaves the
   header in the clear (RFC 3711 §3.1).
5. The loss model is Gilbert's: packets are lost in bursts of `burst` on average, `loss` is the long-run share.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import heapq
import itertools
import os
import random
import select
import socket
import struct
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from duplexd.bench.programs import RigError, end, find_program, run, start
from duplexd.bench.scoped import Scoped
from duplexd.clock import now
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos

Direction = Literal["ab", "ba", "both"]

ADDRESS_A = "10.78.0.1"
ADDRESS_B = "10.78.0.2"
MTU = 1400

_TUN_DEVICE = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
_CLONE_NEWNET = 0x40000000
_HELD_MAX = 20_000  # packets under way per direction; beyond it packets are dropped, as a router does
_READS_MAX = 64  # packets per wake-up and direction, so that due packets never wait behind a flood
_ASKING_MAX = 8  # further ones wait in the socket's backlog
_START_LIMIT_S = 10.0
_MESSAGE_BYTES = 65_536
LOSSES_KEPT = 500  #: some 20 bytes each in an answer


class Impairment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What happens to packets of one direction. The default is a perfect wire."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0  #: standard deviation; only ever added to the delay
    loss: float = 0.0  #: share of packets, 0..1
    burst: float = 1.0  #: mean length of a run of lost packets, >= 1
    rate_kbps: float = 0.0  #: 0 is unlimited
    queue_ms: float = 200.0  #: of the rate limit; what would wait longer is dropped
    reorder: bool = False  #: whether jitter may change the order of packets

    def __post_init__(self) -> None:
        good = min(self.delay_ms, self.jitter_ms, self.rate_kbps, self.queue_ms) >= 0
        if not (good and 0 <= self.loss < 1 and self.burst >= 1):
            raise ValueError(f"an impairment needs values >= 0, 0 <= loss < 1 and burst >= 1, not {self}")

    def text(self) -> str:
        """In words, for a figure's report; the delay as a round trip with the same on the way back."""
        said = [
            f"{2 * self.delay_ms:g} ms round trip" if self.delay_ms else "",
            f"jitter {self.jitter_ms:g} ms" if self.jitter_ms else "",
            f"{100 * self.loss:g} % loss" + (f" in bursts of {self.burst:g}" if self.burst > 1 else "")
            if self.loss
            else "",
            f"{self.rate_kbps:g} kbit/s" if self.rate_kbps else "",
            "reordered" if self.reorder else "",
        ]
        return ", ".join(part for part in said if part) or "a perfect wire"


class LinkStats(msgspec.Struct, frozen=True):
    """Packets of one direction since the start."""

    packets_count: int
    packets_lost: int  #: by the loss model
    packets_dropped: int  #: by a full queue
    bytes_count: int


class Loss(msgspec.Struct, frozen=True, array_like=True):
    """One RTP packet that did not arrive."""

    at: Nanos  #: when it entered the wire
    payload_type: int
    timestamp: int  #: u32, of its RTP header


def rtp_of(packet: bytes) -> tuple[int, int] | None:
    """(payload type, timestamp) of an RTP packet in UDP in IPv4; None for anything else, RTCP among it."""
    if len(packet) < 20 or packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_UDP:
        return None
    header = packet[4 * (packet[0] & 15) + 8 :][:12]
    # RFC 7983: 128..191 is RTP or RTCP; RFC 5761 §4: RTCP has packet types 192..223 where RTP has marker and type.
    if len(header) < 12 or not 128 <= header[0] < 192 or 192 <= header[1] <= 223:
        return None
    return header[1] & 0x7F, int.from_bytes(header[4:8], "big")


class Link:
    """One direction: says when a packet is to arrive. Pure; time and randomness come as arguments."""

    def __init__(self, *, rng: random.Random) -> None:
        self.impairment = Impairment()
        self._rng = rng
        self._in_burst = False
        self._free_at = 0
        self._last_due = 0
        self._packets = self._lost = self._dropped = self._bytes = 0

    @property
    def stats(self) -> LinkStats:
        return LinkStats(self._packets, self._lost, self._dropped, self._bytes)

    def drop(self) -> None:
        """Counts a packet that found no room in the relay."""
        self._dropped += 1

    def due(self, size_bytes: int, now: int) -> Nanos | None:
        """When a packet that enters now comes out; None if it is lost."""
        self._packets += 1
        self._bytes += size_bytes
        if self._is_lost():
            self._lost += 1
            return None
        sent = self._sent(size_bytes, now)
        if sent is None:
            self._dropped += 1
            return None
        jitter = abs(self._rng.gauss(0, self.impairment.jitter_ms)) if self.impairment.jitter_ms else 0.0
        due = sent + round((self.impairment.delay_ms + jitter) * NANOS_PER_MS)
        if not self.impairment.reorder:
            due = max(due, self._last_due)
        self._last_due = due
        return Nanos(due)

    def _is_lost(self) -> bool:
        loss, burst = self.impairment.loss, self.impairment.burst
        # Stationary share of the bad state: enter / (enter + leave) == loss, with leave == 1 / burst. Bursts of mean 1
        # would need immediate leaving, which is a deterministic alternation; there losses are independent instead.
        if burst == 1:
            self._in_burst = self._rng.random() < loss
        elif self._in_burst:
            self._in_burst = self._rng.random() >= 1 / burst
        else:
            self._in_burst = self._rng.random() < loss / (burst * (1 - loss))
        return self._in_burst

    def _sent(self, size_bytes: int, now: int) -> int | None:
        """When the last bit has left the rate limit; None if the queue is full."""
        if not self.impairment.rate_kbps:
            return now
        begin = max(now, self._free_at)
        if begin - now > self.impairment.queue_ms * NANOS_PER_MS:
            return None
        self._free_at = begin + round(size_bytes * 8 * NANOS_PER_SECOND / (self.impairment.rate_kbps * 1000))
        return self._free_at


class _Order(msgspec.Struct, frozen=True):
    """A message to the relay; an impairment that is None asks for the stats only."""

    direction: Direction
    impairment: Impairment | None = None
    tells_losses: bool = False  #: of `direction`, "ab" or "ba"


class _Answer(msgspec.Struct, frozen=True):
    ab: LinkStats
    ba: LinkStats
    error: str = ""
    losses: tuple[Loss, ...] = ()


class BadNetwork(Scoped):
    """Two fresh namespaces `a` and `b` with an impaired wire between them; a context manager.

    A program enters one with the words of `inside("a")` before its own: `[*network.inside("a"), "python", ...]`.
    Unix sockets (Pulse, browsers' pipes) work across namespaces.

    Args:    seed: of loss and jitter.
    Raises:  RigError without root or /dev/net/tun; ProgramMissing without `ip`.
    """

    def __init__(self, *, seed: int = 1) -> None:
        self._seed = seed

    @property
    def a(self) -> str:
        """Name of the namespace with ADDRESS_A; by custom the server's."""
        return self._names[0]

    @property
    def b(self) -> str:
        """Name of the namespace with ADDRESS_B; by custom the browser's."""
        return self._names[1]

    def inside(self, side: Literal["a", "b"]) -> list[str]:
        """First words of a command that is to run in a namespace."""
        return [find_program("ip"), "netns", "exec", self.a if side == "a" else self.b]

    def impair(self, impairment: Impairment, *, direction: Direction = "both") -> None:
        """Changes the wire; packets already under way keep their time."""
        self._ask(_Order(direction, impairment))

    def stats(self) -> tuple[LinkStats, LinkStats]:
        """(a to b, b to a)."""
        answer = self._ask(_Order("both"))
        return answer.ab, answer.ba

    def losses(self, direction: Literal["ab", "ba"]) -> tuple[Loss, ...]:
        """The last LOSSES_KEPT RTP packets of a direction that were lost or dropped, oldest first."""
        return self._ask(_Order(direction, tells_losses=True)).losses

    def _open(self, cleanup: contextlib.ExitStack) -> None:
        require_tun()
        directory = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="duplexd-net-")))
        self._control = directory / "control"
        self._names = (f"{directory.name}-a", f"{directory.name}-b")
        command = [sys.executable, "-m", "duplexd.bench.netem", *self._names, str(self._control), str(self._seed)]
        with (directory / "log").open("wb") as log:
            relay = start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        cleanup.callback(_end_relay, relay)
        assert relay.stdout is not None
        readable, _, _ = select.select([relay.stdout], [], [], _START_LIMIT_S)
        if not readable or relay.stdout.readline() != b"ready\n":
            said = (directory / "log").read_text(errors="replace").strip()
            raise RigError(f"the network relay did not start within {_START_LIMIT_S:g} s: {said or 'it said nothing'}")

    def _ask(self, order: _Order) -> _Answer:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.settimeout(2.0)
            try:
                link.connect(str(self._control))
                link.send(msgspec.json.encode(order))
                answer = msgspec.json.decode(link.recv(_MESSAGE_BYTES), type=_Answer)
            except (OSError, msgspec.DecodeError) as error:
                raise RigError(f"the network relay does not answer: {error}") from error
        if answer.error:
            raise RigError(f"the network relay refused {order}: {answer.error}")
        return answer


def require_tun() -> None:
    """Raises RigError when this machine or user cannot make TUN devices in namespaces."""
    find_program("ip")
    if os.geteuid() != 0:
        raise RigError("an impaired network needs root (network namespaces and TUN devices); run it with sudo")
    try:
        os.close(os.open(_TUN_DEVICE, os.O_RDWR))
    except OSError as error:
        raise RigError(
            f"an impaired network needs {_TUN_DEVICE} ({os.strerror(error.errno or errno.ENOENT)}); "
            "load the module with `modprobe tun`, or start the container with "
            "`--device /dev/net/tun --cap-add NET_ADMIN --cap-add SYS_ADMIN`"
        ) from error


def _end_relay(relay: subprocess.Popen[bytes]) -> None:
    """Closing the relay's input is the order to clean up and end."""
    assert relay.stdin is not None
    relay.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        relay.wait(5.0)
    end(relay)


# ---- the relay process ----


@contextlib.contextmanager
def _namespace(name: str) -> Iterator[str]:
    ip = find_program("ip")
    run([ip, "netns", "add", name])
    try:
        yield name
    finally:
        run([ip, "netns", "del", name])


@contextlib.contextmanager
def _inside(name: str) -> Iterator[None]:
    """This thread stands in a namespace for a while."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(handle: int) -> None:
        if libc.setns(handle, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns({name}) failed")

    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    away = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        enter(away)
        yield
    finally:
        enter(home)
        os.close(away)
        os.close(home)


def _open_wire(name: str, address: str) -> int:
    """A TUN device "net0" in a namespace, up and the way to everywhere."""
    ip = find_program("ip")
    with _inside(name):
        handle = os.open(_TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH22x", b"net0", _IFF_TUN_NO_PI))
        run([ip, "link", "set", "lo", "up"])
        run([ip, "link", "set", "net0", "addrgenmode", "none"])  # no IPv6 address: ICE would try it over the wire
        run([ip, "address", "add", f"{address}/24", "dev", "net0"])
        run([ip, "link", "set", "net0", "mtu", str(MTU), "up"])
        run([ip, "route", "add", "default", "dev", "net0"])  # browsers ask which address leads to the world
        for server in _name_servers():
            run([ip, "route", "add", "unreachable", server])
    return handle


def _name_servers() -> list[str]:
    """The host's IPv4 name servers. They cannot be met from inside: a look-up is to fail at once, not after 10 s."""
    try:
        lines = Path("/etc/resolv.conf").read_text(errors="replace").splitlines()
    except OSError:
        return []
    named = [words[1] for line in lines if len(words := line.split()) > 1 and words[0] == "nameserver"]
    return [name for name in dict.fromkeys(named) if ":" not in name and not name.startswith("127.")]


class _Relay:
    """Moves packets between two devices; `links[handle]` is what comes *out of* the device `handle`."""

    def __init__(self, wire_a: int, wire_b: int, control: socket.socket, *, seed: int) -> None:
        self._other = {wire_a: wire_b, wire_b: wire_a}
        self._links = {wire: Link(rng=random.Random(f"{seed}-{index}")) for index, wire in enumerate((wire_a, wire_b))}
        self._losses: dict[int, deque[Loss]] = {wire: deque(maxlen=LOSSES_KEPT) for wire in self._links}
        self._control = control
        self._under_way: list[tuple[int, int, int, bytes]] = []
        self._numbers = itertools.count()

    def run(self, parent: int) -> None:
        """Until the parent closes its end of the pipe `parent`."""
        asking: list[socket.socket] = []
        while True:
            wait_s = max(0, self._under_way[0][0] - now()) / NANOS_PER_SECOND if self._under_way else 1.0
            handles = [parent, self._control.fileno(), *(link.fileno() for link in asking), *self._links]
            ready, _, _ = select.select(handles, [], [], wait_s)
            self._deliver(now())
            for wire in self._links:
                if wire in ready:
                    self._take(wire)
            if parent in ready and not os.read(parent, 1):
                return
            for link in [link for link in asking if link.fileno() in ready]:
                asking.remove(link)
                self._answer(link)
            if self._control.fileno() in ready and len(asking) < _ASKING_MAX:
                asking.append(self._control.accept()[0])

    def _deliver(self, moment: int) -> None:
        while self._under_way and self._under_way[0][0] <= moment:
            _, _, wire, packet = heapq.heappop(self._under_way)
            with contextlib.suppress(BlockingIOError):  # the device's queue is full: the packet is lost, as on a wire
                os.write(wire, packet)

    def _take(self, wire: int) -> None:
        link = self._links[wire]
        for _ in range(_READS_MAX):
            try:
                packet = os.read(wire, 2 * MTU)
            except BlockingIOError:
                return
            if len(self._under_way) >= 2 * _HELD_MAX:
                link.drop()
                continue
            moment = now()
            due = link.due(len(packet), moment)
            if due is None:
                self._note_loss(wire, packet, moment)
            else:
                heapq.heappush(self._under_way, (due, next(self._numbers), self._other[wire], packet))

    def _note_loss(self, wire: int, packet: bytes, moment: int) -> None:
        if (rtp := rtp_of(packet)) is not None:
            self._losses[wire].append(Loss(Nanos(moment), *rtp))

    def _answer(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            error = ""
            losses: tuple[Loss, ...] = ()
            try:
                order = msgspec.json.decode(link.recv(_MESSAGE_BYTES), type=_Order)
                self._obey(order)
                losses = self._told(order)
            except (msgspec.DecodeError, ValueError) as refused:
                error = str(refused)
            stats = [one.stats for one in self._links.values()]
            link.send(msgspec.json.encode(_Answer(stats[0], stats[1], error, losses)))

    def _told(self, order: _Order) -> tuple[Loss, ...]:
        named = dict(zip(("ab", "ba"), self._losses.values(), strict=True))
        return tuple(named[order.direction]) if order.tells_losses else ()

    def _obey(self, order: _Order) -> None:
        if order.impairment is None:
            return
        for name, link in zip(("ab", "ba"), self._links.values(), strict=True):
            if order.direction in (name, "both"):
                link.impairment = order.impairment


def main() -> None:
    """Entry of the relay process: NAMESPACE_A NAMESPACE_B CONTROL_SOCKET SEED."""
    parser = argparse.ArgumentParser(description="user-space network relay; started by duplexd.bench.netem.BadNetwork")
    for name in ("namespace_a", "namespace_b", "control"):
        parser.add_argument(name)
    parser.add_argument("seed", type=int)
    given = parser.parse_args()
    with (
        _namespace(given.namespace_a),
        _namespace(given.namespace_b),
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control,
    ):
        control.bind(given.control)
        control.listen()
        wire_a = _open_wire(given.namespace_a, ADDRESS_A)
        wire_b = _open_wire(given.namespace_b, ADDRESS_B)
        os.write(sys.stdout.fileno(), b"ready\n")
        _Relay(wire_a, wire_b, control, seed=given.seed).run(sys.stdin.fileno())


if __name__ == "__main__":
    main()
