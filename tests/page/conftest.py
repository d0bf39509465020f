"""Fixtures of the page's browser tests: a mock front end a process, headless Chromium, a microphone that is a file."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHROMIUM = shutil.which("chromium") or ""
RATE = 48_000
SPEECH_AT_S = 5.0
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--allow-loopback-in-peer-connection",
    "--host-resolver-rules=MAP duplexd.test 127.0.0.1",
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """One mock front end in its own process."""

    def __init__(self, *flags: str) -> None:
        self.port = free_port()
        command = [sys.executable, str(HERE / "mock_server.py"), "--port", str(self.port), *flags]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env=environment())
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.url = f"http://127.0.0.1:{self.port}/"

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*flags: str) -> Server:
        servers.append(Server(*flags))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def microphone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A person who is silent for five seconds, then speaks for one; a minute, so that no test hears it begin anew."""
    rng = np.random.default_rng(5)
    t = np.arange(60 * RATE) / RATE
    x = rng.normal(0, 0.0006, len(t))
    inside = (t >= SPEECH_AT_S) & (t < SPEECH_AT_S + 1.2)
    phase = 2 * np.pi * 165 * t[inside]
    buzz = sum(np.sin(h * phase) / h for h in range(1, 20))
    x[inside] += 0.12 * buzz * (0.6 + 0.4 * np.sin(2 * np.pi * 4 * t[inside]))
    path = tmp_path_factory.mktemp("page") / "microphone.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(x, -1, 1) * 32767).astype("<i2").tobytes())
    return path


@pytest.fixture(scope="module")
def launch(microphone: Path) -> Iterator[Callable[..., Browser]]:
    """Starts a Chromium, or gives back the one with the same flags. Skips where there is none.

    Of the module, not of the session: while it lives, playwright's own event loop runs in this thread, and every
    `asyncio.run` of a later test would fail.
    """
    sync_api = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM:
        pytest.skip("chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        browsers: dict[tuple[bool, bool], Browser] = {}

        def start(*, allow_microphone: bool = True, allow_autoplay: bool = True) -> Browser:
            key = (allow_microphone, allow_autoplay)
            if key not in browsers:
                flags = list(ARGUMENTS)
                if allow_microphone:
                    flags += ["--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"]
                    flags += [f"--use-file-for-fake-audio-capture={microphone}"]
                policy = "no-user-gesture-required" if allow_autoplay else "document-user-activation-required"
                flags.append(f"--autoplay-policy={policy}")
                browsers[key] = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
            return browsers[key]

        yield start
        for browser in browsers.values():
            browser.close()


@pytest.fixture
def visit(launch: Callable[..., Browser]) -> Iterator[Callable[..., Page]]:
    """Opens the page in a context of its own and fails the test when the page raises an error."""
    contexts: list[Any] = []
    faults: list[str] = []

    def go(url: str, *, width: int = 1200, height: int = 860, untouched: bool = False, **flags: bool) -> Page:
        context = launch(**flags).new_context(viewport={"width": width, "height": height})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(url)
        if not untouched:  # whatever playwright evaluates in a page counts as a gesture of the person
            page.wait_for_function("window.duplexd !== undefined")
        return page

    yield go
    for context in contexts:
        context.close()
    assert faults == []
