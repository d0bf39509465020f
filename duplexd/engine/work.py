"""Work: what a session wants done next on a lane, the order that starts it and the facts that end it."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from duplexd.ids import SessionId, WorkId
from duplexd.streams.stage import Role
from duplexd.units import Nanos, Ticks


class Need(IntEnum):
    """Why a piece of work is wanted; the policy turns it into an order."""

    CHUNK = 0  #: a step towards the next chunk of a reply
    INPUT = 1  #: what the person says, as it comes
    TURN = 2  #: the rest of what the person said: a reply waits for it
    SPECULATION = 3  #: a step towards a reply that may never be wanted


#: Nobody waits for it yet: it never makes a launch longer that somebody does wait for.
PATIENT = frozenset((Need.INPUT, Need.SPECULATION))


class Work(msgspec.Struct, frozen=True):
    session: SessionId
    stage: str
    role: Role
    need: Need
    ready_at: Nanos  #: when it first could have run
    started: bool  #: the reply's first chunk has been published
    buffer: Ticks  #: published and not yet heard
    deadline: Nanos  #: when silence starts without it
    priority: int
    measured: bool  #: playback is measured or assumed, not unknown: without it the interaction order is off
    pool_share: float = 0.0  #: share of the page pool this session holds


class Launch(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Order: run these jobs as one batch of a stage. The work id is also the fence that passes when it has ended."""

    work: WorkId
    stage: str
    jobs: tuple[Any, ...]


class StageFinished(msgspec.Struct, frozen=True, tag=True, array_like=True):
    work: WorkId
    results: tuple[Any, ...]
    started_at: Nanos = Nanos(0)
    ended_at: Nanos = Nanos(0)


class StageFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    work: WorkId
    reason: str
