"""What the engine tells of its memory, read from the engine while it talks."""

from __future__ import annotations

from itertools import count

import pytest

from duplexd.engine.admission import Places
from duplexd.engine.residency import Residency
from duplexd.ids import SessionId
from duplexd.memory.classes import CacheClass
from duplexd.memory.ledger import SlotLedger
from duplexd.messages import Metrics
from duplexd.units import Nanos
from tests.engine.simulation import Simulation, beep, ms


def talk(*, face: str = "none", until_ms: float = 9000) -> Simulation:
    """Two ask for a long reply; the first is interrupted in the middle of it."""
    simulation = Simulation(until_ms=until_ms, sessions_max=3, face=face)
    for session in (1, 2):
        listener = simulation.connect(session)
        listener.type("say 20", at=ms(500), key=f"{session}")
        if face != "none":
            listener.look(at=ms(100))
    simulation.world.listeners[SessionId(1)].say(beep(900), at=ms(4000))
    return simulation


def reports(simulation: Simulation) -> list[Metrics]:
    return [news for _, news in simulation.world.news if isinstance(news, Metrics)]


@pytest.mark.parametrize("face", ["none", "flash"])
def test_bytes_by_class_are_all_bytes_that_sessions_hold(face: str) -> None:
    """Windows, rings, voices and payloads too, each as the class it is held as; and the prompt, which nobody owns."""
    simulation = talk(face=face)
    simulation.run()
    core = simulation.core
    values = core.metrics().values
    pages = core.stores.pages
    by_class = {label: values[f"bytes_{label.value}"] for label in CacheClass}

    assert values["session_bytes_all"] > 0
    assert sum(by_class.values()) == values["session_bytes_all"] + pages.owned(None) * pages.spec.slot_bytes
    state, ingest = core.stores.state.spec, core.stores.ingest.spec
    assert by_class[CacheClass.ANCHOR] >= pages.owned(None) * pages.spec.slot_bytes + 2 * state.slot_bytes
    assert by_class[CacheClass.INGEST] >= 2 * ingest.slot_bytes


def test_every_count_stands_at_zero_before_anything_happens() -> None:
    """A series that begins with its first event cannot be told from one that does not exist."""
    simulation = Simulation(sessions_max=2, sessions_resident=1)
    counted = simulation.core.metrics().values
    acts = [f"page_{act}" for act in ("leases", "commits", "discards", "cuts", "slides", "folds")]
    acts += [f"slot_{act}" for act in ("leases", "commits", "discards")]
    acts += ["preload_hits", "preload_misses", "preload_skips", "evictions", "pages_offloaded", "pages_restored"]

    assert [counted.get(act) for act in acts] == [0.0] * len(acts)


def test_counts_of_pages_and_slots_add_up_to_what_is_held() -> None:
    simulation = talk()
    simulation.run()
    stores, values = simulation.core.stores, simulation.core.metrics().values
    slots: list[SlotLedger] = [stores.ingest, stores.state, stores.latents]

    assert values["page_leases"] - values["page_discards"] == stores.pages.spec.count - stores.pages.free_count
    held = sum(ledger.spec.count - ledger.free_count for ledger in slots)
    assert values["slot_leases"] - values["slot_discards"] == held
    assert min(values["page_cuts"], values["page_commits"], values["slot_discards"]) > 0


def test_figures_that_are_told_a_few_contexts_at_a_time_become_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duplexd.engine.core.CONTEXTS_A_LOOK", 1)
    simulation = talk(until_ms=16_000)
    simulation.run()
    last = reports(simulation)[-1].values
    now = simulation.core.metrics().values

    assert now["tokens_recent"] > 0
    for label in CacheClass:
        for unit in ("tokens", "bytes"):
            assert last[f"{unit}_{label.value}"] == now[f"{unit}_{label.value}"]


def test_the_time_of_choosing_who_leaves_is_counted_apart_from_what_the_core_says() -> None:
    """Three look-ups of 7 us; nobody is looked for where no page is short. A replay says the same all the same."""
    times = count(0, 7000)
    residency = Residency(
        places=Places(4, ""),
        sessions_max=4,
        page_bytes=10,
        pages=16,
        bytes_per_second=0,
        thread_time=lambda: Nanos(next(times)),
    )
    for pages_short in (1, 0, 2, 3):
        residency.choose(pages_short, ms(1))

    assert (residency.choices_count, residency.choices_took) == (3, 21_000)


def test_choices_are_counted_and_measured_only_by_a_live_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten take turns in an arena for two: somebody is looked for again and again."""
    monkeypatch.setattr("duplexd.models.clock.PAGES_PER_SESSION", 5)
    simulation = Simulation(sessions_max=10, sessions_resident=2, place_wait_ms=1500.0, until_ms=33_000)
    listeners = [simulation.connect(session) for session in range(1, 11)]
    for number in range(30):
        listeners[number % 10].type("say 3", at=ms(1000 + 1000 * number), key=f"{number}")
    simulation.run()
    core = simulation.core
    values = core.metrics().values

    assert values["eviction_choices"] >= values["evictions"] > 0
    assert "eviction_choice_us" not in values
    assert core.measured() == {"eviction_choice_us": 0.0}
