"""Records the states of the random number generators that dropout and data augmentation would draw from."""

from __future__ import annotations

import random
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import nn

from echelon.verify.recorders.keyed_dropout import KeyedDropout
from echelon.verify.recording import Recording
from echelon.verify.trace import Rng

__all__ = ["RngStates"]


class RngStates:
    """Records the states when a training forward pass begins.

    Args:
        dropout: knows whether the pass drew masks.
    """

    def __init__(self, dropout: KeyedDropout) -> None:
        self._dropout = dropout
        self._recording: Recording | None = None
        self._begin: tuple[int, int, int, int] | None = None

    def install(self, recording: Recording) -> Callable[[], None]:
        """Register the callbacks."""
        self._recording = recording
        recording.on_training_forward(self._before)
        recording.on_forward_end(self._after)
        return lambda: None

    def _before(self, model: int, root: nn.Module, args: Any, kwargs: Any) -> None:
        self._begin = (_torch_state(), _python_state(), _numpy_state(), self._dropout.num_masks)

    def _after(self, model: int, root: nn.Module, output: Any) -> None:
        recording = self._recording
        assert recording is not None
        assert self._begin is not None
        of_torch, of_python, of_numpy, num_masks = self._begin
        has_drawn = _torch_state() != of_torch
        if has_drawn:
            recording.note(
                f"{type(root).__name__} draws random numbers in training other than those of dropout; they depend on the layout"
            )
        recording.add(
            Rng(
                update=recording.update,
                micro_step=recording.micro_step,
                torch=of_torch,
                python=of_python,
                numpy=of_numpy,
                draws_masks=has_drawn or self._dropout.num_masks > num_masks,
            )
        )


def _torch_state() -> int:
    """Return a hash of the states of torch's generators on the CPU and on the current accelerator."""
    digest = blake2b(torch.get_rng_state().numpy().data, digest_size=6)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and accelerator.type != "cpu":
        digest.update(torch.get_device_module(accelerator).get_rng_state().cpu().numpy().data)
    return int.from_bytes(digest.digest(), "little")


def _python_state() -> int:
    return hash(random.getstate()[1]) % (1 << 48)


def _numpy_state() -> int:
    state: Any = np.random.get_state(legacy=True)
    digest = blake2b(state[1].tobytes(), digest_size=6)
    digest.update(str(state[2]).encode())
    return int.from_bytes(digest.digest(), "little")
