"""`duplexd bench soak`: minutes of talk and many visits. What does the daemon hold at the end that it did not before?

1. One person talks without a break: a spoken question, a typed one that is stopped, a spoken one that is interrupted by
   voice. After each round, in silence, the memory of the processes is read: front end, engine and the one that draws
   (resident, shared memory included).
2. Growth is the slope of a line through the second half of the readings: the first half fills caches.
3. Of each round: pictures that arrived a second, and how far the voice was ahead of them, by the browser's own measure;
   of both the median of each half, the worst twentieths and the slope.
4. Then the page is opened and closed `connects` times. What is held with nobody there is compared with what was held
   after the first visit.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np

from duplexd import clock
from duplexd.bench import recordings
from duplexd.bench.face import Eye, frames_between
from duplexd.bench.programs import RigError
from duplexd.bench.stage import Stage, percentile
from duplexd.units import NANOS_PER_SECOND

REPLY_LIMIT_S = 20.0
QUIET_S = 3.5  #: figures of the engine come once a second; a session's close is in them by then
PROCESSES = ("frontend", "engine", "painter")
_RESIDENT = re.compile(r"VmRSS:\s+(\d+) kB")


async def bench(*, minutes: float, connects: int, model: str) -> dict[str, Any]:
    """Run the bench; returns what `--json` writes."""
    async with Stage("--model", model, seconds_max=60.0 * minutes + 60.0) as stage:
        await _round(stage, 0)  # Raises when nothing is answered: a soak of silence would be flat as well.
        await stage.leave()
        await asyncio.sleep(QUIET_S)
        before = await stage.daemon.held()
        await stage.enter()
        readings = await _talk(stage, minutes)
        metrics = await stage.daemon.metrics()
        await stage.require_living_engine()
        await stage.leave()
        for _ in range(connects):
            await stage.enter()
            await stage.leave()
        await asyncio.sleep(QUIET_S)
        after = await stage.daemon.held()
        return {
            "minutes": minutes,
            "rounds": len(readings),
            "turns": int(metrics["duplexd_engine_turns"]),
            "interruptions": int(metrics["duplexd_engine_interruptions"]),
            "unanswered": sum(int(reading["unanswered"]) for reading in readings),
            "connects": connects,
            "memory_mb": {name: memory_of(readings, name) for name in PROCESSES if any(name in r for r in readings)},
            "pictures": {name: course_of(readings, name) for name in ("fps", "skew_ms")},
            "not_returned": {name: [before[name], after[name]] for name in before if before[name] != after[name]},
            "held": after,
            "model": model,
            "path": stage.path(),
            "client": stage.client(),
            "metrics": metrics,
            "each": readings,
        }


async def _talk(stage: Stage, minutes: float) -> list[dict[str, float]]:
    began, eye = clock.now(), Eye(stage)
    readings: list[dict[str, float]] = []
    passed = 0.0
    while not readings or passed < minutes:
        before = await eye.inbound()
        unanswered = await _round(stage, len(readings))
        pictures = await _pictures(stage, before, await eye.inbound())
        memory = {name: resident_mb(pid) for name, pid in stage.daemon.processes().items()}
        passed = (clock.now() - began) / NANOS_PER_SECOND / 60
        readings.append({"minute": round(passed, 2), "unanswered": unanswered, **memory, **pictures})
    return readings


async def _pictures(stage: Stage, before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """Empty without a face."""
    if not before or not after:
        return {}
    skew = await stage.page.evaluate("window.duplexd.sight?.skewMs ?? null")
    figures = {"fps": round(frames_between(before, after)["fps"], 1)}
    return figures | ({} if skew is None else {"skew_ms": round(float(skew), 1)})


async def _round(stage: Stage, number: int) -> int:
    """Four turns: one heard to its end, one stopped, one interrupted by the next question. How many had no answer."""
    questions = recordings.load("question")
    answered = [await stage.ask(questions[number % len(questions)])]
    await stage.wait_for("listening", limit_s=REPLY_LIMIT_S)
    await stage.type("Tell me something about the ocean.")
    answered.append(await stage.wait_for("speaking", limit_s=5.0))
    await asyncio.sleep(0.8)
    await stage.page.evaluate("window.duplexd.stop()")
    await stage.wait_for("listening", limit_s=REPLY_LIMIT_S)
    answered.append(await stage.ask(questions[(number + 1) % len(questions)]))
    await asyncio.sleep(0.5)
    answered.append(await stage.ask(questions[(number + 2) % len(questions)]))
    await stage.wait_for("listening", limit_s=REPLY_LIMIT_S)
    if not any(answered):
        raise RigError(
            f"nobody answered in round {number}; the page shows {await stage.state()}, its last events are "
            f"{(await stage.events('ended', 'error', 'closed', 'user', 'reply'))[-5:]}; the daemon said:\n"
            f"{stage.daemon.said()[-1000:]}"
        )
    return answered.count(False)


def resident_mb(pid: int) -> float:
    """Resident memory of a process, MB."""
    found = _RESIDENT.search(Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return round(int(found.group(1)) * 1024 / 1e6, 1)


def course_of(readings: list[dict[str, float]], name: str) -> dict[str, float | None]:
    """How a figure of the rounds went: median of each half, slope of a line through the second half (a minute), and the
    worst twentieth on both sides. All None where no round has it.
    """
    middle = len(readings) // 2
    all_, first, second = (
        [reading for reading in rounds if name in reading]
        for rounds in (readings, readings[:middle], readings[middle:])
    )
    return {
        "first_half": percentile([reading[name] for reading in first], 0.5),
        "second_half": percentile([reading[name] for reading in second], 0.5),
        "slope_per_minute": _slope(second, name) if second else None,
        "p05": percentile([reading[name] for reading in all_], 0.05),
        "p95": percentile([reading[name] for reading in all_], 0.95),
    }


def memory_of(readings: list[dict[str, float]], name: str) -> dict[str, float]:
    """Of a process, MB; one that came later or went away (the painter) is read while it was there."""
    there = [reading for reading in readings if name in reading]
    half = [reading for reading in readings[len(readings) // 2 :] if name in reading]
    return {
        "first": there[0][name],
        "last": there[-1][name],
        "highest": max(reading[name] for reading in there),
        "growth_per_minute": _slope(half, name),
    }


def _slope(readings: list[dict[str, float]], name: str) -> float:
    if len(readings) < 2:
        return 0.0
    slope = np.polyfit([reading["minute"] for reading in readings], [reading[name] for reading in readings], 1)[0]
    return round(float(slope), 2)
