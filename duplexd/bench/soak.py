"""`duplexd bench soak`: minutes of talk and many visits. What does the daemon hold at the end that it did not before?

1. One person talks without a break: a spoken question, a typed one that is stopped, a spoken one that is interrupted by
   voice. After each round, in silence, the memory of both processes is read (resident, shared memory included).
2. Growth is the slope of a line through the second half of the readings: the first half fills caches.
3. Of each round: pictures that arrived a second, and how far the voice was ahead of them, by the browser's own measure.
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
            "memory_mb": {name: _memory(readings, name) for name in stage.daemon.processes()},
            "pictures": {name: _halves(readings, name) for name in ("fps", "skew_ms")},
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


def _halves(readings: list[dict[str, float]], name: str) -> dict[str, float | None]:
    """Median of each half of the rounds."""
    middle = len(readings) // 2
    halves = {"first_half": readings[:middle], "second_half": readings[middle:]}
    return {
        half: percentile([reading[name] for reading in rounds if name in reading], 0.5)
        for half, rounds in halves.items()
    }


def _memory(readings: list[dict[str, float]], name: str) -> dict[str, float]:
    half = readings[len(readings) // 2 :]
    slope = float(np.polyfit([r["minute"] for r in half], [r[name] for r in half], 1)[0]) if len(half) > 1 else 0.0
    return {"first": readings[0][name], "last": readings[-1][name], "growth_per_minute": round(slope, 2)}
