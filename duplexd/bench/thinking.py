"""What memory means for the default thinker: decoding together, coming back from host memory, going on after an
interruption. Part of `duplexd bench memory`.

1. Real weights, real arena, real ledgers, the stages' own code; no engine around them. One thread.
2. Everything compared is measured in turns within one run. Times are the thread's own processor time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from duplexd.clock import thread_time
from duplexd.engine.dialogue import Context
from duplexd.engine.process import load_plan
from duplexd.engine.stores import PAGES
from duplexd.ids import ChunkId, ConditionVersion, Epoch, SessionId, WorkId
from duplexd.memory.arena import Arena
from duplexd.memory.layout import ArenaLayout, host_partition
from duplexd.memory.ledger import SlotLedger
from duplexd.memory.pages import Move, PageLedger
from duplexd.streams.mover import Mover
from duplexd.streams.stage import Failed, MoveJob, Role, ThinkJob
from duplexd.units import Nanos

SESSIONS = 16  #: that decode together at most
CONTEXT_TOKENS = 192  #: of each of them
DECODED_TOKENS = 24
ROUNDS = 5

HISTORY_TOKENS = 640  #: of the session that leaves, or is interrupted
SAID_TOKENS = 12  #: the person's last words
UNHEARD_TOKENS = 32  #: thought and not heard at the interruption
ORDINARY = range(300, 12_300)  #: token ids that are ordinary words of every vocabulary of this size


class Mind:
    """The default thinker over an arena of its own, with host memory beside it."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        plan = load_plan("pocket", {"batch_max": str(SESSIONS)})
        thinker: Any = plan.build()[plan.need(Role.THINK).name]
        own = (thinker.shelf().name, PAGES, "workspace")
        layout = ArenaLayout([spec for spec in plan.partitions(SESSIONS) if spec.name in own])
        pages = layout.partitions[PAGES]
        host = host_partition(pages, pages.session_slots)
        arena = Arena(layout)
        self.thinker = thinker
        self.thinker.load(arena)
        self.mover = Mover(pages, host)
        self.mover.load(arena)
        self.pages = PageLedger(pages, host=SlotLedger(host))
        self.stop = plan.dialect.stop
        self.fed = 0  #: tokens prefilled since it was set to 0
        self._work = 0

    def open(self, session: int, tokens: Sequence[int]) -> Context:
        """A session that has heard and said so many tokens."""
        context = Context(self.pages, self.pages.open(SessionId(session)), ())
        context.follow(tokens)
        self.prefill(context)
        return context

    def close(self, *contexts: Context) -> None:
        for context in contexts:
            context.close()

    def prefill(self, context: Context) -> None:
        while context.behind:
            self.think([context], steps=0)
        context.commit(len(context.ids))

    def think(self, contexts: Sequence[Context], *, steps: int) -> list[tuple[int, ...]]:
        """One launch for all of them; the tokens each decoded."""
        jobs, works = [], []
        for context in contexts:
            self._work += 1
            works.append(WorkId(self._work))
            feed = context.launch(works[-1], steps=steps, feed_max=64)
            self.fed += len(feed.tokens)
            jobs.append(self._job(feed.slots, feed.past, feed.tokens, feed.steps))
        tokens = []
        for context, work, result in zip(contexts, works, self.thinker.run(jobs, None), strict=True):
            if isinstance(result, Failed):
                raise RuntimeError(result.reason)
            self.pages.fence_passed(work)  # type: ignore[arg-type]
            context.land(work, result.tokens)
            tokens.append(result.tokens)
        return tokens

    def _job(self, slots: bytes, past: int, feed: tuple[int, ...], steps: int) -> ThinkJob:
        return ThinkJob(SessionId(1), Epoch(0), ChunkId(0), ConditionVersion(0), slots, past, feed, steps)

    def offload(self, context: Context) -> None:
        self._work += 1
        moves = context.offload(WorkId(self._work), pages_max=self.pages.spec.count)
        self._move(context, moves, leaving=True)

    def restore(self, context: Context) -> None:
        self._work += 1
        self._move(context, context.restore(WorkId(self._work)) or [], leaving=False)

    def _move(self, context: Context, moves: Sequence[Move], *, leaving: bool) -> None:
        pairs = tuple((move.page, move.host) for move in moves)
        self.mover.run([MoveJob(SessionId(1), Epoch(0), ChunkId(0), ConditionVersion(0), leaving, pairs)], None)
        for ledger in (self.pages, self.pages.host):
            assert ledger is not None
            ledger.fence_passed(self._work)  # type: ignore[arg-type]
        context.moved(WorkId(self._work), lost=False)


def tokens_of(count: int, *, seed: int) -> list[int]:
    """Ordinary words in no order; what they mean costs nothing."""
    return [ORDINARY[(7919 * (seed + 1) * (index + 1)) % len(ORDINARY)] for index in range(count)]


def timed(act: Callable[[], object]) -> Nanos:
    began = thread_time()
    act()
    return Nanos(thread_time() - began)


def figures() -> dict[str, Any]:
    mind = Mind()
    return decode_figures(mind) | restore_figures(mind) | interruption_figures(mind)


# Decoding ------------------------------------------------------------------------------------------------------------


def decode_figures(mind: Mind, *, rounds: int = ROUNDS) -> dict[str, Any]:
    """Tokens a second of all sessions together: in one launch, one after the other, and by transformers' generate."""
    times: dict[str, list[float]] = {"1": [], "4": [], "16": [], "one_at_a_time": []}
    for number in range(rounds):
        contexts = [mind.open(session, tokens_of(CONTEXT_TOKENS, seed=number)) for session in range(1, SESSIONS + 1)]
        for name in times:
            count = SESSIONS if name == "one_at_a_time" else int(name)
            groups = [[c] for c in contexts] if name == "one_at_a_time" else [contexts[:count]]
            took = sum(_decode(mind, group) for group in groups)
            times[name].append(DECODED_TOKENS * count * 1e9 / took)
        mind.close(*contexts)
    report = {name: round(median(values), 1) for name, values in times.items()}
    return {
        "decode_tokens_per_s": report | {"transformers": transformers_tokens_per_s(mind.thinker.shape, rounds=rounds)}
    }


def _decode(mind: Mind, contexts: Sequence[Context]) -> Nanos:
    """Time to decode; the first token of the launch, which pays for reading the context, is not in it."""
    short = timed(lambda: mind.think(contexts, steps=1))
    whole = timed(lambda: mind.think(contexts, steps=1 + DECODED_TOKENS))
    for context in contexts:
        context.follow(tuple(context.ids))  # What was said is kept; the next launch goes on from there.
    return Nanos(whole - short)


def transformers_tokens_per_s(shape: Any, *, rounds: int) -> float | str:
    """One session by the library's own generate: a Llama of the same shape in bfloat16. Or why there is no figure."""
    try:
        import transformers
    except ImportError:
        return "not measured: transformers is not installed (it belongs to the extra `dev`)"
    import torch

    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    prompt = torch.tensor([tokens_of(CONTEXT_TOKENS, seed=0)])

    settings = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}

    def generate(count: int) -> None:
        model.generate(prompt, min_new_tokens=count, max_new_tokens=count, **settings)

    took = [timed(lambda: generate(DECODED_TOKENS + 1)) - timed(lambda: generate(1)) for _ in range(rounds)]
    return round(DECODED_TOKENS * 1e9 / median(took), 1)


# Coming back ---------------------------------------------------------------------------------------------------------


def restore_figures(mind: Mind, *, rounds: int = ROUNDS) -> dict[str, Any]:
    """From the last words to the first token of an answer, over the same with the context never away."""
    times: dict[str, list[Nanos]] = {"resident": [], "preload": [], "sync": [], "recompute": []}
    history, said = tokens_of(HISTORY_TOKENS, seed=1), tokens_of(SAID_TOKENS, seed=2)
    for _ in range(rounds):
        for name in times:
            context = mind.open(1, history)
            if name != "resident":
                mind.offload(context)
            if name == "preload":
                mind.restore(context)  # while the person was still speaking
            times[name].append(timed(lambda c=context, n=name: _answer(mind, c, history + said, n)))  # type: ignore[misc]
            mind.close(context)
    base = median(times.pop("resident"))
    return {
        "first_token_resident_ms": round(base / 1e6, 1),
        "restore_ratio": {name: round(median(values) / base, 2) for name, values in times.items()},
    }


def _answer(mind: Mind, context: Context, tokens: Sequence[int], way: str) -> None:
    if way == "sync":
        mind.restore(context)
    elif way == "recompute":
        context.follow(())  # Nothing was kept: all of it is prefilled anew.
    context.follow(tokens)
    while context.behind > 64:
        mind.think([context], steps=0)
    mind.think([context], steps=1)


# Going on after an interruption --------------------------------------------------------------------------------------


def interruption_figures(mind: Mind, *, rounds: int = ROUNDS) -> dict[str, Any]:
    """The turn after an interruption beside an ordinary one with the same history and the same new tokens."""
    history, said = tokens_of(HISTORY_TOKENS, seed=1), tokens_of(SAID_TOKENS, seed=2)
    ordinary, interrupted, again = [], [], []
    for _ in range(rounds):
        context = mind.open(1, history)
        ordinary.append(timed(lambda c=context: _answer(mind, c, history + said, "")))  # type: ignore[misc]
        mind.close(context)
        trunk = mind.open(1, history + tokens_of(UNHEARD_TOKENS, seed=3))
        branch = trunk.fork(history)  # the hold has told what was heard
        trunk = trunk.become(branch)  # and it was an interruption
        mind.fed = 0
        interrupted.append(timed(lambda c=trunk: _answer(mind, c, history + said, "")))  # type: ignore[misc]
        again.append(mind.fed - len(said))
        mind.close(trunk)
    return {
        "reprefilled_kept_tokens": max(again),
        "first_token_after_barge_in_ratio": round(median(interrupted) / median(ordinary), 2),
    }
