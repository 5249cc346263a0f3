"""The engine of old scripts: torch's DataParallel, which copies the model to several devices in each step."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
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
from echelon.base.warnings import warn
from echelon.distributed.tree import contents, map_tensors, rebuild_like
from echelon.engines.base import Engine, Prepared
from echelon.engines.output_hooks import tensors_of, with_tensors
from echelon.engines.single import SingleEngine
from echelon.precision.policy import rebind_forward
from echelon.world.world import World

__all__ = ["DPEngine"]

_CAPABILITIES = Capabilities(name="dp", replicates=False)


class DPEngine(Engine):
    """One process, several devices: each forward pass copies the model to all of them and splits the batch.

    A model that returns its loss gives one for each device. ``Accelerator.backward`` averages these: each device counts
    the same, also one that got fewer samples.

    Raises:
        UsageError: there are several processes.

    Source: torch.nn.DataParallel; docs/data_parallel.md.
    """

    def __init__(self, world: World, *, scaler: torch.amp.GradScaler | None = None) -> None:
        if world.world_size > 1:
            raise UsageError(
                f"the engine dp spreads a model over the devices of one process, and there are {world.world_size} processes",
                where="engine='dp'",
                do="leave the engine out (several processes run ddp, which is faster), or start one process",
            )
        self._world = world
        self._single = SingleEngine(world, scaler=scaler)
        self._devices = devices_from(world.device)
        self._told = False

    @classmethod
    def from_options(cls, world: World, *, scaler: torch.amp.GradScaler | None, options: Mapping[str, Any]) -> DPEngine:
        """See ``Engine``."""
        return cls(world, scaler=scaler)

    @property
    def capabilities(self) -> Capabilities:
        """See ``Engine``."""
        return replace(_CAPABILITIES, num_devices=max(1, len(self._devices)))

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """No axis: the one rank reads everything, and splits it in the forward pass."""
        return ()

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
    ) -> Prepared:
        """Wrap each model, unless it is wrapped already; with fewer than two devices nothing is."""
        if models and not self._told:
            self._told = True
            self._tell()
        wrapped = tuple(self._wrap(model) for model in models)
        return Prepared(models=wrapped, optimizers=tuple(optimizers), schedulers=tuple(schedulers))

    def _wrap(self, model: nn.Module) -> nn.Module:
        if len(self._devices) < 2 or isinstance(model, nn.DataParallel):
            return model
        return _Copies(model, device_ids=self._devices)

    def _tell(self) -> None:
        count, script = len(self._devices), Path(sys.argv[0]).name or "script.py"
        if count < 2:
            warn(
                f"the engine dp splits batches over the accelerators of one process, and this one has {count}: it trains as "
                "with the engine single."
            )
            return
        warn(
            f"the engine dp copies the model to {count} devices in each step, runs them as threads that wait for each other "
            "in Python, gives the first device more to do and to hold, and ends with this machine. One process for each "
            f"device (echelon launch --num_processes {count} {script}, engine ddp) has none of that, and is faster: "
            "docs/data_parallel.md; engine='single' uses one device. A model that returns its loss returns one for each device: their mean is "
            "backpropagated, whatever the number of samples of each."
        )

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """As single."""
        return self._single.no_sync(model)

    def sync_next_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """As single."""
        return self._single.sync_next_backward(model)

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """As single."""
        return self._single.join(models)

    def backward(self, loss: torch.Tensor, model: nn.Module | None = None, **options: Any) -> None:
        """As single."""
        self._single.backward(loss, model, **options)

    def backward_zeros(self, loss: torch.Tensor, parameters: Iterable[torch.Tensor], **options: Any) -> None:
        """As single."""
        self._single.backward_zeros(loss, parameters, **options)

    def step(self, optimizer: Optimizer, *, closure: Any = None, unsynced: bool = False) -> bool:
        """As single."""
        return self._single.step(optimizer, closure=closure, unsynced=unsynced)

    def settle(self) -> None:
        """As single."""
        self._single.settle()

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """As single."""
        self._single.zero_grad(optimizer, set_to_none=set_to_none)

    def unscale(self, optimizer: Optimizer, *, unsynced: bool = False) -> None:
        """As single."""
        self._single.unscale(optimizer, unsynced=unsynced)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, *, unsynced: bool = False
    ) -> torch.Tensor:
        """As single."""
        return self._single.clip_grad_norm(parameters, max_norm, norm_type, unsynced=unsynced)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float, *, unsynced: bool = False) -> None:
        """As single."""
        self._single.clip_grad_value(parameters, clip_value, unsynced=unsynced)

    def finish_gradients(self, model: nn.Module, factor: float) -> None:
        """As single."""
        self._single.finish_gradients(model, factor)

    def reduced(self, model: nn.Module) -> bool:
        """Always: the backward pass adds up the gradients of all devices."""
        return True

    def sharded_state(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Mapping[str, Any]:
        """Return the whole state: one rank has it all."""
        return self._single.sharded_state(self.unwrap(model), optimizers)

    def load_sharded_state(self, model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        """See ``Engine``."""
        self._single.load_sharded_state(self.unwrap(model), optimizers, state)

    def full_state_dict(self, model: nn.Module) -> dict[str, Any] | None:
        """See ``Engine``."""
        return self._single.full_state_dict(self.unwrap(model))

    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As single."""
        return self._single.full_optimizer_state(optimizer)

    def load_full_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """As single."""
        self._single.load_full_optimizer_state(optimizer, state)

    def release(self) -> None:
        """As single."""
        self._single.release()

    def unwrap(self, model: nn.Module) -> nn.Module:
        """See ``Engine``; also of a model that the script itself has wrapped."""
        while isinstance(model, nn.DataParallel):
            model = model.module
        return model


@dataclass(frozen=True, slots=True)
class _Number:
    """A tensor without a dim, which every device gets: there is nothing to split."""

    value: torch.Tensor


def _on_device(data: Any, index: int) -> Any:
    """Return ``data`` with the tensors of its numbers, on the device ``index``; those on the CPU are for any."""
    if isinstance(data, _Number):
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


class _Copies(nn.DataParallel[nn.Module]):
    """torch's DataParallel for short batches and for a forward pass in mixed precision."""

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]) -> Any:
        """Split positional and keyword arguments together.

        Torch splits them apart: of a batch with fewer samples than devices, ``model(x, flag=True)`` then gives the flag
        without ``x`` to the devices that are left (torch 2.7 to 2.13; test_a_batch_may_be_shorter_than_the_devices).
        """
        if not inputs and not kwargs:
            return (), ()
        numbers = map_tensors(lambda one: one if one.dim() else _Number(one), (inputs, kwargs or {}))
        parts = [_on_device(part, i) for part, i in zip(scatter(numbers, device_ids, self.dim), device_ids)]
        return tuple(part[0] for part in parts), tuple(part[1] for part in parts)

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[nn.Module]:
        """Copy ``module``; a forward that was wrapped on the object must run the copy, not the original."""
        copies = super().replicate(module, device_ids)
        for copy in copies:
            rebind_forward(copy, original=module)
        return copies

    def gather(self, outputs: Sequence[Any], output_device: Any) -> Any:
        """Join the tensors of the outputs; the rest is that of the first, and so is the type.

        Torch makes containers by calling their classes, and takes what is neither tensor nor container for a container.
        """
        # A number of each becomes a vector of them: torch makes the same of it, with a warning.
        parts = [tuple(one if one.dim() else one.unsqueeze(0) for one in tensors_of(output)) for output in outputs]
        return with_tensors(outputs[0], super().gather(parts, output_device))
