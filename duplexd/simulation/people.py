"""People and their turns: drawn before anything runs, so that every policy meets the same load.

1. A visit (one session) is drawn from its own generator, named by seed and place in the arrivals, never by what the
   engine did. Lengths of words, speech and replies, pauses and the moment of an interruption are fixed with it.
2. Whether a turn is interrupted is one draw against `p`, and the moment is drawn either way: a sweep over `p` changes
   who interrupts and nothing else.
"""

from __future__ import annotations

from math import exp, log
from random import Random

import msgspec

from duplexd.units import NANOS_PER_MS, Nanos

Z90 = 1.2815515594457831  #: of the standard normal


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lognormal by its median and 90th percentile, cut off at `least` and `most`."""

    median: float
    p90: float
    least: float
    most: float

    def draw(self, rng: Random) -> float:
        sigma = log(self.p90 / self.median) / Z90
        return min(self.most, max(self.least, self.median * exp(sigma * rng.gauss(0.0, 1.0))))

    def faults(self) -> str:
        """Why these figures are no spread, '' if they are."""
        if 0 < self.least <= self.median <= self.p90 and self.median <= self.most:
            return ""
        return "0 < least <= median <= p90 and median <= most must hold"


class Talk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How people talk."""

    input: str  #: "voice" or "text"
    reply_s: Spread  #: playback length of a reply
    words_in: Spread  #: of one turn of the person
    gap_ms: Spread  #: between the end of a reply at the ear and the next turn
    turns_mean: float = 1.0  #: of one visit, geometric
    words_per_second: float = 2.5  #: of a voice
    false_ends: float = (
        0.0  #: share of the words before the last that sound like the last: who guesses then guesses wrong
    )
    past_words: int = 0  #: of earlier days: what a visit's memory holds before its first turn


class Turn(msgspec.Struct, frozen=True):
    gap: Nanos
    words_in: int
    reply_words: int
    barges_at: float | None  #: share of the reply's audio that is heard before the person interrupts
    slip: bool = False  #: the listener vanishes during this turn's reply
    false_ends: tuple[int, ...] = ()  #: words that sound like the last one, and are not
    not_before: Nanos = Nanos(0)  #: since the visit began; of a turn that a trace tells the time of


class Visit(msgspec.Struct, frozen=True):
    """One session from connect to close."""

    name: str
    turns: tuple[Turn, ...]
    silent: bool = False  #: the page never reports what it hears
    barge_in: bool = True
    past_words: int = 0


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seeded misfortune, as probabilities."""

    stage_failure: float = 0.0  #: of a launch of think, talk or render
    vanish: float = 0.0  #: of a turn: the listener is gone in the middle of the reply
    silent_page: float = 0.0  #: of a visit


def draw_visit(
    name: str, *, seed: int, talk: Talk, p: float, faults: Faults, word_ms: int, words_max: int, turns: int = 0
) -> Visit:
    """Args:    turns: how many, 0: drawn."""
    rng = Random(f"{seed}/{name}")
    count = turns or _geometric(rng, talk.turns_mean)
    drawn = tuple(
        draw_turn(rng, talk=talk, p=p, faults=faults, word_ms=word_ms, words_max=words_max) for _ in range(count)
    )
    return Visit(name, drawn, silent=rng.random() < faults.silent_page, past_words=talk.past_words)


def draw_turn(rng: Random, *, talk: Talk, p: float, faults: Faults, word_ms: int, words_max: int) -> Turn:
    gap = Nanos(round(talk.gap_ms.draw(rng) * NANOS_PER_MS))
    words_in = max(1, round(talk.words_in.draw(rng)))
    reply_words = min(words_max, max(1, round(talk.reply_s.draw(rng) * 1000 / word_ms)))
    chance, moment, slip = rng.random(), rng.random(), rng.random()
    false_ends: tuple[int, ...] = ()
    if talk.false_ends:
        false_ends = tuple(index for index in range(words_in - 1) if rng.random() < talk.false_ends)
    return Turn(gap, words_in, reply_words, moment if chance < p else None, slip < faults.vanish, false_ends)


def _geometric(rng: Random, mean: float) -> int:
    count = 1
    while count < 200 and rng.random() >= 1.0 / mean:
        count += 1
    return count
