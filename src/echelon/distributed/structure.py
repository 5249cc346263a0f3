"""Accelerate's functions on nested data: apply, move, convert, measure, slice, join. No communication."""

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
from echelon.distributed.tree import contents, describe, is_record, leaves, map_tensors, rebuild_like

__all__ = [
    "ConvertOutputsToFp32",
    "GatheredParameters",
    "TensorInformation",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "find_batch_size",
    "find_device",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "listify",
    "pad_input_tensors",
    "recursively_apply",
    "send_to_device",
    "slice_tensors",
]


@dataclass
class TensorInformation:
    """The shape and dtype of a tensor that is elsewhere."""

    shape: torch.Size
    dtype: torch.dtype


class _WrongTypeError(UsageError, TypeError):
    """Both our error and the one that scripts written for Accelerate catch."""


def is_torch_tensor(tensor: object) -> bool:
    """Tell whether it is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_tensor_information(tensor_info: object) -> bool:
    """Tell whether it is a ``TensorInformation``."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: object) -> bool:
    """Tell whether it is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Put the items of ``generator`` into a container of the type of ``obj``."""
    return rebuild_like(obj, list(generator))


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Return ``data`` with ``func(leaf, *args, **kwargs)`` in the place of each leaf that passes ``test_type``.

    Args:
        func: applied to leaves.
        data: nested tuples, lists, dicts, named tuples, dataclasses; they keep their types.
        args: of ``func``.
        test_type: which leaves to apply to.
        error_on_other_type: raise for other leaves; else they stay.
        kwargs: of ``func``.

    Raises:
        UsageError: (also a TypeError) a leaf does not pass, with ``error_on_other_type``.
    """

    def apply(item: Any) -> Any:
        if isinstance(item, (tuple, list)):
            return rebuild_like(item, [apply(each) for each in item])
        if isinstance(item, Mapping):
            return rebuild_like(item, {key: apply(value) for key, value in item.items()})
        if test_type(item):
            return func(item, *args, **kwargs)
        if is_record(item):
            held: Any = contents(item)  # a dict
            return rebuild_like(item, {key: apply(value) for key, value in held.items()})
        if error_on_other_type:
            raise _WrongTypeError(
                f"{_name(func)} does not take {type(item).__name__} (in {describe(data)})",
                do=f"give nested tuples, lists and dicts of what passes {_name(test_type)}",
            )
        return item

    return apply(data)


def send_to_device(
    tensor: Any, device: Any, non_blocking: bool = False, skip_keys: str | list[str] | None = None
) -> Any:
    """Move nested data to ``device``: tensors, and everything else that has a ``to`` (a tokenizer's batch).

    Args:
        tensor: nested data; other leaves stay.
        device: as of ``torch.Tensor.to``.
        non_blocking: for those ``to`` methods that know it.
        skip_keys: keys of dicts whose values stay where they are.
    """
    skipped = [skip_keys] if isinstance(skip_keys, str) else list(skip_keys or [])

    def send(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.to(device, non_blocking=non_blocking)
        if isinstance(item, SupportsTo):
            try:
                return item.to(device, non_blocking=non_blocking)
            except TypeError:  # a `to` of its own that takes the device only; another TypeError comes again
                return item.to(device)
        if isinstance(item, (tuple, list)):
            return rebuild_like(item, [send(each) for each in item])
        if isinstance(item, Mapping):
            return rebuild_like(item, {key: value if key in skipped else send(value) for key, value in item.items()})
        return map_tensors(send, item)  # a dataclass

    return send(tensor)


def get_data_structure(data: Any) -> Any:
    """Return ``data`` with a ``TensorInformation`` in the place of each tensor."""
    return map_tensors(lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """Return ``data`` with the shape, as a list, in the place of each tensor."""
    return map_tensors(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Return what ``get_data_structure`` described, with tensors that hold nothing yet."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )


def find_batch_size(data: Any) -> int:
    """Return the first dimension of the first tensor of ``data``.

    Raises:
        UsageError: there is no first tensor (also a TypeError where something else is in its place), or it has no
            dimension.
    """
    first = data
    while (held := contents(first)) is not None:
        if len(held) == 0:
            raise UsageError(f"an empty {type(first).__name__} has no batch size", do="give at least one tensor")
        first = next(iter(held.values())) if isinstance(held, dict) else held[0]
    if not isinstance(first, torch.Tensor):
        raise _WrongTypeError(
            f"the batch size is read from a tensor, and the first leaf is {type(first).__name__} ({describe(data)})",
            do="put a tensor first",
        )
    if first.dim() == 0:
        raise UsageError("a tensor without dimensions has no batch size", do="put a tensor of samples first")
    return first.shape[0]


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the batch size of ``data``; None where it has none."""
    try:
        return find_batch_size(data)
    except UsageError:
        return None


def listify(data: Any) -> Any:
    """Return ``data`` with nested lists of numbers in the place of tensors."""

    def to_list(tensor: torch.Tensor) -> Any:
        values = tensor.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).tolist()

    return map_tensors(to_list, data)


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor of ``data``; None without one."""
    return next((leaf.device for leaf in leaves(data) if isinstance(leaf, torch.Tensor)), None)


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Return ``tensor[tensor_slice]`` of each tensor; the last two arguments are for functions of the same signature."""
    return map_tensors(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Join equal structures, given as a list, tensor by tensor along ``dim``.

    Raises:
        UsageError: (also a TypeError) something else than tensors is to be joined.
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
    raise _WrongTypeError(f"{type(first).__name__} objects cannot be joined", do="give tensors")


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Append zeros so that a batch of ``batch_size`` can be cut into ``num_processes`` equal parts.

    Args:
        tensor: nested data of tensors; all of them get the same number of rows.
        batch_size: rows of the batch.
        num_processes: parts.
        dim: the dimension of the rows.

    Raises:
        UsageError: (also a TypeError) a leaf is no tensor.
    """
    missing = -batch_size % num_processes

    def pad(each: torch.Tensor) -> torch.Tensor:
        shape = list(each.shape)
        shape[dim] = missing
        return torch.cat([each, each.new_zeros(shape)], dim=dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)


def convert_to_fp32(tensor: Any) -> Any:
    """Return ``data`` with its float16 and bfloat16 tensors in float32."""
    return map_tensors(
        lambda each: each.float() if each.dtype in (torch.float16, torch.bfloat16) else each,
        tensor,
    )


class ConvertOutputsToFp32:
    """A forward whose outputs are float32 where they were half precision; it pickles if the forward does."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``model_forward`` with float32 outputs; the original is its ``__wrapped__``."""
    return ConvertOutputsToFp32(model_forward)


@contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Give access to whole parameters where DeepSpeed has taken them apart (ZeRO stage 3); elsewhere there is nothing to do.

    Args:
        params: one parameter, or several.
        modifier_rank: the rank whose changes in the block count; None: nobody changes them.
        fwd_module: as for DeepSpeed.
        enabled: False: do nothing.

    Collective: in ZeRO stage 3.
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
