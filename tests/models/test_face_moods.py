"""The weights that come with duplexd do as they are told: eyes go where the person is, a mood is seen in the face."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from duplexd.models.face.checkpoint import FaceWeights, load_face
from duplexd.models.face.motion import LOOK_MAX, Channel, Motion, condition
from duplexd.models.face.performer import Part, Performer
from duplexd.models.face.training.scenes import GAZE_RADIANS

CHUNKS = 25  #: eight seconds


@pytest.fixture(scope="module")
def weights() -> FaceWeights:
    torch.set_num_threads(1)
    return load_face()


def idle(weights: FaceWeights, **given: float) -> Motion:
    """Eight seconds of silence in one mood, the first of them left out."""
    return Performer(weights, [Part(moods=[condition(**given)])]).play(CHUNKS)[0][25:]


@pytest.mark.parametrize("side", [-1, 1], ids=["left", "right"])
def test_eyes_go_to_the_side_of_the_picture_that_is_asked_for(weights: FaceWeights, side: int) -> None:
    """Head and eyes together; a look away now and then leaves the median where the person is."""
    motion = idle(weights, look_x=side * LOOK_MAX)
    looks = motion[:, Channel.GAZE_X] + motion[:, Channel.YAW] / GAZE_RADIANS

    assert side * float(np.median(looks)) > 0.5 * LOOK_MAX
