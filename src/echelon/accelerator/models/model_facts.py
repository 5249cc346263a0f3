"""Properties of models, weight files and precision, under Accelerate's names."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from echelon.accelerator.models.save_objects import extract_model_from_parallel
from echelon.accelerator.plugins.kwargs_handlers import AutocastKwargs
from echelon.base.optional import is_available
from echelon.base.sharded import is_dtensor
from echelon.big_models.set_tensor import as_device
from echelon.big_models.tied_parameters import device_of
from echelon.checkpoint.damage import damaged
from echelon.checkpoint.formats.weight_files import read_weights
from echelon.compat.enums import DistributedType
from echelon.config.sources import current
from echelon.precision.policy import PrecisionPolicy
from echelon.world.world import World


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return all submodules, children before parents; with ``return_fqns``, as (name, module) pairs."""
    stack, ordered = [("", model)], []
    while stack:
        prefix, module = stack.pop()
        ordered.append((prefix, module))
        stack += [(f"{prefix}.{name}" if prefix else name, child) for name, child in module.named_children()]
    return [item if return_fqns else item[1] for item in reversed(ordered)]


def model_has_dtensor(model: nn.Module) -> bool:
    """Return whether ``model`` has a ``DTensor`` parameter."""
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


def load_state_dict(checkpoint_file: str, device_map: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read a weight file in safetensors or torch format without running code from it.

    Args:
        checkpoint_file: a ``.safetensors`` file, or a file written by ``torch.save``.
        device_map: device by module name, for safetensors; weights from other files or mapped to the disk stay on the
            CPU.

    Raises:
        CheckpointError: the file is damaged, or contains code.
    """
    path = Path(checkpoint_file)
    if device_map is None or path.suffix != ".safetensors":
        return read_weights(path)
    found: dict[str, Any] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                covered = "" in device_map or any(name == at or name.startswith(f"{at}.") for at in device_map)
                place = device_of(name, device_map) if covered else "cpu"
                found[name] = file.get_tensor(name).to("cpu" if place == "disk" else as_device(place))
    except SafetensorError as error:
        raise damaged(f"{path} cannot be read: {error}") from error
    return found


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a gradient scaler for this process's device."""
    return torch.amp.GradScaler(World.current(cpu=current().value.cpu).device.type, **kwargs)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return an autocast context with the precision set in the environment or launcher; a no-op without ``native_amp``."""
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
