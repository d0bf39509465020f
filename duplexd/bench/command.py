"""`duplexd bench talk | barge-in`: measured at a loudspeaker, as a table and as JSON."""

from __future__ import annotations

from typing import Any


def add_bench(commands: Any) -> None:
    """The bench commands; what they need is imported when they run."""
