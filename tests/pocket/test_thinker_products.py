"""Matrix products of the thinker: many rows are taken in few sizes, for each of which torch keeps code."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from duplexd.models.pocket.linear import FEW, ROWS_MAX, ROWS_STEP, DenseLinear

COLUMNS, OUTPUTS = 32, 48


class Products(TorchDispatchMode):
    """Numbers of rows that products were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.linear):
            self.rows.add(len(out))
        return out


def matrix(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weight and bias."""
    rng = torch.Generator().manual_seed(3)
    return torch.randn(OUTPUTS, COLUMNS, generator=rng).to(dtype), torch.randn(OUTPUTS, generator=rng).to(dtype)


def rows_of(count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, COLUMNS, generator=torch.Generator().manual_seed(count)).to(dtype)


def test_products_of_every_length_are_of_few_sizes() -> None:
    """Every length of text up to two pieces and a rest: what torch keeps is bounded, whatever people say."""
    linear, seen = DenseLinear(*matrix(torch.bfloat16)), Products()
    with seen:
        for count in range(FEW + 1, 2 * ROWS_MAX + 100):
            linear(rows_of(count, torch.bfloat16), 0)

    assert seen.rows == set(range(ROWS_STEP, ROWS_MAX + 1, ROWS_STEP))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, ROWS_STEP, ROWS_STEP + 1, ROWS_MAX, ROWS_MAX + 1, 2 * ROWS_MAX + 40])
def test_rows_taken_in_pieces_are_the_rows_of_the_whole(count: int, dtype: torch.dtype) -> None:
    """CPU; to the last bit in float32, which is one product; to a rounding of bfloat16 otherwise."""
    weight, bias = matrix(dtype)
    x = rows_of(count, dtype)
    rounding = 0 if dtype == torch.float32 else 2**-7

    torch.testing.assert_close(DenseLinear(weight, bias)(x, 0), F.linear(x, weight, bias), rtol=rounding, atol=rounding)


def test_rows_beside_a_poisoned_one_are_as_they_are_without_it() -> None:
    linear = DenseLinear(*matrix(torch.bfloat16))
    x = rows_of(ROWS_MAX + 5, torch.bfloat16)
    whole = linear(x, 0)
    x[7] = float("nan")
    poisoned = linear(x, 0)

    assert bool(poisoned[7].isnan().all())
    assert torch.equal(torch.cat([poisoned[:7], poisoned[8:]]), torch.cat([whole[:7], whole[8:]]))
