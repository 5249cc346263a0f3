"""Reads and loads the state dicts of models with offloaded weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext_noop as N_
from echelon.big_models.align_devices import align_module_device, has_offloaded_params
from echelon.big_models.offload_store import OffloadedWeightsLoader
from echelon.big_models.set_tensor import set_module_tensor_to_device

_logger = get_logger(__name__)


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of ``model`` on the CPU; offloaded weights are loaded module by module.

    Tensors without values are left out, and a log message names them.
    """
    found: dict[str, Any] = {}
    missing: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        device = "cpu" if has_offloaded_params(module) else None  # without weights to load, nothing is moved
        with align_module_device(module, device):
            for name, value in module.state_dict().items():
                is_of_child = name.partition(".")[0] in module._modules
                if prefix + name in found or (is_of_child and getattr(value, "is_meta", False)):
                    continue
                if getattr(value, "is_meta", False):
                    missing.add(prefix + name)
                else:
                    found[prefix + name] = value.to("cpu") if isinstance(value, torch.Tensor) else value
    if without := sorted(missing - set(found)):
        _logger.warning(N_("%s are not in the state dict, because they are on the meta device"), ", ".join(without))
    order = {name: at for at, name in enumerate(model.state_dict())}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: MutableMapping[str, Any],
    device_to_put_offload: int | str | torch.device = "cpu",
) -> MutableMapping[str, Any]:
    """Replace the entries of ``module`` in ``state_dict`` with its current values, and return ``state_dict``.

    Args:
        module: a module that may be offloaded.
        module_name: full name of one of the module's tensors.
        state_dict: changed in place.
    """
    path = module_name.rpartition(".")[0]
    with align_module_device(module, device_to_put_offload if has_offloaded_params(module) else None):
        for name, value in module.state_dict().items():
            if f"{path}.{name}" in state_dict:
                state_dict[f"{path}.{name}"] = value
    return state_dict


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Load the weights in ``index`` from ``offload_folder`` into ``model``, on the CPU."""
    weights = OffloadedWeightsLoader(index=dict(index or {}), save_folder=offload_folder)
    for name in weights:
        if name.endswith("SCB"):  # the scales of an 8-bit weight
            continue
        scales = weights.get(name.replace("weight", "SCB")) if "weight" in name else None
        value = weights[name].clone()  # it no longer depends on the file
        set_module_tensor_to_device(model, name, "cpu", value=value, fp16_statistics=scales)
