"""Supports uneven inputs with sharded optimizer state; ranks without batches keep stepping with the other ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from echelon.distributed.small_messages import broadcast_bytes, gather_counts
from echelon.engines.sharded_optimizer import ShardedOptimizer

_JOINED = -1


@contextmanager
def join_sharded(
    wrappers: Sequence[DistributedDataParallel],
    optimizers: Sequence[ShardedOptimizer],
    *,
    on_step: Callable[[bool], None],
) -> Iterator[None]:
    """Let ranks have different numbers of batches; joined ranks, which have none left, still step their parameters.

    torch's own join hook steps once per forward pass, even if the running ranks do not step. It also lacks their gradients and
    uses a learning rate that the joined rank's scheduler has not updated.

    Args:
        wrappers: the DDP models.
        optimizers: the optimizers for these models.
        on_step: function that is called with True before a joined rank steps and with False afterwards.

    Collective: enter the context on every rank.

    Source: torch.distributed.algorithms.join.Join.
    """
    events = _Events(wrappers, optimizers, on_step)
    # The constructor makes the wrappers' forward passes notify joined ranks whether they reduce.
    Join([events, *wrappers])
    with Join([events]):
        handles: list[Any] = [
            *(wrapper.register_forward_pre_hook(events.notify_forward) for wrapper in wrappers),
            *(optimizer.register_step_pre_hook(events.notify_step) for optimizer in optimizers),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Events(Joinable, JoinHook):
    """Notifies joined ranks before each forward pass and step on running ranks, so that joined ranks can shadow it."""

    def __init__(
        self,
        wrappers: Sequence[DistributedDataParallel],
        optimizers: Sequence[ShardedOptimizer],
        on_step: Callable[[bool], None],
    ) -> None:
        super().__init__()
        self._on_step = on_step
        self._wrappers = list(wrappers)
        self._optimizers = list(optimizers)
        self._passes: list[JoinHook] = [wrapper.join_hook() for wrapper in wrappers]  # type: ignore[no-untyped-call]

    def join_hook(self, **_options: Any) -> JoinHook:
        return self

    @property
    def join_device(self) -> torch.device:
        device: torch.device = self._wrappers[0].join_device
        return device

    @property
    def join_process_group(self) -> Any:
        return self._wrappers[0].join_process_group

    def notify_forward(self, wrapper: Any, _inputs: Any) -> None:
        """Notify joined ranks of a forward pass through ``wrapper``."""
        self._notify(self._wrappers.index(wrapper))

    def notify_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Notify joined ranks that ``optimizer`` is about to step. One running rank sends them the data for the step."""
        event = len(self._wrappers) + self._optimizers.index(optimizer)
        events = self._notify(event)
        if _JOINED in events:
            _send_step_to_joined(optimizer, events)

    def main_hook(self) -> None:
        """Shadow the next event on a joined rank."""
        (events,) = gather_counts(_JOINED)
        event = max(events)
        if event < len(self._passes):
            self._passes[event].main_hook()
        else:
            self._step(self._optimizers[event - len(self._passes)], events)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model from the last rank that joins."""
        for each in self._passes:
            each.post_hook(is_last_joiner)

    def _notify(self, event: int) -> list[int]:
        work: Any = Join.notify_join_context(self)
        if work is not None:
            work.wait()
        (events,) = gather_counts(event)
        return events

    def _step(self, optimizer: ShardedOptimizer, events: list[int]) -> None:
        own = [p for group in optimizer.optim.param_groups for p in group["params"]]
        before = [p.grad for p in own]
        for parameter in own:
            parameter.grad = None
        _send_step_to_joined(optimizer, events)
        self._on_step(True)
        try:
            optimizer.step()
        finally:
            self._on_step(False)
        for parameter, gradient in zip(own, before):
            parameter.grad = gradient


def _send_step_to_joined(optimizer: ShardedOptimizer, events: list[int]) -> None:
    """Send joined ranks the settings and gradients of the running ranks' step. Collective: call on every rank."""
    rank, source = dist.get_rank(), events.index(max(events))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    message = None
    if rank == source:
        graded = [i for i, parameter in enumerate(parameters) if parameter.grad is not None]
        message = json.dumps([[_plain_settings(group) for group in optimizer.param_groups], graded]).encode()
    settings, graded = json.loads(broadcast_bytes(message, source=source))
    if events[rank] == _JOINED:
        for group, changes in zip(optimizer.param_groups, settings):
            _apply_settings(group, changes)
    for parameter in (parameters[i] for i in graded):
        owner = optimizer.owner(parameter)
        if events[owner] != _JOINED:
            continue
        if rank == source:
            assert parameter.grad is not None
            dist.send(parameter.grad.contiguous(), dst=owner)
        elif rank == owner:
            parameter.grad = torch.empty_like(parameter, memory_format=torch.contiguous_format)
            dist.recv(parameter.grad, src=source)


def _plain_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of ``group`` that may change during a run (numbers, strings, and sequences of these)."""
    numbers = {n: v.item() if isinstance(v, torch.Tensor) else v for n, v in group.items() if n != "params"}
    kinds = (bool, int, float, str)
    return {
        name: value
        for name, value in numbers.items()
        if isinstance(value, kinds)
        or (isinstance(value, (list, tuple)) and all(isinstance(item, kinds) for item in value))
    }


def _apply_settings(group: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if isinstance(group[name], torch.Tensor):
            group[name].fill_(value)
        else:
            group[name] = tuple(value) if isinstance(group[name], tuple) else value
