"""What `duplexd top` shows: one snapshot of a running daemon, as the front end knows it.

Positions are milliseconds of a session's output timeline. What a person said or heard is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from duplexd import __version__, clock
from duplexd.messages import TurnState
from duplexd.units import ms_from_ticks
from duplexd.webrtc.frontend import Frontend, Guest

ROWS_MAX = 256  #: sessions of one snapshot; it is made on the loop that carries everybody's media
ROWS = 64


class Watched(msgspec.Struct, frozen=True):
    """One session. The cursors are those of its voice: playback <= delivery <= published <= generation."""

    session: int
    state: str  #: "listening", "thinking", "speaking", "held"
    epoch: int
    playback: float
    delivery: float
    published: float
    generation: float
    budget: float  #: how far generation may run ahead of playback; 0 while nothing is said
    assumed: bool  #: playback is an estimate: the page does not report
    underruns: int
    urgency: str = ""  #: class of its most urgent step, as the engine's policy calls it; see messages.py `Progress`


class Snapshot(msgspec.Struct, frozen=True):
    version: str
    model: str
    policy: str
    engine: str  #: "starting", "ready", "gone"
    sessions_max: int
    sessions_count: int
    sessions: tuple[Watched, ...]  #: those that talk first; at most as many as were asked for
    lanes: dict[str, float]  #: share of the last second in which each lane worked
    engine_values: dict[str, float]
    frontend_values: dict[str, float]


def snapshot(frontend: Frontend, values: Mapping[str, float], *, rows: int) -> Snapshot:
    """Args: values: figures of the front end; rows: how many sessions to show. Cost: O(sessions), a small constant."""
    supervisor, config = frontend.supervisor, frontend.config
    visits = sorted(frontend.visits.values(), key=lambda visit: (_listens(visit), visit.session))
    return Snapshot(
        version=__version__,
        model=supervisor.ready.model if supervisor.ready else config.model,
        policy=config.policy,
        engine=supervisor.state.value,
        sessions_max=config.sessions_max,
        sessions_count=len(visits),
        sessions=tuple(map(_watched, visits[:rows])),
        lanes=supervisor.lane_shares(clock.now()),
        engine_values=dict(supervisor.metrics),
        frontend_values=dict(values),
    )


def _listens(visit: Guest) -> bool:
    return visit.line.speaking.shown is TurnState.LISTENING


def _watched(visit: Guest) -> Watched:
    playout, progress = visit.line.playout, visit.progress
    current = progress is not None and progress.epoch == playout.epoch
    published = playout.delivered + playout.queued
    playback = min(progress.playback, playout.delivered) if progress is not None and current else playout.delivered
    generation = max(progress.generation, published) if progress is not None and current else published
    return Watched(
        session=visit.session,
        state="held" if playout.held else visit.line.speaking.shown.value,
        epoch=playout.epoch,
        playback=ms_from_ticks(playback),
        delivery=ms_from_ticks(playout.delivered),
        published=ms_from_ticks(published),
        generation=ms_from_ticks(generation),
        budget=ms_from_ticks(progress.budget) if progress is not None and current else 0.0,
        assumed=progress is not None and progress.assumed,
        underruns=playout.underruns,
        urgency=progress.urgency if progress is not None and current else "",
    )
