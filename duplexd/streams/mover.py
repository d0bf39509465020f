"""The mover: the stage that carries pages between the arena and host memory, on a copy lane of its own.

It belongs to no model family: any family with a `pages` partition gets one when the engine is given host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from duplexd.memory.layout import PartitionSpec
from duplexd.memory.pages import Move
from duplexd.streams.stage import CostModel, MoveJob, MoveResult, PayloadKind, Role, StageSpec

#: Bytes a copy lane carries a second, where nobody measured it: well below PCIe 4 and below two memory channels.
BANDWIDTH = 5e9


def mover_spec(pages: PartitionSpec, *, bandwidth: float = BANDWIDTH) -> StageSpec:
    """The spec of a mover of these pages; a unit is a page, `bandwidth` is in bytes per second."""
    return StageSpec(
        name="mover",
        role=Role.MOVE,
        lane="move",
        takes=PayloadKind.KEYS,
        gives=PayloadKind.KEYS,
        cost=CostModel(fixed_us=50, per_unit_us=max(1, round(pages.slot_bytes / bandwidth * 1e6))),
        batch_max=64,
    )


class Mover:
    """Stage: MoveJob -> MoveResult. Host memory is allocated when it is loaded."""

    def __init__(self, pages: PartitionSpec, host: PartitionSpec) -> None:
        self.spec = mover_spec(pages)
        self._pages = pages
        self._host = host

    def load(self, arena: Any) -> None:
        """Raises ArenaFull when the machine has not enough memory for the host tier."""
        from duplexd.memory.tiers import Tiers  # The spec above is read where torch is not.

        self._tiers = Tiers(arena, self._pages, self._host)

    def run(self, jobs: Sequence[MoveJob], media: Any) -> list[MoveResult]:
        """Copy in the order given; `media` is not used."""
        for job in jobs:
            moves = [Move(page, slot) for page, slot in job.moves]
            (self._tiers.offload if job.leaving else self._tiers.restore)(moves)
        return [MoveResult(session=job.session, pages=len(job.moves)) for job in jobs]
