"""Chromium as a pair of ears and a mouth."""

from __future__ import annotations

import asyncio
import builtins
import shutil
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest

from duplexd.bench.browser import ERRORS_MAX, Browser, page_clock
from duplexd.bench.netem import ADDRESS_A, ADDRESS_B, BadNetwork, require_tun
from duplexd.bench.programs import ProgramMissing, RigError, end, start
from duplexd.clock import now

LISTEN = """async () => {
  const stream = await navigator.mediaDevices.getUserMedia({audio: true});
  const context = new AudioContext(), analyser = context.createAnalyser(), data = new Float32Array(2048);
  context.createMediaStreamSource(stream).connect(analyser);
  let peak = 0;
  for (let i = 0; i < 80 && peak < 0.1; i++) {
    analyser.getFloatTimeDomainData(data);
    peak = Math.max(peak, ...data);
    await new Promise(done => setTimeout(done, 25));
  }
  return peak;
}"""


def test_a_missing_browser_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("duplexd.bench.programs._SEARCH_ALSO", ())

    with pytest.raises(ProgramMissing, match="apt-get install --no-install-recommends chromium"):
        asyncio.run(Browser().__aenter__())


def test_a_missing_driver_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_playwright(name: str, *rest: object) -> object:
        if name.startswith("playwright"):
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_playwright)

    with pytest.raises(ProgramMissing, match="pip install playwright"):
        asyncio.run(Browser().__aenter__())


def test_a_microphone_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RigError, match="does not exist"):
        Browser(fake_microphone=tmp_path / "none.wav")


browser_only = pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")


@pytest.mark.browser
@browser_only
def test_a_page_hears_the_microphone_file_and_its_clock_is_ours(tmp_path: Path) -> None:
    with wave.open(str(tmp_path / "tone.wav"), "wb") as file:
        file.setparams((1, 2, 48_000, 0, "NONE", "not compressed"))
        tone = 16_000 * np.sin(2 * np.pi * 440 * np.arange(96_000) / 48_000)
        file.writeframes(tone.astype("<i2").tobytes())
    (tmp_path / "page.html").write_text("<title>page</title><script>console.error('first words')</script>")

    async def visit() -> tuple[float, int, int, int, list[str]]:
        flags = ["--allow-file-access-from-files"]
        async with Browser(fake_microphone=tmp_path / "tone.wav", fake_microphone_repeats=True, flags=flags) as browser:
            page = await browser.page((tmp_path / "page.html").as_uri())
            clock = await page_clock(page)
            before = now()
            page_now = clock.time_of(float(await page.evaluate("performance.now()")))
            after = now()
            peak = float(await page.evaluate(LISTEN))
            return peak, before - clock.uncertainty_ns, page_now, after + clock.uncertainty_ns, browser.page_errors

    peak, before, page_now, after, errors = asyncio.run(visit())

    assert peak > 0.1
    assert before <= page_now <= after
    assert len(errors) == 1
    assert errors[0].endswith("first words")
    assert len(errors) <= ERRORS_MAX


SERVER = """
import http.server
class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"hello {self.client_address[0]}".encode())
    def log_message(self, *words): pass
server = http.server.ThreadingHTTPServer(("10.78.0.1", 8000), Hello)
print("ready", flush=True)
server.serve_forever()
"""


@pytest.mark.browser
@browser_only
def test_a_browser_in_one_namespace_meets_a_server_in_the_other() -> None:
    try:
        require_tun()
    except RigError as error:
        pytest.skip(str(error))

    async def visit(network: BadNetwork) -> str:
        async with Browser(namespace=network.b) as browser:
            page = await browser.page(f"http://{ADDRESS_A}:8000/")
            return str(await page.evaluate("document.body.innerText"))

    with BadNetwork() as network:
        server = start([*network.inside("a"), sys.executable, "-c", SERVER], stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            seen = asyncio.run(visit(network))
        finally:
            end(server)

    assert seen == f"hello {ADDRESS_B}"
