"""Which devices an engine takes, and what it says of one that is not there."""

from __future__ import annotations

import pytest
import torch

from duplexd.engine.process import check_device, lanes_of, load_plan
from duplexd.errors import ConfigError
from duplexd.models.pocket.thinker import Thinker
from duplexd.streams.lane import HostLane


@pytest.mark.parametrize("name", ["gpu", "cpu:1", "cuda:first", "cuda:-1", "meta", ""])
def test_a_device_of_another_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"device is '{name}'; allowed are cpu, cuda and cuda:NUMBER"):
        check_device(name)


def test_a_device_that_is_not_there_is_refused_with_what_is() -> None:
    there = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=rf"device is 'cuda:{there}'; torch .* sees {there} CUDA devices"):
        check_device(f"cuda:{there}")


def test_the_host_is_always_there() -> None:
    check_device("cpu")


def test_on_the_host_a_lane_is_a_thread_and_the_faces_give_way() -> None:
    stages = load_plan("clock", {"face": "flash"}).build()
    lanes = lanes_of(stages, "cpu")

    assert {type(lane) for lane in lanes.values()} == {HostLane}
    assert {lane.priority for lane in lanes.values()} == {0, -2}


@pytest.mark.weights
def test_the_default_thinker_is_laid_out_for_its_device_on_a_machine_that_lacks_it() -> None:
    """A plan is read where a trace is replayed; int4 is the host's, a GPU computes in bfloat16."""
    thinkers = [load_plan("pocket", {}, device=device).build()["thinker"] for device in ("cpu", "cuda")]

    assert all(isinstance(thinker, Thinker) for thinker in thinkers)
    assert [thinker.precision.value for thinker in thinkers if isinstance(thinker, Thinker)][1] == "bfloat16"
