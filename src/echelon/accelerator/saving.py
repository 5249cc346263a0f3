"""``save`` and ``load`` of Accelerate's utilities, and the bare model in its wrappers."""

from __future__ import annotations

import codecs
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from echelon.accelerator.compiling import has_compiled_regions, is_compiled_module
from echelon.base.errors import UsageError
from echelon.base.warnings import warn
from echelon.precision.policy import unwrap_forward
from echelon.world.world import World

__all__ = ["clean_state_dict_for_safetensors", "extract_model_from_parallel", "id_tensor_storage", "load", "save"]

# What files of training states hold beside tensors: numpy arrays and their dtypes; plain data, no code.
_ALLOWED: tuple[Any, ...] = (
    np.empty(0).__reduce__()[0],  # where numpy keeps this function depends on its version
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]},
    codecs.encode,  # how pickle writes bytes
)
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write ``obj`` to ``f`` on rank zero, or on one rank of each machine.

    Args:
        obj: a dict of tensors with ``safe_serialization``, else what ``torch.save`` takes.
        f: a path; without ``safe_serialization`` also an open file.
        save_on_each_node: for machines that share no file system.
        safe_serialization: write safetensors; of tensors that share memory only the first is kept.

    Raises:
        UsageError: ``obj`` is no dict of tensors, and shall be safetensors.
    """
    world = World.current()
    if not (world.is_local_rank_zero if save_on_each_node else world.is_rank_zero):
        return
    if not safe_serialization:
        torch.save(obj, f)
        return
    others = (
        [name for name, value in obj.items() if not isinstance(value, torch.Tensor)]
        if isinstance(obj, Mapping)
        else ["it"]
    )
    if others:
        raise UsageError(
            f"safetensors hold dicts of tensors only; no tensor: {', '.join(map(str, others[:3]))}",
            do="give a state dict of tensors, or safe_serialization=False",
        )
    safetensors.torch.save_file(clean_state_dict_for_safetensors(obj), f, metadata={"format": "pt"})


def load(f: str | os.PathLike[str] | Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Read what ``torch.save`` wrote: tensors, containers and numpy arrays; a file that holds code is refused.

    Args:
        f: a path or an open file.
        map_location: of ``torch.load``.
        kwargs: of ``torch.load``.

    Raises:
        UsageError: ``weights_only=False`` is asked for.
        UnpicklingError: the file holds something else.
    """
    if not kwargs.pop("weights_only", True):
        raise UsageError(
            "load(weights_only=False) would run whatever code the file holds",
            do="leave weights_only out; for a file of your own, call torch.load yourself",
        )
    with torch.serialization.safe_globals(list(_ALLOWED)):
        return torch.load(f, map_location=map_location, weights_only=True, **kwargs)


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state_dict`` as safetensors takes it: contiguous, and of tensors that share memory only the first."""
    seen: dict[tuple[torch.device, int, int], str] = {}
    kept: dict[str, Any] = {}
    left_out = []
    for name, value in state_dict.items():
        has_memory = isinstance(value, torch.Tensor) and value.numel() > 0 and value.device.type != "meta"
        if has_memory and seen.setdefault(id_tensor_storage(value), name) != name:
            left_out.append(name)
            continue
        kept[name] = value.contiguous() if isinstance(value, torch.Tensor) else value
    if left_out:
        warn(
            f"{', '.join(left_out)} share memory with other tensors and are not written: loading into a model in which they "
            "are tied again gives the same weights"
        )
    return kept


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return what tensors on the same memory have in common: device, address, size in bytes."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Return the model inside of DDP, DataParallel and FSDP.

    Args:
        model: prepared or not.
        keep_fp32_wrapper: keep the forward that runs in mixed precision; False gives the model its own one back.
        keep_torch_compile: keep the compiled module, now around the bare model.
        recursive: also unwrap its submodules that have a ``module``.
    """
    compiled = None
    if is_compiled_module(model):
        compiled, model = model, model._orig_mod
    elif has_compiled_regions(model) and "_orig_mod" in model.__dict__:
        compiled, model = model, model.__dict__["_orig_mod"]
    while isinstance(model, _WRAPPERS):
        model = model.module
    if recursive:
        model = _without_modules(model)
    if not keep_fp32_wrapper:
        unwrap_forward(model)
    if compiled is None or not keep_torch_compile:
        return model
    compiled.__dict__["_orig_mod"] = model
    if is_compiled_module(compiled):
        compiled._orig_mod = model
    return compiled


def _without_modules(module: Any) -> Any:
    bare = module
    while isinstance(getattr(bare, "module", None), nn.Module):
        bare = bare.module
    for name, child in bare.named_children():
        setattr(bare, name, _without_modules(child))
    return bare
