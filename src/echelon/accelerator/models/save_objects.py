"""Accelerate's ``save``, and functions that remove wrappers from models and read their state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.accelerator.compile import is_compiled_module, moved_to, uncompiled
from echelon.base.messages.translation import gettext as _
from echelon.base.protocols import HasDeviceMap
from echelon.base.sharded import is_old_fsdp
from echelon.base.warnings import warn
from echelon.checkpoint.formats.weight_files import aliases_in, contiguous_copy, write_tensors
from echelon.distributed.monitored_barrier import monitored_barrier
from echelon.precision.policy import unwrap_forward
from echelon.world.world import World

if TYPE_CHECKING:
    from echelon.accelerator.session import Session

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write ``obj`` to ``f`` on rank zero, or on one rank per machine.

    Args:
        obj: a dict of tensors with ``safe_serialization``, else anything that ``torch.save`` accepts.
        f: path or, without ``safe_serialization``, an open file.
        save_on_each_node: write on each machine, for use without a shared file system.
        safe_serialization: use the safetensors format; if tensors share memory, only the first is written.

    Raises:
        UsageError: ``safe_serialization`` is set, but ``obj`` is not a dict of tensors.
    """
    world = World.current()
    if not (world.is_local_rank_zero if save_on_each_node else world.is_rank_zero):
        return
    if not safe_serialization:
        torch.save(obj, f)
        return
    write_tensors(obj, f)
    _warn_of_aliases(aliases_in(obj))


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state_dict`` as safetensors requires it: contiguous, and each tensor only under its first name."""
    aliases = aliases_in(state_dict)
    _warn_of_aliases(aliases)
    return {name: contiguous_copy(value) for name, value in state_dict.items() if name not in aliases}


def _warn_of_aliases(aliases: Mapping[str, str]) -> None:
    if aliases:
        warn(
            _(
                "{aliases} share memory with other tensors and are not written; a model that ties them restores the "
                "same weights",
                aliases=", ".join(aliases),
            )
        )


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return an identifier of the memory used by ``tensor``: device, address, size in bytes."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Remove DDP, DataParallel and FSDP wrappers from ``model``.

    Args:
        model: prepared or not.
        keep_fp32_wrapper: keep the mixed-precision forward; False: restore the model's own forward.
        keep_torch_compile: keep the compiled module, which then wraps the unwrapped model.
        recursive: also unwrap submodules that have a ``module`` attribute.
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


def unwrap_model(
    session: Session, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> nn.Module:
    """Return the original module inside a prepared one.

    Args:
        model: prepared or not.
        keep_fp32_wrapper: keep the mixed-precision forward. False: restore the model's own forward.
        keep_torch_compile: keep a compiled module compiled.

    Examples:
        >>> accelerator.unwrap_model(model)
        Linear(in_features=4, out_features=2, bias=True)
    """
    objects = session.objects
    inner: nn.Module = without_wrappers(session.engine.unwrap(objects.engine_model(model)))
    bare = uncompiled(without_wrappers(uncompiled(inner)))
    if not keep_fp32_wrapper:
        unwrap_forward(inner)
        unwrap_forward(bare)
    if not keep_torch_compile:
        return bare
    if not objects.is_compiled_whole(model):
        if (wrapped := uncompiled(inner)) is not inner and without_wrappers(wrapped) is not wrapped:
            return moved_to(without_wrappers(wrapped), inner)  # compiled around a wrapper, but not by prepare
        return inner
    return model if uncompiled(model) is inner else moved_to(inner, model)


def get_state_dict(
    session: Session, model: nn.Module, unwrap: bool = True, *, master_weights: bool = False
) -> dict[str, Any] | None:
    """Return a prepared model's full state dict under plain parameter names (``unwrap=False``: the wrapper's names).

    Weights that were loaded in low precision and are trained in float32 have the dtype in which they were loaded; with
    ``master_weights=True``, they are float32.

    If parameters are sharded, rank zero receives the state dict in host memory, and the other ranks receive None.

    Collective: call on every rank if parameters are sharded.

    Examples:
        >>> weights = accelerator.get_state_dict(model)
        >>> accelerator.save(weights, "model.safetensors", safe_serialization=True)
    """
    masters = session.masters
    if not unwrap:
        state = model.state_dict()
        return state if master_weights else masters.as_loaded(state, model)
    if session.capabilities.shards_parameters:
        monitored_barrier("get_state_dict()", advice="It returns the state on rank zero and None on the other ranks.")
    found = session.engine.full_state_dict(session.objects.engine_model(model))
    return found if found is None or master_weights else masters.as_loaded(found, bare_module(model))


def is_on_several_devices(model: nn.Module) -> bool:
    """Return whether ``model`` or a submodule was loaded across several devices (transformers' ``device_map``)."""
    parts: Iterable[object] = model.modules()
    return any(isinstance(part, HasDeviceMap) and len(part.hf_device_map) > 1 for part in parts)


def offloaded_state(model: nn.Module) -> dict[str, Any] | None:
    """Return the state dict of a model with offloaded weights (``dispatch_model``); None if no weights are offloaded."""
    if not any("_hf_hook" in vars(module) for module in model.modules()):
        return None
    from echelon.big_models import align_devices, offloaded_state as states  # noqa: PLC0415 - most programs never need it

    if not any(align_devices.has_offloaded_params(module) for module in model.modules()):
        return None
    return states.get_state_dict_offloaded_model(bare_module(model))


def bare_module(model: nn.Module) -> Any:
    """Return the user's module without DDP, DataParallel, FSDP and ``torch.compile`` wrappers."""
    bare = extract_model_from_parallel(model, keep_torch_compile=False)
    while is_compiled_module(bare):
        bare = bare._orig_mod
    return bare


def without_wrappers(model: Any) -> Any:
    """Remove DDP, DataParallel and FSDP1 wrappers from a model, whoever added them."""
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
