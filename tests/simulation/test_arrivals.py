"""Who comes when, and what they will do, is drawn before anything runs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean, pstdev

import pytest

from duplexd.errors import ConfigError
from duplexd.simulation.arrivals import Arrivals, open_times, read_trace
from duplexd.simulation.people import Faults, Spread, Talk, draw_visit
from duplexd.units import NANOS_PER_SECOND, Nanos

TALK = Talk(
    input="voice",
    reply_s=Spread(12, 40, 1, 90),
    words_in=Spread(9, 20, 1, 40),
    gap_ms=Spread(1200, 3000, 300, 10_000),
    turns_mean=6,
)
HOUR = Nanos(3600 * NANOS_PER_SECOND)


def gaps(arrivals: Arrivals) -> list[float]:
    times = [0, *open_times(arrivals, seed=3, until=HOUR)]
    return [(b - a) / NANOS_PER_SECOND for a, b in pairwise(times)]


@pytest.mark.parametrize(("shape", "variation"), [(1.0, 1.0), (0.25, 2.0)])
def test_gamma_gaps_have_the_rate_and_the_burstiness_that_was_asked_for(shape: float, variation: float) -> None:
    found = gaps(Arrivals("gamma", rate=2.0, shape=shape))

    assert mean(found) == pytest.approx(0.5, rel=0.06)
    assert pstdev(found) / mean(found) == pytest.approx(variation, rel=0.08)


def test_poisson_is_gamma_of_shape_one() -> None:
    assert gaps(Arrivals("poisson", rate=2.0)) == gaps(Arrivals("gamma", rate=2.0, shape=1.0))


def draw(p: float, name: str = "seat-1-0") -> list[tuple[int, int, float | None]]:
    visit = draw_visit(name, seed=7, talk=TALK, p=p, faults=Faults(), word_ms=240, words_max=400, turns=50)
    return [(turn.words_in, turn.reply_words, turn.barges_at) for turn in visit.turns]


def test_a_sweep_over_p_changes_who_interrupts_and_nothing_else() -> None:
    never, half, always = draw(0.0), draw(0.5), draw(1.0)

    assert [turn[:2] for turn in never] == [turn[:2] for turn in half] == [turn[:2] for turn in always]
    assert all(moment is None for _, _, moment in never)
    assert 10 < sum(moment is not None for _, _, moment in half) < 40
    assert all(b in (None, a) for (*_, a), (*_, b) in zip(always, half, strict=True))


def test_the_moment_of_an_interruption_is_uniform_over_the_reply() -> None:
    moments = sorted(m for n in range(40) for *_, m in draw(1.0, f"seat-{n}") if m is not None)

    assert max(abs(m - i / len(moments)) for i, m in enumerate(moments)) < 1.63 / len(moments) ** 0.5  # KS, 1 %


def test_a_spread_has_the_median_and_the_tail_it_names() -> None:
    rng = Random(1)
    drawn = sorted(Spread(12, 40, 0.001, 1e9).draw(rng) for _ in range(20_000))

    assert drawn[10_000] == pytest.approx(12, rel=0.03)
    assert drawn[18_000] == pytest.approx(40, rel=0.04)


def test_the_sample_trace_reads_as_visits_with_turns() -> None:
    visits = read_trace(Path("demos/scenarios/burst-sample.csv"))

    assert len(visits) > 5
    assert any(len(turns) > 1 for turns in visits)
    assert visits[0][0].at == 0


HEAD = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Timestamp,Model\n1,x\n", "lacks the columns Session ID"),
        (HEAD + "5,a,1,m,10,x,20,chat\n", "line 2"),
        (HEAD + "5,a,1,m,10,5,15,chat\n4,a,1,m,10,5,15,chat\n", "line 3: time goes back"),
        (HEAD + "5,a,1,m,10,0,10,chat\n", "no row with a response"),
    ],
    ids=["columns", "number", "order", "empty"],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, text: str, wrong: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)

    with pytest.raises(ConfigError, match=wrong):
        read_trace(file)
