"""Reads weight files directly into a model: each rank reads only its shard of every tensor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.accelerator.models.computed_buffers import compute_buffers
from echelon.accelerator.models.load_by_device_map import load_by_device_map
from echelon.accelerator.models.save_objects import bare_module
from echelon.accelerator.models.weight_sources import check_fit, fitted_to, named_tensors, own_tensors, stored_in
from echelon.base.errors import CheckpointError, UsageError
from echelon.base.sharded import is_dtensor, is_fsdp_module
from echelon.big_models.device_map import infer_auto_device_map
from echelon.big_models.device_memory import get_balanced_memory
from echelon.big_models.dispatch import dispatch_model
from echelon.big_models.module_sizes import as_dtype
from echelon.distributed.control import raise_on_all_ranks
from echelon.engines.fsdp.meta_device import allocate_tensors
from echelon.engines.shards import local_slices

__all__ = ["load_checkpoint_and_dispatch", "load_checkpoint_in_model"]

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
        load_by_device_map(
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
    stored = stored_in(checkpoint)
    own = dict(own_tensors(model))
    found = fitted_to(model, own, stored)
    lacking = {id(tensor) for tensor in own.values()} - {id(own[name]) for name, _ in found}
    check_fit(model, checkpoint, own, stored, found, lacking=lacking, strict=strict)
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
                raise CheckpointError(
                    f"{checkpoint} contains different values for {name} and {first}, but the model ties them",
                    do="load the checkpoint into a model without tied weights (tie_word_embeddings=False)",
                )
            del part  # release its mapping
    compute_buffers(model, [name for name in on_meta if name not in own])
