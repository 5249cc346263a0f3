"""Optimizer steps with an optional loss scaler, and gradient operations shared by several engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import compress
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from echelon.base.errors import UsageError
from echelon.engines.shards import local_tensors


class Stepper:
    """Performs optimizer steps with an optional ``torch.amp.GradScaler``, and reports skipped steps.

    The scaler divides gradients by the loss scale before they are clipped or used. What is still there when the next backward
    pass begins (the step was skipped, or the clipping was in the middle of an accumulation window) is multiplied by it again,
    because that pass adds scaled gradients to it. The usual loss scales are powers of two, so this does not round.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.scaler = scaler
        # Whose gradients were divided by the loss scale since the last backward pass, and whether they are those of all ranks.
        self._divided: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self._stepped: WeakSet[Optimizer] = WeakSet()  # since the last update of the loss scale
        self._is_discarded = False  # whether divided gradients were cleared without a step
        self.found_inf_groups: list[dist.ProcessGroup] = []
        """Groups whose ranks step different parameters, or parts of them, and skip steps together, such as the stages of a pipeline."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.scaler,)  # a copy has no optimizers

    def step(self, optimizer: Optimizer, closure: Any = None) -> bool:
        """Step ``optimizer``; return False if the scaler skipped the step because gradients were infinite."""
        if self.scaler is None:
            optimizer.step(closure) if closure is not None else optimizer.step()
            return True
        if optimizer in self._stepped:
            self.update_loss_scale()
        if self.found_inf_groups:
            self.unscale(optimizer)
        # GradScaler rejects a closure with a clear message.
        self.scaler.step(optimizer, closure) if closure is not None else self.scaler.step(optimizer)
        self._divided[optimizer] = True
        self._stepped.add(optimizer)
        # A step hook cannot detect a skipped step, because a fused optimizer is always called and skips inside its kernel.
        # The scaler itself reads these numbers on the host, so this adds no synchronization (torch 2.7 to 2.13).
        found = self.scaler._found_inf_per_device(optimizer)
        return not any(value.item() for value in found.values())

    def update_loss_scale(self) -> None:
        """Update the scale once, after all optimizers have stepped, and multiply all gradients that were divided by it again.

        ``step`` cannot do this, because the next optimizer's gradients still have the current scale.
        Source: torch.amp.GradScaler.update ("once, after all optimizers used this iteration have been stepped").
        """
        divided = list(self._divided)
        self.forget()
        for optimizer in divided:
            self._multiply(optimizer)

    @torch.no_grad()
    def _multiply(self, optimizer: Optimizer) -> None:
        assert self.scaler is not None
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            local = local_tensors([gradient])[0]
            by_device.setdefault(local.device, []).append(local)
        for device, gradients in by_device.items():
            # A tensor, because reading the scale would wait for the device.
            scale = self.scaler.scale(torch.ones((), device=device))
            for gradient in gradients:
                gradient.mul_(scale)

    def forget(self) -> None:
        """Forget which gradients were divided by the loss scale, and which optimizers stepped; update the scale if any did.

        If the loop itself skipped a step because of infinite gradients, the scale is lowered as if the scaler had skipped it.
        """
        if self.scaler is None or not (self._divided or self._stepped):
            return
        if self._stepped or (self._is_discarded and self._has_found_inf()):
            self.scaler.update()
        else:
            self.scaler.update(self.scaler.get_scale())  # keeps the scale, and makes the scaler begin anew
        self._divided.clear()
        self._stepped.clear()
        self._is_discarded = False

    def _has_found_inf(self) -> bool:
        assert self.scaler is not None
        found = [self.scaler._found_inf_per_device(optimizer) for optimizer in self._divided]
        return any(value.item() for by_device in found for value in by_device.values())

    def unscale(self, optimizer: Optimizer, *, is_local: bool = False) -> None:
        """Unscale the gradients once after each backward pass, because a second call of ``GradScaler.unscale_`` raises an error.

        Args:
            optimizer: the optimizer that holds the parameters.
            is_local: whether these gradients are still those of this rank alone.
        """
        if self.scaler is None:
            return
        if optimizer in self._stepped:
            self.update_loss_scale()
        if optimizer not in self._divided:
            self.scaler.unscale_(optimizer)
            self._divided[optimizer] = not is_local
            for group in self.found_inf_groups:
                for found in self.scaler._found_inf_per_device(optimizer).values():
                    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)

    def note_cleared(self, optimizer: Optimizer) -> None:
        """Note that the gradients of ``optimizer`` were cleared."""
        if self.scaler is None:
            return
        if optimizer in self._stepped:
            self._divided.pop(optimizer, None)  # there is nothing to multiply
        elif self._divided.get(optimizer):
            # gradients of this rank alone may be infinite here only, and its scale would differ
            self._is_discarded = True

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the scaled loss to backpropagate."""
        if self.scaler is None:
            return loss
        self.update_loss_scale()
        return self.scaler.scale(loss)


@contextmanager
def zero_backward(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Replace the gradients that backward passes in the block compute for ``parameters`` with zeros."""
    hooks = [p.register_hook(torch.zeros_like) for p in parameters if p.requires_grad]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def require_graph(loss: torch.Tensor, engine: str) -> None:
    """Raise UsageError if the loss on a rank without items has no autograd graph."""
    if loss.grad_fn is None:
        raise UsageError(
            "this rank has no items and its loss does not depend on the model, but the other ranks' backward passes wait for "
            "this rank",
            where=f"backward(), {engine} engine",
            do="compute the loss from the model's outputs on every rank",
        )


def multiply_gradients(parameters: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply every gradient by ``factor`` in place."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def repoint_scheduler(scheduler: Any, *, old: Optimizer, new: Optimizer) -> None:
    """Make ``scheduler`` and the schedulers inside it drive ``new`` instead of ``old``."""
    for inner in getattr(scheduler, "_schedulers", ()):  # ChainedScheduler, SequentialLR
        repoint_scheduler(inner, old=old, new=new)
    if scheduler.optimizer is old:
        scheduler.optimizer = new
        _record_step_calls(new)
        new._opt_called = getattr(old, "_opt_called", False)  # type: ignore[attr-defined]


_PER_GROUP = ("base_lrs", "max_lrs", "min_lrs", "base_momentums", "max_momentums", "lr_lambdas", "_last_lr")
"""Attributes of torch's schedulers that are lists with an element for each parameter group."""


def drop_scheduler_groups(scheduler: Any, is_kept: Sequence[bool]) -> None:
    """Make ``scheduler`` and the schedulers inside it drive only the kept groups of an optimizer that has lost the others.

    Source: torch.optim.lr_scheduler, whose schedulers require as many values as groups (torch 2.13).
    """
    for inner in getattr(scheduler, "_schedulers", ()):  # ChainedScheduler, SequentialLR
        drop_scheduler_groups(inner, is_kept)
    for name in _PER_GROUP:
        values = vars(scheduler).get(name)
        if isinstance(values, list) and len(values) == len(is_kept):
            setattr(scheduler, name, list(compress(values, is_kept)))


def _record_step_calls(optimizer: Optimizer) -> None:
    """Wrap ``optimizer.step`` as a scheduler's constructor does; otherwise the scheduler warns that ``step`` was not called.

    Source: torch.optim.lr_scheduler.LRScheduler (torch 2.7 to 2.13).
    """
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    function: Any = optimizer.step.__func__  # type: ignore[attr-defined]
    owner = ref(optimizer)  # a strong reference would create a cycle

    @wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        self: Any = owner()
        self._opt_called = True
        return function(self, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
