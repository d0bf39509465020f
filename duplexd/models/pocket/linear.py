"""Matrix products of the thinker, by how the weights are held.

    held as        product for few rows                         for many rows
    dense          F.linear in float64, float32 or bfloat16     the same
    int8 per row   aten::_weight_int8pack_mm                    F.linear with a bfloat16 copy
    4-bit groups   aten::_weight_int4pack_mm_for_cpu            F.linear with a bfloat16 copy

1. The packed kernels read a quarter or half of the bytes, which is what one row costs; for many rows they compute more
   slowly than bfloat16, hence the copy. `FEW` is where the two cross on an AVX512 bf16 machine, rule 5 kept.
2. The 4-bit kernel of torch 2.13 is fast in bfloat16 only (30 times slower in float32), so activations are bfloat16.
3. No product mixes rows: a NaN in one row leaves its neighbours alone.
4. Which kernel a row gets depends on how many tokens *its own* context feeds, never on its neighbours: with a packed
   precision a context decodes to the same bits whoever shares the launch.
"""

from __future__ import annotations

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from duplexd.errors import ModelError
from duplexd.models.pocket.checkpoint import GROUP, Blocks, DecoderWeights, Matrix

log = logging.getLogger(__name__)

#: A context that feeds so many tokens or fewer takes the packed kernels.
FEW = 23
#: Rows of a product on a CPU beyond ROWS_STEP are a multiple of it, at most ROWS_MAX, see rule 5: 38 MB of code for the
#: default thinker. A smaller step keeps more; a larger one computes more zeros, 1 ms each there on one core.
ROWS_STEP, ROWS_MAX = 16, 256
#: Tokens a rough head proposes and the full rows decide between.
CANDIDATES = 16


#: Where a tensor that stays goes: it is given, and what is computed with from then on is returned.
Place = Callable[[Tensor], Tensor]


def as_it_is(tensor: Tensor) -> Tensor:
    """The `Place` of weights without an arena."""
    return tensor


class Precision(Enum):
    """How weights are held and what is computed in."""

    FLOAT64 = "float64"  #: the plain version, for tests
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"  #: int8 per row, bfloat16 activations; CPU only
    INT4 = "int4"  #: 4-bit blocks of the checkpoint as they are, int8 for the rest, bfloat16 activations; CPU only

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, and of keys and values in the arena."""
        return _DTYPES.get(self, torch.bfloat16)


_DTYPES = {Precision.FLOAT64: torch.float64, Precision.FLOAT32: torch.float32}


class Linear(Protocol):
    """x (rows, columns) -> (rows, outputs), in the dtype of x.

    `few` is how many rows at the head of x belong to contexts that feed at most FEW tokens.
    """

    def __call__(self, x: Tensor, few: int) -> Tensor: ...


class DenseLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self._sized = weight.device.type == "cpu" and weight.dtype == torch.bfloat16

    def __call__(self, x: Tensor, few: int) -> Tensor:
        if not self._sized or len(x) <= ROWS_STEP:
            return F.linear(x, self.weight, self.bias)
        pieces = [self._of_a_size(piece) for piece in torch.split(x, ROWS_MAX)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _of_a_size(self, x: Tensor) -> Tensor:
        filled = F.pad(x, (0, 0, 0, -len(x) % ROWS_STEP))
        return F.linear(filled, self.weight, self.bias)[: len(x)]


class PackedLinear(ABC):
    """A packed matrix for few rows and a bfloat16 copy of it for many."""

    def __init__(self, dense: Tensor, bias: Tensor | None, place: Place) -> None:
        self._many = DenseLinear(place(dense.bfloat16()), bias)

    @abstractmethod
    def _packed(self, x: Tensor) -> Tensor: ...

    def _few(self, x: Tensor) -> Tensor:
        y = self._packed(x)
        return y if self._many.bias is None else y.add_(self._many.bias)

    def __call__(self, x: Tensor, few: int) -> Tensor:
        if few == len(x):
            return self._few(x)
        if few == 0:
            return self._many(x, few)
        return torch.cat([self._few(x[:few]), self._many(x[few:], 0)])


class Int8Linear(PackedLinear):
    """int8 per output row; loses about 0.4 % of a row's largest weight."""

    def __init__(self, matrix: Matrix, bias: Tensor | None, place: Place) -> None:
        weight = matrix.dense().float()
        scale = (weight.abs().amax(1) / 127).clamp(min=1e-12)
        self.codes = place((weight / scale[:, None]).round().to(torch.int8))
        self.scale = place(scale.bfloat16())
        super().__init__(weight, bias, place)

    def _packed(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int8pack_mm(x, self.codes, self.scale)
        return y


class Int4Linear(PackedLinear):
    """The checkpoint's own 4-bit groups; only their scales are rounded, to bfloat16."""

    def __init__(self, blocks: Blocks, bias: Tensor | None, place: Place) -> None:
        self.packed = place(torch.ops.aten._convert_weight_to_int4pack_for_cpu(blocks.codes.int(), 1))
        # The kernel computes (code - 8) * scale + zero.
        scales = torch.stack([blocks.scale, blocks.low + 8 * blocks.scale], dim=2)
        self.scales = place(scales.transpose(0, 1).contiguous().bfloat16())
        super().__init__(_dense(blocks), bias, place)

    def _packed(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, GROUP, self.scales)
        return y


def _dense(blocks: Blocks) -> Tensor:
    codes = blocks.codes.float().view(len(blocks.codes), -1, GROUP)
    return torch.addcmul(blocks.low[..., None], codes, blocks.scale[..., None]).flatten(1)


def held_sizes(matrix: Matrix, rows: int, columns: int, precision: Precision) -> list[int]:
    """Bytes of each tensor that `hold` places for a matrix, its bias left out; read off the header."""
    copy = 2 * rows * columns
    if _takes_blocks(matrix, rows, precision):
        # Four bits, and a bfloat16 scale and zero for each group.
        return [rows * columns // 2, 4 * rows * (columns // GROUP), copy]
    if precision in (Precision.INT4, Precision.INT8):
        return [rows * columns, 2 * rows, copy]
    return [rows * columns * precision.dtype.itemsize]


def hold(
    matrix: Matrix, bias: Tensor | None, precision: Precision, device: torch.device, place: Place = as_it_is
) -> Linear:
    """Read one matrix and hold it in the given precision, its tensors wherever `place` puts them."""
    bias = None if bias is None else place(bias.to(device, precision.dtype))
    blocks = matrix.blocks() if precision is Precision.INT4 and matrix.in_blocks else None
    if blocks is not None and _takes_blocks(matrix, len(blocks.codes), precision):
        return Int4Linear(blocks, bias, place)
    if precision in (Precision.INT4, Precision.INT8):
        return Int8Linear(matrix, bias, place)
    return DenseLinear(place(matrix.dense().to(device, precision.dtype)), bias)


def _takes_blocks(matrix: Matrix, rows: int, precision: Precision) -> bool:
    """The 4-bit kernel takes whole groups of 16 rows."""
    return precision is Precision.INT4 and matrix.in_blocks and rows % 16 == 0


# Head ----------------------------------------------------------------------------------------------------------------


class Head(Protocol):
    """Hidden state -> the likeliest token."""

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, width) -> (rows, vocabulary), without penalty."""

    def best(self, hidden: Tensor, said: Tensor | None, penalty: float) -> Tensor:
        """The likeliest token after one hidden state (width,), int64 (); those of `said` are made less likely."""


class DenseHead:
    """The plain version, float32 and float64."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)

    def best(self, hidden: Tensor, said: Tensor | None, penalty: float) -> Tensor:
        logits = F.linear(hidden, self.weight)
        if said is not None:
            logits[said] = _penalised(logits[said], penalty)
        return logits.argmax()


class RescoredHead:
    """A rough product over the vocabulary proposes CANDIDATES tokens; their full rows decide, in float32.

    `rough` takes (width,) to (vocabulary,). Over 49152 tokens it costs 0.8 ms in int8, where bfloat16 costs 6 ms; its
    rounding would now and then choose another token, which sixteen full rows mend for 0.1 ms. A bfloat16 product needs
    the same: logits of 16 to 32 are then multiples of 1/8, and the likeliest two often tie.
    """

    def __init__(self, weight: Tensor, rough: Callable[[Tensor], Tensor]) -> None:
        self.weight = weight
        self._rough = rough

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.float(), self.weight.float())

    def best(self, hidden: Tensor, said: Tensor | None, penalty: float) -> Tensor:
        rough = self._rough(hidden)
        if said is not None:
            rough[said] = _penalised(rough[said], penalty)
        # Sorted, so that equal logits choose the lowest token, as argmax over the vocabulary does.
        tokens = rough.topk(min(CANDIDATES, len(rough))).indices.sort().values
        logits = self.weight[tokens].float() @ hidden.float()
        if said is not None:
            logits = torch.where(torch.isin(tokens, said), _penalised(logits, penalty), logits)
        return tokens[logits.argmax()]


def _penalised(logits: Tensor, penalty: float) -> Tensor:
    """Source: CTRL (Keskar et al. 2019) §4.1; negative logits are multiplied, so that both signs become less likely."""
    return torch.where(logits > 0, logits / penalty, logits * penalty)


def _int8_product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """One row times all of `weight` in int8: rows are scaled one by one, the input as a whole."""
    scale = (weight.float().abs().amax(1) / 127).clamp(min=1e-12).double()
    zero = torch.zeros(len(scale), dtype=torch.long)
    with warnings.catch_warnings():
        # pytorch#184982: quantised dtypes leave torch some day; pyproject pins the minor version that still has them.
        warnings.filterwarnings("ignore", message=".*quantize_per_channel.*deprecated.*", category=UserWarning)
        codes = torch.quantize_per_channel(weight.float(), scale, zero, 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(codes, None)
    # Without VNNI the kernel adds pairs in 16 bits, which overflows unless the input keeps to 7 bits.
    reduce_range = not torch.cpu.get_capabilities().get("avx512_vnni", False)

    def product(hidden: Tensor) -> Tensor:
        y: Tensor = torch.ops.quantized.linear_dynamic(hidden.float()[None], packed, reduce_range)
        return y[0]

    return product


def hold_head(weight: Tensor, precision: Precision) -> Head:
    """A head over (vocabulary, width) in the precision's dtype; the tensor is kept, not copied."""
    if precision in (Precision.INT4, Precision.INT8):
        return RescoredHead(weight, _int8_product(weight))
    if precision is Precision.BFLOAT16:
        return RescoredHead(weight, lambda hidden: F.linear(hidden, weight))
    return DenseHead(weight)


# Choice --------------------------------------------------------------------------------------------------------------


def choose_precision(asked: str, weights: DecoderWeights, device: torch.device) -> Precision:
    """The precision to hold a checkpoint in: the one asked for, or for "auto" the fastest this machine has.

    Raises:  ModelError for an unknown name, or a packed precision on a device that has no kernel for it.
    """
    if asked == "auto":
        return _fastest(weights, device)
    try:
        precision = Precision(asked)
    except ValueError:
        names = ", ".join(one.value for one in Precision)
        raise ModelError(f"unknown precision {asked!r}; allowed are auto, {names}") from None
    if precision in (Precision.INT4, Precision.INT8) and (device.type != "cpu" or not _has_packed(precision)):
        raise ModelError(f"precision {asked} has no kernel on {device}; use auto, bfloat16 or float32")
    return precision


def _fastest(weights: DecoderWeights, device: torch.device) -> Precision:
    if device.type != "cpu":
        return Precision.BFLOAT16
    wanted = Precision.INT4 if weights.layer(0).gate_up.blocks() is not None else Precision.INT8
    if _has_packed(wanted):
        return wanted
    log.warning(
        "torch lacks the kernels of precision %s: the thinker runs in float32, 4 to 5 times slower", wanted.value
    )
    return Precision.FLOAT32


def _has_packed(precision: Precision) -> bool:
    ops = ["_weight_int8pack_mm"]
    if precision is Precision.INT4:
        ops += ["_weight_int4pack_mm_for_cpu", "_convert_weight_to_int4pack_for_cpu"]
    return all(hasattr(torch.ops.aten, name) for name in ops) and hasattr(torch.ops.quantized, "linear_dynamic")
