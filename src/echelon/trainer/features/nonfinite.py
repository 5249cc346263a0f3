"""Where numbers stopped being finite: the first tensor with a nan or an infinity, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from echelon.base.errors import EchelonError
from echelon.trainer.data import batches

__all__ = ["NonFiniteError", "checked_forward", "first_bad"]

_ADVICE = (
    "lower the learning rate or max_grad_norm, check the data of this step, or compute in bf16 or float32, not fp16"
)


class NonFiniteError(EchelonError, FloatingPointError):
    """A tensor of the training holds a nan or an infinity (``TrainingArguments(stop_on_nan=True)``).

    Causes: a learning rate that is too high, or no warm-up; a loss that divides by zero or takes the logarithm of zero;
        fp16 beyond 65504; broken samples.
    Do: the message names the first bad tensor, and the module that made it. Lower the learning rate or max_grad_norm, check
        the data of that step, or compute in bf16 or float32.
    """

    def __init__(self, what: str, *, where: str | None = None, do: str | None = _ADVICE) -> None:
        super().__init__(what, where=where, do=do)


@contextmanager
def checked_forward(model: nn.Module) -> Iterator[None]:
    """Inside, a forward pass of ``model`` ends at the first module whose output is not finite.

    It waits for the device at every module.

    Raises:
        NonFiniteError: it names the module, what its inputs and its parameters were, and the largest numbers before it.
    """
    names = {module: name or "the model itself" for name, module in model.named_modules()}
    before: list[str] = []

    def _check(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found = _count(output)
        if found is None:
            before.append(f"{names[module]}: up to {_largest(output):.3g}")
            del before[:-3]
            return
        blame = [f"its input holds {_count((args, kwargs))}"] if _count((args, kwargs)) else ["its inputs are finite"]
        blame += [
            f"its {name} holds {_count(p)}"
            for name, p in module.named_parameters(recurse=False)
            if _count(p) is not None
        ]
        last = f"; before it {', '.join(before)}" if before else ""
        raise NonFiniteError(
            f"the output of {names[module]} ({type(module).__name__}) holds {found}: {', '.join(blame)}{last}",
            where="forward pass",
        )

    handles = [module.register_forward_hook(_check, with_kwargs=True) for module in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_bad(
    model: nn.Module, group: list[Any], *, compute_loss: Callable[[nn.Module, Any], torch.Tensor] | None
) -> str | None:
    """Return the first tensor of an update that is not finite, by name: in its batches, in the weights, in a forward pass
    (which runs once more), or among the gradients; None when all of this rank are finite.

    Args:
        model: its gradients are there.
        group: the batches of the update.
        compute_loss: (model, batch) -> loss; None: a forward pass would be collective, and is not run.
    """
    for inputs in group:
        columns = (
            inputs
            if isinstance(inputs, Mapping)
            else dict(enumerate(inputs if isinstance(inputs, (list, tuple)) else [inputs]))
        )
        for name, column in columns.items():
            if (found := _count(column)) is not None:
                return f"the batch's {name!r} holds {found}"
    for name, parameter in model.named_parameters():
        if (found := _count(parameter)) is not None:
            return f"the weight {name} holds {found}"
    if compute_loss is not None:
        try:
            for inputs in group:
                with torch.no_grad(), checked_forward(model):
                    loss = compute_loss(model, inputs)
                if (found := _count(loss)) is not None:
                    return f"the loss holds {found}, and every output of the model is finite"
        except NonFiniteError as error:
            return error.what
    return _first_bad_gradient(model)


def _first_bad_gradient(model: nn.Module) -> str | None:
    """Return the gradient that is not finite and was computed first (the last one in the model); None when all are."""
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and (found := _count(parameter.grad)) is not None:
            return f"the gradient of {name} holds {found}"
    return None


def _count(data: Any) -> str | None:
    """Return how many nan and infinities are in ``data``, as words; None when there are none."""
    nans = infinities = total = 0

    def _add(tensor: torch.Tensor) -> None:
        nonlocal nans, infinities, total
        if tensor.is_floating_point():
            nans += int(tensor.isnan().sum())
            infinities += int(tensor.isinf().sum())
            total += tensor.numel()

    batches.map_tensors(_add, data)
    if not nans and not infinities:
        return None
    parts = [f"{count} {word}" for count, word in ((nans, "nan"), (infinities, "inf")) if count]
    return f"{' and '.join(parts)} among {total} numbers"


def _largest(data: Any) -> float:
    sizes: list[float] = []

    def _add(tensor: torch.Tensor) -> None:
        if tensor.is_floating_point() and tensor.numel():
            sizes.append(float(tensor.detach().abs().max()))

    batches.map_tensors(_add, data)
    return max(sizes, default=0.0)
