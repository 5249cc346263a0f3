"""``save`` and ``load`` of Accelerate's utilities, and the bare model in its wrappers."""

from __future__ import annotations

import codecs
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn

from echelon.accelerator.prepare.compile import is_compiled_module, moved_to, uncompiled
from echelon.base.errors import CheckpointError, UsageError
from echelon.base.sharded import is_old_fsdp
from echelon.base.warnings import warn
from echelon.precision.policy import unwrap_forward
from echelon.world.world import World

__all__ = [
    "PLAIN_DATA",
    "aliases_in",
    "clean_state_dict_for_safetensors",
    "extract_model_from_parallel",
    "id_tensor_storage",
    "load",
    "refused_in",
    "save",
    "without_wrappers",
    "write_pickled",
    "write_tensors",
]

# Where numpy keeps these functions depends on its version, and a file has the names of the one that wrote it.
_NUMPY_FUNCTIONS: tuple[Any, ...] = (np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0])
# What files of training states hold beside tensors: numpy arrays, scalars and their dtypes; plain data, no code.
_ALLOWED: tuple[Any, ...] = (
    *_NUMPY_FUNCTIONS,
    *((f, f"numpy.{core}.multiarray.{f.__name__}") for f in _NUMPY_FUNCTIONS for core in ("core", "_core")),
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]},
    codecs.encode,  # how pickle writes bytes
)
PLAIN_DATA = "save tensors, numbers, text, lists, tuples, dicts and numpy arrays"
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


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
    write_tensors(obj, f)
    _warn_of(aliases_in(obj))


def load(f: str | os.PathLike[str] | Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Read what ``torch.save`` wrote: tensors, containers and numpy arrays; a file that holds code is refused.

    Args:
        f: a path or an open file.
        map_location: of ``torch.load``.
        kwargs: of ``torch.load``.

    Raises:
        UsageError: ``weights_only=False`` is asked for.
        CheckpointError: the file holds something else, or is damaged.
    """
    if not kwargs.pop("weights_only", True):
        raise UsageError(
            "load(weights_only=False) would run whatever code the file holds",
            do="leave weights_only out; for a file of your own, call torch.load yourself",
        )
    name = os.fspath(f) if isinstance(f, (str, os.PathLike)) else "the file"
    try:
        with torch.serialization.safe_globals(list(_ALLOWED)):
            return torch.load(f, map_location=map_location, weights_only=True, **kwargs)
    except pickle.UnpicklingError as error:
        # Torch's own message advises to load with weights_only=False, which runs the code.
        found = re.search(r"GLOBAL (\S+)", str(error)) or re.search(r"(Unsupported .*)", str(error))
        raise CheckpointError(
            f"{name} holds {found[1] if found else 'something'}, which is not plain data, and is not loaded: it could run code",
            do=f"{PLAIN_DATA}; to run the code of a file of your own, call torch.load yourself",
        ) from error
    except FileNotFoundError:
        raise
    except (EOFError, OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{name} cannot be read: {error}", do="use another copy, or an older checkpoint"
        ) from error


def refused_in(f: str | os.PathLike[str] | Any) -> list[str]:
    """Return the names in a file that ``torch.save`` wrote for which ``load`` would refuse it."""
    with torch.serialization.safe_globals(list(_ALLOWED)):
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(f))


def write_pickled(obj: Any, path: Path) -> None:
    """Write ``obj`` by ``torch.save``; what the file system refuses is the OSError that it gives, which torch's own writer hides."""
    with path.open("wb") as file:
        torch.save(obj, file)


def write_tensors(state_dict: Mapping[str, Any], f: Any) -> None:
    """Write safetensors, each tensor once; the file's metadata say which names stand for which others (tied weights).

    Raises:
        UsageError: it is no dict of tensors.
    """
    others = ["it"]
    if isinstance(state_dict, Mapping):
        others = [name for name, value in state_dict.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise UsageError(
            f"safetensors hold dicts of tensors only; no tensor: {', '.join(map(str, others[:3]))}",
            do="give a state dict of tensors, or safe_serialization=False",
        )
    aliases = aliases_in(state_dict)
    kept = {name: _for_safetensors(value) for name, value in state_dict.items() if name not in aliases}
    safetensors.torch.save_file(kept, f, metadata={"format": "pt", **aliases})


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state_dict`` as safetensors takes it: contiguous, and each tensor under its first name only."""
    aliases = aliases_in(state_dict)
    _warn_of(aliases)
    return {name: _for_safetensors(value) for name, value in state_dict.items() if name not in aliases}


def aliases_in(state_dict: Mapping[str, Any]) -> dict[str, str]:
    """Return for each further name of a tensor (tied weights) its first name.

    Different parts of one memory (the weights of an LSTM on a GPU) are different tensors.
    """
    first: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor) and value.numel() > 0 and value.device.type != "meta":
            view = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
            if first.setdefault(view, name) != name:
                aliases[name] = first[view]
    return aliases


def _for_safetensors(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # Of a part of a larger memory a copy: safetensors refuses tensors that overlap.
    is_whole = value.numel() * value.element_size() == value.untyped_storage().nbytes()
    return value.contiguous() if is_whole else value.clone(memory_format=torch.contiguous_format)


def _warn_of(aliases: Mapping[str, str]) -> None:
    if aliases:
        warn(
            f"{', '.join(aliases)} share memory with other tensors and are not written: loading into a model in which "
            "they are tied again gives the same weights"
        )


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
    compiled = model if is_compiled_module(model) else None
    inner = without_wrappers(model if compiled is None else model._orig_mod)
    bare = uncompiled(without_wrappers(uncompiled(model)))
    if recursive:
        inner, bare = _without_modules(inner), _without_modules(bare)
    if not keep_fp32_wrapper:
        unwrap_forward(inner)
        unwrap_forward(bare)
    if not keep_torch_compile:
        return bare
    if compiled is None:
        return inner
    return compiled if compiled._orig_mod is inner else moved_to(inner, compiled)


def without_wrappers(model: Any) -> Any:
    """Return the model inside of DDP, DataParallel and the older FSDP, whoever wrapped it."""
    while isinstance(model, _WRAPPERS) or is_old_fsdp(model):
        model = model.module
    return model


def _without_modules(module: Any) -> Any:
    bare = module
    while isinstance(getattr(bare, "module", None), nn.Module):
        bare = bare.module
    for name, child in bare.named_children():
        setattr(bare, name, _without_modules(child))
    return bare
