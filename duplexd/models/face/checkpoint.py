"""The face's weights: generator and refiner in one safetensors file, and their card, a JSON file of the same name.

generator.*  refiner.*   float16, as trained
mean  deviation          float32, of every channel: networks see motion minus mean, over deviation
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from duplexd.errors import ModelError
from duplexd.models.face.net import FaceNet, FaceShape

FORMAT = "duplexd face 1"
CHECKPOINT = Path(str(files("duplexd.models.face") / "face.safetensors"))
NETS = ("generator", "refiner")


class FaceWeights(msgspec.Struct, frozen=True):
    shape: FaceShape
    generator: FaceNet
    refiner: FaceNet
    mean: Tensor  #: (CHANNELS,)
    deviation: Tensor
    generator_times: tuple[float, ...]  #: noise times of the generator's steps; its history is kept at the last
    refiner_time: float
    card: dict[str, Any]  #: how it was made (training/card.py); {}: nobody said


def save_face(path: Path, weights: FaceWeights) -> None:
    tensors = {"mean": weights.mean.contiguous(), "deviation": weights.deviation.contiguous()}
    for name in NETS:
        for key, value in getattr(weights, name).state_dict().items():
            tensors[f"{name}.{key}"] = value.half().contiguous()
    meta = {
        "format": FORMAT,
        "shape": msgspec.json.encode(weights.shape).decode(),
        "generator_times": json.dumps(weights.generator_times),
        "refiner_time": json.dumps(weights.refiner_time),
    }
    save_file(tensors, path, metadata=meta)
    # Apart from the weights: it is read by people, and a word of it changes no byte of them.
    card_of(path).write_text(json.dumps(weights.card, indent=1) + "\n")


def card_of(path: Path) -> Path:
    """Where the card of a checkpoint lies."""
    return path.with_suffix(".json")


def load_face(path: Path = CHECKPOINT, *, dtype: torch.dtype = torch.float32) -> FaceWeights:
    """Both networks in evaluation mode.

    Raises:  ModelError when the file is missing, of another format, or holds other weights than its shape says.
    """
    if not path.is_file():
        raise ModelError(f"the face's weights are not at {path}; scripts/train_face makes them")
    with safe_open(str(path), framework="pt") as file:
        meta = file.metadata() or {}
        if meta.get("format") != FORMAT:
            raise ModelError(f"{path} has format {meta.get('format')!r}; this face reads {FORMAT!r}")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    shape = msgspec.json.decode(meta["shape"], type=FaceShape)
    nets = {}
    for name in NETS:
        net = FaceNet(shape)
        own = {
            key.removeprefix(f"{name}."): value.to(dtype)
            for key, value in tensors.items()
            if key.startswith(f"{name}.")
        }
        try:
            net.load_state_dict(own, strict=True)
        except RuntimeError as fault:
            raise ModelError(f"{path} does not hold a {name} of its own shape: {fault}") from fault
        nets[name] = net.to(dtype).eval().requires_grad_(False)
    return FaceWeights(
        shape=shape,
        generator=nets["generator"],
        refiner=nets["refiner"],
        mean=tensors["mean"].to(dtype),
        deviation=tensors["deviation"].to(dtype),
        generator_times=tuple(json.loads(meta["generator_times"])),
        refiner_time=json.loads(meta["refiner_time"]),
        card=json.loads(card_of(path).read_text()) if card_of(path).exists() else {},
    )
