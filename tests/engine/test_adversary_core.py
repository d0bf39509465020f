"""The core that serves people under the adversary: no memory is given away while work that names it runs (DESIGN §8).

The same rule is tried on toys in tests/streams; here every `after=` is the engine's own.
"""

from __future__ import annotations

from random import Random

import pytest

from duplexd.engine.simulator import SimNetwork
from duplexd.streams.stage import MoveJob
from tests.engine.adversary import Adversarial
from tests.engine.simulation import beep, ms
from tests.engine.test_core_machine import check_epochs, check_history, check_ledgers, check_responses

SEEDS = range(8)
SESSIONS = (1, 2, 3)


def talk(seed: int, *, face: str = "none", resident: int = 0, forgets: tuple[str, str] | None = None) -> Adversarial:
    """Three people who type, speak over the reply, press stop and leave, at moments of the seed's; then others come."""
    simulation = Adversarial(
        seed=seed, forgets=forgets, until_ms=9000, sessions_max=3, sessions_resident=resident, face=face
    )
    rng = Random(seed)
    listeners = [simulation.connect(n, at_ms=200, network=SimNetwork(delay=ms(rng.uniform(1, 40)))) for n in SESSIONS]
    for listener in listeners:
        at = rng.uniform(400, 900)
        if face != "none":
            listener.look(at=ms(at - 100))
        for turn in range(7):
            listener.type(f"say {rng.randint(3, 30)}", at=ms(at), key=f"{listener.session}-{turn}")
            at += rng.uniform(20, 900)
            rng.choice([listener.stop, lambda at: listener.say(beep(500), at=at)])(at=ms(at))  # noqa: B023
            at += rng.uniform(20, 600)
        if rng.random() < 0.7:
            gone = listener
            simulation.world.at(ms(rng.uniform(2500, 8500)), lambda gone=gone: gone.leave())
    simulation.run()
    return simulation


def check(simulation: Adversarial) -> None:
    assert simulation.watch.wrong == []
    assert simulation.watch.broken == []
    for session in SESSIONS:
        check_epochs(simulation, session)
        check_responses(simulation, session)
        check_history(simulation, session, simulation.world.listeners[session])  # type: ignore[index]
    check_ledgers(simulation)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_running_work_loses_its_memory(seed: int) -> None:
    simulation = talk(seed)

    check(simulation)
    assert simulation.enemy.filled > 0  # Something was given back, and read by nobody.


@pytest.mark.parametrize("seed", SEEDS)
def test_nor_with_a_face(seed: int) -> None:
    check(talk(seed, face="flash"))


def test_nor_when_contexts_leave_for_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pages a session and a place for one: pages come and go under copies that the adversary holds up."""
    monkeypatch.setattr("duplexd.models.clock.PAGES_PER_SESSION", 3)
    moves = 0
    for seed in SEEDS:
        simulation = talk(seed, resident=1)
        check(simulation)
        moves += sum(isinstance(launch.jobs[0], MoveJob) for _, launch in simulation.world.launches)

    assert moves > 0


@pytest.mark.parametrize(
    ("ledger", "method", "face"),
    [
        ("latents", "discard", "none"),
        ("latents", "close", "none"),
        ("ingest", "close", "none"),
        ("state", "close", "none"),
        ("pages", "cut", "none"),
        ("pages", "promote", "none"),
        ("pages", "close", "none"),
        ("motion", "discard", "flash"),
        ("noisy", "close", "flash"),
        ("clean", "close", "flash"),
        ("voice", "close", "flash"),
    ],
)
def test_a_fence_the_engine_forgets_is_found(ledger: str, method: str, face: str) -> None:
    """One `after=` less, and some seed shows which work was robbed."""
    assert any(talk(seed, face=face, forgets=(ledger, method)).watch.wrong for seed in SEEDS)
