"""The end of a turn: silence, the judge of sounds and the words decide together, from a table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplexd.media.endpoint import (
    Ask,
    End,
    Ending,
    EndpointRow,
    EndpointRule,
    Judged,
    Scale,
    Wait,
    default_rule,
    ending_of,
)
from duplexd.units import Ticks, ticks_from_ms

MS = ticks_from_ms


def rule() -> EndpointRule:
    rows = (
        EndpointRow(MS(100), Scale(asked=0.2, closed=0.5, unknown=0.9, open=1.1)),
        EndpointRow(MS(300), Scale(asked=0.1, closed=0.3, unknown=0.8, open=1.1)),
    )
    return EndpointRule(rows, silence_max=Scale(asked=500, closed=600, unknown=700, open=1000))


def test_before_the_first_row_it_waits_for_it() -> None:
    assert rule().decide(MS(40), []) == Wait(until=MS(100))


def test_each_row_asks_once() -> None:
    asked = rule().decide(MS(110), [])
    waiting = rule().decide(MS(140), [], pending=True)
    answered = rule().decide(MS(200), [Judged(MS(110), 0.1, Ending.CLOSED)])
    again = rule().decide(MS(300), [Judged(MS(110), 0.1, Ending.CLOSED)])

    assert (asked, waiting, answered, again) == (Ask(), Wait(until=MS(700)), Wait(until=MS(300)), Ask())


@pytest.mark.parametrize(
    ("ending", "probability", "ends"),
    [
        (Ending.ASKED, 0.25, True),
        (Ending.CLOSED, 0.25, False),
        (Ending.CLOSED, 0.5, True),
        (Ending.UNKNOWN, 0.85, False),
        (Ending.OPEN, 1.0, False),
    ],
    ids=["a question needs little", "a statement more", "and gets it", "no words, more still", "a comma, never"],
)
def test_the_words_set_how_sure_the_judge_must_be(ending: Ending, probability: float, ends: bool) -> None:
    verdict = rule().decide(MS(200), [Judged(MS(110), probability, ending)])

    assert isinstance(verdict, End) == ends


@pytest.mark.parametrize(
    ("ending", "limit"), [(Ending.ASKED, 500), (Ending.CLOSED, 600), (Ending.UNKNOWN, 700), (Ending.OPEN, 1000)]
)
def test_silence_alone_ends_a_turn_at_its_limit(ending: Ending, limit: int) -> None:
    answers = [Judged(MS(110), 0.0, ending), Judged(MS(320), 0.0, ending)]

    assert rule().decide(MS(limit - 1), answers) == Wait(until=MS(limit))
    assert rule().decide(MS(limit), answers) == End(judged=False)


def test_a_judge_that_never_answers_cannot_hold_a_turn() -> None:
    assert rule().decide(MS(700), [], pending=True) == End(judged=False)


def test_a_late_answer_counts_for_the_silence_it_was_asked_at() -> None:
    """Asked at 110 ms, answered at 400: 0.3 would do for the second row, and this was the first."""
    late = rule().decide(MS(310), [Judged(MS(110), 0.35, Ending.CLOSED)])

    assert late == Ask()


@given(
    st.integers(1, 48_000),
    st.lists(st.tuples(st.integers(1, 48_000), st.floats(0, 1), st.sampled_from(Ending)), max_size=4),
    st.booleans(),
)
def test_every_silence_has_a_verdict_and_waits_point_ahead(
    silence: int, answers: list[tuple[int, float, Ending]], pending: bool
) -> None:
    judged = [
        Judged(Ticks(at), p, ending) for at, p, ending in sorted(answers, key=lambda one: one[0]) if at <= silence
    ]
    verdict = default_rule().decide(Ticks(silence), judged, pending=pending)

    assert not isinstance(verdict, Wait) or verdict.until > silence
    assert not (pending and isinstance(verdict, Ask))
    assert silence < MS(1200) or isinstance(verdict, End)


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ("", Ending.UNKNOWN),
        ("  ", Ending.UNKNOWN),
        ("Why is the sky blue?", Ending.ASKED),
        ('He said "Really now?"', Ending.ASKED),
        ("What is snow made of?", Ending.CLOSED),
        ("I like music.", Ending.CLOSED),
        ("Yes", Ending.CLOSED),
        ("So?", Ending.ASKED),
        ("After dinner,", Ending.OPEN),
        ("I really like the.", Ending.OPEN),
        ("I have a question about.", Ending.OPEN),
        ("Can you tell me, um.", Ending.OPEN),
        ("Wait...", Ending.OPEN),
        ("?", Ending.ASKED),
    ],
)
def test_words_tell_how_they_end(text: str, ending: Ending) -> None:
    assert ending_of(text) is ending


def test_rows_that_make_no_sense_are_refused() -> None:
    scale = Scale(asked=0.5, closed=0.5, unknown=0.5, open=0.5)
    limit = Scale(asked=500, closed=500, unknown=500, open=500)

    for silences in ([300, 100], [0], [500], [100, 100]):
        with pytest.raises(ValueError):
            EndpointRule([EndpointRow(MS(ms), scale) for ms in silences], silence_max=limit)
