"""`duplexd doctor`: what a beginner's machine lacks, one line a check, with the command that mends it."""

from __future__ import annotations

import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator

import msgspec
from rich.console import Console

from duplexd import weights
from duplexd.config import AUTO_FACE, NO_FACE, Config, face_of
from duplexd.errors import DuplexdError


class Check(msgspec.Struct, frozen=True):
    """One line; `needed` ones make the exit code 1."""

    name: str
    fine: bool
    text: str
    needed: bool = True


def examine(config: Config) -> int:
    """Run all checks and print them; 1 when something needed is missing."""
    console = Console(highlight=False, soft_wrap=True)
    failed = False
    for check in checks(config):
        mark = "[green]ok  [/]" if check.fine else "[red]no  [/]" if check.needed else "[yellow]none[/]"
        console.print(f"{mark} {check.name:<22} {check.text}")
        failed |= check.needed and not check.fine
    return 1 if failed else 0


def checks(config: Config) -> Iterator[Check]:
    yield _python()
    yield from _guarded("torch", lambda: _torch(config))
    yield _port(config)
    yield _udp()
    yield from _weights(config)
    yield from _guarded("face", lambda: _face(config))
    for program, package in (("chromium", "chromium"), ("pulseaudio", "pulseaudio"), ("ip", "iproute2")):
        found = shutil.which(program)
        text = found or f"only for benches and browser tests: apt-get install {package}"
        yield Check(program, found is not None, text, needed=False)


def _python() -> Check:
    version = sys.version_info
    fine = (3, 11) <= version < (3, 14)
    return Check("Python", fine, f"{platform.python_version()} ({sys.executable}); 3.11 to 3.13 are supported")


def _guarded(name: str, check: Callable[[], Check]) -> Iterator[Check]:
    try:
        yield check()
    except Exception as error:  # A broken installation shows itself in any exception; the doctor must go on.
        yield Check(name, False, f"{type(error).__name__}: {error}; run scripts/setup")


def _torch(config: Config) -> Check:
    import torch

    from duplexd.engine.process import check_device

    check_device(config.device)
    device = torch.device(config.device)
    torch.ones(2, device=device).sum().item()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return Check("torch device", True, f"torch {torch.__version__}, device {config.device} ({name})")


def _port(config: Config) -> Check:
    with socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            why = f"cannot listen on {config.host}:{config.port}: {error.strerror}; choose another with --port"
            return Check("port", False, why)
    return Check("port", True, f"{config.host}:{config.port} is free")


def _udp() -> Check:
    """Media needs UDP even on one machine."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(1.0)
        try:
            sender.sendto(b"duplexd", receiver.getsockname())
            receiver.recv(16)
        except OSError as error:
            return Check("UDP on loopback", False, f"a datagram did not arrive ({error}); look at the firewall")
    return Check("UDP on loopback", True, "a datagram arrived")


def _face(config: Config) -> Check:
    """Drawn as the engine would: the model's own face may be done without, one that was named may not."""
    shown = face_of(config)
    if config.model != "pocket" or shown == NO_FACE:
        return Check("face", True, f"{shown}: nothing has to be drawn")
    from duplexd.models.face.painter import drawing_fault

    fault = drawing_fault()
    return Check("face", not fault, fault or f"{shown} can be drawn", needed=config.face != AUTO_FACE)


def _weights(config: Config) -> Iterator[Check]:
    names = weights.needed(model=config.model, thinker=config.thinker)
    if not names:
        yield Check("weights", True, f"the model {config.model} needs none that duplexd fetches")
        return
    try:
        findings = weights.verify(names, deep=True)
    except DuplexdError as error:
        yield Check("weights", False, str(error))
        return
    for finding in findings:
        file = finding.file
        fault = f"{finding.fault}; run: duplexd fetch {file.name}" if finding.fault else ""
        yield Check(f"weights {file.name}", not fault, fault or f"sha256 {file.sha256[:16]}…")
