"""The slot ledger: who holds which slot of a `slots` or `ring` partition, as what, and until when.

1. The ledger decides nothing: it never evicts, and it says no instead of making room.
2. Committing relabels. No byte of the arena moves, whatever a slot becomes.
3. A slot that running work may still write is RETIRING until the fences of that work have passed.
4. Letting go makes the lease stale at once; a stale lease raises wherever it is used.
5. Anchors leave when their session closes, not before.

           lease             commit          slide, discard
    FREE ---------> CURRENT ---------> RECENT ----------------> RETIRING ---> FREE
                       |  pin                                       ^   fences passed
                       +------> ANCHOR -----------------------------+
                                         close
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from enum import Enum

import msgspec

from duplexd.errors import ArenaFull, LedgerError, StaleLease
from duplexd.ids import ChunkId, Epoch, FenceId, SessionId, SlotId
from duplexd.memory.classes import RULES, CacheClass, Eviction
from duplexd.memory.guards import After, Freed, Guards, Passed, none_passed
from duplexd.memory.layout import PartitionKind, PartitionSpec

NO_CHUNK = ChunkId(0)
FIRST_EPOCH = Epoch(0)

#: Who holds something: a session, or None for the engine itself (a prompt that all sessions share).
Owner = SessionId | None


class Lease(msgspec.Struct, frozen=True, order=True):
    """The right to use one slot. It is stale once the slot was let go, also while the slot is still retiring."""

    partition: str
    slot: SlotId
    generation: int  #: counts the leases of this slot


class Held(msgspec.Struct, frozen=True):
    """One slot in use and its address: (owner, chunk, epoch, stage)."""

    lease: Lease
    owner: Owner
    label: CacheClass
    chunk: ChunkId
    epoch: Epoch
    stage: str


class Refusal(Enum):
    """Why there was no room."""

    PARTITION_FULL = "partition full"  #: every slot or page is held or retiring
    SESSION_BOUND = "session bound"  #: the owner holds (or still retires) all it was promised
    CONTEXT_BOUND = "context bound"  #: the context's table is as long as it may get


#: What a slot ledger counts of what it did.
COUNTED = ("leases", "commits", "discards")


class SlotLedger:
    """Bookkeeping of one partition, in integers; it does not know where the bytes are.

    Args:    spec: the partition; `session_slots` bounds each session, `shared_slots` the engine's own.
             passed: whether a fence passed before this call; see `Guards` rule 3.
             freed: told of slots at the moment they may be handed out again (the adversary fills them with NaN).
    """

    def __init__(self, spec: PartitionSpec, *, passed: Passed = none_passed, freed: Freed | None = None) -> None:
        if spec.kind is PartitionKind.PAGES:
            raise LedgerError(f"partition {spec.name} has pages; a SlotLedger keeps slots")
        self.spec = spec
        self.refusal: Refusal | None = None  #: why the last `lease` said no; None after a yes
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))  #: what was done so far
        self._by_class = dict.fromkeys(CacheClass, 0)  # held slots
        self._freed = freed
        self._guards = Guards(passed)
        self.awaited = self._guards.fences  #: fences that something waits for
        # Last in, first out: a slot given back is the next one handed out, so that a missing fence shows at once.
        self._free = [SlotId(slot) for slot in reversed(range(spec.count))]
        self._held: list[Held | None] = [None] * spec.count
        self._generations = [0] * spec.count
        self._owners: dict[SlotId, Owner] = {}  # of held and retiring slots
        self._slots: dict[Owner, dict[SlotId, None]] = {}  # held slots, oldest lease first
        self._owned: dict[Owner, int] = {}  # held and retiring slots of each owner

    # Taking and giving back ------------------------------------------------------------------------------------------

    def lease(
        self, owner: Owner, label: CacheClass, *, chunk: ChunkId = NO_CHUNK, epoch: Epoch = FIRST_EPOCH, stage: str = ""
    ) -> Lease | None:
        """Take a free slot; None when there is none for this owner, and `refusal` says why. Nothing is evicted."""
        self.refusal = self._refuse(owner)
        if self.refusal is not None:
            return None
        slot = self._free.pop()
        self._generations[slot] += 1
        lease = Lease(self.spec.name, slot, self._generations[slot])
        self._held[slot] = Held(lease, owner, label, chunk, epoch, stage)
        self._by_class[label] += 1
        self.counts["leases"] += 1
        self._owners[slot] = owner
        self._slots.setdefault(owner, {})[slot] = None
        self._owned[owner] = self._owned.get(owner, 0) + 1
        return lease

    def _refuse(self, owner: Owner) -> Refusal | None:
        bound = self.spec.shared_slots if owner is None else self.spec.session_slots
        if self.spec.session_slots and self._owned.get(owner, 0) >= bound:
            return Refusal.SESSION_BOUND
        return None if self._free else Refusal.PARTITION_FULL

    def discard(self, lease: Lease, *, after: After) -> None:
        """Let go of a slot; it is reusable once `after` has passed.

        Raises:  StaleLease when it was let go before; LedgerError for an anchor, which only `close` frees.
        """
        held = self.check_lease(lease)
        if held.label is CacheClass.ANCHOR:
            raise LedgerError(
                f"slot {lease.slot} of {self.spec.name} is an anchor of session {held.owner}: close frees it"
            )
        self._let_go(held, self._guards.pending(after))

    def slide(
        self, session: Owner, keep: int, *, label: CacheClass = CacheClass.RECENT, after: After = None
    ) -> list[Lease]:
        """Let go of the oldest slots of one sliding class beyond the newest `keep`; returns their leases, stale now.

        Raises:  LedgerError for a class that does not slide.
        """
        if Eviction.SLIDING not in RULES[label].evictions:
            raise LedgerError(f"{label.value} slots do not slide ({RULES[label].lifetime.value} lifetime)")
        sliding = [held for held in self._iterate(session) if held.label is label]
        surplus = sliding[: max(0, len(sliding) - keep)]
        pending = self._guards.pending(after)
        for held in surplus:
            self._let_go(held, pending)
        return [held.lease for held in surplus]

    def close(self, session: Owner, *, after: After) -> list[Lease]:
        """Let go of all a session holds, anchors too; returns the leases, stale now. Closing twice is nothing."""
        leaving, pending = list(self._iterate(session)), self._guards.pending(after)
        for held in leaving:
            self._let_go(held, pending)
        return [held.lease for held in leaving]

    def fence_passed(self, fence: FenceId) -> int:
        """Free what waited for this fence alone; returns how many slots. Fences nobody waits for are nothing."""
        slots = [SlotId(slot) for slot in self._guards.fence_passed(fence)]
        self._release(slots)
        return len(slots)

    def _let_go(self, held: Held, pending: tuple[FenceId, ...]) -> None:
        slot = held.lease.slot
        self._held[slot] = None
        self._by_class[held.label] -= 1
        self.counts["discards"] += 1
        del self._slots[held.owner][slot]
        if not self._slots[held.owner]:
            del self._slots[held.owner]
        # Retire, don't free: a lane still writes this slot until these fences pass.
        self._guards.guard(slot, pending)
        if not pending:
            self._release([slot])

    def _release(self, slots: list[SlotId]) -> None:
        for slot in slots:
            owner = self._owners.pop(slot)
            self._owned[owner] -= 1
            if not self._owned[owner]:
                del self._owned[owner]
            self._free.append(slot)
        if slots and self._freed is not None:
            self._freed(self.spec.name, slots)

    # Relabelling -----------------------------------------------------------------------------------------------------

    def commit(self, lease: Lease) -> None:
        """CURRENT -> RECENT: it was heard. Nothing is copied. Raises LedgerError for any other class."""
        self._relabel(lease, CacheClass.RECENT, allowed=(CacheClass.CURRENT,))
        self.counts["commits"] += 1

    def pin(self, lease: Lease) -> None:
        """CURRENT, RECENT or INGEST -> ANCHOR, until the session closes. Raises LedgerError for any other class."""
        self._relabel(lease, CacheClass.ANCHOR, allowed=(CacheClass.CURRENT, CacheClass.RECENT, CacheClass.INGEST))

    def _relabel(self, lease: Lease, label: CacheClass, *, allowed: tuple[CacheClass, ...]) -> None:
        held = self.check_lease(lease)
        if held.label not in allowed:
            raise LedgerError(
                f"slot {lease.slot} of {self.spec.name} (session {held.owner}, chunk {held.chunk}) "
                f"is {held.label.value}; only {', '.join(kind.value for kind in allowed)} becomes {label.value}"
            )
        self._held[lease.slot] = Held(held.lease, held.owner, label, held.chunk, held.epoch, held.stage)
        self._by_class[held.label] -= 1
        self._by_class[label] += 1

    # Questions -------------------------------------------------------------------------------------------------------

    def check_lease(self, lease: Lease) -> Held:
        """What a live lease holds. Raises StaleLease when its slot was let go, or is someone else's by now."""
        held = self._held[lease.slot] if 0 <= lease.slot < self.spec.count else None
        if held is None or held.lease != lease:
            raise StaleLease(
                f"slot {lease.slot} of {lease.partition}, generation {lease.generation}, was given back; "
                + ("it is free or retiring now" if held is None else f"session {held.owner} holds {held.lease}")
            )
        return held

    def held_count(self, session: Owner) -> int:
        """How many slots a session holds. O(1)."""
        return len(self._slots.get(session, ()))

    def held(self, session: Owner) -> list[Held]:
        """All a session holds, oldest lease first."""
        return list(self._iterate(session))

    def find(
        self,
        session: Owner,
        *,
        chunk: ChunkId | None = None,
        epoch: Epoch | None = None,
        stage: str | None = None,
        label: CacheClass | None = None,
    ) -> list[Held]:
        """What a session holds at an address; None matches anything. Oldest lease first, O(slots of the session)."""
        return [
            held
            for held in self._iterate(session)
            if chunk in (None, held.chunk)
            and epoch in (None, held.epoch)
            and stage in (None, held.stage)
            and label in (None, held.label)
        ]

    def _iterate(self, session: Owner) -> Iterator[Held]:
        for slot in self._slots.get(session, ()):
            held = self._held[slot]
            if held is not None:
                yield held

    def owned(self, owner: Owner) -> int:
        """Slots an owner has, retiring ones included."""
        return self._owned.get(owner, 0)

    @property
    def owned_by(self) -> Mapping[Owner, int]:
        """The same, of everybody who has any."""
        return self._owned

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def retiring_count(self) -> int:
        """Slots nobody holds that a fence still guards."""
        return len(self._owners) - sum(map(len, self._slots.values()))

    def by_class(self) -> dict[CacheClass, int]:
        """Held slots of every class; retiring ones are in none."""
        return dict(self._by_class)

    def full(self, owner: Owner, asked: int) -> ArenaFull:
        """The error for an owner who cannot go on without `asked` slots: what is there, and what to lower."""
        return ArenaFull(
            f"session {owner} needs {asked} slots of {self.spec.name}: {self.free_count} of {self.spec.count} are "
            f"free, {self.retiring_count} retiring, it has {self._owned.get(owner, 0)} of "
            f"{self.spec.session_slots or 'any'}; lower lookahead or sessions_max"
        )

    def check(self) -> None:
        """Every slot is held once, retiring or free; raises LedgerError naming what contradicts. O(slots)."""
        self._guards.check()
        free = set(self._free)
        held = {held.lease.slot for held in self._held if held is not None}
        retiring = {slot for slot in range(self.spec.count) if slot in self._guards}
        listed = [slot for slots in self._slots.values() for slot in slots]
        owned = {owner: list(self._owners.values()).count(owner) for owner in self._owners.values()}
        rules = {
            "a free slot is listed twice": len(free) != len(self._free),
            "a slot is held twice": len(listed) != len(set(listed)),
            "the slots of the owners are not the slots held": set(listed) != held,
            "slots are lost or in two states": sorted([*free, *held, *retiring]) != list(range(self.spec.count)),
            "owners are counted wrongly": owned != self._owned,
            "classes are counted wrongly": self._by_class
            != {label: sum(held is not None and held.label is label for held in self._held) for label in CacheClass},
            "a slot is listed under a foreign owner": any(
                self._owners.get(slot, -1) != owner for owner, slots in self._slots.items() for slot in slots
            ),
        }
        for sentence, broken in rules.items():
            if broken:
                raise LedgerError(f"ledger of {self.spec.name}: {sentence}")
