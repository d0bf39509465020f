"""`duplexd bench memory`: what the bookkeeping of memory costs, and what it is worth to the default thinker.

1. Time is the thread's own processor time. Only what a figure names is inside it; putting things back is not.
2. What is compared is measured in turns within one run, so that whatever slows the machine slows both sides.
3. Each group of figures is one function that returns its part of the report; `GROUPS` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from statistics import mean, median, quantiles
from typing import Any

import msgspec

from duplexd.bench import thinking
from duplexd.bench.drift import measure_drift
from duplexd.clock import thread_time
from duplexd.engine.dialogue import Context, Exchange
from duplexd.engine.dialogue import Dialogue as Conversation
from duplexd.engine.process import load_plan
from duplexd.errors import LedgerError
from duplexd.ids import ContextId, FenceId, SessionId, WorkId
from duplexd.memory.classes import CacheClass
from duplexd.memory.eviction import GAP_WEIGHT, Candidate, EvictionIndex
from duplexd.memory.layout import FieldSpec, PartitionKind, PartitionSpec
from duplexd.memory.pages import PageLedger, Usage
from duplexd.units import NANOS_PER_SECOND, Nanos

PAGE_TOKENS = 16  #: as the default model's
CONTEXTS = {"1k": 1024, "8k": 8192, "32k": 32768}  #: tokens of a context
TURN_TOKENS = 64  #: the contexts are dialogues: what was said and what was heard, in turns of so many tokens
CUT_TOKENS = 256  #: unheard at the interruption, in every context
REPLY_TOKENS = 96  #: room that a context keeps for the reply
APPEND_TOKENS = 16  #: one update of what the person says
WORD_TOKENS = 4  #: heard at one report of the page
ROUNDS = 300
UPDATES = 100

SESSIONS = 10_000
TURNS_PER_CHOICE = 20  #: taken between two choices
CHOICES = 2_000
SORTS = 50  #: of them, also made by sorting
NEEDED_BYTES = 64 << 20  #: a choice is of two sessions or so


def bench() -> dict[str, Any]:
    """Run all groups; returns what `--json` writes."""
    report: dict[str, Any] = {}
    for group in GROUPS:
        report |= group()
    return report


# The page ledger -----------------------------------------------------------------------------------------------------


def ledger_figures(*, rounds: int = ROUNDS) -> dict[str, Any]:
    """What interruptions and growth cost at three lengths of the context: medians in us, the longest over the shortest.

    Fork, drop and promote count a reference of every page of the context, so their ratios grow with it; those of the
    others do not. They happen once an interruption (a false alarm drops the branch, a true one promotes it).
    """
    dialogues = {name: Dialogue(tokens) for name, tokens in CONTEXTS.items()}
    report: dict[str, Any] = {"tokens_cut": CUT_TOKENS, "tokens_appended": APPEND_TOKENS, "page_tokens": PAGE_TOKENS}
    for act, measured in ACTS.items():
        times: dict[str, list[Nanos]] = {name: [] for name in dialogues}
        for _ in range(rounds):
            for name, dialogue in dialogues.items():
                times[name].append(measured(dialogue))
        medians = {name: median(values) for name, values in times.items()}
        report[f"{act}_us"] = {name: _us(value) for name, value in medians.items()}
        report[f"{act}_ratio_32k_over_1k"] = round(medians["32k"] / medians["1k"], 2)
    return report


class Dialogue:
    """One context of a ledger of its own. Every measured act is undone, so that each round finds the same context."""

    def __init__(self, tokens: int) -> None:
        spec = PartitionSpec(
            "pages", PartitionKind.PAGES, tokens // PAGE_TOKENS + 64, (FieldSpec("k", (1,)),), PAGE_TOKENS
        )
        self._ledger = PageLedger(spec)
        self._context: ContextId = self._ledger.open(SessionId(1))
        self._tokens = tokens
        self._fence = FenceId(0)
        for turn in range(tokens // TURN_TOKENS):
            label = CacheClass.RECENT if turn % 2 else CacheClass.INGEST
            self._ledger.append(self._context, TURN_TOKENS, label)

    def usage(self) -> Usage:
        return self._ledger.usage()

    def cut(self) -> Nanos:
        """An interruption: what was generated and not heard goes, behind the fence of who may still write it."""
        self._ledger.append(self._context, CUT_TOKENS, CacheClass.CURRENT)
        self._fence = FenceId(self._fence + 1)
        began = thread_time()
        self._ledger.cut(self._context, self._tokens, after=self._fence)
        took = Nanos(thread_time() - began)
        self._ledger.fence_passed(self._fence)
        return took

    def append(self) -> Nanos:
        began = thread_time()
        self._ledger.append(self._context, APPEND_TOKENS, CacheClass.INGEST)
        took = Nanos(thread_time() - began)
        self._ledger.cut(self._context, self._tokens, after=None)
        return took

    def commit(self) -> Nanos:
        """A few words were heard, in the middle of what was generated."""
        self._ledger.append(self._context, CUT_TOKENS, CacheClass.CURRENT)
        self._ledger.commit(self._context, self._tokens + CUT_TOKENS // 2)
        began = thread_time()
        self._ledger.commit(self._context, self._tokens + CUT_TOKENS // 2 + WORD_TOKENS)
        took = Nanos(thread_time() - began)
        self._ledger.cut(self._context, self._tokens, after=None)
        return took

    def look(self) -> Nanos:
        """Pages and tokens by class are told again after an update."""
        self._ledger.usage()
        self._ledger.append(self._context, APPEND_TOKENS, CacheClass.INGEST)
        began = thread_time()
        self._ledger.usage()
        took = Nanos(thread_time() - began)
        self._ledger.cut(self._context, self._tokens, after=None)
        return took

    def fork(self) -> Nanos:
        began = thread_time()
        branch = self._ledger.fork(self._context, self._tokens)
        took = Nanos(thread_time() - began)
        self._ledger.close(branch, after=None)
        return took

    def drop(self) -> Nanos:
        """A false alarm: the branch goes."""
        branch = self._ledger.fork(self._context, self._tokens)
        began = thread_time()
        self._ledger.close(branch, after=None)
        return Nanos(thread_time() - began)

    def promote(self) -> Nanos:
        """A true interruption: the branch is the trunk from now on."""
        branch = self._ledger.fork(self._context, self._tokens)
        began = thread_time()
        self._ledger.promote(branch, self._context, after=None)
        return Nanos(thread_time() - began)


#: What is measured at each length.
ACTS: dict[str, Callable[[Dialogue], Nanos]] = {
    "cut": Dialogue.cut,
    "append": Dialogue.append,
    "commit": Dialogue.commit,
    "look": Dialogue.look,
    "fork": Dialogue.fork,
    "drop": Dialogue.drop,
    "promote": Dialogue.promote,
}


# An update of what the person says, as the engine makes it -----------------------------------------------------------


def update_figures(*, rounds: int = UPDATES) -> dict[str, Any]:
    """Two more words of the person in dialogues of three lengths: medians in us, the longest over the shortest.

    All that the engine does on its thread for them: what the dialogue says, what of it is new, whether a reply would
    find room behind it, slots for what is new, and the table for the launch. Nothing of it grows with what was said
    before the turn; only the new tokens are prefilled.
    """
    updates = {name: Update(tokens) for name, tokens in CONTEXTS.items()}
    times: dict[str, list[Nanos]] = {name: [] for name in updates}
    for _ in range(rounds):
        for name, update in updates.items():
            times[name].append(update.run())
    medians = {name: median(values) for name, values in times.items()}
    return {
        "update_us": {name: _us(value) for name, value in medians.items()},
        "update_ratio_32k_over_1k": round(medians["32k"] / medians["1k"], 2),
        "update_fed_tokens": max(update.fed for update in updates.values()),
    }


class Update:
    """A dialogue of the word clock and its context; every update is undone."""

    def __init__(self, tokens: int) -> None:
        pages = tokens // PAGE_TOKENS + 64
        spec = PartitionSpec("pages", PartitionKind.PAGES, pages, (FieldSpec("k", (1,)),), PAGE_TOKENS, pages)
        dialect = load_plan("clock", {"face": "none"}).dialect
        said = Exchange("", "", tuple(range(1000, 1000 + TURN_TOKENS)))
        self._dialogue = Conversation(dialect, exchanges=[said] * (tokens // TURN_TOKENS))
        self._dialogue.say("one")
        ledger = PageLedger(spec)
        self._context = Context(ledger, ledger.open(SessionId(1)), ())
        self._work = 0
        self._tokens_max = tokens + TURN_TOKENS
        self._launch()
        self.fed = 0

    def _launch(self) -> int:
        self._work += 1
        if self._dialogue.length > self._tokens_max:
            raise LedgerError("the bench's dialogue has outgrown its context")
        self._context.follow_dialogue(self._dialogue)
        if not self._context.may_grow(REPLY_TOKENS):
            raise LedgerError("the bench's context has no room for a reply")
        feed = self._context.launch(WorkId(self._work), steps=0, feed_max=1 << 20)
        self._context.land(WorkId(self._work), ())
        return len(feed.tokens)

    def run(self) -> Nanos:
        self._dialogue.say("one two three")
        began = thread_time()
        self.fed = self._launch()
        took = Nanos(thread_time() - began)
        self._dialogue.say("one")
        self._context.follow_dialogue(self._dialogue)
        return took


# Eviction ------------------------------------------------------------------------------------------------------------


def eviction_figures(
    *, sessions: int = SESSIONS, choices: int = CHOICES, sorts: int = SORTS, seed: int = 7
) -> dict[str, Any]:
    """One choice among many idle sessions by the index, and by sorting all of them, while people come and go."""
    crowd = Crowd(sessions, Random(seed))
    times: dict[str, list[Nanos]] = {"index_turn_us": [], "evict_us": [], "full_sort_us": []}
    chosen_count = 0
    for number in range(choices):
        turns = crowd.draw_turns(TURNS_PER_CHOICE)
        began = thread_time()
        crowd.take_turns(turns)
        told = thread_time()
        chosen = crowd.choose()
        times["evict_us"].append(Nanos(thread_time() - told))
        times["index_turn_us"].append(Nanos((told - began) // len(turns)))
        if number % max(1, choices // sorts) == 0:
            began = thread_time()
            crowd.choose_by_sorting()
            times["full_sort_us"].append(Nanos(thread_time() - began))
        crowd.evict(chosen)
        chosen_count += len(chosen)
    return {
        "sessions": sessions,
        "sessions_per_choice": round(chosen_count / choices, 1),
        **{
            name: {"mean": _us(mean(values)), "p90": _us(quantiles(values, n=10)[-1])} for name, values in times.items()
        },
    }


def _us(nanos: float) -> float:
    return round(nanos / 1000, 2)


class Turn(msgspec.Struct, frozen=True):
    """A session has spoken and is idle again while its reply plays."""

    session: SessionId
    gap: Nanos
    ends_at: Nanos
    resident_bytes: int


class _Candidate(msgspec.Struct):
    """An idle session as the plain version keeps it."""

    gap: Nanos
    ends_at: Nanos
    since: Nanos
    resident_bytes: int

    def next_use(self, now: Nanos) -> int:
        return max(0, self.ends_at - now) + max(self.gap, now - self.ends_at)


class Crowd:
    """People who listen, answer and fall silent in virtual time, told to the index and to a plain table."""

    def __init__(self, sessions: int, rng: Random) -> None:
        self._rng = rng
        self._sessions = sessions
        self._now = Nanos(0)
        self._index = EvictionIndex(
            reply_prior=Nanos(2 * NANOS_PER_SECOND), protected_bytes_max=0, sessions_max=sessions
        )
        self._table: dict[SessionId, _Candidate] = {}
        self.take_turns([self._draw(SessionId(number)) for number in range(sessions)])

    def draw_turns(self, count: int) -> list[Turn]:
        """A tenth of a second later: who has spoken meanwhile."""
        self._now = Nanos(self._now + NANOS_PER_SECOND // 10)
        return [self._draw(SessionId(self._rng.randrange(self._sessions))) for _ in range(count)]

    def _draw(self, session: SessionId) -> Turn:
        """Up to 10 s of silence before the words, up to 30 s of reply after them, 1 to 63 MiB of memory."""
        gap = Nanos(self._rng.randrange(10 * NANOS_PER_SECOND))
        ends_at = Nanos(self._now + self._rng.randrange(30 * NANOS_PER_SECOND))
        turn = Turn(session, gap, ends_at, self._rng.randrange(1, 64) << 20)
        known = self._table.get(session)
        average = gap if known is None else Nanos(known.gap + (gap - known.gap) // GAP_WEIGHT)
        self._table[session] = _Candidate(average, ends_at, self._now, turn.resident_bytes)
        return turn

    def take_turns(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            self._index.busy(turn.session)
            self._index.note_reply_gap(turn.session, turn.gap)
            self._index.note_playback(turn.session, turn.ends_at)
            self._index.idle(turn.session, turn.resident_bytes, self._now)

    def choose(self) -> list[Candidate]:
        return self._index.choose(NEEDED_BYTES, self._now)

    def choose_by_sorting(self) -> list[Candidate]:
        """The plain version: all candidates, sorted, from the front."""
        candidates = [item for item in self._table.items() if item[1].resident_bytes]
        candidates.sort(key=lambda item: (-item[1].next_use(self._now), item[1].since, item[0]))
        chosen: list[Candidate] = []
        missing = NEEDED_BYTES
        for session, candidate in candidates:
            if missing <= 0:
                break
            chosen.append(Candidate(session, candidate.resident_bytes))
            missing -= candidate.resident_bytes
        return chosen

    def evict(self, chosen: Sequence[Candidate]) -> None:
        for candidate in chosen:
            self._table[candidate.session].resident_bytes = 0
            self._index.resize(candidate.session, 0)


# Drift ---------------------------------------------------------------------------------------------------------------


def drift_figures() -> dict[str, Any]:
    """Relative error of attention after a window has slid a thousand times, in bfloat16."""
    drift = measure_drift(slides=1000, tokens=1024, seed=1)
    return {"drift": {"pre_rope": round(drift.pre_rope, 5), "post_rope": round(drift.post_rope, 5)}}


#: In the order of the report.
GROUPS: tuple[Callable[[], dict[str, Any]], ...] = (
    ledger_figures,
    update_figures,
    eviction_figures,
    thinking.figures,
    drift_figures,
)
