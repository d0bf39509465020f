"""Devices: launches of several lanes share one capacity, and overlap is not free."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplexd.ids import WorkId
from duplexd.simulation import calibration
from duplexd.simulation.device import Device
from duplexd.streams.stage import CostModel, SimulatedCost
from duplexd.units import NANOS_PER_MS, Nanos


def ms(value: float) -> Nanos:
    return Nanos(round(value * NANOS_PER_MS))


def run_out(device: Device) -> dict[int, float]:
    """When each launch ended, in ms."""
    ends: dict[int, float] = {}
    while (when := device.next_end()) is not None:
        for work in device.ended(when):
            ends[work] = when / NANOS_PER_MS
    return ends


def test_claims_within_the_capacity_run_at_full_speed() -> None:
    device = Device("gpu")
    device.begin(WorkId(1), share=0.4, alone=ms(100), now=ms(0))
    device.begin(WorkId(2), share=0.6, alone=ms(50), now=ms(0))

    assert run_out(device) == {1: pytest.approx(100), 2: pytest.approx(50)}


def test_claims_beyond_the_capacity_stretch_everybody_until_one_ends() -> None:
    """Two that want the whole device: 50 ms of work takes 100, the other's rest then runs alone."""
    device = Device("gpu")
    device.begin(WorkId(1), share=1.0, alone=ms(100), now=ms(0))
    device.begin(WorkId(2), share=1.0, alone=ms(50), now=ms(0))

    assert run_out(device) == {1: pytest.approx(150), 2: pytest.approx(100)}


def test_who_comes_later_slows_whoever_is_there() -> None:
    device = Device("gpu")
    device.begin(WorkId(1), share=1.0, alone=ms(100), now=ms(0))
    device.begin(WorkId(2), share=1.0, alone=ms(10), now=ms(80))

    assert run_out(device) == {2: pytest.approx(100), 1: pytest.approx(110)}


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 300)), min_size=1, max_size=20))
def test_no_work_is_lost_and_none_is_free(works: list[tuple[int, int]]) -> None:
    """Launches that want the whole device: the device is busy exactly as long as all of them together take alone."""
    device = Device("gpu")
    arrivals = sorted(works)
    ended = 0
    for index, (at, alone) in enumerate(arrivals):
        while (when := device.next_end()) is not None and when <= ms(at):
            ended += len(device.ended(when))
        device.begin(WorkId(index + 1), share=1.0, alone=ms(alone), now=ms(at))
    ended += len(run_out(device))

    assert ended == len(works)
    assert device.busy_ns / NANOS_PER_MS == pytest.approx(sum(alone for _, alone in works), abs=1e-3 * len(works))


@pytest.mark.parametrize(("one_device", "last"), [(False, 1580 + 19 * 700), (True, 20 * 1580)])
def test_the_three_stages_of_lpm_overlap_only_on_devices_of_their_own(one_device: bool, last: float) -> None:
    """Chunk n in the generator, n-1 in the refiner, n-2 in the decoder: a steady period of the slowest stage. On one
    device twenty chunks take as long as all their stages one after the other."""
    costs = calibration.load("lpm").stages
    names = ("generate", "refine", "decode")
    devices = {name: Device("one" if one_device else costs[name].device) for name in names}
    if one_device:
        devices = dict.fromkeys(names, devices["generate"])
    waiting: dict[str, list[int]] = {"generate": list(range(20)), "refine": [], "decode": []}
    running: dict[str, int | None] = dict.fromkeys(names)
    done: list[float] = []
    now = Nanos(0)
    while len(done) < 20:
        for place, name in enumerate(names):
            if running[name] is None and waiting[name]:
                chunk = running[name] = waiting[name].pop(0)
                work = WorkId(1 + 3 * chunk + place)
                devices[name].begin(
                    work, share=1.0, alone=ms(costs[name].mean.predict_us(rows=1, units=0) / 1000), now=now
                )
        now = min(when for device in devices.values() if (when := device.next_end()) is not None)
        ended = {work: None for device in {id(d): d for d in devices.values()}.values() for work in device.ended(now)}
        for work in ended:
            chunk, place = divmod(work - 1, 3)
            running[names[place]] = None
            if place < 2:
                waiting[names[place + 1]].append(chunk)
            else:
                done.append(now / NANOS_PER_MS)

    assert done[19] == pytest.approx(last, rel=0.001)
    if not one_device:
        assert done[0] == pytest.approx(1580, rel=0.001)


def test_noise_changes_no_mean() -> None:
    cost = SimulatedCost(CostModel(fixed_us=1000, per_row_us=100, per_unit_us=10, per_step_us=50), "gpu", sigma=0.3)
    rng = Random(5)
    drawn = [cost.draw_us(rng, rows=4, units=20, steps=8) for _ in range(20_000)]

    assert sum(drawn) / len(drawn) == pytest.approx(1000 + 400 + 200 + 400, rel=0.01)
    assert min(drawn) < 1500 < 2500 < max(drawn)
