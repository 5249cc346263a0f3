"""Shapes and dtypes of what stages send to each other, found without running a stage."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


class StageBoundaries:
    """Copies of all stages without values, which run under ``FakeTensorMode`` for each new shape of a micro-batch.

    Each rank does this for all stages, so that nothing is communicated, and ranks with other samples need not take part.
    """

    def __init__(self, views: Sequence[nn.Module], *, device: torch.device, dtype: torch.dtype | None) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        self._dtype = dtype
        self._views = [self._without_values(view) for view in views]
        self._found: dict[Any, list[tuple[torch.Tensor, ...]]] = {}

    def _without_values(self, view: nn.Module) -> nn.Module:
        memo: dict[int, Any] = {}
        with self._mode:
            for tensor in [*view.parameters(), *view.buffers()]:
                dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
                fake: torch.Tensor = torch.empty(tensor.shape, dtype=dtype, device=self._device)
                if isinstance(tensor, nn.Parameter):
                    fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                memo[id(tensor)] = fake
        return copy.deepcopy(view, memo)

    def find(
        self,
        inputs: tuple[torch.Tensor, ...],
        arguments: Mapping[str, Any],
        autocast: AbstractContextManager[Any],
    ) -> list[tuple[torch.Tensor, ...]]:
        """Return the inputs of each stage, then the outputs of the last one, as tensors without values.

        Args:
            inputs: the first stage's inputs for a micro-batch; only their shapes and dtypes matter.
            arguments: keyword arguments of all stages.
            autocast: context of the forward passes.
        """
        key = (
            tuple(_signature(one) for one in inputs),
            tuple((name, _signature(value)) for name, value in sorted(arguments.items())),
        )
        if key not in self._found:
            self._found[key] = self._run(inputs, arguments, autocast)
        return self._found[key]

    def _run(
        self, inputs: tuple[torch.Tensor, ...], arguments: Mapping[str, Any], autocast: AbstractContextManager[Any]
    ) -> list[tuple[torch.Tensor, ...]]:
        devices = [] if self._device.type == "cpu" else [self._device]
        with (
            torch.random.fork_rng(devices, device_type=self._device.type),
            torch.enable_grad(),
            self._mode,
            autocast,
            # Attention of a piece of a sequence has the shapes of attention within the piece, and needs no other rank.
            torch._C.DisableTorchFunction(),
        ):
            values = tuple(self._fake(one) for one in inputs)
            own = {name: self._fake(value) for name, value in arguments.items()}
            found = [values]
            for view in self._views:
                out = view(*values, **own)
                # A stage's inputs are leaves: the graph of the stage before it is on another rank.
                values = tuple(
                    one.detach().requires_grad_(one.requires_grad)
                    for one in (out if isinstance(out, tuple) else (out,))
                )
                found.append(values)
        return [tuple(_on_meta(one) for one in values) for values in found]

    def _fake(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        dtype = self._dtype if self._dtype is not None and value.is_floating_point() else value.dtype
        return torch.empty(value.shape, dtype=dtype, device=self._device)


def _on_meta(fake: torch.Tensor) -> torch.Tensor:
    real = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
    return real.requires_grad_(fake.requires_grad)


def _signature(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else repr(value)
