"""What Prometheus is told: single values by name, and histograms of what the front end measures.

1. Names end in their unit (`_ms`, `_bytes`); what never falls ends in `_total`.
2. Histograms count from the daemon's start over all sessions, those that have ended too. Their buckets are fixed, so
   they take the same room for ever.
3. Two processes, one clock: a part that begins in the engine and ends here is a difference of two readings of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from duplexd.media.line import Line
from duplexd.messages import AdvanceEpoch, Progress
from duplexd.units import NANOS_PER_MS, Nanos, ms_from_nanos, ms_from_ticks

LATENCY_MS = (50.0, 100.0, 150.0, 200.0, 300.0, 400.0, 500.0, 700.0, 1000.0, 1500.0, 2000.0, 3000.0, 5000.0, 10_000.0)
BARGE_IN_MS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 150.0, 200.0, 300.0, 400.0, 500.0, 700.0, 1000.0, 2000.0)
LEAD_MS = (0.0, 50.0, 100.0, 200.0, 300.0, 400.0, 600.0, 800.0, 1000.0, 1500.0, 2000.0, 3000.0, 5000.0)
LAG_MS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


class Histogram:
    """How many observations were no larger than each bound, and their sum.

    Args:    bounds: upper ends of the buckets, rising; one without an end follows.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def samples(self, name: str, labels: str = "") -> Iterable[str]:
        """Lines of the exposition. Args: labels: as they stand within the braces, without `le`."""
        total, more = 0, f"{labels}," if labels else ""
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{more}le="{"+Inf" if bound == float("inf") else f"{bound:.15g}"}"}} {total}\n'
        braced = f"{{{labels}}}" if labels else ""
        yield f"{name}_sum{braced} {self.sum:.15g}\n"
        yield f"{name}_count{braced} {total}\n"


class Family(msgspec.Struct, frozen=True):
    """Histograms under one name: one without labels, or one for each."""

    name: str
    help: str
    members: Mapping[str, Histogram]  #: by labels

    def text(self) -> str:
        lines = [f"# HELP duplexd_{self.name} {self.help}\n# TYPE duplexd_{self.name} histogram\n"]
        for labels, histogram in self.members.items():
            lines += histogram.samples(f"duplexd_{self.name}", labels)
        return "".join(lines)


class Figures:
    """All histograms of one daemon."""

    def __init__(self) -> None:
        self.first_audio_ms = Histogram(LATENCY_MS)
        self.lead_ms = Histogram(LEAD_MS)
        self.loop_lag_ms = Histogram(LAG_MS)
        self.barge_in_ms = {part: Histogram(BARGE_IN_MS) for part in ("decide", "flush", "stop")}

    def note_progress(self, news: Progress) -> None:
        """Ten times a second while a reply lives: how far what is made is ahead of the ear."""
        self.lead_ms.observe(ms_from_ticks(max(0, news.generation - news.playback)))

    def note_advance(self, news: AdvanceEpoch, now: Nanos) -> None:
        """An interruption has been decided on, and has arrived here."""
        if news.noticed_at:
            self.barge_in_ms["decide"].observe(max(0, news.decided_at - news.noticed_at) / NANOS_PER_MS)
        self.barge_in_ms["flush"].observe(max(0, now - news.decided_at) / NANOS_PER_MS)

    def note_line(self, line: Line) -> None:
        """What one person's line has measured since it was last asked."""
        for took in line.first_sounds:
            self.first_audio_ms.observe(ms_from_nanos(max(0, took)))
        for took in line.stops:
            self.barge_in_ms["stop"].observe(ms_from_nanos(max(0, took)))
        line.first_sounds.clear()
        line.stops.clear()

    def text(self) -> str:
        parts = {f'part="{part}"': histogram for part, histogram in self.barge_in_ms.items()}
        families = (
            Family(
                "frontend_first_audio_ms",
                "From the end of a person's turn to the first sound of the reply in the track.",
                {"": self.first_audio_ms},
            ),
            Family(
                "frontend_barge_in_ms",
                "Of an interruption: decide, from the voice noticed to the decision; flush, from the decision until "
                "nothing older leaves here; stop, from the order to a page until it has muted itself.",
                parts,
            ),
            Family(
                "engine_lead_ms",
                "How far generation is ahead of playback, ten times a second while a reply lives.",
                {"": self.lead_ms},
            ),
            Family(
                "frontend_loop_lag_ms",
                "How late the front end's loop ticks, 50 times a second.",
                {"": self.loop_lag_ms},
            ),
        )
        return "".join(family.text() for family in families)


def prometheus(values: Mapping[str, float]) -> str:
    """Text exposition format 0.0.4. What is no gauge says so in its name; a name may carry labels."""
    lines, told = [], ""
    for name, value in sorted(values.items(), key=lambda item: (item[0].partition("{")[0], item[0])):
        base = name.partition("{")[0]
        if base != told:
            lines.append(f"# TYPE duplexd_{base} {'counter' if base.endswith('_total') else 'gauge'}\n")
            told = base
        # Whole numbers of bytes stay whole: six digits, as `g` has by itself, would round them.
        lines.append(f"duplexd_{name} {value:.15g}\n")
    return "".join(lines)
