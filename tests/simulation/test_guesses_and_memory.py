"""What is made on suspicion is counted apart; memory that is away comes back; a crowd; lanes that declare a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from duplexd.engine.admission import LOAD_MAX
from duplexd.simulation import calibration, model, scenario
from duplexd.simulation.people import Spread
from duplexd.simulation.records import Guess, Outcome, TurnRecord
from duplexd.simulation.report import figures, waste
from duplexd.simulation.run import Simulation
from duplexd.simulation.scenario import Scenario
from duplexd.units import Nanos, Ticks, ms_from_ticks

SCENARIOS = Path("demos/scenarios")


def load(
    name: str, *, concurrency: int, duration_s: float, talk: dict[str, Any] | None = None, **changes: Any
) -> Scenario:
    shipped = scenario.load(SCENARIOS / f"{name}.toml")
    return msgspec.structs.replace(
        shipped,
        warmup_s=0.0,
        duration_s=duration_s,
        arrivals=msgspec.structs.replace(shipped.arrivals, concurrency=concurrency, ramp_s=1.0),
        talk=msgspec.structs.replace(shipped.talk, **(talk or {})),
        **changes,
    )


def run(one: Scenario, policy: str = "interaction") -> Simulation:
    simulation = Simulation(one, policy=policy, seed=1)
    simulation.run()
    return simulation


def report(simulation: Simulation) -> dict[str, Any]:
    return figures(simulation.world, since=Nanos(0), counters=simulation.core.monitor.values())


# Guesses -------------------------------------------------------------------------------------------------------------


def test_wrong_guesses_cost_what_the_engine_says_they_cost_and_are_no_part_of_a_reply() -> None:
    """Two people, one word in ten of whom sounds like the last one: two counts agree."""
    simulation = run(load("pocket", concurrency=2, duration_s=60.0))
    found = report(simulation)
    guesses, monitor = found["guesses"], simulation.core.monitor
    word_s = ms_from_ticks(simulation.world.word) / 1000
    dropped = guesses["dropped_s"]

    assert guesses["count"] == monitor["speculations"] > guesses["confirmed"] > 0
    assert guesses["confirmed"] == monitor["speculations_confirmed"]
    assert dropped["think"] == pytest.approx(monitor["speculative_tokens_discarded"] * word_s)
    assert dropped["render"] == pytest.approx(monitor["speculative_us_discarded"] / 1e6)
    assert dropped["render"] > 0
    for turn in simulation.world.turns:
        if turn.outcome is Outcome.HEARD:
            assert turn.thought_words == turn.reply_words
            assert turn.rendered == turn.heard == turn.reply


def test_whoever_never_sounds_finished_before_the_end_is_guessed_right() -> None:
    guesses = report(run(load("pocket", concurrency=1, duration_s=40.0, talk={"false_ends": 0.0})))["guesses"]

    assert guesses["count"] == guesses["confirmed"] > 0
    assert guesses["dropped_s"] == {"think": 0, "talk": 0, "render": 0}


def test_what_comes_back_after_a_guess_was_right_is_counted_for_the_turn() -> None:
    turn, guess = TurnRecord("v", 0, Ticks(480), 2), Guess(thought_words=2, talked=Ticks(480))
    guess.confirm(turn)
    turn.outcome, turn.heard = Outcome.HEARD, Ticks(480)

    assert (turn.thought_words, turn.talked) == (2, 480)
    assert waste([turn])["talk"] == 0.0


def test_false_ends_change_nothing_else_about_a_person() -> None:
    plain, broken = (
        run(load("pocket", concurrency=1, duration_s=20.0, talk={"false_ends": share})).world.turns
        for share in (0.0, 0.3)
    )
    lengths = [[(turn.reply_words, turn.index) for turn in turns] for turns in (plain, broken)]

    assert lengths[0][0] == lengths[1][0]


# Memory --------------------------------------------------------------------------------------------------------------


def returning(policy: str) -> Simulation:
    """Six people with 3,000 tokens each, of which three fit the arena."""
    one = load(
        "returning",
        concurrency=6,
        duration_s=150.0,
        talk={"past_words": 3000, "gap_ms": Spread(9000, 15000, 3000, 20000), "reply_s": Spread(4, 8, 1, 10)},
        engine=scenario.Engine(context_tokens_max=3600, sessions_max=6, sessions_resident=3),
    )
    return run(one, policy)


def test_memory_leaves_and_comes_back_where_sessions_are_many_and_places_few() -> None:
    simulation = returning("interaction")
    found = report(simulation)
    monitor = simulation.core.monitor

    assert monitor["pages_offloaded"] > 100
    assert monitor["pages_restored"] > 100
    assert found["ttft_away_ms"]["count"] == sum(t.away and t.prefilled_at > 0 for t in simulation.world.turns) > 5
    assert all(turn.outcome in (Outcome.HEARD, Outcome.UNANSWERED, Outcome.FAILED) for turn in simulation.world.turns)


def test_an_engine_of_requests_reads_the_whole_turn_when_it_has_ended() -> None:
    """The same people. Whoever prefills speech as it comes has little left to do when it ends."""
    asked, listened = (report(returning(f"fcfs prefill={how}")) for how in ("false", "true"))

    assert listened["ttft_away_ms"]["p50"] < 0.85 * asked["ttft_away_ms"]["p50"]


# Lanes ---------------------------------------------------------------------------------------------------------------


def test_declared_loads_bound_the_places_as_they_do_in_a_daemon() -> None:
    """Pocket's stages take .21 of a core for each who talks: two cores have time for seven, whatever memory says."""
    found = calibration.load("pocket")
    total = sum(stage.load for stage in model.plan(found).stages.values())
    simulation = Simulation(load("pocket", concurrency=12, duration_s=5.0), policy="interaction", seed=1)
    places = simulation.core.residency.places

    assert found.cores == 2
    assert places.count == int(LOAD_MAX * 2 / total) == 7
    assert places.shortage == "2 cores have time for 7"


def test_devices_of_their_own_share_no_cores() -> None:
    assert calibration.load("liveserve").cores is None


def test_chunks_grow_on_the_pocket_calibration() -> None:
    """By slack, or by the ramp: there is something to choose."""
    assert len(model.plan(calibration.load("pocket")).chunk_ramp) == 3


# A crowd -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_thousand_sessions_fit_in_a_test() -> None:
    """All at once on lanes for sixteen: everybody gets in, somebody is heard, and whoever has gone is closed."""
    one = load("listeners", concurrency=1000, duration_s=4.0, drain_s=30.0, patience_s=12.0)
    simulation = run(one)
    monitor = simulation.core.monitor

    assert len(simulation.world.turns) >= 900
    assert sum(turn.heard_at > 0 for turn in simulation.world.turns) > 10
    assert monitor["sessions_admitted"] == monitor["sessions_closed"] + len(simulation.core.sessions) >= 1000
