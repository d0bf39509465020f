"""The one loop: the same lines serve users and simulations."""

from __future__ import annotations

from typing import Any, Protocol

from duplexd.engine.core import EngineCore
from duplexd.units import Nanos


class World(Protocol):
    """Where time and effects come from: sockets, lanes and a clock, or virtual time and cost models."""

    @property
    def ended(self) -> bool: ...

    def now(self) -> Nanos: ...

    def wait(self, until: Nanos | None) -> Any | None:
        """The next event, or None when `until` has come first."""

    def execute(self, command: Any, now: Nanos) -> None: ...


def drive(core: EngineCore, world: World) -> None:
    """Run until the world ends."""
    core.start(world.now())
    _execute(core, world)
    while not world.ended:
        event = world.wait(core.timer())
        now = world.now()
        if event is not None:
            core.handle(event, now)
        else:
            core.handle_timer(now)
        _execute(core, world)


def _execute(core: EngineCore, world: World) -> None:
    now = world.now()
    for command in core.commands():
        world.execute(command, now)
