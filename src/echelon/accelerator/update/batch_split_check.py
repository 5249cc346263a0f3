"""Warns about losses and gradient hooks whose effect depends on how an exact update splits its batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from echelon.base.warnings import warn
from echelon.data.global_batch_slices import Contribution

_SUM = 2  # torch.nn._reduction.get_enum("sum")


class BatchSplitCheck:
    """Checks losses and parameters in an exact run's backward passes, with decreasing frequency."""

    def __init__(self) -> None:
        self._num_passes = 0
        self._warned: set[str] = set()

    def check(
        self, loss: torch.Tensor, models: Sequence[nn.Module], contribution: Contribution, *, is_counted: bool
    ) -> None:
        """Warn about losses that are summed over the batch, and about gradient hooks that receive only a part of the
        batch.

        Args:
            loss: the loss of the micro-batch.
            models: the prepared models.
            contribution: this micro-batch.
            is_counted: whether the loss came with ``num_items=``.
        """
        num, self._num_passes = self._num_passes, self._num_passes + 1
        is_whole = len(contribution.samples) == len(contribution.update)
        if num & (num - 1) or is_whole or contribution.is_padding:
            return
        if not is_counted and _is_sum_over_batch(loss, len(contribution.samples)):
            self._warn_once(
                "this loss is a sum over the samples in a batch, but the exact modes average the losses over the "
                "parts of a batch, so the gradients are smaller than for the whole batch. Use a mean "
                "(reduction='mean'), or pass the number of items that the loss sums over: accelerator.backward(loss, "
                "num_items=n) divides by the total number of items in the update"
            )
        hooked = next((name for model in models for name, p in model.named_parameters() if _has_hook(p)), None)
        if hooked is not None:
            self._warn_once(
                f"a hook on {hooked.removeprefix('module.')} (register_hook) receives the gradient for only a part of "
                "the batch on each rank. If the hook changes it nonlinearly (clamping, noise, normalization), the "
                "update differs from the update for the whole batch. Instead, change p.grad between "
                "accelerator.backward() and optimizer.step() when accelerator.sync_gradients is true"
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warn(message)


def _has_hook(parameter: torch.Tensor) -> bool:
    """Return whether the user has registered a hook; echelon's own hooks do not change gradients."""
    hooks = parameter._backward_hooks
    return hooks is not None and any(
        not str(getattr(hook, "__module__", "")).startswith("echelon.") for hook in hooks.values()
    )


def _is_sum_over_batch(loss: torch.Tensor, num_samples: int) -> bool:
    """Return whether the last operation that computed ``loss`` is a sum over ``num_samples`` samples."""
    node = loss.grad_fn
    if getattr(node, "_saved_reduction", None) == _SUM:
        return True
    if type(node).__name__ != "SumBackward0" or num_samples < 2:
        return False
    sizes = getattr(node, "_saved_self_sym_sizes", None) or (0,)
    (source, _), *_ = node.next_functions  # type: ignore[union-attr]
    is_stack = type(source).__name__ in ("StackBackward0", "CatBackward0")  # of several losses
    return sizes[0] == num_samples and not is_stack
