"""Reads weight files directly into a model: each rank reads only its shard of every tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from echelon.accelerator.models.save_objects import bare_module
from echelon.accelerator.models.weight_check import listed, shortened
from echelon.base.errors import CheckpointError, UsageError
from echelon.base.sharded import is_dtensor, is_fsdp_module
from echelon.base.warnings import warn
from echelon.checkpoint.formats.torch_files import load
from echelon.compat.constants import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from echelon.compat.variables import parse_flag_from_env
from echelon.distributed.control import raise_on_all_ranks
from echelon.engines.fsdp.meta_device import allocate_tensors
from echelon.engines.shards import local_slices

__all__ = ["init_empty_weights", "init_on_device", "load_checkpoint_and_dispatch", "load_checkpoint_in_model"]


# ---- models on the meta device -------------------------------------------------------------------------------------------


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Create the parameters of models built in the block on the meta device: with shapes, but without values.

    Args:
        include_buffers: also the buffers. False (the default, or ``ACCELERATE_INIT_INCLUDE_BUFFERS``) keeps buffers that no
            weight file stores, such as the frequencies of rotary embeddings.
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device, include_buffers: bool | None = None) -> Iterator[None]:
    """Create the parameters of models built in the block on ``device``.

    Args:
        device: target device.
        include_buffers: also the buffers; None: ``ACCELERATE_INIT_INCLUDE_BUFFERS``, else False.
    """
    device = torch.device(device)
    if include_buffers is None:
        include_buffers = parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS")

    def place(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device == device:  # a tied parameter must not be copied again
            return None
        placed = nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
        placed.__dict__.update(parameter.__dict__)
        return placed

    if include_buffers:
        with device:
            yield
        return
    handle = register_module_parameter_registration_hook(place)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


# ---- reading -------------------------------------------------------------------------------------------------------------


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
    """Read a checkpoint into ``model`` like ``load_checkpoint_in_model``, and return it.

    Arguments that distribute a model over the devices of one process (such as ``device_map``) are not supported.

    Collective: if parameters are sharded.
    """
    _refuse("load_checkpoint_and_dispatch", max_memory=max_memory, skip_keys=skip_keys, force_hooks=force_hooks)
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
    return model


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
    """Read a checkpoint into ``model``, one tensor at a time; each rank reads only its shard of sharded parameters.

    Parameters on the meta device are allocated first: on the CPU, or if sharded, on the device of the run. Buffers on the
    meta device that no file stores are recomputed by the module's ``reset_parameters`` or the model's ``_init_weights``.

    Args:
        model: prepared or not; a model on the meta device is loaded after ``prepare`` if it is sharded, else before.
        checkpoint: a folder written by ``save_pretrained`` or ``save_model``, its index, or a single weight file
            (safetensors or ``torch.save``). Every rank must be able to read it.
        device_map: like ``offload_folder``, ``offload_state_dict``, ``offload_buffers``, ``keep_in_fp32_modules`` and
            ``offload_8bit_bnb``, not supported.
        dtype: new dtype of all floating-point tensors of the model; None: keep the model's own dtype and convert the values.
            Not supported for sharded models.
        strict: raise if the file has extra weights, or lacks weights for which the model has values; False: warn.
        full_state_dict: False is not supported.
        broadcast_from_rank0: not supported.

    Collective: if parameters are sharded.

    Raises:
        UsageError: an argument is not supported, or ``dtype`` is set for sharded parameters.
        CheckpointError: the weights are missing, damaged, or belong to another model: shapes or kinds of dtypes differ, tied
            parameters have different values, or a tensor on the meta device has no value.
        DesyncError: some ranks failed; the message names them.
    """
    _refuse(
        "load_checkpoint_in_model",
        device_map=device_map,
        offload_folder=offload_folder,
        offload_state_dict=offload_state_dict,
        offload_buffers=offload_buffers,
        keep_in_fp32_modules=keep_in_fp32_modules,
        offload_8bit_bnb=offload_8bit_bnb,
        full_state_dict=not full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    bare: nn.Module = bare_module(model)
    mesh = next((p.device_mesh for p in bare.parameters() if is_dtensor(p)), None)
    if dtype is not None:
        if mesh is not None:
            raise UsageError(
                "load_checkpoint_in_model(dtype=) is not possible for a sharded model, whose optimizer already holds the parameters",
                do="remove dtype, so that values are converted, or build the model in that dtype",
            )
        bare.to(getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype)
    on_all_ranks = nullcontext() if mesh is None else raise_on_all_ranks("load_checkpoint_in_model")
    device = torch.device("cpu" if mesh is None else mesh.device_type)
    with on_all_ranks:
        _read(bare, Path(checkpoint).expanduser(), device=device, strict=strict)


def _refuse(function: str, **arguments: Any) -> None:
    given = [name for name, value in arguments.items() if value]
    if given:
        raise UsageError(
            f"{function}() does not support {', '.join(given)} in this version of echelon",
            do="remove the argument; to fit a large model, shard it: Accelerator(fsdp_plugin=)",
        )


def _read(model: nn.Module, checkpoint: Path, *, device: torch.device, strict: bool) -> None:
    for module in model.modules():
        if is_fsdp_module(module):
            module.reshard()  # ZeRO stage 2 keeps parameters unsharded after a forward pass
    stored = _stored_in(checkpoint)
    own = dict(_own_tensors(model))
    found = _fitted(model, own, stored)
    lacking = {id(tensor) for tensor in own.values()} - {id(own[name]) for name, _ in found}
    _check(model, checkpoint, own, stored, found, lacking=lacking, strict=strict)
    on_meta = [name for name, tensor in _named(model) if tensor.is_meta]
    if on_meta:
        allocate_tensors(model, on_meta, device=device)
        own = dict(_own_tensors(model))  # buffers have been replaced
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
                    f"{checkpoint} holds different values for {name} and {first}, but the model ties them",
                    do="load it into a model that does not tie them (tie_word_embeddings=False)",
                )
            del part  # release its mapping
    _compute_buffers(model, [name for name in on_meta if name not in own])


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _own_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of ``model`` that a weight file stores, each under all of its names."""
    left_out = {
        _joined(prefix, name)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    for name, tensor in _named(model):
        if name not in left_out:
            yield name, tensor


# ---- files ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A tensor in a weight file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype in safetensors: F32, BF16, I64, ..."""
    tensor: torch.Tensor | None
    """The memory-mapped tensor of a ``torch.save`` file; None for safetensors."""

    def read(self, part: tuple[slice, ...]) -> torch.Tensor:
        """Return a slice of the tensor."""
        if any(one.start >= one.stop for one in part):
            return torch.empty([max(0, one.stop - one.start) for one in part])
        if self.tensor is not None:
            return self.tensor[part]
        # The file is opened per tensor, because pages read through a mapping stay resident until it is closed.
        with _opened(self.file) as file:
            values: torch.Tensor = file.get_slice(self.name)[part] if part else file.get_tensor(self.name)
            return values


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise CheckpointError(
            f"the index names {path}, which does not exist", do="copy the complete folder, or use another one"
        ) from None
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read: {error}", do="use another copy") from error


def _stored_in(checkpoint: Path) -> dict[str, _Stored]:
    found: dict[str, _Stored] = {}
    for path in _files_of(checkpoint):
        if path.suffix == ".safetensors":
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    piece = file.get_slice(name)
                    shape = tuple(piece.get_shape())
                    found[name] = _Stored(file=path, name=name, shape=shape, dtype=piece.get_dtype(), tensor=None)
        else:
            loaded: Mapping[str, Any] = load(path, map_location="cpu", mmap=True)
            for name, value in loaded.items():
                if isinstance(value, torch.Tensor):
                    kind = _KINDS.get(value.dtype, str(value.dtype))
                    found[name] = _Stored(file=path, name=name, shape=tuple(value.shape), dtype=kind, tensor=value)
    return found


_KINDS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def _files_of(checkpoint: Path) -> list[Path]:
    """Return the weight files of a folder or an index, or the given file."""
    index = None
    if checkpoint.is_dir():
        for whole, parts in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
            if (checkpoint / whole).is_file():
                return [checkpoint / whole]
            if (checkpoint / parts).is_file():
                index = checkpoint / parts
                break
        else:
            raise CheckpointError(
                f"{checkpoint} holds neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}",
                do="pass a folder written by save_pretrained or save_model, or a weight file",
            )
    elif not checkpoint.is_file():
        raise CheckpointError(
            f"{checkpoint} does not exist",
            do="pass a local folder of weights; names on the Hugging Face Hub are not supported",
        )
    elif checkpoint.suffix == ".json":
        index = checkpoint
    else:
        return [checkpoint]
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        names = sorted(set(content.get("weight_map", content).values()))
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is not a weight index: {error}", do="use another copy") from None
    return [index.parent / name for name in names]


# ---- matching ------------------------------------------------------------------------------------------------------------


def _fitted(
    model: nn.Module, own: Mapping[str, torch.Tensor], stored: Mapping[str, _Stored]
) -> list[tuple[str, _Stored]]:
    """Return the entries of ``stored`` that the model has, under the model's names.

    Prefixes added by DDP and torch.compile are ignored, and so is the prefix by which a transformers model with a head differs
    from the base model.
    """
    by_plain = {name.replace("_orig_mod.", ""): name for name in own}
    given = {name.replace("_orig_mod.", ""): one for name, one in stored.items()}
    prefixes = ["module."]
    base = getattr(model, "base_model_prefix", None)
    if isinstance(base, str) and base:
        prefixes.append(f"{base}.")
    found = []
    for name, one in given.items():
        ways = [name, *(p + name for p in prefixes), *(name.removeprefix(p) for p in prefixes)]
        fitting = next((way for way in ways if way in by_plain), None)
        if fitting is not None:
            found.append((by_plain[fitting], one))
    return found


def _check(
    model: nn.Module,
    checkpoint: Path,
    own: Mapping[str, torch.Tensor],
    stored: Mapping[str, _Stored],
    found: list[tuple[str, _Stored]],
    *,
    lacking: set[int],
    strict: bool,
) -> None:
    kind = type(model).__name__
    wrong = [
        f"{name} is {list(one.shape)} in the file and {list(own[name].shape)} in the model"
        for name, one in found
        if one.shape != tuple(own[name].shape)
    ]
    wrong += [
        f"{name} is {one.dtype} in the file and {own[name].dtype} in the model"
        for name, one in found
        if not _converts(one.dtype, own[name].dtype)
    ]
    if wrong:
        raise CheckpointError(
            f"{checkpoint} does not match the {kind}: {shortened(wrong, '; ')}",
            do="build the model with the configuration saved with the weights; quantized weights require the library that "
            "wrote them",
        )
    first: dict[int, str] = {}
    for name, tensor in own.items():
        first.setdefault(id(tensor), name)
    missing = [name for key, name in first.items() if key in lacking]
    without = [name for name in missing if own[name].is_meta]
    if without:
        raise CheckpointError(
            f"{checkpoint} has no values for {shortened(without)} of the {kind}, which are on the meta device",
            do="pass the checkpoint of this model; to add a new part (a head), initialize it on rank zero in a model that is "
            "not on the meta device",
        )
    names = {one.name for _, one in found}
    unknown = [name for name in stored if name not in names]
    differences = listed({"missing": missing, "unexpected": unknown})
    if differences and strict:
        raise CheckpointError(
            f"{checkpoint} does not match the {kind}: {differences}",
            do="load it into the model it was saved from, or pass strict=False",
        )
    if differences:
        warn(f"{checkpoint} does not fully match the {kind}; matching weights were loaded: {differences}")


def _converts(stored: str, dtype: torch.dtype) -> bool:
    """Return whether the file's dtype can be converted to the model's, up to rounding."""
    if stored in _KINDS.values():
        return dtype in _KINDS
    return dtype not in _KINDS and not dtype.is_complex


# ---- buffers that no file stores -------------------------------------------------------------------------------------------


def _compute_buffers(model: nn.Module, names: list[str]) -> None:
    """Compute the allocated buffers ``names`` with the initializers of their modules.

    The initializer runs twice, on memory filled with zeros and with ones; equal results prove that it sets the buffer.

    Raises:
        CheckpointError: no initializer computes some of them.
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
                left.append(_joined(path, name))
    if left:
        raise CheckpointError(
            f"the buffers {shortened(left)} of the {type(model).__name__} were on the meta device, but no file stores them, and "
            "neither reset_parameters() nor _init_weights() of the model computes them",
            do="build the model with echelon.init_empty_weights(), which keeps the values of buffers",
        )


def _initialized(model: nn.Module, path: str, names: list[str], fill: int) -> dict[str, torch.Tensor]:
    """Return the buffers ``names`` as the module at ``path`` initializes them, without changing the module."""
    stand_in = _without_values(model.get_submodule(path))
    stand_in._buffers |= {name: torch.full_like(model.get_buffer(_joined(path, name)), fill) for name in names}
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
    """Return a copy of ``module`` and its submodules on the meta device; everything but tensors is shared."""
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


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
