"""Reads weights and node names out of an ONNX file, without the `onnx` package.

An ONNX file is one protobuf message. Only what is needed to lift weights into plain modules is read: the initialisers
and, per node, its kind and the names it connects. Field numbers are those of onnx.proto3 (ONNX IR version 3 and later).

    ModelProto   7 graph
    GraphProto   1 node*   5 initializer*
    NodeProto    1 input*  2 output*  4 op_type
    TensorProto  1 dims*   2 data_type  8 name  9 raw_data   4/5/7/10 float/int32/int64/double data
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from duplexd.errors import ModelError

Array = npt.NDArray[Any]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

#: TensorProto.DataType -> dtype of raw_data (little endian)
_DTYPES = {1: "<f4", 2: "u1", 3: "i1", 6: "<i4", 7: "<i8", 9: "?", 10: "<f2", 11: "<f8"}
#: field of TensorProto -> dtype of its packed values
_PACKED = {4: "<f4", 10: "<f8"}


class Node(msgspec.Struct, frozen=True):
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class OnnxGraph(msgspec.Struct, frozen=True):
    initialisers: dict[str, Any]  #: name -> array
    nodes: tuple[Node, ...]


def read_onnx(path: Path) -> OnnxGraph:
    """The weights and nodes of a model file.

    Raises: ModelError when the bytes are no ONNX graph or hold a tensor of a kind this reader does not know.
    """
    try:
        return _graph(memoryview(path.read_bytes()))
    except (IndexError, struct.error, UnicodeDecodeError, ValueError) as fault:
        raise ModelError(f"{path} is not a readable ONNX file: {fault}") from fault


def _graph(data: memoryview) -> OnnxGraph:
    initialisers: dict[str, Array] = {}
    nodes: list[Node] = []
    graphs = [value for number, value in _fields(data) if number == 7]
    if len(graphs) != 1:
        raise ValueError(f"{len(graphs)} graphs, expected one")
    for number, value in _fields(graphs[0]):
        if number == 1:
            nodes.append(_node(value))
        elif number == 5:
            name, array = _tensor(value)
            initialisers[name] = array
    return OnnxGraph(initialisers, tuple(nodes))


def _node(data: memoryview) -> Node:
    inputs: list[str] = []
    outputs: list[str] = []
    op = ""
    for number, value in _fields(data):
        if number == 1:
            inputs.append(_text(value))
        elif number == 2:
            outputs.append(_text(value))
        elif number == 4:
            op = _text(value)
    return Node(op, tuple(inputs), tuple(outputs))


def _tensor(data: memoryview) -> tuple[str, Array]:
    shape: list[int] = []
    name, kind = "", 0
    values: Array | None = None
    for number, value in _fields(data):
        if number == 1:
            shape += _integers(value)
        elif number == 2:
            kind = int(value)
        elif number == 8:
            name = _text(value)
        elif number == 9:
            values = np.frombuffer(value, _dtype(name, kind))
        elif number in _PACKED:
            values = np.frombuffer(value, _PACKED[number])
        elif number in (5, 7):
            values = np.array(_integers(value), np.int64).astype(_dtype(name, kind))
    if values is None:
        values = np.zeros(0, _dtype(name, kind))
    return name, values.reshape(shape)


def _dtype(name: str, kind: int) -> str:
    if kind not in _DTYPES:
        raise ValueError(f"tensor '{name}' has data type {kind}; known: {sorted(_DTYPES)}")
    return _DTYPES[kind]


def _text(value: memoryview) -> str:
    return bytes(value).decode()


def _integers(value: Any) -> list[int]:
    """A repeated integer field: one value, or several packed into one block of bytes."""
    if isinstance(value, int):
        return [_signed(value)]
    found: list[int] = []
    at = 0
    while at < len(value):
        number, at = _varint(value, at)
        found.append(_signed(number))
    return found


def _signed(value: int) -> int:
    """Protobuf writes a negative int64 as its two's complement of 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Field numbers and values of one message: int for varints and fixed numbers, bytes for everything else."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
        elif wire == _BYTES:
            length, at = _varint(data, at)
            if at + length > len(data):
                raise ValueError(f"field {number} runs {at + length - len(data)} bytes past its end")
            yield number, data[at : at + length]
            at += length
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
            yield number, int.from_bytes(data[at : at + size], "little")
            at += size
        else:
            raise ValueError(f"wire type {wire} of field {number}")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a varint is longer than ten bytes")
