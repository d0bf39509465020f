"""Cache classes: what a slot holds, how long it lives, how it gets its positions (DESIGN §2, seed 000).

class      lives until                       eviction   positions
ANCHOR     close of the session              pinned     first, never move
RECENT     slides out of the window          sliding    given at read
CURRENT    its epoch ends, or it is heard    with epoch given at read
INGEST     slides out; survives an epoch     sliding    given at read
LONG_TERM  offloaded or compressed           offload    given at read
"""

from __future__ import annotations

from enum import Enum


class CacheClass(Enum):
    ANCHOR = "anchor"  #: identity, pinned example turns, sinks
    RECENT = "recent"  #: heard output inside the window
    CURRENT = "current"  #: output nobody has heard yet; dies with its epoch
    INGEST = "ingest"  #: what the person said and showed, prefilled as it came
    LONG_TERM = "long_term"  #: offloaded or compressed by the model's own rule


class Eviction(Enum):
    PINNED = "pinned"
    SLIDING = "sliding"
    WITH_EPOCH = "with_epoch"
    OFFLOAD = "offload"


class ClassRule:
    """How one class is treated; the ledger looks up, it does not decide."""

    __slots__ = ("eviction", "outlives_epoch")

    def __init__(self, *, eviction: Eviction, outlives_epoch: bool) -> None:
        self.eviction = eviction
        self.outlives_epoch = outlives_epoch


RULES: dict[CacheClass, ClassRule] = {
    CacheClass.ANCHOR: ClassRule(eviction=Eviction.PINNED, outlives_epoch=True),
    CacheClass.RECENT: ClassRule(eviction=Eviction.SLIDING, outlives_epoch=True),
    CacheClass.CURRENT: ClassRule(eviction=Eviction.WITH_EPOCH, outlives_epoch=False),
    CacheClass.INGEST: ClassRule(eviction=Eviction.SLIDING, outlives_epoch=True),
    CacheClass.LONG_TERM: ClassRule(eviction=Eviction.OFFLOAD, outlives_epoch=True),
}
