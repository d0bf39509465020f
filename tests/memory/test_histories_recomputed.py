"""Twin histories on a real arena: what the windows give equals a computation from nothing, in float64."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import COMPRESSING, FIELDS, ONE, STAGES, TWO, Rig

from duplexd.ids import ChunkId, Epoch, FenceId, SessionId
from duplexd.memory.arena import Arena
from duplexd.memory.classes import CacheClass
from duplexd.memory.histories import GENERATE, REFINE, Fold, HistoryStage
from duplexd.memory.layout import ArenaLayout
from duplexd.memory.ledger import Lease
from duplexd.memory.window import Window
from duplexd.models.average import MovingAverage, group_means

LAYERS, TOKENS, WIDTH = 2, 3, 4
KEEP = 0.75


class Layer:
    def __init__(self, rng: torch.Generator) -> None:
        draw = partial(torch.randn, WIDTH, WIDTH, dtype=torch.float64, generator=rng)
        self.q, self.k, self.v, self.o, self.mix = draw(), draw(), draw(), draw() / 2, draw() / 2


class Model:
    """Two layers of chunk-causal attention: a chunk sees its window and itself, and its raw keys are what is kept."""

    def __init__(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.layers = [Layer(rng) for _ in range(LAYERS)]

    def run(self, x: torch.Tensor, view: Callable[[Lease, str], torch.Tensor], window: Window) -> torch.Tensor:
        """(tokens, width) -> the same, writing the keys and values of the window's last slot."""
        for index, layer in enumerate(self.layers):
            view(window.leases[-1], "k")[index, : len(x)] = x @ layer.k
            view(window.leases[-1], "v")[index, : len(x)] = x @ layer.v
            slots = list(zip(window.leases, window.tokens, strict=True))
            keys = torch.cat([view(lease, "k")[index, :tokens] for lease, tokens in slots])
            values = torch.cat([view(lease, "v")[index, :tokens] for lease, tokens in slots])
            places = torch.arange(window.length, dtype=torch.float64)
            scores = rotate(x @ layer.q, places[window.starts[-1] :]) @ rotate(keys, places).T
            x = x + scores.softmax(-1) @ values @ layer.o
            x = x + torch.tanh(x @ layer.mix)
        return x


def rotate(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """RoPE, half against half."""
    angle = places[:, None] * 10.0 ** -torch.arange(WIDTH // 2, dtype=torch.float64)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def noise(seed: int, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(tokens, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


Memory = list[tuple[torch.Tensor, torch.Tensor]]  #: keys and values of one chunk, by layer


def recompute(model: Model, inputs: list[torch.Tensor], seen: list[int], folded: list[int]) -> list[torch.Tensor]:
    """The same model from nothing: no arena, no slots. Keys are turned as complex numbers, one token pair at a time.

    Args:    inputs: the anchors' and then every chunk's of one lineage; seen: their visible tokens;
             folded: how many chunks had left the window when each chunk was computed (-1 for an anchor).
    """
    anchors = folded.count(-1)
    memories: list[Memory] = []
    outputs = []
    for number, x in enumerate(inputs):
        reads: list[tuple[Memory, int]] = []
        if number >= anchors:
            gone = anchors + folded[number]
            reads = [(memories[index], seen[index]) for index in range(anchors)]
            if COMPRESSING.long_term_tokens and gone > anchors:
                reads.append((average(memories[anchors:gone], seen[anchors:gone]), COMPRESSING.long_term_tokens))
            reads += [(memories[index], seen[index]) for index in range(max(gone, number - COMPRESSING.recent), number)]
        memory: Memory = []
        for index, layer in enumerate(model.layers):
            memory.append((x @ layer.k, x @ layer.v))
            keys = torch.cat([*(read[index][0][:tokens] for read, tokens in reads), memory[index][0]])
            values = torch.cat([*(read[index][1][:tokens] for read, tokens in reads), memory[index][1]])
            rows = []
            for row, query in enumerate((x @ layer.q).unbind()):
                place = len(keys) - len(x) + row
                scores = torch.stack([score(query, key, place - other) for other, key in enumerate(keys.unbind())])
                rows.append(scores.softmax(0) @ values)
            x = x + torch.stack(rows) @ layer.o
            x = x + torch.tanh(x @ layer.mix)
        memories.append(memory)
        outputs.append(x)
    return outputs[anchors:]


def score(query: torch.Tensor, key: torch.Tensor, distance: int) -> torch.Tensor:
    """RoPE seen from the other side: only the distance counts."""
    half = WIDTH // 2
    turn = torch.polar(
        torch.ones(half, dtype=torch.float64), distance * 10.0 ** -torch.arange(half, dtype=torch.float64)
    )
    return (torch.complex(query[:half], query[half:]) * torch.complex(key[:half], key[half:]).conj() * turn).real.sum()


def average(memories: list[Memory], seen: list[int]) -> Memory:
    def pooled(x: torch.Tensor, tokens: int) -> torch.Tensor:
        groups = COMPRESSING.long_term_tokens
        edges = [(group * tokens // groups, -(-(group + 1) * tokens // groups)) for group in range(groups)]
        return torch.stack([x[start:end].mean(0) for start, end in edges])

    folded: Memory = []
    for layer in range(LAYERS):
        pair = [
            [pooled(memory[layer][part], tokens) for memory, tokens in zip(memories, seen, strict=True)]
            for part in (0, 1)
        ]
        means = []
        for chunks in pair:
            mean = chunks[0]
            for chunk in chunks[1:]:
                mean = KEEP * mean + (1 - KEEP) * chunk
            means.append(mean)
        folded.append((means[0], means[1]))
    return folded


class Studio:
    """A generator and a refiner on lanes that run as late as they may; slots are NaN from the moment they are free."""

    def __init__(self, *, sessions: int) -> None:
        self.arena = Arena(
            ArenaLayout([COMPRESSING.partition(name, FIELDS, sessions=sessions) for name in ("noisy", "clean")])
        )
        for partition in ("noisy", "clean"):
            self.arena.fill_nan(partition, range(self.arena.layout.partitions[partition].count))
        self.rig = Rig(COMPRESSING, sessions=sessions, freed=self.arena.fill_nan)
        self.models: dict[HistoryStage, Model] = {GENERATE: Model(1), REFINE: Model(2)}
        self.rule = MovingAverage(("k", "v"), tokens=COMPRESSING.long_term_tokens, keep=KEEP)
        self.lanes: dict[HistoryStage, deque[tuple[FenceId, Callable[[], object]]]] = {
            GENERATE: deque(),
            REFINE: deque(),
        }

    def launch(self, stage: HistoryStage, work: Callable[[], object]) -> FenceId:
        self.lanes[stage].append((self.rig.launch(), work))
        return self.rig.fence

    def run_until(self, fence: FenceId, stage: HistoryStage) -> None:
        lane = self.lanes[stage]
        while lane and lane[0][0] <= fence:
            done, work = lane.popleft()
            work()
            self.rig.passes(done)

    def drain(self) -> None:
        for stage in STAGES:
            self.run_until(self.rig.fence, stage)


class Scene:
    """One session of a studio, and the lineage of chunks that its viewer saw or still may see."""

    def __init__(self, studio: Studio, session: SessionId) -> None:
        self.studio = studio
        self.histories = studio.rig.open(session)
        self.lineage: list[int] = []  #: every chunk of the live history, from the first one on
        self.seen: dict[int, int] = {}
        self.outputs: dict[tuple[HistoryStage, int], torch.Tensor] = {}
        self.folded: dict[tuple[HistoryStage, int], int] = {}
        self.slid = 0
        self.flight: dict[HistoryStage, tuple[int, FenceId] | None] = {GENERATE: None, REFINE: None}
        self.done: dict[HistoryStage, set[int]] = {GENERATE: set(), REFINE: set()}
        for stage in STAGES:
            for lease in self.histories.anchors(stage):
                tokens = COMPRESSING.anchor_tokens[0]
                sink = Window((lease,), (tokens,), (0,), tokens)
                studio.launch(stage, partial(studio.models[stage].run, noise(session, tokens), studio.arena.view, sink))

    def run(self, stage: HistoryStage, chunk: int, window: Window) -> None:
        """What the lane does, whenever it gets there, and for dead chunks too: nothing it reads is free by then."""
        x = noise(100 + chunk) if stage is GENERATE else self.outputs[GENERATE, chunk]
        output = self.studio.models[stage].run(x, self.studio.arena.view, window)
        assert not output.isnan().any(), f"{stage} of chunk {chunk} read a free slot"
        self.outputs[stage, chunk] = output

    def start(self, stage: HistoryStage, chunk: int) -> None:
        if self.flight[stage] is not None:
            return
        windows: list[Window] = []
        fence = self.studio.launch(stage, lambda: self.run(stage, chunk, windows[0]) if windows else None)
        order = self.histories.begin if stage is GENERATE else self.histories.refine
        window = order(ChunkId(chunk), self.histories.epoch, fence=fence)
        if window is None:
            return
        windows.append(window)
        self.flight[stage] = (chunk, fence)
        self.folded[stage, chunk] = self.slid
        if stage is GENERATE:
            self.lineage.append(chunk)
            self.seen[chunk] = TOKENS

    def finish(self, stage: HistoryStage) -> None:
        flight = self.flight[stage]
        if flight is None:
            return
        chunk, fence = flight
        self.studio.run_until(fence, stage)
        self.histories.finish(ChunkId(chunk), self.histories.epoch, stage)
        self.done[stage].add(chunk)
        self.flight[stage] = None

    def refined(self) -> list[int]:
        return [chunk for chunk in self.histories.chunks() if chunk in self.done[REFINE]]

    def refine(self) -> None:
        chunks = [chunk for chunk in self.lineage if chunk not in self.done[REFINE]]
        if chunks and chunks[0] in self.done[GENERATE]:
            self.start(REFINE, chunks[0])

    def slide(self) -> None:
        orders: dict[HistoryStage, Fold] = {}

        def fold(stage: HistoryStage) -> None:
            if stage in orders:
                self.studio.rule.fold(orders[stage], self.studio.arena)

        fences = [self.studio.launch(stage, partial(fold, stage)) for stage in STAGES]
        before = len(self.histories.chunks())
        orders |= {order.stage: order for order in self.histories.slide(folds=(fences[0], fences[1]))}
        self.slid += before - len(self.histories.chunks())

    def hear(self, choice: int) -> None:
        if ready := self.refined()[len(self.histories.heard()) :]:
            self.histories.hear(ChunkId(ready[choice % len(ready)]), self.histories.epoch)
            self.slide()

    def interrupt(self, choice: int) -> None:
        """At the last heard chunk, or at a finished one after it: whole, or with 1 or 2 tokens seen."""
        ready = [None, *self.refined()[len(self.histories.heard()) :]]
        keep, tokens = ready[choice % len(ready)], (None, 1, 2)[choice % 3]
        tokens = tokens if keep is not None else None
        self.histories.interrupt(
            Epoch(self.histories.epoch + 1), keep=None if keep is None else ChunkId(keep), tokens=tokens
        )
        self.lineage = [chunk for chunk in self.lineage if chunk <= max(self.histories.heard(), default=0)]
        if keep is not None and tokens is not None:
            self.seen[keep] = tokens
        self.flight = {GENERATE: None, REFINE: None}
        self.slide()

    def move(self, name: str, chunk: int, choice: int) -> None:
        """One move of a schedule; nothing happens where it is not possible."""
        match name:
            case "step":  # the overlap: both stages end, and each takes the next chunk
                self.finish(REFINE)
                self.finish(GENERATE)
                self.refine()
                self.start(GENERATE, chunk)
            case "begin":
                self.start(GENERATE, chunk)
            case "generated":
                self.finish(GENERATE)
            case "refine":
                self.refine()
            case "refined":
                self.finish(REFINE)
            case "hear":
                self.hear(choice)
            case _:
                self.interrupt(choice)

    def check(self) -> None:
        """All that the live history was made of equals a computation from nothing."""
        for stage in STAGES:
            chunks = [chunk for chunk in self.lineage if chunk in self.done[stage]]
            inputs = [noise(100 + chunk) if stage is GENERATE else self.outputs[GENERATE, chunk] for chunk in chunks]
            anchor = COMPRESSING.anchor_tokens[0]
            fresh = recompute(
                self.studio.models[stage],
                [noise(self.histories.session, anchor), *inputs],
                [anchor, *(self.seen[chunk] for chunk in chunks)],
                [-1, *(self.folded[stage, chunk] for chunk in chunks)],
            )
            for chunk, expected in zip(chunks, fresh, strict=True):
                torch.testing.assert_close(self.outputs[stage, chunk], expected, rtol=1e-12, atol=1e-12)


MOVES = ["step", "begin", "generated", "refine", "refined", "hear", "step", "hear", "step", "hear", "interrupt"]


@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from(MOVES), st.integers(0, 5)), min_size=40, max_size=80),
)
def test_both_windows_equal_a_fresh_computation(moves: list[tuple[int, str, int]]) -> None:
    """Two sessions share an arena whose free slots are NaN and lanes that lag; float64, to rounding."""
    studio = Studio(sessions=2)
    scenes = [Scene(studio, ONE), Scene(studio, TWO)]
    for chunk, (who, move, choice) in enumerate(moves, start=1):
        scenes[who].move(move, chunk, choice)
    studio.drain()

    for scene in scenes:
        scene.check()


def run_through(scene: Scene, chunk: int) -> None:
    scene.start(GENERATE, chunk)
    scene.finish(GENERATE)
    scene.refine()
    scene.finish(REFINE)


def test_a_long_session_with_an_interruption_equals_a_fresh_computation() -> None:
    """Eleven chunks, one cut at its second token: nine have been folded at the end."""
    studio = Studio(sessions=1)
    scene = Scene(studio, ONE)
    for chunk in range(1, 8):
        run_through(scene, chunk)
        scene.hear(0)
    run_through(scene, 8)
    run_through(scene, 9)
    scene.interrupt(2 + 3)  # keeps chunk 9 of [None, 8, 9], with two tokens of it
    assert scene.seen[9] == 2
    for chunk in range(10, 13):
        run_through(scene, chunk)
        scene.hear(0)
    studio.drain()

    assert scene.slid == len(scene.lineage) - COMPRESSING.recent == 10
    scene.check()


def test_committing_and_sliding_move_no_byte() -> None:
    """The window slides over tensors that stay where they are: same addresses, same bytes."""
    studio = Studio(sessions=1)
    scene = Scene(studio, ONE)
    for chunk in (1, 2, 3):
        run_through(scene, chunk)
    studio.drain()
    leases = {
        (held.chunk, held.stage): held.lease
        for ledger in studio.rig.ledgers
        for held in ledger.find(ONE, label=CacheClass.CURRENT)
    }
    views = {name: studio.arena.view(lease, "k") for name, lease in leases.items()}
    before = {name: (view.data_ptr(), view.clone()) for name, view in views.items()}
    scene.histories.hear(ChunkId(2), Epoch(0))
    scene.histories.hear(ChunkId(3), Epoch(0))
    scene.slide()

    recent = [held for ledger in studio.rig.ledgers for held in ledger.find(ONE, label=CacheClass.RECENT)]
    assert [leases[held.chunk, held.stage] for held in recent] == [held.lease for held in recent]
    assert [held.chunk for held in recent] == [2, 3, 2, 3]
    for name, lease in leases.items():
        assert studio.arena.view(lease, "k").data_ptr() == before[name][0]
        assert torch.equal(studio.arena.view(lease, "k"), before[name][1])


def test_a_chunk_is_folded_first_and_freed_afterwards() -> None:
    studio = Studio(sessions=1)
    scene = Scene(studio, ONE)
    for chunk in (1, 2, 3):
        run_through(scene, chunk)
    scene.hear(2)
    noisy = studio.rig.ledgers[0]

    assert scene.histories.heard() == (2, 3)
    assert noisy.retiring_count == 1
    studio.drain()
    assert noisy.retiring_count == 0
    long_term = noisy.find(ONE, label=CacheClass.LONG_TERM)[0].lease
    assert not studio.arena.view(long_term, "k")[:, : COMPRESSING.long_term_tokens].isnan().any()


def test_a_closed_session_leaves_when_its_last_launch_has_passed() -> None:
    """Both stages are at work when the session closes; what they read and write stays theirs until they end."""
    studio = Studio(sessions=1)
    scene = Scene(studio, ONE)
    run_through(scene, 1)
    scene.start(GENERATE, 2)
    scene.finish(GENERATE)
    scene.start(GENERATE, 3)
    scene.refine()
    scene.histories.close()
    assert [ledger.free_count for ledger in studio.rig.ledgers] == [5, 5]  # what was never leased
    studio.drain()

    assert [ledger.free_count for ledger in studio.rig.ledgers] == [COMPRESSING.slots] * 2
    assert {(GENERATE, 3), (REFINE, 2)} <= scene.outputs.keys()


@pytest.mark.parametrize(("tokens", "groups"), [([1, 3, 5, 7], [2, 6]), ([1, 2, 6], [1.5, 4]), ([4], [4, 4])], ids=str)
def test_tokens_are_averaged_in_groups(tokens: list[float], groups: list[float]) -> None:
    assert group_means(torch.tensor(tokens, dtype=torch.float64)[None, :, None], 2)[0, :, 0].tolist() == groups
