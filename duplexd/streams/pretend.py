"""A pretended device: stages run on it for real, in the host's memory, and a tensor on the wrong side is found out.

    with PretendedDevice():
        arena = Arena(layout, PRETENDED)

1. Its tensors have another device than the host's. As on CUDA, an operation takes tensors of one side only; a number
   without dimensions and an index may come from the host, and a copy goes from either side to either.
2. What is on it reaches numpy only through `.cpu()`.
3. Every operation computes what it computes on the host, so results can be compared to the bit.
4. Streams, kernels and speed are not pretended: the adversary lane finds missing fences, a GPU finds the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

#: torch knows no device that is not there, but for this one, on which it computes shapes only.
PRETENDED = "meta"

_aten = torch.ops.aten
#: The plain copies; inference mode shows `to` itself, in any of its forms.
_COPIES = {_aten.copy_, _aten._to_copy, _aten.to}
#: Operations whose indexes may lie on the host, and where those stand among the arguments.
_INDEXED = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default, _aten._index_put_impl_.default}


class Elsewhere(Tensor):
    """A tensor of the pretended device. `here` is where its numbers lie."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> Elsewhere:
        made: Elsewhere = Tensor._make_wrapper_subclass(
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=torch.device(PRETENDED),
        )
        made.here = here
        return made

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if function in (Tensor.untyped_storage, Tensor.tolist):
            return function(args[0].here)
        with torch._C.DisableTorchFunctionSubclass():  # which would call every result Elsewhere
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _perform(function, args, kwargs or {})


class PretendedDevice:
    """While it is entered, tensors are made on `PRETENDED` as on any device. For one thread."""

    def __enter__(self) -> PretendedDevice:
        self._modes = ExitStack()
        self._modes.enter_context(_Makers())
        self._modes.enter_context(_Operations())  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *_: object) -> None:
        self._modes.close()


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return _perform(function, args, kwargs or {})


class _Makers(TorchFunctionMode):
    """What torch does below its dispatcher: tensors from Python's numbers, and pinned memory."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is Tensor.pin_memory:
            return args[0]
        if function is torch.tensor and _is_pretended(kwargs.get("device")):
            device = kwargs.pop("device")
            return torch.tensor(*args, **kwargs).to(device)
        if function is Tensor.new_tensor and isinstance(args[0], Elsewhere):
            return torch.tensor(args[1], **{"dtype": args[0].dtype, **kwargs}).to(PRETENDED)
        return function(*args, **kwargs)


def _perform(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = any(isinstance(tensor, Elsewhere) for tensor in tensors)
    if any(tensor.device.type == PRETENDED and not isinstance(tensor, Elsewhere) for tensor in tensors):
        raise RuntimeError(
            f"{function}: a tensor that torch made from numbers of Python's without a word; name its device"
        )
    if there and function.overloadpacket not in _COPIES:
        _check_sides(function, _sided(function, args, kwargs))
    asked = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.device)]
    if asked:
        there = _is_pretended(asked[0])
        args, kwargs = tree_map(_on_the_host, (tuple(args), kwargs))
    elif function is _aten.to.other:
        there = isinstance(args[1], Elsewhere)
    elif function.overloadpacket is _aten.copy_:
        there = isinstance(args[0], Elsewhere)
    # A wrapper cannot be made of what inference mode makes; the stages' own mode changes no number.
    with torch.inference_mode(False), torch.no_grad():
        result = function(*tree_map(_here, args), **tree_map(_here, kwargs))
        return tree_map(_elsewhere, result) if there else result


def _sided(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterable[Tensor]:
    """The tensors of a call that must lie on one side."""
    if function in _INDEXED:
        args = (args[0], *args[2:])
    return (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))


def _check_sides(function: Any, tensors: Iterable[Tensor]) -> None:
    strays = [tensor for tensor in tensors if not isinstance(tensor, Elsewhere) and tensor.dim()]
    if strays:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in strays)
        raise RuntimeError(f"{function}: tensors on the device and on the host; on the host: {shapes}")


def _is_pretended(device: Any) -> bool:
    return device is not None and torch.device(device).type == PRETENDED


def _on_the_host(thing: Any) -> Any:
    return torch.device("cpu") if isinstance(thing, torch.device) else thing


def _here(thing: Any) -> Any:
    return thing.here if isinstance(thing, Elsewhere) else thing


def _elsewhere(thing: Any) -> Any:
    return Elsewhere(thing) if isinstance(thing, Tensor) and not isinstance(thing, Elsewhere) else thing
