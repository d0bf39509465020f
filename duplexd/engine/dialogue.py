"""What was said, as the tokens the thinker must hold; and the context that holds them.

1. `Dialogue` is the truth: heard words only. `Context` follows it: whatever of its keys still fits is kept, the rest
   is cut.
2. A context is a block table over arena pages; the core decides every append and every cut, so that it can name the
   fence behind which a page becomes free.
3. What one more word costs does not grow with the conversation: all before the open turn is one value, made when a turn
   closes, and whoever has it already looks at the open turn alone.
4. Words spoken over a reply go to a branch forked at the last heard token (DESIGN §6): `advance` makes the branch the
   trunk, `resume` drops it; its words follow the reply then, as a turn that nobody answers.
   A turn that was guessed at grows on a branch forked at the trunk's end, until it has ended or come to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import chain

import msgspec

from duplexd.engine.utterance import join, newest
from duplexd.errors import ArenaFull
from duplexd.ids import ContextId, FenceId, WorkId
from duplexd.memory.classes import CacheClass
from duplexd.memory.guards import After
from duplexd.memory.pages import FoldTokens, Move, PageLedger
from duplexd.messages import PastTurn
from duplexd.streams.graph import Dialect

#: Stands for a token whose key is an average of what slid out (`compress`); it is in no vocabulary and never fed.
LONG_TERM = -1
OVERHEARD_MAX = 400  #: characters said over one reply that are remembered


#: What a branch takes for the words over one reply: its first page is its own, however few they are.
BRANCH_PAGES = 2


class Exchange(msgspec.Struct, frozen=True):
    """One closed turn of the person and what was heard of the reply."""

    user: str
    reply: str
    tokens: tuple[int, ...]
    response: int = 0  #: the reply's id; 0: it was told, not said
    sight: bool | None = None  #: no turn, but that the person came into view (True) or left it (False)
    overheard: bool = False  #: words over the reply before, which they did not interrupt

    @property
    def is_turn(self) -> bool:
        return self.sight is None and not self.overheard


class Dialogue:
    """Tokens of a conversation in which the character remembers only what was heard."""

    def __init__(
        self,
        dialect: Dialect,
        *,
        exchanges: Sequence[Exchange] = (),
        long_term: int = 0,
        instructions: str = "",
        in_view: bool = False,
    ) -> None:
        self._dialect = dialect
        self.anchor = tuple(dialect.anchor())
        self.instructions = instructions  #: of the client, behind the model's own anchor
        self._instructed = self._instruction(instructions)
        self.exchanges: tuple[Exchange, ...] = tuple(exchanges)  #: replaced, never changed: see `closed`
        self.long_term = long_term  #: tokens behind the anchor that what slid out was folded into
        self.in_view = in_view  #: the person, as it is now; told between turns
        self.user = ""  #: words of the open turn
        self.user_open = False
        self.replying = False
        self.reply: list[int] = []  #: tokens of the open reply
        self._overheard = ""  #: words over the open reply; they stand behind it once it is over
        self._closed: _Closed | None = None

    # the person ----------------------------------------------------------------------------------------------------

    def see(self, *, present: bool) -> bool:
        """The person has come into view or left it. True when that is told now; within a turn it is told after it."""
        self.in_view = present
        return self._tell_sight()

    def _tell_sight(self) -> bool:
        """Only what has changed since it was told last: somebody who came and went unspoken to was not there."""
        if self.user_open or self.replying:
            return False
        before = self.exchanges
        exchanges = before[:-1] if before and before[-1].sight is not None else before
        if _told_in_view(exchanges) != self.in_view and (tokens := self._dialect.sight(present=self.in_view)):
            exchanges = (*exchanges, Exchange("", "", tuple(tokens), sight=self.in_view))
        if exchanges == before:
            return False
        self.exchanges = exchanges
        return True

    def say(self, words: str) -> None:
        """The words of the open turn are these; opens a turn if none is."""
        self.user, self.user_open = words, True

    def close_user(self) -> None:
        """The turn has ended and the reply begins."""
        self.replying, self.reply = True, []

    def overhear(self, words: str) -> None:
        """These words were said over the open reply and did not interrupt it. Bound: the newest `OVERHEARD_MAX`."""
        self._overheard = newest(join(self._overheard, words), OVERHEARD_MAX)

    # the character -------------------------------------------------------------------------------------------------

    def think(self, tokens: Sequence[int]) -> None:
        self.reply.extend(tokens)

    def finish_reply(self, *, kept: int, text: str, response: int = 0) -> None:
        """The reply is over and its first `kept` tokens (which say `text`) were heard.

        Nothing heard: there was no reply, and the person's turn is open again (field case T-BI-14).
        """
        if not self.replying:
            return
        self.replying = False
        overheard, self._overheard = self._overheard, ""
        if kept == 0:
            self.user, self.reply = join(self.user, overheard), []
            return
        tokens = [*self._user_tokens(), *self._dialect.close_user_open_reply(), *self.reply[:kept]]
        tokens += self._dialect.close_reply()
        self._add(Exchange(self.user, text, tuple(tokens), response))
        self.user, self.user_open, self.reply = "", False, []
        if overheard:
            tokens = [*self._dialect.open_user(), *self._dialect.words(overheard, first=True)]
            tokens += self._dialect.close_reply()
            self._add(Exchange(overheard, "", tuple(tokens), overheard=True))
        self._tell_sight()

    def _add(self, exchange: Exchange) -> None:
        self.exchanges = (*self.exchanges, exchange)

    # the client ----------------------------------------------------------------------------------------------------

    def instruct(self, text: str) -> None:
        """These instructions hold from now on; "": none but the model's own."""
        self.instructions = text
        self._instructed = self._instruction(text)

    def head_with(self, instructions: str) -> int:
        """Tokens before the first exchange, if these were the instructions."""
        return len(self.anchor) + self.long_term + len(self._instruction(instructions))

    @property
    def instructed_tokens(self) -> int:
        """Tokens of the client's instructions."""
        return len(self._instructed)

    def _instruction(self, text: str) -> tuple[int, ...]:
        return tuple(self._dialect.instruct(text)) if text else ()

    def recast(self, turns: Sequence[PastTurn]) -> None:
        """The closed exchanges are these; those the two have in common keep their tokens, and so their keys."""
        kept = 0
        told = [exchange for exchange in self.exchanges if exchange.is_turn]
        while kept < min(len(turns), len(told)) and _says(told[kept], turns[kept]):
            kept += 1
        self.exchanges = (*told[:kept], *(self._told(turn.user, turn.reply) for turn in turns[kept:]))
        self._tell_sight()

    def _told(self, user: str, reply: str) -> Exchange:
        words = self._dialect.words
        tokens = [*self._dialect.open_user(), *words(user, first=True), *self._dialect.close_user_open_reply()]
        tokens += [*words(reply, first=True), *self._dialect.close_reply()]
        return Exchange(user, reply, tuple(tokens))

    def correct(self, response: int, user: str, *, tokens: Sequence[int], text: str) -> bool:
        """A reply that has ended was heard as `tokens`, which say `text`; its turn was `user`.

        Nothing heard: its words join what the person said next. False when it is not remembered at all.
        """
        index = next((i for i, e in enumerate(self.exchanges) if e.response == response), None)
        if index is None:
            return self._remember(response, user, tokens, text)
        exchange, later = self.exchanges[index], list(self.exchanges[index + 1 :])
        if tokens:
            later.insert(0, self._said(exchange.user, response, tokens, text))
        elif (after := next((i for i, e in enumerate(later) if e.is_turn), None)) is not None:
            later[after] = self._rejoined(exchange.user, later[after])
        else:
            self.say(f"{exchange.user} {self.user}".strip())
        self.exchanges = (*self.exchanges[:index], *later)
        return True

    def _remember(self, response: int, user: str, tokens: Sequence[int], text: str) -> bool:
        """Of this reply nothing was thought to be heard, so its turn is open still; and something was heard."""
        if not tokens or self.replying or not self.user_open or not self.user.startswith(user):
            return False
        self._add(self._said(user, response, tokens, text))
        self.user = self.user[len(user) :].strip()
        self.user_open = bool(self.user)
        return True

    def _said(self, user: str, response: int, reply: Sequence[int], text: str) -> Exchange:
        tokens = [*self._dialect.open_user(), *self._dialect.words(user, first=True)]
        tokens += [*self._dialect.close_user_open_reply(), *reply, *self._dialect.close_reply()]
        return Exchange(user, text, tuple(tokens), response)

    def _rejoined(self, user: str, after: Exchange) -> Exchange:
        before = len(self._dialect.open_user()) + len(self._dialect.words(after.user, first=True))
        whole = f"{user} {after.user}".strip()
        head = [*self._dialect.open_user(), *self._dialect.words(whole, first=True)]
        return Exchange(whole, after.reply, (*head, *after.tokens[before:]), after.response)

    def forget_words(self, count: int) -> bool:
        """Forget the first words of the open turn; False when it has no more than `count`."""
        words = self.user.split()
        if not self.user_open or len(words) <= count:
            return False
        self.user = " ".join(words[count:])
        return True

    def forget_turn(self) -> None:
        """The open turn came to nothing."""
        self.user, self.user_open = "", False
        self._tell_sight()

    # tokens --------------------------------------------------------------------------------------------------------

    def tokens(self) -> list[int]:
        """All of them. O(conversation)."""
        return [*self.closed, *self.open_tokens()]

    @property
    def closed(self) -> tuple[int, ...]:
        """Tokens before the open turn: the same object until they change. O(conversation) when they have, else O(1)."""
        return self._close().tokens

    def _close(self) -> _Closed:
        known = self._closed
        # Values that are replaced and never changed are told apart by who they are, not by what is in them.
        if (
            known is None
            or known.exchanges is not self.exchanges
            or known.instructed is not self._instructed
            or known.long_term != self.long_term
        ):
            said = chain.from_iterable(exchange.tokens for exchange in self.exchanges)
            tokens = (*self.anchor, *[LONG_TERM] * self.long_term, *self._instructed, *said)
            known = self._closed = _Closed(self.exchanges, self._instructed, self.long_term, tokens)
        return known

    def open_tokens(self) -> list[int]:
        """Tokens of the open turn and the open reply, which follow `closed`."""
        tokens = self._user_tokens()
        if self.replying:
            tokens += self._dialect.close_user_open_reply()
            tokens += self.reply
        return tokens

    @property
    def length(self) -> int:
        """Tokens of all. O(open turn)."""
        return len(self.closed) + len(self.open_tokens())

    def _user_tokens(self) -> list[int]:
        if not self.user_open:
            return []
        return [*self._dialect.open_user(), *self._dialect.words(self.user, first=True)]

    def interrupted(self, *, kept: int, text: str) -> Dialogue:
        """What this dialogue would be if the reply ended here."""
        other = self.past()
        other.user, other.user_open = self.user, self.user_open
        other.replying, other.reply = self.replying, list(self.reply)
        other._overheard = self._overheard
        other.finish_reply(kept=kept, text=text)
        return other

    def supposing(self, words: str) -> Dialogue:
        """What this dialogue would be if the open turn ended with these words."""
        other = self.past()
        other.say(words)
        other.close_user()
        return other

    def past(self) -> Dialogue:
        """What is closed of it: the instructions, the exchanges and what those before them were folded into."""
        self._close()  # One value for both: a branch that is told of such a past again knows it.
        past = copy(self)
        past.user, past.user_open, past.replying, past.reply = "", False, False, []
        past._overheard = ""
        return past

    def slide(self, at_least: int = 1) -> int:
        """Forget the oldest exchanges, until so many tokens have gone or none is left. Returns how many have gone."""
        gone = count = 0
        while gone < at_least and count < len(self.exchanges):
            gone += len(self.exchanges[count].tokens)
            count += 1
        self.exchanges = self.exchanges[count:]
        return gone


class _Closed(msgspec.Struct, frozen=True):
    """What is closed of a dialogue, and what it was made of."""

    exchanges: tuple[Exchange, ...]
    instructed: tuple[int, ...]
    long_term: int
    tokens: tuple[int, ...]


def _told_in_view(exchanges: Sequence[Exchange]) -> bool:
    return next((e.sight for e in reversed(exchanges) if e.sight is not None), False)


def _says(exchange: Exchange, turn: PastTurn) -> bool:
    return exchange.user == turn.user and exchange.reply == turn.reply


class Feed(msgspec.Struct, frozen=True):
    """One launch on a context: what to append and where everything lies."""

    pieces: tuple[bytes, ...]  #: of the table, as the ledger gives them (`PageLedger.slot_pieces`)
    past: int
    tokens: tuple[int, ...]
    steps: int
    folds: tuple[FoldTokens, ...] = ()


class Context:
    """Keys of one token sequence in the arena, kept a prefix of what the dialogue wants."""

    def __init__(self, pages: PageLedger, context: ContextId, ids: Sequence[int]) -> None:
        self._pages = pages
        self.id = context
        self.ids: list[int] = list(ids)  #: tokens whose keys are in the arena or being written
        self.want: list[int] = list(ids)
        self._head: tuple[int, ...] = ()  #: `want` begins with these; the value it was told of, not a copy
        self._agreed = len(self.ids)  #: so many of the first `ids` are known to be those of `want`
        self.flight: WorkId | None = None
        self.moving: WorkId | None = None  #: a copy between the arena and host memory under way
        self._reserved = 0
        self._resident = 0  #: tokens that were resident when a restore began
        self._past = len(self.ids)  #: tokens before the flight
        self._folds: list[FoldTokens] = []  #: for the next launch to carry out

    def follow_dialogue(self, dialogue: Dialogue) -> None:
        """The context shall hold what the dialogue says. Cost: O(open turn); O(conversation) when a turn has closed."""
        self.follow(dialogue.open_tokens(), head=dialogue.closed)

    def follow(self, tokens: Sequence[int], *, head: tuple[int, ...] = ()) -> None:
        """The context shall hold `head` and then `tokens`; keys past the common prefix are cut behind the fence of the
        flight.

        Args:    head: the very value of the last time (not an equal one) is not read again.
        """
        if head is self._head:
            self._agreed = min(self._agreed, len(head))
            self.want[len(head) :] = tokens
        else:
            self._head, self._agreed = head, 0
            self.want = [*head, *tokens]
        start = self._agreed
        self._agreed = start + common_prefix(self.ids[start:], self.want[start : len(self.ids)])
        if self._agreed < len(self.ids):
            self._forget(self._agreed)

    @property
    def fences(self) -> tuple[FenceId, ...]:
        """What may still write this context's pages."""
        return tuple(FenceId(work) for work in (self.flight, self.moving) if work is not None)

    @property
    def away(self) -> int:
        """Tokens in host memory."""
        return self._pages.away_length(self.id)

    @property
    def readable(self) -> bool:
        """All of it is in the arena and no copy is under way."""
        return self.moving is None and not self.away

    @property
    def settled(self) -> bool:
        """Nothing writes it, moves it or waits to be folded: its pages may leave."""
        return self.flight is None and self.moving is None and not self._folds

    @property
    def forkable(self) -> bool:
        """A branch would share nothing that is still to be folded or brought back."""
        return self.readable and not self._folds

    @property
    def behind(self) -> int:
        """Tokens wanted that no key exists for."""
        return len(self.want) - len(self.ids)

    def may_grow(self, tokens: int) -> bool:
        """Whether its bounds leave room for what is wanted, so many tokens more and a branch for words over a reply. No
        more than a quarter of the whole is kept free for these, or a small context would remember nothing.
        """
        size = self._pages.spec.page_tokens
        whole = (self._pages.spec.session_slots or self._pages.pages_max) * size
        return self._pages.may_grow(self.id, self.behind + min(tokens + BRANCH_PAGES * size, whole // 4))

    def launch(self, work: WorkId, *, steps: int, feed_max: int, label: CacheClass = CacheClass.INGEST) -> Feed:
        """Append the next tokens (and room for `steps` decoded ones). Raises ArenaFull and appends nothing when short.

        Decoding needs a token to begin with: when none is new (a reply is begun anew), the newest is fed again.
        """
        if steps and not self.behind:
            self._drop(len(self.ids) - 1, after=self.fences)
        feed = tuple(self.want[len(self.ids) : len(self.ids) + feed_max])
        steps = steps if len(self.ids) + len(feed) == len(self.want) else 0
        room = max(0, steps - 1)
        if not self._append(len(feed) + room, label):
            why = self._pages.refusal.value if self._pages.refusal else "refused"
            raise ArenaFull(f"context {self.id} needs {len(feed) + room} more tokens: {why}")
        past = self._past = len(self.ids)
        self.ids += feed
        self.flight, self._reserved = work, room
        folds, self._folds = tuple(self._folds), []
        self._pages.rename_fence(self._next_launch, FenceId(work))
        return Feed(pieces=self._pages.slot_pieces(self.id), past=past, tokens=feed, steps=steps, folds=folds)

    def _append(self, tokens: int, label: CacheClass) -> bool:
        if self._pages.append(self.id, tokens, label):
            return True
        if not self._folds:
            return False
        # What waits to be folded holds pages: rather than wait for itself for ever, the context forgets it.
        self._forget_folds()
        return self._pages.append(self.id, tokens, label)

    def _forget_folds(self) -> None:
        self._folds.clear()
        self._pages.fence_passed(self._next_launch)

    def land(self, work: WorkId, tokens: Sequence[int]) -> None:
        """The flight came back with decoded tokens; the last of them has no key yet. A stale flight changes nothing."""
        if work != self.flight:
            return
        self.flight = None
        written = tokens[:-1][: self._reserved]
        self.ids += written
        if self._reserved > len(written):
            self._pages.cut(self.id, len(self.ids), after=None)
        self._reserved = 0

    def abort(self, work: WorkId) -> None:
        """The flight failed: what it should have written was not, so none of it stays."""
        if work == self.flight:
            self.flight, self._reserved = None, 0
            self._drop(min(self._past, len(self.ids)), after=None)

    def offload(self, work: WorkId, *, pages_max: int) -> list[Move]:
        """Let the last pages leave under a copy named `work`; none while something else is under way or waits."""
        if not self.settled:
            return []
        moves = self._pages.offload(self.id, pages_max=pages_max, fence=FenceId(work))
        if moves:
            self.moving, self._resident = work, len(self.ids) - self.away
        return moves

    def restore(self, work: WorkId) -> list[Move] | None:
        """Take all of it back under a copy named `work`; None when pages are short."""
        resident = len(self.ids) - self.away
        moves = self._pages.restore(self.id, fence=FenceId(work))
        if moves:
            self.moving, self._resident = work, resident
        return moves

    def moved(self, work: WorkId, *, lost: bool) -> None:
        """The copy has ended. What a failed one carried is lost: it is cut here and prefilled again."""
        if work != self.moving:
            return
        self.moving = None
        if lost and self._resident < len(self.ids):
            self._drop(self._resident, after=None)

    def commit(self, upto: int) -> None:
        """Tokens below `upto` were heard or said: CURRENT -> RECENT."""
        self._pages.commit(self.id, min(upto, len(self.ids)))

    def fork(self, tokens: Sequence[int]) -> Context:
        """A branch that shares every key it has in common with `tokens`.

        Keys in flight are not shared: should the flight fail, the branch would read slots that nobody ever wrote. Only
        a context that is `forkable` is forked: the branch would not wait for the copy that brings its pages back.
        """
        kept = common_prefix(self.ids, tokens)
        if self.flight is not None:
            kept = min(kept, self._past)
        branch = Context(self._pages, self._pages.fork(self.id, kept), self.ids[:kept])
        branch.want = list(tokens)
        return branch

    def become(self, branch: Context) -> Context:
        """Advance: the branch is the trunk from now on, under the trunk's id. Returns the branch; this one is spent."""
        self._pages.promote(branch.id, self.id, after=self.fences)
        branch.id = self.id
        self.flight = None  # What still flies for the old trunk lands nowhere; its pages wait behind its fence.
        return branch

    def slide(self, anchor: int, drop: int, *, skip: int = 0, keep: int = 0) -> int:
        """Forget `drop` tokens after the anchor; those that stay are renumbered when they are read.

        Args:    skip: tokens behind anchor and long-term tokens that stay where they are, such as instructions.
                 keep: long-term tokens that what leaves is folded into by the next launch; 0: it is forgotten.
        Returns: how many long-term tokens the context has now; `drop` does not count them.
        """
        start = anchor + self.long_term + skip
        if self.long_term and len(self.ids) - self.away < anchor + self.long_term:
            # What was compressed is away itself. It is given up, and what is wanted is prefilled anew.
            self._forget(anchor)
            self.want = [token for token in self.want if token != LONG_TERM]
            self._want_without(anchor + skip, drop)
            return 0
        held = max(0, min(drop, len(self.ids) - start))
        if held:
            self._pages.commit(self.id, start + held)
            if keep and held >= keep and self.readable:
                return self._compress(anchor, held, drop, skip=skip, keep=keep)
            self._pages.slide(self.id, held, skip=skip, after=self.fences)
            self._slid(start, held)
        self._want_without(start, drop)
        return self.long_term

    def _compress(self, anchor: int, held: int, drop: int, *, skip: int, keep: int) -> int:
        start = anchor + self.long_term + skip
        made = [LONG_TERM] * (keep if not self.long_term else 0)
        fences = (*self.fences, self._next_launch)
        self._folds.append(self._pages.compress(self.id, held, keep=keep, skip=skip, after=fences))
        self._slid(start, held)
        self._want_without(start, drop)
        self.ids[anchor:anchor] = self.want[anchor:anchor] = made
        self._past += len(made)
        self._resident += len(made)
        return keep

    def _want_without(self, start: int, drop: int) -> None:
        """So many tokens from `start` on are wanted no more. Whatever was agreed is looked at again."""
        del self.want[start : start + drop]
        self._head, self._agreed = (), 0

    def _slid(self, start: int, held: int) -> None:
        del self.ids[start : start + held]
        self._past = _index_after(self._past, start, held)
        self._resident = _index_after(self._resident, start, held)

    def prefill_anew(self) -> bool:
        """Drop all keys but anchors and long-term tokens, if those that follow lie on more pages than they need. False,
        and nothing has changed, if they do not.
        """
        if not self._pages.lies_scattered(self.id):
            return False
        self._forget(self._pages.pinned_length(self.id) + self.long_term)
        return True

    def _forget(self, at: int) -> None:
        self._drop(at, after=self.fences)
        self._reserved = 0

    def _drop(self, at: int, *, after: After) -> None:
        self._pages.cut(self.id, at, after=after)
        del self.ids[at:]
        self._agreed = min(self._agreed, at)

    @property
    def long_term(self) -> int:
        """Tokens that hold what was compressed."""
        return self.ids.count(LONG_TERM)

    @property
    def _next_launch(self) -> FenceId:
        """Stands for the next launch's fence until that has a name; no launch has a negative one."""
        return FenceId(-self.id)

    def close(self) -> None:
        self._pages.close(self.id, after=self.fences)
        self._forget_folds()
        self.flight = self.moving = None


def _index_after(index: int, start: int, held: int) -> int:
    """Where a token stands once `held` tokens from `start` on have left."""
    return index if index <= start else max(start, index - held)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    # A tuple never equals a list, whatever they hold; and a context is long, so what is a list already is not copied.
    left = left if isinstance(left, list) else list(left)
    right = right if isinstance(right, list) else list(right)
    length = min(len(left), len(right))
    if (left if len(left) == length else left[:length]) == (right if len(right) == length else right[:length]):
        return length
    low, high = 0, length
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
