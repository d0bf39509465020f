"""`duplexd bench talk`: spoken questions in, spoken answers out, measured from the last voiced sample at the microphone
to the first audible sample at the loudspeaker.

1. Every audible figure comes from the two recordings alone; the page's report only explains it.
2. The microphone is stamped at the end of its block and the loudspeaker at the start (tap.py): v2v is not flattered.
3. A gap is the heard length of a reply less its published length; it is the engine's when playout ran dry, else the
   machine's (a stalled loop, a starved browser), and then listed with the loop's lag.
4. Uplink lateness is how much later the person's audio reached the engine's door than the fastest packet of the last
   ten seconds: jitter of the network, and what was waited for lost packets.
5. With `pairs` every question is asked twice in a row, with speculative turns and without, in alternating order.
6. Utterances with pauses for thought are played afterwards: a reply that begins inside one is a premature end.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from duplexd.bench import recordings
from duplexd.bench.recordings import Recording
from duplexd.bench.stage import BAD, BAD_TEXT, Event, Stage, keep, percentile
from duplexd.units import NANOS_PER_MS, Nanos, ms_from_ticks

REPLY_LIMIT_S = 20.0
GAP_MS = 100.0
QUIET_AFTER_S = 1.0  #: between two turns, like a person who listens to the end
NOISE_RMS = 20.0  #: of the room, int16


class Turn(msgspec.Struct):
    """One question and its answer; milliseconds."""

    name: str
    said: str
    understood: str = ""
    answered: str = ""
    v2v_ms: float | None = None
    parts_ms: dict[str, float] = {}
    gap_ms: float = 0.0
    engine_gap_ms: float = 0.0
    loop_lag_ms: float = 0.0  #: longest of about the last minute
    premature: bool = False  #: answered before the question was over: no voice-to-voice figure
    speculated: bool = True  #: speculative turns were allowed


class Paused(msgspec.Struct):
    """One utterance with a pause for thought."""

    name: str
    premature: bool
    merged: bool
    turns: list[str]


async def bench(
    *, turns: int, pauses: int, impaired: bool, model: str, folder: Path | None, pairs: bool
) -> dict[str, Any]:
    """Run the bench; returns what `--json` writes."""
    questions = recordings.load("question")
    async with Stage("--model", model, impaired=BAD if impaired else None) as stage:
        await _settle(stage)
        talked: list[Turn] = []
        without: list[Turn] = []
        for index in range(turns):
            question = questions[index % len(questions)]
            for speculated in _order(index) if pairs else (True,):
                (talked if speculated else without).append(await _turn(stage, question, speculated=speculated))
        await stage.speculate(True)
        paused = [await _paused(stage, one) for one in recordings.load("paused")[:pauses]]
        metrics = await stage.daemon.metrics()
        report = _report(stage, talked, paused, metrics, impaired=impaired, model=model)
        if pairs:
            report["pairs"] = _compare(talked, without)
            report["each_without"] = [msgspec.structs.asdict(t) for t in without]
        keep(folder, "talk-loudspeaker", stage.rig.loudspeaker.recording(), report)
        keep(folder, "talk-microphone", stage.rig.microphone.recording(), report)
        stage.require_whole_recordings()
        await stage.require_living_engine()
    return report


async def _settle(stage: Stage) -> None:
    """The first sound of a browser may stutter, and a new thread's first step is slow: neither is the bench's
    subject.
    """
    await stage.type("Hello.")
    await stage.wait_for("speaking")
    await stage.wait_for("listening", limit_s=REPLY_LIMIT_S)
    await asyncio.sleep(QUIET_AFTER_S)


def _order(index: int) -> tuple[bool, bool]:
    """What comes second is answered with a longer history: neither side always does."""
    return (True, False) if index % 2 == 0 else (False, True)


def _compare(talked: list[Turn], without: list[Turn]) -> dict[str, Any]:
    """Voice to voice of the same questions with speculative turns and without, milliseconds."""
    both = [(a.v2v_ms, b.v2v_ms) for a, b in zip(talked, without, strict=True)]
    paired = [(a, b) for a, b in both if a is not None and b is not None]
    sides = {"with": [a for a, _ in paired], "without": [b for _, b in paired], "saved": [b - a for a, b in paired]}
    shares = {f"p{round(100 * share)}": share for share in (0.1, 0.25, 0.5, 0.75, 0.9)}
    return {"pairs": len(paired)} | {
        f"{name}_ms": {key: percentile(values, share) for key, share in shares.items()}
        for name, values in sides.items()
    }


async def _turn(stage: Stage, question: Recording, *, speculated: bool) -> Turn:
    await stage.speculate(speculated)
    before = await stage.daemon.metrics()
    latencies = len(await stage.latencies())
    said = await stage.say(question.pcm(), recordings.RATE)
    ended = Nanos(said.start + question.voiced_end_ms * NANOS_PER_MS)
    await stage.finish(said)
    answered = await stage.wait_for("speaking", limit_s=6.0)
    await stage.wait_for("listening", limit_s=REPLY_LIMIT_S)
    await asyncio.sleep(QUIET_AFTER_S)
    turn = Turn(question.name, question.text, speculated=speculated)
    turn.premature = await _early(stage, said.start, ended)
    if not answered or turn.premature:
        return turn
    heard = stage.heard()
    first = heard.first_audible(after=ended)
    if first is not None:
        turn.v2v_ms = round((first - ended) / NANOS_PER_MS, 1)
    turn.understood, turn.answered = await _last_texts(stage)
    fresh = (await stage.latencies())[latencies:]
    turn.parts_ms = dict(fresh[-1]["parts"]) if fresh else {}
    after = await stage.daemon.metrics()
    _gaps(turn, first, heard, await stage.events("words", since=ended), before, after)
    return turn


async def _last_texts(stage: Stage) -> tuple[str, str]:
    transcript = await stage.transcript()
    users = [e["text"] for e in transcript if e["role"] == "user"]
    replies = [e["text"] for e in transcript if e["role"] == "character"]
    return (users[-1] if users else ""), (replies[-1] if replies else "")


def _gaps(
    turn: Turn,
    first: Nanos | None,
    heard: Any,
    words: list[Event],
    before: dict[str, float],
    after: dict[str, float],
) -> None:
    if first is None or not words:
        return
    last = heard.last_audible(after=first)
    spans = [word for event in words for word in event["words"]]
    published_ms = ms_from_ticks(spans[-1]["end"] - spans[0]["start"])
    # The last word's own end may lie a little after its last audible sample: that is no gap, it makes this negative.
    turn.gap_ms = round(max(0.0, (last - first) / NANOS_PER_MS - published_ms), 1)
    turn.engine_gap_ms = round(after["duplexd_frontend_underrun_ms"] - before["duplexd_frontend_underrun_ms"], 1)
    turn.loop_lag_ms = round(after["duplexd_frontend_loop_lag_ms_max"], 1)


async def _paused(stage: Stage, one: Recording) -> Paused:
    """Play an utterance with inner pauses; a reply created before its last voiced sample came too early."""
    said = await stage.say(one.pcm(), recordings.RATE)
    ended = Nanos(said.start + one.voiced_end_ms * NANOS_PER_MS)
    await stage.finish(said)
    await stage.wait_for("speaking", limit_s=6.0)
    await stage.wait_for("listening", limit_s=REPLY_LIMIT_S)
    await asyncio.sleep(QUIET_AFTER_S)
    finals = [e["text"] for e in await stage.events("user", since=said.start) if e["final"]]
    early = await _early(stage, said.start, ended)
    return Paused(one.name, early, not early or _merged(finals, one.text), finals)


async def _early(stage: Stage, began: Nanos, ended: Nanos) -> bool:
    """A reply was created while the person still spoke."""
    replies = await stage.events("reply", since=began)
    return any(e["state"] == "created" and e.at < ended for e in replies)


def _merged(finals: list[str], text: str) -> bool:
    """The last final transcript holds the whole utterance, not only what followed the pause."""
    return bool(finals) and len(finals[-1].split()) >= 0.7 * len(text.split())


def _report(
    stage: Stage,
    turns: list[Turn],
    paused: list[Paused],
    metrics: dict[str, float],
    *,
    impaired: bool,
    model: str,
) -> dict[str, Any]:
    measured = [t.v2v_ms for t in turns if t.v2v_ms is not None]
    names = list(dict.fromkeys(name for t in turns for name in t.parts_ms))
    engine_gaps = [t for t in turns if t.engine_gap_ms > GAP_MS]
    machine_gaps = [t for t in turns if t.gap_ms > GAP_MS and t not in engine_gaps]
    return {
        "turns": len(turns),
        "answered": len(measured),
        "answered_too_early": sum(t.premature for t in turns),
        "v2v_ms": {"p50": percentile(measured, 0.5), "p90": percentile(measured, 0.9)},
        "parts_ms": {name: percentile([t.parts_ms[name] for t in turns if name in t.parts_ms], 0.5) for name in names},
        "gaps_over_100ms": len(engine_gaps),
        "machine_gaps_over_100ms": [
            {"turn": t.name, "gap_ms": t.gap_ms, "loop_lag_ms": t.loop_lag_ms} for t in machine_gaps
        ],
        "premature_ends": {
            "count": sum(p.premature for p in paused),
            "of": len(paused),
            "merged": sum(p.merged for p in paused if p.premature),
        },
        "speculation": _speculation(metrics),
        "uplink_late_ms": {p: round(metrics[f"duplexd_frontend_uplink_late_ms_{p}"], 1) for p in ("p50", "p99")},
        "model": model,
        "impaired": BAD_TEXT if impaired else None,
        "client": stage.client(),
        "each": [msgspec.structs.asdict(t) for t in turns],
        "paused": [msgspec.structs.asdict(p) for p in paused],
        "metrics": metrics,
    }


def _speculation(metrics: dict[str, float]) -> dict[str, float]:
    """Counts of the whole run, pauses for thought included, and what was made for nothing."""
    names = ("speculations", "speculations_confirmed", "speculations_dropped", "speculative_tokens_discarded")
    counts = {name: metrics.get(f"duplexd_engine_{name}", 0.0) for name in names}
    return counts | {"audio_discarded_ms": round(metrics.get("duplexd_engine_speculative_us_discarded", 0.0) / 1000)}
