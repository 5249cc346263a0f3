"""Accelerate's functions for nested data (apply, move, convert, inspect, slice, concatenate), without communication."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from echelon.base.errors import UsageError
from echelon.base.protocols import SupportsTo
from echelon.distributed.tree import contents, describe, is_record, leaves, map_items, map_tensors, rebuild_like


@dataclass
class TensorInformation:
    """Shape and dtype of a tensor."""

    shape: torch.Size
    dtype: torch.dtype


class _WrongTypeError(UsageError, TypeError):
    """A ``UsageError`` that is also a ``TypeError``, which scripts written for Accelerate catch."""


def is_torch_tensor(tensor: object) -> bool:
    """Return whether ``tensor`` is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_tensor_information(tensor_info: object) -> bool:
    """Return whether ``tensor_info`` is a ``TensorInformation``."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: object) -> bool:
    """Return whether ``data`` is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Put the items from ``generator`` into a container of the same type as ``obj``."""
    return rebuild_like(obj, list(generator))


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Return ``data`` with each leaf that passes ``test_type`` replaced by ``func(leaf, *args, **kwargs)``.

    Args:
        data: nested tuples, lists, dicts, named tuples or dataclasses; they keep their types.
        test_type: function that returns whether to apply ``func`` to a leaf.
        error_on_other_type: raise an error for other leaves instead of keeping them.

    Raises:
        UsageError: ``error_on_other_type`` is True and a leaf does not pass ``test_type`` (also a TypeError).
    """

    def apply(item: Any) -> Any:
        if not isinstance(item, (tuple, list, Mapping)) and test_type(item):
            return func(item, *args, **kwargs)
        if contents(item) is not None:
            return map_items(apply, item)
        if error_on_other_type:
            raise _WrongTypeError(
                f"{_name(func)} does not accept {type(item).__name__} (in {describe(data)})",
                do=f"pass nested tuples, lists and dicts whose leaves pass {_name(test_type)}",
            )
        return item

    return apply(data)


def send_to_device(
    tensor: Any, device: Any, non_blocking: bool = False, skip_keys: str | list[str] | None = None
) -> Any:
    """Move tensors and other objects with a ``to`` method (such as a tokenizer's batch) in nested data to ``device``.

    Args:
        tensor: nested data; leaves without a ``to`` method are kept, and containers keep their types. In a dataclass, only
            tensors are moved.
        non_blocking: passed to ``to`` methods that accept it.
        skip_keys: dict keys whose values are not moved.
    """
    skipped = [skip_keys] if isinstance(skip_keys, str) else list(skip_keys or [])
    return _send(tensor, device, non_blocking=non_blocking, skipped=skipped, moves_objects_of_dataclasses=False)


def send_batch_to_device(batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
    """Move a loader's batch like ``send_to_device``, including the objects with a ``to`` method in dataclasses."""
    return _send(batch, device, non_blocking=non_blocking, skipped=[], moves_objects_of_dataclasses=True)


def _send(data: Any, device: Any, *, non_blocking: bool, skipped: list[str], moves_objects_of_dataclasses: bool) -> Any:
    above: list[Any] = []  # the dataclasses that hold the current item

    def rebuilt(item: Any, items: Any) -> Any:
        held: Any = contents(item)
        pairs = [(items[key], held[key]) for key in items] if isinstance(items, dict) else zip(items, held)
        # A dataclass in which nothing moves stays the same object, because it may be shared (a cache).
        return item if above and all(new is old for new, old in pairs) else rebuild_like(item, items)

    def send(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.to(device, non_blocking=non_blocking)
        if isinstance(item, (str, bytes, type)):
            return item
        if isinstance(item, SupportsTo) and (moves_objects_of_dataclasses or not above):
            try:
                return item.to(device, non_blocking=non_blocking)
            except TypeError:  # a `to` that accepts only the device; any other TypeError is raised again
                return item.to(device)
        if isinstance(item, (tuple, list)):
            return rebuilt(item, [send(each) for each in item])
        if isinstance(item, Mapping):
            return rebuilt(item, {key: value if key in skipped else send(value) for key, value in item.items()})
        if not is_record(item) or any(item is one for one in above):  # a reference cycle
            return item
        held: Any = contents(item)  # a dict
        above.append(item)
        sent = rebuilt(item, {key: send(value) for key, value in held.items()})
        above.pop()
        return sent

    return send(data)


def get_data_structure(data: Any) -> Any:
    """Return ``data`` with each tensor replaced by a ``TensorInformation``."""
    return map_tensors(lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """Return ``data`` with each tensor replaced by its shape, as a list."""
    return map_tensors(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Return ``data_structure`` with each ``TensorInformation`` replaced by an uninitialized tensor."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )


def find_batch_size(data: Any) -> int:
    """Return the size of the first dimension of the first tensor in ``data``.

    Raises:
        UsageError: ``data`` is empty, its first leaf is a 0-d tensor, or its first leaf is not a tensor (then also a TypeError).
    """
    first = data
    while not isinstance(first, torch.Tensor) and (held := contents(first)) is not None:
        if len(held) == 0:
            raise UsageError(f"an empty {type(first).__name__} has no batch size", do="pass at least one tensor")
        first = next(iter(held.values())) if isinstance(held, dict) else held[0]
    if not isinstance(first, torch.Tensor):
        raise _WrongTypeError(
            f"expected the first leaf to be a tensor that has the batch size, but got {type(first).__name__} ({describe(data)})",
            do="put a tensor first",
        )
    if first.dim() == 0:
        raise UsageError("a 0-d tensor has no batch size", do="put a tensor with a batch dimension first")
    return first.shape[0]


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the batch size of ``data``, or None if it has none."""
    try:
        return find_batch_size(data)
    except UsageError:
        return None


def listify(data: Any) -> Any:
    """Return ``data`` with each tensor replaced by a nested list of numbers."""

    def to_list(tensor: torch.Tensor) -> Any:
        values = tensor.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).tolist()

    return map_tensors(to_list, data)


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in ``data``, or None if there are no tensors."""
    return next((leaf.device for leaf in leaves(data) if isinstance(leaf, torch.Tensor)), None)


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Return ``data`` with each tensor sliced by ``tensor_slice``; the last two arguments are unused."""
    return map_tensors(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Concatenate a list of items that share a structure, tensor by tensor along ``dim``.

    Raises:
        UsageError: a leaf is not a tensor (also a TypeError).
    """
    first = data[0]
    if isinstance(first, (tuple, list)):
        return rebuild_like(first, [concatenate([item[i] for item in data], dim=dim) for i in range(len(first))])
    if isinstance(first, Mapping):
        return rebuild_like(first, {key: concatenate([item[key] for item in data], dim=dim) for key in first})
    if isinstance(first, torch.Tensor):
        return torch.cat(list(data), dim=dim)
    if is_record(first):
        columns = [contents(item) or {} for item in data]
        return rebuild_like(first, {key: concatenate([one[key] for one in columns], dim=dim) for key in columns[0]})
    if len(data) == 1:
        return first
    raise _WrongTypeError(f"{type(first).__name__} objects cannot be concatenated", do="pass tensors")


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Append zeros so that a batch of ``batch_size`` rows can be split into ``num_processes`` equal parts.

    Args:
        tensor: nested tensors; each gets the same number of additional rows.

    Raises:
        UsageError: a leaf is not a tensor (also a TypeError).
    """
    missing = -batch_size % num_processes

    def pad(each: torch.Tensor) -> torch.Tensor:
        shape = list(each.shape)
        shape[dim] = missing
        return torch.cat([each, each.new_zeros(shape)], dim=dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)


def convert_to_fp32(tensor: Any) -> Any:
    """Return ``tensor`` with float16 and bfloat16 tensors converted to float32."""
    return map_tensors(
        lambda each: each.float() if each.dtype in (torch.float16, torch.bfloat16) else each,
        tensor,
    )


class ConvertOutputsToFp32:
    """A forward function whose half-precision outputs are converted to float32. It can be pickled if the original can."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``model_forward`` to convert its half-precision outputs to float32; ``__wrapped__`` is the original."""
    return ConvertOutputsToFp32(model_forward)


@contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Gather parameters that DeepSpeed has partitioned (ZeRO stage 3) inside the block; otherwise do nothing.

    Args:
        params: one parameter or several parameters.
        modifier_rank: the rank whose changes in the block are kept (default: no rank changes them).
        fwd_module: as in DeepSpeed.
        enabled: if False, do nothing.

    Collective with ZeRO stage 3.
    """
    given = [params] if isinstance(params, torch.Tensor) else list(params)
    if not enabled or not any(hasattr(parameter, "ds_id") for parameter in given):
        yield
        return
    zero: Any = import_module("deepspeed.runtime.zero")
    with zero.GatheredParameters(given, modifier_rank=modifier_rank, fwd_module=fwd_module):
        yield


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", function))
