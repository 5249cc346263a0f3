"""Applies what ``speed`` chooses (config/speed_choices.py) to models and optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.accelerator.session import Session
from echelon.base.device import has_bf16
from echelon.base.logging import get_logger
from echelon.base.sharded import is_dtensor

_logger = get_logger(__name__)

# Their foreach steps run the same operations on each element in the same order as their loops over parameters. (NAdam's do not.)
_BIT_EQUAL = frozenset({"SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adamax", "Adadelta"})
_FUSED = frozenset({"SGD", "Adam", "AdamW", "Adagrad"})
# With fewer or larger parameters, foreach is slower: each of its operations passes over all parameters, which then leave the cache.
_FEWEST, _MOST_BYTES = 8, 4 << 20


def choose_memory_format(session: Session, model: nn.Module) -> None:
    """Store the convolutions' weights channels last if that is faster. The parameters remain the same objects."""
    if session.config.value.speed != "max" or not _prefers_channels_last(session):
        return
    if session.engine.capabilities.shards_parameters or any(p.is_meta for p in model.parameters()):
        return
    if any(isinstance(module, nn.Conv2d) for module in model.modules()):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        _logger.info("speed='max': %s stores its convolutions channels last", type(model).__name__)


def _prefers_channels_last(session: Session) -> bool:
    """Return whether this device convolves faster with channels last: a CPU does in bf16, and also pools faster, but not in fp32."""
    kind = session.world.device.type
    return kind == "cuda" or (kind == "cpu" and session.config.value.mixed_precision == "bf16" and has_bf16(cpu=True))


def choose_kernels(session: Session, optimizer: Optimizer) -> None:
    """Make torch's own ``optimizer`` step by faster kernels, if the script has chosen none.

    Its saved state says what the script has set, so that a checkpoint does not depend on ``speed``.
    """
    speed, kind = session.config.value.speed, type(optimizer)
    if speed == "off" or kind.__module__ != f"torch.optim.{kind.__name__.lower()}":
        return
    if any(map(_is_chosen, optimizer.param_groups)):
        return
    # With bitwise parity, shards of a parameter would be rounded differently at the ends of the fused kernel's vectors.
    is_fused = (
        speed == "max" and kind.__name__ in _FUSED and session.parity != "bitwise" and _can_fuse(session, optimizer)
    )
    if not is_fused and not (kind.__name__ in _BIT_EQUAL and _are_small(optimizer)):
        return
    chosen = {"fused": True} if is_fused else {"foreach": True}
    _set(optimizer.param_groups, chosen)
    optimizer.register_state_dict_post_hook(partial(_hide, chosen))
    optimizer.register_load_state_dict_pre_hook(partial(_choose, chosen))
    _logger.info("speed=%r: %s steps with %s=True", speed, kind.__name__, *chosen)


def _is_chosen(group: Mapping[str, Any]) -> bool:
    """Return whether the script has chosen the kernels of ``group``, or only some work with its settings."""
    flags = (
        group.get("foreach"),
        group.get("fused"),
        group.get("differentiable") or None,
        group.get("capturable") or None,
    )
    return any(flag is not None for flag in flags) or isinstance(group["lr"], torch.Tensor)


def _set(groups: Any, flags: Mapping[str, Any]) -> None:
    for group in groups:
        group.update({name: value for name, value in flags.items() if group.get(name) is None})


def _hide(flags: Mapping[str, Any], optimizer: Optimizer, state_dict: Any) -> None:
    """Remove the chosen ``flags`` from a state dict."""
    for group in state_dict["param_groups"]:  # copies of the optimizer's groups
        group.update(dict.fromkeys(flags))


def _choose(flags: Mapping[str, Any], optimizer: Optimizer, state_dict: Any) -> Any:
    """Add ``flags`` to a state dict before it is loaded, so that its state goes to the devices that they need."""
    groups = [dict(group) for group in state_dict["param_groups"]]
    _set(groups, flags)
    return {**state_dict, "param_groups": groups}


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _are_small(optimizer: Optimizer) -> bool:
    found = _parameters(optimizer)
    plain = all(
        p.device.type == "cpu" and p.dtype in (torch.float32, torch.float64) and not is_dtensor(p) for p in found
    )
    return plain and len(found) >= _FEWEST and sum(p.numel() * p.element_size() for p in found) <= _MOST_BYTES


def _can_fuse(session: Session, optimizer: Optimizer) -> bool:
    return session.update.scaler is None and all(
        p.device.type in ("cpu", "cuda") and p.is_floating_point() and (p.device.type == "cuda" or not is_dtensor(p))
        for p in _parameters(optimizer)
    )
