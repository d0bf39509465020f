"""The census of a page ledger: pages and tokens by class, kept as contexts change.

1. Whoever changes a context says so; what it holds is looked at again when somebody asks. So figures cost as much as
   has changed since, not as much as there is.
2. A page counts once, for the class of the longest-lived token on it, over all contexts that refer to it.
3. The ledger's own `check` holds the census to a count of everything.
"""

from __future__ import annotations

from collections.abc import Iterable

from duplexd.ids import ContextId
from duplexd.memory.classes import CacheClass

#: Lives longest first.
LIFE = (CacheClass.ANCHOR, CacheClass.LONG_TERM, CacheClass.RECENT, CacheClass.INGEST, CacheClass.CURRENT)
_RANK = {label: rank for rank, label in enumerate(LIFE)}

#: What one context holds: (its tokens by class, the class of each of its pages).
_Held = tuple[dict[CacheClass, int], dict[int, CacheClass]]
_NOTHING: _Held = ({}, {})


class Census:
    """Counts over contexts; it reads no ledger, whoever has one tells it."""

    def __init__(self) -> None:
        self._changed: dict[ContextId, None] = {}
        self._held: dict[ContextId, _Held] = {}
        self._contexts: dict[int, list[int]] = {}  # by page: how many contexts refer to it as each class of `LIFE`
        self.tokens = dict.fromkeys(CacheClass, 0)
        self.pages = dict.fromkeys(CacheClass, 0)
        self.shared_count = 0  #: pages that more than one context refers to

    def note(self, context: ContextId) -> None:
        """It has changed, or was opened."""
        self._changed[context] = None

    def note_gone(self, context: ContextId) -> None:
        """It is open no more. One that was never looked at leaves nothing behind."""
        if context in self._held:
            self._changed[context] = None
        else:
            self._changed.pop(context, None)

    def changed(self, count_max: int | None = None) -> list[ContextId]:
        """Contexts to look at, those that have waited longest first; each is due to be told by `tell`."""
        taken = list(self._changed)[:count_max]
        for context in taken:
            del self._changed[context]
        return taken

    def tell(
        self,
        context: ContextId,
        tokens: Iterable[tuple[CacheClass, int]] = (),
        pages: Iterable[tuple[int, CacheClass]] = (),
    ) -> None:
        """What a context holds now: runs of tokens, and (page, class) for every extent; nothing for one that is gone.

        Cost:    O(extents of this context).
        """
        old_tokens, old_pages = self._held.pop(context, _NOTHING)
        new_tokens: dict[CacheClass, int] = {}
        for label, count in tokens:
            new_tokens[label] = new_tokens.get(label, 0) + count
        new_pages = _longest_lived(pages)
        for label, count in old_tokens.items():
            self.tokens[label] -= count
        for label, count in new_tokens.items():
            self.tokens[label] += count
        for page, label in old_pages.items() - new_pages.items():
            self._refer(page, label, -1)
        for page, label in new_pages.items() - old_pages.items():
            self._refer(page, label, 1)
        if new_tokens or new_pages:
            self._held[context] = (new_tokens, new_pages)

    @property
    def pages_count(self) -> int:
        """Pages that some context refers to."""
        return len(self._contexts)

    def _refer(self, page: int, label: CacheClass, by: int) -> None:
        counts = self._contexts.setdefault(page, [0] * len(LIFE))
        self._count(counts, -1)
        counts[_RANK[label]] += by
        self._count(counts, 1)
        if not any(counts):
            del self._contexts[page]

    def _count(self, counts: list[int], by: int) -> None:
        rank = next((rank for rank, count in enumerate(counts) if count), None)
        if rank is not None:
            self.pages[LIFE[rank]] += by
            self.shared_count += by * (sum(counts) > 1)


def _longest_lived(pages: Iterable[tuple[int, CacheClass]]) -> dict[int, CacheClass]:
    best: dict[int, CacheClass] = {}
    for page, label in pages:
        known = best.get(page)
        if known is None or _RANK[label] < _RANK[known]:
            best[page] = label
    return best
