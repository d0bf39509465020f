"""One JSON line: what lanes and arena cost on this machine's GPU. Called by scripts/device."""

from __future__ import annotations

import json
import statistics
import sys
from array import array
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import torch

from duplexd import clock
from duplexd.memory.arena import Arena
from duplexd.memory.layout import ArenaLayout, FieldSpec, PartitionKind, PartitionSpec
from duplexd.streams.lane import CudaLane, Fences, Finished

ROUNDS = 2000
SLOW_CYCLES = 100_000_000
LAYERS, PAGES, PAGE_TOKENS, HEADS, HEAD_DIM = 16, 4096, 16, 8, 128


def microseconds(action: Callable[[], object], rounds: int = ROUNDS) -> dict[str, float]:
    """Host time of an action: median and 95th percentile."""
    times = []
    for _ in range(rounds):
        start = clock.now()
        action()
        times.append((clock.now() - start) / 1000)
    times.sort()
    return {"p50": round(statistics.median(times), 2), "p95": round(times[int(0.95 * len(times))], 2)}


class Bench:
    def __init__(self) -> None:
        fields = tuple(FieldSpec(name, (HEADS, HEAD_DIM), "bfloat16", outer=(LAYERS,)) for name in ("k", "v"))
        self.arena = Arena(
            ArenaLayout([PartitionSpec("pages", PartitionKind.PAGES, PAGES, fields, page_tokens=PAGE_TOKENS)]), "cuda"
        )
        self.fences = Fences()
        self.ends: list[Finished] = []
        self.lanes = [CudaLane(name, self.fences) for name in ("one", "two")]
        for lane in self.lanes:
            lane.open(self.ends.append)

    def drain(self) -> None:
        while any(lane.queued for lane in self.lanes):
            for lane in self.lanes:
                lane.poll()

    def launch(self, work: Callable[[], Any], lane: int = 0) -> None:
        self.lanes[lane].submit(work)

    def overlap(self) -> float:
        """Time of two busy lanes together, divided by the time of one."""

        def elapsed(lanes: list[int]) -> int:
            start = clock.now()
            for lane in lanes:
                self.launch(lambda: torch.cuda._sleep(SLOW_CYCLES), lane)
            self.drain()
            return clock.now() - start

        elapsed([0, 1])
        alone = elapsed([0])
        return round(elapsed([0, 1]) / alone, 3)

    def gather_gb_s(self) -> float:
        """Reading one layer's keys of 32768 scattered token slots, bytes read and written."""
        keys = self.arena.field("pages", "k")[0]
        index = torch.randperm(PAGES * PAGE_TOKENS, device="cuda")[:32768]
        out = torch.empty((index.numel(), HEADS, HEAD_DIM), dtype=keys.dtype, device="cuda")
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(3):
            torch.index_select(keys, 0, index, out=out)
        begin.record()
        for _ in range(50):
            torch.index_select(keys, 0, index, out=out)
        end.record()
        end.synchronize()
        return round(50 * 2 * out.nbytes / begin.elapsed_time(end) / 1e6, 1)

    def figures(self) -> dict[str, Any]:
        slots = array("q", range(1000)).tobytes()
        cell = torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        self.launch(lambda: cell.add_(1))
        self.drain()

        def round_trip() -> None:
            self.launch(lambda: cell.add_(1))
            self.drain()

        submit = microseconds(lambda: self.launch(lambda: cell.add_(1)), self.lanes[0].queue_max)
        self.drain()
        return {
            "submit_us": submit,
            "submit_poll_us": microseconds(round_trip),
            "slots_to_device_us": microseconds(lambda: self.arena.tensor_of(slots)),
            "overlap_of_two_lanes": self.overlap(),
            "gather_gb_s": self.gather_gb_s(),
            "arena_bytes": self.arena.layout.total_bytes,
        }


def test_counts(report: str) -> dict[str, int]:
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    return {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}


def main() -> None:
    head = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "gpu_tests": test_counts(sys.argv[1])}
    print(json.dumps({**head, **Bench().figures()}))


if __name__ == "__main__":
    main()
