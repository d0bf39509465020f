"""Programs of the host that the rig runs: found with a sentence when missing, ended in bounded time.

1. A missing program is an error that names the package that brings it.
2. Children live in a session of their own: Ctrl-C reaches the rig, which then takes them down in its own order.
3. Nothing waits without a deadline.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from duplexd.clock import now
from duplexd.errors import DuplexdError
from duplexd.units import NANOS_PER_SECOND

#: program -> Debian package
PACKAGE_OF = {
    "pulseaudio": "pulseaudio",
    "pactl": "pulseaudio-utils",
    "pacat": "pulseaudio-utils",
    "parec": "pulseaudio-utils",
    "chromium": "chromium",
    "ip": "iproute2",
}

_POLL_SECONDS = 0.02
_SEARCH_ALSO = ("/usr/sbin", "/sbin")


class RigError(DuplexdError):
    """The measuring rig cannot work here, or a measurement broke; the text says which part and what to do."""


class ProgramMissing(RigError):
    """A program or Python package that the rig needs is not installed; the text has the command that installs it."""


def find_program(name: str) -> str:
    """Path of a program.

    Raises:  ProgramMissing with the apt command.
    """
    path = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *_SEARCH_ALSO]))
    if path is None:
        package = PACKAGE_OF.get(name, name)
        raise ProgramMissing(
            f"the measuring rig needs the program {name!r}, which is not installed; "
            f"run: sudo apt-get install --no-install-recommends {package}"
        )
    return path


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.DEVNULL,
    stderr: int | IO[bytes] = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Starts a child in a session of its own, unbuffered."""
    return subprocess.Popen(
        command, env=env, stdin=stdin, stdout=stdout, stderr=stderr, bufsize=0, start_new_session=True
    )


def halt(process: subprocess.Popen[bytes], *, grace_s: float = 2.0) -> None:
    """Asks a child to end, then kills it; returns with the child reaped. Its pipes stay open, for who reads them."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(grace_s)


def end(process: subprocess.Popen[bytes], *, grace_s: float = 2.0) -> None:
    """`halt`, and closes the child's pipes."""
    halt(process, grace_s=grace_s)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def run(command: Sequence[str], *, env: Mapping[str, str] | None = None, limit_s: float = 5.0) -> str:
    """Output of a short command.

    Raises:  RigError with the command and what it said, when it fails or takes longer than `limit_s`.
    """
    try:
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise RigError(f"{' '.join(command)}: no answer within {limit_s:g} s") from error
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise RigError(f"{' '.join(command)}: exit status {done.returncode}: {said}")
    return done.stdout.decode(errors="replace")


def wait_until(condition: Callable[[], bool], *, limit_s: float) -> bool:
    """Polls a condition; True as soon as it holds, False when it did not within `limit_s`."""
    deadline = now() + round(limit_s * NANOS_PER_SECOND)
    pause = threading.Event()
    while not condition():
        if now() >= deadline:
            return False
        pause.wait(_POLL_SECONDS)
    return True
