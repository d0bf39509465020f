"""Tiers: pages of the arena and their images in host memory, and the copies between them (DESIGN §8).

1. The ledgers decide what goes where; here are only the bytes. A move copies one whole page, all fields of it.
2. Moves run on one lane in the order they were ordered. So an image is complete before anything reads it, and a host
   slot given back and taken again is overwritten only after the copy that still reads it.
3. On CUDA the copies are asynchronous, from and to pinned memory: the lane's fence tells when they have ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from duplexd.memory.arena import Arena
from duplexd.memory.layout import HOST, ArenaLayout, FieldSpec, PartitionSpec
from duplexd.memory.pages import Move


class Tiers:
    """An arena's pages and the host memory beside it.

    Args:    host: as `host_partition` describes it.
    Raises:  ArenaFull when the machine has not so much memory.
    """

    def __init__(self, arena: Arena, pages: PartitionSpec, host: PartitionSpec) -> None:
        self.host = Arena(ArenaLayout([host]), pinned=arena.device.type == "cuda")
        self._fields = [
            (_paged(arena.field(pages.name, field.name), field, pages), self.host.field(HOST, field.name))
            for field in pages.fields
        ]

    def offload(self, moves: Sequence[Move]) -> None:
        """Copy pages to their host slots."""
        for page, slot in moves:
            for field, images in self._fields:
                images[slot].copy_(field[page], non_blocking=True)

    def restore(self, moves: Sequence[Move]) -> None:
        """Copy host slots back to pages."""
        for page, slot in moves:
            for field, images in self._fields:
                field[page].copy_(images[slot], non_blocking=True)


def _paged(field: Tensor, spec: FieldSpec, pages: PartitionSpec) -> Tensor:
    """(*outer, count * page_tokens, *shape) -> a view (count, *outer, page_tokens, *shape)."""
    paged = field.view(*spec.outer, pages.count, pages.page_tokens, *spec.shape)
    return paged.movedim(len(spec.outer), 0)
