"""Random histories of contexts over a real ledger and arena, and what the next logits should be, from scratch.

A token's keys were made from what it saw when it was computed, at the positions of that moment. So the whole truth
about a context is: every token that took part, and for each the positions of all it saw. A model is asked for it
without any cache: all tokens at once, those long slid away included.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor

from duplexd.ids import ContextId, SessionId
from duplexd.memory.arena import Arena
from duplexd.memory.classes import CacheClass
from duplexd.memory.layout import ArenaLayout, PartitionKind, PartitionSpec
from duplexd.memory.pages import PageLedger
from duplexd.models.pocket.decoder import Decoder
from duplexd.models.transformers_decoder import TransformersDecoder
from duplexd.streams.attention import PAGES, WORKSPACE, Attention, Rotary, Row

PLACES = 2


class Memory:
    """An arena full of NaN and its ledger; what is freed becomes NaN again."""

    def __init__(self, attention: Attention, *, pages: int = 24, page_tokens: int = 4) -> None:
        spec = PartitionSpec(
            PAGES, PartitionKind.PAGES, pages, attention.page_fields(), page_tokens=page_tokens, session_slots=pages
        )
        self.arena = Arena(ArenaLayout([spec, attention.workspace(PLACES)]))
        self.arena.fill_nan(PAGES, range(spec.rows))
        self.arena.fill_nan(WORKSPACE, range(PLACES))
        self.ledger = PageLedger(spec, pages_max=14, contexts_max=5, freed=self.arena.fill_nan)
        attention.load(self.arena)

    def slots(self, context: ContextId) -> list[int]:
        return array("q", self.ledger.slots(context)).tolist()


def append(
    decoder: Decoder | TransformersDecoder, rows: Sequence[Row], tokens: Sequence[Sequence[int]], *, first: int
) -> list[Tensor]:
    """Jobs of one launch: `first` tokens of each in one forward, the rest in a second. Hidden states at the ends."""
    for row in rows:
        decoder.attention.recall(row)
    parts = [min(first, len(feed)) for feed in tokens]
    begun = [Row(row.slots, row.past, part, row.place) for row, part in zip(rows, parts, strict=True)]
    states = decoder.forward(begun, [feed[:part] for feed, part in zip(tokens, parts, strict=True)], states=True)
    assert states is not None
    ends = list(states)
    more = [index for index, feed in enumerate(tokens) if len(feed) > first]
    if more:
        rest = [begun[index].then(len(tokens[index]) - first) for index in more]
        states = decoder.forward(rest, [tokens[index][first:] for index in more], states=True)
        assert states is not None
        for index, state in zip(more, states, strict=True):
            ends[index] = state
    for row in rows:
        decoder.attention.keep(row)
    return ends


def dense_attention(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, rotary: Rotary) -> Tensor:
    """Attention by definition: query i sees key j at position seen[i, j], or not at all when that is negative.

    Args:    queries (n, heads, head_dim), keys and values (n, kv_heads, head_dim), not rotated; seen (n, n).
    """
    count, group = len(queries), queries.shape[1] // keys.shape[1]
    turned = rotary.turn(queries, rotary.table[seen.diagonal()][:, None])
    everywhere = keys.expand(count, *keys.shape)
    everywhere = rotary.turn(everywhere, rotary.table[seen.clamp(min=0)][:, :, None]).repeat_interleave(group, 2)
    scores = torch.einsum("ihd,ijhd->hij", turned, everywhere) / queries.shape[-1] ** 0.5
    weights = scores.masked_fill(seen < 0, float("-inf")).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, values.repeat_interleave(group, 1)).flatten(1)


def causal(count: int) -> Tensor:
    """What the tokens of an ordinary text see."""
    at = torch.arange(count)
    return torch.where(at <= at[:, None], at, -1)


class Histories(RuleBasedStateMachine):
    """Contexts are opened, extended two at a time, cut, slid, pinned, forked, promoted and closed; each extension ends
    in the logits of a computation from scratch. Subclasses name the model."""

    decoder: Decoder | TransformersDecoder
    logits: Callable[[Tensor], Tensor]
    from_scratch: Callable[[list[int], Tensor], Tensor]  #: tokens, seen -> logits of all of them
    vocabulary: int

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(type(self).decoder.attention)
        self.ledger = self.memory.ledger
        self.tokens: list[int] = []  # every token ever computed
        self.saw: list[list[int]] = []  # what each of them saw, itself last
        self.tables: dict[ContextId, list[int]] = {}  # tokens of each context

    def draw(self, data: st.DataObject) -> ContextId:
        return data.draw(st.sampled_from(list(self.tables)))

    @initialize(data=st.data(), pinned=st.booleans())
    def begin(self, data: st.DataObject, pinned: bool) -> None:
        self.tables[self.ledger.open(SessionId(1))] = []
        self.extend(data, 3)
        if pinned:
            self.pin(data)

    @precondition(lambda self: len(self.tables) < 5)
    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        prefix = data.draw(st.sampled_from([None, *self.tables]))
        context = self.ledger.open(SessionId(1), prefix=prefix)
        self.tables[context] = [] if prefix is None else self.tables[prefix][: self.ledger.pinned_length(prefix)]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        self.extend(data, 1)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), first=st.integers(1, 4))
    def extend(self, data: st.DataObject, first: int) -> None:
        contexts = st.lists(st.sampled_from(list(self.tables)), min_size=1, max_size=PLACES, unique=True)
        self.grow(data, data.draw(contexts), first)

    def grow(self, data: st.DataObject, contexts: Sequence[ContextId], first: int = 1) -> None:
        """One launch for all that have room; its logits are checked."""
        feed = st.lists(st.integers(0, self.vocabulary - 1), min_size=1, max_size=7)
        extended, feeds, rows = [], [], []
        for context in contexts:
            tokens = data.draw(feed)
            past = self.ledger.length(context)
            if self.ledger.append(context, len(tokens), CacheClass.RECENT):
                rows.append(Row(self.ledger.slots(context), past, len(tokens), len(rows)))
                feeds.append(tokens)
                extended.append(context)
                self.note(context, tokens)
        if not rows:
            return
        with torch.inference_mode():
            ends = append(type(self).decoder, rows, feeds, first=first)
            for context, state in zip(extended, ends, strict=True):
                actual = type(self).logits(state[None])[0]
                torch.testing.assert_close(actual, self.truth(context), rtol=0, atol=1e-9)

    def note(self, context: ContextId, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tables[context].append(len(self.tokens))
            self.tokens.append(token)
            self.saw.append(list(self.tables[context]))

    def truth(self, context: ContextId) -> Tensor:
        """Logits after the last token, from every token that had a part in it."""
        involved = {self.tables[context][-1]}
        for index in range(len(self.tokens) - 1, -1, -1):
            if index in involved:
                involved.update(self.saw[index])
        order = {token: place for place, token in enumerate(sorted(involved))}
        seen = torch.full((len(order), len(order)), -1)
        for token, place in order.items():
            seen[place, [order[other] for other in self.saw[token]]] = torch.arange(len(self.saw[token]))
        return type(self).from_scratch([self.tokens[token] for token in order], seen)[-1]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        context = self.draw(data)
        at = data.draw(st.integers(self.ledger.pinned_length(context), self.ledger.length(context)))
        self.ledger.cut(context, at, after=None)
        del self.tables[context][at:]
        self.grow(data, [context])

    @precondition(lambda self: any(len(table) > 2 for table in self.tables.values()))
    @rule(data=st.data())
    def slide(self, data: st.DataObject) -> None:
        context = data.draw(st.sampled_from([one for one, table in self.tables.items() if len(table) > 2]))
        pinned = self.ledger.pinned_length(context)
        drop = data.draw(st.integers(0, self.ledger.length(context) - pinned))
        self.ledger.slide(context, drop)
        del self.tables[context][pinned : pinned + drop]
        self.grow(data, [context])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        self.ledger.pin(self.draw(data))

    @precondition(lambda self: self.tables and len(self.tables) < 5)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        context = self.draw(data)
        at = data.draw(st.integers(self.ledger.pinned_length(context), self.ledger.length(context)))
        branch = self.ledger.fork(context, at)
        self.tables[branch] = self.tables[context][:at]
        self.grow(data, [branch, context])

    @precondition(lambda self: len(self.tables) > 1)
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        branch, trunk = data.draw(st.permutations(list(self.tables)))[:2]
        pinned = self.memory.slots(trunk)[: self.ledger.pinned_length(trunk)]
        if self.memory.slots(branch)[: len(pinned)] == pinned:
            self.ledger.promote(branch, trunk, after=None)
            self.tables[trunk] = self.tables.pop(branch)
            self.grow(data, [trunk])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        context = self.draw(data)
        self.ledger.close(context, after=None)
        del self.tables[context]
