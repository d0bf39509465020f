"""Device order, tested without a device: every fence the toys owe is needed, and the adversary shows it (DESIGN §8)."""

from __future__ import annotations

from random import Random

import pytest
from toys import Lanes, Owes, Wrong, adversary, host, inline, play_pages, play_ring

from duplexd.ids import FenceId
from duplexd.streams.lane import Adversary, AdversaryLane, Fences, Finished, WorkCancelled

SEEDS = range(12)


@pytest.mark.parametrize("lanes", [inline, host, adversary], ids=["inline", "host", "adversary"])
@pytest.mark.parametrize("play", [play_ring, play_pages], ids=["ring", "pages"])
def test_with_every_fence_all_lanes_read_what_was_written(lanes: Lanes, play: object) -> None:
    assert callable(play)
    for seed in SEEDS if lanes is adversary else [0]:
        assert play(lanes, seed) == [], f"seed {seed}"


def has_nan(wrong: Wrong) -> bool:
    return any(number != number for _, _, read in wrong for number in read)


@pytest.mark.parametrize(
    ("play", "forgets", "leaves_nan"),
    [
        pytest.param(play_ring, Owes.READ, True, id="ring-read"),
        pytest.param(play_ring, Owes.SLIDE, True, id="ring-slide"),
        # A dead writer leaves no NaN: it overwrites what the slot's next owner wrote.
        pytest.param(play_ring, Owes.DISCARD, False, id="ring-discard"),
        pytest.param(play_ring, Owes.CLOSE, False, id="ring-close"),
        pytest.param(play_pages, Owes.SLIDE, True, id="pages-slide"),
        pytest.param(play_pages, Owes.CUT, False, id="pages-cut"),
        pytest.param(play_pages, Owes.PROMOTE, False, id="pages-promote"),
        pytest.param(play_pages, Owes.CLOSE, False, id="pages-close"),
    ],
)
def test_a_forgotten_fence_is_found(play: object, forgets: Owes, leaves_nan: bool) -> None:
    """Each line deletes one fence from a correct engine; without the adversary all of them would go unseen here."""
    assert callable(play)
    assert play(inline, 0, forgets) == []
    found = [play(adversary, seed, forgets) for seed in SEEDS]

    assert any(found)
    assert any(map(has_nan, found)) or not leaves_nan


def lanes_of(seed: int, count: int = 3) -> tuple[Adversary, list[AdversaryLane], list[FenceId]]:
    """Lanes whose ends are listed in the order they came."""
    enemy, fences, order = Adversary(Random(seed), fill=lambda partition, slots: None), Fences(), []
    lanes = [AdversaryLane(f"lane{number}", fences, adversary=enemy, now=lambda: 0) for number in range(count)]  # type: ignore[arg-type,return-value]

    def finished(end: Finished) -> None:
        order.append(end.fence)

    for lane in lanes:
        lane.open(finished)
    return enemy, lanes, order


def run_all(seed: int) -> list[FenceId]:
    enemy, lanes, order = lanes_of(seed)
    for number in range(1, 13):
        waits = [FenceId(number - 1)] if number % 4 == 0 else []
        lanes[number % 3].submit(lambda: None, waits=waits, fence=FenceId(number))
    while enemy.step():
        pass
    return order


def test_the_adversary_respects_lanes_and_fences() -> None:
    for seed in range(50):
        order = run_all(seed)
        assert sorted(order) == list(range(1, 13))
        for lane in range(3):
            mine = [fence for fence in order if fence % 3 == lane]
            assert mine == sorted(mine)
        assert all(order.index(FenceId(number - 1)) < order.index(FenceId(number)) for number in (4, 8, 12))


def test_the_adversary_is_seeded() -> None:
    orders = {tuple(run_all(seed)) for seed in range(20)}

    assert run_all(7) == run_all(7)
    assert len(orders) > 10


def test_the_adversary_delays_work_past_everything_later() -> None:
    """Some seed runs the first work of one lane after all the work of another: as late as the fences allow."""
    lasts = set()
    for seed in range(20):
        enemy, lanes, order = lanes_of(seed, count=2)
        lanes[0].submit(lambda: None, fence=FenceId(1))
        for number in range(2, 6):
            lanes[1].submit(lambda: None, fence=FenceId(number))
        while enemy.step():
            pass
        lasts.add(order[-1])

    assert FenceId(1) in lasts


def test_cancelled_work_passes_without_running() -> None:
    enemy, (lane,), order = lanes_of(0, count=1)
    ran: list[int] = []
    lane.submit(lambda: ran.append(1), fence=FenceId(1))
    lane.submit(lambda: ran.append(2), fence=FenceId(2))
    assert lane.cancel(FenceId(1))
    while enemy.step():
        pass

    assert (ran, order) == ([2], [1, 2])
    assert not lane.cancel(FenceId(2))


def test_what_is_freed_is_filled_at_once() -> None:
    filled: list[tuple[str, list[int]]] = []
    enemy = Adversary(Random(0), fill=lambda partition, slots: filled.append((partition, list(slots))))
    enemy.freed("ring", range(3))

    assert (filled, enemy.filled) == ([("ring", [0, 1, 2])], 3)


def test_a_cancelled_end_says_so() -> None:
    ends: list[Finished] = []
    enemy, fences = Adversary(Random(0), fill=lambda partition, slots: None), Fences()
    lane = AdversaryLane("only", fences, adversary=enemy)
    lane.open(ends.append)
    lane.cancel(lane.submit(lambda: None))
    enemy.step()

    assert isinstance(ends[0].error, WorkCancelled)
