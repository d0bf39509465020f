"""What `interaction` does about batches and beginnings, on the same people with each mechanism and without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from duplexd.engine.policy import LANES_BUSY
from duplexd.engine.session import BEGINNING_WAIT_MAX, FEED_LONGEST, FEED_MAX, Session
from duplexd.engine.work import Launch
from duplexd.simulation import scenario
from duplexd.simulation.report import GAP_MAX
from duplexd.simulation.run import Simulation
from duplexd.streams.stage import ThinkJob
from duplexd.units import NANOS_PER_SECOND, Nanos

LISTENERS = scenario.load(Path("demos/scenarios/listeners.toml"))


def listeners(count: int, options: str = "", *, seed: int = 11, duration_s: float = 90.0) -> Simulation:
    """Not run yet. Nobody is turned away, so that all meet the same people."""
    changed = msgspec.structs.replace(
        LISTENERS, duration_s=duration_s, arrivals=msgspec.structs.replace(LISTENERS.arrivals, concurrency=count)
    )
    return Simulation(changed, policy=f"interaction admission=false {options}".strip(), seed=seed)


def run(count: int, options: str = "", **changes: Any) -> Simulation:
    simulation = listeners(count, options, **changes)
    simulation.run()
    return simulation


def rows(simulation: Simulation, stage: str) -> float:
    launches, rows = simulation.world.launches[stage]
    return rows / launches


def gaps(simulation: Simulation, *, within_s: float = 1e9) -> int:
    """Replies in which somebody heard a gap so soon after its first sound."""
    limit = within_s * NANOS_PER_SECOND
    return sum(
        any(gap.length > GAP_MAX and gap.at - turn.heard_at <= limit for gap in turn.gaps)
        for turn in simulation.world.turns
    )


def test_behind_the_gate_chunks_come_in_company() -> None:
    """The same speech in half as many launches: the device works less, and fewer replies have gaps."""
    company, alone = run(12), run(12, "company=false")
    busy = [one.world.devices["talker"].busy_ns / one.world.now() for one in (company, alone)]

    assert rows(company, "render") > 1.5 * rows(alone, "render")
    assert rows(company, "talk") > 1.3 * rows(alone, "talk")
    assert busy[0] < 0.9 * busy[1]
    assert gaps(company) < gaps(alone)


def test_a_reply_that_begins_goes_on() -> None:
    """Without it, the second clause waits for launches of four and is made in one: a gap after the first words."""
    spared, unspared = (
        sum(gaps(run(12, options, seed=seed, duration_s=120.0), within_s=2.0) for seed in (11, 12))
        for options in ("", "beginnings=false")
    )

    assert unspared > 2 * spared


def test_a_first_chunk_waits_no_longer_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some wait on a crowded device, most do not, and none beyond the bound."""
    waits: list[Nanos] = []
    publish = Session._publish

    def published(self: Session, chunk: Any, reply: Any, now: Nanos) -> None:
        if reply.chunks_published == 0:
            waits.append(Nanos(now - reply.held_since))
        publish(self, chunk, reply, now)

    monkeypatch.setattr(Session, "_publish", published)
    simulation = run(16)

    assert len(waits) >= len([turn for turn in simulation.world.turns if turn.published_at])
    assert 0 < sum(wait > 0 for wait in waits) < 0.9 * len(waits)
    assert max(waits) <= BEGINNING_WAIT_MAX


def feeds(options: str) -> list[int]:
    """Tokens that each job of the thinker feeds."""
    found: list[int] = []
    simulation = listeners(4, options, duration_s=40.0)

    def watch(launch: Launch, now: Nanos) -> None:
        found.extend(len(job.feed) for job in launch.jobs if isinstance(job, ThinkJob))

    simulation.world.watch = watch
    simulation.run()
    return found


def test_a_step_of_prefill_takes_as_long_as_one_of_decoding() -> None:
    """Eight tokens of decoding take as long here as 533 of prefill, which is more than the longest feed."""
    assert max(feeds("")) == FEED_LONGEST
    assert max(feeds("feed=false")) == FEED_MAX


def test_first_sounds_come_sooner_while_the_lanes_have_time() -> None:
    """Eight listeners: later speech is not made before its time, and first sounds find lanes free."""
    simulation = run(8)
    waited = sorted(turn.published_at - turn.decided_at for turn in simulation.world.turns if turn.published_at)

    assert simulation.world.devices["talker"].busy_ns / simulation.world.now() < LANES_BUSY
    assert waited[len(waited) * 9 // 10] < NANOS_PER_SECOND
