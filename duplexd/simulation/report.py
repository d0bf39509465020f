"""From what happened to figures: a flat JSON, the same for the same seed on any machine.

Every figure says what it counts:

1. `ttfp_ms` at the ear: end of the person's turn at their mouth -> first sample heard. `ttfp_server_ms`: the engine
   took the turn -> first chunk published, which is what LiveServe calls time to first audio packet.
2. `continuity`: share of replies with sound in which no gap is longer than 100 ms. Denominator: replies with sound.
3. `waste`: audio rendered and never heard, of all rendered; per stage the same for words thought and codec frames
   talked, each as audio. Only replies that have ended count. `guesses`: what was made for turns that were only
   probably over. A guess that was right is part of its reply; `dropped_s` is what the others cost, in audio, and stands
   nowhere else.
4. `useful_rps`: replies that were continuous and ended by being heard out or by the person's interruption, a second.
5. `rtf`: from the turn taken to the last chunk made, over the length of the reply, of replies heard to their end;
   `pacing`: the same time over the time of playback (LiveServe's baseline 8.2/65.9, LiveServe 55.3/65.9).
6. `ttft_ms`: turn taken -> first tokens of the reply. `ttfas_ms`: turn taken -> first sound published. `jct_ms`: turn
   taken -> last chunk made. `jitter_ms`: spread (standard deviation) of the times between chunks of one reply, less the
   length of the chunk before, so that a steady engine has none.
7. `ttft_away_ms`: the same as `ttft_ms`, of turns that found some of the session's memory in host memory when they
   began. A figure that nothing was counted for is null.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil
from statistics import pstdev
from typing import Any

from duplexd.simulation.records import Outcome, TurnRecord
from duplexd.simulation.world import LoadWorld
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos, Ticks, nanos_from_ticks

GAP_MAX = Nanos(100 * NANOS_PER_MS)


def figures(world: LoadWorld, *, since: Nanos, counters: dict[str, float]) -> dict[str, Any]:
    """Args:    since: turns that ended earlier are not counted. counters: of the core's monitor, added as they are."""
    turns = [turn for turn in world.turns if turn.ended_at >= since]
    sounding = [turn for turn in turns if turn.heard_at]
    whole = [turn for turn in sounding if turn.outcome is Outcome.HEARD]
    span = (world.turns_until - since) / NANOS_PER_SECOND
    outcomes = Counter(turn.outcome.value for turn in turns)
    return {
        "turns": len(turns),
        "outcomes": {outcome.value: outcomes.get(outcome.value, 0) for outcome in Outcome},
        "ttfp_ms": percentiles(_ms(t.heard_at - t.ended_at) for t in sounding),
        "ttfp_server_ms": percentiles(_ms(t.published_at - t.decided_at) for t in turns if t.published_at),
        "ttft_ms": percentiles(_ms(t.prefilled_at - t.decided_at) for t in turns if t.prefilled_at),
        "ttfas_ms": percentiles(_ms(t.published_at - t.decided_at) for t in turns if t.published_at),
        "ttft_away_ms": percentiles(_ms(t.prefilled_at - t.decided_at) for t in turns if t.prefilled_at and t.away),
        "jct_ms": percentiles(_ms(t.made_at - t.decided_at) for t in whole),
        "jitter_ms": percentiles(jitter for t in sounding if (jitter := _jitter(t)) is not None),
        "continuity": _share(sum(is_continuous(t) for t in sounding), len(sounding)) if sounding else None,
        "gaps": sum(gap.length > GAP_MAX for t in sounding for gap in t.gaps),
        "gap_ms_longest": max((_ms(gap.length) for t in sounding for gap in t.gaps), default=0.0),
        "waste": waste(turns)["render"],
        "waste_per_stage": waste(turns),
        "guesses": guessed(world),
        "replies_per_second": round(len(whole) / span, 4),
        "useful_rps": round(sum(is_useful(t) for t in turns) / span, 4),
        "rtf": percentiles((_s(t.made_at - t.decided_at) / _audio(t.reply) for t in whole), digits=4),
        "pacing": _share(sum(t.made_at - t.decided_at for t in whole), sum(t.over_at - t.heard_at for t in whole))
        if whole
        else None,
        "refused_sessions": world.refusals,
        "overheard_turns": world.overheard,
        "device_busy": {name: round(device.busy_ns / world.now(), 4) for name, device in sorted(world.devices.items())},
        "launches": {
            name: {"count": count, "rows": round(rows / count, 3) if count else 0.0}
            for name, (count, rows) in sorted(world.launches.items())
        },
        "events": world.events,
        "simulated_s": round(_s(world.now()), 3),
        "counters": {name: value for name, value in sorted(counters.items()) if value},
    }


def is_continuous(turn: TurnRecord) -> bool:
    return all(gap.length <= GAP_MAX for gap in turn.gaps)


def is_useful(turn: TurnRecord) -> bool:
    """It was heard without a gap, to its end or as far as the person wanted."""
    return bool(turn.heard_at) and turn.outcome in (Outcome.HEARD, Outcome.INTERRUPTED) and is_continuous(turn)


def waste(turns: Iterable[TurnRecord]) -> dict[str, float]:
    """Share of what each stage made that nobody heard, of replies that have ended."""
    made = {"think": 0.0, "talk": 0.0, "render": 0.0}
    heard = 0.0
    for turn in turns:
        if turn.outcome is Outcome.OPEN:
            continue
        heard += turn.heard
        made["think"] += turn.thought_words * turn.reply / max(1, turn.reply_words)
        made["talk"] += turn.talked
        made["render"] += turn.rendered
    return {stage: round(max(0.0, 1 - heard / ticks), 5) if ticks else 0.0 for stage, ticks in made.items()}


def guessed(world: LoadWorld) -> dict[str, Any]:
    """How many replies were begun on suspicion, how many of them were the reply, and what the others cost."""
    dropped = [guess for guess in world.guesses if guess.turn is None]
    word = _audio(world.word)
    return {
        "count": len(world.guesses),
        "confirmed": len(world.guesses) - len(dropped),
        "dropped_s": {
            "think": round(sum(guess.thought_words for guess in dropped) * word, 3),
            "talk": round(sum(_audio(guess.talked) for guess in dropped), 3),
            "render": round(sum(_audio(guess.rendered) for guess in dropped), 3),
        },
    }


def percentiles(values: Iterable[float], *, digits: int = 2) -> dict[str, float | None]:
    """P50, P90, P95 (nearest rank) and how many there were; None when none was."""
    ranked = sorted(values)
    found: dict[str, float | None] = {
        f"p{share}": round(_rank(ranked, share), digits) if ranked else None for share in (50, 90, 95)
    }
    return {**found, "count": len(ranked)}


def _rank(ranked: Sequence[float], share: int) -> float:
    return ranked[max(0, ceil(share / 100 * len(ranked)) - 1)]


def _jitter(turn: TurnRecord) -> float | None:
    """Standard deviation of chunk intervals less the length of the chunk before; None for fewer than three chunks."""
    chunks = turn.published
    if len(chunks) < 3:
        return None
    strayed = [_ms(b[0] - a[0] - nanos_from_ticks(a[1])) for a, b in itertools.pairwise(chunks)]
    return pstdev(strayed)


def _share(part: float, whole: float) -> float:
    return round(part / whole, 5) if whole else 0.0


def _ms(nanos: int) -> float:
    return nanos / NANOS_PER_MS


def _s(nanos: int) -> float:
    return nanos / NANOS_PER_SECOND


def _audio(ticks: Ticks) -> float:
    return _s(nanos_from_ticks(ticks))
