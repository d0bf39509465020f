"""What happened to one turn, kept by the world for the report. Nothing here decides anything."""

from __future__ import annotations

from enum import Enum

import msgspec

from duplexd.simulation.ear import Gap
from duplexd.units import Nanos, Ticks


class Outcome(Enum):
    OPEN = "open"  #: the world ended before it did
    HEARD = "heard"  #: to its end
    INTERRUPTED = "interrupted"
    FAILED = "failed"  #: by a stage, a deadline, a shortage
    VANISHED = "vanished"  #: the listener went
    UNANSWERED = "unanswered"  #: no reply within the person's patience


class Guess(msgspec.Struct):
    """What was made for a turn that was only probably over."""

    turn: TurnRecord | None = None  #: whose reply it became; None: nobody's
    thought_words: int = 0
    talked: Ticks = Ticks(0)
    rendered: Ticks = Ticks(0)

    def confirm(self, turn: TurnRecord) -> None:
        """It was the reply; what comes back from now on is counted there at once."""
        self.turn = turn
        turn.thought_words += self.thought_words
        turn.talked = Ticks(turn.talked + self.talked)
        turn.rendered = Ticks(turn.rendered + self.rendered)


class TurnRecord(msgspec.Struct):
    """Times are of the world; 0 means never."""

    visit: str
    index: int
    reply: Ticks  #: what the person would hear if nobody interrupted
    reply_words: int
    ended_at: Nanos = Nanos(0)  #: end of the person's turn, at their mouth
    decided_at: Nanos = Nanos(0)  #: the engine took the turn
    prefilled_at: Nanos = Nanos(0)  #: first tokens of the reply were there
    published_at: Nanos = Nanos(0)  #: first chunk
    heard_at: Nanos = Nanos(0)  #: first sample at the ear
    over_at: Nanos = Nanos(0)  #: last sample at the ear
    made_at: Nanos = Nanos(0)  #: last chunk published
    published: list[tuple[Nanos, Ticks]] = []  #: every chunk: when, how long
    gaps: list[Gap] = []
    heard: Ticks = Ticks(0)
    thought_words: int = 0
    talked: Ticks = Ticks(0)
    rendered: Ticks = Ticks(0)
    outcome: Outcome = Outcome.OPEN
    reason: str = ""
    away: bool = False  #: when it began, some of the session's memory was not in the arena
