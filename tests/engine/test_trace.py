"""Traces: what is written, what happens at each bound, and what a damaged file says."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from duplexd import clock
from duplexd.engine.loop import drive
from duplexd.engine.simulator import SimNetwork
from duplexd.engine.trace import (
    END_ROOM,
    Kind,
    Record,
    Trace,
    TracedCore,
    TraceWriter,
    _leaves,
    decode_command,
    header_of,
)
from duplexd.engine.work import Launch, StageFinished
from duplexd.errors import TraceError
from duplexd.ids import SessionId
from duplexd.messages import FreeSlots, MediaArrived, PublishChunk, SlotsFreed
from duplexd.streams.stage import CopyJob, CopyResult, Job, Result
from duplexd.units import NANOS_PER_SECOND, Nanos
from tests.engine.simulation import Simulation, beep, ms

BOUND = 64_000_000


def conversation(*, until_ms: float = 9000, seed: int = 1) -> Simulation:
    """One person who asks, is answered and interrupts; another who types."""
    simulation = Simulation(seed=seed, until_ms=until_ms)
    speaker, typist = simulation.connect(1, network=SimNetwork(report_loss=0.3)), simulation.connect(2)
    speaker.say(beep(700), at=ms(600))
    speaker.say(beep(1200), at=ms(3200))
    typist.type("say 9", at=ms(800), key="k1")
    typist.stop(at=ms(2600))
    return simulation


def traced(simulation: Simulation, path: Path, *, bytes_max: int = BOUND) -> Path:
    writer = TraceWriter(path, header_of(simulation.config, simulation.plan, cores=None), bytes_max=bytes_max)
    try:
        drive(TracedCore(simulation.core, writer), simulation.world)
    finally:
        writer.close()
    return writer.path


def fact(index: int = 0) -> SlotsFreed:
    return SlotsFreed((index,))


def writer_at(path: Path, *, bytes_max: int = BOUND, **options: Any) -> TraceWriter:
    simulation = Simulation()
    return TraceWriter(path, header_of(simulation.config, simulation.plan, cores=2), bytes_max=bytes_max, **options)


def read(path: Path) -> tuple[list[Record], str]:
    trace = Trace(path)
    return list(trace.records()), trace.ending


def test_what_the_core_was_given_and_what_came_out_is_all_there(tmp_path: Path) -> None:
    """Launches and news of the world are the commands of the file, in their order, with the time they came out."""
    simulation = conversation()
    records, ending = read(traced(simulation, tmp_path / "a.trace"))

    commands = [(r.now, decode_command(c)) for r in records for c in r.commands]
    launched = [(at, c) for at, c in commands if isinstance(c, Launch)]
    news = [(at, c) for at, c in commands if not isinstance(c, Launch)]
    media = [r.event for r in records if isinstance(r.event, MediaArrived)]

    assert records[0].kind is Kind.START
    assert launched == simulation.world.launches
    assert news == simulation.world.news
    assert len(media) > 300
    assert {r.kind for r in records} == {Kind.START, Kind.EVENT, Kind.TIMER}
    assert ending == "the engine was ended"


def test_jobs_and_results_keep_their_types(tmp_path: Path) -> None:
    writer = writer_at(tmp_path / "a.trace")
    job = CopyJob(session=SessionId(3), epoch=1, chunk=0, condition=0, slot=5, ring=2, start=512, samples=512)  # type: ignore[arg-type]
    ended = StageFinished(7, (CopyResult(SessionId(3), 512),), Nanos(4), Nanos(9))  # type: ignore[arg-type]
    writer.step(Kind.EVENT, Nanos(11), ended, [Launch(8, "copy", (job,)), FreeSlots((5,))])  # type: ignore[arg-type]
    writer.close()
    (record,), _ = read(tmp_path / "a.trace")

    assert record.event == ended
    assert [decode_command(c) for c in record.commands] == [Launch(8, "copy", (job,)), FreeSlots((5,))]  # type: ignore[arg-type]


def test_every_job_and_every_result_has_a_name_of_its_own() -> None:
    """A trace tells them apart by name alone. What several have in common is no job of its own."""
    for base in (Job, Result):
        names = [kind.__name__ for kind in _leaves(base)]
        assert len(names) == len(set(names))
    assert {"GenerateJob", "RefineJob", "CopyJob"} <= {kind.__name__ for kind in _leaves(Job)}
    assert "MotionJob" not in {kind.__name__ for kind in _leaves(Job)}


def test_a_trace_ends_at_its_bound_with_the_reason_and_the_engine_goes_on(tmp_path: Path) -> None:
    simulation = conversation()
    path = traced(simulation, tmp_path / "a.trace", bytes_max=12_000)
    records, ending = read(path)

    assert path.stat().st_size <= 12_000
    assert len(records) > 20
    assert ending == "the bound of 12000 bytes is reached"
    assert len([n for _, n in simulation.world.news if isinstance(n, PublishChunk)]) > 10


def test_a_step_costs_the_engine_little(tmp_path: Path) -> None:
    """Thread time of the median step, its commands among it, at most 20 us."""
    simulation = conversation()
    writer = TraceWriter(
        tmp_path / "a.trace", header_of(simulation.config, simulation.plan, cores=None), bytes_max=BOUND
    )
    costs: list[int] = []

    class Timed:
        def step(self, *record: Any) -> None:
            before = clock.thread_time()
            writer.step(*record)
            costs.append(clock.thread_time() - before)

    drive(TracedCore(simulation.core, Timed()), simulation.world)  # type: ignore[arg-type]
    writer.close()

    assert len(costs) > 1000
    assert statistics.median(costs) <= 20_000


def test_what_waits_for_a_slow_disk_is_bounded(tmp_path: Path) -> None:
    """The writing thread is kept asleep: the buffer fills, the trace ends, nothing raises."""
    writer = writer_at(tmp_path / "a.trace", pending_max=1000, every=Nanos(3600 * NANOS_PER_SECOND))
    for index in range(1000):
        writer.step(Kind.EVENT, Nanos(index), fact(index), ())
    ended = writer.ended
    writer.close()
    records, ending = read(tmp_path / "a.trace")

    assert "disk is too slow: 1000 bytes" in ended
    assert ending == ended
    assert [r.event for r in records] == [fact(i) for i in range(len(records))]
    assert 20 < len(records) < 200


def test_what_cannot_be_written_ends_the_trace_and_names_it(tmp_path: Path) -> None:
    writer = writer_at(tmp_path / "a.trace")
    writer.step(Kind.EVENT, Nanos(1), fact(), ())
    writer.step(Kind.EVENT, Nanos(2), StageFinished(1, (object(),)), ())  # type: ignore[arg-type]
    writer.step(Kind.EVENT, Nanos(3), fact(), ())
    writer.close()
    records, ending = read(tmp_path / "a.trace")

    assert [r.now for r in records] == [1]
    assert "object" in ending


def test_a_disk_that_refuses_ends_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = writer_at(tmp_path / "a.trace", every=Nanos(3600 * NANOS_PER_SECOND))

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    writer.step(Kind.EVENT, Nanos(1), fact(), ())
    monkeypatch.setattr(os, "write", refuse)
    writer._flush()
    monkeypatch.undo()
    ended = writer.ended
    writer.close()

    assert ended == "the disk refused: No space left on device"
    assert read(tmp_path / "a.trace")[0] == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """A restarted engine is told the same name; the trace of its predecessor's death must stay."""
    paths = []
    for index in range(3):
        writer = writer_at(tmp_path / "talk.trace")
        writer.step(Kind.EVENT, Nanos(index + 1), fact(index), ())
        writer.close()
        paths.append(writer.path)

    assert [p.name for p in paths] == ["talk.trace", "talk.2.trace", "talk.3.trace"]
    assert [read(p)[0][0].event for p in paths] == [fact(0), fact(1), fact(2)]
    assert paths[0].stat().st_mode & 0o077 == 0


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot write the trace .*no/a\.trace: No such file"):
        writer_at(tmp_path / "no" / "a.trace")


def test_an_event_that_kills_the_core_is_the_last_record(tmp_path: Path) -> None:
    simulation = conversation()

    def wrong(*_: object) -> None:
        raise KeyError("a bug")

    simulation.world.at(ms(2000), lambda: setattr(simulation.core, "_handle_session", wrong))
    with pytest.raises(KeyError):
        traced(simulation, tmp_path / "a.trace")
    records, ending = read(tmp_path / "a.trace")

    assert records[-1].kind is Kind.CRASH
    assert records[-1].event is not None
    assert ending == "the core raised an error"


KILLED = """
import sys
from pathlib import Path
from tests.engine.test_trace import fact, writer_at
from duplexd.engine.trace import Kind
from duplexd.units import Nanos
writer = writer_at(Path(sys.argv[1]))
header = writer.written_bytes
for index in range(100):
    writer.step(Kind.EVENT, Nanos(index), fact(index), ())
while writer._pending or writer.written_bytes == header:
    pass
print("written", flush=True)
sys.stdin.read()
"""


def test_a_killed_process_leaves_what_was_written(tmp_path: Path) -> None:
    """kill -9 a moment after the writing thread has run: everything before is there, and the file says it broke off."""
    path = tmp_path / "a.trace"
    command = [sys.executable, "-c", KILLED, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.send_signal(signal.SIGKILL)
    records, ending = read(path)

    assert [r.event for r in records] == [fact(i) for i in range(100)]
    assert "breaks off" in ending


def test_a_block_that_was_cut_is_passed_over(tmp_path: Path) -> None:
    path = traced(conversation(until_ms=3000), tmp_path / "a.trace")
    whole = path.read_bytes()
    before, _ = read(path)
    path.write_bytes(whole[:-10])
    records, ending = read(path)

    assert "breaks off inside a block at byte" in ending
    assert records == before[: len(records)]
    assert len(records) < len(before)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: b"RIFF" + d, "is no trace"),
        (lambda d: d[:20], "holds no header"),
        (lambda d: d[:-40] + bytes([d[-40] ^ 1]) + d[-39:], "checksum of a block is wrong"),
        (lambda d: d[:14] + b"\xff\xff\xff\xff" + d[18:], "a block claims 4294967295 bytes"),
    ],
    ids=["other file", "no header", "one bit", "huge block"],
)
def test_a_damaged_file_says_what_and_where(tmp_path: Path, change: Any, said: str) -> None:
    path = traced(conversation(until_ms=2000), tmp_path / "a.trace")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(TraceError, match=said):
        read(path)


def test_another_format_is_refused_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duplexd.engine.trace.FORMAT", 99)
    path = traced(conversation(until_ms=500), tmp_path / "a.trace")
    monkeypatch.undo()
    with pytest.raises(TraceError, match="format 99; this version reads format 2"):
        read(path)


def test_the_end_fits_the_room_kept_for_it(tmp_path: Path) -> None:
    writer = writer_at(tmp_path / "a.trace")
    size = writer.written_bytes
    writer.close("".join(chr(0x20000 + 7919 * i % 40000) for i in range(1000)))

    assert writer.written_bytes - size <= END_ROOM
