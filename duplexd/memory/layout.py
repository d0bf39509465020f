"""Layout: where every byte of the one allocation lies, computed once (DESIGN §8).

1. Offsets are computed here, before anything is allocated; nobody else adds two sizes.
2. Every field starts on a multiple of `ALIGNMENT`, whatever lies before it.
3. A partition that names `session_slots` says the worst case of one session; the table says how many that admits.
4. Partitions lie in the order of `Section`, whatever order a family names them in; within a section in its order.

    | weights | anchors | windows x sessions | ingest x sessions | pages | payloads | workspace |
    0         ^offset of a field                                                            total_bytes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from math import prod

import msgspec

from duplexd.errors import ConfigError

#: CUDA allocations are aligned to 256 bytes, and 128-byte memory transactions want no less.
ALIGNMENT = 256

#: Element sizes in bytes. Names are torch's, so that `arena.py` looks them up and this module needs no torch.
DTYPE_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}


class PartitionKind(Enum):
    SLOTS = "slots"  #: independent slots of one size: states, payloads, ingest rings, workspace, weights
    RING = "ring"  #: window slots of fixed-window generators: anchors + recent + lookahead + retiring per session
    PAGES = "pages"  #: pages of token slots for contexts that grow


class Section(Enum):
    """Parts of the allocation, in the order they lie in and are printed in (DESIGN §8)."""

    WEIGHTS = "weights"
    ANCHORS = "anchors"  #: pinned as long as their session lives
    WINDOWS = "windows"  #: a past of fixed length: slots that slide, what a vocoder keeps between two chunks
    INGEST = "ingest"  #: what the person said and showed
    PAGES = "pages"  #: contexts that grow
    PAYLOADS = "payloads"  #: what one stage hands to the next
    WORKSPACE = "workspace"  #: scratch of running work


class FieldSpec(msgspec.Struct, frozen=True):
    """One tensor of a partition, for example the keys of all layers."""

    name: str
    shape: tuple[int, ...]  #: of one slot; of one token in a `pages` partition
    dtype: str = "float32"
    outer: tuple[int, ...] = ()  #: leading dimensions of a `pages` field, usually (layers,)

    def element_bytes(self) -> int:
        """Bytes one slot (or one token, over all of `outer`) takes."""
        return DTYPE_BYTES[self.dtype] * prod(self.shape) * prod(self.outer)


class PartitionSpec(msgspec.Struct, frozen=True):
    """A run of equal slots or pages and the fields each of them has."""

    name: str
    kind: PartitionKind
    count: int  #: slots, or pages
    fields: tuple[FieldSpec, ...]
    page_tokens: int = 0  #: tokens of one page; 0 unless `kind` is PAGES
    session_slots: int = 0  #: slots or pages one session may hold, retiring ones included; 0: not held per session
    shared_slots: int = 0  #: slots or pages no session holds (a prompt that all share)
    anchor_slots: int = 0  #: of `session_slots`, those that are pinned as long as the session lives
    section: Section | None = None  #: None: the usual one of its kind

    @property
    def rows(self) -> int:
        """Length of the dimension that slots index: slots, or token slots."""
        return self.count * self.page_tokens if self.kind is PartitionKind.PAGES else self.count

    @property
    def row_bytes(self) -> int:
        """Bytes of one slot, or of one token slot, over all fields; alignment between fields is not in it."""
        return sum(field.element_bytes() for field in self.fields)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, or of one page."""
        return self.row_bytes * (self.page_tokens or 1)

    @property
    def anchor_bytes(self) -> int:
        """Of all sessions' pinned slots, and of the prompt that they share. They lie within the partition."""
        pinned = (self.sessions or 0) * self.anchor_slots
        return (pinned + self.shared_slots * (self.kind is PartitionKind.PAGES)) * self.slot_bytes

    @property
    def sessions(self) -> int | None:
        """Sessions whose worst case fits; None when sessions hold nothing here."""
        return (self.count - self.shared_slots) // self.session_slots if self.session_slots else None


#: What a family gives: sessions -> partitions.
Partitions = Callable[[int], tuple["PartitionSpec", ...]]

#: The partition of host memory beside an arena.
HOST = "host"


def host_partition(pages: PartitionSpec, count: int) -> PartitionSpec:
    """Host memory for images of `count` pages of a `pages` partition; a slot is (*outer, page_tokens, *shape)."""
    fields = tuple(
        FieldSpec(field.name, (*field.outer, pages.page_tokens, *field.shape), field.dtype) for field in pages.fields
    )
    return PartitionSpec(HOST, PartitionKind.SLOTS, count, fields)


#: The one field of a shelf.
SHELF_FIELD = "bytes"


def shelf_partition(name: str, sizes: Iterable[int]) -> PartitionSpec:
    """Raw bytes for one stage's weights: tensors of these sizes, each on an aligned place.

    The sizes are known from headers, before a tensor is read; `Shelf` fills the partition and holds them to it.
    """
    fields = (FieldSpec(SHELF_FIELD, (sum(map(aligned, sizes)),), "uint8"),)
    return PartitionSpec(name, PartitionKind.SLOTS, 1, fields, section=Section.WEIGHTS)


_USUAL = {
    PartitionKind.SLOTS: Section.PAYLOADS,
    PartitionKind.RING: Section.WINDOWS,
    PartitionKind.PAGES: Section.PAGES,
}
_ORDER = tuple(Section)


def section_of(spec: PartitionSpec) -> Section:
    return spec.section or _USUAL[spec.kind]


def resident_layout(partitions: Partitions, *, sessions: int, resident: int) -> ArenaLayout:
    """A layout in which only `resident` of the sessions have pages at once; everything else is there for all."""
    paged = {spec.name: spec for spec in partitions(resident)}
    chosen = [paged[spec.name] if spec.kind is PartitionKind.PAGES else spec for spec in partitions(sessions)]
    return ArenaLayout(chosen)


class Placement(msgspec.Struct, frozen=True):
    """Where one field lies. `slot_axis` is the dimension of `shape` that slots (or token slots) index."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    slot_axis: int


class ArenaLayout:
    """Offsets of all fields of all partitions, section by section.

    Raises:  ConfigError naming the partition and the number that is wrong.
    """

    def __init__(self, partitions: Sequence[PartitionSpec]) -> None:
        self.partitions: dict[str, PartitionSpec] = {}
        self.placements: dict[tuple[str, str], Placement] = {}
        self._end: dict[str, int] = {}
        offset = 0
        for spec in sorted(partitions, key=lambda spec: _ORDER.index(section_of(spec))):
            _check_partition(spec, self.partitions)
            self.partitions[spec.name] = spec
            for field in spec.fields:
                placement = _place(spec, field, offset)
                self.placements[spec.name, field.name] = placement
                offset = aligned(placement.offset + placement.nbytes)
            self._end[spec.name] = offset
        self.total_bytes = offset

    def placement(self, partition: str, field: str) -> Placement:
        """Raises ConfigError with the names that exist, when one does not."""
        found = self.placements.get((partition, field))
        if found is None:
            known = ", ".join(f"{name}.{part}" for name, part in self.placements)
            raise ConfigError(f"the arena has no field {partition}.{field}; it has {known or 'none'}")
        return found

    def partition_bytes(self, partition: str) -> int:
        """Bytes from the partition's first field to the start of the next partition, alignment included."""
        names = list(self.partitions)
        before = names.index(partition) - 1
        return self._end[partition] - (self._end[names[before]] if before >= 0 else 0)

    @property
    def sessions(self) -> int | None:
        """Sessions the scarcest partition admits; None when no partition is held per session."""
        counts = [spec.sessions for spec in self.partitions.values() if spec.sessions is not None]
        return min(counts, default=None)

    @property
    def session_bytes(self) -> int:
        """Worst case of one session: what admission reserves."""
        return sum(spec.session_slots * spec.slot_bytes for spec in self.partitions.values())

    def describe(self) -> str:
        """The table printed at start-up. `anchors` are bytes that never move, within those of the partition."""
        head = ("partition", "section", "what", "count", "anchors", "bytes", "per session")
        rows = [head, *(self._describe_partition(spec) for spec in self.partitions.values())]
        anchors = sum(spec.anchor_bytes for spec in self.partitions.values())
        rows.append(("total", "", "", "", f"{anchors:,}", f"{self.total_bytes:,}", f"{self.session_bytes:,}"))
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = [
            "  ".join(_cell(text, width, index) for index, (text, width) in enumerate(zip(row, widths, strict=True)))
            for row in rows
        ]
        return "\n".join([*(line.rstrip() for line in lines), self._describe_sessions()])

    def _describe_partition(self, spec: PartitionSpec) -> tuple[str, ...]:
        what = ", ".join(f"{field.name} {[*field.outer, *field.shape]} {field.dtype}" for field in spec.fields)
        if spec.kind is PartitionKind.PAGES:
            what = f"pages of {spec.page_tokens} tokens: {what}"
        session = f"{spec.session_slots * spec.slot_bytes:,}" if spec.session_slots else "-"
        anchors = f"{spec.anchor_bytes:,}" if spec.anchor_bytes else "-"
        whole = f"{self.partition_bytes(spec.name):,}"
        return spec.name, section_of(spec).value, what, str(spec.count), anchors, whole, session

    def _describe_sessions(self) -> str:
        if self.sessions is None:
            return "sessions: not bounded by the arena"
        scarce = next(name for name, spec in self.partitions.items() if spec.sessions == self.sessions)
        return f"sessions: {self.sessions} (bounded by {scarce})"


def _cell(text: str, width: int, column: int) -> str:
    return text.ljust(width) if column < 3 else text.rjust(width)


def aligned(offset: int) -> int:
    """The next place a field may start on."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _place(spec: PartitionSpec, field: FieldSpec, offset: int) -> Placement:
    # Outer dimensions come first: one layer's keys lie together over token slots, and one index_select reads them.
    shape = (*field.outer, spec.rows, *field.shape)
    return Placement(
        offset=offset,
        nbytes=DTYPE_BYTES[field.dtype] * prod(shape),
        shape=shape,
        dtype=field.dtype,
        slot_axis=len(field.outer),
    )


def _check_partition(spec: PartitionSpec, known: dict[str, PartitionSpec]) -> None:
    pages = spec.kind is PartitionKind.PAGES
    names = [field.name for field in spec.fields]
    rules = [
        (spec.name in known, "is named twice"),
        (spec.count < 1, f"has count {spec.count}; it needs at least 1"),
        (not names, "has no field"),
        (len(set(names)) != len(names), f"names a field twice: {', '.join(names)}"),
        (pages != (spec.page_tokens > 0), f"of kind {spec.kind.value} has page_tokens {spec.page_tokens}"),
        (min(spec.session_slots, spec.shared_slots) < 0, "has a negative session_slots or shared_slots"),
        (
            not 0 <= spec.anchor_slots <= spec.session_slots,
            f"pins {spec.anchor_slots} of the {spec.session_slots} slots of a session",
        ),
        (
            spec.session_slots + spec.shared_slots > spec.count,
            f"has {spec.count} slots, but shares {spec.shared_slots} and promises each session {spec.session_slots}",
        ),
    ]
    rules += [
        (field.dtype not in DTYPE_BYTES, f"has field {field.name} of unknown dtype {field.dtype}")
        for field in spec.fields
    ]
    rules += [
        (bool(field.outer) and not pages, f"has field {field.name} with outer, which only pages have")
        for field in spec.fields
    ]
    rules += [
        (any(size < 1 for size in (*field.shape, *field.outer)), f"has field {field.name} with an empty dimension")
        for field in spec.fields
    ]
    for broken, sentence in rules:
        if broken:
            raise ConfigError(f"arena partition {spec.name!r} {sentence}")
