"""A context over real pages against a plain model of what every token slot holds, while work is late and stale.

The model's memory is written when a flight lands, as late as that can be, and is poisoned when the ledger gives a slot
back: whatever a context counts as held must be there, whoever else wrote meanwhile.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from duplexd.engine.dialogue import LONG_TERM, Context, Feed
from duplexd.errors import ArenaFull
from duplexd.ids import FenceId, SessionId, WorkId
from duplexd.memory.classes import CacheClass
from duplexd.memory.layout import FieldSpec, PartitionKind, PartitionSpec, host_partition
from duplexd.memory.ledger import SlotLedger
from duplexd.memory.pages import PageLedger

ONE, TWO = SessionId(1), SessionId(2)
PAGES, PAGE_TOKENS = 14, 4
ANCHOR = (900, 901, 902, 903, 904)  #: fills one page and a token of the next
WORDS = st.lists(st.integers(0, 2), max_size=12)  #: few different tokens, so that prefixes are often shared
POISON = -1


class Flight(msgspec.Struct, frozen=True):
    context: Context
    feed: Feed
    decoded: tuple[int, ...]

    def written(self) -> list[tuple[int, int]]:
        """(slot, token) of every key the launch writes: its feed, and all decoded tokens but the last."""
        slots = array("q", b"".join(self.feed.pieces))[self.feed.past :]
        return list(zip(slots, self.feed.tokens + self.decoded[:-1], strict=False))


class Sessions:
    """One session's contexts on a small partition, an anchor shared by reference, and the memory behind it."""

    def __init__(self) -> None:
        self.memory = [POISON] * (PAGES * PAGE_TOKENS)
        fields = (FieldSpec("k", (2,), outer=(3,)),)
        spec = PartitionSpec("pages", PartitionKind.PAGES, PAGES, fields, PAGE_TOKENS, 0, 0)
        self.pages = PageLedger(spec, freed=self.poison)
        anchor = self.pages.open(None)
        assert self.pages.append(anchor, len(ANCHOR), CacheClass.INGEST)
        self.pages.pin(anchor)
        for slot, token in zip(array("q", self.pages.slots(anchor)), ANCHOR, strict=True):
            self.memory[slot] = token
        self.free = self.pages.free_count
        self.trunk = Context(self.pages, self.pages.open(ONE, prefix=anchor), ANCHOR)
        self.neighbour = Context(self.pages, self.pages.open(TWO, prefix=anchor), ANCHOR)
        self.flights: dict[WorkId, Flight] = {}
        self.works = 0

    def poison(self, partition: str, slots: Sequence[int]) -> None:
        for slot in slots:
            self.memory[slot] = POISON

    def launch(self, context: Context, *, steps: int = 0, decoded: Sequence[int] = (), feed_max: int = 99) -> WorkId:
        self.works += 1
        work = WorkId(self.works)
        feed = context.launch(work, steps=steps, feed_max=feed_max)
        self.flights[work] = Flight(context, feed, tuple(decoded[: feed.steps]))
        return work

    def land(self, work: WorkId, *, wanted: bool = True) -> None:
        """The launch has written all it was told to; the session hands its tokens on, or has changed its mind."""
        flight = self.flights.pop(work)
        for slot, token in flight.written():
            self.memory[slot] = token
        self.pages.fence_passed(FenceId(work))
        flight.context.land(work, flight.decoded if wanted else ())

    def fail(self, work: WorkId) -> None:
        flight = self.flights.pop(work)
        self.pages.fence_passed(FenceId(work))
        flight.context.abort(work)

    def held(self, context: Context) -> list[int]:
        """What the memory has where the context believes its keys to be, but for those its flight is writing."""
        known = len(context.ids) if context.flight is None else context._past
        return [self.memory[slot] for slot in array("q", self.pages.slots(context.id))[:known]]


class ContextMachine(RuleBasedStateMachine):
    """A trunk and now and then a branch follow changing words; one flight at a time, stale ones included."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions = Sessions()
        self.trunk = self.sessions.trunk
        self.neighbour = self.sessions.neighbour
        self.branch: Context | None = None
        self.busy: WorkId | None = None
        self.head: tuple[int, ...] = ANCHOR  #: what is closed, as it was told last

    @property
    def contexts(self) -> list[Context]:
        return [self.trunk] if self.branch is None else [self.trunk, self.branch]

    @property
    def front(self) -> Context:
        """Where words go: to the branch while there is one."""
        return self.trunk if self.branch is None else self.branch

    @rule(words=WORDS)
    def follow(self, words: list[int]) -> None:
        wanted = [*ANCHOR, *words]
        self.front.follow(wanted)

        assert self.front.want == wanted
        assert wanted[: len(self.front.ids)] == self.front.ids

    @rule(words=WORDS, at=st.integers(0, 17))
    def close_turn(self, words: list[int], at: int) -> None:
        """So many of the wanted tokens are closed from now on; the open turn has other words."""
        self.head = tuple(self.front.want[:at]) if at >= len(ANCHOR) else ANCHOR
        self.talk(words)

    @rule(words=WORDS)
    def talk(self, words: list[int]) -> None:
        """The open turn has other words; what is closed is the same value as before, whatever happened meanwhile."""
        wanted = [*self.head, *words[: 20 - len(self.head)]]
        self.front.follow(wanted[len(self.head) :], head=self.head)

        assert self.front.want == wanted
        assert wanted[: len(self.front.ids)] == self.front.ids

    @rule(more=WORDS)
    def go_on(self, more: list[int]) -> None:
        """What the context holds stays as it is, and more follows."""
        context, before = self.front, list(self.front.ids)
        room = 20 - len(context.want)
        context.follow([*context.want, *more[: max(0, room)]])

        assert before[: len(context.ids)] == context.ids

    @precondition(lambda self: self.busy is None and self.front.behind > 0)
    @rule(
        steps=st.integers(0, 4), decoded=st.lists(st.integers(0, 2), min_size=4, max_size=4), feed_max=st.integers(1, 9)
    )
    def launch(self, steps: int, decoded: list[int], feed_max: int) -> None:
        context = self.front
        before = (list(context.ids), self.sessions.pages.length(context.id), context.flight)
        try:
            self.busy = self.sessions.launch(context, steps=steps, decoded=decoded, feed_max=feed_max)
        except ArenaFull:
            assert (context.ids, self.sessions.pages.length(context.id), context.flight) == before
            return
        feed = self.sessions.flights[self.busy].feed

        assert before[0] + list(feed.tokens) == context.ids == context.want[: len(context.ids)]
        assert feed.past == len(before[0])
        assert feed.steps == (steps if context.behind == 0 else 0)
        assert sum(map(len, feed.pieces)) // 8 == len(context.ids) + max(0, feed.steps - 1)

    @precondition(lambda self: self.busy is not None)
    @rule(shorter=st.integers(0, 3), fails=st.sampled_from([False, False, True]))
    def come_back(self, shorter: int, fails: bool) -> None:
        """The session's flight lands, perhaps with fewer tokens than there was room for, or it fails."""
        assert self.busy is not None
        work, self.busy = self.busy, None
        flight = self.sessions.flights[work]
        decoded = flight.decoded[: max(1, len(flight.decoded) - shorter)]
        self.sessions.flights[work] = msgspec.structs.replace(flight, decoded=decoded)
        if fails:
            self.sessions.fail(work)
        else:
            wanted = flight.context.want == flight.context.ids  # Nothing else was said since it was launched.
            self.sessions.land(work, wanted=wanted)
            if wanted and flight.context in self.contexts:
                flight.context.follow([*flight.context.want, *decoded])
        flight.context.land(work, (7, 7, 7))  # A copy of the news: the flight is over, so nothing may change.
        flight.context.abort(work)

    @precondition(lambda self: self.branch is None)
    @rule(kept=st.integers(0, 12), words=WORDS)
    def fork(self, kept: int, words: list[int]) -> None:
        wanted = [*ANCHOR, *self.trunk.ids[len(ANCHOR) :][:kept], *words]
        free = self.sessions.pages.free_count
        self.branch = self.trunk.fork(wanted)

        assert self.branch.want == wanted
        assert wanted[: len(self.branch.ids)] == self.branch.ids
        assert self.sessions.pages.free_count == free

    @precondition(lambda self: self.branch is not None)
    @rule()
    def become(self) -> None:
        """Advance: the branch is the trunk."""
        assert self.branch is not None
        spent, ids = self.trunk, list(self.branch.ids)
        self.trunk, self.branch = self.trunk.become(self.branch), None

        assert self.trunk.ids == ids
        assert self.trunk.id == spent.id
        assert spent.flight is None

    @precondition(lambda self: self.branch is not None)
    @rule()
    def drop(self) -> None:
        """Resume: the branch goes, and the trunk never knew of it."""
        assert self.branch is not None
        before = self.sessions.pages.slots(self.trunk.id)
        self.branch.close()
        self.branch = None

        assert self.sessions.pages.slots(self.trunk.id) == before

    @precondition(lambda self: self.branch is None)
    @rule(drop=st.integers(0, 8))
    def slide(self, drop: int) -> None:
        """The oldest exchange goes, tokens of it that have no key yet included."""
        wanted, ids = list(self.trunk.want), list(self.trunk.ids)
        self.trunk.slide(len(ANCHOR), drop)

        assert self.trunk.want == [*ANCHOR, *wanted[len(ANCHOR) + drop :]]
        assert self.trunk.ids == [*ANCHOR, *ids[len(ANCHOR) + drop :]]

    @invariant()
    def a_context_holds_the_beginning_of_what_it_wants(self) -> None:
        for context in self.contexts:
            assert context.want[: len(context.ids)] == context.ids

    @rule(words=WORDS)
    def somebody_else_speaks(self, words: list[int]) -> None:
        """Another session takes whatever is free and is written at once: it overtakes every flight."""
        self.neighbour.follow(ANCHOR)
        self.neighbour.follow([*ANCHOR, *(100 + word for word in words)])
        try:
            if words:
                self.sessions.land(self.sessions.launch(self.neighbour))
        except ArenaFull:
            self.neighbour.follow(ANCHOR)

    @rule(upto=st.integers(0, 30))
    def commit(self, upto: int) -> None:
        self.front.commit(upto)

    @invariant()
    def lengths_agree(self) -> None:
        """A table is as long as what is held and what is reserved for decoded tokens."""
        for context in self.contexts:
            assert self.sessions.pages.length(context.id) == len(context.ids) + context._reserved
            assert context.ids[: len(ANCHOR)] == list(ANCHOR)
            assert context.flight in (None, self.busy)

    @invariant()
    def what_is_held_is_there(self) -> None:
        for context in [*self.contexts, self.neighbour]:
            held = self.sessions.held(context)

            assert held == context.ids[: len(held)]

    @invariant()
    def the_ledger_agrees_with_itself(self) -> None:
        self.sessions.pages.check()

    def teardown(self) -> None:
        """Everything closes with a flight still out: it spoils nobody, and when it is back every page is free again."""
        for context in self.contexts:
            context.close()
        late = list(self.sessions.flights)
        self.somebody_else_speaks([1] * 12)
        for work in late:
            self.sessions.land(work)
        held = self.sessions.held(self.neighbour)
        assert held == self.neighbour.ids
        self.neighbour.close()
        self.sessions.pages.check()

        assert self.sessions.pages.free_count == self.sessions.free
        assert self.sessions.pages.retiring_count == 0


ContextMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestContextMachine = ContextMachine.TestCase


def thinking() -> tuple[Sessions, Context]:
    """A context that holds the anchor and six tokens of the person."""
    sessions = Sessions()
    context = sessions.trunk
    context.follow([*ANCHOR, 1, 2, 3, 4, 5, 6])
    sessions.land(sessions.launch(context))
    return sessions, context


def test_new_words_cost_only_themselves() -> None:
    """DESIGN §5 rule 7: what is held already is not fed again."""
    sessions, context = thinking()
    context.follow([*context.ids, 7, 8])
    work = sessions.launch(context)

    assert sessions.flights[work].feed.tokens == (7, 8)
    assert sessions.flights[work].feed.past == 11


def test_the_last_decoded_token_has_no_key_yet_and_heads_the_next_feed() -> None:
    sessions, context = thinking()
    context.follow([*context.ids, 7])
    sessions.land(sessions.launch(context, steps=4, decoded=(20, 21, 22)))
    context.follow([*ANCHOR, 1, 2, 3, 4, 5, 6, 7, 20, 21, 22])
    work = sessions.launch(context, steps=4)

    assert sessions.flights[work].feed.tokens == (22,)
    assert sessions.held(context) == [*ANCHOR, 1, 2, 3, 4, 5, 6, 7, 20, 21]


def test_a_reply_begun_anew_feeds_the_newest_token_again() -> None:
    """The first attempt held no word, so all keys of the prompt are there: something must be fed to decode from."""
    sessions, context = thinking()
    prompt = [*context.ids, 7]
    context.follow(prompt)
    sessions.land(sessions.launch(context, steps=4, decoded=(20, 21)))
    context.follow(prompt)
    work = sessions.launch(context, steps=4, decoded=(22, 23))
    feed = sessions.flights[work].feed
    sessions.land(work)

    assert (feed.tokens, feed.past, feed.steps) == ((7,), len(prompt) - 1, 4)
    assert sessions.held(context) == [*prompt, 22]


def test_tokens_are_decoded_only_behind_the_whole_context() -> None:
    """A feed that does not reach the end cannot be followed by the reply."""
    sessions, context = thinking()
    context.follow([*context.ids, *range(20, 30)])
    first = sessions.launch(context, steps=4, feed_max=6)
    steps = sessions.flights[first].feed.steps
    sessions.land(first)
    second = sessions.launch(context, steps=4, feed_max=6)

    assert (steps, sessions.flights[second].feed.steps) == (0, 4)


def test_a_cut_under_a_flight_frees_its_pages_only_when_it_has_come_back() -> None:
    sessions, context = thinking()
    context.follow([*context.ids, *range(20, 32)])
    work = sessions.launch(context)
    context.follow(ANCHOR)
    during = sessions.pages.retiring_count
    sessions.land(work)

    assert during == 5
    assert sessions.pages.retiring_count == 0
    assert sessions.pages.free_count == sessions.free
    assert context.ids == list(ANCHOR)


def test_a_flight_of_the_old_trunk_lands_nowhere() -> None:
    """It was launched before the interruption and comes back after it: the branch neither sees nor loses anything."""
    sessions, context = thinking()
    branch = context.fork([*ANCHOR, 1, 2, 3])
    context.follow([*context.ids, 7])
    stale = sessions.launch(context, steps=4, decoded=(20, 21, 22, 23))
    trunk = context.become(branch)
    trunk.follow([*ANCHOR, 1, 2, 3, 30, 31, 32])
    mine = sessions.launch(trunk)
    sessions.land(mine)
    sessions.land(stale)

    assert sessions.held(trunk) == [*ANCHOR, 1, 2, 3, 30, 31, 32]
    assert sessions.pages.length(trunk.id) == 11
    assert sessions.pages.retiring_count == 0


def test_a_branch_does_not_share_keys_that_are_still_being_written() -> None:
    """The first launch of a reply fails after a stop made the branch the trunk: what it should have written is missing
    nowhere.
    """
    sessions, context = thinking()
    context.follow([*context.ids, 7, 8])
    failing = sessions.launch(context)
    branch = context.fork([*ANCHOR, 1, 2, 3, 4, 5, 6, 7, 8])
    trunk = context.become(branch)
    sessions.fail(failing)
    sessions.land(sessions.launch(trunk))

    assert trunk.ids == [*ANCHOR, 1, 2, 3, 4, 5, 6, 7, 8]
    assert sessions.held(trunk) == trunk.ids


def test_a_failed_flight_leaves_nothing_of_what_it_should_have_written() -> None:
    sessions, context = thinking()
    context.follow([*context.ids, 7])
    sessions.fail(sessions.launch(context, steps=4, decoded=(20, 21, 22)))

    assert context.ids == [*ANCHOR, 1, 2, 3, 4, 5, 6]
    assert context.behind == 1
    assert sessions.pages.length(context.id) == 11


def test_a_launch_without_room_says_so_and_changes_nothing() -> None:
    sessions, context = thinking()
    context.follow([*context.ids, *range(100, 200)])
    with pytest.raises(ArenaFull, match="needs 99 more tokens"):
        sessions.launch(context)

    assert sessions.pages.length(context.id) == len(context.ids) == 11
    assert context.flight is None


def cut(context: Context) -> None:
    context.follow(ANCHOR)


def slide(context: Context) -> None:
    context.slide(len(ANCHOR), 14)


def become_a_branch(context: Context) -> None:
    context.become(context.fork(ANCHOR))


def close(context: Context) -> None:
    context.close()


@pytest.mark.parametrize("let_go", [cut, slide, become_a_branch, close])
def test_pages_let_go_under_a_flight_are_given_to_nobody_until_it_is_back(let_go: Callable[[Context], None]) -> None:
    """Another session takes all that is free and is written at once; then the flight writes, as late as it can."""
    sessions, context = thinking()
    context.follow([*context.ids, *range(20, 30)])
    late = sessions.launch(context)
    let_go(context)
    neighbour = sessions.neighbour
    neighbour.follow([*ANCHOR, *range(50, 50 + PAGE_TOKENS * sessions.pages.free_count)])
    sessions.land(sessions.launch(neighbour))
    sessions.land(late, wanted=False)

    assert sessions.pages.retiring_count == 0
    assert sessions.held(neighbour) == neighbour.ids


@pytest.mark.parametrize("leaving", [True, False], ids=["on the way out", "on the way back"])
def test_a_lost_copy_is_cut_where_it_began_although_the_context_slid_meanwhile(leaving: bool) -> None:
    """Twenty tokens behind the anchor, the last eight away; the oldest four slide out while a copy is under way, and
    the copy fails. What is left was in the arena all the time; four lost tokens counted as held once.
    """
    spec = PartitionSpec("pages", PartitionKind.PAGES, PAGES, (FieldSpec("k", (2,)),), PAGE_TOKENS)
    host = SlotLedger(host_partition(spec, PAGES))
    pages = PageLedger(spec, host=host)
    context = Context(pages, pages.open(ONE), ())
    context.follow(ANCHOR)
    context.land(WorkId(1), context.launch(WorkId(1), steps=0, feed_max=99).tokens)
    pages.pin(context.id)
    context.follow([*ANCHOR, *range(20)])
    context.land(WorkId(2), context.launch(WorkId(2), steps=0, feed_max=99).tokens)
    assert len(context.offload(WorkId(3), pages_max=2)) == 2
    resident = len(context.ids) - context.away
    work = WorkId(3)
    if not leaving:
        context.moved(work, lost=False)
        work = WorkId(4)
        assert context.restore(work)
    context.slide(len(ANCHOR), 4)
    context.moved(work, lost=True)

    assert context.ids == [*ANCHOR, *range(4, resident - len(ANCHOR))]
    assert (pages.length(context.id), context.away) == (len(context.ids), 0)


def test_nothing_leaves_while_a_flight_still_writes() -> None:
    """A page copied now would be an image of keys that are not there yet."""
    spec = PartitionSpec("pages", PartitionKind.PAGES, PAGES, (FieldSpec("k", (2,)),), PAGE_TOKENS)
    pages = PageLedger(spec, host=SlotLedger(host_partition(spec, PAGES)))
    context = Context(pages, pages.open(ONE), ())
    context.follow(range(9))
    context.launch(WorkId(1), steps=0, feed_max=99)
    during = context.offload(WorkId(2), pages_max=9)
    context.land(WorkId(1), ())

    assert during == []
    assert len(context.offload(WorkId(2), pages_max=9)) == 3


def remembering(pages_max: int = PAGES) -> tuple[PageLedger, Context]:
    """An anchor of five, twenty tokens behind it, host memory beside it."""
    spec = PartitionSpec("pages", PartitionKind.PAGES, pages_max, (FieldSpec("k", (2,)),), PAGE_TOKENS)
    pages = PageLedger(spec, host=SlotLedger(host_partition(spec, PAGES)))
    context = Context(pages, pages.open(ONE), ())
    context.follow(ANCHOR)
    land_all(context, WorkId(1))
    pages.pin(context.id)
    context.follow([*ANCHOR, *range(20)])
    land_all(context, WorkId(2))
    return pages, context


def land_all(context: Context, work: WorkId) -> Feed:
    feed = context.launch(work, steps=0, feed_max=99)
    context._pages.fence_passed(FenceId(work))
    context.land(work, ())
    return feed


def test_what_slides_is_folded_by_the_next_launch_and_held_until_then() -> None:
    pages, context = remembering()
    before = array("q", pages.slots(context.id)).tolist()
    assert context.slide(len(ANCHOR), 8, keep=3) == 3
    held = pages.retiring_count
    context.follow([*ANCHOR, *[LONG_TERM] * 3, *range(8, 20), 77])
    feed = context.launch(WorkId(3), steps=0, feed_max=99)
    flying = pages.retiring_count
    pages.fence_passed(FenceId(3))
    context.land(WorkId(3), ())

    (fold,) = feed.folds
    assert array("q", fold.sources).tolist() == before[5:13]
    assert array("q", fold.target).tolist() == before[5:8]
    assert feed.tokens == (77,)
    assert context.ids == [*ANCHOR, *[LONG_TERM] * 3, *range(8, 20), 77]
    assert (held, flying, pages.retiring_count) == (1, 1, 0)


class Once(tuple[int, ...]):
    """Tokens that may be read from end to end a single time."""

    read = False

    def __iter__(self) -> Iterator[int]:
        assert not self.read, "the closed turns are read again"
        self.read = True
        return super().__iter__()


def test_one_more_word_reads_neither_the_closed_turns_nor_their_slots_again() -> None:
    """A conversation of 1200 tokens: each update feeds its own, and the launch's table shares its whole pieces."""
    spec = PartitionSpec("pages", PartitionKind.PAGES, 100, (FieldSpec("k", (1,)),), 16, 0, 0)
    pages = PageLedger(spec)
    context = Context(pages, pages.open(ONE), ())
    head = Once(range(1200))
    tables = []
    for words in range(1, 9):
        context.follow(range(5000, 5000 + words), head=head)
        feed = context.launch(WorkId(words), steps=0, feed_max=4096)
        context.land(WorkId(words), ())
        tables.append(feed.pieces)

    assert (feed.past, feed.tokens) == (1207, (5007,))
    assert [len(table) for table in tables] == [3] * 8
    assert len({id(piece) for table in tables for piece in table[:2]}) == 2
    assert context.ids == [*range(1200), *range(5000, 5008)]


def test_folds_gather_until_a_launch_takes_them_all() -> None:
    _, context = remembering()
    assert [context.slide(len(ANCHOR), 8, keep=3), context.slide(len(ANCHOR), 4, keep=3)] == [3, 3]
    context.follow([*ANCHOR, *[LONG_TERM] * 3, *range(12, 20), 77])
    feed = land_all(context, WorkId(3))

    assert [fold.first for fold in feed.folds] == [True, False]
    assert context.slide(len(ANCHOR), 2, keep=3) == 3  # too few for three groups: forgotten
    context.follow([*context.ids, 78])
    assert land_all(context, WorkId(4)).folds == ()


def test_what_waits_to_be_folded_is_forgotten_where_it_takes_the_room_of_what_is_said() -> None:
    """Seven pages, all in use: the launch that would free two of them needs one."""
    pages, context = remembering(7)
    context.slide(len(ANCHOR), 8, keep=3)
    context.follow([*ANCHOR, *[LONG_TERM] * 3, *range(8, 20), *range(70, 76)])
    feed = land_all(context, WorkId(3))

    assert feed.folds == ()
    assert len(context.ids) == 5 + 3 + 12 + 6
    pages.check()


def test_a_context_that_waits_to_fold_neither_leaves_nor_forks_and_closes_clean() -> None:
    pages, context = remembering()
    context.slide(len(ANCHOR), 8, keep=3)

    assert context.offload(WorkId(9), pages_max=9) == []
    assert not context.forkable
    context.close()
    assert pages.free_count == PAGES


def test_a_memory_that_is_away_is_given_up_when_the_context_must_slide() -> None:
    """It cannot be written where it is; what was said since is prefilled anew."""
    pages, context = remembering()
    context.slide(len(ANCHOR), 8, keep=4)
    context.follow([*context.ids, 77])
    land_all(context, WorkId(3))
    context.commit(len(context.ids))
    assert context.offload(WorkId(4), pages_max=9)
    context.moved(WorkId(4), lost=False)
    assert context.away > 13

    assert context.slide(len(ANCHOR), 4, keep=4) == 0
    assert (context.ids, context.want) == (list(ANCHOR), [*ANCHOR, *range(12, 20), 77])
    assert pages.length(context.id) == len(ANCHOR)


def test_a_flight_that_fails_after_a_fold_loses_its_own_tokens_only() -> None:
    """The context slid while the launch was out; what was held before it is still held, long-term tokens among it."""
    pages, context = remembering()
    context.follow([*context.ids, 77])
    context.launch(WorkId(3), steps=0, feed_max=99)
    context.slide(len(ANCHOR), 8, keep=3)
    pages.fence_passed(FenceId(3))
    context.abort(WorkId(3))

    assert context.ids == [*ANCHOR, *[LONG_TERM] * 3, *range(8, 20)]
    assert pages.length(context.id) == len(context.ids)
