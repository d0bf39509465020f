"""A trace run again: the same to the byte, and where it is not, the first place is found."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duplexd.__main__ import main
from duplexd.bench.daemon import Daemon
from duplexd.engine import trace as traces
from duplexd.engine.replay import Replayed, replay, sentences
from duplexd.engine.simulator import SimNetwork
from duplexd.engine.trace import Kind, Record, Trace, TracedCore, TraceWriter, decode_command, header_of
from duplexd.engine.work import Launch
from duplexd.errors import TraceError
from duplexd.ids import SessionId
from duplexd.messages import AdvanceEpoch, HistoryChanged, Metrics, PublishChunk
from duplexd.units import Nanos, Ticks
from tests.engine.simulation import Simulation, ms
from tests.engine.test_core_machine import act, actions
from tests.engine.test_trace import conversation, traced

SEEDS = (1, 2, 3)


def again(path: Path) -> Replayed:
    return replay(Trace(path))


def said(path: Path) -> str:
    trace = Trace(path)
    return "\n".join(sentences(replay(trace), trace.began_at))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_conversation_with_interruptions_is_identical(tmp_path: Path, seed: int) -> None:
    simulation = conversation(seed=seed)
    path = traced(simulation, tmp_path / "a.trace")
    replayed = again(path)

    assert replayed.difference is None
    assert replayed.notes == ()
    assert replayed.commands == len(simulation.world.news) + len(simulation.world.launches)
    assert len(simulation.news(AdvanceEpoch, 1)) + len(simulation.news(AdvanceEpoch, 2)) >= 2


def test_memory_under_pressure_is_identical(tmp_path: Path) -> None:
    """Three people with long turns share memory for one: pages leave for host memory and come back."""
    simulation = Simulation(until_ms=12_000, sessions_resident=1)
    for session in (1, 2, 3):
        listener = simulation.connect(session)
        for turn in range(3):
            listener.type("word " * 200 + "3", at=ms(600 + 3500 * turn + 1100 * session), key=f"k{turn}")
    replayed = again(traced(simulation, tmp_path / "a.trace"))

    assert replayed.difference is None
    assert simulation.core.monitor["pages_offloaded"] > 0


def test_faults_and_leaving_are_identical(tmp_path: Path) -> None:
    """Every thirteenth launch fails, and a person leaves in the middle of a reply."""
    count = iter(range(1, 10**6))
    simulation = conversation()
    simulation.world._fails = lambda launch: "" if next(count) % 13 else "made to fail"
    simulation.world.at(ms(4300), simulation.world.listeners[SessionId(1)].leave)
    replayed = again(traced(simulation, tmp_path / "a.trace"))

    assert replayed.difference is None
    assert simulation.core.monitor["copy_failures"] > 0
    assert simulation.core.monitor["sessions_closed"] == 1


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(actions, max_size=8), st.integers(0, 2**16), st.floats(0, 0.5))
def test_whatever_two_people_do_is_identical(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[str, int, int, int]], seed: int, loss: float
) -> None:
    simulation = Simulation(seed=seed, until_ms=11_000, sessions_max=2)
    network = SimNetwork(delay=ms(5 + 40 * loss), buffer=ms(60), report_loss=loss)
    listeners = {session: simulation.connect(session, network=network) for session in (1, 2)}
    for key, action in enumerate(plan):
        act(simulation, listeners, action, key)
    path = traced(simulation, tmp_path_factory.mktemp("people") / "a.trace")

    assert again(path).difference is None


def mutated(path: Path, target: Path, change: Any) -> int:
    """A copy of a trace in which one command is another; returns the command's index."""
    trace = Trace(path)
    records = list(trace.records())
    index = 0
    done = -1
    target.unlink(missing_ok=True)
    writer = TraceWriter(target, trace.header, bytes_max=10**9)
    for record in records:
        commands: list[Any] = [msgspec.Raw(command) for command in record.commands]
        for at, command in enumerate(record.commands):
            if done < 0 and (new := change(decode_command(command), record)) is not None:
                commands[at : at + 1] = new
                done = index + at
        index += len(record.commands)
        writer.step(record.kind, record.now, record.event, commands)
    writer.close()
    assert done >= 0
    return done


def moved(command: Any, record: Record) -> list[Any] | None:
    """The third chunk is published one tick late."""
    if isinstance(command, PublishChunk) and command.chunk == 3:
        span = msgspec.structs.replace(command.span, end=Ticks(command.span.end + 1))
        return [msgspec.structs.replace(command, span=span)]
    return None


def lost(command: Any, record: Record) -> list[Any] | None:
    return [] if isinstance(command, AdvanceEpoch) else None


def added(command: Any, record: Record) -> list[Any] | None:
    return [command, command] if isinstance(command, HistoryChanged) else None


def counted(command: Any, record: Record) -> list[Any] | None:
    if not isinstance(command, Metrics) or "launches" not in command.values:
        return None
    return [Metrics({**command.values, "launches": command.values["launches"] + 1})]


def job(command: Any, record: Record) -> list[Any] | None:
    if not isinstance(command, Launch) or command.stage != "talk":
        return None
    return [Launch(command.work, command.stage, (msgspec.structs.replace(command.jobs[0], text="other"),))]


@pytest.mark.parametrize("change", [moved, lost, added, counted, job])
def test_a_changed_command_is_found_where_it_stands(tmp_path: Path, change: Any) -> None:
    path = traced(conversation(), tmp_path / "a.trace")
    index = mutated(path, tmp_path / "b.trace", change)
    replayed = again(tmp_path / "b.trace")

    assert replayed.difference is not None
    assert replayed.difference.command == index + (change is added)  # The double comes after the one it doubles.
    assert len(replayed.difference.before) == 5
    assert replayed.difference.before[-1][0] == replayed.difference.step - 1


def test_the_report_names_step_field_and_both_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = traced(conversation(), tmp_path / "a.trace")
    index = mutated(path, tmp_path / "b.trace", moved)
    with pytest.raises(SystemExit) as left:
        main(["replay", str(tmp_path / "b.trace")])
    out = capsys.readouterr().out

    assert left.value.code == 1
    assert f"command {index}, number" in out
    assert "differs in span: Span(" in out
    assert out.count("\n  step ") == 5
    assert "StageFinished(" in out


def test_the_same_trace_leaves_with_zero_and_its_digest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = traced(conversation(), tmp_path / "a.trace")
    outs = []
    for flags in ([], ["--digest"]):
        with pytest.raises(SystemExit) as left:
            main(["replay", str(path), *flags])
        assert left.value.code == 0
        outs.append(capsys.readouterr().out)

    assert "commands, identical\n" in outs[0]
    assert outs[1].strip() in outs[0]
    assert len(outs[1].strip()) == 64


def test_a_crash_is_reproduced(tmp_path: Path) -> None:
    """The front end reports a completion of work that was never launched: the core raises, then and now."""
    simulation = conversation()
    simulation.world.at(ms(2000), lambda: traces.StageFinished(10**6, ()))  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        traced(simulation, tmp_path / "a.trace")
    replayed = again(tmp_path / "a.trace")

    assert replayed.difference is None
    assert replayed.error == "KeyError: 1000000"
    assert "makes the core raise KeyError: 1000000, as it did" in said(tmp_path / "a.trace")


def test_a_crash_that_does_not_come_again_is_a_difference(tmp_path: Path) -> None:
    simulation = conversation()

    def wrong(*_: object) -> None:
        raise RuntimeError("mended since")

    simulation.world.at(ms(2000), lambda: setattr(simulation.core, "_handle_session", wrong))
    with pytest.raises(RuntimeError):
        traced(simulation, tmp_path / "a.trace")
    replayed = again(tmp_path / "a.trace")

    assert replayed.difference is not None
    assert replayed.difference.then == ("raised RuntimeError: mended since",)


def test_what_has_changed_since_is_said(tmp_path: Path) -> None:
    simulation = conversation(until_ms=1000)
    header = header_of(simulation.config, simulation.plan, cores=None)
    other = msgspec.structs.replace(header, version="0.0.9", source="0" * 16, plan="0" * 16)
    writer = TraceWriter(tmp_path / "a.trace", other, bytes_max=10**7)
    core = TracedCore(simulation.core, writer)
    core.start(Nanos(1))
    core.commands()
    writer.close()
    text = said(tmp_path / "a.trace")

    assert "written by duplexd 0.0.9" in text
    assert "core's source has changed" in text
    assert "plan of model clock has changed" in text


@pytest.mark.parametrize(
    ("engine", "words"),
    [({"model": "nobody"}, "there is no model 'nobody'"), ({"shoe": 1}, "whose engine had another configuration")],
    ids=["model", "key"],
)
def test_a_core_that_cannot_be_built_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: dict[str, Any], words: str
) -> None:
    simulation = conversation(until_ms=500)
    header = header_of(simulation.config, simulation.plan, cores=None)
    other = msgspec.structs.replace(header, engine={**header.engine, **engine})
    TraceWriter(tmp_path / "a.trace", other, bytes_max=10**7).close()
    with pytest.raises(SystemExit) as left:
        main(["replay", str(tmp_path / "a.trace")])

    assert left.value.code == 2
    assert words in capsys.readouterr().err


def test_missing_weights_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of the pocket model reads vocabularies: without the files the sentence says what brings them."""
    simulation = conversation(until_ms=500)
    header = header_of(simulation.config, simulation.plan, cores=None)
    other = msgspec.structs.replace(header, engine={**header.engine, "model": "pocket"})
    TraceWriter(tmp_path / "a.trace", other, bytes_max=10**7).close()
    monkeypatch.setenv("DUPLEXD_HOME", str(tmp_path / "empty"))
    with pytest.raises(Exception, match="duplexd fetch"):
        again(tmp_path / "a.trace")


SIMULATED = """
import sys
from pathlib import Path
from duplexd.engine.replay import replay
from duplexd.engine.trace import Trace
from tests.engine.test_trace import conversation, traced
path = traced(conversation(seed=5), Path(sys.argv[1]))
print(replay(Trace(path)).digest)
"""
REPLAYED = """
import sys
from duplexd.__main__ import main
try:
    main(["replay", sys.argv[1], "--digest"])
finally:
    print("torch" in sys.modules)
"""


def process(code: str, *arguments: str, hash_seed: str) -> Iterator[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=True
    )
    return iter(done.stdout.split())


@pytest.mark.slow
def test_one_seed_is_one_digest_in_every_process_and_hash_seed(tmp_path: Path) -> None:
    """Three processes simulate, a fourth one only replays; it needs no tensor library for that."""
    seeds = ("0", "1", "4711")
    digests = [next(process(SIMULATED, str(tmp_path / f"{s}.trace"), hash_seed=s)) for s in seeds]
    digest, has_torch = process(REPLAYED, str(tmp_path / "1.trace"), hash_seed="99")

    assert len({*digests, digest}) == 1
    assert has_torch == "False"


def test_another_seed_is_another_digest(tmp_path: Path) -> None:
    digests = {again(traced(conversation(seed=s), tmp_path / f"{s}.trace")).digest for s in SEEDS}

    assert len(digests) == len(SEEDS)


@pytest.mark.slow
def test_a_live_daemon_is_identical(tmp_path: Path) -> None:
    """A real front end, real lanes, the machine's clock: two people, one of them interrupts by typing."""
    import aiohttp

    from tests.webrtc.test_daemon import FLAGS, Visitor, message, say

    path = tmp_path / "live.trace"
    told: list[str] = []

    async def talk() -> None:
        async with Daemon(*FLAGS, "--trace", str(path)) as daemon, aiohttp.ClientSession() as http:
            visitor = Visitor(daemon, http)
            one, two = await visitor.connect(), await visitor.connect()
            say(one, "say 12", "a1")
            say(two, "say 4", "b1")
            await message(one, "state", state="speaking")
            await message(one, "words")
            say(one, "say 3", "a2")
            await message(one, "reply", state="cancelled")
            await message(one, "reply", state="completed", seconds=20)
            await message(two, "reply", state="completed", seconds=20)
            told.append(await daemon.get("/metrics"))
            await one.close()
            await two.close()

    asyncio.run(asyncio.wait_for(talk(), 120))
    trace = Trace(path)
    replayed = replay(trace)

    assert replayed.difference is None, said(path)
    assert "\nduplexd_engine_eviction_choice_us " in told[0]  # Measured by the machine, so no part of the trace.
    assert replayed.notes == ()
    assert replayed.ending == "the engine was ended"
    kinds = {record.kind for record in Trace(path).records()}
    assert kinds == {Kind.START, Kind.EVENT, Kind.TIMER}


def test_a_trace_that_is_no_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read the trace"):
        Trace(tmp_path / "none")
