"""The ``dp`` engine, for older scripts, which uses torch's DataParallel to copy the model to several devices in each step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel.scatter_gather import scatter
from torch.optim import Optimizer

from echelon.base.capabilities import Capabilities
from echelon.base.device import devices_from
from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.distributed.tree import contents, map_tensors, rebuild_like
from echelon.engines.base import Engine, Prepared
from echelon.engines.bitwise.tree_sum import ShardedUpdate
from echelon.engines.delegating_engine import DelegatingEngine
from echelon.engines.output_hooks import output_tensors, replace_output_tensors
from echelon.engines.single import SingleEngine
from echelon.precision.policy import rebind_forward
from echelon.world.world import World

_CAPABILITIES = Capabilities(name="dp", replicates=False)


class DPEngine(DelegatingEngine):
    """Trains on several devices in one process. Each forward pass copies the model to all devices and splits the batch.

    If the model returns its loss, it returns one value per device. ``Accelerator.backward`` averages these values with equal
    weights, even if a device received fewer samples.

    Raises:
        UsageError: the run has more than one process.

    Source: torch.nn.DataParallel; docs/data_parallel.md.
    """

    def __init__(self, world: World, *, scaler: torch.amp.GradScaler | None = None) -> None:
        if world.world_size > 1:
            raise UsageError(
                _(
                    "the dp engine uses all devices from a single process, but there are {world_size} processes",
                    world_size=world.world_size,
                ),
                where="engine='dp'",
                do=_("remove engine='dp' (ddp, the default for multiple processes, is faster), or start one process"),
            )
        super().__init__(SingleEngine(world, scaler=scaler))
        self._devices = devices_from(world.device)
        self._warned = False

    @classmethod
    def from_options(cls, world: World, *, scaler: torch.amp.GradScaler | None, options: Mapping[str, Any]) -> DPEngine:
        return cls(world, scaler=scaler)

    @property
    def capabilities(self) -> Capabilities:
        return replace(_CAPABILITIES, num_devices=max(1, len(self._devices)))

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
    ) -> Prepared:
        """Wrap each model that is not already wrapped, unless there are fewer than two devices."""
        if models and not self._warned:
            self._warned = True
            self._warn()
        return super().prepare([self._wrap(model) for model in models], optimizers, schedulers)

    def _wrap(self, model: nn.Module) -> nn.Module:
        if len(self._devices) < 2 or isinstance(model, nn.DataParallel):
            return model
        return _DataParallel(model, device_ids=self._devices)

    def _warn(self) -> None:
        count, script = len(self._devices), Path(sys.argv[0]).name or "script.py"
        if count < 2:
            warn(
                _(
                    "the dp engine splits each batch across a process's accelerators, but this process has {count}, so "
                    "it trains like the single engine.",
                    count=count,
                )
            )
            return
        warn(
            _(
                "the dp engine copies the model to {count} devices in each step, runs them in threads "
                "that share Python's interpreter lock, uses more time and memory on the first device, "
                "and is limited to one machine. The ddp engine with one process per device (echelon "
                "launch --num_processes {count} {script}) is faster and avoids these problems; see "
                "docs/data_parallel.md. To use one device, set engine='single'. A model that returns its "
                "loss returns one value per device, and the mean of these values is backpropagated, "
                "regardless of the number of samples on each device.",
                count=count,
                script=script,
            )
        )

    def build_sharded_update(
        self, num_shards: int, parameters: Callable[[], Sequence[torch.Tensor]], *, num_chunks: int = 1
    ) -> ShardedUpdate:
        # dp does not support it, although ``inner`` does
        return Engine.build_sharded_update(self, num_shards, parameters)

    def full_state_dict(self, model: nn.Module) -> dict[str, Any] | None:
        return super().full_state_dict(self.unwrap(model))

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's module, even if the script itself wrapped it."""
        while isinstance(model, nn.DataParallel):
            model = model.module
        return model


@dataclass(frozen=True, slots=True)
class _Scalar:
    """A 0-d tensor, which is copied to every device."""

    value: torch.Tensor


def _on_device(data: Any, index: int) -> Any:
    """Return ``data`` with each scalar as a tensor on device ``index``. CPU scalars stay on the CPU."""
    if isinstance(data, _Scalar):
        kind = data.value.device.type
        return data.value if kind == "cpu" else data.value.to(torch.device(kind, index))
    held = contents(data)
    if held is None:
        return data
    if isinstance(held, dict):
        items: Any = {key: _on_device(value, index) for key, value in held.items()}
        return data if all(items[key] is value for key, value in held.items()) else rebuild_like(data, items)
    items = [_on_device(value, index) for value in held]
    return data if all(new is old for new, old in zip(items, held)) else rebuild_like(data, items)


class _DataParallel(nn.DataParallel[nn.Module]):
    """torch's DataParallel with support for short batches, mixed-precision forward passes and any output type."""

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]) -> Any:
        """Split positional and keyword arguments together.

        torch splits them separately. If a batch has fewer samples than there are devices, ``model(x, flag=True)`` then calls
        the remaining devices with the flag but without ``x`` (torch 2.7 to 2.13;
        test_a_batch_may_be_shorter_than_the_devices).
        """
        if not inputs and not kwargs:
            return (), ()
        numbers = map_tensors(lambda one: one if one.dim() else _Scalar(one), (inputs, kwargs or {}))
        parts = [_on_device(part, i) for part, i in zip(scatter(numbers, device_ids, self.dim), device_ids)]
        return tuple(part[0] for part in parts), tuple(part[1] for part in parts)

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[nn.Module]:
        """Copy ``module`` to each device, and bind a wrapped ``forward`` to the copy instead of the original."""
        copies = super().replicate(module, device_ids)
        for copy in copies:
            rebind_forward(copy, original=module)
        return copies

    def gather(self, outputs: Sequence[Any], output_device: Any) -> Any:
        """Gather the outputs' tensors. The container type and all other values are taken from the first output.

        torch's version rebuilds containers by calling their classes, and treats any other object as a container.
        """
        # One scalar per device becomes a vector. torch does the same with a warning.
        parts = [tuple(one if one.dim() else one.unsqueeze(0) for one in output_tensors(output)) for output in outputs]
        return replace_output_tensors(outputs[0], super().gather(parts, output_device))
