"""The token slots of one context, oldest first, and what is written out of them for a launch.

1. A launch gets a snapshot in pieces. A whole piece is written once and shared by all snapshots, and by branches, until
   one of its slots changes; only the tokens behind the last whole piece are copied each time.
2. A piece is never written again: what a running launch was given stays as it was.

    tokens   0 ........ 511   512 ...... 1023   1024 ... 1100
    pieces   bytes, shared    bytes, shared     bytes, made anew
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

PIECE_TOKENS = 512  #: a snapshot copies fewer than so many, whatever the length; and refers to length / 512 pieces


class SlotTable:
    """Token slots by their index in the context.

    Args:    piece_tokens: of one piece.
    """

    __slots__ = ("_piece_tokens", "_pieces", "_slots")

    def __init__(self, piece_tokens: int = PIECE_TOKENS) -> None:
        self._piece_tokens = piece_tokens
        self._slots: array[int] = array("q")
        self._pieces: list[bytes] = []  # whole ones, from the start on, right as far as they go

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def between(self, start: int, end: int) -> array[int]:
        """A copy of the slots of tokens start..end-1."""
        return self._slots[start:end]

    def snapshot(self) -> tuple[bytes, ...]:
        """All slots, int64 in the machine's (little-endian) order, in pieces.

        Cost:    O(tokens added or changed since the last one), up to a piece; and one reference a piece.
        """
        slots, pieces, size = self._slots, self._pieces, self._piece_tokens
        for start in range(len(pieces) * size, len(slots) - size + 1, size):
            pieces.append(slots[start : start + size].tobytes())
        tail = slots[len(pieces) * size :]
        return (*pieces, tail.tobytes()) if tail else tuple(pieces)

    def extend(self, slots: Iterable[int]) -> None:
        self._slots.extend(slots)

    def cut(self, at: int) -> None:
        """Drop the slots from `at` on."""
        self._changed(at)
        del self._slots[at:]

    def take_out(self, at: int, tokens: int) -> array[int]:
        """Drop so many slots from `at` on; later ones move up. Returns them. O(tokens behind them)."""
        self._changed(at)
        taken = self._slots[at : at + tokens]
        del self._slots[at : at + tokens]
        return taken

    def put_in(self, at: int, slots: array[int]) -> None:
        """Insert slots before `at`. O(tokens behind them)."""
        self._changed(at)
        self._slots[at:at] = slots

    def branch(self, at: int) -> SlotTable:
        """A table of the first `at` slots; it shares the pieces. O(at), as plain memory."""
        branch = SlotTable(self._piece_tokens)
        branch._slots = self._slots[:at]
        branch._pieces = self._pieces[: at // self._piece_tokens]
        return branch

    def _changed(self, at: int) -> None:
        del self._pieces[at // self._piece_tokens :]
