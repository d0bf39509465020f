"""The painter: a process beside the engine that draws.

Drawing is Python, a fifth of a core's time at 25 frames. In the engine it would hold the interpreter for so long, and
whatever thinks and speaks there would wait for it at every operation.

1. One request at a time: the motion of some frames, and I420 in memory that both processes see.
2. It ends when its socket does: with the engine, however that ends.
3. One that has died is started again, and what it was drawing is drawn again, once.
4. It has the nice value of the thread that starts it: a lane's.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import weakref
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from duplexd.errors import DuplexdError, ModelError
from duplexd.models.face.motion import CHANNELS

if TYPE_CHECKING:
    from duplexd.models.face.drawing.picture import Studio

Motions = npt.NDArray[np.float32]  #: (frames, CHANNELS)
I420 = npt.NDArray[np.uint8]

START_WITHIN_S = 60.0  #: it imports and reads libraries; measured: 0.6 s on a quiet machine
DRAW_WITHIN_S = 10.0  #: a chunk; measured: 0.1 s
MESSAGE_MAX = 65_536
#: Resident memory of the process with a few portraits ready: the interpreter, Skia, OpenCV, paint. What a plan claims.
PAINTER_BYTES = 140_000_000


class _Request(msgspec.Struct, frozen=True):
    character: str
    motions: bytes


class _Reply(msgspec.Struct, frozen=True):
    error: str = ""


_requests = msgspec.msgpack.Decoder(_Request)
_replies = msgspec.msgpack.Decoder(_Reply)


class _Gone(Exception):
    """The process does not answer."""


class Painter:
    """Draws in a process of its own.

    Args:    size: pixels of a side; frames_max: of one request; portraits_max: kept ready, as `Studio`.
    """

    def __init__(self, *, size: int, frames_max: int, portraits_max: int = 4) -> None:
        self._size, self._frames_max, self._portraits_max = size, frames_max, portraits_max
        memory = os.memfd_create("duplexd-painter", os.MFD_CLOEXEC)
        os.ftruncate(memory, frames_max * _picture_bytes(size))
        self._memory = memory
        self._frames = _frames_in(memory, size, frames_max)
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Painter] | None = None
        weakref.finalize(self, os.close, memory)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Returns when it can draw. Raises ModelError when it cannot, with its own reason."""
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            given = {"--socket": theirs.fileno(), "--memory": self._memory}
            numbers = {"--size": self._size, "--frames": self._frames_max, "--portraits": self._portraits_max}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "duplexd.models.face.painter"]
                + [str(part) for pair in (given | numbers).items() for part in pair],
                pass_fds=tuple(given.values()),
                stdin=subprocess.DEVNULL,
            )
        self._socket = ours
        self._end = weakref.finalize(self, _end, self._process, ours)
        try:
            error = self._answer(START_WITHIN_S)
        except _Gone as gone:
            error = f"the process that draws the face did not start: {gone}"
        if error:
            self.close()
            raise ModelError(error)

    def draw(self, character: str, motions: Motions) -> I420:
        """Pictures of consecutive frames: (frames, height * 3 / 2, width), until the next call.

        Raises:  ModelError for a character that does not exist, or when no process can be had that draws.
        """
        if motions.ndim != 2 or motions.shape[1] != CHANNELS or not 0 < len(motions) <= self._frames_max:
            raise ModelError(f"motion of shape {motions.shape}; a painter takes 1 to {self._frames_max} of {CHANNELS}")
        request = msgspec.msgpack.encode(_Request(character, np.ascontiguousarray(motions, np.float32).tobytes()))
        try:
            error = self._ask(request)
        except _Gone:
            self.start()
            try:
                error = self._ask(request)
            except _Gone as gone:
                self.close()  # Its answer, if one comes yet, must not be taken for that of the next request.
                raise ModelError(f"the process that draws the face failed twice over the same frames: {gone}") from gone
        if error:
            raise ModelError(error)
        return self._frames[: len(motions)]

    def close(self) -> None:
        """End the process. `draw` starts another."""
        if self._end is not None:
            self._end()
        self._socket = self._process = self._end = None

    def _ask(self, request: bytes) -> str:
        if self._socket is None:
            raise _Gone("it was not started")
        try:
            self._socket.send(request)
        except OSError as error:
            raise _Gone(str(error)) from error
        return self._answer(DRAW_WITHIN_S)

    def _answer(self, within_s: float) -> str:
        assert self._socket is not None
        self._socket.settimeout(within_s)
        try:
            packet = self._socket.recv(MESSAGE_MAX)
        except TimeoutError:
            raise _Gone(f"no answer within {within_s:.0f} s") from None
        except OSError as error:
            raise _Gone(str(error)) from error
        if not packet:
            raise _Gone(f"it ended with {self._status()}")
        return _replies.decode(packet).error

    def _status(self) -> str:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"exit code {self._process.wait(1.0)}"
        return "a closed socket"


def drawing_fault() -> str:
    """Why nothing can be drawn on this machine; empty: it can. A painter is started for it, and ended."""
    painter = Painter(size=64, frames_max=1, portraits_max=1)
    try:
        painter.start()
    except ModelError as error:
        return str(error)
    painter.close()
    return ""


def _end(process: subprocess.Popen[bytes], sock: socket.socket) -> None:
    sock.close()
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _picture_bytes(size: int) -> int:
    return size * size * 3 // 2


def _frames_in(memory: int, size: int, frames: int) -> I420:
    mapped = mmap.mmap(memory, frames * _picture_bytes(size))
    return np.frombuffer(mapped, np.uint8).reshape(frames, size * 3 // 2, size)


# The process itself --------------------------------------------------------------------------------------------------


def _serve(sock: socket.socket, studio: Studio, frames: I420) -> None:
    """Until the other side is gone."""
    sock.send(msgspec.msgpack.encode(_Reply()))
    while packet := sock.recv(MESSAGE_MAX):
        sock.send(msgspec.msgpack.encode(_Reply(_draw(studio, _requests.decode(packet), frames))))


def _draw(studio: Studio, request: _Request, frames: I420) -> str:
    motions = np.frombuffer(request.motions, np.float32).reshape(-1, CHANNELS)
    try:
        for at, motion in enumerate(motions):
            frames[at] = studio.picture(request.character, motion)
    except DuplexdError as error:
        return str(error)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description="draws the face; started by the engine")
    for name in ("socket", "memory", "size", "frames", "portraits"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal tells everybody; this one ends with the engine.
    sock = socket.socket(fileno=options.socket)
    try:
        from duplexd.models.face.drawing.picture import Studio

        studio = Studio(size=options.size, portraits_max=options.portraits)
    except DuplexdError as error:
        sock.send(msgspec.msgpack.encode(_Reply(str(error))))
        sys.exit(2)
    with contextlib.suppress(ConnectionError):
        _serve(sock, studio, _frames_in(options.memory, options.size, options.frames))


if __name__ == "__main__":
    main()
