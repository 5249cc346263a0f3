"""Computes memory budgets for device maps from this machine's devices."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from echelon.base.device import free_memory
from echelon.base.errors import UsageError
from echelon.base.limits import room_for_memory
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext_noop as N_
from echelon.big_models.module_sizes import compute_module_sizes, get_module_leaves
from echelon.compat.byte_sizes import convert_file_size_to_int

_logger = get_logger(__name__)
_OTHERS = ("mps", "cpu", "disk")
_SHARE_OF_ONE_DEVICE = 0.9  # the rest is for activations


def get_max_memory(max_memory: MutableMapping[Any, Any] | None = None) -> dict[int | str, int | float]:
    """Return the memory of each device in bytes: accelerators by index, then ``"mps"``, ``"cpu"`` and ``"disk"``.

    Args:
        max_memory: budgets in bytes or as strings, which are replaced with bytes in place, because transformers relies
            on this. None: all available memory, within the container's limits.

    Raises:
        UsageError: a key is not a device, or a string is not a size.
    """
    if max_memory is None:
        return _available()
    for at, size in max_memory.items():
        if isinstance(size, str):
            max_memory[at] = convert_file_size_to_int(size)
    sizes = dict(max_memory)
    numbers = sorted(at for at in sizes if isinstance(at, int))
    if unknown := [at for at in sizes if not isinstance(at, int) and at not in _OTHERS]:
        raise UsageError(
            f"max_memory has budgets for {', '.join(map(repr, unknown))}, but these are not devices",
            do="use an accelerator index (0, 1, ...), 'mps', 'cpu' or 'disk'",
        )
    present = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if absent := [number for number in numbers if not 0 <= number < present]:
        _logger.warning(N_("max_memory has budgets for accelerators %s, but this machine has only %d"), absent, present)
    order: list[int | str] = [*numbers, *_OTHERS]
    return {at: sizes[at] for at in order if at in sizes}


def _available() -> dict[int | str, int | float]:
    import psutil  # noqa: PLC0415 - only needed here

    found: dict[int | str, int | float] = {}
    shares_host_memory = False
    if torch.accelerator.is_available():
        for number in range(torch.accelerator.device_count()):
            memory = free_memory(number)
            if memory is None:
                _logger.info("device %d cannot be used, or does not report its memory", number)
            else:
                found[number] = memory.num_bytes
                shares_host_memory |= memory.is_of_host
    on_host = int(psutil.virtual_memory().available)
    room = room_for_memory()
    if room is not None:
        on_host = min(on_host, room.left)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is not None and device.type == "mps":
        return {"mps": on_host}
    if not shares_host_memory:
        found["cpu"] = on_host
    return found


def get_balanced_memory(
    model: nn.Module,
    max_memory: dict[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    low_zero: bool = False,
) -> dict[int | str, Any]:
    """Return budgets for ``infer_auto_device_map`` that spread ``model`` evenly across accelerators.

    Each accelerator except the last gets an equal share of the model and memory for one more block, because layers are
    not split.

    Args:
        model: the model; it may be on the meta device.
        max_memory: upper bounds. None: all available memory.
        no_split_module_classes: class names of modules that must not be split across devices.
        low_zero: put as little as possible on the first accelerator, which also holds other data.

    Source: Accelerate's function of the same name (returns the same budgets).
    """
    memory: dict[Any, Any] = get_max_memory(max_memory)
    used = [at for at, size in memory.items() if (isinstance(at, int) or at == "mps") and size > 0]
    if not used:
        return memory
    if len(used) == 1:
        low_zero = False
        if max_memory is None and isinstance(used[0], int):
            memory[used[0]] *= _SHARE_OF_ONE_DEVICE
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    whole = sizes.get("", 0)
    share = whole // (len(used) - 1 if low_zero else len(used))
    share += int(1.25 * max(_unsplit_block(model, sizes, no_split_module_classes), _mean_leaf(sizes)))
    numbers = sorted(at for at in used if isinstance(at, int))
    first = 0 if 0 in memory else min(numbers, default=0)
    for number in numbers[:-1]:  # the last one keeps its whole memory, in case the shares are too small
        if not (low_zero and number == first):
            memory[number] = min(share, memory[number])
    if low_zero:
        elsewhere = sum(memory[number] for number in numbers if number != first)
        memory[first] = min(max(0, whole - elsewhere), memory[first])
    return memory


def _unsplit_block(model: nn.Module, sizes: Mapping[str, float], classes: Sequence[str] | str | None) -> float:
    """Return the size of the largest block that must not be split, considering the first block of each class."""
    wanted = [classes] if isinstance(classes, str) else list(classes or [])
    modules = dict(model.named_modules(remove_duplicate=False))
    first: dict[str, float] = {}
    for name, size in sizes.items():
        kind = type(modules[name]).__name__ if name and name in modules else ""
        if kind in wanted:
            first.setdefault(kind, size)
    return max(first.values(), default=0)


def _mean_leaf(sizes: Mapping[str, float]) -> int:
    """Return the mean size of modules that contain only tensors."""
    tensors = set(get_module_leaves(sizes))
    modules = {name: size for name, size in sizes.items() if name not in tensors}
    leaves = get_module_leaves(modules)
    return int(sum(modules[name] for name in leaves) / max(len(leaves), 1))
