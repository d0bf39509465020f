"""The live world between a core and the front end, over a real channel, without stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from duplexd.channel import Channel
from duplexd.engine.live import LiveWorld
from duplexd.ids import SessionId, WorkId
from duplexd.messages import FreeSlots, Metrics, SessionBytes, SlotsFreed, pack, unpack_news
from duplexd.streams.executor import Executor
from duplexd.streams.lane import Fences, InlineLane
from duplexd.streams.stage import CostModel, PayloadKind, Role, StageSpec
from duplexd.units import Nanos


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    front, engine = (Channel(end) for end in Channel.pair())
    yield front, engine
    for end in (front, engine):
        end.close()


def test_what_the_machine_measured_goes_out_beside_the_cores_own_figures(ends: tuple[Channel, Channel]) -> None:
    """The command itself stays as the core gave it: that is what a trace has."""
    front, engine = ends
    world = LiveWorld(engine, Executor({}, {}, None), lambda: {"eviction_choice_us": 4.5})
    told = Metrics({"evictions": 2.0}, (SessionBytes(SessionId(1), arena=3, host=4),))
    before = msgspec.to_builtins(told)
    world.execute(told, Nanos(1))
    (news,) = map(unpack_news, front.receive())

    assert news == Metrics({"evictions": 2.0, "eviction_choice_us": 4.5}, told.sessions)
    assert msgspec.to_builtins(told) == before


class Nothing:
    """A stage that does nothing."""

    spec = StageSpec("copy", Role.COPY, "copy", PayloadKind.AUDIO, PayloadKind.AUDIO, CostModel())

    def load(self, arena: Any) -> None:
        """It has no weights."""

    def run(self, jobs: Sequence[Any], media: Any) -> list[Any]:
        return [None for _ in jobs]


def test_what_is_ready_is_taken_whichever_it_is(ends: tuple[Channel, Channel]) -> None:
    """An end of a launch while the channel is silent, a fact while no lane has news, both at once: ends come first."""
    front, engine = ends
    stage = Nothing()
    executor = Executor({"copy": stage}, {"copy": InlineLane("copy", Fences())}, None)
    executor.open()
    world = LiveWorld(engine, executor)
    executor.launch(WorkId(1), "copy", (1,))
    alone: Any = world.wait(None)
    front.send(pack(SlotsFreed((3,))))
    silent: Any = world.wait(None)
    front.send(pack(SlotsFreed((4,))))
    executor.launch(WorkId(2), "copy", (1,))
    both: list[Any] = [world.wait(None), world.wait(None)]
    executor.close(within=Nanos(0))

    assert [event.work for event in (alone, both[0])] == [1, 2]
    assert [event.slots for event in (silent, both[1])] == [(3,), (4,)]


def test_what_the_front_end_did_not_read_goes_out_when_it_does_and_its_end_is_noticed(
    ends: tuple[Channel, Channel],
) -> None:
    front, engine = ends
    world = LiveWorld(engine, Executor({}, {}, None))
    sent = read = 0
    while not engine.wants_write:
        world.execute(FreeSlots((sent,)), Nanos(1))
        sent += 1
    while engine.wants_write:
        read += len(front.receive(packets_max=sent))
        world.wait(None)
    read += len(front.receive(packets_max=sent))
    front.close()
    world.wait(None)

    assert read == sent
    assert world.ended
