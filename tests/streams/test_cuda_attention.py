"""Attention over blocks on a CUDA device, bfloat16, against the plain version in float32 on the CPU."""

from __future__ import annotations

from array import array

import pytest
import torch

from duplexd.memory.arena import Arena
from duplexd.memory.layout import ArenaLayout, PartitionKind, PartitionSpec
from duplexd.streams.attention import (
    BLOCK,
    PAGES,
    WORKSPACE,
    AdjacentPairs,
    Attention,
    AttentionShape,
    Row,
    choose_attention,
    rotary_table,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device; run scripts/device on a machine with one"
    ),
]

SHAPE = AttentionShape(layers=2, heads=9, kv_heads=3, head_dim=64, context_max=2 * BLOCK)
SLOTS, PLACES = 1024, 3
FREQUENCY = 1e4 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)


def loaded(asked: str, device: str) -> tuple[Attention, Arena]:
    """The same random pages on any device; NaN in the workspace, and in every slot the rows do not name."""
    where = torch.device(device)
    rotary = AdjacentPairs(rotary_table(FREQUENCY, positions=2 * BLOCK, dtype=torch.float32, device=where))
    attention = choose_attention(asked, SHAPE, rotary, stored=torch.bfloat16, device=where)
    pages = PartitionSpec(PAGES, PartitionKind.PAGES, SLOTS // 16, attention.page_fields(), page_tokens=16)
    arena = Arena(ArenaLayout([pages, attention.workspace(PLACES)]), device)
    for seed, name in enumerate("kv"):
        field = arena.field(PAGES, name)
        field.copy_(torch.randn(field.shape, generator=torch.Generator().manual_seed(seed)))
    arena.fill_nan(PAGES, range(700, SLOTS))
    arena.fill_nan(WORKSPACE, range(PLACES))
    attention.load(arena)
    return attention, arena


def rows() -> list[Row]:
    """A decode across a block, a prefill from nothing and a short append, over scattered slots and out of order."""
    slots = torch.randperm(700, generator=torch.Generator().manual_seed(5)).tolist()
    parts, start = [], 0
    for place, past, count in ((2, BLOCK + 30, 1), (0, 0, 40), (1, 17, 5)):
        parts.append(Row(array("q", slots[start : start + past + count]).tobytes(), past, count, place))
        start += past + count
    return parts


def seen(attention: Attention, batch: list[Row]) -> list[torch.Tensor]:
    rng, found = torch.Generator().manual_seed(9), []
    for row in batch:
        attention.recall(row)
    packed = attention.pack(batch)
    for layer in range(SHAPE.layers):
        heads = torch.randn(sum(row.count for row in batch), 15, 64, generator=rng).bfloat16().to(attention.device)
        packed.remember(layer, heads[:, 9:12], heads[:, 12:])
        found.append(packed.attend(layer, heads[:, :9]).float().cpu())
    for row in batch:
        attention.keep(row)
    return found


@torch.inference_mode()
def test_blocks_on_the_device_see_what_the_plain_version_sees() -> None:
    """CUDA, bfloat16: 3e-2 absolute (queries, keys and probabilities are rounded once more); pages become identical."""
    device, on_device = loaded("auto", "cuda")
    plain, on_host = loaded("plain", "cpu")
    torch.testing.assert_close(seen(device, rows()), seen(plain, rows()), rtol=0, atol=3e-2)

    for name in "kv":
        kept = on_device.field(PAGES, name).cpu()
        torch.testing.assert_close(kept, on_host.field(PAGES, name), rtol=0, atol=0, equal_nan=True)


@torch.inference_mode()
def test_a_row_on_the_device_does_not_depend_on_its_neighbours() -> None:
    """CUDA, bfloat16, bit for bit: the kernel does not split a row's keys by the longest row of the batch."""
    attention, _ = loaded("auto", "cuda")
    short = rows()[2]
    rng = torch.Generator().manual_seed(2)
    heads = torch.randn(short.count, 15, 64, generator=rng).bfloat16().cuda()
    together = [Row(rows()[0].slots, BLOCK + 26, short.count, 2), short]
    found = []
    for batch in ([short], together):
        for row in batch:
            attention.recall(row)
        packed = attention.pack(batch)
        mine = heads.repeat(len(batch), 1, 1)
        packed.remember(0, mine[:, 9:12], mine[:, 12:])
        found.append(packed.attend(0, mine[:, :9])[-short.count :])

    assert torch.equal(found[0], found[1])
