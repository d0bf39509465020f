"""`duplexd bench uplink`: from a sound at the microphone to its samples in the application; what a lost packet costs.

1. Absolute: a tone of 100 ms begins sharply at the microphone tap; the front end says when it was handed the sample
   that is loud first. Browser, network, receive path and the packet's own 20 ms are all in it. The microphone's samples
   are stamped late rather than early (tap.py), by less than a block.
2. Late: how much later than the fastest piece of the run each piece was handed on. Jitter, and what was waited.
3. The network says which voice packets it lost, and when. After each, in the two seconds that follow: how late the
   worst piece was, and when lateness was back under LATE_MS and stayed there for CALM_MS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np

from duplexd.bench.netem import Impairment, Loss
from duplexd.bench.stage import Stage, keep, percentile
from duplexd.bench.tap import RATE
from duplexd.media import tones
from duplexd.media.lateness import LOUD, Arrival
from duplexd.units import (
    NANOS_PER_MS,
    NANOS_PER_SECOND,
    Nanos,
    nanos_from_ticks,
    rtp_distance,
)

LATE_MS = 60.0  #: the person's sound is behind when it is later than this
CALM_MS = 100.0  #: five packets in a row under it: the line has recovered
WINDOW_NS = 2 * NANOS_PER_SECOND
TONE_MS = 100
PAUSES_S = (0.4, 0.9)  #: between tones
QUIET_NS = 150 * NANOS_PER_MS  #: of silence before a piece that begins a tone
FOUND_NS = 400 * NANOS_PER_MS  #: a tone that has not come by then never came; less than the least distance of two
ASK_EVERY_S = 10.0  #: the front end keeps half a minute
SEED = 20261130


class Piece(msgspec.Struct, frozen=True):
    """One piece of sound at the application's door."""

    at: int  #: ns of the host's clock
    late_ms: float


class Uplink:
    """What the front end was handed of one person's sound, gathered from the bounded series it keeps."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.arrivals: list[Arrival] = []
        self.holes: list[tuple[int, int]] = []  #: from, to: what the front end had forgotten when it was asked

    async def gather(self) -> None:
        """Take over what is new; a hole where nobody had asked for too long."""
        answer = msgspec.json.decode(await self._stage.daemon.get("/api/uplink"), type=dict[str, list[Arrival]])
        if not answer:
            return
        told = answer[max(answer, key=int)]
        last = self.arrivals[-1].at if self.arrivals else 0
        if last and told and told[0].at > last:
            self.holes.append((last, told[0].at))
        self.arrivals += [arrival for arrival in told if arrival.at > last]


async def bench(*, seconds: float, impairment: Impairment | None, folder: Path | None) -> dict[str, Any]:
    """Run the bench; returns what `--json` writes."""
    flags = ["--model", "clock", "--sessions-max", "1"]
    async with Stage(*flags, impaired=impairment) as stage:
        uplink, rng, onsets = Uplink(stage), Random(SEED), list[int]()
        tone = tones.word_pcm(5, samples=(TONE_MS + tones.GAP_MS) * RATE // 1000, rate=RATE)
        offset = first_loud(np.rint(tone * 32767).astype(np.int16))
        began = asked = await stage.now()
        while (now := await stage.now()) - began < seconds * NANOS_PER_SECOND:
            said = await stage.say(tone, RATE)
            onsets.append(said.start + offset * NANOS_PER_SECOND // RATE)
            await stage.finish(said)
            await asyncio.sleep(rng.uniform(*PAUSES_S))
            if now - asked > ASK_EVERY_S * NANOS_PER_SECOND:
                await uplink.gather()
                asked = now
        await uplink.gather()
        losses = stage.network.losses("ba") if stage.network is not None else ()
        stage.require_whole_recordings()
        absolute = microphone_to_application_ms(uplink.arrivals, onsets)
        report = {
            "microphone_to_application_ms": spread(absolute) | {"count": len(absolute), "of": len(onsets)},
            **figures(uplink.arrivals, losses, uplink.holes),
            "path": stage.path(),
            "impaired": impairment and stage.path(),
            "client": stage.client(),
            "each": {"onsets": onsets, "losses": losses, "arrivals": uplink.arrivals, "absolute_ms": absolute},
        }
        if folder is not None:
            keep(folder, "uplink-microphone", stage.rig.microphone.recording())
            (folder / "uplink.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    return msgspec.to_builtins(report)  # type: ignore[no-any-return]


def first_loud(pcm: np.ndarray[Any, np.dtype[np.int16]]) -> int:
    """First sample above what the front end calls loud."""
    return int(np.argmax(np.abs(pcm.astype(np.int32)) > LOUD))


def figures(
    arrivals: Sequence[Arrival], losses: Sequence[Loss], holes: Sequence[tuple[int, int]] = ()
) -> dict[str, Any]:
    """Lateness of the whole run, and after each loss that can be judged: two seconds of the run follow it, no hole."""
    series = pieces(arrivals)
    late = [piece.late_ms for piece in series]
    judged = [
        loss.at
        for loss in losses
        if series and series[0].at < loss.at and not any(a < loss.at + WINDOW_NS and loss.at < b for a, b in holes)
    ]
    after = [after_loss(series, at) for at in judged]
    known = [one for one in after if one is not None]
    recovered = [one.until_ms for one in known if one.until_ms is not None]
    return {
        "uplink_late_ms": spread(late) | {"count": len(late)},
        "losses": len(known),
        "under_60_ms_after_loss_ms": spread(recovered),
        "not_under_60_ms_within_2_s": len(known) - len(recovered),
        "late_after_loss_ms": spread([late for one in known for late in one.late_ms]),
    }


def pieces(arrivals: Sequence[Arrival]) -> list[Piece]:
    """Each arrival with its lateness over the fastest of all."""
    media, delays = 0, list[int]()
    for index, arrival in enumerate(arrivals):
        media += rtp_distance(arrival.rtp, arrivals[index - 1].rtp) if index else 0
        delays.append(arrival.at - nanos_from_ticks(media))
    least = min(delays, default=0)
    return [
        Piece(arrival.at, round((delay - least) / NANOS_PER_MS, 1))
        for arrival, delay in zip(arrivals, delays, strict=True)
    ]


class AfterLoss(msgspec.Struct, frozen=True):
    """The two seconds that follow a lost packet."""

    until_ms: float | None  #: from the loss until lateness was under LATE_MS for good; None: not in this time
    late_ms: list[float]


def after_loss(series: Sequence[Piece], lost: Nanos) -> AfterLoss | None:
    """None when the run ended before two seconds had passed."""
    window = [piece for piece in series if lost <= piece.at <= lost + WINDOW_NS]
    if not window or series[-1].at < lost + WINDOW_NS:
        return None
    return AfterLoss(_until_calm(window, lost), [piece.late_ms for piece in window])


def _until_calm(window: Sequence[Piece], lost: Nanos) -> float | None:
    """When the line has been calm for CALM_MS: the time of the first piece of those."""
    since: int | None = None
    for piece in window:
        if piece.late_ms >= LATE_MS:
            since = None
            continue
        since = piece.at if since is None else since
        if piece.at - since >= CALM_MS * NANOS_PER_MS:
            return round((since - lost) / NANOS_PER_MS, 1)
    return None


def microphone_to_application_ms(arrivals: Sequence[Arrival], onsets: Sequence[int]) -> list[float]:
    """From each sound's first loud sample at the microphone until the piece with it was handed on.

    A sound that never came (all its packets were lost, or the browser took it for noise) is left out; callers say how
    many of how many there are.
    """
    begins, silent_since = list[int](), 0
    for arrival in arrivals:
        if arrival.loud < 0:
            silent_since = silent_since or arrival.at
            continue
        if silent_since and arrival.at - silent_since >= QUIET_NS:
            begins.append(arrival.at)
        silent_since = 0
    found = []
    for onset in onsets:
        came = next((at for at in begins if onset <= at <= onset + FOUND_NS), None)
        if came is not None:
            found.append(round((came - onset) / NANOS_PER_MS, 1))
    return found


def spread(values: Sequence[float]) -> dict[str, float | None]:
    shares = {f"p{round(100 * share)}": percentile(list(values), share) for share in (0.5, 0.95, 0.99)}
    return shares | {"worst": max(values, default=None)}
