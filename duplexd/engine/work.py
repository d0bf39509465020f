"""Work: what a session wants done next on a lane, the order that starts it and the facts that end it."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from duplexd.ids import SessionId, WorkId
from duplexd.streams.stage import Role
from duplexd.units import Nanos


class Need(IntEnum):
    """Why a piece of work is wanted; the policy turns it into an order."""

    CHUNK = 0  #: a step towards the next chunk of a reply
    INPUT = 1  #: what the person says, as it comes
    TURN = 2  #: the rest of what the person said: a reply waits for it
    SPECULATION = 3  #: a step towards a reply that may never be wanted

    __hash__ = int.__hash__  # Enum hashes names, in Python; offers are named by need.


#: The same as plain names. An enumeration takes ten times as long to give a member, and every offer is asked for its
#: need several times.
CHUNK, INPUT, TURN, SPECULATION = Need

#: Nobody waits for it yet: it never makes a launch longer that somebody does wait for.
PATIENT = frozenset((INPUT, SPECULATION))


class Work(msgspec.Struct, frozen=True):
    """One offer. Nothing in it changes with the clock alone: an offer stays as it is until its session changes."""

    session: SessionId
    stage: str
    role: Role
    need: Need
    ready_at: Nanos  #: when it first could have run
    started: bool = False  #: the reply's first sound is out, or made: this is a step towards what follows it
    beginning: bool = False  #: and no more than the first chunk is made: what follows is not sure to come in time
    silence_at: Nanos | None = None  #: when all that this stage has made will have been heard; None: nobody knows
    sent_silence_at: Nanos | None = (
        None  #: the same by the server's clock alone, as if all had played since it was sent
    )
    after: Nanos | None = None  #: time the stages after it need; None: not measured yet
    priority: int = 1
    pool_share: float | None = None  #: share of the page pool this session holds; None: not known

    @property
    def deadline(self) -> Nanos | None:
        """When it must have ended: the last of its sound has been heard, and what follows it is still to be done."""
        return _before(self.silence_at, self.after)

    @property
    def sent_deadline(self) -> Nanos | None:
        """The deadline by the server's clock alone."""
        return _before(self.sent_silence_at, self.after)


def _before(silence: Nanos | None, after: Nanos | None) -> Nanos | None:
    return None if silence is None else Nanos(silence - (after or 0))


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
