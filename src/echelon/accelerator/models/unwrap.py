"""Unwraps a prepared model to the original module, and reads its state dict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from echelon.accelerator.compile import moved_to, uncompiled
from echelon.accelerator.models.save_objects import without_wrappers
from echelon.accelerator.session import Session
from echelon.base.protocols import HasDeviceMap
from echelon.distributed.monitored_barrier import monitored_barrier
from echelon.precision.policy import unwrap_forward

__all__ = ["get_state_dict", "is_on_several_devices", "unwrap_model"]


def unwrap_model(
    session: Session, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> nn.Module:
    """Return the original module inside a prepared one.

    Args:
        model: prepared or not.
        keep_fp32_wrapper: keep the mixed-precision forward. False: restore the model's own forward.
        keep_torch_compile: keep a compiled module compiled.
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


def get_state_dict(session: Session, model: nn.Module, unwrap: bool = True) -> dict[str, Any] | None:
    """Return a prepared model's full state dict under plain parameter names (``unwrap=False``: the wrapper's names).

    If parameters are sharded, rank zero receives the state dict in host memory, and the other ranks receive None.

    Collective: call on every rank if parameters are sharded.
    """
    if not unwrap:
        return model.state_dict()
    if session.capabilities.shards_parameters:
        monitored_barrier("get_state_dict()", advice="It returns the state on rank zero and None on the other ranks.")
    return session.engine.full_state_dict(session.objects.engine_model(model))


def is_on_several_devices(model: nn.Module) -> bool:
    """Return whether ``model`` or a submodule was loaded across several devices (transformers' ``device_map``)."""
    parts: Iterable[object] = model.modules()
    return any(isinstance(part, HasDeviceMap) and len(part.hf_device_map) > 1 for part in parts)
