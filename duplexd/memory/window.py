"""Windows: which slots are read, in which order, and where their tokens stand (DESIGN §5 rules 3 and 6).

1. The class says who survives an epoch; who is *read* is said here: anchors, then what was compressed, then the newest
   W chunks that are heard or belong to the live epoch. A slot that died with its epoch is never read.
2. Keys are stored before RoPE. A token's position is its index in the window, 0..n-1, whatever the session's age.

       anchor   long-term  recent    recent    current
      |a a a a |l l       |r r r r  |r r r r  |c c
       0 1 2 3  4 5        6 7 8 9   10 ...    14 15
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from duplexd.errors import LedgerError
from duplexd.ids import Epoch
from duplexd.memory.classes import RULES, CacheClass, PositionPolicy
from duplexd.memory.ledger import Held, Lease


class Window(msgspec.Struct, frozen=True):
    """Slots in reading order. The tokens of slot i stand at positions starts[i] .. starts[i] + tokens[i] - 1."""

    leases: tuple[Lease, ...]
    tokens: tuple[int, ...]  #: tokens written in each slot
    starts: tuple[int, ...]
    length: int  #: tokens of the whole window


def select_window(held: Sequence[Held], *, epoch: Epoch, recent_max: int) -> list[Held]:
    """The slots one window reads, oldest first: anchors, long-term, then the newest `recent_max` readable others.

    Args:    held: of one session and stage, oldest first (`SlotLedger.held`).
             epoch: the live epoch; CURRENT slots of another one are left out.
    """
    readable = sorted((slot for slot in held if RULES[slot.label].outlives_epoch or slot.epoch == epoch), key=_rank)
    first = sum(_rank(slot) < _OTHERS for slot in readable)
    return readable[:first] + readable[max(first, len(readable) - recent_max) :]


def place_window(held: Sequence[Held], tokens: Sequence[int]) -> Window:
    """Give every slot its first position.

    Args:    held: in reading order; tokens: how many each one has written.
    Raises:  LedgerError when the lists differ in length or an anchor or a long-term slot comes behind a later class.
    """
    if len(held) != len(tokens):
        raise LedgerError(f"a window of {len(held)} slots was given {len(tokens)} token counts")
    ranks = [_rank(slot) for slot in held]
    if ranks != sorted(ranks):
        raise LedgerError(
            "a window has an anchor or a long-term slot behind a later class; anchors would move with the session"
        )
    ends = list(accumulate(tokens))
    starts = tuple(end - count for end, count in zip(ends, tokens, strict=True))
    return Window(tuple(slot.lease for slot in held), tuple(tokens), starts, ends[-1] if ends else 0)


_OTHERS = 2


def _rank(slot: Held) -> int:
    if RULES[slot.label].positions is PositionPolicy.FIRST:
        return 0
    return 1 if slot.label is CacheClass.LONG_TERM else _OTHERS


def positions(length: int) -> bytes:
    """Positions of a window of `length` tokens, int32 in the machine's (little-endian) order: 0..length-1."""
    return array("i", range(length)).tobytes()
