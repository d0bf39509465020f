"""End of turn: when silence is an end, when a judge is asked, and when to wait.

1. Pure: it is given how long the silence is and what the judge has said during it, and looks up.
2. Each row of the table is one moment of silence: from `silence` on the judge is asked, and an answer of at least
   `threshold` ends the turn. Later rows ask for less certainty, since silence itself is evidence.
3. After `silence_max` the turn ends whatever the judge says, or if it says nothing (a fallback, never an error).
4. Silence is media time since the last voiced block (`VoiceGate.silence`); resumed speech starts a new silence, whose
   answers start empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from duplexd.units import Ticks, ticks_from_ms


class EndpointRow(msgspec.Struct, frozen=True, array_like=True):
    silence: Ticks  #: the judge is asked once the silence is this long
    threshold: float  #: an answer at or above it ends the turn


class Judged(msgspec.Struct, frozen=True, array_like=True):
    """One answer of the judge within this silence."""

    silence: Ticks  #: how much silence the audio it was asked about ended with
    probability: float  #: that the turn has ended


class Ask(msgspec.Struct, frozen=True):
    """Ask the judge about the audio up to now; while its answer is pending only `silence_max` can end the turn."""


class End(msgspec.Struct, frozen=True):
    """The turn ended at the last voiced block."""

    judged: bool  #: the judge said so; False: the silence alone was long enough


class Wait(msgspec.Struct, frozen=True):
    until: Ticks  #: silence at which to decide again; an answer of the judge comes before


Verdict = Ask | End | Wait


class EndpointRule:
    """Table-driven rule for the end of a person's turn.

    Raises: ValueError unless rows have growing silences below `silence_max`, and thresholds in 0..1 that do not grow.
    """

    def __init__(self, rows: Sequence[EndpointRow], *, silence_max: Ticks) -> None:
        silences = [row.silence for row in rows] + [silence_max]
        thresholds = [row.threshold for row in rows]
        if silences != sorted(set(silences)) or silences[0] <= 0:
            raise ValueError(f"silences of an endpoint rule must grow up to silence_max, got {silences}")
        if thresholds != sorted(thresholds, reverse=True) or not all(0 <= one <= 1 for one in thresholds):
            raise ValueError(f"thresholds of an endpoint rule lie in 0..1 and do not grow, got {thresholds}")
        self.rows = tuple(rows)
        self.silence_max = silence_max

    def decide(self, silence: Ticks, judged: Sequence[Judged]) -> Verdict:
        """What to do after `silence`, given the answers that came during it, oldest first."""
        if any(one.probability >= self._threshold(one.silence) for one in judged):
            return End(judged=True)
        if silence >= self.silence_max:
            return End(judged=False)
        row, asked = self._row(silence), self._row(judged[-1].silence) if judged else -1
        if row > asked:
            return Ask()
        return Wait(until=self.rows[row + 1].silence if row + 1 < len(self.rows) else self.silence_max)

    def _row(self, silence: Ticks) -> int:
        """Index of the last row that this silence has reached, -1 before the first."""
        return sum(row.silence <= silence for row in self.rows) - 1

    def _threshold(self, silence: Ticks) -> float:
        row = self._row(silence)
        return self.rows[row].threshold if row >= 0 else 2.0  # asked earlier than any row allows: no answer suffices


def default_rule() -> EndpointRule:
    """The rule that scripts/evaluate_endpoint recommends; its figures stand in docs/endpoint.md."""
    rows = (EndpointRow(ticks_from_ms(160), 0.9), EndpointRow(ticks_from_ms(320), 0.7))
    return EndpointRule(rows, silence_max=ticks_from_ms(700))
