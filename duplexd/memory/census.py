"""The census of a page ledger: pages and tokens by class, kept as contexts change.

1. Whoever changes a context says from which token on; what it holds from there is looked at again when somebody asks.
   So figures cost as much as has changed since, not as much as there is.
2. A page counts once, for the class of the longest-lived token on it, over all contexts that refer to it.
3. The ledger's own `check` holds the census to a count of everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from duplexd.ids import ContextId
from duplexd.memory.classes import CacheClass

#: Lives longest first.
LIFE = (CacheClass.ANCHOR, CacheClass.LONG_TERM, CacheClass.RECENT, CacheClass.INGEST, CacheClass.CURRENT)
_RANK = {label: rank for rank, label in enumerate(LIFE)}


class Stretch(NamedTuple):
    """Neighbouring tokens of one context, of one class and on one page."""

    page: int | None  #: None: they are offloaded
    label: CacheClass
    tokens: int


class _Held:
    """What one context held when it was looked at last, oldest first."""

    __slots__ = ("stretches", "tokens")

    def __init__(self) -> None:
        self.stretches: list[Stretch] = []
        self.tokens = 0


class _Page:
    """Who refers to one page, and as what."""

    __slots__ = ("contexts", "counts")

    def __init__(self) -> None:
        self.contexts: dict[ContextId, int] = {}  # stretches of each that lie on it
        self.counts = [0] * len(LIFE)  # stretches of each class


class Census:
    """Counts over contexts; it reads no ledger, whoever has one tells it."""

    def __init__(self) -> None:
        self._changed: dict[ContextId, int] = {}  # the first token that may have changed
        self._held: dict[ContextId, _Held] = {}
        self._pages: dict[int, _Page] = {}
        self.tokens = dict.fromkeys(CacheClass, 0)
        self.pages = dict.fromkeys(CacheClass, 0)
        self.shared_count = 0  #: pages that more than one context refers to

    def note(self, context: ContextId, at: int) -> None:
        """It has changed from its token `at` on, or was opened (0)."""
        self._changed[context] = min(at, self._changed.get(context, at))

    def note_gone(self, context: ContextId) -> None:
        """It is open no more. One that was never looked at leaves nothing behind."""
        if context in self._held:
            self._changed[context] = 0
        else:
            self._changed.pop(context, None)

    def changed(self, count_max: int | None = None) -> list[tuple[ContextId, int]]:
        """Contexts to look at, with the token to look from, those that have waited longest first. Each is due for
        `forget`, and for `tell` if it is open.
        """
        taken = list(self._changed.items())[:count_max]
        for context, _ in taken:
            del self._changed[context]
        return taken

    def forget(self, context: ContextId, at: int) -> int:
        """What it held from token `at` on is not counted any more. Returns from where on it is to be told: `at` or a
        few tokens before it, so that stretches that have grown stay whole.
        """
        held = self._held.get(context)
        if held is None:
            return 0
        while held.stretches and held.tokens >= at:
            stretch = held.stretches.pop()
            held.tokens -= stretch.tokens
            self._count(context, stretch, -1)
        if not held.stretches:
            del self._held[context]
        return held.tokens

    def tell(self, context: ContextId, stretches: Iterable[Stretch]) -> None:
        """What a context holds behind what is counted of it already. O(stretches)."""
        held = self._held.get(context) or _Held()
        for stretch in stretches:
            held.stretches.append(stretch)
            held.tokens += stretch.tokens
            self._count(context, stretch, 1)
        if held.stretches:
            self._held[context] = held

    @property
    def pages_count(self) -> int:
        """Pages that some context refers to."""
        return len(self._pages)

    def _count(self, context: ContextId, stretch: Stretch, by: int) -> None:
        self.tokens[stretch.label] += by * stretch.tokens
        if stretch.page is not None:
            self._refer(stretch.page, stretch.label, context, by)

    def _refer(self, number: int, label: CacheClass, context: ContextId, by: int) -> None:
        page = self._pages.setdefault(number, _Page())
        self._count_page(page, -1)
        page.counts[_RANK[label]] += by
        page.contexts[context] = page.contexts.get(context, 0) + by
        if not page.contexts[context]:
            del page.contexts[context]
        self._count_page(page, 1)
        if not page.contexts:
            del self._pages[number]

    def _count_page(self, page: _Page, by: int) -> None:
        rank = next((rank for rank, count in enumerate(page.counts) if count), None)
        if rank is not None:
            self.pages[LIFE[rank]] += by
            self.shared_count += by * (len(page.contexts) > 1)
