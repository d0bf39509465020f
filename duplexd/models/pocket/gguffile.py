"""A GGUF file as a dictionary of fields and a dictionary of mapped tensors.

`gguf.GGUFReader` builds a numpy view per field part, which takes seconds for a large vocabulary; a header walk takes a
fraction of that, and a person waits for it at every start. Tensor data stays on disk until somebody reads it.

    "GGUF" | version | tensors | fields | field ... | tensor info ... | padding | tensor data ...
    Source: the GGUF specification, versions 2 and 3 (little endian).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from duplexd.errors import ModelError

Bytes = npt.NDArray[np.uint8]

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
#: A header that claims more than this is damaged; without the bound a flipped bit asks for terabytes.
_COUNT_MAX = 1 << 24


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as it is stored."""

    name: str
    shape: tuple[int, ...]  #: rows first; the last dimension is the one that blocks lie along
    kind: str  #: "F32", "Q4_1", ...
    raw: Bytes  #: bytes of the tensor, mapped, one dimension


class GgufFile:
    """Fields and tensors of one GGUF file.

    Raises:  ModelError when the file is missing, is no GGUF, is damaged or cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        data = _map(path)
        try:
            _Header(data, self).read()
        except (struct.error, UnicodeDecodeError, KeyError, _Damaged) as error:
            raise ModelError(f"{path} is damaged or cut short: {error}") from error


class _Damaged(Exception):
    """The header contradicts itself or the length of the file."""


class _Header:
    def __init__(self, data: Bytes, file: GgufFile) -> None:
        self.data = data
        self.view = memoryview(data.data)
        self.file = file
        self.at = 4

    def read(self) -> None:
        version = self.scalar("<I")
        if version not in (2, 3):
            raise _Damaged(f"GGUF version {version}; 2 and 3 are read")
        tensors, fields = self.count(), self.count()
        for _ in range(fields):
            name = self.string()
            self.file.fields[name] = self.value(self.scalar("<I"))
        infos = [self.info() for _ in range(tensors)]
        alignment = int(self.file.fields.get("general.alignment", 32))
        base = -(-self.at // alignment) * alignment
        for name, shape, kind, offset in infos:
            self.file.tensors[name] = self.tensor(name, shape, kind, base + offset)

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self.view, self.at)
        self.at += struct.calcsize(code)
        return value

    def count(self) -> int:
        count = int(self.scalar("<Q"))
        if count > _COUNT_MAX:
            raise _Damaged(f"a count of {count}")
        return count

    def string(self) -> str:
        length = self.count()
        end = self.at + length
        if end > len(self.view):
            raise _Damaged("a string runs past the end of the file")
        text = str(self.view[self.at : end], "utf-8")
        self.at = end
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item, length = self.scalar("<I"), self.count()
        if item in (_STRING, _ARRAY):
            return [self.value(item) for _ in range(length)]
        return self.numbers(_SCALARS[item], length)

    def numbers(self, code: str, length: int) -> list[Any]:
        values = struct.unpack_from(f"<{length}{code[1]}", self.view, self.at)
        self.at += length * struct.calcsize(code)
        return list(values)

    def info(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self.string()
        dimensions = int(self.scalar("<I"))
        if dimensions > 4:
            raise _Damaged(f"tensor {name} has {dimensions} dimensions")
        # GGUF lists the fastest dimension first; everybody else lists it last.
        shape = tuple(self.count() for _ in range(dimensions))[::-1]
        kind = int(self.scalar("<I"))
        try:
            return name, shape, GGMLQuantizationType(kind), int(self.scalar("<Q"))
        except ValueError as error:
            raise _Damaged(f"tensor {name} has unknown type {kind}") from error

    def tensor(self, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, start: int) -> GgufTensor:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise _Damaged(f"tensor {name} of {shape} does not divide into blocks of {block}")
        end = start + prod(shape) // block * block_bytes
        if end > len(self.data):
            raise _Damaged(f"tensor {name} ends at byte {end}, the file at {len(self.data)}")
        return GgufTensor(name=name, shape=shape, kind=kind.name, raw=self.data[start:end])


def _map(path: Path) -> Bytes:
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if bytes(data[:4]) != _MAGIC:
        raise ModelError(f"{path} is no GGUF file: it starts with {bytes(data[:4])!r}")
    return data
