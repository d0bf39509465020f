"""Every stage on a device that is not the host: the same results to the bit, and nothing crosses over by accident."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from faces import random_face

from duplexd.models.clock import plan as clock
from duplexd.models.contract import check_plan
from duplexd.models.face import audio
from duplexd.models.face.performer import Part, Performer
from duplexd.streams.pretend import PRETENDED, Elsewhere, PretendedDevice


def made() -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers on the host and on the device."""
    here = torch.arange(12.0).view(3, 4)
    return here, here.to(PRETENDED)


MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "a sum": lambda here, there: there + here,
    "a product": lambda here, there: there @ here.T,
    "a part": lambda here, there: torch.cat([there, here]),
    "a choice": lambda here, there: torch.where(here > 3, there, there),
    "an index copy": lambda here, there: there.index_copy_(0, torch.tensor([1]), there[:1].clone()),
    "values at an index": lambda here, there: there.__setitem__(torch.tensor([0, 1]), here[:2]),
    "an index that torch makes of a list": lambda here, there: there[[0, 2]],
}


@pytest.mark.parametrize("inference", [False, True], ids=["ordinary", "inference"])
@pytest.mark.parametrize("mixed", MIXED.values(), ids=MIXED)
def test_what_mixes_the_sides_is_found_out(
    mixed: Callable[[torch.Tensor, torch.Tensor], object], inference: bool
) -> None:
    with PretendedDevice(), torch.inference_mode(inference):
        here, there = made()
        mixed(here, here.clone())  # allowed where all lies on the host
        with pytest.raises(RuntimeError, match=r"host|device"):
            mixed(here, there)


def test_numbers_indexes_and_copies_cross_over_as_on_a_device() -> None:
    with PretendedDevice():
        here, there = made()
        there *= torch.tensor(2.0)
        there[1:, :2].copy_(here[:2, :2])
        there[2] = here[0]
        picked = there[torch.tensor([2, 0])]
        back = picked.cpu()

    assert isinstance(picked, Elsewhere)
    assert not isinstance(back, Elsewhere)
    assert back.tolist() == [[0, 1, 2, 3], [0, 2, 4, 6]]


def test_numpy_needs_a_copy_to_the_host() -> None:
    with PretendedDevice():
        _, there = made()
        with pytest.raises(RuntimeError, match="numpy"):
            there.numpy()
        assert there.cpu().numpy().shape == (3, 4)


def test_the_word_clock_keeps_its_contract_there() -> None:
    with PretendedDevice():
        findings = check_plan(clock({"device": PRETENDED}), device=PRETENDED)

    assert [finding for finding in findings if finding.fault] == []


def _played(device: str) -> list[np.ndarray]:
    """Two sessions with an interruption between their chunks."""
    rng = np.random.default_rng(0)
    parts = [Part(voice=(0.2 * rng.normal(size=60_000)).astype(np.float32)) for _ in range(2)]
    performer = Performer(random_face(), parts, device=device)
    performer.play(2)
    performer.interrupt(0, frames=5)
    return list(performer.play(2))


def test_a_face_moves_there_as_here() -> None:
    with PretendedDevice():
        there = _played(PRETENDED)

    for one, other in zip(_played("cpu"), there, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_stage_with_a_table_on_the_wrong_side_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bank = audio.filterbank(torch.device("cpu"))
    monkeypatch.setattr(audio, "filterbank", lambda device: bank)

    with PretendedDevice(), pytest.raises(RuntimeError, match=r"on the host: \(201, 40\)"):
        _played(PRETENDED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; run scripts/device on a machine with one")
def test_clock_and_face_on_a_gpu() -> None:
    assert [finding for finding in check_plan(clock({"device": "cuda"}), device="cuda") if finding.fault] == []
    for one, other in zip(_played("cpu"), _played("cuda"), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)
