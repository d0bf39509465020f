"""The page ledger against a plain model of tokens, and its rules one by one."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from duplexd.errors import ArenaFull, LedgerError
from duplexd.ids import ContextId, FenceId, SessionId
from duplexd.memory.census import Census, Stretch
from duplexd.memory.classes import CacheClass
from duplexd.memory.layout import FieldSpec, PartitionKind, PartitionSpec
from duplexd.memory.ledger import Owner, Refusal
from duplexd.memory.pages import FoldTokens, PageLedger, Run

ONE, TWO = SessionId(1), SessionId(2)
CURRENT, RECENT, INGEST, ANCHOR = CacheClass.CURRENT, CacheClass.RECENT, CacheClass.INGEST, CacheClass.ANCHOR
OWNERS: list[Owner] = [None, ONE, TWO]


def spec(count: int = 12, *, session_slots: int = 0, shared_slots: int = 0) -> PartitionSpec:
    fields = (FieldSpec("k", (2,), outer=(3,)),)
    return PartitionSpec("pages", PartitionKind.PAGES, count, fields, 4, session_slots, shared_slots)


def slots(ledger: PageLedger, context: ContextId) -> list[int]:
    return array("q", ledger.slots(context)).tolist()


def opened(ledger: PageLedger, tokens: int, label: CacheClass = CURRENT, owner: Owner = ONE) -> ContextId:
    context = ledger.open(owner)
    assert ledger.append(context, tokens, label)
    return context


class Table:
    """A context of the model: token by token."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.slots: list[int] = []
        self.labels: list[CacheClass] = []
        self.pinned = 0

    def copy(self, at: int, owner: Owner) -> Table:
        table = Table(owner)
        table.slots, table.labels, table.pinned = self.slots[:at], self.labels[:at], min(self.pinned, at)
        return table


class PageMachine(RuleBasedStateMachine):
    """Sessions grow, cut, fork, promote and slide contexts over one prompt while fences are pending."""

    PAGES, TOKENS, BOUND, SHARED, TABLE, OPEN = 12, 4, 7, 3, 6, 6

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[ContextId, Table] = {}
        self.forbidden: dict[FenceId, set[int]] = {}  # token slots that may not be handed out before the fence
        self.clean = set(range(self.PAGES * self.TOKENS))
        self.passed: set[FenceId] = set()
        self.ledger = PageLedger(
            spec(self.PAGES, session_slots=self.BOUND, shared_slots=self.SHARED),
            pages_max=self.TABLE,
            contexts_max=self.OPEN,
            passed=self.passed.__contains__,
            freed=self.on_freed,
        )

    # The model --------------------------------------------------------------------------------------------------------

    def live(self) -> set[int]:
        return {slot for table in self.tables.values() for slot in table.slots}

    def guarded(self) -> set[int]:
        return {slot for slots in self.forbidden.values() for slot in slots}

    def on_freed(self, partition: str, freed: Sequence[int]) -> None:
        assert partition == "pages"
        assert self.live().isdisjoint(freed), "freed while a context refers to it"
        assert self.guarded().isdisjoint(freed), "freed before its fence"
        self.clean.update(freed)

    def draw_after(self, data: st.DataObject) -> tuple[FenceId, ...]:
        known = sorted(set(self.forbidden) | self.passed)
        fresh = FenceId(max(known, default=0) + 1)
        chosen = data.draw(st.lists(st.sampled_from([*known, fresh]), max_size=2, unique=True))
        if fresh in chosen:
            self.forbidden[fresh] = set()
        return tuple(chosen)

    def drop(self, dropped: Sequence[int], after: tuple[FenceId, ...]) -> None:
        for fence in after:
            if fence not in self.passed:
                self.forbidden[fence].update(dropped)

    def draw_context(self, data: st.DataObject) -> tuple[ContextId, Table]:
        identity = data.draw(st.sampled_from(list(self.tables)))
        return identity, self.tables[identity]

    # Rules ------------------------------------------------------------------------------------------------------------

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def open(self, data: st.DataObject, owner: Owner) -> None:
        prefix = data.draw(st.sampled_from([None, *self.tables]))
        if len(self.tables) == self.OPEN:
            with pytest.raises(ArenaFull):
                self.ledger.open(owner, prefix=prefix)
            return
        source = Table(owner) if prefix is None else self.tables[prefix]
        identity = self.ledger.open(owner, prefix=prefix)
        assert identity not in self.tables
        self.tables[identity] = source.copy(source.pinned, owner)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), tokens=st.integers(1, 11), label=st.sampled_from([CURRENT, RECENT, INGEST]))
    def append(self, data: st.DataObject, tokens: int, label: CacheClass) -> None:
        identity, table = self.draw_context(data)
        before = self.ledger.usage()
        if not self.ledger.append(identity, tokens, label):
            self.check_refusal(table, tokens)
            assert before == self.ledger.usage()
            return
        taken = slots(self.ledger, identity)[len(table.slots) :]
        assert len(taken) == tokens
        assert len(set(taken)) == tokens
        assert self.live().isdisjoint(taken), "handed out twice"
        assert self.guarded().isdisjoint(taken), "handed out before its fence"
        assert self.clean.issuperset(taken), "handed out without being told"
        self.clean.difference_update(taken)
        table.slots += taken
        table.labels += [label] * tokens

    def check_refusal(self, table: Table, tokens: int) -> None:
        """A refusal is right only when the pages asked for, at most this many, are really not there."""
        pages = -(-tokens // self.TOKENS)
        bound = self.SHARED if table.owner is None else self.BOUND
        short = {
            Refusal.PARTITION_FULL: self.ledger.free_count < pages,
            Refusal.SESSION_BOUND: self.owned(table.owner) + pages > bound,
            Refusal.CONTEXT_BOUND: self.extents(table) + pages > self.TABLE,
        }
        assert self.ledger.refusal is not None
        assert short[self.ledger.refusal]

    def owned(self, owner: Owner) -> int:
        return self.ledger._owned.get(owner, 0)

    @staticmethod
    def extents(table: Table) -> int:
        """Stretches of neighbouring slots within one page."""
        pairs = zip(table.slots, table.slots[1:], strict=False)
        return sum(one + 1 != other or other % 4 == 0 for one, other in pairs) + bool(table.slots)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        identity, table = self.draw_context(data)
        self.ledger.pin(identity)
        table.pinned = len(table.slots)
        table.labels = [ANCHOR] * table.pinned

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        identity, table = self.draw_context(data)
        upto = data.draw(st.integers(0, len(table.slots)))
        self.ledger.commit(identity, upto)
        heard = [RECENT if label is CURRENT else label for label in table.labels[:upto]]
        table.labels[:upto] = heard

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        identity, table = self.draw_context(data)
        at = data.draw(st.integers(0, len(table.slots)))
        after = self.draw_after(data)
        if at < table.pinned:
            with pytest.raises(LedgerError):
                self.ledger.cut(identity, at, after=after)
            return
        self.drop(table.slots[at:], after)
        del table.slots[at:], table.labels[at:]
        self.ledger.cut(identity, at, after=after)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def slide(self, data: st.DataObject) -> None:
        identity, table = self.draw_context(data)
        drop = data.draw(st.integers(0, len(table.slots) - table.pinned + 1))
        after = self.draw_after(data)
        end = table.pinned + drop
        if end > len(table.slots) or CURRENT in table.labels[table.pinned : end]:
            with pytest.raises(LedgerError):
                self.ledger.slide(identity, drop, after=after)
            return
        self.drop(table.slots[table.pinned : end], after)
        del table.slots[table.pinned : end], table.labels[table.pinned : end]
        self.ledger.slide(identity, drop, after=after)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        identity, table = self.draw_context(data)
        at = data.draw(st.integers(0, len(table.slots)))
        if at < table.pinned or len(self.tables) == self.OPEN:
            with pytest.raises(ArenaFull if at >= table.pinned else LedgerError):
                self.ledger.fork(identity, at)
            return
        self.tables[self.ledger.fork(identity, at)] = table.copy(at, table.owner)

    @precondition(lambda self: len(self.tables) > 1)
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        identity, table = self.draw_context(data)
        branch, new = self.draw_context(data)
        after = self.draw_after(data)
        anchored = new.slots[: table.pinned] == table.slots[: table.pinned]
        if branch == identity or new.owner != table.owner or not anchored:
            with pytest.raises(LedgerError):
                self.ledger.promote(branch, identity, after=after)
            return
        new.pinned = max(new.pinned, table.pinned)
        new.labels[: new.pinned] = [ANCHOR] * new.pinned
        self.drop([slot for slot in table.slots if slot not in new.slots], after)
        del self.tables[branch]
        self.tables[identity] = new
        self.ledger.promote(branch, identity, after=after)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        identity, table = self.draw_context(data)
        after = self.draw_after(data)
        self.drop(table.slots, after)
        del self.tables[identity]
        self.ledger.close(identity, after=after)

    @precondition(lambda self: self.forbidden)
    @rule(data=st.data())
    def fence_passes(self, data: st.DataObject) -> None:
        fence = data.draw(st.sampled_from(sorted(self.forbidden)))
        del self.forbidden[fence]
        self.passed.add(fence)
        self.ledger.fence_passed(fence)

    # Invariants -------------------------------------------------------------------------------------------------------

    @invariant()
    def the_tables_agree(self) -> None:
        """Anchors never move, for the model's copy of their slots never changes."""
        self.ledger.check()
        for identity, table in self.tables.items():
            assert table.slots == slots(self.ledger, identity)
            assert table.labels == [run.label for run in self.ledger.labels(identity) for _ in range(run.tokens)]
            assert (table.pinned, len(table.slots)) == (
                self.ledger.pinned_length(identity),
                self.ledger.length(identity),
            )

    @invariant()
    def pages_are_conserved(self) -> None:
        used = {slot // self.TOKENS for slot in self.live()}
        usage = self.ledger.usage()
        assert sum(usage.pages.values()) == len(used)
        assert usage.free + usage.retiring + len(used) == self.PAGES
        assert usage.tokens[CURRENT] == sum(table.labels.count(CURRENT) for table in self.tables.values())

    def teardown(self) -> None:
        for identity in list(self.tables):
            del self.tables[identity]
            self.ledger.close(identity, after=None)
        for fence in list(self.forbidden):
            del self.forbidden[fence]
            self.ledger.fence_passed(fence)
        assert self.ledger.free_count == self.PAGES


PageMachine.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40, derandomize=True)
TestPageMachine = PageMachine.TestCase


def test_sessions_share_a_prompt_without_copying_it() -> None:
    """The prompt ends inside a page; both sessions read that page and write to pages of their own."""
    ledger = PageLedger(spec(6, session_slots=2, shared_slots=2))
    prompt = opened(ledger, 6, owner=None)
    ledger.pin(prompt)
    sessions = [ledger.open(owner, prefix=prompt) for owner in (ONE, TWO)]
    for context in sessions:
        assert ledger.append(context, 3, CURRENT)

    one, two = (slots(ledger, context) for context in sessions)
    assert one[:6] == two[:6] == slots(ledger, prompt)
    assert {slot // 4 for slot in one[6:]}.isdisjoint(slot // 4 for slot in two[:6] + two[6:])
    assert ledger.usage().pages[ANCHOR] == 2


def test_a_look_at_the_figures_reads_again_only_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context of 60 pages; an update, words that were heard and a cut are each a few tokens on the last of them."""
    ledger = PageLedger(spec(64))
    context = opened(ledger, 240, INGEST)
    ledger.usage()
    told: list[int] = []
    tell = Census.tell

    def counted(census: Census, context: ContextId, stretches: Iterable[Stretch]) -> None:
        found = list(stretches)
        told.append(len(found))
        tell(census, context, found)

    monkeypatch.setattr(Census, "tell", counted)
    for change in (
        lambda: ledger.append(context, 6, CURRENT),
        lambda: ledger.commit(context, 243),
        lambda: ledger.cut(context, 241, after=None),
    ):
        change()
        assert ledger.usage() == ledger._usage_counted()

    assert max(told) <= 4
    assert len(told) == 3


def test_an_interruption_keeps_what_was_heard_where_it_lies() -> None:
    ledger = PageLedger(spec())
    context = opened(ledger, 10)
    before = slots(ledger, context)
    ledger.cut(context, 6, after=FenceId(7))

    assert before[:6] == slots(ledger, context)
    assert ledger.retiring_count == 1


def test_what_follows_a_cut_leaves_the_guarded_tail_alone() -> None:
    ledger = PageLedger(spec())
    context = opened(ledger, 6)
    tail = {slot // 4 * 4 + offset for slot in slots(ledger, context)[5:] for offset in range(2, 4)}
    ledger.cut(context, 5, after=FenceId(7))
    ledger.append(context, 2, CURRENT)

    assert tail.isdisjoint(slots(ledger, context)[5:])
    assert len({slot // 4 for slot in slots(ledger, context)}) == 3


def test_a_tail_nobody_writes_any_more_is_used_again() -> None:
    ledger = PageLedger(spec())
    context = opened(ledger, 8)
    before = slots(ledger, context)
    ledger.cut(context, 5, after=FenceId(7))
    ledger.fence_passed(FenceId(7))
    ledger.append(context, 3, CURRENT)

    assert before == slots(ledger, context)


def test_a_branch_shares_a_partly_filled_page_and_writes_elsewhere() -> None:
    """The person speaks over the reply: the words are prefilled on a branch forked at the last heard token."""
    ledger = PageLedger(spec())
    trunk = opened(ledger, 6)
    branch = ledger.fork(trunk, 5)
    assert ledger.append(branch, 2, INGEST)
    assert ledger.append(trunk, 2, CURRENT)

    assert slots(ledger, trunk)[:5] == slots(ledger, branch)[:5]
    assert slots(ledger, trunk) == list(range(8))
    assert slots(ledger, branch)[5:] == [8, 9]


def test_a_branch_at_the_end_goes_on_where_the_trunk_would_have() -> None:
    """A guess begins behind what was said and is cut again and again: it takes no page that the trunk would not."""
    ledger = PageLedger(spec())
    trunk = opened(ledger, 6, INGEST)
    branch = ledger.fork(trunk, 6)
    for more in (5, 2, 3):
        assert ledger.append(branch, more, CURRENT)
        assert slots(ledger, branch) == list(range(6 + more))
        ledger.cut(branch, 6, after=None)
    assert ledger.append(branch, 1, CURRENT)
    assert ledger.append(trunk, 1, INGEST)

    assert slots(ledger, trunk)[6] // 4 not in {slot // 4 for slot in slots(ledger, branch)}


def test_a_page_that_a_branch_had_taken_is_the_trunks_again() -> None:
    ledger = PageLedger(spec())
    trunk = opened(ledger, 6, INGEST)
    branch = ledger.fork(trunk, 6)
    ledger.append(branch, 1, CURRENT)
    ledger.close(branch, after=FenceId(3))
    guarded = ledger.fork(trunk, 6)
    ledger.append(guarded, 1, CURRENT)
    assert slots(ledger, guarded)[6] not in (6, 7), "what was cut may still be written"
    ledger.close(guarded, after=None)
    ledger.fence_passed(FenceId(3))
    ledger.append(trunk, 2, INGEST)

    assert slots(ledger, trunk) == list(range(8))


def test_no_branch_writes_on_a_page_of_the_prompt() -> None:
    ledger = PageLedger(spec(6, session_slots=2, shared_slots=2))
    prompt = opened(ledger, 6, owner=None)
    ledger.pin(prompt)
    branch = ledger.fork(ledger.open(ONE, prefix=prompt), 6)
    ledger.append(branch, 1, CURRENT)

    assert slots(ledger, branch)[6] // 4 not in {slot // 4 for slot in slots(ledger, prompt)}


def test_advance_makes_the_branch_the_trunk_and_guards_what_only_the_trunk_had() -> None:
    ledger = PageLedger(spec(4))
    trunk = opened(ledger, 10)
    branch = ledger.fork(trunk, 4)
    ledger.append(branch, 2, INGEST)
    kept = slots(ledger, branch)
    ledger.promote(branch, trunk, after=FenceId(3))

    assert kept == slots(ledger, trunk)
    assert (ledger.free_count, ledger.retiring_count) == (0, 2)
    assert ledger.fence_passed(FenceId(3)) == 2


def test_resume_drops_the_branch_and_the_trunk_goes_on_where_it_was() -> None:
    ledger = PageLedger(spec())
    trunk = opened(ledger, 6)
    branch = ledger.fork(trunk, 5)
    ledger.append(branch, 2, INGEST)
    ledger.close(branch, after=FenceId(3))
    ledger.append(trunk, 2, CURRENT)

    assert slots(ledger, trunk) == list(range(8))


def test_a_guard_outlives_the_reference_that_made_it() -> None:
    """The trunk is cut behind fence 5 on a page a branch still reads; the branch then lets go without a fence."""
    ledger = PageLedger(spec(1))
    trunk = opened(ledger, 4)
    branch = ledger.fork(trunk, 2)
    ledger.cut(trunk, 0, after=FenceId(5))
    ledger.close(branch, after=None)
    assert not ledger.append(trunk, 1, CURRENT)
    ledger.fence_passed(FenceId(5))

    assert ledger.append(trunk, 1, CURRENT)


def test_a_context_bounded_by_sliding_never_grows() -> None:
    """Ten thousand tokens later the session holds as many pages as in its first minute, and its anchors lie still."""
    ledger = PageLedger(spec(8), pages_max=8)
    context = opened(ledger, 6)
    ledger.pin(context)
    anchors = slots(ledger, context)
    pages = set()
    for _ in range(3000):
        if ledger.length(context) > 20:
            ledger.slide(context, 3)
        assert ledger.append(context, 3, INGEST)
        pages.add(len({slot // 4 for slot in slots(ledger, context)}))

    assert anchors == slots(ledger, context)[:6]
    assert max(pages) <= 7


def test_neighbouring_pages_are_taken_while_they_are_free() -> None:
    """A table without gaps is read as a slice instead of a gather."""
    ledger = PageLedger(spec())
    context = opened(ledger, 3)
    for _ in range(8):
        ledger.append(context, 3, CURRENT)

    assert slots(ledger, context) == list(range(27))


@pytest.mark.parametrize(
    ("ledger", "why"),
    [
        (PageLedger(spec(2), pages_max=9), Refusal.PARTITION_FULL),
        (PageLedger(spec(session_slots=2)), Refusal.SESSION_BOUND),
        (PageLedger(spec(), pages_max=2), Refusal.CONTEXT_BOUND),
    ],
    ids=lambda value: value.value if isinstance(value, Refusal) else "",
)
def test_append_takes_all_or_nothing_and_says_why(ledger: PageLedger, why: Refusal) -> None:
    context = opened(ledger, 7)
    assert not ledger.append(context, 2, CURRENT)

    assert ledger.refusal is why
    assert ledger.length(context) == 7
    assert why.value in str(ledger.full(ONE, 2))
    assert ledger.append(context, 1, CURRENT)
    assert ledger.refusal is None


@pytest.mark.parametrize("branch", [False, True], ids=["cut", "fork"])
def test_what_is_generated_after_an_interruption_is_committed_once_it_is_heard(branch: bool) -> None:
    """Eight tokens were heard, four of them are taken back, and others are generated in their place."""
    ledger = PageLedger(spec())
    context = opened(ledger, 8)
    ledger.commit(context, 8)
    if branch:
        context = ledger.fork(context, 4)
    else:
        ledger.cut(context, 4, after=None)
    ledger.append(context, 8, CURRENT)
    ledger.check()
    ledger.commit(context, 10)

    assert ledger.labels(context) == [Run(RECENT, 10), Run(CURRENT, 2)]


def test_unheard_tokens_do_not_slide() -> None:
    ledger = PageLedger(spec())
    context = opened(ledger, 4)
    ledger.commit(context, 2)
    with pytest.raises(LedgerError, match="current tokens do not slide"):
        ledger.slide(context, 3)
    ledger.slide(context, 2)

    assert ledger.length(context) == 2


LONG_TERM = CacheClass.LONG_TERM


def listed(order: FoldTokens) -> tuple[list[int], list[int]]:
    return array("q", order.sources).tolist(), array("q", order.target).tolist()


def remembering() -> tuple[PageLedger, ContextId]:
    """Two anchors and ten tokens that were heard, of which two pages of three were folded into two."""
    ledger = PageLedger(spec())
    context = opened(ledger, 2)
    ledger.pin(context)
    ledger.append(context, 10, RECENT)
    ledger.compress(context, 5, keep=2, after=None)
    return ledger, context


def test_what_is_folded_first_becomes_the_memory_where_it_lies() -> None:
    ledger = PageLedger(spec())
    context = opened(ledger, 2)
    ledger.pin(context)
    ledger.append(context, 10, RECENT)
    before = slots(ledger, context)
    order = ledger.compress(context, 5, keep=2, after=FenceId(7))

    assert listed(order) == (before[2:7], before[2:4])
    assert order.first
    assert slots(ledger, context) == before[:4] + before[7:]
    assert ledger.labels(context) == [Run(ANCHOR, 2), Run(LONG_TERM, 2), Run(RECENT, 5)]
    ledger.check()


def test_later_folds_leave_the_memory_where_it_is() -> None:
    ledger, context = remembering()
    before = slots(ledger, context)
    order = ledger.compress(context, 3, keep=2, after=None)

    assert listed(order) == (before[4:7], before[2:4])
    assert not order.first
    assert slots(ledger, context) == before[:4] + before[7:]
    assert ledger.labels(context) == [Run(ANCHOR, 2), Run(LONG_TERM, 2), Run(RECENT, 2)]


def test_sources_wait_for_the_launch_that_folds_them() -> None:
    """Its name is not known when they leave; what stood for it is renamed."""
    ledger = PageLedger(spec(4))
    context = opened(ledger, 2)
    ledger.pin(context)
    ledger.append(context, 14, RECENT)
    ledger.compress(context, 12, keep=2, after=FenceId(-1))
    ledger.rename_fence(FenceId(-1), FenceId(9))
    before = (ledger.free_count, ledger.fence_passed(FenceId(-1)))

    assert before == (0, 0)
    assert ledger.fence_passed(FenceId(9)) == 2


def test_the_memory_does_not_slide() -> None:
    ledger, context = remembering()
    ledger.slide(context, 5)
    with pytest.raises(LedgerError, match="has 0 tokens that may slide"):
        ledger.slide(context, 1)

    assert ledger.labels(context) == [Run(ANCHOR, 2), Run(LONG_TERM, 2)]


def test_a_memory_that_a_branch_shares_is_not_written() -> None:
    ledger, context = remembering()
    branch = ledger.fork(context, 9)
    with pytest.raises(LedgerError, match="a branch shares its long-term tokens"):
        ledger.compress(context, 3, keep=2, after=None)
    ledger.close(branch, after=None)

    assert not ledger.compress(context, 3, keep=2, after=None).first


@pytest.mark.parametrize(("drop", "keep"), [(1, 2), (3, 3), (0, 0)], ids=["too few", "another size", "nothing"])
def test_a_fold_that_does_not_fit_the_memory_is_refused(drop: int, keep: int) -> None:
    ledger, context = remembering()
    before = ledger.labels(context)
    with pytest.raises(LedgerError, match=f"{drop} do not go into {keep}"):
        ledger.compress(context, drop, keep=keep, after=None)

    assert before == ledger.labels(context)


def test_nobody_appends_a_memory() -> None:
    ledger, context = remembering()
    with pytest.raises(LedgerError, match="cannot append 1 tokens as long_term"):
        ledger.append(context, 1, LONG_TERM)


def test_a_closed_context_is_unknown() -> None:
    ledger = PageLedger(spec())
    context = opened(ledger, 4)
    ledger.close(context, after=None)

    with pytest.raises(LedgerError, match="not open"):
        ledger.slots(context)
    assert ledger.contexts(ONE) == []


def test_check_finds_a_lost_page() -> None:
    ledger = PageLedger(spec())
    ledger._free.popitem()

    with pytest.raises(LedgerError, match="lost"):
        ledger.check()
