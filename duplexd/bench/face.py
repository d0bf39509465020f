"""What a person sees: frames that arrive, lips against voice, and the mouth of somebody who was interrupted.

The word clock is the instrument: each of its words is a tone, and its face flashes white exactly while a tone sounds.

    skew = when a flash is shown - when its tone is heard        (+ : the voice is ahead of the picture)

1. A tone is timed at the loudspeaker (tap.py), a flash by `requestVideoFrameCallback`: when the frame is due on the
   screen. Both lie on the host's clock.
2. The pocket face has lips instead: open ones are dark. They are held against the loudness at the loudspeaker, reply by
   reply: when they part after the first sound, and by which lag the mouth follows the loudness best.
3. Levels are read from the picture itself, so a frame that was decoded but shows something else does not count.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from duplexd import clock
from duplexd.bench import recordings
from duplexd.bench.programs import RigError
from duplexd.bench.stage import Stage, percentile
from duplexd.bench.tap import Recording
from duplexd.media import tones
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos

WHITE = 170  #: luma above this is a flash: the clock's face is 110 or 235, limited range
#: Dark share above which the pocket face's lips are apart: from an opening of 0.3 on ("eh", "oh", "ah", not "ee").
OPEN = 0.012
PAIR_WITHIN = Nanos(240 * NANOS_PER_MS)  #: half of the clock's word: a tone and a flash further apart belong to others
FRAMES_PER_SECOND = 25
MOVED_WITHIN = Nanos(1000 * NANOS_PER_MS)  #: before a stop
TONE_MIN_MS = 100  #: shorter pieces are ends of tones that were cut
SPEAK_LIMIT_S = 10.0
BEFORE_ONSET = Nanos(300 * NANOS_PER_MS)
AFTER_ONSET = Nanos(1000 * NANOS_PER_MS)
STEP_MS = 10
LAG_MAX_MS = 400
QUIET = 10 ** (-50 / 20)  #: loudness below this is none
ALIKE = 0.25  #: a mouth that is less like the loudness, at its best lag, has no lag
FACE_THREADS = ("lane-face", "lane-draw")  #: of the engine, as its lanes name them
FIRST_PICTURE_S = 20.0
SETTLE_S = 6.0  #: until buffers of browser and engine have settled
QUERY = "auto=1&mic=0"
TOPICS = ("Tell me about the ocean.", "What is the sun?", "Tell me about bees.", "What is music?")

#: Keeps when each shown frame was due on the screen (ms of performance.now), its RTP timestamp, its middle's luma, and
#: the share of dark pixels where the pocket face has its mouth: at most 0.007 in ten idle seconds, 0.05 at half open.
_WATCH = """() => {
    const video = document.getElementById("video");
    const pen = new OffscreenCanvas(128, 128).getContext("2d", { willReadFrequently: true });
    const lumas = (...box) => {
        const { data } = pen.getImageData(...box);
        const luma = (at) => 0.299 * data[at] + 0.587 * data[at + 1] + 0.114 * data[at + 2];
        return Array.from({ length: data.length / 4 }, (_, pixel) => luma(4 * pixel));
    };
    window.framesSeen = [];
    const step = (now, { expectedDisplayTime, rtpTimestamp }) => {
        pen.drawImage(video, 0, 0, 128, 128);
        const mouth = lumas(48, 74, 34, 20);
        const dark = mouth.filter((luma) => luma < 70).length / mouth.length;
        framesSeen.push([expectedDisplayTime, rtpTimestamp, lumas(64, 64, 1, 1)[0], dark]);
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


# What is measured -----------------------------------------------------------------------------------------------------


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


class Stops(msgspec.Struct, frozen=True):
    """What became of the mouth at some stops, and in the replies after them."""

    each_ms: tuple[float, ...]  #: from a stop to the last frame in which the mouth still spoke
    still: int  #: stops of a mouth that had not moved before: these have no figure
    moved_again: int  #: replies after a stop in which the mouth moved
    replies: int  #: that came after a stop

    def figures(self) -> dict[str, float | None]:
        times = list(self.each_ms)
        return {
            "p50": percentile(times, 0.5),
            "p95": percentile(times, 0.95),
            "count": len(times),
            "still": self.still,
            "moved_again": self.moved_again,
            "replies": self.replies,
        }


async def measure_stops(
    stage: Stage, eye: Eye, *, count: int, text: str = "Go on.", speaks: Callable[[Shown], bool] = is_white
) -> Stops:
    """Stops, each elsewhere in a word, so that some fall into sounds and some between them; then one more reply."""
    found: list[float | None] = []
    moved: list[bool] = []
    for index in range(count + 1):
        await speak(stage, text)
        begun = clock.now()
        await asyncio.sleep(0.8 + 0.11 * (index % 12))
        at = stage.clock.time_of(await stage.page.evaluate("(window.duplexd.stop(), performance.now())"))
        await asyncio.sleep(1.5)
        frames = await eye.shown(since=Nanos(min(begun, at - MOVED_WITHIN)))
        moved.append(any(speaks(frame) for frame in frames if begun <= frame.at < at))
        found.append(stop_ms([frame for frame in frames if frame.at >= at - MOVED_WITHIN], at, speaks))
    return stops_of(found[:count], moved[1:])


def stops_of(found: Sequence[float | None], moved: Sequence[bool]) -> Stops:
    """Of what each stop and the reply after it showed."""
    times = tuple(ms for ms in found if ms is not None)
    return Stops(times, still=len(found) - len(times), moved_again=sum(moved), replies=len(moved))


def stop_ms(frames: list[Shown], at: Nanos, speaks: Callable[[Shown], bool]) -> float | None:
    """From a stop to the last frame in which the mouth speaks, 0 if it was shut already; None for a mouth that had not
    moved before the stop either: a still picture stops at once, and proves nothing.
    """
    speaking = [frame.at for frame in frames if speaks(frame)]
    if not speaking or speaking[0] > at:
        return None
    return max(0.0, (speaking[-1] - at) / NANOS_PER_MS)


Series: TypeAlias = NDArray[np.float64]
#: What the browser counted in a while, with its `seconds` and `fps`; in talk also how many were `planned`.
Frames: TypeAlias = dict[str, float]


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


def planned_between(before: dict[str, float], after: dict[str, float]) -> float:
    """Pictures that were to be sent between two readings of the daemon's metrics, repeats of a still one included; not
    those that a change of the voice took back. The engine's counts are up to a second old at both.
    """

    def count(name: str) -> float:
        return after.get(f"duplexd_{name}", 0.0) - before.get(f"duplexd_{name}", 0.0)

    made_again = count("frontend_pictures_cut_total")
    return count("engine_face_pictures_planned") - made_again + count("frontend_pictures_repeated_total")


def planned_share(frames: Frames) -> float | None:
    """Of the pictures that were planned, those the browser received; None when none was."""
    return round(frames["framesReceived"] / frames["planned"], 3) if frames["planned"] else None


# Lips of the pocket face ----------------------------------------------------------------------------------------------


class Lips(msgspec.Struct, frozen=True):
    """One reply, as it was heard and seen."""

    onset_ms: float | None  #: from the first sound to the first frame with open lips; None: open before, or never
    skew_ms: float | None  #: by which the mouth follows the loudness best, + : the lips are late; None: it does not
    likeness: float  #: the correlation there
    series: tuple[Series, Series]  #: loudness and open mouth, a value every `STEP_MS`


def lips_of(heard: Recording, frames: list[Shown], *, after: Nanos) -> Lips | None:
    """Of the reply that is the first sound after a moment; None when nothing was heard."""
    first = heard.first_audible(after=after)
    last = heard.last_audible(after=after)
    if first is None or last is None:
        return None
    series = _series(heard, frames, first, last)
    skew, likeness = lag_ms([series])
    return Lips(lip_onset_ms(frames, first), skew if likeness >= ALIKE else None, round(likeness, 3), series)


def lip_onset_ms(frames: list[Shown], voice: Nanos) -> float | None:
    """From the first sound to the first frame in which the lips are apart; before it: negative."""
    near = [frame for frame in frames if voice - BEFORE_ONSET <= frame.at <= voice + AFTER_ONSET]
    opened = next((frame.at for frame in near if is_open(frame)), None)
    return None if opened is None or is_open(near[0]) else (opened - voice) / NANOS_PER_MS


def _series(heard: Recording, frames: list[Shown], first: Nanos, last: Nanos) -> tuple[Series, Series]:
    """Loudness and open mouth from before the first sound to after the last, a value every `STEP_MS`.

    A frame stands for the 40 ms in which it is seen, and loudness is taken over as long around its moment.
    """
    step, half = STEP_MS * NANOS_PER_MS, Nanos(20 * NANOS_PER_MS)
    moments = range(first - BEFORE_ONSET, last + AFTER_ONSET, step)
    loud = []
    for at in moments:
        pcm = heard.part(at - half, at + half).astype(np.float64) / 32768
        loud.append(np.log10(max(QUIET, float(np.sqrt(np.mean(pcm**2))) if len(pcm) else 0.0)))
    shown = np.array([frame.at for frame in frames])
    seen = np.searchsorted(shown, np.array(moments), side="right") - 1
    dark = [frames[index].dark if index >= 0 else 0.0 for index in seen]
    return np.array(loud), np.array(dark)


def lag_ms(replies: Sequence[tuple[Series, Series]]) -> tuple[float, float]:
    """By how much mouths follow loudness best, within `LAG_MAX_MS`, and how alike they are then, -1..1.

    One reply is too little to tell it to a frame: a face in time shows 40 to 100 ms, now and then 300 (vowels open the
    mouth, and the loudest is often their beginning). All replies of a run together are of use.
    """
    steps = LAG_MAX_MS // STEP_MS
    whole = [(loud, dark) for loud, dark in replies if len(loud) > 4 * steps]
    by_lag: dict[int, float] = {}
    for lag in range(-steps, steps + 1):
        pairs = [(loud[steps:-steps], dark[steps + lag : len(dark) - steps + lag]) for loud, dark in whole]
        heard, seen = (np.concatenate(side) for side in zip(*pairs, strict=True)) if pairs else (np.zeros(1),) * 2
        if np.ptp(heard) and np.ptp(seen):
            by_lag[lag] = float(np.corrcoef(heard, seen)[0, 1])
    best = max(by_lag, key=lambda lag: by_lag[lag], default=0)
    return float(best * STEP_MS), by_lag.get(best, 0.0)


class Talk(msgspec.Struct, frozen=True):
    """Some time of typed questions and answers heard to their end."""

    frames: Frames
    lips: tuple[Lips, ...]
    cpu_share: float  #: of a core: lanes of motion and drawing and the process that draws

    def figures(self) -> dict[str, Any]:
        onsets = [one.onset_ms for one in self.lips if one.onset_ms is not None]
        skews = [one.skew_ms for one in self.lips if one.skew_ms is not None]
        together, likeness = lag_ms([one.series for one in self.lips])
        return {
            "lip_onset_ms": {"p50": percentile(onsets, 0.5), "p95": percentile(onsets, 0.95), "count": len(onsets)},
            "lip_skew_ms": {
                "together": together if likeness >= ALIKE else None,
                "likeness": round(likeness, 2),
                "p05": percentile(skews, 0.05),
                "p50": percentile(skews, 0.5),
                "p95": percentile(skews, 0.95),
                "count": len(skews),
            },
            "replies_with_lips": len(self.lips),
            "core_share_live": round(self.cpu_share, 3),
        }


async def measure_talk(stage: Stage, eye: Eye, *, seconds: float) -> Talk:
    """At least so long, from the first question to the end of the last answer."""
    before, cpu, began = await eye.inbound(), face_cpu_s(stage), clock.now()
    counted = await stage.daemon.metrics()
    lips: list[Lips] = []
    turn = 0
    while clock.now() - began < seconds * NANOS_PER_SECOND:
        asked = stage.heard().end
        await speak(stage, TOPICS[turn % len(TOPICS)])
        await reach(stage, "listening", within_s=30)
        await asyncio.sleep(0.5)
        found = lips_of(stage.heard(), await eye.shown(since=Nanos(asked - BEFORE_ONSET)), after=asked)
        lips += [] if found is None else [found]
        turn += 1
    took = (clock.now() - began) / NANOS_PER_SECOND
    share = (face_cpu_s(stage) - cpu) / took
    frames = frames_between(before, await eye.inbound())
    frames["planned"] = planned_between(counted, await stage.daemon.metrics())
    return Talk(frames, tuple(lips), share)


async def measure_spoken(stage: Stage, eye: Eye, *, seconds: float) -> Frames:
    """The same with spoken questions, while which fewer pictures are drawn."""
    questions, began, before = recordings.load("question"), clock.now(), await eye.inbound()
    counted = await stage.daemon.metrics()
    turn = 0
    while clock.now() - began < seconds * NANOS_PER_SECOND:
        await stage.ask(questions[turn % len(questions)])
        await stage.wait_for("listening", limit_s=30)
        turn += 1
    frames = frames_between(before, await eye.inbound())
    frames["planned"] = planned_between(counted, await stage.daemon.metrics())
    return frames


def face_cpu_s(stage: Stage) -> float:
    """Processor time of what makes the face so far: its lanes in the engine, and the process that draws."""
    processes = stage.daemon.processes()
    tasks = Path(f"/proc/{processes['engine']}/task").iterdir()
    lanes = [task for task in tasks if (task / "comm").read_text().strip() in FACE_THREADS]
    if len(lanes) != len(FACE_THREADS):
        raise RigError(f"the engine has {len(lanes)} threads of the face; expected {', '.join(FACE_THREADS)}")
    painter = [Path(f"/proc/{processes['painter']}")] if "painter" in processes else []
    return sum(cpu_s((folder / "stat").read_text()) for folder in (*lanes, *painter))


def cpu_s(stat: str) -> float:
    """User and system time of a line of /proc/PID/stat, seconds; the name in it may hold spaces and brackets."""
    fields = stat.rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# The bench ------------------------------------------------------------------------------------------------------------

#: What `bench` measures and a run without a browser does not.
UNSEEN: dict[str, Any] = dict.fromkeys(
    (
        "fps_received", "fps_share", "fps", "planned_share", "freezes", "kbit_per_s", "face_level", "skew_ms",
        "lip_onset_ms", "lip_skew_ms", "replies_with_lips", "core_share_live", "mouth_stop_ms", "clock_stop_ms",
        "seen_by",
    )
)  # fmt: skip


async def bench(*, replies: int = 4, stops: int = 20, seconds: float = 60.0) -> dict[str, Any]:
    """Figures of the face in Chromium: lips by the word clock and of the pocket face, frames by the browser's count.

    fps_received     frames a second that reached the browser while the pocket face talked; fps_share: of 25
    fps              the same apart: the clock's; the pocket face idle, in typed talk, in spoken talk; talk_seconds
    planned_share    pictures received of those that were planned: 25 a second, fewer while the person is waited for or
                     time is short
    freezes          stalls the browser counted meanwhile
    skew_ms          p05 and p95 of the clock's flash against its tone, + : the voice is ahead
    lip_onset_ms     from a reply's first sound at the loudspeaker to the first frame with the pocket face's lips apart
    lip_skew_ms      by which its mouth follows the loudness best, all replies together and each, + : the voice is ahead
    core_share_live  of a core: the face's lanes and the process that draws, while it talked
    mouth_stop_ms    from a stop to the last frame in which the pocket face's mouth moved; clock_stop_ms: the clock's;
                     moved_again: replies after a stop in which it moved, of `replies`
    """
    async with Stage("--model", "clock", query=QUERY) as stage:
        eye = await _watch(stage)
        clock_frames = await measure_frames(eye, seconds=5)
        skews = await measure_skew(stage, eye, replies=replies)
        stopped = await measure_stops(stage, eye, count=stops)
        stage.require_whole_recordings()
        client, path = stage.client(), stage.path()
    async with Stage("--model", "pocket", query=QUERY) as stage:
        eye = await _watch(stage)
        idle = await measure_frames(eye, seconds=10)
        talk = await measure_talk(stage, eye, seconds=seconds)
        shut = await measure_stops(stage, eye, count=stops, text=TOPICS[0], speaks=is_open)
        metrics = await stage.daemon.metrics()
        stage.require_whole_recordings()
        await stage.require_living_engine()
    async with Stage("--model", "pocket") as stage:
        spoken = await measure_spoken(stage, await _watch(stage), seconds=seconds)
        spoken_level = (await stage.daemon.metrics()).get("duplexd_engine_face_level")
        await stage.require_living_engine()
    whiles = {"clock": clock_frames, "idle": idle, "talk": talk.frames, "spoken": spoken}
    return {
        "fps_received": round(talk.frames["fps"], 1),
        "fps_share": round(talk.frames["fps"] / FRAMES_PER_SECOND, 3),
        "fps": {name: round(one["fps"], 1) for name, one in whiles.items()}
        | {"talk_seconds": round(talk.frames["seconds"])},
        "planned_share": {"talk": planned_share(talk.frames), "spoken": planned_share(spoken)},
        "freezes": {name: one["freezeCount"] for name, one in whiles.items()},
        "kbit_per_s": {name: round(one["bytesReceived"] / 125 / one["seconds"]) for name, one in whiles.items()},
        "face_level": {"talk": metrics.get("duplexd_engine_face_level"), "spoken": spoken_level},
        "skew_ms": {"p05": skews.p05, "p95": skews.p95, "tones": skews.tones, "paired": len(skews.each_ms)},
        **talk.figures(),
        "mouth_stop_ms": shut.figures(),
        "clock_stop_ms": stopped.figures(),
        "seen_by": client,
        "path": path,
    }


async def _watch(stage: Stage) -> Eye:
    """Raises RigError when no picture comes at all: a busy machine may begin with a still face."""
    eye = Eye(stage)
    await eye.open()
    for _ in range(round(FIRST_PICTURE_S / 0.1)):
        if await eye.inbound():
            await asyncio.sleep(SETTLE_S)
            return eye
        await asyncio.sleep(0.1)
    raise RigError(f"the browser received no picture within {FIRST_PICTURE_S:g} s")
