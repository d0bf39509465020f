"""The live world between a core and the front end, over a real channel, without stages."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from duplexd.channel import Channel
from duplexd.engine.live import LiveWorld
from duplexd.ids import SessionId
from duplexd.messages import Metrics, SessionBytes, unpack_news
from duplexd.streams.executor import Executor
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
