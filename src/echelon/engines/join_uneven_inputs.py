"""Uneven inputs where the ranks share out the optimizer's state: ranks that have run out step with the others."""

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

__all__ = ["join_sharded"]

_ENDED = -1


@contextmanager
def join_sharded(
    wrappers: Sequence[DistributedDataParallel],
    optimizers: Sequence[ShardedOptimizer],
    *,
    note: Callable[[bool], None],
) -> Iterator[None]:
    """Let ranks run out of batches at different steps; those that have done so still step their part of the parameters.

    Torch's own hook for that steps once for each forward pass, whether the others step or not, by gradients that the
    rank does not have and by a learning rate that its scheduler has left behind.

    Args:
        wrappers: the models.
        optimizers: of them.
        note: is called with True before a rank that has ended steps, and with False afterwards.

    Collective: every rank enters.

    Source: torch.distributed.algorithms.join.Join.
    """
    events = _Events(wrappers, optimizers, note)
    # Made for what it sets in the wrappers: their forward passes tell the ranks that have ended whether they reduce.
    Join([events, *wrappers])
    with Join([events]):
        handles: list[Any] = [
            *(wrapper.register_forward_pre_hook(events.tell_forward) for wrapper in wrappers),
            *(optimizer.register_step_pre_hook(events.tell_step) for optimizer in optimizers),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Events(Joinable, JoinHook):
    """Before each forward pass and each step, the ranks that run tell those that have ended, which take part in it."""

    def __init__(
        self,
        wrappers: Sequence[DistributedDataParallel],
        optimizers: Sequence[ShardedOptimizer],
        note: Callable[[bool], None],
    ) -> None:
        super().__init__()
        self._note = note
        self._wrappers = list(wrappers)
        self._optimizers = list(optimizers)
        self._passes: list[JoinHook] = [wrapper.join_hook() for wrapper in wrappers]  # type: ignore[no-untyped-call]

    def join_hook(self, **_options: Any) -> JoinHook:
        """See ``Joinable``."""
        return self

    @property
    def join_device(self) -> torch.device:
        """See ``Joinable``."""
        device: torch.device = self._wrappers[0].join_device
        return device

    @property
    def join_process_group(self) -> Any:
        """See ``Joinable``."""
        return self._wrappers[0].join_process_group

    def tell_forward(self, wrapper: Any, _inputs: Any) -> None:
        """Tell that ``wrapper`` runs now."""
        self._tell(self._wrappers.index(wrapper))

    def tell_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Tell that ``optimizer`` steps now; where ranks have ended, one of those that run sends them what they need."""
        event = len(self._wrappers) + self._optimizers.index(optimizer)
        events = self._tell(event)
        if _ENDED in events:
            _share_step(optimizer, events)

    def main_hook(self) -> None:
        """Take part in the next event, as a rank that has ended."""
        (events,) = gather_counts(_ENDED)
        event = max(events)
        if event < len(self._passes):
            self._passes[event].main_hook()
        else:
            self._step(self._optimizers[event - len(self._passes)], events)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take over the model of the rank that ended last."""
        for each in self._passes:
            each.post_hook(is_last_joiner)

    def _tell(self, event: int) -> list[int]:
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
        _share_step(optimizer, events)
        self._note(True)
        try:
            optimizer.step()
        finally:
            self._note(False)
        for parameter, gradient in zip(own, before):
            parameter.grad = gradient


def _share_step(optimizer: ShardedOptimizer, events: list[int]) -> None:
    """Give the ranks that have ended the settings and the gradients with which the others step.

    Collective: every rank.
    """
    rank, source = dist.get_rank(), events.index(max(events))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    message = None
    if rank == source:
        graded = [i for i, parameter in enumerate(parameters) if parameter.grad is not None]
        message = json.dumps([[_plain(group) for group in optimizer.param_groups], graded]).encode()
    settings, graded = json.loads(broadcast_bytes(message, source=source))
    if events[rank] == _ENDED:
        for group, changes in zip(optimizer.param_groups, settings):
            _set(group, changes)
    for parameter in (parameters[i] for i in graded):
        owner = optimizer.owner(parameter)
        if events[owner] != _ENDED:
            continue
        if rank == source:
            assert parameter.grad is not None
            dist.send(parameter.grad.contiguous(), dst=owner)
        elif rank == owner:
            parameter.grad = torch.empty_like(parameter, memory_format=torch.contiguous_format)
            dist.recv(parameter.grad, src=source)


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of ``group`` that are numbers, text, or sequences of them; they are what changes in a run."""
    numbers = {n: v.item() if isinstance(v, torch.Tensor) else v for n, v in group.items() if n != "params"}
    kinds = (bool, int, float, str)
    return {
        name: value
        for name, value in numbers.items()
        if isinstance(value, kinds)
        or (isinstance(value, (list, tuple)) and all(isinstance(item, kinds) for item in value))
    }


def _set(group: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if isinstance(group[name], torch.Tensor):
            group[name].fill_(value)
        else:
            group[name] = tuple(value) if isinstance(group[name], tuple) else value
