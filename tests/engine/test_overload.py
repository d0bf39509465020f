"""An engine with too little lane time: places shrink while it runs, who has one keeps it, starved work is counted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from duplexd.ids import SessionId
from duplexd.messages import ResponseState
from duplexd.streams.stage import CostModel
from tests.engine.simulation import Simulation, ms

COMPLETED, FAILED = ResponseState.COMPLETED, ResponseState.FAILED


def crowd(sessions: int, *, render_ms: float, until_ms: float, **changes: Any) -> Simulation:
    """Everybody asks for 12 words (6 s) again and again; one chunk of up to 320 ms costs `render_ms` of lane time."""
    simulation = Simulation(
        sessions_max=sessions, until_ms=until_ms, place_wait_ms=60_000, speculation=False, **changes
    )
    stage = simulation.world.stages["render"]
    stage.spec = msgspec.structs.replace(stage.spec, cost=CostModel(fixed_us=round(1000 * render_ms)))
    for session in range(1, sessions + 1):
        listener = simulation.connect(session)
        for turn in range(6):
            listener.type("say 12", at=ms(1000 + 37 * session + 8000 * turn), key=f"{turn}")
    return simulation


def places(simulation: Simulation) -> int:
    return simulation.core.residency.places.count


def test_places_shrink_under_overload_and_nobody_who_talks_is_thrown_out() -> None:
    """Eight at once need 2.5 times the lane that renders: they hear gaps until fewer talk at once. No reply fails."""
    simulation = crowd(8, render_ms=100, until_ms=40_000)
    counts: list[tuple[int, int]] = []
    for second in range(2, 40):
        simulation.world.at(
            ms(1000 * second), lambda: counts.append((places(simulation), simulation.core.residency.seated_count))
        )
    simulation.run()
    ends = [ends for s in range(1, 9) for ends in simulation.final_states(s).values() if ends]

    assert min(count for count, _ in counts) < 8
    assert simulation.core.monitor["places_shrunk"] > 0
    assert any(seated > count for count, seated in counts), "whoever had a place kept it"
    assert FAILED not in [end for one in ends for end in one]


def test_places_stay_where_lanes_have_time() -> None:
    simulation = crowd(4, render_ms=10, until_ms=20_000)
    simulation.run()

    assert places(simulation) == 4
    assert simulation.core.monitor["places_shrunk"] == simulation.core.monitor["works_starved"] == 0


@pytest.mark.parametrize(
    "changes",
    [{"lanes_target": 0.0}, {"policy": "fcfs"}, {"policy_options": {"admission": "false"}}],
    ids=["target 0", "fcfs", "taken away"],
)
def test_places_stay_as_declared_when_they_are_told_to(changes: dict[str, Any]) -> None:
    simulation = crowd(8, render_ms=100, until_ms=20_000, **changes)
    simulation.run()

    assert places(simulation) == 8
    assert simulation.core.monitor["chunks_late"] > 0


def test_work_that_finds_no_lane_is_counted_as_starved_although_no_chunk_is_late() -> None:
    """The lane is wedged by one launch of 6 s: nothing is published, so no chunk is late; the others' wait shows."""
    simulation = Simulation(sessions_max=3, until_ms=6000, speculation=False)
    stage = simulation.world.stages["render"]
    stage.spec = msgspec.structs.replace(stage.spec, cost=CostModel(fixed_us=6_000_000))
    for session in (1, 2, 3):
        simulation.connect(session).type("say 4", at=ms(1000 + session), key="1")
    simulation.run()
    starved = simulation.core.monitor.events("starved")

    assert simulation.core.monitor["chunks_late"] == 0
    assert {event.session for event in starved} >= {SessionId(2), SessionId(3)}
    assert len(starved) == simulation.core.monitor["works_starved"]
    assert len(starved) <= 2 * 3, "each piece of work once, though it starves for seconds"


@pytest.mark.parametrize("limit", [1, 3])
def test_metrics_say_how_many_places_there_are(limit: int) -> None:
    simulation = Simulation(sessions_max=limit, until_ms=1000)
    simulation.run()

    assert simulation.core.metrics().values["places"] == limit
