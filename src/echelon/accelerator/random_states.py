"""The states of every random number generator that training code uses."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from echelon.base.warnings import warn
from echelon.world.world import World

__all__ = ["current_random_states", "restore_random_states"]


def current_random_states() -> dict[str, Any]:
    """Return the states of ``random``, numpy, torch and the accelerators, under Accelerate's keys."""
    states = {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    kind = World.current().device.type
    if kind != "cpu":
        module: Any = torch.get_device_module(kind)
        # mps has one device, and no function for all.
        states[_device_key(kind)] = (
            module.get_rng_state_all() if hasattr(module, "get_rng_state_all") else [module.get_rng_state()]
        )
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Go on with random numbers from ``states``; those of an accelerator that it does not have stay, with a warning."""
    random.setstate(states["random_state"])
    np.random.set_state(states["numpy_random_seed"])
    torch.set_rng_state(states["torch_manual_seed"].cpu())
    device = World.current().device
    if device.type == "cpu":
        return
    own = device.index or 0
    saved = states.get(_device_key(device.type), [])
    if own >= len(saved):
        warn(f"the checkpoint has no random state of {device}: its numbers go on from where they are")
        return
    torch.get_device_module(device.type).set_rng_state(saved[own].cpu())  # of the current device: this rank's own


def _device_key(kind: str) -> str:
    return f"torch_{kind}_manual_seed"
