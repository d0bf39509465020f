"""What memory means for the default thinker: decoding together, coming back from host memory, going on after an
interruption. Part of `duplexd bench memory`.

1. Real weights, real arena, real ledgers, the stages' own code; no engine around them. One thread.
2. Everything compared is measured in turns within one run. Times are the thread's own processor time; where it waits
   for a copy on another thread, that wait counts as well.
3. A preload is judged by the engine's own test, with the pace that was measured, and copies beside a thinker at work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from threading import Thread
from typing import Any

from duplexd import clock
from duplexd.clock import thread_time
from duplexd.engine.dialogue import Context
from duplexd.engine.process import load_plan
from duplexd.engine.residency import FIRST_WORDS_PRIOR, PRELOAD_MARGIN, CopyPace
from duplexd.engine.stores import PAGES
from duplexd.ids import ChunkId, ConditionVersion, Epoch, FenceId, SessionId, WorkId
from duplexd.memory.arena import Arena
from duplexd.memory.eviction import Remaining, Verdict, admit_preload
from duplexd.memory.layout import ArenaLayout, PartitionSpec, host_partition
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
BESIDE_STEPS = 4  #: of the reply that is thought while a copy runs
ORDINARY = range(300, 12_300)  #: token ids that are ordinary words of every vocabulary of this size


class Mind:
    """The default thinker over an arena of its own, with host memory beside it."""

    def __init__(self, thinker: Any, partitions: Sequence[PartitionSpec], *, ordinary: range = ORDINARY) -> None:
        layout = ArenaLayout(partitions)
        pages = layout.partitions[PAGES]
        host = host_partition(pages, pages.session_slots)
        arena = Arena(layout)
        self.thinker = thinker
        self.thinker.load(arena)
        self.mover = Mover(pages, host)
        self.mover.load(arena)
        self.pages = PageLedger(pages, host=SlotLedger(host))
        self.ordinary = ordinary
        self.fed = 0  #: tokens prefilled since it was set to 0
        self._work = 0

    @classmethod
    def default(cls) -> Mind:
        """The default thinker, with a workspace for all sessions that decode together."""
        import torch

        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        plan = load_plan("pocket", {"batch_max": str(SESSIONS)})
        thinker: Any = plan.build()[plan.need(Role.THINK).name]
        own = (thinker.shelf().name, PAGES, "workspace")
        return cls(thinker, [spec for spec in plan.partitions(SESSIONS) if spec.name in own])

    def tokens_of(self, count: int, *, seed: int) -> list[int]:
        """Ordinary words in no order; what they mean costs nothing."""
        return [self.ordinary[(7919 * (seed + 1) * (index + 1)) % len(self.ordinary)] for index in range(count)]

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
            jobs.append(self._job(feed.pieces, feed.past, feed.tokens, feed.steps))
        tokens = []
        for context, work, result in zip(contexts, works, self.thinker.run(jobs, None), strict=True):
            if isinstance(result, Failed):
                raise RuntimeError(result.reason)
            self.pages.fence_passed(FenceId(work))
            context.land(work, result.tokens)
            tokens.append(result.tokens)
        return tokens

    def _job(self, pieces: tuple[bytes, ...], past: int, feed: tuple[int, ...], steps: int) -> ThinkJob:
        return ThinkJob(SessionId(1), Epoch(0), ChunkId(0), ConditionVersion(0), pieces, past, feed, steps)

    def offload(self, context: Context) -> None:
        self._work += 1
        self.copy(context.offload(WorkId(self._work), pages_max=self.pages.spec.count), leaving=True)
        self.restored(context)

    def restore(self, context: Context) -> None:
        moves = self.order_restore(context)
        self.copy(moves, leaving=False)
        self.restored(context)

    def order_restore(self, context: Context) -> Sequence[Move]:
        self._work += 1
        return context.restore(WorkId(self._work)) or []

    @property
    def last_work(self) -> WorkId:
        """The name of what was ordered last."""
        return WorkId(self._work)

    def restored(self, context: Context, work: WorkId | None = None) -> None:
        """A copy has ended, the one that was ordered last if no other is named."""
        work = self.last_work if work is None else work
        for ledger in (self.pages, self.pages.host):
            assert ledger is not None
            ledger.fence_passed(FenceId(work))
        context.moved(work, lost=False)

    def copy(self, moves: Sequence[Move], *, leaving: bool) -> None:
        """The bytes alone; may run on any thread."""
        pairs = tuple((move.page, move.host) for move in moves)
        self.mover.run([MoveJob(SessionId(1), Epoch(0), ChunkId(0), ConditionVersion(0), leaving, pairs)], None)


def timed(act: Callable[[], object]) -> Nanos:
    began = thread_time()
    act()
    return Nanos(thread_time() - began)


def figures() -> dict[str, Any]:
    served = load_plan("pocket", {}).need(Role.THINK).batch_max
    return {"decode_rows_of_serve": served} | figures_of(Mind.default())


def figures_of(mind: Mind, *, rounds: int = ROUNDS, speech: Nanos = FIRST_WORDS_PRIOR) -> dict[str, Any]:
    return (
        decode_figures(mind, rounds=rounds)
        | restore_figures(mind, rounds=rounds, speech=speech)
        | interruption_figures(mind, rounds=rounds)
    )


# Decoding ------------------------------------------------------------------------------------------------------------


def decode_figures(mind: Mind, *, rounds: int = ROUNDS) -> dict[str, Any]:
    """Tokens a second of all sessions together: in one launch, one after the other, and by transformers' generate.

    The ratios are what one run on any machine can be compared by. Transformers has one session and weights in bfloat16;
    ours are as `decode_weights` says.
    """
    times: dict[str, list[float]] = {"1": [], "4": [], "16": [], "one_at_a_time": []}
    library = Library.of(mind)
    for number in range(rounds):
        tokens = mind.tokens_of(CONTEXT_TOKENS, seed=number)
        contexts = [mind.open(session, tokens) for session in range(1, SESSIONS + 1)]
        for name in times:
            count = SESSIONS if name == "one_at_a_time" else int(name)
            groups = [[c] for c in contexts] if name == "one_at_a_time" else [contexts[:count]]
            took = sum(_decode(mind, group) for group in groups)
            times[name].append(DECODED_TOKENS * count * 1e9 / took)
        mind.close(*contexts)
        if isinstance(library, Library):
            library.measure(tokens)
    rates = {name: median(values) for name, values in times.items()}
    ours = {name: round(rate, 1) for name, rate in rates.items()}
    ratios = {f"{name}_over_1": round(rates[name] / rates["1"], 2) for name in ("4", "16")}
    ratios["16_over_one_at_a_time"] = round(rates["16"] / rates["one_at_a_time"], 2)
    if isinstance(library, Library):
        ratios["1_over_transformers"] = round(rates["1"] / library.tokens_per_s, 2)
    return {
        "decode_tokens_per_s": ours
        | {"transformers": round(library.tokens_per_s, 1) if isinstance(library, Library) else library},
        "decode_ratio": ratios,
        "decode_weights": {"duplexd": mind.thinker.precision.value, "transformers": "bfloat16"},
    }


def _decode(mind: Mind, contexts: Sequence[Context]) -> Nanos:
    """Time to decode; the first token of the launch, which pays for reading the context, is not in it."""
    short = timed(lambda: mind.think(contexts, steps=1))
    whole = timed(lambda: mind.think(contexts, steps=1 + DECODED_TOKENS))
    for context in contexts:
        context.follow(tuple(context.ids))  # What was said is kept; the next launch goes on from there.
    return Nanos(whole - short)


class Library:
    """One session by the library's own generate: a Llama of the same shape in bfloat16."""

    def __init__(self, transformers: Any, shape: Any) -> None:
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
        self._model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
        self._took: list[Nanos] = []

    @classmethod
    def of(cls, mind: Mind) -> Library | str:
        """Of a mind's shape; or why there is no figure."""
        try:
            import transformers
        except ImportError:
            return "not measured: transformers is not installed (it belongs to the extra `dev`)"
        return cls(transformers, mind.thinker.shape)

    def measure(self, tokens: Sequence[int]) -> None:
        self._took.append(
            Nanos(timed(lambda: self._generate(tokens, DECODED_TOKENS + 1)) - timed(lambda: self._generate(tokens, 1)))
        )

    def _generate(self, tokens: Sequence[int], count: int) -> None:
        import torch

        prompt = torch.tensor([list(tokens)])
        settings = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
        self._model.generate(prompt, min_new_tokens=count, max_new_tokens=count, **settings)

    @property
    def tokens_per_s(self) -> float:
        return DECODED_TOKENS * 1e9 / median(self._took)


# Coming back ---------------------------------------------------------------------------------------------------------


def restore_figures(mind: Mind, *, rounds: int = ROUNDS, speech: Nanos = FIRST_WORDS_PRIOR) -> dict[str, Any]:
    """From the last words to the first token of an answer, over the same with the context never away.

    Args:    speech: from the onset of the person's voice to the first words; meanwhile another's reply is thought.
    """
    times: dict[str, list[Nanos]] = {"resident": [], "preload": [], "sync": [], "recompute": []}
    preloads = Preloads(mind, speech)
    history, said = mind.tokens_of(HISTORY_TOKENS, seed=1), mind.tokens_of(SAID_TOKENS, seed=2)
    for _ in range(rounds):
        for name in ("resident", "sync", "preload", "recompute"):
            context = mind.open(1, history)
            if name != "resident":
                mind.offload(context)
            waited = preloads.run(context) if name == "preload" else Nanos(0)
            way = "sync" if not context.readable and name == "preload" else name  # It was not admitted.
            took = timed(lambda c=context, w=way: _answer(mind, c, history + said, w))  # type: ignore[misc]
            times[name].append(Nanos(waited + took))
            if name == "sync":
                preloads.note_copy(context)
            mind.close(context)
    base = median(times.pop("resident"))
    return {
        "first_token_resident_ms": round(base / 1e6, 1),
        "restore_ratio": {name: round(median(values) / base, 2) for name, values in times.items()},
        "preload": preloads.report(),
    }


class Preloads:
    """The onset of a voice: a copy back that is judged, runs on a thread of its own, and is waited for at the words."""

    def __init__(self, mind: Mind, speech: Nanos) -> None:
        self._mind = mind
        self._speech = speech
        self._pace = CopyPace(0)
        self._verdicts: Counter[str] = Counter()
        self._copies: list[Nanos] = []
        self._waits: list[Nanos] = []
        self._beside = 0  # tokens that somebody else's reply got meanwhile

    def note_copy(self, context: Context) -> None:
        """Measure a copy of this context: out, which is not counted, and back."""
        mind = self._mind
        mind.offload(context)
        moves = mind.order_restore(context)
        took = timed(lambda: mind.copy(moves, leaving=False))
        mind.restored(context)
        self._pace.note(len(moves) * mind.pages.spec.slot_bytes, took)

    def run(self, context: Context) -> Nanos:
        """From the onset to the words; how long they then wait for the copy. Not admitted: 0, and nothing is copied."""
        mind = self._mind
        other = mind.open(2, mind.tokens_of(CONTEXT_TOKENS, seed=4))
        verdict = self._judge(mind.pages.away_pages(context.id))
        self._verdicts[verdict.name.lower()] += 1
        words_at = clock.now() + self._speech
        copy = None
        if verdict is Verdict.HIDEABLE:
            moves = mind.order_restore(context)
            copy = Thread(target=self._copy, args=(moves,))
            copy.start()
            work = mind.last_work
        while clock.now() < words_at:
            whole = tuple(other.ids)
            self._beside += len(mind.think([other], steps=BESIDE_STEPS)[0])
            other.follow(whole)
        waited = Nanos(0)
        if copy is not None:
            began = clock.now()
            copy.join()
            waited = Nanos(clock.now() - began)
            mind.restored(context, work)
            self._waits.append(waited)
        mind.close(other)
        return waited

    def _copy(self, moves: Sequence[Move]) -> None:
        began = clock.now()
        self._mind.copy(moves, leaving=False)
        self._copies.append(Nanos(clock.now() - began))

    def _judge(self, pages: int) -> Verdict:
        return admit_preload(
            preload_bytes=pages * self._mind.pages.spec.slot_bytes,
            bytes_per_second=self._pace.bytes_per_second,
            queued=Nanos(0),
            margin=PRELOAD_MARGIN,
            remaining=Remaining(utterance=self._speech, spoken=Nanos(0), silence=Nanos(0), encode=Nanos(0)),
            protected_bytes=0,
            protected_bytes_max=self._mind.pages.spec.count * self._mind.pages.spec.slot_bytes,
        )

    def report(self) -> dict[str, Any]:
        return {
            "verdicts": dict(self._verdicts),
            "copy_ms": round(median(self._copies) / 1e6, 2) if self._copies else None,
            "waited_ms": round(max(self._waits) / 1e6, 2) if self._waits else None,
            "tokens_beside": self._beside,
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
    history, said = mind.tokens_of(HISTORY_TOKENS, seed=1), mind.tokens_of(SAID_TOKENS, seed=2)
    ordinary, interrupted, again = [], [], []
    for _ in range(rounds):
        context = mind.open(1, history)
        ordinary.append(timed(lambda c=context: _answer(mind, c, history + said, "")))  # type: ignore[misc]
        mind.close(context)
        trunk = mind.open(1, history + mind.tokens_of(UNHEARD_TOKENS, seed=3))
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
