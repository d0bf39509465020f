"""The ledgers of one engine: what sessions hold in the arena and in the output slots of shared memory.

1. Every fence is a launch: it passes when the launch has come back.
2. The anchor (the pinned example turns) is prefilled once and shared by reference.
3. An output slot is free again when both have done with it: the front end, and whoever overhears it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from duplexd.engine.dialogue import Context
from duplexd.errors import SessionRefused
from duplexd.ids import ChunkId, Epoch, FenceId, SessionId
from duplexd.memory.classes import CacheClass
from duplexd.memory.guards import After, Freed, Passed
from duplexd.memory.layout import ArenaLayout, PartitionSpec
from duplexd.memory.ledger import COUNTED, FIRST_EPOCH, NO_CHUNK, Lease, SlotLedger
from duplexd.memory.pages import PageLedger, Usage
from duplexd.messages import SessionBytes

INGEST, STATE, LATENTS, PAGES = "ingest", "state", "latents", "pages"
NOISY, CLEAN, VOICE, MOTION = "noisy", "clean", "voice", "motion"


class PictureSlots:
    """Slots of shared memory for pictures: who has which, until the front end has copied it out.

    Args:    count: of all; session_max: what one session may have, so that a front end that does not read one person's
             pictures holds up nobody else's.
    """

    def __init__(self, count: int, *, session_max: int) -> None:
        self.count = count
        self._session_max = session_max
        # Last in, first out: memory that nobody needed is never touched.
        self._free = list(reversed(range(count)))
        self._owners: dict[int, SessionId] = {}
        self._held: Counter[SessionId] = Counter()

    def available(self, session: SessionId) -> bool:
        return bool(self._free) and self._held[session] < self._session_max

    def take(self, session: SessionId) -> int | None:
        """A slot, or None at the bound."""
        if not self.available(session):
            return None
        slot = self._free.pop()
        self._owners[slot] = session
        self._held[session] += 1
        return slot

    def give_back(self, slot: int) -> SessionId | None:
        """Returns whose it was; None for a slot nobody had, which changes nothing."""
        session = self._owners.pop(slot, None)
        if session is None:
            return None
        self._held[session] -= 1
        if not self._held[session]:
            del self._held[session]
        self._free.append(slot)
        return session

    def held(self, session: SessionId) -> int:
        return self._held.get(session, 0)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def check(self) -> None:
        """Raises AssertionError when a slot is lost or counted twice."""
        if sorted([*self._free, *self._owners]) != list(range(self.count)):
            raise AssertionError(f"picture slots: {len(self._free)} free, {len(self._owners)} held of {self.count}")


class FaceStores:
    """Ledgers of what faces hold in the arena, and the slots of their pictures."""

    def __init__(self, layout: ArenaLayout, pictures: PictureSlots, *, passed: Passed, freed: Freed | None) -> None:
        self.noisy, self.clean, self.voice, self.motion = (
            SlotLedger(layout.partitions[name], passed=passed, freed=freed) for name in (NOISY, CLEAN, VOICE, MOTION)
        )
        self.pictures = pictures

    @property
    def ledgers(self) -> tuple[SlotLedger, ...]:
        return (self.noisy, self.clean, self.voice, self.motion)


class Stores:
    """Ledgers over the partitions `ingest`, `state`, `latents` and `pages` of a layout.

    `freed` is told of slots of the arena at the moment they may be handed out again.
    """

    def __init__(
        self,
        layout: ArenaLayout,
        *,
        out_slots: int,
        context_extents_max: int,
        copies_max: int = 64,
        host: PartitionSpec | None = None,
        picture_slots: int = 0,
        sessions_max: int = 1,
        freed: Freed | None = None,
    ) -> None:
        self.layout = layout
        self.host = None if host is None else SlotLedger(host)
        self.ingest = SlotLedger(layout.partitions[INGEST], freed=freed)
        self.state = SlotLedger(layout.partitions[STATE], freed=freed)
        self.latents = SlotLedger(layout.partitions[LATENTS], freed=freed)
        self.pages = PageLedger(layout.partitions[PAGES], pages_max=context_extents_max, host=self.host, freed=freed)
        self._pool_tokens = self.pages.spec.rows
        self.out_slots = deque(range(out_slots))
        self.out_slots_count = out_slots
        self._overheard: Counter[int] = Counter()  # output slots that a face still reads
        self._freed_early: set[int] = set()  # of them, those the front end has done with
        self._running: set[FenceId] = set()  # launches of faces that have not come back
        self.face: FaceStores | None = None
        if NOISY in layout.partitions:
            pictures = PictureSlots(picture_slots, session_max=max(1, picture_slots // max(1, sessions_max)))
            self.face = FaceStores(layout, pictures, passed=lambda fence: fence not in self._running, freed=freed)
        self._slots_in_arena = (self.ingest, self.state, self.latents, *(self.face.ledgers if self.face else ()))
        self._in_arena: tuple[SlotLedger | PageLedger, ...] = (*self._slots_in_arena, self.pages)
        self._ledgers = self._in_arena if self.host is None else (*self._in_arena, self.host)
        self.copies_max = copies_max
        self.anchor = Context(self.pages, self.pages.open(None), ())

    def pin_anchor(self) -> None:
        self.pages.pin(self.anchor.id)

    def open_context(self, session: SessionId, tokens: Sequence[int]) -> Context:
        context = self.pages.open(session, prefix=self.anchor.id)
        return Context(self.pages, context, tokens[: self.pages.length(context)])

    def lease(
        self,
        ledger: SlotLedger,
        session: SessionId,
        label: CacheClass,
        stage: str,
        *,
        chunk: ChunkId = NO_CHUNK,
        epoch: Epoch = FIRST_EPOCH,
    ) -> Lease:
        """A slot of a session, for one chunk of it or for all its life. Raises SessionRefused when none is free."""
        lease = ledger.lease(session, label, chunk=chunk, epoch=epoch, stage=stage)
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
        return self.latents.free_count > 0 and self.latents.held_count(session) < bound

    def discard(self, lease: Lease, *, after: After = None) -> None:
        self.latents.discard(lease, after=after)

    # Output slots are read by two: the front end, and the character itself.

    def overhear(self, slot: int) -> None:
        """A face will read this slot: it is not written again before `overheard`."""
        self._overheard[slot] += 1

    def overheard(self, slot: int) -> None:
        self._overheard[slot] -= 1
        if not self._overheard[slot]:
            del self._overheard[slot]
            if slot in self._freed_early:
                self._freed_early.remove(slot)
                self.out_slots.append(slot)

    def slots_freed(self, slots: Iterable[int]) -> None:
        """The front end has copied these out."""
        for slot in slots:
            if slot in self._overheard:
                self._freed_early.add(slot)
            else:
                self.out_slots.append(slot)

    def fence_begun(self, fence: FenceId) -> None:
        """A launch of a face goes out; what it may touch is not free before it has come back."""
        self._running.add(fence)

    def fence_passed(self, fence: FenceId) -> None:
        self._running.discard(fence)
        for ledger in self._ledgers:
            if fence in ledger.awaited:
                ledger.fence_passed(fence)

    def bytes_of(self, session: SessionId) -> SessionBytes:
        """What a session holds, also behind fences. O(1)."""
        return SessionBytes(
            session,
            arena=sum(ledger.owned(session) * ledger.spec.slot_bytes for ledger in self._in_arena),
            host=0 if self.host is None else self.host.owned(session) * self.host.spec.slot_bytes,
        )

    def bytes_of_all(self, sessions: Iterable[SessionId]) -> list[SessionBytes]:
        """The same of many: one pass over each ledger's owners, not one look into each ledger a session."""
        arena: Counter[SessionId | None] = Counter()
        for ledger in self._in_arena:
            slot_bytes = ledger.spec.slot_bytes
            for owner, count in ledger.owned_by.items():
                arena[owner] += count * slot_bytes
        host: Mapping[SessionId | None, int] = {} if self.host is None else self.host.owned_by
        host_bytes = 0 if self.host is None else self.host.spec.slot_bytes
        return [SessionBytes(one, arena=arena[one], host=host.get(one, 0) * host_bytes) for one in sessions]

    def bytes_by_class(self, usage: Usage) -> dict[CacheClass, int]:
        """Of everything that is held in the arena; what only a fence still guards is in no class."""
        held = {label: count * usage.page_bytes for label, count in usage.pages.items()}
        for ledger in self._slots_in_arena:
            for label, count in ledger.by_class().items():
                held[label] += count * ledger.spec.slot_bytes
        return held

    def slot_counts(self) -> Counter[str]:
        """What was done so far with slots of the arena: leases, commits, discards."""
        counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        for ledger in self._slots_in_arena:
            counts.update(ledger.counts)
        return counts

    def pool_share(self, tokens: int) -> float:
        return tokens / self._pool_tokens

    def close_session(self, session: SessionId, *, after: After) -> None:
        for ledger in self._slots_in_arena:
            ledger.close(session, after=after)

    def check(self) -> None:
        """Raises LedgerError when any ledger contradicts itself."""
        for ledger in self._ledgers:
            ledger.check()
        if self.face is not None:
            self.face.pictures.check()
        if len(self.out_slots) > self.out_slots_count or len(set(self.out_slots)) != len(self.out_slots):
            raise AssertionError(f"output slots are counted twice: {list(self.out_slots)}")
