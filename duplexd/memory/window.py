"""Windows: which slots are read, in which order, and where their tokens stand (DESIGN §5 rules 3 and 6).

1. The class says who survives an epoch; who is *read* is said here: anchors, then the newest W chunks that are heard or
   belong to the live epoch. A slot that died with its epoch is never read.
2. Keys are stored before RoPE. A token's position is its index in the window, 0..n-1, whatever the session's age.

       anchor   recent   recent   current
      |a a a a|r r r r |r r r r |c c
       0 1 2 3 4 5 6 7  8 ...    12 13
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from duplexd.errors import LedgerError
from duplexd.ids import Epoch
from duplexd.memory.classes import RULES, CacheClass
from duplexd.memory.ledger import Held, Lease


class Window(msgspec.Struct, frozen=True):
    """Slots in reading order. The tokens of slot i stand at positions starts[i] .. starts[i] + tokens[i] - 1."""

    leases: tuple[Lease, ...]
    tokens: tuple[int, ...]  #: tokens written in each slot
    starts: tuple[int, ...]
    length: int  #: tokens of the whole window


def select_window(held: Sequence[Held], *, epoch: Epoch, recent_max: int) -> list[Held]:
    """The slots one window reads, oldest first: all anchors, then the newest `recent_max` readable others.

    Args:    held: of one session and stage, oldest first (`SlotLedger.held`).
             epoch: the live epoch; CURRENT slots of another one are left out.
    """
    anchors = [slot for slot in held if slot.label is CacheClass.ANCHOR]
    others = [
        slot
        for slot in held
        if slot.label is not CacheClass.ANCHOR and (RULES[slot.label].outlives_epoch or slot.epoch == epoch)
    ]
    return anchors + others[max(0, len(others) - recent_max) :]


def place_window(held: Sequence[Held], tokens: Sequence[int]) -> Window:
    """Give every slot its first position.

    Args:    held: in reading order; tokens: how many each one has written.
    Raises:  LedgerError when the lists differ in length or an anchor comes after another class: anchors stand first.
    """
    if len(held) != len(tokens):
        raise LedgerError(f"a window of {len(held)} slots was given {len(tokens)} token counts")
    anchored = [slot.label is CacheClass.ANCHOR for slot in held]
    if anchored != sorted(anchored, reverse=True):
        raise LedgerError("a window has an anchor behind another class; its positions would move with the session")
    ends = list(accumulate(tokens))
    starts = tuple(end - count for end, count in zip(ends, tokens, strict=True))
    return Window(tuple(slot.lease for slot in held), tuple(tokens), starts, ends[-1] if ends else 0)


def positions(length: int) -> bytes:
    """Positions of a window of `length` tokens, int32 in the machine's (little-endian) order: 0..length-1."""
    return array("i", range(length)).tobytes()
