"""The reader of ONNX files, on bytes written by hand here, field by field."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from duplexd.errors import ModelError
from duplexd.models.pocket.onnxfile import Node, read_onnx
from duplexd.models.pocket.voicenets import dequantised, load_nets


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def block(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def tensor(name: str, kind: int, shape: tuple[int, ...], payload: bytes) -> bytes:
    dims = b"".join(number(1, n) for n in shape)
    return block(5, dims + number(2, kind) + payload + block(8, name.encode()))


def node(op: str, inputs: list[str], outputs: list[str]) -> bytes:
    names = b"".join(block(1, n.encode()) for n in inputs) + b"".join(block(2, n.encode()) for n in outputs)
    return block(1, names + block(4, op.encode()) + block(3, b"a label nobody reads"))


def model(path: Path, *parts: bytes) -> Path:
    path.write_bytes(number(1, 8) + block(2, b"a producer") + block(7, b"".join(parts)))
    return path


def test_tensors_of_every_storage_are_read(tmp_path: Path) -> None:
    raw = block(9, np.arange(6, dtype="<f4").tobytes())
    packed_floats = block(4, struct.pack("<2f", 0.5, -2.0))
    packed_integers = block(7, varint(3) + varint(-4))
    path = model(
        tmp_path / "m.onnx",
        tensor("raw", 1, (2, 3), raw),
        tensor("floats", 1, (2,), packed_floats),
        tensor("integers", 7, (2,), packed_integers),
        tensor("bytes", 3, (), number(5, -7)),
        tensor("empty", 1, (0,), b""),
        node("Add", ["raw", "x"], ["y"]),
    )
    graph = read_onnx(path)
    found = {name: value.tolist() for name, value in graph.initialisers.items()}

    assert found == {
        "raw": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
        "floats": [0.5, -2.0],
        "integers": [3, -4],
        "bytes": -7,
        "empty": [],
    }
    assert graph.nodes == (Node("Add", ("raw", "x"), ("y",)),)


def quantised_product(*, op_after_cast: str = "Mul") -> list[bytes]:
    return [
        tensor("w_quantized", 3, (2, 1), block(9, np.array([4, -2], "i1").tobytes())),
        tensor("w_zero_point", 3, (), block(9, b"\x01")),
        tensor("w_scale", 1, (), block(9, struct.pack("<f", 0.5))),
        tensor("m.part.bias", 1, (1,), block(9, struct.pack("<f", 9.0))),
        node("MatMulInteger", ["x", "w_quantized", "z"], ["p"]),
        node("Cast", ["p"], ["q"]),
        node(op_after_cast, ["q", "s"], ["r"]),
        node("Add", ["m.part.bias", "r"], ["y"]),
    ]


def test_a_quantised_weight_gets_its_value_and_the_name_of_its_bias(tmp_path: Path) -> None:
    weights = dequantised(read_onnx(model(tmp_path / "m.onnx", *quantised_product())))

    assert sorted(weights) == ["m.part.bias", "m.part.weight"]
    torch.testing.assert_close(weights["m.part.weight"], torch.tensor([[1.5, -1.5]]))


def test_a_product_whose_bias_cannot_be_found_is_refused(tmp_path: Path) -> None:
    graph = read_onnx(model(tmp_path / "m.onnx", *quantised_product(op_after_cast="Relu")))

    with pytest.raises(ModelError, match="'w_quantized' is not followed by one Mul"):
        dequantised(graph)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "0 graphs"),
        (b"GGUF" + b"\x00" * 20, ""),
        (varint(7 << 3 | 2) + varint(99) + b"short", "94 bytes past its end"),
        (block(7, tensor("odd", 77, (1,), block(9, b"\x00"))), "data type 77"),
        (block(7, tensor("few", 1, (2, 3), block(9, b"\x00" * 4))), ""),
    ],
    ids=["empty", "another format", "truncated", "unknown type", "too little data"],
)
def test_a_file_that_is_no_onnx_model_is_named_in_the_error(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)

    with pytest.raises(ModelError, match=rf"broken\.onnx is not a readable ONNX file: .*{fault}"):
        read_onnx(path)


def test_a_model_of_something_else_is_not_the_voice(tmp_path: Path) -> None:
    path = model(tmp_path / "other.onnx", tensor("m.something", 1, (1,), block(9, b"\x00" * 4)))

    with pytest.raises(ModelError, match=r"other\.onnx is not the pocket voice"):
        load_nets(path)
