"""A CUDA device that is none: tensors that say they are on one, computed on the CPU.

What it can show is where tensors are and when the host waits: a call with tensors on both sides is an error, as on a
device, and so is numpy on the device's side; `waits` counts what makes the host wait for the device. It shows nothing
of streams, memory or kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda", 0)
_DEVICE, _IS_CUDA = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_WAITS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "masked_select", "cpu"}
_FREE = {"copy_", "__get__", "__set__", "data_ptr", "dim", "size", "stride", "__hash__", "__repr__", "shape"}


def there(tensor: Tensor) -> bool:
    """Whether it says that it is on the device."""
    return getattr(tensor, "_there", False)


class Pretend(TorchFunctionMode):
    """While it is entered, device "cuda" is there."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.stream = SimpleNamespace(synchronize=lambda: self.waits.append("synchronize"))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func is torch.device:
            return func(*args, **kwargs)
        if func == _DEVICE:
            return CUDA if there(args[0]) else func(*args)
        if func == _IS_CUDA:
            return there(args[0])
        given = list(_tensors((args, kwargs)))
        inside = [tensor for tensor in given if there(tensor)]
        outside = [tensor for tensor in given if not there(tensor) and tensor.dim()]
        target, moves = self._target(name, args, kwargs, bool(inside))
        self._check(name, args, inside, outside, moves)
        kwargs.pop("pin_memory", None)
        args = tuple(torch.device("cpu") if _is_device(each) else each for each in args)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        result = func(*args, **kwargs)
        if moves and result is args[0]:
            result = result.clone()
        if name not in ("__get__", "copy_"):
            for tensor in _tensors(result):
                tensor._there = target  # type: ignore[attr-defined]
        elif name == "__get__" and isinstance(result, Tensor):
            result._there = target  # type: ignore[attr-defined]
        return result

    def _target(self, name: str, args: Any, kwargs: Any, inside: bool) -> tuple[bool, bool]:
        """(whether the result is on the device, whether that moves it)."""
        asked = kwargs.get("device")
        if name == "to":
            asked = asked or next((each for each in args[1:] if _is_device(each)), None)
        if name in ("cpu", "numpy"):
            asked = torch.device("cpu")
        if asked is None:
            return inside, False
        on_device = torch.device(asked).type == "cuda"
        return on_device, inside != on_device and name in ("to", "cpu")

    def _check(self, name: str, args: Any, inside: list[Tensor], outside: list[Tensor], moves: bool) -> None:
        if name == "numpy" and inside:
            raise TypeError("can't convert a tensor on the device to numpy")
        if inside and (name in _WAITS or (name == "to" and moves)):
            self.waits.append(name)
        if name == "__getitem__" and inside and any(isinstance(each, list) for each in _flat(args[1:])):
            self.waits.append("index from a list")
        if name in ("__getitem__", "__setitem__", "index_put_") and any(t.dtype == torch.bool for t in inside[1:]):
            self.waits.append("index from a mask")
        if inside and outside and name not in _FREE and not (name == "to" and moves):
            raise RuntimeError(f"{name}: expected all tensors to be on one device")


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value in ("cuda", "cpu"))


def _flat(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, tuple | list):
        for each in value:
            yield from _flat(each)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
