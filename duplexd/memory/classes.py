"""Cache classes: what a slot holds, how long it lives, how it leaves, how it gets its positions (DESIGN §2, seed 000).

class      lifetime   evictions                   positions
ANCHOR     session    pinned                      first: never move
RECENT     window     sliding, compress, offload  given at read
CURRENT    epoch      with epoch                  given at read
INGEST     window     sliding, compress, offload  given at read
LONG_TERM  session    compress, offload           given at read

`compress` is the model's own rule: what slides out of a window is folded into a LONG_TERM slot of fixed size first, and
freed afterwards (`histories.py`); what slides out of a context, into LONG_TERM tokens behind its anchors (`pages.py`).
Whoever may still be interrupted back to it has not slid out, so nothing is unfolded.

`offload` is for pages alone. A ring does not grow, and it is read for every chunk: what has one (a face that is looked
at, ears that listen, a model that steps through silence) is not idle when its person says nothing. A context leaves
only when none of its tokens is of a class that must not. While it is away all of it counts as LONG_TERM.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class CacheClass(Enum):
    ANCHOR = "anchor"  #: identity, pinned example turns, sinks
    RECENT = "recent"  #: heard output inside the window
    CURRENT = "current"  #: output nobody has heard yet; dies with its epoch
    INGEST = "ingest"  #: what the person said and showed, prefilled as it came
    LONG_TERM = "long_term"  #: offloaded or compressed by the model's own rule


class Lifetime(Enum):
    """What ends a slot of a class."""

    SESSION = "session"  #: the close of its session
    WINDOW = "window"  #: newer slots of the same window
    EPOCH = "epoch"  #: an interruption, unless it is heard before


class Eviction(Enum):
    """How a slot makes room."""

    PINNED = "pinned"  #: it does not
    SLIDING = "sliding"  #: the oldest leave first
    WITH_EPOCH = "with_epoch"  #: all at once, behind the fences of what may still write them
    OFFLOAD = "offload"  #: its bytes go to host memory
    COMPRESS = "compress"  #: the model folds it into LONG_TERM bytes, and the older of these into the same


class PositionPolicy(Enum):
    """Where tokens stand. Keys of every class are stored before RoPE, so a policy costs no copy."""

    FIRST = "first"  #: 0..a-1 of every window, whatever the session's age
    AT_READ = "at_read"  #: behind the anchors, given anew for every window


class ClassRule(msgspec.Struct, frozen=True, kw_only=True):
    """How one class is treated; the ledger looks up, it does not decide."""

    lifetime: Lifetime
    evictions: tuple[Eviction, ...]  #: any of these, as its partition and its model allow
    positions: PositionPolicy

    @property
    def outlives_epoch(self) -> bool:
        return self.lifetime is not Lifetime.EPOCH


def _rule(lifetime: Lifetime, *evictions: Eviction, positions: PositionPolicy = PositionPolicy.AT_READ) -> ClassRule:
    return ClassRule(lifetime=lifetime, evictions=evictions, positions=positions)


RULES: dict[CacheClass, ClassRule] = {
    CacheClass.ANCHOR: _rule(Lifetime.SESSION, Eviction.PINNED, positions=PositionPolicy.FIRST),
    CacheClass.RECENT: _rule(Lifetime.WINDOW, Eviction.SLIDING, Eviction.COMPRESS, Eviction.OFFLOAD),
    CacheClass.CURRENT: _rule(Lifetime.EPOCH, Eviction.WITH_EPOCH),
    CacheClass.INGEST: _rule(Lifetime.WINDOW, Eviction.SLIDING, Eviction.COMPRESS, Eviction.OFFLOAD),
    CacheClass.LONG_TERM: _rule(Lifetime.SESSION, Eviction.COMPRESS, Eviction.OFFLOAD),
}
