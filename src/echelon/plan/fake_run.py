"""Runs operators on tensors without memory: everything that depends on a model's weights, and everything large, is fake."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.distributed.tree import leaves

# Data keeps its values (masks, labels, indices), so that code can ask for them; larger results have no memory.
_LARGEST_REAL_BYTES = 16 * 2**20


def fake_mode() -> FakeTensorMode:
    """Return a mode whose tensors have shapes and no memory, and which accepts real tensors beside them."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a fake tensor on the CPU of the shape, strides and dtype of ``tensor``."""
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="cpu")


def tensors_in(data: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the arguments or the result of an operator."""
    return (one for one in leaves(data) if isinstance(one, torch.Tensor))


class FakeRun(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each operator on fake tensors if an argument is fake, or if the result would be large; otherwise on the values.

    ``observe`` is called after each operator with the operator, its arguments and its result.
    """

    def __init__(self, mode: FakeTensorMode, observe: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self._observe = observe

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # autograd asks for it more often than it runs operators
        kwargs = kwargs or {}
        result = self._run(func, args, kwargs)
        self._observe(func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = list(tensors_in((args, kwargs)))
        if any(isinstance(one, FakeTensor) for one in inputs):
            if func.overloadpacket.__name__ == "_local_scalar_dense":
                return _stand_in(inputs[0])
            return self._run_fake(func, args, kwargs)
        if _may_be_large(func, inputs):
            with self._mode:
                result = func(*args, **kwargs)
            if sum(one.untyped_storage().nbytes() for one in tensors_in(result)) > _LARGEST_REAL_BYTES:
                return result
        return func(*args, **kwargs)

    def _run_fake(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        with self._mode:
            if name == "_grouped_mm" and args[0].dtype != torch.bfloat16:
                # torch (2.13) computes this product in other dtypes, too, but knows its shape only in bfloat16.
                product = func(*(one.bfloat16() for one in args[:2]), *args[2:], **kwargs)
                return torch.empty_strided(product.shape, product.stride(), dtype=args[0].dtype)
            if name == "detach":
                # The first result of an operator for a shape has a weak reference of the fake mode, with which Module.to cannot swap it.
                func(*args, **kwargs)
            result = func(*args, **kwargs)
            if name == "mkldnn_rnn_layer":
                # torch says that its fourth result, which the backward pass reads, is empty. What oneDNN (3.x) puts there:
                steps, features, hidden = args[0].shape[:2].numel(), args[0].shape[2], args[10]
                size = 4 * steps * (9 * hidden + 6 * max(features, hidden) + 36)
                result = (*result[:3], torch.empty(size, dtype=torch.uint8))
            return result


_ASKS_FOR_VALUES = frozenset({torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__})


def stand_in_values(func: Any, args: tuple[Any, ...]) -> Any:
    """Return ones in place of the values that ``func`` wants of a fake tensor; None if it wants none."""
    if func not in _ASKS_FOR_VALUES or not isinstance(args[0], FakeTensor):
        return None
    ones = torch.ones((), dtype=args[0].dtype).expand(args[0].shape)  # one value in memory
    return ones.tolist() if func is torch.Tensor.tolist else ones.numpy()


def _stand_in(tensor: torch.Tensor) -> bool | int | float:
    """Return a value in place of one that only a real run knows, such as that of a loss."""
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1


def _may_be_large(func: Any, inputs: list[torch.Tensor]) -> bool:
    """Return whether an operator on real tensors could make a large one, and may be tried on fake tensors."""
    if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags}:
        return False
    name = func.overloadpacket.__name__
    if name.endswith("_") or "out" in func.__name__.partition(".")[2]:
        return False  # it writes to a tensor that exists
    product = math.prod(max(one.numel(), 1) for one in inputs)  # of a broadcast or a product
    return not inputs or 8 * product > _LARGEST_REAL_BYTES
