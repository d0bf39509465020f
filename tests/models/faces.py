"""What the tests of the face share: a tiny network with random weights, and lessons that nobody had to say."""

from __future__ import annotations

import numpy as np
import torch

from duplexd.models.face.audio import MELS
from duplexd.models.face.checkpoint import FaceWeights
from duplexd.models.face.motion import CHANNELS
from duplexd.models.face.net import FaceNet, FaceShape
from duplexd.models.face.training.lessons import Lessons, make_lessons
from duplexd.models.face.training.scenes import MARGIN, Utterance

TINY = FaceShape(width=32, heads=2, layers=2, mlp=48, audio=16)


def random_net(shape: FaceShape = TINY, seed: int = 1) -> FaceNet:
    net = FaceNet(shape)
    net.begin(torch.Generator().manual_seed(seed))
    for block in net.blocks:
        # A fresh network hardly listens; these must, or nothing would be tested.
        block.audio_out.weight.data.mul_(4.0)
        block.nearness.data.normal_(generator=torch.Generator().manual_seed(seed))
    return net.eval().requires_grad_(False)


def random_face(shape: FaceShape = TINY) -> FaceWeights:
    return FaceWeights(
        shape=shape,
        generator=random_net(shape, 1),
        refiner=random_net(shape, 2),
        mean=torch.linspace(-0.2, 0.2, CHANNELS),
        deviation=torch.linspace(0.1, 0.3, CHANNELS),
        generator_times=(1.0, 0.4),
        refiner_time=0.25,
        card={"made": "at random"},
    )


def made_up_lessons(scenes: int = 2) -> Lessons:
    rng = np.random.default_rng(4)
    pool = [
        Utterance(
            rng.normal(-0.5, 0.5, (steps, MELS)).astype(np.float16),
            rng.uniform(0, 0.5, (steps + 2 * MARGIN, 9)).astype(np.float32),
            (0.3, 0.8),
        )
        for steps in (120, 200, 260)
    ]
    return make_lessons(pool, scenes, rng)
