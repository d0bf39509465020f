"""A context that grows, slides behind what stays, folds, leaves, comes back and is cut, against a plain list."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from duplexd.errors import LedgerError
from duplexd.ids import ContextId, FenceId, SessionId
from duplexd.memory.classes import RULES, CacheClass, Eviction
from duplexd.memory.layout import FieldSpec, PartitionKind, PartitionSpec, host_partition
from duplexd.memory.ledger import SlotLedger
from duplexd.memory.pages import PageLedger

ME = SessionId(1)
PAGE_TOKENS, PAGES, PROMPT, KEEP = 4, 24, 5, 3
SPEC = PartitionSpec("pages", PartitionKind.PAGES, PAGES + 2, (FieldSpec("k", (1,)),), PAGE_TOKENS, PAGES, 2)


class Walk:
    """One context and what lies in its slots; copies and folds are done at once. Tokens are numbers told apart."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.host = SlotLedger(host_partition(SPEC, PAGES))
        self.pages = PageLedger(SPEC, host=self.host)
        self.arena: dict[int, int] = {}
        self.images: dict[int, list[int | None]] = {}
        self.serial = 0
        prompt = self.pages.open(None)
        self.grow(prompt, [], PROMPT)
        self.pages.pin(prompt)
        self.context = self.pages.open(ME, prefix=prompt)
        self.values = [self.arena[slot] for slot in self.slots(self.context)]
        self.folded = 0

    def slots(self, context: ContextId) -> list[int]:
        return array("q", self.pages.slots(context)).tolist()

    def grow(self, context: ContextId, values: list[int], tokens: int) -> None:
        if not self.pages.append(context, tokens, CacheClass.RECENT):
            return
        for slot in self.slots(context)[-tokens:]:
            self.serial += 1
            self.arena[slot] = self.serial
            values.append(self.serial)

    @property
    def head(self) -> int:
        return PROMPT + self.folded

    def behind(self) -> tuple[int, int]:
        """So many tokens stay, and so many leave."""
        skip = self.rng.randint(0, min(6, len(self.values) - self.head))
        return skip, self.rng.randint(0, min(7, len(self.values) - self.head - skip))

    def slide(self) -> None:
        skip, drop = self.behind()
        if len(self.values) - self.pages.away_length(self.context) >= self.head:
            self.pages.slide(self.context, drop, skip=skip)
            del self.values[self.head + skip : self.head + skip + drop]

    def compress(self) -> None:
        skip, drop = self.behind()
        if drop < KEEP or self.pages.away_length(self.context):
            return
        order = self.pages.compress(self.context, drop, keep=KEEP, skip=skip, after=None)
        start = self.head + skip
        sources, target = (array("q", slots).tolist() for slots in (order.sources, order.target))

        assert [self.arena[slot] for slot in sources] == self.values[start : start + drop]
        stays = self.values[self.head : start]
        memory = [-sum(self.values[start : start + drop]) - n for n in range(KEEP)]
        for slot, value in zip(target, memory, strict=True):
            self.arena[slot] = value
        self.values[PROMPT : start + drop] = [*memory, *stays]
        self.folded = KEEP

    def offload(self) -> None:
        fence = FenceId(self.serial + 1)
        for page, host in self.pages.offload(self.context, pages_max=self.rng.randint(1, 6), fence=fence):
            first = page * PAGE_TOKENS
            self.images[host] = [self.arena.get(slot) for slot in range(first, first + PAGE_TOKENS)]
        self.pages.fence_passed(fence)

    def restore(self) -> None:
        fence = FenceId(self.serial + 1)
        moves = self.pages.restore(self.context, fence=fence)
        assert moves is not None, "what was there once has no room any more"
        for page, host in moves:
            for offset, value in enumerate(self.images[host]):
                if value is not None:
                    self.arena[page * PAGE_TOKENS + offset] = value
        for ledger in (self.pages, self.host):
            ledger.fence_passed(fence)

    def cut(self) -> None:
        at = self.rng.randint(max(self.head, len(self.values) - 6), len(self.values))
        self.pages.cut(self.context, at, after=None)
        del self.values[at:]

    def append(self) -> None:
        if not self.pages.away_length(self.context):
            self.grow(self.context, self.values, self.rng.randint(1, 7))

    def check(self) -> None:
        self.pages.check()
        self.host.check()
        resident = len(self.values) - self.pages.away_length(self.context)

        assert self.pages.length(self.context) == len(self.values)
        if resident == len(self.values):
            assert [self.arena[slot] for slot in self.slots(self.context)] == self.values


@pytest.mark.parametrize("every", [1, 7], ids=["each step", "now and then"])
@pytest.mark.parametrize("seed", range(40))
def test_a_table_holds_what_a_list_would(seed: int, every: int) -> None:
    """Looked at after each step, and after several: the figures by class are counted on from the last look."""
    walk = Walk(seed)
    acts = [walk.append, walk.append, walk.append, walk.slide, walk.compress, walk.offload, walk.restore, walk.cut]
    for step in range(150):
        walk.rng.choice(acts)()
        if step % every == 0:
            walk.check()
    walk.restore()
    walk.check()
    walk.pages.close(walk.context, after=None)

    assert walk.pages.owned(ME) == 0
    assert walk.host.free_count == PAGES


def test_what_is_idle_can_leave_whole_although_something_slid_out_of_the_middle_of_a_page() -> None:
    """Two tokens stay on the page that bears the next exchange: both leave on one image, and come back on one page."""
    walk = Walk(0)
    walk.grow(walk.context, walk.values, 10)
    walk.pages.slide(walk.context, 1, skip=2)
    pages = walk.pages.owned(ME)
    moves = walk.pages.offload(walk.context, pages_max=9, fence=FenceId(1))
    walk.pages.fence_passed(FenceId(1))

    assert (len(moves), walk.pages.away_pages(walk.context), walk.pages.owned(ME)) == (3, 3, 0)
    assert len(walk.pages.restore(walk.context, fence=FenceId(2)) or ()) == 3
    assert walk.pages.owned(ME) == pages


def test_tokens_on_many_pages_lie_scattered_until_they_are_laid_side_by_side() -> None:
    """Each branch takes the rest of a page, and the trunk goes on on the next: a page for one token."""
    walk = Walk(0)
    trunk = walk.context
    for _ in range(5):
        branch = walk.pages.fork(trunk, walk.pages.length(trunk))
        assert walk.pages.append(trunk, 1, CacheClass.RECENT)
        walk.pages.close(branch, after=None)
    scattered = walk.pages.lies_scattered(trunk)
    walk.pages.cut(trunk, PROMPT, after=None)
    assert walk.pages.append(trunk, 5, CacheClass.RECENT)

    assert scattered
    assert not walk.pages.lies_scattered(trunk)


@pytest.mark.parametrize(("tokens", "fits"), [(4 * (PAGES - 2) + 2, True), (4 * (PAGES - 2) + 3, False)])
def test_a_context_says_whether_it_may_grow_before_it_is_refused(tokens: int, fits: bool) -> None:
    """Two pages are taken, with room for two tokens on the second."""
    walk = Walk(0)
    walk.grow(walk.context, walk.values, 6)

    assert walk.pages.may_grow(walk.context, tokens) is fits
    assert walk.pages.append(walk.context, tokens, CacheClass.RECENT) is fits


@pytest.mark.parametrize("label", [CacheClass.RECENT, CacheClass.INGEST, CacheClass.CURRENT])
def test_tokens_leave_as_the_table_of_their_class_says(label: CacheClass) -> None:
    """What the ledger lets go by sliding, folding or a copy to the host is what the table allows."""

    def leaves(how: Eviction) -> bool:
        walk = Walk(0)
        assert walk.pages.append(walk.context, 8, label)
        try:
            match how:
                case Eviction.SLIDING:
                    walk.pages.slide(walk.context, 4)
                case Eviction.COMPRESS:
                    walk.pages.compress(walk.context, 4, keep=2, after=None)
                case _:
                    return bool(walk.pages.offload(walk.context, pages_max=9, fence=FenceId(1)))
        except LedgerError as error:
            assert "do not" in str(error)  # noqa: PT017
            return False
        return True

    ways = {Eviction.SLIDING, Eviction.COMPRESS, Eviction.OFFLOAD}
    assert {how for how in ways if leaves(how)} == ways.intersection(RULES[label].evictions)
