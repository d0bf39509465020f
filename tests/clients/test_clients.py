"""Stock clients, unmodified, at a daemon of the word clock: three spoken turns, one of them over a reply.

Each is installed into an environment of its own below `STOCK_CLIENTS_HOME` (default: `.clients` in the repository), by
the ordinary package tools; what is there already is used, and a client that cannot be had here is skipped with the
reason. The sound that a client was given is decoded into words; those, what the daemon remembers, and what the client
itself shows as history must agree to the word (`heard.py`), or, where a client by its own design keeps more, differ in
exactly that.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import sys
import wave
import zipfile
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from aiohttp import web

from duplexd.bench.browser import Browser
from duplexd.bench.daemon import Daemon
from duplexd.models.clock.language import REPLY_WORDS
from tests.clients import heard

pytestmark = [pytest.mark.clients, pytest.mark.slow]
HERE = Path(__file__).parent
HOME = Path(os.environ.get("STOCK_CLIENTS_HOME", HERE.parent.parent / ".clients"))
SECONDS = 24.0


def run(command: list[str | Path], *, within_s: float) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=within_s)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def installed(folder: Path, packages: tuple[str, ...], *commands: list[str | Path]) -> None:
    """Run the commands that install `packages` into a folder, once. Skips the test when they cannot be had here."""
    marker, wanted = folder / "installed", " ".join(packages)
    if marker.exists() and marker.read_text() == wanted:
        return
    for command in commands:
        if shutil.which(str(command[0])) is None:
            pytest.skip(f"{command[0]} is not installed here, and {wanted} needs it")
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=900)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines() or ["it says nothing"]
            pytest.skip(f"{wanted} cannot be installed here: {said[-1][:300]}")
    marker.write_text(wanted)


def python_with(name: str, *packages: str) -> Path:
    """A Python of its own with these packages."""
    folder = HOME / name
    python = folder / "bin" / "python"
    make: list[list[str | Path]] = [] if python.exists() else [[sys.executable, "-m", "venv", folder]]
    installed(folder, packages, *make, [python, "-m", "pip", "install", "-q", *packages])
    return python


def node_with(*packages: str) -> Path:
    """A folder whose scripts see these packages."""
    folder = HOME / "agents"
    folder.mkdir(parents=True, exist_ok=True)
    installed(folder, packages, ["node", "--version"], ["npm", "--prefix", folder, "install", "--silent", *packages])
    (folder / "agents.mjs").write_text((HERE / "agents.mjs").read_text())
    return folder


def peers_package() -> Path:
    """The peers' client package, unpacked."""
    folder = HOME / "vo"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "vllm_omni").exists():
        packages = ("vllm-omni==0.30.0",)
        installed(
            folder, packages, [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, *packages]
        )
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extractall(folder)
    return folder / "vllm_omni"


def talk(
    command: list[str | Path], *, scheme: str = "http", extra: tuple[str, ...] = (), seconds: float = SECONDS
) -> dict[str, Any]:
    """Run a client's script at a daemon; what it printed."""

    async def story() -> tuple[str, str]:
        async with Daemon("--model", "clock", "--loopback-media") as daemon:
            url = daemon.url.rstrip("/").replace("http", scheme, 1).replace("localhost", "127.0.0.1")
            whole = [*command, url, str(seconds), *extra]
            printed = await asyncio.to_thread(run, whole, within_s=seconds + 60)
            return printed, daemon.said()

    printed, said = asyncio.run(story())
    assert "Traceback" not in said, said[-3000:]
    found: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return found


OPENAI = ("openai[realtime]>=3.57,<4",)


def test_openai_python() -> None:
    """The library keeps no history: its application asks for the items it was told of, which is what is compared."""
    found = talk([python_with("openai", *OPENAI), HERE / "openai_python.py"])

    assert found["errors"] == []
    heard.check_remembered(found)
    heard.check_history_is_what_was_heard(found)
    assert found["models"] == ["clock"]
    assert found["secret"].startswith("ek_")


def test_openai_python_live() -> None:
    """No turns, no truncation: what is told of a reply is what has left, and that is what the ear finds."""
    found = talk([python_with("openai", *OPENAI), HERE / "openai_live.py"])

    check_live(found, numbers(heard.sound_of(found)))
    assert found["session"].startswith("live_")
    beside = b"".join(base64.b64decode(part) for part in found["beside_audio"])
    assert found["beside"] == [[entry["role"], entry["text"]] for entry in found["history"]]
    assert numbers(heard.replies_of(beside, 24_000)) == numbers(heard.sound_of(found))
    ends = [entry["end_ms"] for entry in found["history"] if entry["role"] == "assistant"]
    assert ends == sorted(ends)


#: Behind a codec shorter stretches are no words: where sound begins and ends it is smeared.
SMEAR_MS = 60.0


def numbers(sound: dict[int, list[heard.Sounded]]) -> list[tuple[int, int]]:
    return [(reply, word.number) for reply, words in sound.items() for word in words]


def check_live(found: dict[str, Any], sounded: list[tuple[int, int]], *, smeared: bool = False) -> None:
    """Three turns, one cut: the pieces of the transcript are the words of the sound, begun ones included.

    `smeared`: the last word before the cut may have been too short to be told from the codec's smear.
    """
    told = [word for e in found["history"] if e["role"] == "assistant" for word in heard.words_of(e["text"])]
    last = [word for word in told if word[0] == 0][-1:]

    assert found["errors"] == []
    assert sounded in ([told, [word for word in told if word not in last]] if smeared else [told])
    assert [sum(reply == r for r, _ in told) for reply in range(3)][1:] == [12, 12]
    assert 0 < sum(reply == 0 for reply, _ in told) < 12
    assert sum(entry["role"] == "user" for entry in found["history"]) == 3
    assert found["closed"] == "close_requested"


CALLING = (*OPENAI, "aiortc>=1.14", "numpy")
#: The published error of where the ear of a call is, beside its 250 ms, and what an Opus frame adds.
CALL_ERROR_MS = 140.0


def test_openai_python_calls() -> None:
    """The stock client makes the call and joins it; aiortc, as it comes, is its media side."""
    found = talk([python_with("calls", *CALLING), HERE / "openai_calls.py"], extra=("realtime",))
    sound, remembered = heard.sound_of(found, least_ms=SMEAR_MS), heard.by_id(found, "remembered")
    stopped = dict(found["truncated"])

    assert found["errors"] == []
    heard.check_history_is_what_was_heard(found)
    assert len(remembered) == 3
    assert len(set(stopped) & set(remembered)) == 1
    for item, words in remembered.items():
        whole = [word for word in sound[words[0][0]] if word.is_whole]
        if item in stopped:  # What is remembered is what was heard; at most the last word lies inside the error.
            assert len(words) in (len(whole), len(whole) - 1)
            assert whole[len(words) - 1].ended_ms <= stopped[item] + CALL_ERROR_MS
        else:
            assert (len(words), len(whole)) == (12, 12)


def test_openai_python_live_call() -> None:
    found = talk([python_with("calls", *CALLING), HERE / "openai_calls.py"], extra=("live",))

    check_live(found, numbers(heard.sound_of(found, least_ms=SMEAR_MS)), smeared=True)
    beside = b"".join(base64.b64decode(part) for part in found["beside_audio"])
    check_live(found, numbers(heard.replies_of(beside, 24_000)))


def test_agents_realtime_in_node() -> None:
    """It truncates by the wall clock and asks for the item then: its history is what was heard."""
    folder = node_with("@openai/agents-realtime", "@openai/agents")
    found = talk(["node", folder / "agents.mjs"], scheme="ws")

    assert found["errors"] == []
    heard.check_remembered(found)
    heard.check_history_is_what_was_heard(found)


#: Pipecat counts from the first delta on, and its transport plays 40 ms at a time, a pipeline later.
PIPECAT_MS = 120.0


def test_pipecat() -> None:
    """Its context takes text as its transport releases it, a piece at a time and before its sound: it may hold more."""
    python = python_with("pipecat", "pipecat-ai[openai]>=1.14,<2")
    found = talk([python, HERE / "pipecat_agents.py"], scheme="ws", seconds=SECONDS + 8)

    assert found["errors"] == []
    heard.check_remembered(found, early_ms=PIPECAT_MS)
    heard.check_history_is_what_was_told(found)


def test_livekit() -> None:
    """Without a room nothing aligns text with sound: its session keeps the text it was told, marked as interrupted."""
    python = python_with("livekit", "livekit-plugins-openai>=1.8,<2", "openai[realtime]")
    found = talk([python, HERE / "livekit_agents.py"])

    assert found["errors"] == []
    heard.check_remembered(found)
    heard.check_history_is_what_was_told(found)
    assert [e["interrupted"] for e in found["history"] if e["role"] == "assistant"] == [True, False, False]


def test_the_peers_duplex_client() -> None:
    """Its transcript is all it was told; what was committed of it is told beside it, and that is what was heard."""
    python = python_with("vllmomni", *PEERS)
    found = talk([python, HERE / "duplex_peers.py"], scheme="ws", extra=(str(peers_package()),))

    assert found["errors"] == []
    heard.check_remembered(found, early_ms=PEERS_REPORT_MS)
    heard.check_history_is_what_was_told(found)


PEERS = ("websockets", "pybase64", "numpy", "regex", "av", "pillow", "prettytable")
PEERS_REPORT_MS = 120.0  #: it acknowledges every 50 ms, and is stopped some time after the voice


def test_the_peers_own_runner_of_scenarios(tmp_path: Path) -> None:
    """`omni-duplex-eval generate`: a question in sound with a frame of a video on each second of it, answered."""
    python = python_with("vllmomni", *PEERS)
    spoken(tmp_path / "question.wav", rate=16_000, turns=((0.5, 1.2),), seconds=3)
    film(tmp_path / "film.mp4", seconds=3)
    made = [tmp_path / name for name in ("question.wav", "film.mp4", "question.wav", "made")]
    found = talk([python, HERE / "duplex_eval.py"], scheme="ws", extra=(str(peers_package()), *map(str, made)))

    assert (found["meta"]["response_done"], found["meta"]["clock"]) == (True, "media")
    assert (found["meta"]["drain_timeout"], found["meta"]["close_timeout"]) == (None, None)
    words = [word for sentence in found["sentences"] for word in heard.words_of(sentence["sentence"])]
    assert words == [(0, number) for number in range(12)]
    assert found["requests"]


def film(path: Path, *, seconds: int) -> None:
    """A small video of grey frames, five a second."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for index in range(5 * seconds):
            shade = np.full((48, 64, 3), 10 * index, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(shade, format="rgb24")))
        file.mux(stream.encode())


def spoken(path: Path, *, rate: int, turns: tuple[tuple[float, float], ...], seconds: float) -> None:
    """A recording: a tone in each turn, silence around it."""
    at = np.arange(round(seconds * rate)) / rate
    loud = sum(((at >= begin) & (at < end)) for begin, end in turns)
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


#: By so much Chromium's jitter buffer shortens a word to catch up. Measured: 40 ms, in one last word of twelve replies.
SQUEEZED_MS = 90.0


@pytest.mark.browser
def test_agents_realtime_over_webrtc_in_chromium(tmp_path: Path) -> None:
    """The stock bundle in a page of another origin: no candidates in its offer, events on a channel, a track."""
    folder = node_with("@openai/agents-realtime", "@openai/agents")
    bundle = folder / "node_modules/@openai/agents-realtime/dist/bundle/openai-realtime-agents.umd.js"
    spoken(tmp_path / "microphone.wav", rate=48_000, turns=((3.0, 3.6), (7.5, 8.5), (17.0, 17.6)), seconds=26)

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
    assert found["energy"] > 0
    sound, history = heard.sound_of(found, least_ms=SMEAR_MS), heard.by_id(found, "history")
    stopped = dict(found["truncated"])
    assert len(history) == 3
    assert len(set(stopped) & set(history)) == 1
    for item, words in history.items():
        played = [word.number for word in sound[words[0][0]] if word.lacks(SQUEEZED_MS)]
        assert played == list(range(len(played))), sound[words[0][0]]
        if item in stopped:  # At most the last word lies inside the published error of where its ear is.
            assert len(words) in (len(played), len(played) - 1), (words, sound[words[0][0]])
        else:
            assert len(words) == len(played) == REPLY_WORDS, (words, sound[words[0][0]])
    assert any(kind == "output_audio_buffer.cleared" for _, kind in found["events"])
