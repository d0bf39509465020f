"""`duplexd bench barge-in`: a person speaks over the reply; when is it quiet, and what is remembered?

1. The reply is spoken by the word clock, so the loudspeaker's recording says which words were heard, and how much of
   each.
2. Half of the interruptions are found by the page's own detector, the other half by the server's alone (`vad=0`).
3. Stop = onset of the person's voice at the microphone -> last audible old sample at the loudspeaker, however late that
   is, of interruptions that led to an advance, held or not. Onset is the first sample of the recording above its own
   -30 dB (a voice, not its breath). Old sound is told from the next reply's by its tones, not by the page's word.
4. Cursor error = where the engine cut - where the sound really ended, for cuts that fall inside a word. Moving cursor
   error = where the daemon says ten times a second that the ear is - what the loudspeaker plays at that moment.
5. Figures are made of `Evidence` and the recording alone, after the run. `--keep` saves both, `--from` makes the
   figures of what was kept.
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
from duplexd.bench.programs import RigError
from duplexd.bench.stage import BAD, Event, Stage, keep, percentile
from duplexd.bench.tap import Recording
from duplexd.media import tones
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos, ms_from_ticks

WORDS = 24
SEED = 20260629
REPLY_LIMIT_S = 15.0
#: What the output device still holds when the page mutes itself is heard: a word that begins so soon after the flush is
#: late, and in the stop, but no leak.
DEVICE_MS = 60.0
#: Concealment of a lost packet stretches and repeats sound: the tone ear then hears scraps of tones nobody sent, 24 to
#: 50 ms long, before and after the flush alike. On a bad network only something longer counts as a word after it.
SCRAP_MS = 60.0
EDGE_MS = 8.0  #: the tone ear's own error at a cut
TONE_MS = tones.CLOCK_WORD_MS - tones.GAP_MS
CURSOR_BOUND_MS = 20.0  #: what the front end publishes as the error of a position while it moves


class Evidence(msgspec.Struct):
    """What is known of one interruption besides the recordings. Times are the recording host's clock, in ns."""

    voice: str  #: name of the recording that was spoken
    asked_after_ms: float  #: after the reply began to sound
    begun: int  #: the reply was asked for
    said: int  #: first sample of the voice's recording at the microphone
    onset: int  #: of the voice in it
    stopped: int  #: the bench pressed stop, to end the answer
    log: list[dict[str, Any]]  #: all that the page noted since `begun`; `at` is the host's clock


class Half(msgspec.Struct):
    """All interruptions of one kind, as `--keep` saves them."""

    by: str  #: "page" or "server"
    lossy: bool  #: packets were lost on the way
    path: str
    client: str
    metrics: dict[str, float]  #: the daemon's, at the end
    evidence: list[Evidence]


class Interruption(msgspec.Struct):
    """One interruption; milliseconds."""

    by: str  #: "page" or "server"
    asked_after_ms: float
    advanced: bool = False
    held: bool = False  #: before it was decided
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
    moving_errors_ms: list[float] = []  #: see `moving_errors_ms`
    heard: list[int] = []
    remembered: list[int] = []


async def bench(*, count: int, impaired: bool, folder: Path | None) -> dict[str, Any]:
    """Run the bench; returns what `--json` writes."""
    kinds = [("page", "auto=1", count - count // 2), ("server", "auto=1&vad=0", count // 2)]
    halves = []
    flags = ["--model", "clock", "--voice-detector", "silero", "--sessions-max", "1"]
    for by, query, times in kinds:
        async with Stage(*flags, query=query, impaired=BAD if impaired else None) as stage:
            half, heard = await _half(stage, by, times)
        if folder is not None:
            keep(folder, f"barge-in-{by}-loudspeaker", heard)
            keep(folder, f"barge-in-{by}-microphone", stage.rig.microphone.recording())
            (folder / f"barge-in-{by}.json").write_bytes(msgspec.json.format(msgspec.json.encode(half), indent=1))
        halves.append((half, heard))
    return report_of(halves)


def report_from(folder: Path) -> dict[str, Any]:
    """The figures again, from what `--keep` saved.

    Raises:  RigError for a folder that holds no such recordings.
    """
    found = sorted(folder.glob("barge-in-*.json"))
    files = [file for file in found if not file.stem.endswith(("-loudspeaker", "-microphone"))]
    if not files:
        raise RigError(f"{folder} holds nothing that `duplexd bench barge-in --keep` has saved")
    halves = [msgspec.json.decode(file.read_bytes(), type=Half) for file in files]
    return report_of([(half, Recording.load(folder / f"barge-in-{half.by}-loudspeaker")) for half in halves])


async def _half(stage: Stage, by: str, times: int) -> tuple[Half, Recording]:
    rng = Random(f"{SEED}-{by}")
    voices = [r for r in recordings.load("question") if r.voiced_end_ms - r.voiced_start_ms > 700]
    await stage.type("say 4")  # The first sound of a browser may stutter.
    await stage.wait_for("speaking")
    await stage.wait_for("listening", limit_s=REPLY_LIMIT_S)
    evidence = [await _interrupt(stage, voices[n % len(voices)], rng.uniform(600, 4500)) for n in range(times)]
    stage.require_whole_recordings()
    await stage.require_living_engine()
    lossy = stage.network is not None
    half = Half(by, lossy, stage.path(), stage.client(), await stage.daemon.metrics(), evidence)
    return half, stage.heard()


async def _interrupt(stage: Stage, voice: recordings.Recording, after_ms: float) -> Evidence:
    begun = await stage.now()
    await stage.type(f"say {WORDS}")
    await stage.wait_for("speaking")
    await asyncio.sleep(after_ms / 1000)
    pcm = voice.pcm()
    said = await stage.say(pcm, recordings.RATE)
    onset = Nanos(said.start + round(onset_of(pcm) * NANOS_PER_SECOND / recordings.RATE))
    await stage.finish(said)
    await stage.wait_for("speaking", limit_s=5.0)  # The answer to what was said over the reply.
    await asyncio.sleep(0.4)
    stopped = await stage.now()
    await stage.page.evaluate("window.duplexd.stop()")
    await stage.wait_for("listening", limit_s=REPLY_LIMIT_S)
    await asyncio.sleep(0.6)
    log = [dict(event) for event in await stage.log(since=begun)]
    return Evidence(voice.name, round(after_ms, 1), begun, said.start, onset, stopped, log)


def onset_of(pcm: NDArray[np.int16]) -> int:
    """First sample of the voice: 30 dB below the recording's loudest, where a listener would say it begins."""
    level = np.abs(pcm.astype(np.float64))
    return int(np.argmax(level > level.max() * 10 ** (-30 / 20)))


def judge(evidence: Evidence, heard: Recording, *, by: str, lossy: bool) -> Interruption:
    """One interruption, from what the loudspeaker played and what the page noted."""
    one = Interruption(by, evidence.asked_after_ms)
    log = [Event(event) for event in evidence.log]
    flush = next((e for e in log if e["kind"] == "flush" and evidence.onset <= e.at < evidence.stopped), None)
    if flush is None:
        return one
    created = [e for e in log if e["kind"] == "reply" and e["state"] == "created" and e.at < flush.at]
    if not created:
        return one
    response = max(e["response"] for e in created)
    one.advanced, one.held = True, bool(flush["hold"])
    one.decide_ms = round((flush.at - evidence.onset) / NANOS_PER_MS, 1)
    told = [w for e in log if e["kind"] == "words" and e["response"] == response for w in e["words"]]
    parts = words_heard(heard, told, after=Nanos(evidence.begun), before=_over(log, heard))
    old = [part for part in parts if not (lossy and _is_scrap(heard, part, flush.at))]
    if not old:
        return one
    one.stop_ms = round((heard.time_of(old[-1].end_sample) - evidence.onset) / NANOS_PER_MS, 1)
    one.cut_ms = round(ms_from_ticks(flush["position"] - told[old[-1].index]["start"]), 1)
    one.sounded_ms = round(_sounded_ms(heard, old, old[-1].index), 1)
    one.cursor_error_ms = _cursor_error(one.cut_ms, one.sounded_ms)
    clear = flush.at + round(DEVICE_MS * NANOS_PER_MS)
    one.old_words_after_flush = sum(heard.time_of(part.start_sample) > clear for part in old)
    one.moving_errors_ms = moving_errors_ms(log, heard, old, told, before=Nanos(evidence.onset))
    finals = [e for e in log if e["kind"] == "heard" and e["final"] and e["response"] == response]
    if finals:
        _compare(one, finals[0], heard, old)
    return one


def _over(log: list[Event], heard: Recording) -> Nanos:
    """End of the stretch that belongs to an interruption: the page's last word on it, and what was then in the air."""
    return Nanos(min(heard.end, log[-1].at + NANOS_PER_SECOND // 5))


def _is_scrap(heard: Recording, part: tones.HeardWord, flushed: Nanos) -> bool:
    short = part.samples_count < SCRAP_MS * heard.rate / 1000
    return short and heard.time_of(part.start_sample) > flushed


def moving_errors_ms(
    log: list[Event], heard: Recording, parts: list[tones.HeardWord], told: list[dict[str, Any]], *, before: Nanos
) -> list[float]:
    """Where the daemon said the ear was, less what was played when the page heard of it: once for each report.

    Only reports that come while a word sounds which is heard whole: its first sample says where the timeline stands.
    """
    whole = (TONE_MS - 2 * EDGE_MS) * heard.rate / 1000
    words = [part for part in parts if part.samples_count >= whole]
    errors = []
    for report in (e for e in log if e["kind"] == "cursor" and e.at < before and not e["assumed"]):
        for word in words:
            into = report.at - heard.time_of(word.start_sample)
            if 0 <= into < word.samples_count * NANOS_PER_SECOND // heard.rate:
                stated = ms_from_ticks(report["playback"] - told[word.index]["start"])
                errors.append(round(stated - into / NANOS_PER_MS, 1))
    return errors


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


def report_of(halves: list[tuple[Half, Recording]]) -> dict[str, Any]:
    """All figures, of both halves with the recordings of their loudspeakers."""
    done = [
        judge(evidence, heard, by=half.by, lossy=half.lossy) for half, heard in halves for evidence in half.evidence
    ]
    metrics = {half.by: half.metrics for half, _ in halves}
    first = halves[0][0]
    stops = {by: [d.stop_ms for d in done if d.by == by and d.advanced and d.stop_ms is not None] for by in metrics}
    decides = {by: [d.decide_ms for d in done if d.by == by and d.decide_ms is not None] for by in metrics}
    errors = [abs(d.cursor_error_ms) for d in done if d.cursor_error_ms is not None]
    moving = [error for d in done for error in d.moving_errors_ms]
    engine = [m["duplexd_frontend_advance_ms_p95"] for m in metrics.values()]
    return {
        "count": len(done),
        "advanced": sum(d.advanced for d in done),
        "advanced_without_hold": sum(d.advanced and not d.held for d in done),
        "compared": sum(d.compared for d in done),
        **{f"stop_{by}_ms": _spread(v) for by, v in stops.items()},
        **{f"decide_{by}_ms": _spread(v) for by, v in decides.items()},
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
        "moving_cursor_error_ms": {
            "p05": percentile(moving, 0.05),
            "p50": percentile(moving, 0.5),
            "p95": percentile(moving, 0.95),
            "within_20_ms": round(sum(abs(error) <= CURSOR_BOUND_MS for error in moving) / max(1, len(moving)), 3),
            "count": len(moving),
        },
        "model": "clock",
        "impaired": first.path if first.lossy else None,
        "path": first.path,
        "client": first.client,
        "metrics": metrics,
        "each": [msgspec.structs.asdict(d) for d in done],
    }


def _spread(values: list[float]) -> dict[str, float | None]:
    return {"p50": percentile(values, 0.5), "p95": percentile(values, 0.95), "worst": max(values, default=None)}
