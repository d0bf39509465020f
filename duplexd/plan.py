"""`duplexd plan`: the layout of a model for a byte budget, as a table and as JSON. Nothing is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from duplexd.config import OWN_FACES, SESSIONS_MAX
from duplexd.engine.process import load_plan
from duplexd.errors import ConfigError
from duplexd.memory.sizing import Footprint, Sizing, size
from duplexd.units import bytes_from_text, text_from_bytes


def show(*, model: str, options: Sequence[str], memory: str, host_memory: str, file: Path | None) -> int:
    """Print the table, and write it as JSON if a file is given.

    Raises:  ConfigError for an unknown model or option, text that is no size, and a budget that admits no session.
    """
    sizing = size(
        footprint_of(model, _pairs(options)),
        memory_bytes=bytes_from_text(memory),
        host_bytes=bytes_from_text(host_memory),
        sessions_max=SESSIONS_MAX,
    )
    console = Console(highlight=False, soft_wrap=True)
    console.print(_table(sizing))
    for sentence in sentences(sizing):
        console.print(sentence)
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(sizing), indent=1) + b"\n")
    return 0


def footprint_of(model: str, options: dict[str, str]) -> Footprint:
    """A published size (entry points `duplexd.sizes`), or an installed family (`duplexd.models`) as it says itself."""
    published = {entry.name: entry for entry in entry_points(group="duplexd.sizes")}
    if model in published:
        found = published[model].load()(options)
        assert isinstance(found, Footprint)
        return found
    families = sorted({entry.name for entry in entry_points(group="duplexd.models")})
    if model not in families:
        raise ConfigError(
            f"there is no model {model!r}; installed are {', '.join(families) or 'none'}; "
            f"published sizes are {', '.join(sorted(published)) or 'none'}"
        )
    plan = load_plan(model, {"face": OWN_FACES[model], **options} if model in OWN_FACES else options)
    return Footprint(plan.name, plan.partitions, plan.weights_bytes, plan.weights_held)


def sentences(sizing: Sizing) -> list[str]:
    """What the table means."""
    resident = f"sessions: {sizing.sessions_resident} resident in {text_from_bytes(sizing.memory_bytes)}"
    capped = sizing.sessions_resident == sizing.sessions_max
    lines = [f"{resident}, as many as one engine takes" if capped else resident]
    if sizing.host_bytes and not sizing.leaving_bytes:
        lines.append("nothing of a session leaves to host memory: only pages do")
    elif sizing.host_bytes:
        lines.append(
            f"in all: {sizing.sessions_all}, {sizing.sessions_resident_of_all} of them resident, while idle ones leave "
            f"to {text_from_bytes(sizing.host_bytes)} of host memory with {text_from_bytes(sizing.leaving_bytes)} each"
        )
    row = next((row for row in sizing.rows if row.section is sizing.scarcest), None)
    if row is not None:
        share = row.session_bytes / sizing.session_bytes
        lines.append(
            f"scarcest: {row.section.value}, {share:.0%} of a session's {text_from_bytes(sizing.session_bytes)}"
        )
    return lines


def _table(sizing: Sizing) -> Table:
    table = Table("section", "holds", title=sizing.model, title_justify="left", box=None, pad_edge=False)
    for heading in ("bytes", "per session"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in sizing.rows:
        session = f"{row.session_bytes:,}" if row.session_bytes else "-"
        table.add_row(row.section.value, row.holds, f"{row.total_bytes:,}", session)
    table.add_row("total", "", f"{sizing.total_bytes:,}", f"{sizing.session_bytes:,}")
    return table


def _pairs(options: Sequence[str]) -> dict[str, str]:
    for option in options:
        if "=" not in option:
            raise ConfigError(f"--option {option!r} is no NAME=VALUE")
    return dict(option.split("=", 1) for option in options)
