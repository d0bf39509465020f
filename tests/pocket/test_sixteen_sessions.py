"""Sixteen people and one pocket engine with memory for eight: everybody is answered, by voice, from what they said."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from duplexd.bench import recordings
from duplexd.channel import MediaShape
from duplexd.engine.core import EngineCore
from duplexd.engine.loop import drive
from duplexd.engine.process import EngineConfig, core_of, layout_of, load_plan, stages_of
from duplexd.engine.session import REPLIES_REMEMBERED
from duplexd.engine.simulator import SimWorld
from duplexd.ids import SessionId
from duplexd.memory.arena import Arena
from duplexd.messages import ResponseChanged, ResponseState, UserWords
from duplexd.units import NANOS_PER_SECOND, Nanos

pytestmark = [pytest.mark.weights, pytest.mark.slow]

SESSIONS, RESIDENT, TALKING, TYPING = 16, 8, 4, 9
EVERY_S = 11.0  #: four people speak at once, then the next four
#: Some two hundred tokens: with what follows, sixteen contexts are more than the arena has pages for.
STORY = " ".join(f"On day {day} we sailed past an island and counted {day * 3} boats." for day in range(1, 13))


@pytest.fixture(autouse=True)
def short_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of 512 tokens and few spare pages, so that the test fills them in two turns; and short replies."""
    monkeypatch.setattr("duplexd.models.pocket.thinker.CONTEXT_MAX", 512)
    monkeypatch.setattr("duplexd.models.pocket.SPARE_PAGES", 4)
    monkeypatch.setattr("duplexd.models.pocket.REPLY_TOKENS_MAX", 24)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the engine process does: two would wait for each other wherever the cores have other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def understood(asked: str, heard: str) -> bool:
    """Half of the words at least: they heard this person and no other."""
    wanted = asked.lower().strip("?.").split()
    return 2 * sum(word in heard.lower() for word in wanted) >= len(wanted)


_SILENCE = np.zeros(0, np.int16)


def engine_objects() -> dict[str, int]:
    """Living objects of the engine's and the ledgers' own classes, by class. Messages and launches are recordings."""
    gc.collect()
    own = ("duplexd.engine.", "duplexd.memory.")
    others = ("duplexd.engine.simulator", "duplexd.engine.work")
    kinds = Counter(type(one) for one in gc.get_objects())
    return {
        kind.__qualname__: count
        for kind, count in kinds.items()
        if str(kind.__module__).startswith(own) and kind.__module__ not in others
    }


def resident_bytes() -> int:
    """What this process has in memory (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def seconds(value: float) -> Nanos:
    return Nanos(round(value * NANOS_PER_SECOND))


class Engine:
    """The pocket engine in virtual time: real weights, simulated people."""

    def __init__(self, *, until_s: float) -> None:
        plan = load_plan("pocket", {})
        media = MediaShape(in_slots=64, in_samples=512, out_slots=8 * SESSIONS, out_samples=plan.sample_rate)
        config = EngineConfig(
            model="pocket", media=media, sessions_max=SESSIONS, sessions_resident=RESIDENT, place_wait_ms=2000
        )
        layout = layout_of(plan, SESSIONS, RESIDENT)
        self.core: EngineCore = core_of(config, plan, layout)
        arena = Arena(layout)
        stages = stages_of(plan, layout, SESSIONS)
        for stage in stages.values():
            stage.load(arena)
        self.world = SimWorld(stages=stages, rng=Random(5), until=seconds(until_s), in_slots=64 * SESSIONS)
        self.people = [
            self.world.connect(SessionId(number), at=seconds(4), rate=plan.sample_rate)
            for number in range(1, SESSIONS + 1)
        ]

    def at(self, at_s: float, held: list[Counter[str]]) -> None:
        """Note what is held at this moment."""
        self.world.at(seconds(at_s), lambda: held.append(self.held()))

    def held(self) -> Counter[str]:
        """Everything a session takes and must give back: slots, pages, host memory, work, and Python objects."""
        core, stores = self.core, self.core.stores
        assert stores.host is not None
        ledgers = (stores.ingest, stores.state, stores.latents, stores.host)
        held = {ledger.spec.name: ledger.spec.count - ledger.free_count for ledger in ledgers}
        held |= {
            "pages": stores.pages.spec.count - stores.pages.free_count,
            "pages_retiring": stores.pages.retiring_count,
            "out_slots": stores.out_slots_count - len(stores.out_slots),
            "places": core.residency.seated_count + core.residency.waiting_count,
            "sessions_indexed": len(core.residency.index),
            "entries_indexed": core.residency.index.entries_count,
            "work": int(core.metrics().values["work_in_flight"]),
            "timers": len(core._timers),
        }
        return Counter(held | {f"objects of {name}": count for name, count in engine_objects().items()})

    def forget_recordings(self) -> None:
        """What the simulated world writes down for the test grows with time, and is no memory of the engine."""
        for person in self.people:
            person.heard[:] = [_SILENCE] * len(person.heard)
            person.sent.clear()
        del self.world.launches[:-1]
        self.world.news[:] = [one for one in self.world.news if isinstance(one[1], ResponseChanged | UserWords)]

    def words(self, session: int) -> list[str]:
        """What a person said, turn by turn, as it was understood."""
        return [n.text for _, n in self.world.news if isinstance(n, UserWords) and n.session == session and n.final]

    def ends(self, session: int) -> list[str]:
        """How each response of a session ended: its state, with the reason of a failure."""
        ends = (ResponseState.COMPLETED, ResponseState.CANCELLED, ResponseState.FAILED)
        return [
            n.reason or n.state.value
            for _, n in self.world.news
            if isinstance(n, ResponseChanged) and n.session == session and n.state in ends
        ]


def test_sixteen_people_are_served_and_a_ninth_talker_waits_or_is_told_busy() -> None:
    """Each tells a long story, then asks by voice, four at a time; at last nine type at the same moment."""
    spoken = recordings.load("question")
    end_s = 5 + 8 * EVERY_S + 16
    engine = Engine(until_s=end_s + 8)
    before: list[Counter[str]] = []
    crowded: list[Counter[str]] = []
    after: list[Counter[str]] = []
    resident: list[int] = []
    engine.at(3.9, before)
    for turn in range(1, 9):
        # Just before the next four begin: those who spoke have been answered, or are being so.
        engine.at(5 + turn * EVERY_S - 0.1, crowded)
        engine.world.at(seconds(5 + turn * EVERY_S - 0.1), engine.forget_recordings)
        engine.world.at(seconds(5 + turn * EVERY_S - 0.1), lambda: resident.append(resident_bytes()))
    for person in engine.people:
        engine.world.at(seconds(end_s), person.leave)
    engine.at(end_s + 7, after)
    for index, person in enumerate(engine.people):
        told = 5 + EVERY_S * (index // TALKING)
        person.type(STORY, at=seconds(told), key="story")
        person.say(spoken[index % len(spoken)].pcm(), at=seconds(told + 4 * EVERY_S))
    for person in engine.people[:TYPING]:
        person.type("Thank you. Goodbye!", at=seconds(5 + 8 * EVERY_S), key="bye")
    drive(engine.core, engine.world)
    counts = engine.core.monitor

    assert counts["pages_offloaded"] > 0
    assert counts["pages_restored"] > 0
    assert counts["think_failures"] == counts["transfers_failed"] == 0
    heard = 0
    for session in range(1, SESSIONS + 1):
        asked = spoken[(session - 1) % len(spoken)].text
        ends = engine.ends(session)[: -1 if session <= TYPING else None]
        heard += understood(asked, " ".join(engine.words(session)[1:]))
        # A question with a pause in it may be answered too early; that answer is interrupted by the rest of it.
        assert (ends[0], ends[-1], set(ends) - {"completed", "interrupted"}) == ("completed", "completed", set())
        assert len(ends) >= 2
    assert heard >= 12  # The simulated front end tells voice by loudness alone and now and then clips a word.
    last = [engine.ends(session)[-1] for session in range(1, TYPING + 1)]
    assert last.count("completed") >= RESIDENT
    assert all(end == "completed" or end.startswith("busy: ") for end in last)
    engine.core.stores.check()

    # What the engine knows of its own load it keeps from the first use on: a record a lane, its newest look at them.
    lanes = {spec.lane for spec in engine.core.plan.stages.values()} | {"the copies between tiers"}
    for held in (*before, *crowded, *after):
        assert held.pop("objects of Utilisation", 0) <= len(lanes)
        assert held.pop("objects of Load", 0) <= 1
    # Nothing that a session took is left when the last has gone.
    assert before == after
    first, later = crowded[:4], crowded[4:]
    prompt = engine.core.stores.pages.owned(None)
    for held in crowded:
        assert held["objects of Session"] == held["ingest"] == held["state"] == SESSIONS
        assert held["objects of Held"] == held["ingest"] + held["state"] + held["latents"] + held["host"]
        assert held["objects of Away"] == held["host"]
        assert held["objects of Extent"] <= held["pages"] + SESSIONS
        # What the figures by class are counted on from: a page each, and every part of it that is of one class.
        assert held["objects of _Page"] <= held["pages"] + SESSIONS
        assert held["objects of Stretch"] <= held["objects of Extent"] + held["objects of Run"] + SESSIONS * prompt
        assert held["entries_indexed"] <= 6 * held["sessions_indexed"]
    # From the fifth round on everybody has a history. It grows by one exchange a turn (until it slides) and by its
    # runs. Of nothing else are there more at last than in the first four rounds (two moments: someone may be talking).
    kinds = ("Exchange", "Run", "Held", "Away", "Extent", "_Page", "Stretch", "Wording", "PlacedWord")
    growing = {f"objects of {kind}" for kind in kinds}
    for name in {name for held in later for name in held if name.startswith("objects of ")} - growing:
        assert min(held[name] for held in later[-2:]) <= max(held[name] for held in first), name
    assert max(held["objects of Exchange"] for held in later) <= 2 * SESSIONS
    assert max(held["objects of Run"] for held in later) <= 6 * SESSIONS
    assert max(held["objects of Wording"] for held in later) <= REPLIES_REMEMBERED * SESSIONS
    # The arena was written at the start; the ears and the judge take their buffers with the first spoken turns (40 MB).
    # What the process still grows by is code that torch keeps for clauses of new lengths, some 3 MB a round: the talker
    # has all it wants after 600 clauses (34 MB). Lengths of text fed to the thinker cost nothing, see linear.py rule 5.
    assert max(resident[4:]) - resident[4] < 24 << 20
