"""Reads weight files into a model: each rank its shard of every tensor, or each tensor to its device in a map."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.accelerator.models.save_objects import bare_module
from echelon.accelerator.models.weight_check import shortened
from echelon.accelerator.models.weight_sources import FileTensor, joined, matching_tensors, named_tensors, own_tensors
from echelon.base.errors import CheckpointError, UsageError
from echelon.base.sharded import is_dtensor, is_fsdp_module
from echelon.big_models.device_map import infer_auto_device_map
from echelon.big_models.device_memory import get_balanced_memory
from echelon.big_models.dispatch import dispatch_model
from echelon.big_models.module_sizes import as_dtype
from echelon.big_models.offload_store import OffloadFolder, UnreadTensor
from echelon.big_models.set_tensor import set_module_tensor_to_device
from echelon.big_models.tied_parameters import (
    check_tied_parameters_on_same_device,
    device_of,
    find_tied_parameters,
    retie_parameters,
)
from echelon.distributed.control import raise_on_all_ranks
from echelon.engines.fsdp.meta_device import allocate_tensors
from echelon.engines.shards import local_slices

_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Any = None,
    max_memory: Any = None,
    no_split_module_classes: Any = None,
    offload_folder: Any = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: Any = None,
    preload_module_classes: Any = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load a checkpoint into ``model`` and prepare it to run on the devices in the map; return the model.

    Args:
        model: the model, usually on the meta device (``init_empty_weights``).
        checkpoint: see ``load_checkpoint_in_model``.
        device_map: device by module name (with an accelerator, ``"cpu"`` and ``"disk"`` modules are offloaded), or
            ``"auto"`` or ``"balanced"`` (both: spread evenly across accelerators), ``"balanced_low_0"`` (little on the
            first) or ``"sequential"`` (fill one after another). None: same as in ``load_checkpoint_in_model``.
        max_memory: memory limit per device, used to compute the map.
        no_split_module_classes: class names of modules that must not be split across devices, used to compute the map.
        offload_folder: folder for modules that are offloaded to disk.
        offload_buffers: also offload buffers.
        dtype: new dtype of the weights.
        offload_state_dict: has no effect; weights are read one at a time, so there is no state dict to offload.
        skip_keys: keyword arguments of ``forward`` that are not moved between devices.
        preload_module_classes: class names of modules whose weights, including submodules, are loaded together.
        force_hooks: attach hooks even if the map has a single device.
        strict: see ``load_checkpoint_in_model``, which also describes the other arguments.

    Collective: call on every rank if parameters are sharded.

    Examples:
        >>> with init_empty_weights():
        ...     model = torch.nn.Linear(4, 2)
        >>> model = load_checkpoint_and_dispatch(model, "model.safetensors", device_map="auto")  # doctest: +SKIP
    """
    if device_map is None:
        _refuse(
            "load_checkpoint_and_dispatch",
            do="pass device_map=, or remove these arguments; to fit a large model, shard it: "
            "Accelerator(fsdp_plugin=...)",
            max_memory=max_memory,
            skip_keys=skip_keys,
            force_hooks=force_hooks,
        )
    if isinstance(device_map, str):
        device_map = _computed_map(
            device_map, model, max_memory, no_split_module_classes, dtype, offload_buffers=offload_buffers
        )
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map,
        offload_folder,
        dtype,
        bool(offload_state_dict),
        offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def _computed_map(
    kind: str,
    model: nn.Module,
    max_memory: Any,
    unsplit: Sequence[str] | None,
    dtype: str | torch.dtype | None,
    *,
    offload_buffers: bool,
) -> dict[str, Any]:
    if kind not in _MAPS:
        raise UsageError(
            f"{kind!r} is not a device map",
            where="load_checkpoint_and_dispatch(device_map=)",
            do=f"pass one of {', '.join(map(repr, _MAPS))}, or a dict of modules and devices",
        )
    if kind != "sequential":
        max_memory = get_balanced_memory(model, max_memory, unsplit, dtype, low_zero=kind == "balanced_low_0")
    return infer_auto_device_map(model, max_memory, unsplit, dtype, offload_buffers=offload_buffers)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Any = None,
    offload_folder: Any = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Any = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a checkpoint into ``model`` one tensor at a time; each rank reads only its shard of sharded parameters.

    Parameters on the meta device are first allocated: sharded ones on the run's device, others on the CPU. Buffers on
    the meta device that are in no file are recomputed with ``reset_parameters`` or ``_init_weights``.

    Args:
        model: prepared or not. If it is on the meta device, load it after ``prepare`` when sharding, otherwise before.
        checkpoint: a folder written by ``save_pretrained`` or ``save_model``, its index, or a single weight file
            (safetensors or ``torch.save``). Every rank must be able to read it.
        device_map: device by module name, including ``"cpu"`` and ``"disk"``; call ``dispatch_model`` before running
            the model. None: load onto the CPU or, if sharded, each shard onto its rank's device.
        offload_folder: folder for weights that are offloaded to disk.
        offload_state_dict: has no effect; weights are read one at a time, so there is no state dict to offload.
        offload_buffers: also offload the buffers of modules that are offloaded to disk.
        keep_in_fp32_modules: names of modules to keep in float32 if ``dtype`` is float16.
        offload_8bit_bnb: not supported.
        dtype: new dtype for all floating-point tensors in the model. None: keep the model's dtype and convert the
            values. Not supported for sharded models.
        strict: raise if the file has extra weights, or lacks weights for which the model has values; False: warn.
        full_state_dict: False is not supported.
        broadcast_from_rank0: not supported.

    Collective: call on every rank if parameters are sharded.

    Raises:
        UsageError: an argument is not supported, or ``dtype`` is set for sharded parameters.
        CheckpointError: the weights are missing or damaged, or belong to another model: shapes or kinds of dtypes
            differ, tied parameters have different values, or a tensor on the meta device has no value.
        DesyncError: some ranks failed; the message names them.

    Examples:
        >>> load_checkpoint_in_model(model, "model.safetensors", device_map={"": "cpu"})  # doctest: +SKIP
    """
    by_map = {
        "offload_folder": offload_folder,
        "offload_state_dict": offload_state_dict,
        "offload_buffers": offload_buffers,
        "keep_in_fp32_modules": keep_in_fp32_modules,
    }
    _refuse(
        "load_checkpoint_in_model",
        do="remove the argument; to fit a large model, shard it: Accelerator(fsdp_plugin=...)",
        offload_8bit_bnb=offload_8bit_bnb,
        full_state_dict=not full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
        **(by_map if device_map is None else {}),
    )
    bare: nn.Module = bare_module(model)
    if device_map is not None:
        _load_by_device_map(
            bare,
            Path(checkpoint).expanduser(),
            device_map,
            folder=offload_folder,
            dtype=dtype,
            offload_buffers=offload_buffers,
            keep_in_fp32=list(keep_in_fp32_modules or ()),
            strict=strict,
        )
        return
    mesh = next((p.device_mesh for p in bare.parameters() if is_dtensor(p)), None)
    if dtype is not None:
        _convert(bare, dtype, is_sharded=mesh is not None)
    on_all_ranks = nullcontext() if mesh is None else raise_on_all_ranks("load_checkpoint_in_model")
    device = torch.device("cpu" if mesh is None else mesh.device_type)
    with on_all_ranks:
        _read(bare, Path(checkpoint).expanduser(), device=device, strict=strict)


def _convert(model: nn.Module, dtype: str | torch.dtype, *, is_sharded: bool) -> None:
    if is_sharded:
        raise UsageError(
            "load_checkpoint_in_model(dtype=) cannot be used on a sharded model, because its optimizer already holds "
            "the parameters",
            do="remove dtype= to convert the values to the model's dtype, or build the model in the requested dtype",
        )
    model.to(as_dtype(dtype))


def _refuse(function: str, *, do: str, **arguments: Any) -> None:
    given = [name for name, value in arguments.items() if value]
    if given:
        raise UsageError(f"{function}() does not support {', '.join(given)} here", do=do)


def _read(model: nn.Module, checkpoint: Path, *, device: torch.device, strict: bool) -> None:
    for module in model.modules():
        if is_fsdp_module(module):
            module.reshard()  # ZeRO stage 2 keeps parameters unsharded after a forward pass
    own, found = matching_tensors(model, checkpoint, strict=strict)
    on_meta = [name for name, tensor in named_tensors(model) if tensor.is_meta]
    if on_meta:
        allocate_tensors(model, on_meta, device=device)
        own = dict(own_tensors(model))  # buffers have been replaced
    filled: dict[int, str] = {}
    with torch.no_grad():
        for name, weight in found:
            target = own[name]
            local = target.to_local() if is_dtensor(target) else target
            part = weight.read(local_slices(target))
            first = filled.setdefault(id(target), name)
            if first == name:
                local.copy_(part)
            elif not torch.equal(local, part.to(local)):
                raise _untied(checkpoint, name, first)
            del part  # release its mapping
    _compute_buffers(model, [name for name in on_meta if name not in own])


# ---- by a device map ---


def _load_by_device_map(
    model: nn.Module,
    checkpoint: Path,
    device_map: Mapping[str, Any],
    *,
    folder: str | os.PathLike[str] | None,
    dtype: str | torch.dtype | None,
    offload_buffers: bool,
    keep_in_fp32: Sequence[str],
    strict: bool,
) -> None:
    """Load ``checkpoint`` into ``model`` one tensor at a time; weights mapped to the disk are written to ``folder``.

    Raises:
        UsageError: the map has no device for a tensor, or maps parts to the disk without a folder.
        CheckpointError: the weights are missing or damaged, or belong to another model.
    """
    tied = find_tied_parameters(model)
    check_tied_parameters_on_same_device(tied, device_map)
    if folder is None and "disk" in device_map.values():
        raise UsageError(
            "the device map puts parts of the model on disk, but no folder was given", do="pass offload_folder="
        )
    own, found = matching_tensors(model, checkpoint, strict=strict)
    uncomputed = [name for name, tensor in named_tensors(model) if tensor.is_meta and name not in own]
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    to_disk: dict[str, UnreadTensor] = {}
    aliases: dict[str, str] = {}
    placed: dict[tuple[int, str], tuple[str, FileTensor]] = {}
    """The first name under which each model tensor was placed on each target, and its stored values."""
    for name, weight in [*found, *_tied_to(found, own)]:
        place = device_of(name, device_map)
        if place == "disk" and name in buffers and not offload_buffers:
            place = "cpu"
        first, source = placed.setdefault((id(own[name]), str(place)), (name, weight))
        kind = _dtype_for(name, own[name], dtype, keep_in_fp32)
        if first != name:
            if weight is not source and not torch.equal(weight.read(()), source.read(())):
                raise _untied(checkpoint, name, first)
            if place == "disk":
                aliases[name] = first
        elif place == "disk":
            to_disk[name] = UnreadTensor(dtype=kind, shape=weight.shape, read=partial(weight.read, ()))
        else:
            # A copy, because the file may change while the model is used.
            value = weight.read(()).to(kind, copy=True)
            set_module_tensor_to_device(model, name, place, value=value, dtype=kind)
        if place == "disk":
            set_module_tensor_to_device(model, name, "meta", dtype=kind)
    if folder is not None and to_disk:
        writer = OffloadFolder(folder, [*to_disk, *aliases])
        writer.write(to_disk, aliases)
        writer.close()
    retie_parameters(model, [names for names in tied if not any(name in to_disk for name in names)])
    for name in uncomputed:
        empty = torch.empty_like(model.get_buffer(name), device="cpu")
        set_module_tensor_to_device(model, name, "cpu", value=empty)
    _compute_buffers(model, uncomputed)


def _tied_to(found: Sequence[tuple[str, FileTensor]], own: Mapping[str, torch.Tensor]) -> list[tuple[str, FileTensor]]:
    """Return the names of tied tensors that are stored under another name, with their values."""
    stored_as = {id(own[name]): weight for name, weight in found}
    names = {name for name, _ in found}
    return [(name, stored_as[id(one)]) for name, one in own.items() if name not in names and id(one) in stored_as]


def _dtype_for(
    name: str, tensor: torch.Tensor, dtype: str | torch.dtype | None, keep_in_fp32: Sequence[str]
) -> torch.dtype:
    if dtype is None or not tensor.dtype.is_floating_point:
        return tensor.dtype
    wanted: torch.dtype = as_dtype(dtype)
    if wanted == torch.float16 and any(key == name or f"{key}." in name for key in keep_in_fp32):
        return torch.float32
    return wanted


def _untied(checkpoint: Path, name: str, first: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint} contains different values for {name} and {first}, but the model ties them",
        do="load the checkpoint into a model without tied weights (tie_word_embeddings=False)",
    )


# ---- buffers ---------------------------------------------------------------------------------------------------------


def _compute_buffers(model: nn.Module, names: list[str]) -> None:
    """Compute the allocated buffers ``names``, which no weight file stores, with their modules' initializers.

    Such buffers are for example the frequencies of rotary embeddings.

    The initializer runs twice, on memory filled with zeros and with ones; equal results prove that it sets the buffer.

    Raises:
        CheckpointError: some of the buffers are not set by any initializer.
    """
    left = []
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        module = model.get_submodule(path)
        mine = [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == path]
        results = [_initialized(model, path, mine, fill) for fill in (0, 1)]
        for name in mine:
            buffer, (first, second) = module._buffers[name], (result[name] for result in results)
            assert buffer is not None
            if torch.equal(first, second):
                buffer.copy_(first)
            else:
                left.append(joined(path, name))
    if left:
        raise CheckpointError(
            f"buffers {shortened(left)} of {type(model).__name__} were on the meta device, but no checkpoint file contains them, "
            "and neither reset_parameters() nor the model's _init_weights() initializes them",
            do="build the model with echelon.init_empty_weights(), which keeps the values of buffers",
        )


def _initialized(model: nn.Module, path: str, names: list[str], fill: int) -> dict[str, torch.Tensor]:
    """Return the buffers ``names`` as the module at ``path`` initializes them, without changing the module."""
    stand_in = _without_values(model.get_submodule(path))
    stand_in._buffers |= {name: torch.full_like(model.get_buffer(joined(path, name)), fill) for name in names}
    reset = getattr(stand_in, "reset_parameters", None)
    if reset is not None and not stand_in._modules:
        reset()
    else:
        # The innermost enclosing model that initializes modules (in transformers, models may contain models).
        parts = path.split(".") if path else []
        around = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)]
        owner: Any = next((one for one in around if callable(getattr(one, "_init_weights", None))), None)
        if owner is not None:
            owner._init_weights(stand_in)
    return {name: tensor for name, tensor in stand_in._buffers.items() if name in names and tensor is not None}


def _without_values(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` and its submodules on the meta device; everything except tensors is shared."""
    # copy.copy does not work, because torch gives the classes of sharded modules a constructor that returns a new object.
    copied: nn.Module = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    copied._parameters = {
        name: None if p is None else nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
        for name, p in module._parameters.items()
    }
    copied._buffers = {
        name: None if b is None else torch.empty_like(b, device="meta") for name, b in module._buffers.items()
    }
    copied._modules = {
        name: None if inner is None else _without_values(inner) for name, inner in module._modules.items()
    }
    return copied
