"""`duplexd bench talk`: spoken questions in, spoken answers out, measured from the last voiced sample at the microphone
to the first audible sample at the loudspeaker.

1. Every audible figure comes from the two recordings alone; the page's report only explains it.
2. The microphone is stamped at the end of its block and the loudspeaker at the start (tap.py): v2v is not flattered.
3. A gap is the heard length of a reply less its published length; it is the engine's when playout ran dry, else the
   machine's (a stalled loop, a starved browser), and then listed with the loop's lag.
4. Uplink lateness is how much later the person's audio reached the engine's door than the fastest of the run: jitter
   of the network, and what was waited for lost packets; over all of the run, and after each loss (uplink.py).
5. With `pairs` every question is asked twice in a row, with speculative turns and without, in alternating order.
6. Utterances with pauses for thought are played afterwards: a reply that begins inside one is a premature end. Each is
   played again in a room: steady noise at a stated ratio, from a second before the voice until the turn has ended.
7. `--keep` saves the recordings, the page's log and when each question ended; `--from` makes the voice-to-voice figures
   of them again.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from duplexd.bench import recordings, tap
from duplexd.bench.face import Eye, frames_between
from duplexd.bench.netem import Impairment
from duplexd.bench.programs import RigError
from duplexd.bench.recordings import Recording, noises
from duplexd.bench.stage import Event, Stage, keep, percentile
from duplexd.bench.uplink import Uplink, figures
from duplexd.units import NANOS_PER_MS, Nanos, ms_from_ticks

REPLY_LIMIT_S = 20.0
GAP_MS = 100.0
QUIET_AFTER_S = 1.0  #: between two turns, like a person who listens to the end
NOISE_LEAD_MS = 1000  #: of the room before the voice: no ear is surprised by it
NOISE_TAIL_MS = 6000  #: after it: longer than any turn waits for its end


class Turn(msgspec.Struct):
    """One question and its answer; milliseconds."""

    name: str
    said: str
    ended: int = 0  #: last voiced sample at the microphone, ns of the recording host's clock
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
    noise_db: float | None = None  #: how far the room's noise lay below the voice; None: no noise


async def bench(
    *,
    turns: int,
    pauses: int,
    impairment: Impairment | None,
    model: str,
    folder: Path | None,
    pairs: bool,
    noise_db: float | None,
) -> dict[str, Any]:
    """Run the bench; returns what `--json` writes. `noise_db`: None for utterances with pauses in silence alone."""
    questions = recordings.load("question")
    async with Stage("--model", model, impaired=impairment) as stage:
        eye, uplink, log = Eye(stage), Uplink(stage), list[Event]()
        await _settle(stage)
        before, begun = await eye.inbound(), await stage.now()
        talked: list[Turn] = []
        without: list[Turn] = []
        for index in range(turns):
            question = questions[index % len(questions)]
            for speculated in _order(index) if pairs else (True,):
                (talked if speculated else without).append(await _turn(stage, question, speculated=speculated))
                await uplink.gather()
                log += await stage.log(since=Nanos(log[-1].at + 1) if log else begun)
        after = await eye.inbound()
        await stage.speculate(True)
        paused = []
        for noise in (None,) if noise_db is None else (None, noise_db):
            for one in recordings.load("paused")[:pauses]:
                paused.append(await _paused(stage, one, noise_db=noise))
                await uplink.gather()
        heard = stage.heard()
        for turn in (*talked, *without):  # Of the whole recording: its clock is known best then.
            if turn.v2v_ms is not None:
                turn.v2v_ms = voice_to_voice_ms(heard, Nanos(turn.ended))
        metrics = await stage.daemon.metrics()
        report = _report(stage, talked, paused, metrics, model=model)
        losses = stage.network.losses("ba") if stage.network is not None else ()
        report |= figures(uplink.arrivals, losses, uplink.holes)
        report["pictures"] = {"fps": round(frames_between(before, after)["fps"], 1) if before and after else None}
        if pairs:
            report["pairs"] = _compare(talked, without)
            report["each_without"] = [msgspec.structs.asdict(t) for t in without]
        if folder is not None:
            keep(folder, "talk-loudspeaker", heard)
            keep(folder, "talk-microphone", stage.rig.microphone.recording())
            (folder / "talk.json").write_text(json.dumps(report | {"log": log}, indent=1))
        stage.require_whole_recordings()
        await stage.require_living_engine()
    return report


def report_from(folder: Path) -> dict[str, Any]:
    """The report that `--keep` saved, with every voice-to-voice figure made again from the loudspeaker's recording.

    Raises:  RigError for a folder that holds no such recording.
    """
    try:
        report: dict[str, Any] = json.loads((folder / "talk.json").read_text())
    except FileNotFoundError as missing:
        raise RigError(f"{folder} holds nothing that `duplexd bench talk --keep` has saved") from missing
    heard = tap.Recording.load(folder / "talk-loudspeaker")
    del report["log"]
    for turn in report["each"]:
        if turn["v2v_ms"] is not None:
            turn["v2v_ms"] = voice_to_voice_ms(heard, Nanos(turn["ended"]))
    measured = [turn["v2v_ms"] for turn in report["each"] if turn["v2v_ms"] is not None]
    return report | {"v2v_ms": {"p50": percentile(measured, 0.5), "p90": percentile(measured, 0.9)}}


def voice_to_voice_ms(heard: tap.Recording, ended: Nanos) -> float | None:
    """From the last voiced sample at the microphone to the first audible one at the loudspeaker; None of silence."""
    first = heard.first_audible(after=ended)
    return None if first is None else round((first - ended) / NANOS_PER_MS, 1)


def in_a_room(one: Recording, noise_db: float) -> recordings.Pcm:
    """An utterance in steady noise, `noise_db` below its voice, that begins NOISE_LEAD_MS before it; int16, 16 kHz.

    The noise is the recording's own: its seed is made of the name.
    """
    around = [np.zeros(ms * recordings.RATE // 1000, np.float32) for ms in (NOISE_LEAD_MS, NOISE_TAIL_MS)]
    speech = np.concatenate([around[0], one.audio(), around[1]])
    noise = noises.room(len(speech), np.random.default_rng(zlib.crc32(one.name.encode())))
    mixed = noises.at_snr(speech, noise, noise_db)
    return np.asarray(np.rint(np.clip(mixed, -1, 1) * 32767), np.int16)


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
    turn = Turn(question.name, question.text, ended=ended, speculated=speculated)
    turn.premature = await _early(stage, said.start, ended)
    if not answered or turn.premature:
        return turn
    heard = stage.heard()
    first = heard.first_audible(after=ended)
    turn.v2v_ms = voice_to_voice_ms(heard, ended)
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


async def _paused(stage: Stage, one: Recording, *, noise_db: float | None) -> Paused:
    """Play an utterance with inner pauses; a reply created before its last voiced sample came too early."""
    lead_ms = 0 if noise_db is None else NOISE_LEAD_MS
    said = await stage.say(one.pcm() if noise_db is None else in_a_room(one, noise_db), recordings.RATE)
    ended = Nanos(said.start + (lead_ms + one.voiced_end_ms) * NANOS_PER_MS)
    if noise_db is None:
        await stage.finish(said)
    await stage.wait_for("speaking", limit_s=6.0 + (one.voiced_end_ms + lead_ms) / 1000)
    await stage.wait_for("listening", limit_s=REPLY_LIMIT_S)
    await stage.finish(said)  # The room falls silent, too.
    await stage.wait_for("listening", limit_s=REPLY_LIMIT_S)  # Again, after an answer that came too early.
    await asyncio.sleep(QUIET_AFTER_S)
    finals = [e["text"] for e in await stage.events("user", since=said.start) if e["final"]]
    early = await _early(stage, said.start, ended)
    return Paused(one.name, early, not early or _merged(finals, one.text), finals, noise_db)


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
        "premature_ends": _premature([p for p in paused if p.noise_db is None]),
        "premature_ends_in_noise": _premature([p for p in paused if p.noise_db is not None])
        | {"noise": "room, steady", "noise_db": next((p.noise_db for p in paused if p.noise_db is not None), None)},
        "speculation": _speculation(metrics),
        "model": model,
        "impaired": stage.path() if stage.network is not None else None,
        "path": stage.path(),
        "client": stage.client(),
        "each": [msgspec.structs.asdict(t) for t in turns],
        "paused": [msgspec.structs.asdict(p) for p in paused],
        "metrics": metrics,
    }


def _premature(paused: list[Paused]) -> dict[str, Any]:
    early = [p for p in paused if p.premature]
    return {"count": len(early), "of": len(paused), "merged": sum(p.merged for p in early)}


def _speculation(metrics: dict[str, float]) -> dict[str, float]:
    """Counts of the whole run, pauses for thought included, and what was made for nothing."""
    names = ("speculations", "speculations_confirmed", "speculations_dropped", "speculative_tokens_discarded")
    counts = {name: metrics.get(f"duplexd_engine_{name}", 0.0) for name in names}
    return counts | {"audio_discarded_ms": round(metrics.get("duplexd_engine_speculative_us_discarded", 0.0) / 1000)}
