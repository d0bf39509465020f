"""After any conversation, the keys in the arena are those of a fresh prefill of what was heard and said (float64).

A tiny random Llama thinks in place of the word clock's arithmetic; its tokens are spoken as tone words, so that people
can interrupt it anywhere.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch

from duplexd.channel import MediaShape
from duplexd.engine.core import EngineCore
from duplexd.engine.dialogue import LONG_TERM
from duplexd.engine.process import EngineConfig, core_of, layout_of, stages_of
from duplexd.engine.simulator import SimNetwork, SimWorld
from duplexd.ids import ChunkId, ConditionVersion, Epoch, SessionId
from duplexd.memory.arena import Arena
from duplexd.memory.layout import PartitionKind, PartitionSpec
from duplexd.memory.pages import FoldTokens
from duplexd.messages import AdvanceEpoch, ConditionSet, PersonSeen, ResponseState, ResumePlayback
from duplexd.models.clock import plan as clock_plan
from duplexd.models.pocket.checkpoint import load_checkpoint
from duplexd.models.pocket.thinker import Thinker
from duplexd.streams.graph import ModelPlan
from duplexd.streams.stage import Failed, Role, StageSpec, ThinkJob, ThinkResult
from tests.engine.simulation import RATE, Simulation, beep, ms
from tests.pocket.thinker_fakes import Tiny, random_weights, write_folder

VOCABULARY = 256
STOP = 255


class TinyStream:
    """Every token is a word of the tone code; four make a clause."""

    def __init__(self) -> None:
        self._count = 0

    def push(self, token: int) -> str:
        self._count += 1
        mark = "," if self._count % 4 == 0 else ""
        return f"{' ' if self._count > 1 else ''}{token // 32}-{token % 32}{mark}"


class TinyDialect:
    stop: tuple[int, ...] = (STOP,)

    def anchor(self) -> list[int]:
        return [1, 2, 3, 4, 5]

    def instruct(self, text: str) -> list[int]:
        return [16, *self.words(text, first=True)]

    def sight(self, *, present: bool) -> list[int]:
        return [17 + present]

    def open_user(self) -> list[int]:
        return [10, 11]

    def words(self, text: str, *, first: bool) -> list[int]:
        return [20 + sum(word.encode()) % 200 for word in text.split()]

    def close_user_open_reply(self) -> list[int]:
        return [12, 13, 14]

    def close_reply(self) -> list[int]:
        return [15]

    def stream(self) -> TinyStream:
        return TinyStream()


class ThinkingSimulation(Simulation):
    """The simulated world with the pocket thinker's code and keys in it."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        until_ms: float,
        sessions: int = 2,
        resident: int = 2,
        pages: int = 48,
        long_term: int = 0,
        layers: int = 2,
    ) -> None:
        tiny = Tiny(vocabulary=VOCABULARY, layers=layers)
        weights = load_checkpoint(write_folder(folder, tiny, random_weights(tiny)))
        self.thinker = Thinker(weights, precision="float64", context_max=256, batch_max=1)
        self.plan = plan_with(self.thinker, pages)
        self.plan.long_term_tokens = long_term
        layout = layout_of(self.plan, sessions, resident)
        media = MediaShape(in_slots=64, in_samples=512, out_slots=8 * sessions, out_samples=RATE)
        config = EngineConfig(model="tiny", media=media, sessions_max=sessions, sessions_resident=resident)
        self.core: EngineCore = core_of(config, self.plan, layout)
        self.arena = Arena(layout)
        self.arena.buffer.fill_(0xFF)  # NaN everywhere: whoever reads a slot nobody wrote is found out.
        stages = stages_of(self.plan, layout, sessions)
        for stage in stages.values():
            stage.load(self.arena)
        self.world = SimWorld(stages=stages, rng=Random(seed), until=ms(until_ms))

    def difference(self, session: int) -> float:
        """Largest difference of the next logits: keys in the arena against a fresh prefill of the same tokens."""
        live = self.core.sessions[SessionId(session)]
        ids = tuple(live.context.ids)
        held = array.array("q", self.core.stores.pages.slots(live.context.id))[: len(ids)]
        free = array.array("q", range(len(ids) + 1))  # `logits` keeps nothing, so any slots will do
        return float((self.logits(held, free[:1], ids) - self.logits(array.array("q"), free, ids)).abs().max())

    def logits(self, past: array.array[int], more: array.array[int], ids: tuple[int, ...]) -> torch.Tensor:
        feed = (*ids[len(past) :], 33)
        slots = (past + more[: len(feed)]).tobytes()
        who = {"session": SessionId(1), "epoch": Epoch(0), "chunk": ChunkId(0), "condition": ConditionVersion(0)}
        return self.thinker.logits(ThinkJob(**who, pieces=(slots,), past=len(past), feed=feed, steps=1)).double()


def plan_with(thinker: Thinker, session_pages: int) -> ModelPlan:
    clock = clock_plan()
    specs: list[StageSpec] = [s if s.role is not Role.THINK else thinker.spec for s in clock.stages.values()]

    def partitions(sessions: int) -> tuple[PartitionSpec, ...]:
        others = tuple(p for p in clock.partitions(sessions) if p.name != "pages")
        pages = PartitionSpec(
            "pages",
            PartitionKind.PAGES,
            sessions * session_pages + 1,
            thinker.page_fields(),
            page_tokens=8,
            session_slots=session_pages,
            shared_slots=1,
        )
        return (thinker.shelf(), *others, pages, thinker.workspace())

    def build() -> dict[str, object]:
        stages = {spec.name: stage for spec, stage in zip(clock.stages.values(), clock.build().values(), strict=True)}
        return {name: stage for name, stage in stages.items() if name != "think"} | {thinker.spec.name: thinker}

    return ModelPlan(
        name="tiny",
        stages=specs,
        edges=[],
        dialect=TinyDialect(),
        partitions=partitions,
        build=build,  # type: ignore[arg-type]
        sample_rate=clock.sample_rate,
        grain=clock.grain,
        chunk_ramp=clock.chunk_ramp,
        clause_max=clock.clause_max,
        context_tokens_max=256,
        reply_tokens_max=16,
        reply_sentences_max=1,
        reply_words_enough=1,
        think_steps=4,
        ring_samples=clock.ring_samples,
        listen_max=clock.listen_max,
        cut=clock.cut,
        voice="energy",
    )


def check_memory(simulation: ThinkingSimulation) -> None:
    """The only session holds a conversation of some length, and its keys are those of a fresh prefill."""
    live = simulation.core.sessions[SessionId(1)]
    assert simulation.core.monitor["think_failures"] == 0
    assert len(live.context.ids) > 30
    assert live.dialogue.tokens()[: len(live.context.ids)] == live.context.ids
    assert simulation.difference(1) < 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_keys_after_interruptions_equal_a_fresh_prefill(seed: int, tmp_path: Path) -> None:
    """Typed turns, voices that interrupt, clicks that do not, stops: the arena holds what was heard and said."""
    rng = Random(seed)
    simulation = ThinkingSimulation(tmp_path / "tiny", seed=seed, until_ms=24_000)
    listener = simulation.connect(at_ms=200, network=SimNetwork(delay=ms(12), buffer=ms(80)))
    for turn in range(4):
        at = 400 + 5500 * turn
        listener.type(f"turn {turn} of seed {seed}", at=ms(at), key=f"t{turn}")
        listener.say(beep(rng.choice([100, 500, 900])), at=ms(at + rng.uniform(300, 3000)))
    listener.stop(at=ms(23_000))
    simulation.run()

    assert len(simulation.news(AdvanceEpoch)) + len(simulation.news(ResumePlayback)) >= 3
    check_memory(simulation)


def test_words_over_a_reply_are_prefilled_on_a_branch_and_kept(tmp_path: Path) -> None:
    """The next turn prefills nothing that was kept: of the interrupting words only the tail is left at their end."""
    simulation = ThinkingSimulation(tmp_path / "tiny", seed=3, until_ms=6000)
    listener = simulation.connect(at_ms=200)
    listener.type("hello there", at=ms(400), key="a")
    listener.say(beep(2400), at=ms(1500))
    simulation.run()

    (advance,) = [at for at, n in simulation.world.news if isinstance(n, AdvanceEpoch)]
    feeds = [
        (at, launch.jobs[0]) for at, launch in simulation.world.launches if launch.stage == simulation.thinker.spec.name
    ]
    after = [job for at, job in feeds if at >= advance]
    heard = simulation.history()[1].words
    assert heard > 0
    assert all(job.past >= 5 + 2 + 2 + 3 + heard for job in after)
    assert simulation.difference(1) < 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_keys_after_guesses_kept_and_dropped_equal_a_fresh_prefill(seed: int, tmp_path: Path) -> None:
    """People who halt and go on, so that some speculative turns are dropped and some become the trunk; they come into
    view and leave it at any time.
    """
    rng = Random(seed)
    simulation = ThinkingSimulation(tmp_path / "tiny", seed=seed, until_ms=24_000)
    listener = simulation.connect(at_ms=200, network=SimNetwork(delay=ms(12), buffer=ms(80)))
    for turn in range(4):
        at = 400.0 + 5500 * turn
        for _ in range(1 + (turn + seed) % 3):
            length = rng.uniform(300, 450)
            listener.say(beep(length), at=ms(at))
            at += length + rng.uniform(400, 600)
        listener.stop(at=ms(at + rng.uniform(900, 1900)))
        seen = PersonSeen(SessionId(1), turn % 2 == 0)
        simulation.world.at(ms(400 + 5500 * turn + 5000 * ((turn + seed) % 3) / 2), lambda seen=seen: seen)
    simulation.run()

    assert any(exchange.sight for exchange in simulation.core.sessions[SessionId(1)].dialogue.exchanges)
    assert simulation.core.monitor["speculations_confirmed"] > 0
    assert simulation.core.monitor["speculations_dropped"] > 0
    check_memory(simulation)


@pytest.mark.parametrize("seed", range(3))
def test_keys_that_were_away_equal_a_fresh_prefill(seed: int, tmp_path: Path) -> None:
    """Three people talk in turn over memory for one, interrupt and are interrupted; the last to talk had been away. One
    layer: what slides out where pages are short leaves no trace in the keys that stay.
    """
    simulation = ThinkingSimulation(
        tmp_path / "tiny", seed=seed, until_ms=56_000, sessions=3, resident=1, pages=20, layers=1
    )
    rng = Random(seed)
    for session in (1, 2, 3):
        listener = simulation.connect(session, at_ms=200, network=SimNetwork(delay=ms(12), buffer=ms(80)))
        for turn in range(3):
            at = 400 + 18_000 * turn + 6000 * (session - 1)
            listener.type(" ".join(["word"] * 30), at=ms(at), key=f"t{turn}")
            listener.say(beep(rng.choice([100, 500])), at=ms(at + rng.uniform(300, 1500)))
    simulation.run()
    resident = [s for s in (1, 2, 3) if simulation.core.sessions[SessionId(s)].context.readable]

    assert simulation.core.monitor["think_failures"] == 0
    assert simulation.core.monitor["pages_restored"] > 0
    assert resident
    assert max(simulation.difference(session) for session in resident) < 1e-9


class Folding:
    """The thinker's `run`, with every fold it is told compared to one made by hand."""

    def __init__(self, simulation: ThinkingSimulation) -> None:
        self.folds: list[FoldTokens] = []
        self._thinker, self._arena, self._run = simulation.thinker, simulation.arena, simulation.thinker.run
        simulation.thinker.run = self.run  # type: ignore[method-assign]

    def run(self, jobs: Sequence[ThinkJob], media: object) -> list[ThinkResult | Failed]:
        expected = [self.by_hand(fold) for job in jobs for fold in job.folds[-1:]]
        results = self._run(jobs, media)
        for job in jobs:
            self.folds += job.folds
        for (target, tensors), fields in zip(expected, [self.fields()] * len(expected), strict=True):
            for tensor, field in zip(tensors, fields, strict=True):
                torch.testing.assert_close(field[:, target], tensor, rtol=0, atol=1e-12)
        return results

    def fields(self) -> list[torch.Tensor]:
        return [self._arena.field("pages", name) for name in ("k", "v")]

    def by_hand(self, fold: FoldTokens) -> tuple[list[int], list[torch.Tensor]]:
        """Sources in as many neighbouring groups as there are long-term tokens; each group's mean, a quarter of it."""
        sources, target = (array.array("q", slots).tolist() for slots in (fold.sources, fold.target))
        wanted = []
        for field in self.fields():
            count, size = len(sources), len(target)
            groups = [sources[index * count // size : -(-(index + 1) * count // size)] for index in range(size)]
            means = torch.stack([field[:, group].mean(1) for group in groups], dim=1)
            assert bool(torch.isfinite(means).all())
            wanted.append(means if fold.first else 0.75 * field[:, target] + 0.25 * means)
        return target, wanted


def test_what_slides_out_is_folded_into_long_term_tokens(tmp_path: Path) -> None:
    """A person says more than the context holds, and again; it stays full, and its long-term tokens are averages."""
    simulation = ThinkingSimulation(tmp_path / "tiny", seed=2, until_ms=40_000, long_term=6)
    folding = Folding(simulation)
    listener = simulation.connect(at_ms=200)
    for turn in range(8):
        listener.type(" ".join(f"word{turn}" for _ in range(45)), at=ms(400 + 4800 * turn), key=f"t{turn}")
    listener.say(beep(900), at=ms(400 + 4800 * 7 + 900))
    simulation.run()
    live = simulation.core.sessions[SessionId(1)]
    labels = simulation.core.stores.pages.labels(live.context.id)

    assert simulation.core.monitor["think_failures"] == 0
    assert len(folding.folds) >= 3
    assert [fold.first for fold in folding.folds] == [True] + [False] * (len(folding.folds) - 1)
    assert live.dialogue.tokens()[: len(live.context.ids)] == live.context.ids
    assert live.context.ids[5:11] == [LONG_TERM] * 6
    assert [(run.label.value, run.tokens) for run in labels[:2]] == [("anchor", 5), ("long_term", 6)]
    assert simulation.core.metrics().values["tokens_long_term"] == 6


@pytest.mark.parametrize("pages", [48, 30], ids=["tokens", "pages"])
def test_keys_that_slid_behind_instructions_equal_a_fresh_prefill(pages: int, tmp_path: Path) -> None:
    """A person interrupts and is interrupted, turn after turn, at either bound. With one layer a key depends on its
    own token alone, so that what slid out leaves no trace in those that stay: nothing else may differ.
    """
    simulation = ThinkingSimulation(tmp_path / "tiny", seed=4, until_ms=50_000, pages=pages, layers=1)
    listener = simulation.connect(at_ms=200, network=SimNetwork(delay=ms(12), buffer=ms(80)))
    simulation.world.at(ms(250), lambda: ConditionSet(SessionId(1), "answer as briefly as you can"))
    for turn in range(14):
        listener.type(" ".join(f"word{turn}" for _ in range(14)), at=ms(400 + 2900 * turn), key=f"t{turn}")
        listener.say(beep(900), at=ms(400 + 2900 * turn + 1300))
    simulation.run()
    live = simulation.core.sessions[SessionId(1)]

    stage = simulation.thinker.spec.name
    jobs = [launch.jobs[0] for at, launch in simulation.world.launches if launch.stage == stage and at > ms(25_000)]

    assert simulation.core.monitor["exchanges_slid"] > 3
    assert min(job.past for job in jobs) >= 12
    assert live.context.ids[5:12] == TinyDialect().instruct("answer as briefly as you can")
    assert not [n for n in simulation.final_states().values() if ResponseState.FAILED in n]
    check_memory(simulation)


def test_what_slides_behind_instructions_is_folded_before_them(tmp_path: Path) -> None:
    """Long-term tokens stand behind the anchor and before the instructions, wherever they lie in memory."""
    simulation = ThinkingSimulation(tmp_path / "tiny", seed=2, until_ms=40_000, long_term=6)
    folding = Folding(simulation)
    listener = simulation.connect(at_ms=200)
    simulation.world.at(ms(250), lambda: ConditionSet(SessionId(1), "be brief"))
    for turn in range(8):
        listener.type(" ".join(f"word{turn}" for _ in range(45)), at=ms(400 + 4800 * turn), key=f"t{turn}")
    simulation.run()
    live = simulation.core.sessions[SessionId(1)]

    assert simulation.core.monitor["think_failures"] == 0
    assert len(folding.folds) >= 3
    assert live.context.ids[5:14] == [*[LONG_TERM] * 6, *TinyDialect().instruct("be brief")]
    assert live.dialogue.tokens()[: len(live.context.ids)] == live.context.ids
