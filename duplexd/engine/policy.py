"""Scheduling policies: one class each, chosen by name. A policy ranks work, least first, and sees no transport."""

from __future__ import annotations

from typing import Protocol

from duplexd.engine.work import Need, Work
from duplexd.streams.stage import Role
from duplexd.units import Nanos, Ticks, ticks_from_ms

INPUT_AGE_MAX = Nanos(300_000_000)  #: arriving input older than this is as urgent as a first chunk (DESIGN §7)


class SchedulingPolicy(Protocol):
    name: str

    def rank(self, work: Work, now: Nanos, pool_share: float) -> tuple[float, ...]:
        """Order of one piece of work on its lane; pure. `pool_share` is how full the page pool is, 0..1."""


class Fcfs:
    """First come, first served, whatever the listener hears: what request engines do."""

    name = "fcfs"

    def rank(self, work: Work, now: Nanos, pool_share: float) -> tuple[float, ...]:
        return (work.ready_at, work.session)


class Interaction:
    """U0 nearly silent, U1 waiting for the first sound, U2 by utility, suspicion last (seed 002 §3.2, DESIGN §7).

    Missing telemetry turns its own term off: without a playback cursor a session is served by ready age.
    """

    name = "interaction"

    def __init__(self, *, p_safe: Ticks = ticks_from_ms(400), alpha: float = 1.0, beta: float = 1.0) -> None:
        self.p_safe = p_safe
        self.alpha = alpha
        self.beta = beta

    def rank(self, work: Work, now: Nanos, pool_share: float) -> tuple[float, ...]:
        if work.need is Need.SPECULATION:
            return (4, work.ready_at, work.session)
        if work.role in (Role.COPY, Role.JUDGE):
            return (0, work.ready_at, work.session)
        if work.need is Need.CHUNK and work.started and work.measured:
            if work.buffer <= self.p_safe:
                return (0, work.buffer, -work.priority, work.session)
            return (3, -self._utility(work, pool_share), work.ready_at, work.session)
        waited = now - work.ready_at
        if work.need is Need.INPUT and waited < INPUT_AGE_MAX:
            return (2, -work.priority, work.ready_at, work.session)
        return (1, -work.priority, work.ready_at, work.session)

    def _utility(self, work: Work, pool_share: float) -> float:
        """Equation 1 with both terms as fractions: KV that finishing would free, less playback that could be wasted."""
        barge = max(0, work.buffer - self.p_safe) / self.p_safe
        return self.beta * work.pool_share * pool_share - self.alpha * barge


POLICIES: dict[str, type[Fcfs] | type[Interaction]] = {Fcfs.name: Fcfs, Interaction.name: Interaction}
