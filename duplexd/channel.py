"""Front end <-> engine: packets of meaning on a local socket, bytes of media in shared memory.

1. One packet is one message. Order is kept; nothing is lost short of the death of a process.
2. The shared memory is one anonymous file of fixed slots, named by a descriptor only: when both processes are gone the
   kernel frees it, also after kill -9. Slots carry no flags and no locks: a slot belongs to whoever last received a
   message about it.
3. A peer that does not read is bounded: beyond `backlog_max` packets `send` raises ChannelFull.
4. End of file is the signal that the other process is gone: `receive` raises ChannelClosed.

    | input slots: int16 at 16 kHz ... | output slots: int16 at the model's rate ... | picture slots: I420 ... |
"""

from __future__ import annotations

import mmap
import os
import socket
from collections import deque
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from duplexd.errors import ChannelClosed, ChannelFull

PACKET_BYTES_MAX = 65_536
SEND_BUFFER_BYTES = 1 << 20
#: Pictures that are made at once lie in one slot: two, so that the first need not wait long for the last.
PICTURES_PER_SLOT = 2


class Channel:
    """One end of a SOCK_SEQPACKET pair. Never blocks."""

    def __init__(self, sock: socket.socket, *, backlog_max: int = 4096) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._backlog: deque[bytes] = deque()
        self.backlog_max = backlog_max

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        """Packets wait for the peer to read; call `flush` when the descriptor is writable."""
        return bool(self._backlog)

    def send(self, packet: bytes) -> None:
        """Raises ChannelFull when the peer has let `backlog_max` packets pile up, ChannelClosed when it is gone."""
        if not packet:
            raise ValueError("an empty packet reads like the end of the channel")
        if len(packet) > PACKET_BYTES_MAX:
            raise ChannelFull(f"a packet of {len(packet)} bytes exceeds the bound of {PACKET_BYTES_MAX}")
        if len(self._backlog) >= self.backlog_max:
            raise ChannelFull(f"{self.backlog_max} packets wait; the other process does not read")
        self._backlog.append(packet)
        self.flush()

    def flush(self) -> None:
        try:
            while self._backlog:
                self._socket.send(self._backlog[0])
                self._backlog.popleft()
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("the other process is gone") from error

    def receive(self, *, packets_max: int = 256) -> list[bytes]:
        """Packets that have arrived, oldest first. Raises ChannelClosed at the end, after the last packet was
        returned.
        """
        packets: list[bytes] = []
        while len(packets) < packets_max:
            try:
                packet = self._socket.recv(PACKET_BYTES_MAX)
            except BlockingIOError:
                break
            except ConnectionResetError:
                packet = b""
            if not packet:
                if packets:
                    break
                raise ChannelClosed("the other process is gone")
            packets.append(packet)
        return packets

    def close(self) -> None:
        self._socket.close()


class MediaShape(msgspec.Struct, frozen=True):
    """Slots of the shared memory; counts bound what is in flight, samples bound one block and one chunk, bytes the
    frames of one slot of pictures.
    """

    in_slots: int
    in_samples: int
    out_slots: int
    out_samples: int
    picture_slots: int = 0
    picture_bytes: int = 0

    @property
    def sound_bytes(self) -> int:
        return 2 * (self.in_slots * self.in_samples + self.out_slots * self.out_samples)

    @property
    def nbytes(self) -> int:
        return self.sound_bytes + self.picture_slots * self.picture_bytes


class SharedMedia:
    """Both processes' view of the slots. The front end writes input and reads output; the engine, the reverse."""

    def __init__(self, shape: MediaShape, fd: int) -> None:
        self.shape = shape
        self.fd = fd
        self._map = mmap.mmap(fd, shape.nbytes)
        flat = np.frombuffer(self._map, dtype=np.int16, count=shape.sound_bytes // 2)
        border = shape.in_slots * shape.in_samples
        self._in = flat[:border].reshape(shape.in_slots, shape.in_samples)
        self._out = flat[border:].reshape(shape.out_slots, shape.out_samples)
        pictures = np.frombuffer(self._map, dtype=np.uint8, offset=shape.sound_bytes)
        self._pictures = pictures.reshape(shape.picture_slots, shape.picture_bytes)

    @classmethod
    def create(cls, shape: MediaShape) -> SharedMedia:
        fd = os.memfd_create("duplexd-media", os.MFD_CLOEXEC)
        os.ftruncate(fd, shape.nbytes)
        return cls(shape, fd)

    # The engine's side: what stages see.

    def read(self, slot: int, samples: int) -> NDArray[np.int16]:
        """Input PCM, int16 (samples,); a view that is valid until the slot is freed."""
        return self._in[slot, :samples]

    def write(self, slot: int, pcm: NDArray[Any]) -> None:
        """Output PCM, int16 (samples,)."""
        if len(pcm) > self.shape.out_samples:
            raise ValueError(f"a chunk of {len(pcm)} samples exceeds a slot of {self.shape.out_samples}")
        self._out[slot, : len(pcm)] = pcm

    def write_picture(self, slot: int, at: int, picture: NDArray[np.uint8]) -> None:
        """Frame number `at` of a picture slot: I420, uint8 (height * 3 / 2, width). All frames of a slot are of one
        size.
        """
        first, stop = at * picture.size, (at + 1) * picture.size
        if stop > self.shape.picture_bytes:
            raise ValueError(f"frame {at} of {picture.size} bytes exceeds a slot of {self.shape.picture_bytes}")
        self._pictures[slot, first:stop] = picture.reshape(-1)

    # The front end's side; the character reads its own voice, too.

    def write_input(self, slot: int, pcm: NDArray[np.int16]) -> None:
        self._in[slot, : len(pcm)] = pcm

    def read_output(self, slot: int, samples: int) -> NDArray[np.int16]:
        """A copy: the slot is free afterwards."""
        return self._out[slot, :samples].copy()

    def read_pictures(self, slot: int, count: int, *, width: int, height: int) -> NDArray[np.uint8]:
        """A copy of the first frames of a slot, I420, uint8 (count, height * 3 / 2, width): the slot is free then."""
        rows = height * 3 // 2
        return self._pictures[slot, : count * rows * width].reshape(count, rows, width).copy()

    def close(self) -> None:
        del self._in, self._out, self._pictures
        self._map.close()
        os.close(self.fd)
