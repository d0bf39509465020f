"""The page ledger: autoregressive contexts that grow, as block tables over the token slots of a `pages` partition.

1. A context is a table of token slots, oldest first. Sharing copies table entries; no key or value is ever moved.
2. Only one context writes into a page: the one that took it, or a branch that was made at its end and goes on there.
   A branch made before the end starts on a fresh page, and so does the trunk that such a branch has taken the page of.
3. What is cut off may still be written by running work: its pages are guarded until the fences of that work have
   passed, and so is the page the cut goes through. Until then only token slots nobody was ever given follow on it.
4. Anchors are the head of a table. They are not cut, not slid and not moved; they leave when the last context does.
   Long-term tokens come next. A slide may skip what follows them: it stays where it is, and what is behind it goes.
5. Everything a caller is refused is refused before anything changes.
6. Offloaded tokens are always the end of a table: they leave suffix first and come back prefix first, so what is
   resident is a prefix that attention could read. A table grows, forks and is read only when all of it is resident.
7. A page on its way out is free once the copy has ended; a host slot on its way back likewise, and no page that a copy
   still fills is handed out. A copy that failed has lost what it carried: whoever ordered it cuts the table there.

A table with pages of 4 tokens, after a pin at 6, a slide by 1 and a cut inside page 9 (anchor, recent, current):

    page       2         7         5         9         4
    tokens   aaaa      aa-r      rrrr      rr--      cc
    extents  (2,0,4)   (7,0,2)   (5,0,4)   (9,0,2)   (4,0,2)       (page, first offset, tokens)
                       (7,3,1)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, takewhile
from typing import NamedTuple

import msgspec

from duplexd.errors import ArenaFull, LedgerError
from duplexd.ids import ContextId, FenceId, SlotId
from duplexd.memory.census import LIFE, Census, Stretch
from duplexd.memory.classes import RULES, CacheClass, Eviction
from duplexd.memory.guards import After, Freed, Guards, Passed, none_passed
from duplexd.memory.layout import PartitionKind, PartitionSpec
from duplexd.memory.ledger import Lease, Owner, Refusal, SlotLedger
from duplexd.memory.table import SlotTable

SCATTERED_PAGES = 2  #: that tokens laid side by side would save: prefilled anew, they save none a second time


class Extent(NamedTuple):
    """Tokens of one context that lie side by side on one page."""

    page: int
    offset: int  #: of the first token, within the page
    tokens: int

    @property
    def end(self) -> int:
        return self.offset + self.tokens


class Run(NamedTuple):
    """Neighbouring tokens of one class."""

    label: CacheClass
    tokens: int


class Away(NamedTuple):
    """Neighbouring tokens of one context in host memory, on the image of a page. Two that lay on one page share it."""

    lease: Lease  #: of a slot of the host partition
    page: int  #: it is the image of; another context may have that page by now
    offset: int
    tokens: int


class Move(NamedTuple):
    """One page to be copied between the arena and host memory, in the direction the order says."""

    page: int
    host: SlotId


class FoldTokens(msgspec.Struct, frozen=True):
    """An order to a model: fold tokens that leave a context into its long-term tokens, in place.

    The sources are in no table any more and stay readable until the fence they left behind has passed. If it is never
    carried out, the target still holds what it held: the older memory, or at first the oldest of the sources.
    """

    sources: bytes  #: token slots, int64 little endian, oldest first
    target: bytes  #: the long-term tokens' slots
    first: bool  #: the target holds no memory yet; its tokens are the first of the sources


class _Slid(NamedTuple):
    extents: list[Extent]
    dropped: list[Extent]
    parted: int | None  # the page that lost some of the context's tokens, but not all


class Usage(msgspec.Struct, frozen=True):
    """What the pages hold now. A page counts once, for the class of the longest-lived token on it."""

    free: int
    retiring: int  #: referred to by no context, guarded by a fence
    shared: int  #: referred to by more than one context
    pages: dict[CacheClass, int]
    tokens: dict[CacheClass, int]  #: as the contexts count them: a shared token once per context
    page_bytes: int


class _Context:
    """One block table."""

    __slots__ = ("away", "committed", "extents", "owner", "pinned", "runs", "slots", "writer")

    def __init__(self, owner: Owner, writer: int) -> None:
        self.owner = owner
        self.writer = writer  # names the table that may append to a page; it survives a change of ContextId
        self.slots = SlotTable()  # of the resident tokens
        self.extents: list[Extent] = []
        self.away: list[Away] = []  # tokens after the resident ones
        self.runs: list[Run] = []  # of the tokens after the pinned ones
        self.pinned = 0
        self.committed = 0  # no CURRENT token lies below this index, so a commit need not look there

    @property
    def long_term(self) -> int:
        """Tokens behind the pinned ones that hold what was compressed."""
        return self.runs[0].tokens if self.runs and self.runs[0].label is CacheClass.LONG_TERM else 0

    @property
    def away_tokens(self) -> int:
        return sum(away.tokens for away in self.away) if self.away else 0

    @property
    def images(self) -> set[Lease]:
        """Images in host memory: pages that a restore takes."""
        return {away.lease for away in self.away}

    @property
    def length(self) -> int:
        return len(self.slots) + self.away_tokens


#: What a page ledger counts of what it did.
COUNTED = ("leases", "commits", "discards", "cuts", "slides", "folds")


class PageLedger:
    """Bookkeeping of one `pages` partition, in integers; it does not know where the bytes are.

    Args:    spec: the partition; `session_slots` bounds the pages a session owns (retiring ones included),
             `shared_slots` those the engine owns.
             pages_max: the longest table, in extents; 0 means the whole partition. Every cut and every fork may leave
             one page partly filled, so a context that shall keep n tokens of t turns needs n / page_tokens + 2 t; with
             fewer, the pages bound what it keeps, and its owner slides it.
             contexts_max: contexts open at once, branches included.
             passed, freed: as for `SlotLedger`; `freed` is given token slots.
             host: slots of host memory, one for the image of one page; None: nothing is ever offloaded.
    """

    def __init__(
        self,
        spec: PartitionSpec,
        *,
        pages_max: int = 0,
        contexts_max: int = 4096,
        passed: Passed = none_passed,
        freed: Freed | None = None,
        host: SlotLedger | None = None,
    ) -> None:
        if spec.kind is not PartitionKind.PAGES:
            raise LedgerError(f"partition {spec.name} has {spec.kind.value}; a PageLedger keeps pages")
        self.spec = spec
        self.pages_max = pages_max or spec.count
        self.contexts_max = contexts_max
        self.host = host
        self.refusal: Refusal | None = None  #: why the last `append` said no; None after a yes
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))  #: what was done so far: pages leased, cuts, ...
        self._census = Census()
        self._page_tokens = spec.page_tokens
        self._freed = freed
        self._guards = Guards(passed)
        self.awaited = self._guards.fences  #: fences that something waits for
        # A dict as an ordered set: take the page next to the last one when it is free (a table without gaps is read as
        # a slice, not a gather), else the one given back last, so that a missing fence shows at once.
        self._free = dict.fromkeys(reversed(range(spec.count)))
        self._references = [0] * spec.count  # extents that lie on the page, over all contexts
        self._filled = [0] * spec.count  # tokens of the page that were ever handed out since it was taken
        self._writers = [0] * spec.count
        self._lent = [0] * spec.count  # tokens of the page that other extents than the writer's last may have
        self._owners: dict[int, Owner] = {}  # of pages in use and retiring pages
        self._owned: dict[Owner, int] = {}
        self._contexts: dict[ContextId, _Context] = {}
        self._serial = 0

    # Opening and closing ---------------------------------------------------------------------------------------------

    def open(self, owner: Owner, *, prefix: ContextId | None = None) -> ContextId:
        """Open a context; with `prefix`, it starts with the pinned tokens of that context, by reference.

        Raises:  ArenaFull when `contexts_max` are open; LedgerError for an unknown prefix.
        """
        self._check_contexts(owner)
        if prefix is None:
            return self._register(_Context(owner, 0))
        source = self._context(prefix)
        return self._register(self._branch(source, source.pinned, owner))

    def fork(self, context: ContextId, at: int) -> ContextId:
        """Open a branch that shares the first `at` tokens by reference.

        At the trunk's end it goes on where the trunk would have, on the same page, and the trunk, should it grow
        meanwhile, on a fresh one; once either is dropped, what is left of the page is the other's. Before the end the
        branch's own tokens go to a fresh page.

        Cost:    O(pages), and so is `promote` or `close` of it: each page is counted. `duplexd bench memory` says what
                 32,000 tokens take; every cut, append and commit between is O(1).
        Raises:  ArenaFull when `contexts_max` are open; LedgerError unless pinned <= at <= length.
        """
        trunk = self._resident(context)
        self._check_position(context, trunk, at, "fork")
        self._check_contexts(trunk.owner)
        takes_tail = at == trunk.length and self._tail_room(trunk) > 0
        branch = self._branch(trunk, at, trunk.owner)
        identity = self._register(branch)
        if takes_tail:
            self._writers[branch.extents[-1].page] = branch.writer
        return identity

    def promote(self, branch: ContextId, trunk: ContextId, *, after: After) -> None:
        """The branch takes the trunk's place under the trunk's id; what only the trunk had is dropped behind `after`.

        Raises:  LedgerError when the branch is another owner's or lacks one of the trunk's anchors.
        """
        new, old = self._resident(branch), self._resident(trunk)
        if new is old or new.owner != old.owner or not _same_anchors(new, old):
            raise LedgerError(f"context {branch} of session {new.owner} is no branch of context {trunk}")
        new.runs = _repinned(new.runs, new.pinned, old.pinned)
        new.pinned = max(new.pinned, old.pinned)
        shared = _common(new.extents, old.extents)
        # Extents both have lose one of their two references and can free nothing; what follows them is the trunk's own.
        for extent in old.extents[:shared]:
            self._references[extent.page] -= 1
        self._drop(old.extents[shared:], self._guards.pending(after))
        del self._contexts[branch]
        self._contexts[trunk] = new
        self._census.note_gone(branch)
        self._census.note(trunk, 0)

    def close(self, context: ContextId, *, after: After) -> None:
        """Drop a context, its anchors too. Pages others refer to stay. Raises LedgerError when it is not open."""
        table = self._context(context)
        pending = self._guards.pending(after)
        self._forget_away(table, 0, table.away_tokens, pending)
        self._drop(table.extents, pending)
        del self._contexts[context]
        self._census.note_gone(context)

    def _check_contexts(self, owner: Owner) -> None:
        if len(self._contexts) >= self.contexts_max:
            raise ArenaFull(
                f"session {owner} needs a context of {self.spec.name}, {self.contexts_max} are open; "
                "close branches or raise contexts_max"
            )

    def _register(self, context: _Context) -> ContextId:
        self._serial += 1
        context.writer = self._serial
        identity = ContextId(self._serial)
        self._contexts[identity] = context
        self._census.note(identity, 0)
        return identity

    def _branch(self, source: _Context, at: int, owner: Owner) -> _Context:
        """A table with the first `at` tokens. Copied as plain memory; only the references are counted page by page."""
        branch = _Context(owner, 0)
        branch.slots = source.slots.branch(at)
        branch.extents, branch.runs = list(source.extents), list(source.runs)
        _trim_extents(branch.extents, len(source.slots) - at)
        _trim_runs(branch.runs, len(source.slots) - at)
        branch.pinned, branch.committed = source.pinned, min(source.committed, at)
        references, lent = self._references, self._lent
        for page, offset, tokens in branch.extents:
            references[page] += 1
            lent[page] = max(lent[page], offset + tokens)
        return branch

    # Growing and shrinking -------------------------------------------------------------------------------------------

    def append(self, context: ContextId, tokens: int, label: CacheClass) -> bool:
        """Add token slots at the end: all of them, or none and False, and `refusal` says why.

        ANCHOR and LONG_TERM are no labels to append with: append, then `pin` or `compress`. Raises LedgerError for them
        and for tokens < 1.
        """
        table = self._resident(context)
        if tokens < 1 or label in (CacheClass.ANCHOR, CacheClass.LONG_TERM):
            raise LedgerError(f"context {context}: cannot append {tokens} tokens as {label.value}")
        room = min(tokens, self._tail_room(table))
        pages = -(-(tokens - room) // self._page_tokens)
        self.refusal = self._refuse(table, pages)
        if self.refusal is not None:
            return False
        self._census.note(context, table.length)
        if room:
            self._fill_tail(table, room)
        for first in range(room, tokens, self._page_tokens):
            self._fill_page(table, min(self._page_tokens, tokens - first))
        _extend_runs(table.runs, label, tokens)
        return True

    def cut(self, context: ContextId, at: int, *, after: After) -> None:
        """Drop the tokens from `at` on. Cost: O(pages dropped). Raises LedgerError unless pinned <= at <= length."""
        table = self._context(context)
        self._check_position(context, table, at, "cut")
        surplus = table.length - at
        if not surplus:
            return
        self._census.note(context, at)
        _trim_runs(table.runs, surplus)
        table.committed = min(table.committed, at)
        self.counts["cuts"] += 1
        pending = self._guards.pending(after)
        away = min(surplus, table.away_tokens)
        self._forget_away(table, table.away_tokens - away, away, pending)
        surplus -= away
        if not surplus:
            return
        table.slots.cut(at)
        dropped, parted = _trim_extents(table.extents, surplus)
        if parted is not None:
            # The cut goes through this page: running work may still write behind it.
            self._guards.guard(parted, pending)
        self._drop(dropped, pending)

    def slide(self, context: ContextId, drop: int, *, skip: int = 0, after: After = None) -> None:
        """Drop the `drop` oldest tokens that are neither pinned nor long-term; later ones move up in the table, not in
        memory.

        Args:    skip: so many of the oldest stay where they are, and what is dropped follows them.
        Raises:  LedgerError when there are fewer, when one of them is of a class that does not slide (CURRENT), or when
                 long-term tokens before them are offloaded.
        """
        table = self._context(context)
        self._check_slide(context, table, drop, skip, Eviction.SLIDING)
        self._census.note(context, table.pinned + table.long_term + skip)
        if drop:
            self._slide(table, drop, skip, self._guards.pending(after))

    def compress(self, context: ContextId, drop: int, *, keep: int, skip: int = 0, after: After) -> FoldTokens:
        """Slide, and let the model fold what leaves into `keep` long-term tokens right behind the anchors.

        The first time, the `keep` oldest tokens that leave become these, where they lie: nothing is copied.
        Args:    skip: as for `slide`. after: what else the tokens that leave wait for; the fold's own launch is among
                 it.
        Returns: the fold to launch.
        Raises:  LedgerError as `slide`; when tokens are offloaded or a branch shares the target, which is written in
                 place; when the context has another number of long-term tokens; when the first fold has fewer sources.
        """
        table = self._resident(context)
        first = not table.long_term
        self._check_slide(context, table, drop, skip, Eviction.COMPRESS)
        if not 0 < keep <= drop or (not first and keep != table.long_term):
            raise LedgerError(
                f"context {context} keeps {table.long_term} long-term tokens: {drop} do not go into {keep}"
            )
        start = table.pinned + table.long_term + skip
        head = start if first else table.pinned
        target = table.slots.between(head, head + keep)
        for page in {slot // self._page_tokens for slot in target}:
            if sum(extent.page == page for extent in table.extents) != self._references[page]:
                raise LedgerError(f"context {context}: a branch shares its long-term tokens; decide on it first")
        self._census.note(context, table.pinned)
        fold = FoldTokens(table.slots.between(start, start + drop).tobytes(), target.tobytes(), first)
        if first:
            self._bring_forward(table, start, keep)
            table.runs = [Run(CacheClass.LONG_TERM, keep), *_without_runs(table.runs, skip, keep)]
            table.committed = max(table.committed, table.pinned + keep)
        if left := drop - keep if first else drop:
            self._slide(table, left, skip, self._guards.pending(after))
        self.counts["folds"] += 1
        return fold

    def rename_fence(self, old: FenceId, new: FenceId) -> None:
        """What waits for `old` waits for `new`: the launch that `old` stood for has its name now."""
        self._guards.rename(old, new)

    def _check_slide(self, context: ContextId, table: _Context, drop: int, skip: int, how: Eviction) -> None:
        movable = table.length - table.pinned - table.long_term - skip
        if skip < 0 or not 0 <= drop <= movable:
            raise LedgerError(f"context {context} has {movable} tokens that may slide, not {drop}")
        if len(table.slots) < table.pinned + table.long_term:
            raise LedgerError(f"context {context}: its long-term tokens are offloaded; restore or cut it first")
        _check_leaving(context, _without_runs(table.runs, 0, table.long_term + skip), drop, how)

    def _slide(self, table: _Context, drop: int, skip: int, pending: tuple[FenceId, ...]) -> None:
        stays = table.long_term + skip
        start = table.pinned + stays
        table.runs = _without_runs(table.runs, stays, drop)
        self.counts["slides"] += 1
        table.committed = max(table.committed - drop, min(table.committed, start))
        resident = max(0, min(drop, len(table.slots) - start))
        self._forget_away(table, max(0, start - len(table.slots)), drop - resident, pending)
        if not resident:
            return
        table.slots.take_out(start, resident)
        table.extents, dropped, parted = self._slid(table.extents, start, resident)
        if parted is not None:
            self._guards.guard(parted, pending)
        self._drop(dropped, pending)

    def _slid(self, extents: list[Extent], pinned: int, drop: int) -> _Slid:
        """What a slide leaves. A page that now bears a pinned and a sliding extent has a reference for each."""
        kept = _first(extents, pinned)
        rest = extents[len(kept) :]
        if kept and kept[-1].tokens != extents[len(kept) - 1].tokens:
            whole, head = extents[len(kept) - 1], kept[-1]
            rest = [Extent(whole.page, head.end, whole.tokens - head.tokens), *rest]
            self._count_part(whole)
        gone = 0
        while gone < len(rest) and drop >= rest[gone].tokens:
            drop -= rest[gone].tokens
            gone += 1
        left = rest[gone:]
        if drop:
            left[0] = Extent(left[0].page, left[0].offset + drop, left[0].tokens - drop)
        return _Slid(kept + left, rest[:gone], left[0].page if drop else None)

    def _bring_forward(self, table: _Context, at: int, tokens: int) -> None:
        """The tokens from `at` on stand right behind the pinned ones now: in the table, not in memory."""
        if at == table.pinned:
            return
        to, begin, end = (self._part(table, edge) for edge in (table.pinned, at, at + tokens))
        moved = table.extents[begin:end]
        table.extents = [*table.extents[:to], *moved, *table.extents[to:begin], *table.extents[end:]]
        table.slots.put_in(table.pinned, table.slots.take_out(at, tokens))

    def _part(self, table: _Context, at: int) -> int:
        """An extent begins at token `at`, or the table ends there. Returns which; a page parted has two extents."""
        for index, extent in enumerate(table.extents):
            if not at:
                return index
            if at < extent.tokens:
                page, offset, tokens = extent
                table.extents[index : index + 1] = [Extent(page, offset, at), Extent(page, offset + at, tokens - at)]
                self._count_part(extent)
                return index + 1
            at -= extent.tokens
        return len(table.extents)

    def _count_part(self, whole: Extent) -> None:
        """An extent is two now, and the later one need not stay behind the earlier: neither is written again."""
        self._references[whole.page] += 1
        self._lent[whole.page] = max(self._lent[whole.page], whole.end)

    def _tail_room(self, table: _Context) -> int:
        """Token slots this context may take behind its last token, on the page that bears it."""
        if not table.extents:
            return 0
        page, end = table.extents[-1].page, table.extents[-1].end
        # A page has one writer, and what others have of it is not written again.
        writes = self._references[page] == 1 or (self._writers[page] == table.writer and end >= self._lent[page])
        # A guard concerns what was handed out before; what nobody was ever given may follow at once.
        is_free = self._filled[page] == end or page not in self._guards
        return self._page_tokens - end if writes and is_free else 0

    def _refuse(self, table: _Context, pages: int, *, extents: int = 0) -> Refusal | None:
        """Why the table cannot take so many pages, and as many extents or more; None: it can."""
        if not pages:
            return None
        if len(table.extents) + max(pages, extents) > self.pages_max:
            return Refusal.CONTEXT_BOUND
        bound = self.spec.shared_slots if table.owner is None else self.spec.session_slots
        if self.spec.session_slots and self._owned.get(table.owner, 0) + pages > bound:
            return Refusal.SESSION_BOUND
        return Refusal.PARTITION_FULL if pages > len(self._free) else None

    def _fill_tail(self, table: _Context, tokens: int) -> None:
        last = table.extents[-1]
        first = last.page * self._page_tokens + last.end
        stale = self._filled[last.page] - last.end
        if stale > 0 and self._freed is not None:
            self._freed(self.spec.name, range(first, first + stale))
        table.slots.extend(range(first, first + tokens))
        table.extents[-1] = Extent(last.page, last.offset, last.tokens + tokens)
        self._filled[last.page] = last.end + tokens
        self._writers[last.page] = table.writer
        if self._references[last.page] == 1:
            self._lent[last.page] = 0

    def _fill_page(self, table: _Context, tokens: int, *, offset: int = 0) -> int:
        page = self._take(table.extents[-1].page + 1 if table.extents else 0)
        first = page * self._page_tokens + offset
        table.slots.extend(range(first, first + tokens))
        table.extents.append(Extent(page, offset, tokens))
        self._references[page] = 1
        self._filled[page] = offset + tokens
        self._writers[page] = table.writer
        self._lent[page] = 0
        self._owners[page] = table.owner
        self._owned[table.owner] = self._owned.get(table.owner, 0) + 1
        return page

    def _take(self, wanted: int) -> int:
        self.counts["leases"] += 1
        if wanted in self._free:
            del self._free[wanted]
            return wanted
        return self._free.popitem()[0]

    def _drop(self, extents: list[Extent], pending: tuple[FenceId, ...]) -> None:
        """Let go of extents. A page is free when no extent lies on it and no fence guards it."""
        references, guard, let_go = self._references, self._guards.guard, 0
        for page, _, _ in extents:
            if pending:
                # Also while others refer to the page: they may let go without a fence before this one has passed.
                guard(page, pending)
            references[page] -= 1
            if not references[page]:
                let_go += 1
                self._release(page)
        self.counts["discards"] += let_go

    def _release(self, page: int) -> None:
        if self._references[page] or page in self._guards:
            return
        owner = self._owners.pop(page)
        self._owned[owner] -= 1
        if not self._owned[owner]:
            del self._owned[owner]
        self._free[page] = None
        if self._freed is not None:
            first = page * self._page_tokens
            self._freed(self.spec.name, range(first, first + self._page_tokens))

    def fence_passed(self, fence: FenceId) -> int:
        """Free the pages that waited for this fence alone; returns how many. Fences nobody waits for are nothing."""
        before = len(self._free)
        for page in self._guards.fence_passed(fence):
            self._release(page)
        return len(self._free) - before

    # Tiers -----------------------------------------------------------------------------------------------------------

    def offloadable(self, context: ContextId) -> int:
        """Pages at the end of a context that may leave: its own alone, behind its anchors, with nothing unheard on
        them and nobody writing.
        """
        return len({extent.page for extent in self._leaving(self._context(context))})

    def offload(self, context: ContextId, *, pages_max: int, fence: FenceId) -> list[Move]:
        """Let the last pages of a context go to host memory, the last one first; fewer when host memory is short.

        The caller launches a copy of every move under `fence`; each page is free once it has passed.
        Raises:  LedgerError when this ledger has no host memory, or the context is not open.
        """
        table = self._context(context)
        if self.host is None:
            raise LedgerError(f"{self.spec.name} has no host memory to offload context {context} to")
        moves: list[Move] = []
        for extent in self._leaving(table):
            # Both extents of a page leave on one image: the page is not written between the two.
            lease = next((away.lease for away in table.away if away.page == extent.page), None)
            if lease is None:
                lease = self._image(table) if len(moves) < pages_max else None
                if lease is None:
                    break
                moves.append(Move(extent.page, lease.slot))
            table.extents.pop()
            table.slots.cut(len(table.slots) - extent.tokens)
            table.away.insert(0, Away(lease, *extent))
            self._drop([extent], self._guards.pending(fence))
        self._census.note(context, len(table.slots))
        return moves

    def _image(self, table: _Context) -> Lease | None:
        """A host slot for the image of one page; None when host memory is short."""
        assert self.host is not None
        return self.host.lease(table.owner, CacheClass.LONG_TERM, stage=self.spec.name)

    def restore(self, context: ContextId, *, fence: FenceId) -> list[Move] | None:
        """Take pages for all that is offloaded; None when there are too few, and `refusal` says why.

        The caller launches a copy of every move under `fence`, and nothing reads the context before it has passed.
        Each page is guarded until then, whoever lets go of it meanwhile: the copy writes all of it. (Its tail may be
        appended to at once: whoever does has the page in its table, and waits for the copy before it writes.)
        """
        table = self._context(context)
        self.refusal = self._refuse(table, len(table.images), extents=len(table.away))
        if self.host is None or self.refusal is not None:
            return None
        pages: dict[Lease, int] = {}
        self._census.note(context, len(table.slots))
        pending = self._guards.pending(fence)
        for away in table.away:
            if away.lease in pages:
                self._lie_beside(table, Extent(pages[away.lease], away.offset, away.tokens))
                continue
            page = pages[away.lease] = self._fill_page(table, away.tokens, offset=away.offset)
            self._guards.guard(page, pending)
            self.host.discard(away.lease, after=pending)
        table.away.clear()
        return [Move(page, lease.slot) for lease, page in pages.items()]

    def _lie_beside(self, table: _Context, extent: Extent) -> None:
        """One more extent of this table on a page that it has."""
        first = extent.page * self._page_tokens + extent.offset
        table.slots.extend(range(first, first + extent.tokens))
        table.extents.append(extent)
        self._references[extent.page] += 1
        self._filled[extent.page] = self._lent[extent.page] = max(self._filled[extent.page], extent.end)

    def _leaving(self, table: _Context) -> list[Extent]:
        """Extents that may be offloaded, the last first."""
        if any(Eviction.OFFLOAD not in RULES[label].evictions for label, _ in table.runs):
            return []
        movable = table.extents[len(_first(table.extents, table.pinned)) :]
        own = Counter(extent.page for extent in movable)
        leaving: list[Extent] = []
        for extent in reversed(movable):
            if self._references[extent.page] != own[extent.page] or extent.page in self._guards:
                break
            leaving.append(extent)
        return leaving

    def _forget_away(self, table: _Context, at: int, tokens: int, pending: tuple[FenceId, ...]) -> None:
        """Drop so many offloaded tokens, from the `at`-th of them on; an image nobody needs any more goes with them."""
        if not tokens:
            return
        before = table.images
        kept: list[Away] = []
        for away in table.away:
            head = min(away.tokens, max(0, at))
            tail = min(away.tokens, max(0, away.tokens - at - tokens))
            at -= away.tokens
            if head == away.tokens or tail == away.tokens:
                kept.append(away)
                continue
            parts = (away._replace(tokens=head), away._replace(offset=away.offset + away.tokens - tail, tokens=tail))
            kept += [part for part in parts if part.tokens]
        table.away = kept
        assert self.host is not None
        for lease in sorted(before - table.images, key=lambda lease: lease.slot):
            self.host.discard(lease, after=pending)

    # Relabelling -----------------------------------------------------------------------------------------------------

    def pin(self, context: ContextId) -> None:
        """Everything so far becomes ANCHOR: from now on it is not cut, not slid, and not moved."""
        table = self._resident(context)
        self._census.note(context, table.pinned)
        table.pinned = table.committed = len(table.slots)
        table.runs = []

    def commit(self, context: ContextId, upto: int) -> None:
        """CURRENT -> RECENT below token index `upto`: it was heard. Raises LedgerError beyond the end.

        Cost:    O(runs since the last commit), whatever lies before it.
        """
        table = self._context(context)
        if not 0 <= upto <= table.length:
            raise LedgerError(f"context {context} has {table.length} tokens; cannot commit up to {upto}")
        start = table.length
        later: list[Run] = []
        while table.runs and start > table.committed:
            later.append(table.runs.pop())
            start -= later[-1].tokens
        for label, tokens in reversed(later):
            heard = min(max(upto - start, 0), tokens) if label is CacheClass.CURRENT else 0
            if heard:
                self._census.note(context, start)
            _extend_runs(table.runs, CacheClass.RECENT, heard)
            _extend_runs(table.runs, label, tokens - heard)
            start += tokens
        table.committed = max(table.committed, upto)
        self.counts["commits"] += 1

    # Questions -------------------------------------------------------------------------------------------------------

    def slots(self, context: ContextId) -> bytes:
        """Physical token slots, oldest first, int64 in the machine's (little-endian) order; a snapshot. O(length).

        Raises:  LedgerError when some of the context is offloaded: what is not there cannot be read.
        """
        return b"".join(self.slot_pieces(context))

    def slot_pieces(self, context: ContextId) -> tuple[bytes, ...]:
        """The same in pieces. Cost: O(new tokens, up to a piece) and one reference a piece. Raises as `slots`."""
        return self._resident(context).slots.snapshot()

    def length(self, context: ContextId) -> int:
        """Tokens of the context, offloaded ones too; their positions are 0..length-1, given at read."""
        return self._context(context).length

    def away_length(self, context: ContextId) -> int:
        """Tokens of the context that are offloaded: its end."""
        return self._context(context).away_tokens

    def pinned_length(self, context: ContextId) -> int:
        """Tokens at the head that are ANCHOR."""
        return self._context(context).pinned

    def away_pages(self, context: ContextId) -> int:
        """Pages that a restore of the context takes."""
        return len(self._context(context).images)

    def labels(self, context: ContextId) -> list[Run]:
        """Classes of all tokens, oldest first, as runs. What is offloaded is LONG_TERM until it is back."""
        return self._labels(self._context(context))

    @staticmethod
    def _labels(table: _Context) -> list[Run]:
        resident = list(table.runs)
        if away := table.away_tokens:
            _trim_runs(resident, away)
            _extend_runs(resident, CacheClass.LONG_TERM, away)
        return ([Run(CacheClass.ANCHOR, table.pinned)] if table.pinned else []) + resident

    def owner(self, context: ContextId) -> Owner:
        return self._context(context).owner

    def contexts(self, owner: Owner) -> list[ContextId]:
        """Contexts an owner has open, oldest first. O(contexts)."""
        return [identity for identity, table in self._contexts.items() if table.owner == owner]

    def may_grow(self, context: ContextId, tokens: int) -> bool:
        """Whether the bounds of the context and of its owner leave room for so many tokens more, once all that retires
        is back and no branch stands beside it.

        Cost:    O(pages of the prompt it shares). Within a few pages of its owner's bound: O(pages).
        """
        table = self._context(context)
        pages = -(-(tokens - min(tokens, self._tail_room(table))) // self._page_tokens)
        if len(table.extents) + len(table.away) + pages > self.pages_max:
            return False
        bound = self.spec.session_slots
        return not bound or self._pages_at_most(table) + pages <= bound or self._pages_counted(table) + pages <= bound

    def _pages_at_most(self, table: _Context) -> int:
        """The same as `_pages_counted`, but for pages that bear two extents: there are few of these, and both count.

        A prompt by reference is the head of a table and stays there, so what follows is the owner's own.
        """
        lent = sum(1 for _ in takewhile(lambda extent: self._owners[extent.page] != table.owner, table.extents))
        return len(table.extents) - lent + len(table.away)

    def _pages_counted(self, table: _Context) -> int:
        """Pages of its own, in the arena and in host memory. O(extents)."""
        own = {extent.page for extent in table.extents if self._owners[extent.page] == table.owner}
        return len(own) + len(table.images)

    def lies_scattered(self, context: ContextId) -> bool:
        """Whether its resident tokens behind anchors and long-term tokens would take two pages less or more, laid side
        by side. O(extents).
        """
        table = self._context(context)
        start = table.pinned + table.long_term
        extents = len(table.extents) - len(_first(table.extents, start))
        return extents - -(-(len(table.slots) - start) // self._page_tokens) >= SCATTERED_PAGES

    def owned(self, owner: Owner) -> int:
        """Pages an owner has, retiring ones included."""
        return self._owned.get(owner, 0)

    @property
    def owned_by(self) -> Mapping[Owner, int]:
        """The same, of everybody who has any."""
        return self._owned

    @property
    def free_count(self) -> int:
        """Pages that can be taken now."""
        return len(self._free)

    @property
    def retiring_count(self) -> int:
        """Pages no context refers to that a fence still guards."""
        return sum(1 for page in self._owners if not self._references[page])

    def usage(self, *, contexts_max: int | None = None) -> Usage:
        """Pages and tokens by class.

        Args:    contexts_max: look at so many of the contexts that have changed since the last time, and count the
                 others as they were; None: at all of them.
        Cost:    O(extents that have changed in the contexts that are looked at).
        """
        census = self._census
        for identity, at in census.changed(contexts_max):
            begin = census.forget(identity, at)
            if (table := self._contexts.get(identity)) is not None:
                census.tell(identity, _stretches(table, begin))
        return Usage(
            free=self.free_count,
            retiring=max(0, len(self._owners) - census.pages_count),
            shared=census.shared_count,
            pages=dict(census.pages),
            tokens=dict(census.tokens),
            page_bytes=self.spec.slot_bytes,
        )

    def _usage_counted(self) -> Usage:
        """The plain version: every context looked at. O(pages)."""
        tokens = dict.fromkeys(CacheClass, 0)
        best: dict[int, CacheClass] = {}
        for table in self._contexts.values():
            for label, count in self._labels(table):
                tokens[label] += count
            for page, label, _ in _labelled(self._labels(table), table.extents):
                assert page is not None  # What has an extent is resident.
                best[page] = min(best.get(page, label), label, key=LIFE.index)
        pages = {label: list(best.values()).count(label) for label in CacheClass}
        return Usage(
            free=self.free_count,
            retiring=self.retiring_count,
            shared=sum(1 for count in self._pages_of_contexts().values() if count > 1),
            pages=pages,
            tokens=tokens,
            page_bytes=self.spec.slot_bytes,
        )

    def _pages_of_contexts(self) -> dict[int, int]:
        """How many contexts refer to each page in use."""
        counts: dict[int, int] = {}
        for table in self._contexts.values():
            for page in dict.fromkeys(extent.page for extent in table.extents):
                counts[page] = counts.get(page, 0) + 1
        return counts

    def _context(self, context: ContextId) -> _Context:
        table = self._contexts.get(context)
        if table is None:
            raise LedgerError(f"context {context} of {self.spec.name} is not open")
        return table

    def _resident(self, context: ContextId) -> _Context:
        table = self._context(context)
        if table.away:
            raise LedgerError(
                f"{table.away_tokens} of {table.length} tokens of context {context} (session {table.owner}) are "
                "offloaded; restore them first"
            )
        return table

    @staticmethod
    def _check_position(context: ContextId, table: _Context, at: int, verb: str) -> None:
        if not table.pinned <= at <= table.length:
            raise LedgerError(
                f"cannot {verb} context {context} at token {at}: it has {table.length} tokens, "
                f"{table.pinned} of them pinned"
            )

    def full(self, owner: Owner, tokens: int) -> ArenaFull:
        """The error for an owner who cannot go on without room for `tokens`: what is there, and what to lower."""
        why = f" ({self.refusal.value})" if self.refusal is not None else ""
        return ArenaFull(
            f"session {owner} needs {tokens} tokens of {self.spec.name}{why}: {self.free_count} pages of "
            f"{self._page_tokens} are free, {self.retiring_count} retiring, it has {self._owned.get(owner, 0)} of "
            f"{self.spec.session_slots or 'any'}; lower context_tokens_max or sessions_max"
        )

    def check(self) -> None:
        """Tables, references, guards and free pages agree; raises LedgerError naming what does not. O(tokens)."""
        self._guards.check()
        for identity, table in self._contexts.items():
            self._check_table(identity, table)
        lying = [extent.page for table in self._contexts.values() for extent in table.extents]
        used = set(self._owners)
        waiting = {page for page in range(self.spec.count) if page in self._guards}
        rules = {
            "references are counted wrongly": any(
                lying.count(page) != self._references[page] for page in range(self.spec.count)
            ),
            "a page is free and in use": not used.isdisjoint(self._free),
            "pages are lost": len(used) + len(self._free) != self.spec.count,
            "a page nobody uses or guards is not free": not used <= set(lying) | waiting,
            "a guarded page is free": not waiting.isdisjoint(self._free),
            "owners are counted wrongly": self._owned
            != {owner: list(self._owners.values()).count(owner) for owner in self._owners.values()},
            "pages and tokens by class are counted wrongly": self.usage() != self._usage_counted(),
            "a page is filled less than its extents say": any(
                extent.end > self._filled[extent.page] for table in self._contexts.values() for extent in table.extents
            ),
            "what somebody has of a page may be written again": any(
                extent.end > self._lent[extent.page]
                for table in self._contexts.values()
                for extent in self._exposed(table)
            ),
        }
        for sentence, broken in rules.items():
            if broken:
                raise LedgerError(f"pages of {self.spec.name}: {sentence}")

    def _exposed(self, table: _Context) -> Iterator[Extent]:
        """Extents on a page that bears others, behind which somebody may write: another table, or the end of this."""
        for extent in table.extents:
            ends = table.extents[-1]
            writes = self._writers[extent.page] == table.writer
            if self._references[extent.page] > 1 and (not writes or (extent.page == ends.page and extent is not ends)):
                yield extent

    def _check_table(self, identity: ContextId, table: _Context) -> None:
        size = self._page_tokens
        laid = chain.from_iterable(
            range(page * size + offset, page * size + offset + tokens) for page, offset, tokens in table.extents
        )
        written = b"".join(table.slots.snapshot())
        if list(laid) != list(table.slots) or written != table.slots.between(0, len(table.slots)).tobytes():
            raise LedgerError(f"context {identity}: its {len(table.slots)} slots are not where its extents say")
        if sum(run.tokens for run in table.runs) + table.pinned != table.length:
            raise LedgerError(f"context {identity}: its {len(table.slots)} tokens and their classes disagree")
        if not 0 <= self._pages_at_most(table) - self._pages_counted(table) <= _repeated_pages(table):
            raise LedgerError(f"context {identity}: its pages are counted wrongly")
        if any(extent.end > size or extent.tokens < 1 for extent in table.extents):
            raise LedgerError(f"context {identity} has an extent outside its page")
        current = [run.label is CacheClass.CURRENT for run in table.runs for _ in range(run.tokens)]
        if any(current[: max(0, table.committed - table.pinned)]) or table.committed > table.length:
            raise LedgerError(f"context {identity} has CURRENT tokens below {table.committed}, where all is committed")


# Runs and extents: small pure functions ------------------------------------------------------------------------------


def _first(extents: list[Extent], tokens: int) -> list[Extent]:
    """The extents of the first `tokens`; the last one may be a part of its original."""
    first: list[Extent] = []
    for extent in extents:
        if tokens <= 0:
            break
        first.append(extent if extent.tokens <= tokens else Extent(extent.page, extent.offset, tokens))
        tokens -= extent.tokens
    return first


def _trim_extents(extents: list[Extent], tokens: int) -> tuple[list[Extent], int | None]:
    """Take tokens off the end; returns the extents that went whole, and the page that lost a part of one."""
    dropped: list[Extent] = []
    while tokens:
        extent = extents.pop()
        if extent.tokens > tokens:
            extents.append(Extent(extent.page, extent.offset, extent.tokens - tokens))
            return dropped, extent.page
        tokens -= extent.tokens
        dropped.append(extent)
    return dropped, None


def _same_anchors(branch: _Context, trunk: _Context) -> bool:
    """The branch begins with the trunk's anchors."""
    return branch.slots.between(0, trunk.pinned) == trunk.slots.between(0, trunk.pinned)


def _repeated_pages(table: _Context) -> int:
    """Extents, here and in host memory, on a page that bears an earlier one."""
    pages = len({extent.page for extent in table.extents}) + len(table.images)
    return len(table.extents) + len(table.away) - pages


def _common(left: list[Extent], right: list[Extent]) -> int:
    """How many leading extents are the same."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count


def _extend_runs(runs: list[Run], label: CacheClass, tokens: int) -> None:
    if not tokens:
        return
    if runs and runs[-1].label is label:
        runs[-1] = Run(label, runs[-1].tokens + tokens)
    else:
        runs.append(Run(label, tokens))


def _trim_runs(runs: list[Run], tokens: int) -> None:
    """Take tokens off the end."""
    while tokens:
        label, count = runs.pop()
        if count > tokens:
            runs.append(Run(label, count - tokens))
        tokens -= min(count, tokens)


def _without_runs(runs: list[Run], at: int, tokens: int) -> list[Run]:
    """The runs left when tokens are taken out from the `at`-th on."""
    left: list[Run] = []
    for label, count in runs:
        head = min(count, max(0, at))
        tail = min(count - head, max(0, count - at - tokens))
        _extend_runs(left, label, head + tail)
        at -= count
    return left


def _repinned(runs: list[Run], pinned: int, at_least: int) -> list[Run]:
    """The runs after the pin has moved from `pinned` to `at_least`, if that is further."""
    return _without_runs(runs, 0, at_least - pinned) if at_least > pinned else runs


def _check_leaving(context: ContextId, runs: list[Run], drop: int, how: Eviction) -> None:
    """The first `drop` tokens are of classes that leave so."""
    for label, tokens in runs:
        if drop > 0 and how not in RULES[label].evictions:
            verb = "slide" if how is Eviction.SLIDING else how.value
            raise LedgerError(
                f"context {context}: {label.value} tokens do not {verb} ({RULES[label].lifetime.value} lifetime); "
                "commit or cut them first"
            )
        drop -= tokens


def _stretches(table: _Context, begin: int) -> list[Stretch]:
    """What a context holds from token `begin` on. O(runs and extents from there on)."""
    resident = len(table.slots)
    found = _labelled(_runs_behind(table, begin), _extents_behind(table.extents, resident - begin))
    away = table.length - max(begin, resident)
    return [*found, Stretch(None, CacheClass.LONG_TERM, away)] if away > 0 else found


def _runs_behind(table: _Context, begin: int) -> list[Run]:
    """Classes of the resident tokens from `begin` on."""
    behind: list[Run] = []
    away, left = table.away_tokens, len(table.slots) - begin
    for label, tokens in reversed(table.runs):
        if left <= 0:
            break
        gone = min(away, tokens)
        away -= gone
        taken = min(tokens - gone, left)
        left -= taken
        behind.append(Run(label, taken))
    if left > 0:
        behind.append(Run(CacheClass.ANCHOR, left))
    return behind[::-1]


def _extents_behind(extents: list[Extent], tokens: int) -> list[Extent]:
    """The last so many tokens; the first extent may be the end of its original."""
    behind: list[Extent] = []
    for extent in reversed(extents):
        if tokens <= 0:
            break
        taken = min(extent.tokens, tokens)
        tokens -= taken
        behind.append(Extent(extent.page, extent.end - taken, taken))
    return behind[::-1]


def _labelled(runs: list[Run], extents: list[Extent]) -> list[Stretch]:
    """Stretches of one page and one class. `runs` cover the tokens of `extents`, and perhaps more behind them."""
    stretches: list[Stretch] = []
    remaining = iter(runs)
    label, left = next(remaining, Run(CacheClass.CURRENT, 0))
    for extent in extents:
        tokens = extent.tokens
        while tokens:
            if not left:
                label, left = next(remaining)
                continue
            step = min(tokens, left)
            stretches.append(Stretch(extent.page, label, step))
            tokens -= step
            left -= step
    return stretches
