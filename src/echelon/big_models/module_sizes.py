"""Computes the sizes of modules and tensors in bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from echelon.base.errors import UsageError
from echelon.compat.enums import CustomDtype

_CUSTOM_BYTES = {CustomDtype.FP8: 1.0, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> float:
    """Return the number of bytes per element; as in Accelerate, a bool counts as an eighth of a byte.

    Raises:
        UsageError: ``dtype`` is not a dtype.
    """
    if isinstance(dtype, CustomDtype):
        return _CUSTOM_BYTES[dtype]
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"{dtype!r} is not a dtype", do="pass a torch.dtype")
    return 1 / 8 if dtype == torch.bool else dtype.itemsize


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of ``module`` by name, then its buffers.

    Args:
        include_buffers: also yield the buffers.
        recurse: also yield the tensors of submodules.
        remove_non_persistent: skip buffers that are not in the state dict.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    left_out = get_non_persistent_buffers(module, recurse=recurse, fqns=True) if remove_non_persistent else set()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in left_out:
            yield name, buffer


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of buffers that are not in the state dict.

    Args:
        recurse: also include submodules.
        fqns: return fully qualified names.
    """
    modules = module.named_modules() if recurse else iter([("", module)])
    return {
        f"{prefix}.{name}" if fqns and prefix else name
        for prefix, submodule in modules
        for name in submodule._non_persistent_buffers_set
    }


def compute_module_sizes(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, float]:
    """Return the size in bytes of each submodule and tensor by name; ``""`` is the whole model.

    Args:
        model: the model; tied tensors count once.
        dtype: count floating-point tensors as this dtype if it is smaller.
        special_dtypes: dtypes of individual tensors, by name.
        buffers_only: ignore parameters.
    """
    special = {name: dtype_byte_size(as_dtype(kind)) for name, kind in (special_dtypes or {}).items()}
    smaller = None if dtype is None else dtype_byte_size(as_dtype(dtype))
    tensors = model.named_buffers() if buffers_only else chain(model.named_parameters(), model.named_buffers())
    sizes: dict[str, float] = defaultdict(int)
    for name, tensor in tensors:
        own = dtype_byte_size(tensor.dtype)
        converts = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        counted = special.get(name, own if smaller is None or not converts else min(smaller, own))
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            sizes[".".join(parts[:depth])] += tensor.numel() * counted
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
) -> float:
    """Return the total size of the buffers in ``model`` in bytes."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_module_leaves(module_sizes: Mapping[str, float]) -> list[str]:
    """Return the names in a ``compute_module_sizes`` result that have no children."""
    names = set(module_sizes)
    parents = {name.rpartition(".")[0] for name in names}
    return [name for name in module_sizes if name not in parents and name]


def parts_of(model: nn.Module, prefix: str = "", *, buffers: bool = False) -> list[tuple[str, Any]]:
    """Return the direct parameters and submodules of ``model`` by full name; with ``buffers``, also its direct buffers."""
    found: list[tuple[str, Any]] = [*model.named_parameters(recurse=False), *model.named_children()]
    if buffers:
        found += model.named_buffers(recurse=False)
    return [(f"{prefix}.{name}" if prefix else name, part) for name, part in found]


def get_max_layer_size(
    modules: Sequence[tuple[str, Any]], module_sizes: Mapping[str, float], no_split_module_classes: Sequence[str]
) -> tuple[float, list[str]]:
    """Return the size of the largest layer, and the names of all layers of that size.

    A layer is a module without submodules, a module of a class that must not be split, or a tensor.

    Args:
        module_sizes: from ``compute_module_sizes``.
    """
    layers: list[tuple[str, float]] = []
    stack = list(reversed(modules))
    while stack:
        name, part = stack.pop()
        children = list(part.named_children()) if isinstance(part, nn.Module) else []
        if children and type(part).__name__ not in no_split_module_classes:
            stack += [(f"{name}.{child}", module) for child, module in reversed(children)]
        else:
            layers.append((name, module_sizes.get(name, 0)))
    largest = max((size for _, size in layers), default=0)
    return largest, [name for name, size in layers if size == largest]


def calculate_maximum_sizes(model: nn.Module) -> tuple[float, tuple[float, list[str]]]:
    """Return the size of ``model``, and the size and names of its largest layer."""
    sizes = compute_module_sizes(model)
    whole: Any = model
    unsplit = getattr(whole, "_no_split_modules", None) or []
    return sizes.get("", 0), get_max_layer_size(parts_of(model, buffers=True), sizes, unsplit)


def as_dtype(dtype: Any) -> Any:
    """Convert a dtype name, such as ``"float16"`` or ``"torch.float16"``, to the dtype; return other values unchanged."""
    return getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
