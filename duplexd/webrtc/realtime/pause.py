"""A session in which nothing happens rests, and a voice wakes it.

    ACTIVE --nothing has happened for `after`--> PAUSED --a voice, or something to say--> ACTIVE

1. While it rests the engine hears nothing of the person, and no picture is made; the connection stays.
2. The newest second of sound is kept and goes first when it wakes: a word that wakes is heard from its beginning.
3. Facts that are no sound pass at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from duplexd.media.line import Block
from duplexd.messages import VoiceStarted
from duplexd.units import NANOS_PER_SECOND, Nanos, Ticks

KEPT_BLOCKS = 32  #: of 32 ms; the oldest leave


class Pause:
    """Args:    after_s: idle time; threshold: probability of voice that wakes, 0..1."""

    def __init__(self, *, after_s: int, threshold: float) -> None:
        self.paused = False
        self.paused_for = Nanos(0)  #: all pauses that have ended
        self._after = after_s * NANOS_PER_SECOND
        self._threshold = threshold
        self._idle_since: Nanos | None = None
        self._paused_at = Nanos(0)
        self._kept: deque[Block] = deque(maxlen=KEPT_BLOCKS)
        self._started: VoiceStarted | None = None  #: of the voice that has not been loud enough yet
        self._before = 0  #: how many of the kept blocks came before it

    def tick(self, now: Nanos, *, busy: bool) -> bool:
        """True when it begins to rest now."""
        if self.paused or busy or self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since >= self._after:
            self.paused, self._paused_at = True, now
            return True
        return False

    def screen(self, facts: Iterable[Any], now: Nanos) -> list[Any]:
        """What of these facts, and of what was kept, goes to the engine now. It may wake by them (`paused`)."""
        passed: list[Any] = []
        for fact in facts:
            if not self.paused:
                passed.append(fact)
            elif isinstance(fact, VoiceStarted):
                self._started, self._before = fact, len(self._kept)
            elif isinstance(fact, Block):
                self._keep(fact)
                if self._started is not None and fact.voice >= self._threshold:
                    passed += self.wake(now)
            else:
                passed.append(fact)
        return passed

    def _keep(self, block: Block) -> None:
        if len(self._kept) == KEPT_BLOCKS:
            self._before = max(0, self._before - 1)
        self._kept.append(block)

    def wake(self, now: Nanos) -> list[Any]:
        """It goes on; returns the facts that were kept, in order."""
        if not self.paused:
            return []
        self.paused, self._idle_since = False, now
        self.paused_for = Nanos(self.paused_for + now - self._paused_at)
        kept: list[Any] = list(self._kept)
        if self._started is not None:
            # A voice that was too faint for long has its beginning where there is still sound of it.
            at = Ticks(max(self._started.at, kept[0].span.start if kept else 0))
            kept.insert(self._before, msgspec.structs.replace(self._started, at=at))
        self._kept.clear()
        self._started, self._before = None, 0
        return kept

    def paused_s(self, now: Nanos) -> float:
        open_for = now - self._paused_at if self.paused else 0
        return (self.paused_for + open_for) / NANOS_PER_SECOND
