"""Saves and restores the states of all random number generators that training code uses."""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from echelon.base.warnings import warn
from echelon.world.world import World

__all__ = ["RandomStates", "current_random_states", "restore_random_states"]

_RANDOM: Any = np.random  # numpy's stubs lack get_bit_generator
_MT19937 = ctypes.c_char * (625 * 4)  # 624 numbers and the position in them: numpy's ``mt19937_state``


def current_random_states() -> dict[str, Any]:
    """Return the RNG states of ``random``, numpy, torch and the accelerators under Accelerate's keys."""
    return RandomStates().now()


class RandomStates:
    """Computes ``current_random_states`` at every step and caches its slow parts.

    numpy and ``random`` copy the 624 numbers of their generators one by one (50 us and 10 us, longer than everything
    else). This class compares them in place and copies them only if they have changed. The second value of a Gaussian
    pair is stored elsewhere, so while such a value is stored, the numbers are always copied. (One case is missed: the
    program uses that value and, after an update has started, restores the earlier state and draws nothing else before
    the next update.)
    """

    def __init__(self) -> None:
        self._kind = World.current().device.type
        self._generator: Any = None
        self._memory: Any = None  # state memory of the generator
        self._numbers = b""
        self._numpy: Any = None
        self._python_memory = _memory_of_random()
        self._python_numbers = b""
        self._python: Any = None

    def now(self) -> dict[str, Any]:
        """Return the current states."""
        states = {
            "random_state": self._python_state(),
            "numpy_random_seed": self._numpy_state(),
            "torch_manual_seed": torch.get_rng_state(),
        }
        return states if self._kind == "cpu" else states | _device_states(self._kind)

    def _python_state(self) -> Any:
        if self._python_memory is None:
            return random.getstate()
        numbers = self._python_memory.raw
        if numbers != self._python_numbers or self._python[2] is not None:
            self._python_numbers, self._python = numbers, random.getstate()
        return self._python

    def _numpy_state(self) -> Any:
        generator = _RANDOM.get_bit_generator()
        if generator is not self._generator:
            self._watch(generator)
        if self._memory is None:
            return np.random.get_state(legacy=False)
        numbers = self._memory.raw
        if numbers != self._numbers or self._numpy[3]:
            self._numbers, self._numpy = numbers, np.random.get_state()
        return self._numpy

    def _watch(self, generator: Any) -> None:
        is_numpys = isinstance(generator, np.random.MT19937)  # else a custom one
        self._generator, self._numbers = generator, b""
        self._memory = _MT19937.from_address(generator.ctypes.state_address) if is_numpys else None


def _memory_of_random() -> Any:
    """Return the state memory of ``random``'s generator: in CPython, an index and 624 numbers after the object's header.

    None if the memory does not contain the state that ``random.getstate()`` returns.
    """
    owner = getattr(random.getstate, "__self__", None)
    header = object.__basicsize__
    if type(owner) is not random.Random or getattr(random.Random.__base__, "__basicsize__", 0) < header + ctypes.sizeof(
        _MT19937
    ):
        return None
    memory = _MT19937.from_address(id(owner) + header)
    *numbers, index = random.getstate()[1]
    return memory if memory.raw == struct.pack("=i624I", index, *numbers) else None


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
        warn(f"the checkpoint has no RNG state for {device}, which keeps its current one")
        return
    torch.get_device_module(device.type).set_rng_state(saved[own].cpu())  # of the current device: this rank's own


def _device_key(kind: str) -> str:
    return f"torch_{kind}_manual_seed"
