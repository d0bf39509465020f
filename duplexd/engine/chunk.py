"""Chunks of one session: a stretch of output that is planned, made, published, heard or dropped as one.

1. Every transition is in the table below; an illegal one raises and changes nothing.
2. A chunk id never repeats, although its span may be made again.
3. RETIRING: its epoch died while a lane was still writing it; it becomes DISCARDED when that work comes back.

    PLANNED -> RUNNING -> READY -> PUBLISHED -> HEARD
       |          |         |          |
       +----------|---------+----------+-----> DISCARDED
                  +-> RETIRING --------------> DISCARDED
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

import msgspec

from duplexd.ids import UNCONDITIONED, ChunkId, ConditionVersion, Epoch
from duplexd.units import Span, Ticks


class ChunkState(Enum):
    PLANNED = "planned"  #: its span is fixed, nothing was launched
    RUNNING = "running"  #: a lane is making it
    READY = "ready"  #: made, not yet given to the front end
    PUBLISHED = "published"  #: the front end has it
    HEARD = "heard"  #: its end has passed the ear
    RETIRING = "retiring"  #: its epoch died while a lane was writing it
    DISCARDED = "discarded"  #: nobody will hear it

    __hash__ = object.__hash__  # Members are singletons; Enum hashes names, in Python, at every move.


_LEGAL: dict[ChunkState, frozenset[ChunkState]] = {
    ChunkState.PLANNED: frozenset({ChunkState.RUNNING, ChunkState.DISCARDED}),
    ChunkState.RUNNING: frozenset({ChunkState.READY, ChunkState.RETIRING, ChunkState.DISCARDED}),
    ChunkState.READY: frozenset({ChunkState.PUBLISHED, ChunkState.DISCARDED}),
    ChunkState.PUBLISHED: frozenset({ChunkState.HEARD, ChunkState.DISCARDED}),
    ChunkState.RETIRING: frozenset({ChunkState.DISCARDED}),
    ChunkState.HEARD: frozenset(),
    ChunkState.DISCARDED: frozenset(),
}


class Chunk(msgspec.Struct):
    chunk_id: ChunkId
    epoch: Epoch
    offset: Ticks  #: where in the clause it starts
    span: Span
    state: ChunkState = ChunkState.PLANNED
    slot: int = -1  #: output slot while it is being made and until the front end frees it
    samples: int = 0  #: how many it holds once it is made
    condition: ConditionVersion = UNCONDITIONED  #: of the clause it speaks; never changes


class ChunkTable:
    """The living chunks of one session, oldest first; ended ones are counted and forgotten."""

    def __init__(self, *, chunks_max: int = 256) -> None:
        self.chunks_max = chunks_max
        self._chunks: dict[ChunkId, Chunk] = {}
        self._next = 1
        self.heard_ticks = 0
        self.discarded_ticks = 0

    def plan(
        self,
        *,
        epoch: Epoch,
        offset: Ticks,
        span: Span,
        condition: ConditionVersion = UNCONDITIONED,
    ) -> Chunk:
        if self.full:
            raise RuntimeError(f"{self.chunks_max} chunks are alive; whoever plans must look at `full` first")
        chunk = Chunk(ChunkId(self._next), epoch, offset, span, condition=condition)
        self._next += 1
        self._chunks[chunk.chunk_id] = chunk
        return chunk

    def move(self, chunk: Chunk, state: ChunkState) -> None:
        if state not in _LEGAL[chunk.state]:
            raise ValueError(f"chunk {chunk.chunk_id} is {chunk.state.value} and cannot become {state.value}")
        chunk.state = state
        if _LEGAL[state]:
            return
        if state is ChunkState.HEARD:
            self.heard_ticks += chunk.span.length
        else:
            self.discarded_ticks += chunk.span.length
        del self._chunks[chunk.chunk_id]

    @property
    def full(self) -> bool:
        """As many chunks are alive as may be: the next waits until one was heard or dropped."""
        return len(self._chunks) >= self.chunks_max

    def alive(self) -> list[Chunk]:
        return list(self._chunks.values())

    def hear(self, position: Ticks) -> list[Chunk]:
        """Published chunks whose end the ear has passed become HEARD; they are returned."""
        published = ChunkState.PUBLISHED
        heard = [c for c in self._chunks.values() if c.state is published and c.span.end <= position]
        for chunk in heard:
            self.move(chunk, ChunkState.HEARD)
        return heard

    def interrupt(self, at: Ticks, *, keep: Collection[ChunkId] = ()) -> list[Chunk]:
        """The epoch dies at `at`: what was heard counts as heard, the straddling chunk is split, the rest is dropped.

        Args:    keep: chunks that go on, since what is left of them lies before `at`.
        Returns: the chunks that were dropped or are retiring, in order.
        """
        dropped = []
        for chunk in self.alive():
            if chunk.chunk_id in keep:
                continue
            if chunk.state is ChunkState.PUBLISHED and chunk.span.start < at:
                self._split(chunk, at)
                continue
            if chunk.state is not ChunkState.RETIRING:
                self._drop(chunk)
                dropped.append(chunk)
        return dropped

    def forget_unpublished(self) -> list[Chunk]:
        """What nobody has been given is dropped, or retires while a lane still writes it; returns it in order."""
        unpublished = (ChunkState.PLANNED, ChunkState.RUNNING, ChunkState.READY)
        dropped = [chunk for chunk in self.alive() if chunk.state in unpublished]
        for chunk in dropped:
            self._drop(chunk)
        return dropped

    def _drop(self, chunk: Chunk) -> None:
        running = chunk.state is ChunkState.RUNNING
        self.move(chunk, ChunkState.RETIRING if running else ChunkState.DISCARDED)

    def _split(self, chunk: Chunk, at: Ticks) -> None:
        """Only the chunk that straddles an interruption may be split (DESIGN §2)."""
        tail = max(0, chunk.span.end - at)
        chunk.span = Span(chunk.span.start, Ticks(chunk.span.end - tail))
        self.discarded_ticks += tail
        self.move(chunk, ChunkState.HEARD)
