"""Stock clients, unmodified, at a daemon of the word clock: three spoken turns, one of them over a reply.

Each is installed into an environment of its own below `STOCK_CLIENTS_HOME` (default: `.clients` in the repository), by
the ordinary package tools; what is there already is used. What a client says it played, what the server remembers, and
what the client shows as history must agree to the word.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import wave
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from duplexd.bench.browser import Browser
from duplexd.bench.daemon import Daemon
from duplexd.models.clock.stages import TONE, WORD
from duplexd.units import ms_from_ticks

pytestmark = [pytest.mark.clients, pytest.mark.slow]
HERE = Path(__file__).parent
HOME = Path(os.environ.get("STOCK_CLIENTS_HOME", HERE.parent.parent / ".clients"))
SECONDS = 22.0
WORD_MS, TONE_MS = ms_from_ticks(WORD), ms_from_ticks(TONE)
#: Rounding of positions to whole milliseconds, and a word that ends within it.
SLACK_MS = 2.0


def run(command: list[str | Path], *, within_s: float) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=within_s)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def python_with(name: str, *packages: str) -> Path:
    """A Python of its own with these packages."""
    python = HOME / name / "bin" / "python"
    if not python.exists():
        run([sys.executable, "-m", "venv", HOME / name], within_s=120)
        run([python, "-m", "pip", "install", "-q", *packages], within_s=900)
    return python


def node_with(*packages: str) -> Path:
    """A folder whose scripts see these packages."""
    folder = HOME / "agents"
    if not (folder / "node_modules").exists():
        folder.mkdir(parents=True, exist_ok=True)
        run(["npm", "--prefix", folder, "install", "--silent", *packages], within_s=900)
    (folder / "agents.mjs").write_text((HERE / "agents.mjs").read_text())
    return folder


def peers_package() -> Path:
    """The peers' client package, unpacked."""
    root = HOME / "vo" / "vllm_omni"
    if not root.exists():
        folder = HOME / "vo"
        folder.mkdir(parents=True, exist_ok=True)
        run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, "vllm-omni==0.30.0"],
            within_s=900,
        )
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extractall(folder)
    return root


def talk(command: list[str | Path], *, scheme: str = "http", extra: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run a client's script at a daemon; what it printed."""

    async def story() -> tuple[str, str]:
        async with Daemon("--model", "clock", "--loopback-media") as daemon:
            url = daemon.url.rstrip("/").replace("http", scheme, 1).replace("localhost", "127.0.0.1")
            whole = [*command, url, str(SECONDS), *extra]
            printed = await asyncio.to_thread(run, whole, within_s=SECONDS + 60)
            return printed, daemon.said()

    printed, said = asyncio.run(story())
    assert "Traceback" not in said, said[-3000:]
    found: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return found


def words_by(ms: float) -> int:
    """How many words of a reply have ended after so much of its sound."""
    return max(0, int((ms - TONE_MS) // WORD_MS) + 1)


def check(found: dict[str, Any]) -> None:
    assert found["errors"] == []
    replies = [entry for entry in found["history"] if entry["role"] == "assistant"]
    assert len(replies) >= 3
    assert found["interrupted"]
    played = {item: float(ms) for item, ms in found["truncated"]}  # The last word on each item is the client's.
    assert set(played) & {entry["id"] for entry in replies}
    for entry in replies:
        count = len(entry["text"].split())
        if entry["id"] in played:
            ms = played[entry["id"]]
            assert words_by(ms - SLACK_MS) <= count <= words_by(ms + SLACK_MS), (entry, ms)
        else:
            assert count == 12, entry
    heard = sum(len(part) for _, _, part in found["audio"])
    assert heard > 100_000


def test_openai_python(tmp_path: Path) -> None:
    from tests.webrtc.realtime.daemon import Caller

    async def offer() -> str:
        caller = Caller()
        sdp = await caller.offer()
        await caller.close()
        return sdp

    (tmp_path / "offer").write_text(asyncio.run(offer()))
    python = python_with("openai", "openai[realtime]>=3.57,<4")
    found = talk([python, HERE / "openai_python.py"], extra=(str(tmp_path / "offer"),))

    check(found)
    assert found["models"] == ["clock"]
    assert found["secret"].startswith("ek_")
    assert found["answer"].startswith("v=0")
    assert found["call_id"].startswith("rtc_")


def test_agents_realtime_in_node() -> None:
    folder = node_with("@openai/agents-realtime", "@openai/agents")

    check(talk(["node", folder / "agents.mjs"], scheme="ws"))


def test_pipecat() -> None:
    python = python_with("pipecat", "pipecat-ai[openai]>=1.14,<2")

    check(talk([python, HERE / "pipecat_agents.py"], scheme="ws"))


def test_livekit() -> None:
    python = python_with("livekit", "livekit-plugins-openai>=1.8,<2", "openai[realtime]")

    check(talk([python, HERE / "livekit_agents.py"]))


def test_the_peers_duplex_client() -> None:
    python = python_with("vllmomni", "websockets", "pybase64", "numpy")

    check(talk([python, HERE / "duplex_peers.py"], scheme="ws", extra=(str(peers_package()),)))


def microphone(path: Path) -> None:
    """A tone at 3, 7.5 and 17 s, silence around it: three turns, the second over a reply."""
    rate = 48_000
    at = np.arange(26 * rate) / rate
    loud = sum(((at >= begin) & (at < end)) for begin, end in ((3.0, 3.6), (7.5, 8.5), (17.0, 17.6)))
    pcm = np.rint(9000 * loud * np.sin(2 * np.pi * 700 * at)).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(pcm.tobytes())


def file_of(path: Path) -> Any:
    async def serve(_: web.Request) -> web.FileResponse:
        return web.FileResponse(path)

    return serve


@pytest.mark.browser
def test_agents_realtime_over_webrtc_in_chromium(tmp_path: Path) -> None:
    """The stock bundle in a page of another origin: no candidates in its offer, events on a channel, a track."""
    folder = node_with("@openai/agents-realtime", "@openai/agents")
    bundle = folder / "node_modules/@openai/agents-realtime/dist/bundle/openai-realtime-agents.umd.js"
    microphone(tmp_path / "microphone.wav")

    async def story() -> tuple[dict[str, Any], list[str], str]:
        app = web.Application()
        app.add_routes(
            [
                web.get("/", file_of(HERE / "agents.html")),
                web.get("/agents.umd.js", file_of(bundle)),
            ]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        page_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        flags = ("--model", "clock", "--loopback-media", "--cors-origins", page_url)
        try:
            async with Daemon(*flags) as daemon, Browser(fake_microphone=tmp_path / "microphone.wav") as browser:
                page = await browser.page(page_url + "/")
                daemon_url = daemon.url.rstrip("/").replace("localhost", "127.0.0.1")
                found = await page.evaluate(f"talk({json.dumps(daemon_url)}, 24)")
                return found, browser.page_errors, daemon.said()
        finally:
            await runner.cleanup()

    found, page_errors, said = asyncio.run(story())

    assert "Traceback" not in said, said[-3000:]
    assert (found["errors"], [e for e in page_errors if "favicon" not in e and "404" not in e]) == ([], [])
    assert found["connected_ms"] < 5000
    replies = [entry for entry in found["history"] if entry["role"] == "assistant"]
    assert len(replies) == 3
    played = {item: float(ms) for item, ms in found["truncated"]}
    for entry in replies:
        count = len(entry["text"].split())
        if entry["id"] in played:
            assert words_by(played[entry["id"]] - 120) <= count <= words_by(played[entry["id"]] + SLACK_MS)
        else:
            assert count == 12, entry
    assert any(kind == "output_audio_buffer.cleared" for _, kind in found["events"])
