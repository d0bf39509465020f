"""Headless Chromium of the distribution, with a real loudspeaker and microphone, or a file for a microphone.

1. The browser is the user's own program (Debian's chromium), found or named; nothing is downloaded.
2. Playwright mutes every browser it starts; that is undone here, because the loudspeaker is what is measured.
3. Nothing leaves the machine: background networking, component updates and sync are off.
4. Chromium's sandbox does not run as root nor in most containers, so it is off: load only pages of your own server.
5. `performance.now()` of a page runs on the host's monotonic clock with an origin of its own; `page_clock` finds it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from duplexd.bench.programs import ProgramMissing, RigError, find_program
from duplexd.bench.scoped import AsyncScoped
from duplexd.clock import now
from duplexd.units import NANOS_PER_MS, Nanos

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, Page

FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--autoplay-policy=no-user-gesture-required",
    "--use-fake-ui-for-media-stream",  # grants the microphone without a dialogue
    "--allow-loopback-in-peer-connection",  # Chromium leaves 127.0.0.1 out of its candidates otherwise
)
ERRORS_MAX = 200  #: page errors kept; later ones are only counted
LAUNCH_LIMIT_MS = 30_000


@dataclass(frozen=True)
class PageClock:
    """Maps `performance.now()` of one page to the host's clock."""

    origin_ns: Nanos  #: host time of performance.now() == 0
    uncertainty_ns: int  #: half of the shortest round trip

    def time_of(self, page_ms: float) -> Nanos:
        return Nanos(self.origin_ns + round(page_ms * NANOS_PER_MS))


class Browser(AsyncScoped):
    """One headless Chromium; an async context manager. Pages are Playwright's own objects.

    Args:    env: environment, usually `PulseRig.env`; namespace: network namespace to run in, e.g. `BadNetwork.b`;
             fake_microphone: a WAV file that replaces every microphone, once or again and again;
             fake_camera: a .y4m or .mjpeg file; insecure_origins: origins over plain http that may use the microphone
             (127.0.0.1 may anyway); executable: another Chromium.
    Raises:  ProgramMissing without chromium or playwright; RigError when it does not start within 30 s.
    """

    def __init__(
        self,
        *,
        env: Mapping[str, str] | None = None,
        namespace: str | None = None,
        fake_microphone: Path | None = None,
        fake_microphone_repeats: bool = False,
        fake_camera: Path | None = None,
        insecure_origins: Sequence[str] = (),
        flags: Sequence[str] = (),
    ) -> None:
        self._env = dict(os.environ if env is None else env)
        self._namespace = namespace
        self._flags = [*FLAGS, *flags]
        if insecure_origins:
            self._flags.append(f"--unsafely-treat-insecure-origin-as-secure={','.join(insecure_origins)}")
        if fake_microphone:
            self._flags.append("--use-fake-device-for-media-stream")
            once = "" if fake_microphone_repeats else "%noloop"
            self._flags.append(f"--use-file-for-fake-audio-capture={_existing(fake_microphone)}{once}")
        if fake_camera:
            if not fake_microphone:
                self._flags.append("--use-fake-device-for-media-stream")
            self._flags.append(f"--use-file-for-fake-video-capture={_existing(fake_camera)}")
        self.page_errors: list[str] = []  #: uncaught errors and console errors of all pages, at most ERRORS_MAX

    @property
    def version(self) -> str:
        """Of Chromium; belongs beside every number."""
        return self._version

    async def page(self, url: str, *, width: int = 1280, height: int = 800) -> Page:
        """Opens a URL in a fresh profile, with microphone and camera already allowed."""
        context = await self._context(width, height)
        page = await context.new_page()
        page.on("pageerror", lambda error: self._note(f"{page.url}: {error}"))
        page.on("console", lambda said: self._note(f"{page.url}: {said.text}") if said.type == "error" else None)
        await page.goto(url)
        return page

    async def _context(self, width: int, height: int) -> BrowserContext:
        viewport = {"width": width, "height": height}
        return await self._browser.new_context(permissions=["microphone", "camera"], viewport=viewport)  # type: ignore[arg-type]

    async def _open(self, cleanup: contextlib.AsyncExitStack) -> None:
        try:
            from playwright.async_api import Error, async_playwright
        except ImportError as error:
            raise ProgramMissing(
                "the measuring rig drives the browser with the Python package 'playwright', which is not installed; "
                "run: pip install playwright (the browser itself comes from: apt-get install chromium)"
            ) from error
        path = find_program("chromium")
        if self._namespace is not None:
            path = str(_wrapper(cleanup, self._namespace, path))
        driver = await cleanup.enter_async_context(async_playwright())
        try:
            self._browser = await driver.chromium.launch(
                executable_path=path,
                headless=True,
                args=self._flags,
                env=dict[str, str | float | bool](self._env),
                ignore_default_args=["--mute-audio"],
                chromium_sandbox=False,
                timeout=LAUNCH_LIMIT_MS,
            )
        except Error as error:
            raise RigError(f"Chromium ({path}) did not start: {error.message}") from error
        cleanup.push_async_callback(self._browser.close)
        self._version = self._browser.version

    def _note(self, text: str) -> None:
        if len(self.page_errors) < ERRORS_MAX:
            self.page_errors.append(text)


async def page_clock(page: Page, *, pings: int = 20) -> PageClock:
    """Where `performance.now()` of a page stands on the host's clock: the shortest of some round trips, halved."""
    if pings < 1:
        raise ValueError(f"a page clock needs at least one ping, not {pings}")
    best: PageClock | None = None
    for _ in range(pings):
        sent = now()
        page_ms = float(await page.evaluate("performance.now()"))
        half = (now() - sent) // 2
        if best is None or half < best.uncertainty_ns:
            best = PageClock(origin_ns=Nanos(sent + half - round(page_ms * NANOS_PER_MS)), uncertainty_ns=half)
    assert best is not None
    return best


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise RigError(f"{file} does not exist; Chromium would put silence in its place without a word")
    return file.resolve()


def _wrapper(cleanup: contextlib.AsyncExitStack, namespace: str, program: str) -> Path:
    """An executable that runs `program` inside a namespace: Playwright takes a path and no words before it."""
    directory = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="duplexd-browser-")))
    script = directory / "chromium"
    words = [find_program("ip"), "netns", "exec", namespace, program]
    script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    script.chmod(0o755)
    return script
