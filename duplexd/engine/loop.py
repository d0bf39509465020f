"""The one loop: the same lines serve users and simulations."""

from __future__ import annotations

from typing import Any, Protocol

from duplexd.units import Nanos


class Core(Protocol):
    """What decides: `EngineCore`, or one whose every step is written down (`trace.TracedCore`)."""

    def start(self, now: Nanos) -> None: ...

    def handle(self, event: Any, now: Nanos) -> None: ...

    def handle_timer(self, now: Nanos) -> None: ...

    def timer(self) -> Nanos | None: ...

    def commands(self) -> list[Any]: ...


class World(Protocol):
    """Where time and effects come from: sockets, lanes and a clock, or virtual time and cost models."""

    @property
    def ended(self) -> bool: ...

    def now(self) -> Nanos: ...

    def wait(self, until: Nanos | None) -> Any | None:
        """The next event, or None when `until` has come first."""

    def execute(self, command: Any, now: Nanos) -> None: ...


def drive(core: Core, world: World) -> None:
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


def _execute(core: Core, world: World) -> None:
    if commands := core.commands():
        now = world.now()
        for command in commands:
            world.execute(command, now)
