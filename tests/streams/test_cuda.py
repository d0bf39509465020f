"""CUDA lanes and an arena on a device: float32, exact, compared with the plain version (scripts/device runs these)."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch
from toys import RING, stage_spec

from duplexd import clock
from duplexd.ids import FenceId, WorkId
from duplexd.memory.arena import Arena
from duplexd.memory.layout import ArenaLayout, FieldSpec, PartitionKind, PartitionSpec
from duplexd.streams.executor import Executor
from duplexd.streams.lane import CudaLane, Fences, Finished, HostLane, Later, StreamLane
from duplexd.units import NANOS_PER_SECOND, Nanos

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device; run scripts/device on a machine with one"
    ),
]

LONG = Nanos(20 * NANOS_PER_SECOND)
SLOW_CYCLES = 200_000_000  # about 0.1 s of a busy stream at 2 GHz


class Lab:
    """Two CUDA lanes and a host lane over one book of fences."""

    def __init__(self) -> None:
        self.fences = Fences()
        self.ends: list[Finished] = []
        self.one = CudaLane("one", self.fences)
        self.two = CudaLane("two", self.fences, priority=1)
        self.host = HostLane("host", self.fences)
        for lane in (self.one, self.two, self.host):
            lane.open(self.ends.append)

    def drain(self) -> None:
        deadline = clock.now() + LONG
        while any(map(self.fences.book.outstanding, ("one", "two", "host"))):
            self.one.poll()
            self.two.poll()
            assert clock.now() < deadline


@pytest.fixture
def lab() -> Iterator[Lab]:
    built = Lab()
    yield built
    assert built.one.close(within=LONG)
    assert built.two.close(within=LONG)
    assert built.host.close(within=LONG)


def sleep() -> None:
    torch.cuda._sleep(SLOW_CYCLES)  # type: ignore[no-untyped-call]


def test_submit_returns_before_the_device_is_done(lab: Lab) -> None:
    fence = lab.one.submit(sleep)
    lab.one.poll()
    assert not lab.fences.passed(fence)
    lab.drain()

    assert lab.fences.passed(fence)
    assert lab.ends[0].ended - lab.ends[0].started > NANOS_PER_SECOND // 100


def test_a_read_on_one_stream_waits_for_the_write_on_another(lab: Lab) -> None:
    """The writer's stream is slow; the reader's stream is idle and urgent, and still reads what was written."""
    cell = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    copy = torch.empty(1).pin_memory()

    def write() -> None:
        sleep()
        cell.fill_(7)

    def read() -> Later:
        copy.copy_(cell, non_blocking=True)
        return Later(copy.item)

    lab.two.submit(read, waits=[lab.one.submit(write)])
    lab.drain()

    assert [end.value for end in lab.ends] == [None, 7.0]


def test_a_stream_waits_for_host_work_and_host_work_for_a_stream(lab: Lab) -> None:
    cell = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()

    def fill() -> None:
        cell.fill_(3)

    first = lab.host.submit(lambda: "host")
    second = lab.one.submit(fill, waits=[first])
    lab.host.submit(cell.item, waits=[second])
    lab.drain()

    assert [end.value for end in lab.ends][::2] == ["host", 3.0]


def test_a_fault_fails_its_work_and_its_fence_waits_for_the_kernels_before_it(lab: Lab) -> None:
    def broken() -> None:
        sleep()
        raise ValueError("a bad row")

    fence = lab.one.submit(broken)
    lab.one.submit(lambda: "next")
    lab.one.poll()
    assert not lab.fences.passed(fence)
    lab.drain()

    assert [type(end.error) for end in lab.ends] == [ValueError, type(None)]
    assert lab.ends[1].value == "next"


def test_a_thread_with_a_stream_ends_when_its_kernels_have(lab: Lab) -> None:
    """The host lane reads with a stream of its own: only the fence tells it that the slow write is there."""
    cell = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    threaded = StreamLane("threaded", lab.fences)
    threaded.open(lab.ends.append)

    def write() -> None:
        sleep()
        cell.fill_(5)

    written = threaded.submit(write)
    lab.host.submit(cell.item, waits=[written])
    lab.drain()
    assert threaded.close(within=LONG)

    assert [end.value for end in lab.ends] == [None, 5.0]
    assert lab.ends[0].ended - lab.ends[0].started > NANOS_PER_SECOND // 100


def test_two_lanes_overlap(lab: Lab) -> None:
    """Two busy streams take about as long as one, not twice as long."""

    def elapsed(lanes: list[CudaLane]) -> int:
        start = clock.now()
        for lane in lanes:
            lane.submit(sleep)
        lab.drain()
        return clock.now() - start

    elapsed([lab.one, lab.two])
    alone, together = elapsed([lab.one]), elapsed([lab.one, lab.two])

    assert together < 1.5 * alone


def test_the_arena_lies_on_the_device_in_one_allocation() -> None:
    layout = ArenaLayout(
        [
            PartitionSpec(
                "pages", PartitionKind.PAGES, 64, (FieldSpec("k", (4,), "bfloat16", outer=(2,)),), page_tokens=16
            )
        ]
    )
    torch.cuda.init()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    arena = Arena(layout, "cuda")
    keys = arena.field("pages", "k")

    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1
    assert (keys.device.type, keys.shape) == ("cuda", (2, 1024, 4))
    keys.zero_()
    arena.fill_nan("pages", [3])
    index = arena.tensor_of(torch.tensor([2, 3]).numpy().tobytes())
    assert keys.index_select(1, index).isnan().flatten(2).all(2).tolist() == [[False, True], [False, True]]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_stage_runs_without_a_device_sync() -> None:
    """A launch through the executor enqueues and returns; a sync inside it would stall every other lane."""

    class Scale:
        spec = stage_spec("scale", "gpu")

        def load(self, arena: Arena) -> None:
            self.kv = arena.field("ring", "kv")
            self.copy = torch.empty(4).pin_memory()

        def run(self, jobs: object, media: object) -> Later:
            self.kv[1].fill_(2).mul_(3)
            self.copy.copy_(self.kv[1], non_blocking=True)
            return Later(lambda: [self.copy.tolist()])

    executor = Executor({"scale": Scale()}, {"gpu": CudaLane("gpu", Fences())}, None)  # type: ignore[dict-item]
    executor.open()
    executor.load(Arena(ArenaLayout([RING]), "cuda"), within=LONG)
    torch.cuda.set_sync_debug_mode("error")
    try:
        executor.launch(WorkId(1), "scale", [None])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ends = executor.completions()
    while not ends:
        executor.wait(until=Nanos(clock.now() + LONG))
        ends = executor.completions()

    assert ends[0].failure is None
    assert ends[0].results == ([6.0] * 4,)
    assert executor.close(within=LONG) == ()


def test_random_work_on_two_streams_agrees_with_the_plain_version(lab: Lab) -> None:
    """Seed 5: three hundred dependent adds and multiplies over two streams give what one thread computes, exactly."""
    rng, cells, expected = Random(5), torch.zeros(8, device="cuda"), [0.0] * 8
    torch.cuda.synchronize()
    last: dict[int, FenceId] = {}
    for _ in range(300):
        source, target = rng.sample(range(8), 2)
        lane = rng.choice([lab.one, lab.two])
        waits = [last[cell] for cell in (source, target) if cell in last]

        def work(source: int = source, target: int = target) -> None:
            cells[target] = cells[source] * 0.5 + 1

        while lane.queued >= lane.queue_max:
            lab.one.poll()
            lab.two.poll()
        fence = lane.submit(work, waits=waits)
        last[source] = last[target] = fence
        expected[target] = expected[source] * 0.5 + 1
    lab.drain()

    assert cells.tolist() == torch.tensor(expected).tolist()
