"""How much face there is time for: the table of levels, and what moves it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplexd.engine.governor import LEVELS, PATIENCE, PATIENCE_MAX, Fidelity, Governor, Seen

WELL = Seen(planned=25, missed=0, busy=0.4)
LATE = Seen(planned=25, missed=12, busy=0.4)
NONE = Seen(planned=25, missed=25, busy=0.4)


def after(governor: Governor, *looks: Seen) -> list[int]:
    levels = []
    for seen in looks:
        governor.look(seen)
        levels.append(governor.level)
    return levels


def test_levels_cost_less_and_less_and_end_in_a_still_picture() -> None:
    pictures = [0.0 if level.still else 25 / level.stride for level in LEVELS]

    assert pictures == sorted(pictures, reverse=True)
    assert pictures[0] == 25
    assert [level.name for level in LEVELS if level.still] == ["still"]
    assert LEVELS[-1].still


@pytest.mark.parametrize(
    ("seen", "loses"),
    [
        (Seen(25, 0, 0.2), False),
        (Seen(25, 4, 0.2), False),  # few: a voice began
        (Seen(25, 5, 0.2), True),
        (Seen(100, 10, 0.2), False),  # of four faces: a tenth
        (Seen(100, 11, 0.2), True),
        (Seen(0, 0, 0.0), False),
        (Seen(0, 8, 0.0), True),  # nothing was made, and something was to be
        (Seen(25, 0, 0.96), True),
        (Seen(25, 0, None), False),
    ],
)
def test_what_costs_a_level_when_it_lasts(seen: Seen, loses: bool) -> None:
    assert after(Governor(), WELL, seen, seen) == [0, 0, int(loses)]
    assert after(Governor(), seen, WELL, seen, WELL, seen) == [0] * 5


@pytest.mark.parametrize(
    ("seen", "loses"), [(Seen(25, 15, 0.2), False), (Seen(25, 16, 0.2), True), (Seen(8, 8, 0.1), False)]
)
def test_what_costs_a_level_at_once(seen: Seen, loses: bool) -> None:
    """Hardly a frame came in time. Of few frames nothing is concluded."""
    assert after(Governor(), seen) == [int(loses)]


def test_a_front_end_that_cannot_encode_costs_a_level_once() -> None:
    governor = Governor()
    for _ in range(2):
        governor.note_sent(0.5)
        governor.note_sent(1.0)
        after(governor, WELL)

    assert governor.level == 1
    assert after(governor, WELL, WELL, WELL) == [1, 1, 1]


def test_the_look_after_a_loss_does_not_count() -> None:
    """Frames that were planned before it come late after it."""
    assert after(Governor(), *[LATE] * 8) == [0, 1, 1, 1, 2, 2, 2, 3]
    assert after(Governor(), *[NONE] * 8) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_it_goes_down_to_the_floor_and_up_again_step_by_step() -> None:
    governor = Governor()
    after(governor, *[NONE] * 20)
    assert governor.fidelity.still
    levels = after(governor, *[WELL] * (len(LEVELS) * (PATIENCE + 2)))

    assert levels[-1] == 0
    assert {a - b for a, b in pairwise(levels)} <= {0, 1}


def test_a_busy_second_now_and_then_does_not_keep_a_level_lost() -> None:
    """A person who asks every four seconds: the second in which a reply begins costs no level, so it bars none."""
    levels = after(Governor(), LATE, LATE, *[WELL, WELL, WELL, LATE] * 4)

    assert levels[1] == 1
    assert levels.index(0, 1) == 11
    assert set(levels[11:]) == {0}


def test_a_lane_that_could_not_bear_twice_the_work_is_not_asked_to() -> None:
    governor = Governor()
    after(governor, NONE)

    assert set(after(governor, *[Seen(25, 0, 0.85)] * 50)) == {1}
    assert after(governor, *[WELL] * PATIENCE)[-1] == 0


def test_a_level_that_does_not_hold_is_tried_later_and_later() -> None:
    """The load fits one level and not the one above: the tries get rarer, down to a bound."""
    governor = Governor()
    tries = []
    for look in range(2000):
        before = governor.level
        governor.look(NONE if governor.level == 0 else WELL)
        if governor.level < before:
            tries.append(look)
    gaps = [b - a for a, b in pairwise(tries)]

    assert gaps[0] < gaps[1] < gaps[2]
    assert max(gaps) <= PATIENCE_MAX + 5
    assert gaps == sorted(gaps)


def test_a_level_that_held_makes_the_next_try_soon_again() -> None:
    governor = Governor()
    for _ in range(4):
        after(governor, NONE, WELL, *[WELL] * 40)
    after(governor, *[WELL] * 200)
    after(governor, NONE, WELL)

    assert after(governor, *[WELL] * (PATIENCE + 1))[-1] == 0


@given(
    st.lists(
        st.builds(Seen, st.integers(0, 100), st.integers(0, 100), st.one_of(st.none(), st.floats(0, 2))), max_size=80
    )
)
def test_whatever_it_sees_it_moves_one_level_at_a_time(looks: list[Seen]) -> None:
    governor = Governor()
    levels = [0, *after(governor, *looks)]

    assert all(abs(a - b) <= 1 for a, b in pairwise(levels))
    assert all(0 <= level < len(LEVELS) for level in levels)


def test_one_level_is_no_ladder() -> None:
    governor = Governor([Fidelity(2, 1)])

    assert after(governor, *[NONE] * 5) == [0] * 5
    with pytest.raises(ValueError, match="at least one level"):
        Governor([])
