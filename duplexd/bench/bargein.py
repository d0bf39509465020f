"""`duplexd bench barge-in`: a person speaks over the reply; when is it quiet, and what is remembered?

1. The reply is spoken by the word clock, so the loudspeaker's recording says which words were heard, and how much of
   each.
2. Half of the interruptions are found by the page's own detector, the other half by the server's alone (`vad=0`).
3. Stop = onset of the person's voice at the microphone -> last audible old sample at the loudspeaker, of interruptions
   that led to an advance. Onset is the first sample of the recording above its own -30 dB (a voice, not its breath).
4. Cursor error = where the engine cut - where the sound really ended, for cuts that fall inside a word.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from duplexd.bench import recordings
from duplexd.bench.stage import BAD, BAD_TEXT, Event, Stage, keep, percentile
from duplexd.bench.tap import Recording
from duplexd.media import tones
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos, ms_from_ticks

WORDS = 24
SEED = 20260629
REPLY_LIMIT_S = 15.0
CLEAR_MS = 60.0  #: a word that began this long after the flush belongs to the next reply, not to the old one
#: Concealment of a lost packet stretches and repeats sound: the tone ear then hears scraps of tones nobody sent, 24 to
#: 50 ms long, before and after the flush alike. On a bad network only something longer counts as a word.
SCRAP_MS = 60.0
EDGE_MS = 8.0  #: the tone ear's own error at a cut
TONE_MS = tones.CLOCK_WORD_MS - tones.GAP_MS


class Interruption(msgspec.Struct):
    """One interruption; milliseconds."""

    by: str  #: "page" or "server"
    asked_after_ms: float
    advanced: bool = False
    stop_ms: float | None = None
    decide_ms: float | None = None
    cursor_error_ms: float | None = None
    history_errors: int = 0
    ambiguous: int = 0
    ear_undecided: int = 0  #: a cut that this ear cannot tell from the word's end
    cut_ms: float | None = None  #: where the history says the last word was cut, from that word's start
    sounded_ms: float | None = None  #: how much of the last word sounded
    old_words_after_flush: int = 0
    compared: bool = False  #: the loudspeaker and the history could both be read
    heard: list[int] = []
    remembered: list[int] = []


async def bench(*, count: int, impaired: bool, folder: Path | None) -> dict[str, Any]:
    """Run the bench; returns what `--json` writes."""
    halves = [("page", "auto=1", count - count // 2), ("server", "auto=1&vad=0", count // 2)]
    done: list[Interruption] = []
    metrics: dict[str, dict[str, float]] = {}
    client = ""
    flags = ["--model", "clock", "--voice-detector", "silero", "--sessions-max", "1"]
    for by, query, times in halves:
        async with Stage(*flags, query=query, impaired=BAD if impaired else None) as stage:
            done += await _half(stage, by, times, folder)
            metrics[by] = await stage.daemon.metrics()
            client = stage.client()
    return _report(done, metrics, client=client, impaired=impaired)


async def _half(stage: Stage, by: str, times: int, folder: Path | None) -> list[Interruption]:
    rng = Random(f"{SEED}-{by}")
    voices = [r for r in recordings.load("question") if r.voiced_end_ms - r.voiced_start_ms > 700]
    await stage.type("say 4")  # The first sound of a browser may stutter.
    await stage.wait_for("speaking")
    await stage.wait_for("listening", limit_s=REPLY_LIMIT_S)
    done = []
    for index in range(times):
        done.append(await _interrupt(stage, by, voices[index % len(voices)], rng.uniform(600, 4500)))
    report = {"by": by, "each": [msgspec.structs.asdict(d) for d in done]}
    keep(folder, f"barge-in-{by}-loudspeaker", stage.rig.loudspeaker.recording(), report)
    keep(folder, f"barge-in-{by}-microphone", stage.rig.microphone.recording(), report)
    stage.require_whole_recordings()
    await stage.require_living_engine()
    return done


async def _interrupt(stage: Stage, by: str, voice: recordings.Recording, after_ms: float) -> Interruption:
    one = Interruption(by, round(after_ms, 1))
    begun = stage.clock.time_of(float(await stage.page.evaluate("performance.now()")))
    await stage.type(f"say {WORDS}")
    await stage.wait_for("speaking")
    await asyncio.sleep(after_ms / 1000)
    pcm = voice.pcm()
    said = await stage.say(pcm, recordings.RATE)
    onset = Nanos(said.start + round(onset_of(pcm) * NANOS_PER_SECOND / recordings.RATE))
    await stage.finish(said)
    await stage.wait_for("speaking", limit_s=5.0)  # The answer to what was said over the reply.
    await asyncio.sleep(0.4)
    await stage.page.evaluate("window.duplexd.stop()")
    await stage.wait_for("listening", limit_s=REPLY_LIMIT_S)
    await asyncio.sleep(0.6)
    await _judge(stage, one, begun=begun, onset=onset)
    return one


def onset_of(pcm: NDArray[np.int16]) -> int:
    """First sample of the voice: 30 dB below the recording's loudest, where a listener would say it begins."""
    level = np.abs(pcm.astype(np.float64))
    return int(np.argmax(level > level.max() * 10 ** (-30 / 20)))


async def _judge(stage: Stage, one: Interruption, *, begun: Nanos, onset: Nanos) -> None:
    flushes = [f for f in await stage.events("flush", since=onset) if f["hold"]]
    replies = [r for r in await stage.events("reply", since=begun) if r["state"] == "created"]
    if not flushes:
        return
    flush = flushes[0]
    response = max((r["response"] for r in replies if r.at < flush.at), default=None)
    if response is None:
        return
    one.advanced = True
    one.decide_ms = round((flush.at - onset) / NANOS_PER_MS, 1)
    told = [w for e in await stage.events("words", since=begun) if e["response"] == response for w in e["words"]]
    heard = stage.heard()
    old = words_heard(heard, told, after=begun, before=flush.at)
    if not old:
        return
    one.stop_ms = round((heard.time_of(old[-1].end_sample) - onset) / NANOS_PER_MS, 1)
    one.cut_ms = round(ms_from_ticks(flush["position"] - told[old[-1].index]["start"]), 1)
    one.sounded_ms = round(_sounded_ms(heard, old, old[-1].index), 1)
    one.cursor_error_ms = _cursor_error(one.cut_ms, one.sounded_ms)
    late = words_heard(heard, told, after=Nanos(flush.at + round(CLEAR_MS * NANOS_PER_MS)), before=heard.end)
    shortest = SCRAP_MS * heard.rate / 1000 if stage.network is not None else 0.0
    one.old_words_after_flush = sum(word.end_sample - word.start_sample > shortest for word in late)
    finals = [h for h in await stage.events("heard", since=begun) if h["final"] and h["response"] == response]
    if finals:
        _compare(one, finals[0], heard, old)


def words_heard(heard: Recording, told: list[dict[str, Any]], *, after: Nanos, before: Nanos) -> list[tones.HeardWord]:
    """Words of one reply that were heard in a stretch, by their place in the reply.

    `told` are all its words as the page was told. A word that a false alarm or a stutter has split comes in parts.
    """
    first, _ = heard.between(after, before)
    places = {tone_number(word["text"]): place for place, word in enumerate(told)}
    return [
        tones.HeardWord(places[w.index], w.start_sample + first, w.end_sample + first, w.level)
        for w in tones.decode(heard.part(after, before), heard.rate)
        if w.index in places
    ]


def tone_number(text: str) -> int:
    """The tone code of a word of the word clock, "r-k"."""
    reply, _, word = text.strip(" ,.").partition("-")
    return (tones.WORDS_PER_REPLY_MAX * int(reply) + int(word)) % tones.WORDS_MAX


def _sounded_ms(heard: Recording, words: list[tones.HeardWord], place: int) -> float:
    """How much of a word sounded, all its parts together."""
    samples = sum(word.end_sample - word.start_sample for word in words if word.index == place)
    return samples * 1000 / heard.rate


def _compare(one: Interruption, history: Event, heard: Recording, old: list[tones.HeardWord]) -> None:
    """History against the loudspeaker: words remembered and not heard, or heard and not remembered.

    The last word counts as heard when it is whole; one before it when half of it is there, since a network that loses
    packets takes a bite out of a word that was played. One more or less is not an error where the last word was cut so
    near its end that this ear cannot tell, nor where the cut agrees with what sounded: the ear's error at a cut is as
    large as the difference between a whole word and one without its fade.
    """
    last, whole = old[-1].index, TONE_MS - 2 * EDGE_MS
    sounded = {place: _sounded_ms(heard, old, place) for place in {word.index for word in old}}
    one.heard = sorted(p for p, ms in sounded.items() if p <= last and ms >= (whole if p == last else TONE_MS / 2))
    one.remembered = list(range(history["words"]))
    one.ambiguous = len(history["ambiguous"])
    wrong = set(one.heard).symmetric_difference(one.remembered) - set(history["ambiguous"])
    agrees = one.cut_ms is not None and abs(one.cut_ms - sounded[last]) <= EDGE_MS
    undecided = wrong & ({last} if agrees or abs(sounded[last] - whole) <= EDGE_MS else set())
    one.ear_undecided = len(undecided)
    one.history_errors = len(wrong - undecided)
    one.compared = True


def _cursor_error(cut_ms: float, sounded_ms: float) -> float | None:
    """None when the sound ended at a word's own end: then nothing says when exactly it was cut."""
    return None if sounded_ms > TONE_MS - 3 * EDGE_MS else round(cut_ms - sounded_ms, 1)


def _report(
    done: list[Interruption], metrics: dict[str, dict[str, float]], *, client: str, impaired: bool
) -> dict[str, Any]:
    stops = {by: [d.stop_ms for d in done if d.by == by and d.advanced and d.stop_ms is not None] for by in metrics}
    decides = {by: [d.decide_ms for d in done if d.by == by and d.decide_ms is not None] for by in metrics}
    errors = [abs(d.cursor_error_ms) for d in done if d.cursor_error_ms is not None]
    engine = [m["duplexd_frontend_advance_ms_p95"] for m in metrics.values()]
    return {
        "count": len(done),
        "advanced": sum(d.advanced for d in done),
        "compared": sum(d.compared for d in done),
        **{f"stop_{by}_ms": {"p50": percentile(v, 0.5), "p95": percentile(v, 0.95)} for by, v in stops.items()},
        **{f"decide_{by}_ms": {"p50": percentile(v, 0.5), "p95": percentile(v, 0.95)} for by, v in decides.items()},
        "engine_ms": {"p95": round(max(engine), 2)},
        "old_epoch_samples": int(sum(m["duplexd_frontend_stale_samples_sent"] for m in metrics.values())),
        "old_words_after_flush": sum(d.old_words_after_flush for d in done),
        "history_errors": sum(d.history_errors for d in done),
        "ambiguous_words": sum(d.ambiguous for d in done),
        "ear_undecided": sum(d.ear_undecided for d in done),
        "cursor_error_ms": {
            "p50": percentile(errors, 0.5),
            "p95": percentile(errors, 0.95),
            "p99": percentile(errors, 0.99),
            "count": len(errors),
        },
        "model": "clock",
        "impaired": BAD_TEXT if impaired else None,
        "client": client,
        "metrics": metrics,
        "each": [msgspec.structs.asdict(d) for d in done],
    }
