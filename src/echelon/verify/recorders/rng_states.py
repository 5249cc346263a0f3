"""Records the states of the random number generators that dropout would draw from."""

from __future__ import annotations

from typing import Any

import torch
import xxhash
from torch import nn

from echelon.verify.recorders.keyed_dropout import KeyedDropout
from echelon.verify.recording import Recording
from echelon.verify.trace import Rng


class RngStates:
    """Records the states when a training forward pass begins.

    Recorded runs draw no mask from torch's generator. One number is drawn from it in each update that has masks, so that it is in the
    same state again only if the script has set it back; on each layout it is one number, however many samples a rank has.

    Args:
        dropout: knows whether the pass drew masks.
    """

    def __init__(self, dropout: KeyedDropout) -> None:
        self._dropout = dropout
        self._recording: Recording
        self._begin = (0, 0)
        self._advanced_in: int | None = None

    def install(self, recording: Recording) -> None:
        """Register the callbacks."""
        self._recording = recording
        recording.on_training_forward.append(self._before)
        recording.on_forward_end.append(self._after)

    def _before(self, model: int, root: nn.Module, args: Any, kwargs: Any) -> None:
        self._begin = (_torch_state(), self._dropout.num_masks)

    def _after(self, model: int, root: nn.Module, output: Any) -> None:
        recording = self._recording
        of_torch, num_masks = self._begin
        has_drawn = _torch_state() != of_torch
        if has_drawn:
            recording.note(
                f"{type(root).__name__} draws random numbers in training other than those of dropout; they depend on the layout"
            )
        draws_masks = has_drawn or self._dropout.num_masks > num_masks
        if draws_masks and self._advanced_in != recording.update:
            self._advanced_in = recording.update
            if not has_drawn:
                torch.empty((), dtype=torch.int64).random_()
        recording.add(
            Rng(
                update=recording.update,
                micro_step=recording.micro_step,
                torch=of_torch,
                draws_masks=draws_masks,
            )
        )


def _torch_state() -> int:
    """Return a hash of the states of torch's generators on the CPU and on the current accelerator."""
    state = _hash(torch.get_rng_state().numpy().data)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and accelerator.type != "cpu":
        state ^= _hash(torch.get_device_module(accelerator).get_rng_state().cpu().numpy().data, seed=1)
    return state


def _hash(data: Any, *, seed: int = 0) -> int:
    return xxhash.xxh3_64_intdigest(data, seed) >> 16
