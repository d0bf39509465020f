"""End of turn: when silence is an end, when to ask, and when to wait.

1. Pure: it is given how long the silence is and what was answered during it, and looks up.
2. Two witnesses are asked about the audio up to now: the turn judge (does it sound finished?) and the ears (do the
   words end?). Neither is good alone: a judge of sounds takes "After dinner" for a turn, words end before people do.
3. Each row of the table is one moment of silence at which they are asked; an answer ends the turn when the judge's
   probability reaches the row's threshold for the way the words end.
4. After `silence_max`, again by the way the words end, the turn ends whatever the judge says, or if nobody answers.
5. Silence is media time since the last voiced block (`VoiceGate.silence`). Resumed speech starts a new silence, and the
   answers about the old one are void.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec

from duplexd.units import Ticks, ticks_from_ms


class Ending(Enum):
    """How the words end, as the ears write them."""

    ASKED = "asked"  #: a question mark
    CLOSED = "closed"  #: a full stop after a word that can stand last
    OPEN = "open"  #: a comma, or a word that wants another one
    UNKNOWN = "unknown"  #: no words yet


_OPEN = """
    a an the my your his her its our their these those some every and or but so because if when while although though
    since unless until than which who whose whom very really just i he she we they um uh er hmm well
"""
_LOOSE = """
    that this any what where why how about for from with without of to in on at by into onto over under between through
    during before after like is am are was were be been being has have had do does did can could will would shall should
    may might must not
"""
#: English words after which a sentence goes on, however its tune falls.
OPEN_WORDS = frozenset(_OPEN.split())
#: Words that can stand last in a question ("What is snow made of?") and seldom elsewhere.
LOOSE_WORDS = frozenset(_LOOSE.split())


#: A statement that opens with one of these, and has no comma yet, has not come to its main clause.
SUBORDINATES = frozenset(
    ("because", "if", "when", "while", "although", "though", "since", "unless", "until", "after", "before", "whenever")
)
#: Endings that announce what follows.
EXPECTING = frozenset(
    (("tell", "me"), ("you", "know"), ("wonder", "if"), ("let", "me"), ("want", "to"), ("going", "to"))
)


def ending_of(text: str) -> Ending:
    """How these words end. A question that stops at a loose word counts as no better than a full stop."""
    shown = text.rstrip(" \"'”’)")
    words = shown.split()
    if not shown or not words:
        return Ending.UNKNOWN
    bare = [word.strip(".,?!;:…-—\"'“”").lower() for word in words]
    last = bare[-1]
    if (bare[0] in SUBORDINATES and "," not in shown) or tuple(bare[-2:]) in EXPECTING:
        return Ending.OPEN
    if shown[-1] in ",;:-—…" or shown.endswith("...") or (last in OPEN_WORDS and len(words) > 1):
        return Ending.OPEN
    if last in LOOSE_WORDS and len(words) > 1:
        return Ending.CLOSED if shown[-1] == "?" else Ending.OPEN
    return Ending.ASKED if shown[-1] == "?" else Ending.CLOSED


class Scale(msgspec.Struct, frozen=True):
    """One number for each way words end."""

    asked: float
    closed: float
    unknown: float
    open: float

    def of(self, ending: Ending) -> float:
        return float(getattr(self, ending.value))

    @property
    def values(self) -> tuple[float, float, float, float]:
        return (self.asked, self.closed, self.unknown, self.open)


class EndpointRow(msgspec.Struct, frozen=True):
    silence: Ticks  #: the witnesses are asked once the silence is this long
    threshold: Scale  #: a probability at or above it ends the turn; above 1: none does


class Judged(msgspec.Struct, frozen=True):
    """What the witnesses said about one moment of this silence."""

    silence: Ticks  #: how much silence the audio ended with
    probability: float  #: the judge's, that the turn has ended
    ending: Ending = Ending.UNKNOWN  #: of the words of the same audio


class Ask(msgspec.Struct, frozen=True):
    """Ask about the audio up to now; while an answer is pending only `silence_max` can end the turn."""


class End(msgspec.Struct, frozen=True):
    """The turn ended at the last voiced block."""

    judged: bool  #: the witnesses said so; False: the silence alone was long enough


class Wait(msgspec.Struct, frozen=True):
    until: Ticks  #: silence at which to decide again; an answer may come before


Verdict = Ask | End | Wait


class EndpointRule:
    """Table-driven rule for the end of a person's turn.

    Args:   silence_max: milliseconds of silence for each way the words end.
    Raises: ValueError unless the rows' silences grow and stay below every `silence_max`.
    """

    def __init__(self, rows: Sequence[EndpointRow], *, silence_max: Scale) -> None:
        silences = [row.silence for row in rows]
        if silences != sorted(set(silences)) or (silences and silences[0] <= 0):
            raise ValueError(f"silences of an endpoint rule are positive and grow, got {silences}")
        if min(silence_max.values) <= 0 or (silences and silences[-1] >= ticks_from_ms(min(silence_max.values))):
            raise ValueError(f"silence_max must be positive and behind the last row, got {silence_max}")
        if any(threshold < 0 for row in rows for threshold in row.threshold.values):
            raise ValueError("thresholds of an endpoint rule are not negative")
        self.rows = tuple(rows)
        self.silence_max = silence_max

    def decide(self, silence: Ticks, judged: Sequence[Judged], *, pending: bool = False) -> Verdict:
        """What to do after `silence`, given the answers that came during it, oldest first."""
        if any(self._ends(one) for one in judged):
            return End(judged=True)
        limit = ticks_from_ms(self.silence_max.of(judged[-1].ending if judged else Ending.UNKNOWN))
        if silence >= limit:
            return End(judged=False)
        row = self._row(silence)
        asked = self._row(judged[-1].silence) if judged else -1
        if row > asked and not pending:
            return Ask()
        later = [one.silence for one in self.rows if one.silence > silence]
        return Wait(until=limit if pending or not later else later[0])

    def _ends(self, one: Judged) -> bool:
        row = self._row(one.silence)
        return row >= 0 and one.probability >= self.rows[row].threshold.of(one.ending)

    def _row(self, silence: Ticks) -> int:
        """Index of the last row that this silence has reached, -1 before the first."""
        return sum(row.silence <= silence for row in self.rows) - 1


def silence_rule(silence_ms: float) -> EndpointRule:
    """Silence alone ends a turn, however its words end."""
    return EndpointRule((), silence_max=Scale(silence_ms, silence_ms, silence_ms, silence_ms))


def patient_rule(rule: EndpointRule, patience_ms: float) -> EndpointRule:
    """The witnesses of a rule, and more patience with whom they do not call finished."""
    most = Scale(*(max(limit, patience_ms) for limit in rule.silence_max.values))
    return EndpointRule(rule.rows, silence_max=most)


def default_rule() -> EndpointRule:
    """What scripts/evaluate_endpoint recommends; its figures stand in docs/endpoint.md."""
    rows = (
        EndpointRow(ticks_from_ms(60), Scale(asked=0.2, closed=0.7, unknown=0.95, open=1.1)),
        EndpointRow(ticks_from_ms(400), Scale(asked=0.05, closed=0.7, unknown=0.95, open=1.1)),
    )
    return EndpointRule(rows, silence_max=Scale(asked=500, closed=700, unknown=700, open=800))
