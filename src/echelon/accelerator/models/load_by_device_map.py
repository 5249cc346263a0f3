"""Loads weight files according to a device map: to devices, the CPU, or a folder of offloaded weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.accelerator.models.computed_buffers import compute_buffers
from echelon.accelerator.models.weight_sources import (
    FileTensor,
    check_fit,
    fitted_to,
    named_tensors,
    own_tensors,
    stored_in,
)
from echelon.base.errors import CheckpointError, UsageError
from echelon.big_models.module_sizes import as_dtype
from echelon.big_models.offload_store import OffloadFolder, UnreadTensor
from echelon.big_models.set_tensor import set_module_tensor_to_device
from echelon.big_models.tied_parameters import (
    check_tied_parameters_on_same_device,
    device_of,
    find_tied_parameters,
    retie_parameters,
)

__all__ = ["load_by_device_map"]


def load_by_device_map(
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
    stored = stored_in(checkpoint)
    own = dict(own_tensors(model))
    found = fitted_to(model, own, stored)
    lacking = {id(tensor) for tensor in own.values()} - {id(own[name]) for name, _ in found}
    check_fit(model, checkpoint, own, stored, found, lacking=lacking, strict=strict)
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
            _check_equal(checkpoint, name, weight, first, source)
            if place == "disk":
                aliases[name] = first
        elif place == "disk":
            to_disk[name] = _unread(weight, kind)
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
    compute_buffers(model, uncomputed)


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


def _unread(weight: FileTensor, dtype: torch.dtype) -> UnreadTensor:
    return UnreadTensor(dtype=dtype, shape=weight.shape, read=lambda: weight.read(()))


def _check_equal(checkpoint: Path, name: str, weight: FileTensor, first: str, source: FileTensor) -> None:
    if weight is not source and not torch.equal(weight.read(()), source.read(())):
        raise CheckpointError(
            f"{checkpoint} contains different values for {name} and {first}, but the model ties them",
            do="load the checkpoint into a model without tied weights (tie_word_embeddings=False)",
        )
