"""The weights of the default model lie in the one allocation, and what lies beside it is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from duplexd.engine.process import layout_of, load_plan
from duplexd.memory.arena import Arena
from duplexd.memory.layout import Section, section_of
from duplexd.memory.sizing import Footprint, size
from duplexd.streams.stage import Role

pytestmark = pytest.mark.weights
GIB = 1 << 30


def tensors_of(part: object) -> list[torch.Tensor]:
    """Tensors an object holds in its fields, those of its inner objects included."""
    if isinstance(part, torch.Tensor):
        return [part]
    if isinstance(part, torch.nn.Module):
        return [*part.parameters(), *part.buffers()]
    inner = part if isinstance(part, list) else list(vars(part).values()) if hasattr(part, "__dict__") else []
    return [tensor for one in inner for tensor in tensors_of(one)]


def test_thinker_talker_and_vocoder_compute_from_the_arena() -> None:
    plan = load_plan("pocket", {})
    layout = layout_of(plan, 1)
    arena = Arena(layout)
    roles = (Role.THINK, Role.TALK, Role.RENDER)
    stages: dict[Role, Any] = {role: plan.build()[plan.need(role).name] for role in roles}
    for stage in stages.values():
        stage.load(arena)
    thinker, talker, vocoder = (stages[role] for role in roles)
    decoder = thinker.decoder
    mind = [decoder.embedding, decoder.head, decoder._final_norm, decoder._layers, thinker.attention.rotary.table]
    held = tensors_of([*mind, talker._net, vocoder._net, vocoder._noise])
    distinct = {tensor.data_ptr(): tensor.nbytes for tensor in held}
    shelves = sum(spec.slot_bytes for spec in layout.partitions.values() if section_of(spec) is Section.WEIGHTS)

    assert {tensor.untyped_storage().data_ptr() for tensor in held} == {arena.buffer.untyped_storage().data_ptr()}
    assert 0 <= shelves - sum(distinct.values()) < 256 * len(distinct)  # what aligning them takes


def test_the_plan_counts_shelves_and_what_lies_beside_once() -> None:
    plan = load_plan("pocket", {})
    sizing = size(
        Footprint(plan.name, plan.partitions, plan.weights_bytes, plan.weights_held), memory_bytes=GIB, sessions_max=4
    )
    layout = layout_of(plan, sizing.sessions_resident)
    (row,) = [row for row in sizing.rows if row.section is Section.WEIGHTS]
    shelves = [name for name, spec in layout.partitions.items() if section_of(spec) is Section.WEIGHTS]

    assert shelves == ["thinker weights", "talker weights", "vocoder weights"]
    assert row.total_bytes == sum(map(layout.partition_bytes, shelves)) + plan.weights_bytes
    assert row.holds.startswith("thinker weights; talker weights; vocoder weights; beside the allocation: ears, judge")
    assert sizing.total_bytes == layout.total_bytes + plan.weights_bytes
