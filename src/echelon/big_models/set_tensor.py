"""Moves a single parameter or buffer of a module to a device."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from echelon.base.errors import UsageError
from echelon.big_models.module_sizes import as_dtype

TiedTensors = MutableMapping[int, MutableMapping[Any, torch.Tensor]]
"""Copies of each tied parameter, by its address and then by device, so that each device has only one copy."""

# Parameters of bitsandbytes are constructed with their own attributes as arguments.
_CONSTRUCTED_WITH_ATTRIBUTES = ("FP4Params", "Int8Params", "Params4bit")
_PACKED = "Params4bit"  # its shape is that of the packed bytes


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: int | str | torch.device,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: TiedTensors | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Replace a parameter or buffer of ``module`` with one on ``device``; a parameter's attributes are kept.

    Args:
        module: the module that has the tensor, or a parent of it.
        tensor_name: the tensor's full name, relative to ``module``.
        device: target device; ``"meta"`` frees the values.
        value: new values. None: the current values. A tensor on the meta device has no values and cannot be moved
            without ``value``.
        dtype: dtype for floating-point values. None: the current tensor's dtype.
        fp16_statistics: an 8-bit weight's scales, stored in its ``SCB`` attribute.
        tied_params_map: copies of tied parameters; if there is already one on ``device``, it is used instead of a new
            copy.
        clear_cache: has no effect, because the next tensor reuses freed memory.

    Raises:
        UsageError: the module has no such tensor, the shape of ``value`` differs, or there are no values.
    """
    *path, name = tensor_name.split(".")
    owner = module.get_submodule(".".join(path)) if _has_path(module, path) else None
    if owner is None or (name not in owner._parameters and name not in owner._buffers):
        raise UsageError(f"{type(module).__name__} has no parameter or buffer {tensor_name}", do="use one of its names")
    is_buffer = name in owner._buffers
    old: Any = owner._buffers[name] if is_buffer else owner._parameters[name]
    shared = _copies_of(tied_params_map, value, old)
    if shared is not None and device in shared:
        _set(owner, name, shared[device], is_buffer=is_buffer)
        return
    target = as_device(device)
    new: Any = _with_values(old, target, tensor_name, value=value, dtype=dtype, non_blocking=non_blocking)
    if not is_buffer:
        moves = value is not None or not check_device_same(target, old.device) or new.dtype != old.dtype
        new = _parameter_like(old, new, target, non_blocking=non_blocking) if moves else old
    _set(owner, name, new, is_buffer=is_buffer)
    if fp16_statistics is not None and not is_buffer:
        new.SCB = fp16_statistics.to(target)
    if shared is not None:
        shared[device] = new


def tensor_at(module: nn.Module, name: str) -> torch.Tensor:
    """Return the parameter or buffer ``name`` of ``module`` or of its submodules."""
    path, _, attribute = name.rpartition(".")
    found: torch.Tensor = getattr(module.get_submodule(path), attribute)
    return found


def as_device(device: int | str | torch.device) -> torch.device:
    """Return ``device`` as a torch device; an integer is an accelerator index."""
    if isinstance(device, int):
        current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return torch.device("cuda" if current is None else current.type, device)
    return torch.device(device)


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Return whether both are the same device; without an index, a device means the current device of its type."""
    if first_device.type != second_device.type or first_device.type in ("cpu", "meta"):
        return first_device.type == second_device.type
    current = torch.accelerator.current_device_index()
    first, second = (current if device.index is None else device.index for device in (first_device, second_device))
    return first == second


def _has_path(module: nn.Module, path: list[str]) -> bool:
    for name in path:
        inner = module._modules.get(name)
        if inner is None:
            return False
        module = inner
    return True


def _copies_of(
    tied: TiedTensors | None, value: torch.Tensor | None, old: torch.Tensor
) -> MutableMapping[Any, torch.Tensor] | None:
    """Return the copies of the tied parameter that ``value`` or ``old`` belongs to; None if it is not tied."""
    if tied is None:
        return None
    for tensor in (value, old):
        # The address of meta and empty tensors is 0.
        if isinstance(tensor, torch.Tensor) and tensor.data_ptr() and tensor.data_ptr() in tied:
            return tied[tensor.data_ptr()]
    return None


def _with_values(
    old: torch.Tensor,
    target: torch.device,
    name: str,
    *,
    value: Any,
    dtype: str | torch.dtype | None,
    non_blocking: bool,
) -> torch.Tensor:
    new: torch.Tensor
    if value is None:
        if old.is_meta and target.type != "meta":
            raise UsageError(
                f"{name} is on the meta device, so it has no values to move to {target}", do="pass them as value="
            )
        new = old.detach().to(target, non_blocking=non_blocking)
        if dtype is None or target.type != "meta" or not _converts(old):
            return new
        return new.to(as_dtype(dtype))  # as in accelerate, only a tensor without values takes the new dtype
    if not isinstance(value, torch.Tensor):
        return torch.tensor(value, device=target)
    if value.shape != old.shape and type(old).__name__ != _PACKED:
        raise UsageError(
            f"expected values of shape {list(old.shape)} for {name}, but got {list(value.shape)}",
            do="load these weights into the model that they belong to",
        )
    if dtype is None:
        value = value.to(old.dtype, non_blocking=non_blocking)
    elif _converts(value):
        value = value.to(as_dtype(dtype), non_blocking=non_blocking)
    new = value.detach().to(target, non_blocking=non_blocking)
    return new


def _converts(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _parameter_like(old: Any, new: torch.Tensor, target: torch.device, *, non_blocking: bool) -> Any:
    kind: Any = type(old)
    if kind is nn.Parameter or not issubclass(kind, nn.Parameter):  # a tensor subclass that is marked as a parameter
        made: Any = nn.Parameter(new, requires_grad=old.requires_grad)
    elif kind.__name__ in _CONSTRUCTED_WITH_ATTRIBUTES:
        own = {key: held for key, held in vars(old).items() if not key.startswith("_")}
        on_host = new if target.type == "meta" else new.cpu()  # they quantize when they are moved to the device
        made = kind(on_host, requires_grad=old.requires_grad, **own).to(target, non_blocking=non_blocking)
    else:
        made = kind(new, requires_grad=old.requires_grad)
    made.__dict__.update({key: held for key, held in vars(old).items() if key not in vars(made)})
    return made


def _set(owner: nn.Module, name: str, tensor: torch.Tensor, *, is_buffer: bool) -> None:
    tensors: Mapping[str, Any] = owner._buffers if is_buffer else owner._parameters
    tensors[name] = tensor  # type: ignore[index]
