"""Whether a session that says that it speaks is heard, so that what it shows is what is so.

1. Silence counts from the last content the ear has reached, from the moment the session said that it speaks, or from
   the end of a silence with a reason, whichever is the latest. A pause the voice itself makes is content.
2. Silences with a reason are the caller's to name: a hold, a page whose sound is blocked, a client that reads nothing.
3. After `SILENT_MAX` of any other the session shows that it thinks, which is counted; with the next content at the ear
   it speaks again.
"""

from __future__ import annotations

from duplexd.messages import TurnState
from duplexd.units import NANOS_PER_MS, Nanos

SILENT_MAX = Nanos(2000 * NANOS_PER_MS)


class SpeakingWatch:
    """What one session shows of itself, by what the engine says and what the ear has."""

    def __init__(self, *, silent_max: Nanos = SILENT_MAX) -> None:
        self.shown = TurnState.LISTENING
        self.lapses = 0  #: times it said that it spoke, and nothing was heard for `silent_max`
        self._silent_max = silent_max
        self._since: Nanos | None = None  #: no silence before this counts; None: it does not say that it speaks

    def enter(self, state: TurnState, now: Nanos) -> None:
        """The engine says so."""
        self.shown = state
        self._since = now if state is TurnState.SPEAKING else None

    def look(self, silent: Nanos, now: Nanos, *, has_reason: bool) -> bool:
        """Whether what is shown has changed. Args: silent: how long the ear has had nothing; 0 while content plays."""
        if self._since is None:
            return False
        if has_reason:
            self._since = now
            return False
        if self.shown is TurnState.SPEAKING and min(silent, now - self._since) >= self._silent_max:
            self.shown = TurnState.THINKING
            self.lapses += 1
            return True
        if self.shown is TurnState.THINKING and silent == 0:
            self.shown, self._since = TurnState.SPEAKING, now
            return True
        return False
