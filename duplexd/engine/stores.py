"""The ledgers of one engine: what sessions hold in the arena and in the output slots of shared memory.

1. Every fence is a launch: it passes when the launch has come back.
2. The anchor (the pinned example turns) is prefilled once and shared by reference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from duplexd.engine.dialogue import Context
from duplexd.errors import SessionRefused
from duplexd.ids import Epoch, FenceId, SessionId
from duplexd.memory.classes import CacheClass
from duplexd.memory.guards import After
from duplexd.memory.layout import ArenaLayout, PartitionSpec
from duplexd.memory.ledger import Lease, SlotLedger
from duplexd.memory.pages import PageLedger
from duplexd.messages import SessionBytes

INGEST, STATE, LATENTS, PAGES = "ingest", "state", "latents", "pages"


class Stores:
    """Ledgers over the partitions `ingest`, `state`, `latents` and `pages` of a layout."""

    def __init__(
        self,
        layout: ArenaLayout,
        *,
        out_slots: int,
        context_extents_max: int,
        copies_max: int = 64,
        host: PartitionSpec | None = None,
    ) -> None:
        self.layout = layout
        self.host = None if host is None else SlotLedger(host)
        self.ingest = SlotLedger(layout.partitions[INGEST])
        self.state = SlotLedger(layout.partitions[STATE])
        self.latents = SlotLedger(layout.partitions[LATENTS])
        self.pages = PageLedger(layout.partitions[PAGES], pages_max=context_extents_max, host=self.host)
        self.out_slots = deque(range(out_slots))
        self.out_slots_count = out_slots
        self.copies_max = copies_max
        self.anchor = Context(self.pages, self.pages.open(None), ())

    def pin_anchor(self) -> None:
        self.pages.pin(self.anchor.id)

    def open_context(self, session: SessionId, tokens: Sequence[int]) -> Context:
        context = self.pages.open(session, prefix=self.anchor.id)
        return Context(self.pages, context, tokens[: self.pages.length(context)])

    def lease(self, ledger: SlotLedger, session: SessionId, label: CacheClass, stage: str) -> Lease:
        lease = ledger.lease(session, label, stage=stage)
        if lease is None:
            raise SessionRefused(
                f"session {session} needs a slot of {ledger.spec.name} and {ledger.free_count} of {ledger.spec.count} "
                "are free; lower sessions_max or close a session"
            )
        return lease

    def lease_latents(self, session: SessionId, epoch: Epoch) -> Lease | None:
        return self.latents.lease(session, CacheClass.CURRENT, epoch=epoch, stage="talk")

    def latents_free(self, session: SessionId) -> bool:
        bound = self.latents.spec.session_slots
        return self.latents.free_count > 0 and len(self.latents.held(session)) < bound

    def discard(self, lease: Lease, *, after: After = None) -> None:
        self.latents.discard(lease, after=after)

    def fence_passed(self, fence: FenceId) -> None:
        for ledger in self._ledgers:
            ledger.fence_passed(fence)

    def bytes_of(self, session: SessionId) -> SessionBytes:
        """What a session holds, also behind fences. O(1)."""
        arena = (self.ingest, self.state, self.latents, self.pages)
        return SessionBytes(
            session,
            arena=sum(ledger.owned(session) * ledger.spec.slot_bytes for ledger in arena),
            host=0 if self.host is None else self.host.owned(session) * self.host.spec.slot_bytes,
        )

    @property
    def _ledgers(self) -> tuple[SlotLedger | PageLedger, ...]:
        arena = (self.ingest, self.state, self.latents, self.pages)
        return arena if self.host is None else (*arena, self.host)

    def pool_share(self, tokens: int) -> float:
        return tokens / self.pages.spec.rows

    def close_session(self, session: SessionId, *, after: After) -> None:
        for ledger in (self.ingest, self.state, self.latents):
            ledger.close(session, after=after)

    def check(self) -> None:
        """Raises LedgerError when any ledger contradicts itself."""
        for ledger in self._ledgers:
            ledger.check()
        if len(self.out_slots) > self.out_slots_count or len(set(self.out_slots)) != len(self.out_slots):
            raise AssertionError(f"output slots are counted twice: {list(self.out_slots)}")
