"""The thinker on a device that is not the host gives what it gives here, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from thinker_fakes import Tiny, random_weights, think, write_folder

from duplexd.memory.arena import Arena
from duplexd.memory.layout import ArenaLayout, PartitionKind, PartitionSpec
from duplexd.models.pocket.checkpoint import load_checkpoint
from duplexd.models.pocket.thinker import Thinker
from duplexd.streams.attention import PAGES
from duplexd.streams.pretend import PRETENDED, PretendedDevice
from duplexd.streams.stage import ThinkResult

TINY = Tiny()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("elsewhere"), TINY, random_weights(TINY))


def thought(folder: Path, device: str) -> list[tuple[int, ...]]:
    """Two contexts in a batch, one of them in scattered slots; a cut, and what follows it."""
    thinker = Thinker(load_checkpoint(folder), precision="float32", context_max=128, batch_max=2, device=device)
    pages = PartitionSpec(PAGES, PartitionKind.PAGES, 16, thinker.page_fields(), page_tokens=16)
    arena = Arena(ArenaLayout([pages, thinker.workspace(), thinker.shelf()]), device)
    thinker.load(arena)
    slots = [int(slot) for slot in np.random.default_rng(4).permutation(200)[:40]]
    heard = (5, 17, 300, 2, 44, 91, 8, 120)
    both = thinker.run([think(slots[:15], heard, steps=8), think(range(220, 235), heard[::-1], steps=8)], None)
    after = thinker.run([think(slots[:23], (1, 2, 3), past=10, steps=11)], None)
    return [result.tokens for result in (*both, *after) if isinstance(result, ThinkResult)]


def test_a_thinker_thinks_there_as_here(folder: Path) -> None:
    with PretendedDevice():
        there = thought(folder, PRETENDED)

    assert len(there) == 3
    assert there == thought(folder, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; run scripts/device on a machine with one")
def test_a_thinker_thinks_on_a_gpu_as_here(folder: Path) -> None:
    assert thought(folder, "cuda") == thought(folder, "cpu")
