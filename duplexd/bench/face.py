"""What a person sees: frames that arrive, lips against voice, and the mouth of somebody who was interrupted.

The word clock is the instrument: each of its words is a tone, and its face flashes white exactly while a tone sounds.

    skew = when a flash is shown - when its tone is heard        (+ : the voice is ahead of the picture)

1. A tone is timed at the loudspeaker (tap.py), a flash by `requestVideoFrameCallback`: when the frame is due on the
   screen. Both lie on the host's clock.
2. Levels are read from the picture itself, so a frame that was decoded but shows something else does not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeAlias

import msgspec

from duplexd.bench.programs import RigError
from duplexd.bench.stage import Stage, percentile
from duplexd.bench.tap import Recording
from duplexd.media import tones
from duplexd.units import NANOS_PER_MS, Nanos

WHITE = 170  #: luma above this is a flash: the clock's face is 110 or 235, limited range
OPEN = 0.02  #: dark share above which the pocket face's lips are apart
PAIR_WITHIN = Nanos(240 * NANOS_PER_MS)  #: half of the clock's word: a tone and a flash further apart belong to others
FRAMES_PER_SECOND = 25
MOVED_WITHIN = Nanos(1000 * NANOS_PER_MS)  #: before a stop
TONE_MIN_MS = 100  #: shorter pieces are ends of tones that were cut
SPEAK_LIMIT_S = 10.0
SETTLE_S = 6.0  #: until buffers of browser and engine have settled
QUERY = "auto=1&mic=0"
TOPICS = ("Tell me about the ocean.", "What is the sun?", "Tell me about bees.", "What is music?")

#: Keeps when each shown frame was due on the screen (ms of performance.now), its RTP timestamp, its middle's luma, and
#: the share of dark pixels where the pocket face has its mouth: at most 0.006 in ten idle seconds, 0.06 wide open.
_WATCH = """() => {
    const video = document.getElementById("video");
    const pen = new OffscreenCanvas(64, 64).getContext("2d", { willReadFrequently: true });
    const lumas = (...box) => {
        const { data } = pen.getImageData(...box);
        const luma = (at) => 0.299 * data[at] + 0.587 * data[at + 1] + 0.114 * data[at + 2];
        return Array.from({ length: data.length / 4 }, (_, pixel) => luma(4 * pixel));
    };
    window.framesSeen = [];
    const step = (now, { expectedDisplayTime, rtpTimestamp }) => {
        pen.drawImage(video, 0, 0, 64, 64);
        const mouth = lumas(24, 37, 17, 10);
        const dark = mouth.filter((luma) => luma < 70).length / mouth.length;
        framesSeen.push([expectedDisplayTime, rtpTimestamp, lumas(32, 32, 1, 1)[0], dark]);
        if (framesSeen.length > 60_000) framesSeen.splice(0, 30_000);
        video.requestVideoFrameCallback(step);
    };
    video.requestVideoFrameCallback(step);
}"""

_INBOUND = """async () => {
    const report = (await window.duplexd.stats()).find((s) => s.type === "inbound-rtp" && s.kind === "video");
    return report ?? null;
}"""


class Shown(msgspec.Struct, frozen=True):
    """One frame on the screen."""

    at: Nanos
    rtp: int  #: u32, 90 kHz
    luma: float  #: of its middle, 0..255
    dark: float = 0.0  #: share of dark pixels around the pocket face's mouth


def is_white(frame: Shown) -> bool:
    """The clock's face while a tone sounds."""
    return frame.luma > WHITE


def is_open(frame: Shown) -> bool:
    """The pocket face's mouth."""
    return frame.dark > OPEN


class Eye:
    """Looks at the character's picture on a stage's page."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    async def open(self) -> None:
        await self._stage.page.evaluate(_WATCH)

    async def shown(self, *, since: Nanos = Nanos(0)) -> list[Shown]:
        seen = await self._stage.page.evaluate("window.framesSeen")
        frames = [Shown(self._stage.clock.time_of(at), int(rtp or 0), luma, dark) for at, rtp, luma, dark in seen]
        return [frame for frame in frames if frame.at >= since]

    async def inbound(self) -> dict[str, Any]:
        """The browser's own count of the video stream; empty while there is none."""
        return dict(await self._stage.page.evaluate(_INBOUND) or {})


def flashes(frames: list[Shown]) -> list[Nanos]:
    """When the picture turned white."""
    return [now.at for before, now in pairwise(frames) if is_white(now) and not is_white(before)]


def tones_heard(heard: Recording, *, after: Nanos, before: Nanos) -> list[Nanos]:
    """When each whole tone began at the loudspeaker."""
    first, _ = heard.between(after, before)
    words = tones.decode(heard.part(after, before), heard.rate)
    whole = [word for word in words if word.samples_count * 1000 >= TONE_MIN_MS * heard.rate]
    return [heard.time_of(first + word.start_sample) for word in whole]


def skews_ms(heard: list[Nanos], seen: list[Nanos]) -> list[float]:
    """Of each tone against the flash that is nearest to it, if that can be its own."""
    found = []
    for tone in heard:
        nearest = min(seen, key=lambda flash: abs(flash - tone), default=None)
        if nearest is not None and abs(nearest - tone) <= PAIR_WITHIN:
            found.append((nearest - tone) / NANOS_PER_MS)
    return found


# The bench ------------------------------------------------------------------------------------------------------------


async def speak(stage: Stage, text: str = "Go on.") -> Nanos:
    """A typed turn; returns when its answer could be heard."""
    await stage.type(text)
    await reach(stage, "speaking", within_s=SPEAK_LIMIT_S)
    return stage.heard().end


async def reach(stage: Stage, state: str, *, within_s: float) -> None:
    """Raises RigError when the conversation does not get there: figures of what did not happen would look fine."""
    if not await stage.wait_for(state, limit_s=within_s):
        raise RigError(f"the page did not become {state!r} within {within_s:g} s")


class Skews(msgspec.Struct, frozen=True):
    """Of some replies of the clock."""

    each_ms: tuple[float, ...]
    tones: int  #: how many whole tones were heard

    @property
    def p05(self) -> float | None:
        return percentile(list(self.each_ms), 0.05)

    @property
    def p95(self) -> float | None:
        return percentile(list(self.each_ms), 0.95)


async def measure_skew(stage: Stage, eye: Eye, *, replies: int) -> Skews:
    """Replies heard to their end, tone by tone."""
    each: list[float] = []
    count = 0
    for _ in range(replies):
        begun = await speak(stage)
        await reach(stage, "listening", within_s=30)
        await asyncio.sleep(0.5)
        heard = stage.heard()
        words = tones_heard(heard, after=begun, before=heard.end)
        each += skews_ms(words, flashes(await eye.shown(since=begun)))
        count += len(words)
    return Skews(tuple(each), count)


async def measure_stops(
    stage: Stage, eye: Eye, *, count: int, text: str = "Go on.", speaks: Callable[[Shown], bool] = is_white
) -> list[float]:
    """Milliseconds from a stop to the last frame in which the mouth still spoke: the clock's last white one.

    Each stop falls elsewhere in a word, so that some fall into sounds and some between them. A stop of a mouth that had
    not moved is left out.
    """
    found: list[float] = []
    for index in range(count):
        await speak(stage, text)
        await asyncio.sleep(0.8 + 0.11 * index)
        at = stage.clock.time_of(await stage.page.evaluate("(window.duplexd.stop(), performance.now())"))
        await asyncio.sleep(1.5)
        stop = stop_ms(await eye.shown(since=Nanos(at - MOVED_WITHIN)), at, speaks)
        if stop is not None:
            found.append(stop)
    return found


def stop_ms(frames: list[Shown], at: Nanos, speaks: Callable[[Shown], bool]) -> float | None:
    """From a stop to the last frame in which the mouth speaks, 0 if it was shut already; None for a mouth that had not
    moved before the stop either: a still picture stops at once, and proves nothing.
    """
    speaking = [frame.at for frame in frames if speaks(frame)]
    if not speaking or speaking[0] > at:
        return None
    return max(0.0, (speaking[-1] - at) / NANOS_PER_MS)


Frames: TypeAlias = dict[str, float]  #: what the browser counted in a while, with its `seconds` and `fps`


async def measure_frames(eye: Eye, *, seconds: float) -> Frames:
    """What arrived of 25 frames a second, by the browser's own count."""
    before = await eye.inbound()
    await asyncio.sleep(seconds)
    return frames_between(before, await eye.inbound())


def frames_between(before: dict[str, Any], after: dict[str, Any]) -> Frames:
    """The difference of two readings of `Eye.inbound`. Raises RigError while the browser has seen no picture."""
    if "timestamp" not in before or "timestamp" not in after:
        raise RigError("the browser has received no picture yet")
    names = ("framesReceived", "framesDecoded", "framesDropped", "freezeCount", "bytesReceived", "pliCount")
    counts = {name: float(after.get(name, 0) - before.get(name, 0)) for name in names}
    seconds = (after["timestamp"] - before["timestamp"]) / 1000
    return counts | {"seconds": seconds, "fps": counts["framesReceived"] / seconds}


async def bench(*, replies: int = 4, stops: int = 12, turns: int = 3) -> dict[str, Any]:
    """Figures of the face in Chromium: lips by the word clock, frames by the face people talk to.

    fps_received   frames a second that reached the browser, of 25: the clock's; the pocket face's idle and in talk
    freezes        stalls the browser counted meanwhile
    skew_ms        p05 and p95 of flash against tone, + : the voice is ahead
    mouth_stop_ms  from a stop to the last frame in which the mouth moved
    """
    async with Stage("--model", "clock", query=QUERY) as stage:
        eye = await _watch(stage)
        clock = await measure_frames(eye, seconds=5)
        skews = await measure_skew(stage, eye, replies=replies)
        stopped = await measure_stops(stage, eye, count=stops)
        stage.require_whole_recordings()
        client, path = stage.client(), stage.path()
    async with Stage("--model", "pocket", query=QUERY) as stage:
        eye = await _watch(stage)
        idle = await measure_frames(eye, seconds=10)
        talk = await measure_talk(stage, eye, turns=turns)
        shut = await measure_stops(stage, eye, count=stops, text=TOPICS[0], speaks=is_open)
        metrics = await stage.daemon.metrics()
        await stage.require_living_engine()
    whiles = {"clock": clock, "idle": idle, "talk": talk}
    return {
        "fps_received": {name: round(one["fps"], 1) for name, one in whiles.items()},
        "freezes": {name: one["freezeCount"] for name, one in whiles.items()},
        "kbit_per_s": {name: round(one["bytesReceived"] / 125 / one["seconds"]) for name, one in whiles.items()},
        "face_level": metrics.get("duplexd_engine_face_level"),
        "skew_ms": {"p05": skews.p05, "p95": skews.p95, "tones": skews.tones, "paired": len(skews.each_ms)},
        "mouth_stop_ms": {
            name: {"p50": percentile(each, 0.5), "p95": percentile(each, 0.95), "count": len(each)}
            for name, each in (("clock", stopped), ("pocket", shut))
        },
        "seen_by": client,
        "path": path,
    }


async def _watch(stage: Stage) -> Eye:
    eye = Eye(stage)
    await eye.open()
    await asyncio.sleep(SETTLE_S)
    return eye


async def measure_talk(stage: Stage, eye: Eye, *, turns: int) -> Frames:
    """What arrived from the first question to the end of the last answer."""
    before = await eye.inbound()
    for question in TOPICS[:turns]:
        await speak(stage, question)
        await reach(stage, "listening", within_s=30)
    return frames_between(before, await eye.inbound())
