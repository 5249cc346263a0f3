"""Saves and restores the states of all random number generators that training code uses."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.world.world import World

_RANDOM: Any = np.random  # numpy's stubs lack get_bit_generator


def current_random_states(device_type: str | None = None) -> dict[str, Any]:
    """Return the RNG states of ``random``, numpy, torch and the accelerators under Accelerate's keys.

    Args:
        device_type: the type of this process's device; without it, it is looked up in the environment.
    """
    is_numpys = isinstance(_RANDOM.get_bit_generator(), np.random.MT19937)  # else a custom one
    states = {
        "random_state": random.getstate(),
        "numpy_random_seed": _RANDOM.get_state(legacy=is_numpys),
        "torch_manual_seed": torch.get_rng_state(),
    }
    kind = device_type or World.current().device.type
    return states if kind == "cpu" else states | _device_states(kind)


def _device_states(kind: str) -> dict[str, Any]:
    module: Any = torch.get_device_module(kind)
    # mps has a single device and no function for all devices.
    states = module.get_rng_state_all() if hasattr(module, "get_rng_state_all") else [module.get_rng_state()]
    return {_device_key(kind): states}


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Restore ``states``; an accelerator without a saved state keeps its current one, with a warning."""
    random.setstate(states["random_state"])
    np.random.set_state(states["numpy_random_seed"])
    torch.set_rng_state(states["torch_manual_seed"].cpu())
    device = World.current().device
    if device.type == "cpu":
        return
    own = device.index or 0
    saved = states.get(_device_key(device.type), [])
    if own >= len(saved):
        warn(_("the checkpoint has no RNG state for {device}, which keeps its current one", device=device))
        return
    torch.get_device_module(device.type).set_rng_state(saved[own].cpu())  # of the current device: this rank's own


def _device_key(kind: str) -> str:
    return f"torch_{kind}_manual_seed"
