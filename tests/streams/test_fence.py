"""The fence book: points on lanes, in order per lane."""

from __future__ import annotations

import pytest

from duplexd.errors import LedgerError
from duplexd.ids import FenceId
from duplexd.streams.fence import FenceBook


def test_fences_pass_in_the_order_of_their_lane() -> None:
    book = FenceBook()
    one, two, other = book.issue("think"), book.issue("think"), book.issue("talk")
    with pytest.raises(LedgerError, match="cannot pass"):
        book.mark_passed(two)
    book.mark_passed(other)
    book.mark_passed(one)

    assert [book.passed(fence) for fence in (one, two, other)] == [True, False, True]
    assert book.outstanding("think") == (two,)
    assert (book.lane_of(two), book.lane_of(one)) == ("think", None)


def test_a_fence_passes_once() -> None:
    book = FenceBook()
    fence = book.issue("think")
    book.mark_passed(fence)

    with pytest.raises(LedgerError, match="passed before"):
        book.mark_passed(fence)


def test_named_fences_only_grow_and_own_ones_never_meet_them() -> None:
    book = FenceBook()
    assert book.issue("think", FenceId(7)) == 7
    assert book.issue("think") < 0
    with pytest.raises(LedgerError, match="names only grow"):
        book.issue("talk", FenceId(7))

    assert book.issue("talk", FenceId(9)) == 9
    assert book.passed(FenceId(8)), "a name that was skipped ends nothing"


@pytest.mark.parametrize("fence", [0, 1, -1])
def test_a_fence_never_issued_cannot_be_waited_for(fence: int) -> None:
    with pytest.raises(LedgerError, match="never issued"):
        FenceBook().passed(FenceId(fence))


def test_the_book_forgets_what_has_passed() -> None:
    book = FenceBook()
    for name in range(1, 10_000):
        book.mark_passed(book.issue("think", FenceId(name)))

    assert len(book._outstanding) == len(book._order["think"]) == 0
