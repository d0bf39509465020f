"""The character's face in a real browser: on time with the voice, still when it is silenced, made for nobody unseen.

The word clock's face flashes white exactly while a tone sounds (bench/face.py), so lips are measured without lips.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from duplexd.bench import face
from duplexd.bench.browser import Browser
from duplexd.bench.daemon import Daemon
from duplexd.bench.stage import Stage
from tests.media.faces import with_a_face

if TYPE_CHECKING:
    from playwright.async_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.slow]

QUERY = "auto=1&mic=0"
SKEW_MS = (-80, 40)  #: what people do not notice (ITU-R BT.1359), with the picture late by less
STOP_MS = 400
PLANNED_SHARE = 0.95

_HIDE = """hidden => {
    const get = () => (hidden ? "hidden" : "visible");
    Object.defineProperty(document, "visibilityState", { configurable: true, get });
    document.dispatchEvent(new Event("visibilitychange"));
}"""


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 200))


@contextlib.asynccontextmanager
async def seen(*flags: str) -> AsyncIterator[tuple[Stage, face.Eye]]:
    """A stage with the clock's face on its page, and somebody who looks at it."""
    async with Stage("--model", "clock", *flags, query=QUERY) as stage:
        eye = face.Eye(stage)
        await eye.open()
        await asyncio.sleep(3)  # The browser's buffers settle.
        yield stage, eye
        assert stage.browser.page_errors == []


def test_the_flash_is_seen_when_the_tone_is_heard_and_no_frame_is_missing() -> None:
    """Four replies of twelve tones; frames are counted by the browser, idle and while the character talks."""

    async def story() -> None:
        async with seen() as (stage, eye):
            idle = await face.measure_frames(eye, seconds=4)
            before = await eye.inbound()
            skews = await face.measure_skew(stage, eye, replies=4)
            spoken = face.frames_between(before, await eye.inbound())["fps"]
            stage.require_whole_recordings()
            print(f"skew p05 {skews.p05} p95 {skews.p95} of {len(skews.each_ms)}; fps {idle['fps']:.1f}, {spoken:.1f}")

            assert idle["fps"] >= PLANNED_SHARE * face.FRAMES_PER_SECOND
            assert spoken >= PLANNED_SHARE * face.FRAMES_PER_SECOND
            assert len(skews.each_ms) >= 0.9 * skews.tones >= 40
            assert skews.p05 is not None
            assert skews.p95 is not None
            assert skews.p05 >= SKEW_MS[0]
            assert skews.p95 <= SKEW_MS[1]

    run(story)


def test_a_stop_stills_the_mouth_and_the_next_reply_moves_it_again() -> None:
    async def story() -> None:
        async with seen() as (stage, eye):
            stopped = await face.measure_stops(stage, eye, count=6)
            skews = await face.measure_skew(stage, eye, replies=1)
            print(f"last white frame after a stop: {[round(ms) for ms in stopped.each_ms]} ms")

            assert stopped.still == 0  # The mouth had moved before each of them; else nothing was measured.
            assert max(stopped.each_ms) > 0  # Some fell into a tone.
            assert max(stopped.each_ms) <= STOP_MS
            assert (stopped.moved_again, stopped.replies) == (6, 6)
            assert len(skews.each_ms) >= 0.9 * skews.tones >= 10

    run(story)


def test_a_page_that_nobody_sees_gets_no_picture_and_comes_back() -> None:
    """Hidden in the middle of a reply: the voice goes on, frames stop within half a second; shown again, they come."""

    async def story() -> None:
        async with seen() as (stage, eye):
            begun = await face.speak(stage)
            await stage.page.evaluate(_HIDE, True)
            await asyncio.sleep(0.5)
            hidden = await face.measure_frames(eye, seconds=2)
            views = (await stage.daemon.metrics())["duplexd_frontend_views"]
            await stage.page.evaluate(_HIDE, False)
            await asyncio.sleep(0.5)
            shown = await face.measure_frames(eye, seconds=2)
            await stage.wait_for("listening", limit_s=20)
            heard = stage.heard()
            tones = face.tones_heard(heard, after=begun, before=heard.end)

            assert (hidden["framesReceived"], views) == (0, 0)
            assert shown["fps"] >= PLANNED_SHARE * face.FRAMES_PER_SECOND
            assert len(tones) >= 11
            assert face.skews_ms(tones, face.flashes(await eye.shown(since=begun)))

    run(story)


def test_a_model_without_a_face_shows_its_portrait_and_talks() -> None:
    async def story() -> None:
        async with seen("--face", "none") as (stage, eye):
            begun = await face.speak(stage)
            await stage.wait_for("listening", limit_s=20)
            heard = stage.heard()
            size = await stage.page.evaluate(
                "[video.videoWidth, video.videoHeight, document.getElementById('video').hidden]"
            )
            frames = await face.measure_frames(eye, seconds=3)

            assert len(face.tones_heard(heard, after=begun, before=heard.end)) >= 11
            assert size == [256, 256, False]
            assert 2 <= frames["framesReceived"] <= 5
            assert (await stage.daemon.metrics())["duplexd_frontend_views"] == 0

    run(story)


# The camera ---------------------------------------------------------------------------------------------------------


def film(folder: Path, *, present: bool) -> Path:
    """A second of somebody in front of the camera, or of the wall, for Chromium's fake device."""
    grey = with_a_face(320, 240) if present else np.full((240, 320), 90, np.uint8)
    frame = b"FRAME\n" + grey.tobytes() + bytes([128]) * (320 * 240 // 2)
    path = folder / f"camera-{present}.y4m"
    path.write_bytes(b"YUV4MPEG2 W320 H240 F5:1 Ip A1:1 C420jpeg\n" + frame * 5)
    return path


@contextlib.asynccontextmanager
async def filmed(folder: Path, *, present: bool) -> AsyncIterator[tuple[Daemon, Page]]:
    browser = Browser(fake_camera=film(folder, present=present))
    async with Daemon("--model", "clock", "--loopback-media") as daemon, browser:
        page = await browser.page(f"{daemon.url}?{QUERY}")
        await page.wait_for_selector("#camera:visible")
        await page.click("#camera")
        yield daemon, page
        assert browser.page_errors == []


async def until(daemon: Daemon, metric: str, least: float) -> dict[str, float]:
    for _ in range(150):
        metrics = await daemon.metrics()
        if metrics.get(f"duplexd_{metric}", 0.0) >= least:
            return metrics
        await asyncio.sleep(0.1)
    raise AssertionError(f"{metric} stayed below {least}: {metrics.get(f'duplexd_{metric}')}")


def test_the_camera_shows_that_somebody_is_there_and_that_they_have_left(tmp_path: Path) -> None:
    async def story() -> None:
        async with filmed(tmp_path, present=True) as (daemon, page):
            await until(daemon, "frontend_persons_seen", 1)
            assert await page.locator("#self").is_visible()
            before = (await daemon.metrics())["duplexd_frontend_camera_decoded_total"]
            await asyncio.sleep(4)
            after = (await daemon.metrics())["duplexd_frontend_camera_decoded_total"]
            await page.click("#camera")
            await page.wait_for_selector("#self", state="hidden")
            for _ in range(50):
                gone = (await daemon.metrics())["duplexd_frontend_persons_seen"] == 0
                if gone:
                    break
                await asyncio.sleep(0.1)

            assert gone
            assert 8 <= after - before <= 24  # At five a second; never more than that and a burst.

    run(story)


def test_nobody_is_seen_where_nobody_is(tmp_path: Path) -> None:
    async def story() -> None:
        async with filmed(tmp_path, present=False) as (daemon, _):
            metrics = await until(daemon, "frontend_camera_decoded_total", 10)

            assert metrics["duplexd_frontend_persons_seen"] == 0

    run(story)
