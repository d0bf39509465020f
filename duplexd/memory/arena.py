"""The arena: one allocation per device, and typed views of it (DESIGN §8).

1. One allocation at start-up, written once: memory the system cannot give is missed then and not in a conversation, and
   the process grows no more. Nothing else that lives longer than a launch is allocated afterwards.
2. A field is a view; taking one copies nothing and costs nothing on the device.
3. Who may touch which slot is the ledgers' business. The arena checks no lease.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from duplexd.errors import ArenaFull, ModelError
from duplexd.memory.layout import SHELF_FIELD, ArenaLayout, PartitionSpec, Placement, aligned
from duplexd.memory.ledger import Lease


class Arena:
    """Storage for a layout.

    Args:    device: a torch device name. pinned: page-locked host memory, which a CUDA device copies from and to while
             it computes; for a host tier beside a CUDA arena.
    Raises:  ArenaFull when the device has not enough memory; the text has the layout's table.
    """

    def __init__(self, layout: ArenaLayout, device: str = "cpu", *, pinned: bool = False) -> None:
        self.layout = layout
        self.device = torch.device(device)
        size = layout.total_bytes
        try:
            self.buffer = torch.empty(size, dtype=torch.uint8, device=self.device, pin_memory=pinned).zero_()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise ArenaFull(
                f"{device} has no {layout.total_bytes:,} bytes for the arena ({error}); lower sessions_max:\n"
                f"{layout.describe()}"
            ) from error
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # it was cleared on a stream that no lane waits for
        self._fields = {name: self._view(placement) for name, placement in layout.placements.items()}

    def _view(self, placement: Placement) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, placement.dtype)
        flat = self.buffer[placement.offset : placement.offset + placement.nbytes]
        return flat.view(dtype).view(placement.shape)

    def field(self, partition: str, name: str) -> torch.Tensor:
        """A field of all slots: (count, *shape), or (*outer, count * page_tokens, *shape) for pages. A view.

        Raises:  ConfigError with the names that exist, when one does not.
        """
        self.layout.placement(partition, name)  # raises with the names there are
        return self._fields[partition, name]

    def view(self, lease: Lease, name: str) -> torch.Tensor:
        """A field of one leased slot, shape as in its FieldSpec. A view."""
        return self.field(lease.partition, name)[lease.slot]

    def fill_nan(self, partition: str, slots: Sequence[int]) -> None:
        """Make slots (token slots of a `pages` partition) unusable, so that whoever reads them is found out.

        Floats become NaN. Integers have none; they take the value furthest from zero (bool: True).
        """
        if not len(slots):
            return
        index = torch.tensor(list(slots), dtype=torch.int64, device=self.device)
        for (owner, name), placement in self.layout.placements.items():
            if owner == partition:
                self._fields[owner, name].index_fill_(placement.slot_axis, index, _poison(self._fields[owner, name]))

    def tensor_of(self, slots: bytes) -> torch.Tensor:
        """Slots as the ledgers give them (int64 little endian) -> int64 (n,) on the arena's device.

        On CUDA the copy is asynchronous on the current stream, from pinned memory that torch keeps until it is done.
        """
        if not slots:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        host = torch.frombuffer(bytearray(slots), dtype=torch.int64)
        return host if self.device.type == "cpu" else host.pin_memory().to(self.device, non_blocking=True)


class Shelf:
    """A partition of one stage's weights (`shelf_partition`). Fill it with `place`, then call `close`.

    What is computed with is the view that `place` returns; the original may be forgotten. What is placed is what was
    promised, to the byte: a stage that would hold more, or less, does not load.

    Raises:  ConfigError when the arena has no such partition.
    """

    def __init__(self, arena: Arena, spec: PartitionSpec) -> None:
        self.spec = spec
        self._bytes = arena.field(spec.name, SHELF_FIELD)[0]
        self._placed = 0

    def place(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor on the shelf: same shape and type, contiguous, on the arena's device.

        Raises:  ModelError when more is placed than was promised.
        """
        end = self._placed + tensor.nbytes
        if end > len(self._bytes):
            raise ModelError(
                f"{self.spec.name}: a tensor {tuple(tensor.shape)} {tensor.dtype} needs {tensor.nbytes} bytes, "
                f"{len(self._bytes) - self._placed} of {len(self._bytes)} are left: the header promised less"
            )
        view = self._bytes[self._placed : end].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        self._placed += aligned(tensor.nbytes)
        return view

    def place_all(self, module: nn.Module) -> None:
        """Every parameter and buffer of a module, in the order of `sizes_of`; it then computes with the views."""
        placed: dict[nn.Parameter, nn.Parameter] = {}  # one that two submodules share stays shared
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if parameter not in placed:
                placed[parameter] = nn.Parameter(self.place(parameter.data), requires_grad=False)
            owner, own = _owner(module, name)
            owner.register_parameter(own, placed[parameter])
        for name, buffer in list(module.named_buffers()):
            owner, own = _owner(module, name)
            setattr(owner, own, self.place(buffer))

    def close(self) -> None:
        """Raises ModelError when less was placed than was promised: the rest would be claimed and never used."""
        if self._placed != len(self._bytes):
            raise ModelError(
                f"{self.spec.name}: {self._placed} of {len(self._bytes)} bytes were placed: the header promised more"
            )


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule that has a parameter of this dotted name, and its name there."""
    path, _, own = name.rpartition(".")
    return module.get_submodule(path), own


def sizes_of(module: nn.Module) -> list[int]:
    """Bytes of every parameter and buffer; the module may be on the meta device, where it holds nothing."""
    return [tensor.nbytes for tensor in (*module.parameters(), *module.buffers())]


def _poison(field: torch.Tensor) -> float:
    if field.dtype.is_floating_point:
        return float("nan")
    if field.dtype is torch.bool:
        return 1
    info = torch.iinfo(field.dtype)
    return info.min if info.min else info.max
