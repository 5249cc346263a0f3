"""Sizes and ties of a model's tensors, under Accelerate's names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from itertools import chain
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from echelon.accelerator.models.save_objects import extract_model_from_parallel
from echelon.accelerator.plugins.kwargs_handlers import AutocastKwargs
from echelon.base.errors import UsageError
from echelon.base.optional import is_available
from echelon.base.sharded import is_dtensor
from echelon.compat.enums import CustomDtype, DistributedType
from echelon.config.sources import current
from echelon.precision.policy import PrecisionPolicy
from echelon.world.world import World

__all__ = [
    "check_device_same",
    "check_tied_parameters_in_config",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "find_tied_parameters",
    "get_grad_scaler",
    "get_mixed_precision_context_manager",
    "get_model_tp_size",
    "get_module_children_bottom_up",
    "get_module_leaves",
    "get_non_persistent_buffers",
    "is_peft_model",
    "load_state_dict",
    "model_has_dtensor",
    "named_module_tensors",
    "recursive_getattr",
    "retie_parameters",
]

_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_CUSTOM_BYTES = {CustomDtype.FP8: 1.0, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}


def convert_file_size_to_int(size: int | str) -> int:
    """Return a size in bytes: ``"5GB"`` is 5 * 10**9, ``"5GiB"`` 5 * 2**30, ``"5Gb"`` (bits) 5 * 10**9 / 8.

    Raises:
        UsageError: ``size`` is not a valid size.
    """
    if isinstance(size, int) and size >= 0:
        return size
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmg]i?b)\s*", size, re.IGNORECASE)
        if isinstance(size, str)
        else None
    )
    if match is None:
        raise UsageError(
            f"{size!r} is not a valid size", do="pass bytes as an integer, or text such as '5GB' or '200MiB'"
        )
    num_bytes = int(float(match[1]) * _UNITS[match[2].upper()])
    is_bits = match[2].endswith("b") and match[2].upper() in ("KB", "MB", "GB")
    return num_bytes // 8 if is_bits else num_bytes


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> float:
    """Return the number of bytes per element; as in Accelerate, a bool counts as an eighth.

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
        module: the module.
        include_buffers: also yield the buffers.
        recurse: also yield the tensors of submodules.
        remove_non_persistent: skip the buffers that are not in the state dict.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    left_out = get_non_persistent_buffers(module, recurse=recurse, fqns=True) if remove_non_persistent else set()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in left_out:
            yield name, buffer


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of the buffers that are not in the state dict.

    Args:
        module: the module.
        recurse: also include submodules.
        fqns: return fully qualified names.
    """
    modules = module.named_modules() if recurse else iter([("", module)])
    return {
        f"{prefix}.{name}" if fqns and prefix else name
        for prefix, submodule in modules
        for name in submodule._non_persistent_buffers_set
    }


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the groups of names that share one parameter of ``model``, each group sorted."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(name)
    return [sorted(names) for names in groups.values() if len(names) > 1]


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Tie each group of names again, to the first parameter that is not on the meta device."""
    for names in tied_params:
        owners = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
        found = [getattr(owner, attribute) for owner, attribute in owners]
        real = next((parameter for parameter in found if parameter.device.type != "meta"), None)
        if real is not None:
            for owner, attribute in owners:
                setattr(owner, attribute, real)


def compute_module_sizes(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, float]:
    """Return the size in bytes of each submodule and tensor by name; ``""`` is the whole model.

    Args:
        model: tied tensors count once.
        dtype: count floating-point tensors in this dtype if it is smaller.
        special_dtypes: dtypes of single tensors, by name.
        buffers_only: ignore parameters.
    """
    special = {name: dtype_byte_size(_as_dtype(kind)) for name, kind in (special_dtypes or {}).items()}
    smaller = None if dtype is None else dtype_byte_size(_as_dtype(dtype))
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
    """Return the size of the buffers of ``model`` in bytes."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether the configuration of a transformers model ties its embeddings."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        return False
    foreign: Any = model
    text_config = getattr(config, "get_text_config", lambda: config)()
    has_outputs = foreign.get_output_embeddings() is not None
    ties_words = bool(getattr(text_config, "tie_word_embeddings", False)) and has_outputs
    ties_encoder = bool(getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False))
    return ties_words or ties_encoder


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Return whether both are the same device; one without an index means the current device of its type."""
    if first_device.type != second_device.type:
        return False
    if first_device.type == "cpu":
        return True
    indices = (
        {
            torch.accelerator.current_device_index() if device.index is None else device.index
            for device in (first_device, second_device)
        }
        if first_device.type != "meta"
        else {0}
    )
    return len(indices) == 1


def get_module_leaves(module_sizes: Mapping[str, float]) -> list[str]:
    """Return the names of ``compute_module_sizes`` without children."""
    names = set(module_sizes)
    parents = {name.rpartition(".")[0] for name in names}
    return [name for name in module_sizes if name not in parents and name]


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return all submodules, children before parents; ``return_fqns``: as (name, module)."""
    stack, ordered = [("", model)], []
    while stack:
        prefix, module = stack.pop()
        ordered.append((prefix, module))
        stack += [(f"{prefix}.{name}" if prefix else name, child) for name, child in module.named_children()]
    return [item if return_fqns else item[1] for item in reversed(ordered)]


def model_has_dtensor(model: nn.Module) -> bool:
    """Return whether a parameter of ``model`` is a ``DTensor``."""
    return any(is_dtensor(parameter) for parameter in model.parameters())


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return the tensor-parallel size of a transformers model; None if it does not define one."""
    own = getattr(model, "tp_size", None)
    if own is not None:
        return int(own)
    distributed = getattr(getattr(model, "config", None), "distributed_config", None)
    size = distributed.get("tp_size") if isinstance(distributed, dict) else getattr(distributed, "tp_size", None)
    return None if size is None else int(size)


def is_peft_model(model: Any) -> bool:
    """Return whether ``model``, after removing wrappers such as DDP, is a PEFT model."""
    if not is_available("peft"):
        return False
    peft: Any = import_module("peft")
    return isinstance(extract_model_from_parallel(model), peft.PeftModel)


def load_state_dict(checkpoint_file: str, device_map: Any = None) -> dict[str, Any]:
    """Read a weight file in safetensors or torch format without running code.

    Args:
        checkpoint_file: a ``.safetensors`` file, or a file of ``torch.save``.
        device_map: not supported; must be None.

    Raises:
        UsageError: ``device_map`` is set.
    """
    if device_map is not None:
        raise UsageError(
            "load_state_dict(device_map=) is not supported by this version of echelon", do="remove device_map"
        )
    if str(checkpoint_file).endswith(".safetensors"):
        return dict(load_file(checkpoint_file))
    loaded: dict[str, Any] = torch.load(checkpoint_file, map_location="cpu", weights_only=True)
    return loaded


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a gradient scaler for the device of this process."""
    return torch.amp.GradScaler(World.current(cpu=current().value.cpu).device.type, **kwargs)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return autocast in the precision of the environment or the launcher; a no-op without ``native_amp``."""
    if not native_amp:
        return nullcontext()
    config = current().value
    policy = PrecisionPolicy(mode=config.mixed_precision, device_type=World.current(cpu=config.cpu).device.type)
    return policy.autocast((autocast_kwargs or AutocastKwargs()).to_kwargs())


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return ``obj.a.b`` for ``attr="a.b"``."""
    for name in attr.split("."):
        obj = getattr(obj, name)
    return obj


def _as_dtype(dtype: str | torch.dtype | CustomDtype) -> Any:
    """Convert ``"float16"`` and ``"torch.float16"`` to the dtype."""
    return getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
