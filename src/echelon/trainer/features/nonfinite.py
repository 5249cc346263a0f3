"""Finds and names the first tensor that contains NaN or infinity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from echelon.base.errors import EchelonError
from echelon.trainer.data import batches

_ADVICE = (
    "lower the learning rate or max_grad_norm, check the data of this step, or use bf16 or float32 instead of fp16"
)


class NonFiniteError(EchelonError, FloatingPointError):
    """A tensor contains NaN or infinity (``TrainingArguments(stop_on_nan=True)``).

    Causes: the learning rate is too high, or there is no warm-up; the loss divides by zero or takes the logarithm of zero;
        fp16 values exceed 65504; samples are corrupt.
    Do: the message names the first nonfinite tensor and the module that computed it. Lower the learning rate or
        max_grad_norm, check the data of that step, or use bf16 or float32.
    """

    def __init__(self, what: str, *, where: str | None = None, do: str | None = _ADVICE) -> None:
        super().__init__(what, where=where, do=do)


@contextmanager
def checked_forward(model: nn.Module) -> Iterator[None]:
    """Make the forward pass of ``model`` raise at the first module with a nonfinite output.

    Synchronizes with the device after every module.

    Raises:
        NonFiniteError: names the module, its nonfinite inputs and parameters, and the largest values before it.
    """
    names = {module: name or "the model" for name, module in model.named_modules()}
    before: list[str] = []

    def _check(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found = _count(output)
        if found is None:
            before.append(f"{names[module]} {_largest(output):.3g}")
            del before[:-3]
            return
        blame = (
            [f"its input contains {_count((args, kwargs))}"] if _count((args, kwargs)) else ["its inputs are finite"]
        )
        blame += [
            f"its {name} contains {_count(p)}"
            for name, p in module.named_parameters(recurse=False)
            if _count(p) is not None
        ]
        last = f"; largest values before it: {', '.join(before)}" if before else ""
        raise NonFiniteError(
            f"the output of {names[module]} ({type(module).__name__}) contains {found}: {', '.join(blame)}{last}",
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
    """Return the name of an update's first nonfinite tensor, or None if all tensors on this rank are finite.

    Searches the batches, the weights, a repeated forward pass, and the gradients.

    Args:
        compute_loss: ``compute_loss(model, batch)`` for the repeated forward pass; None skips it.
    """
    for inputs in group:
        columns = (
            inputs
            if isinstance(inputs, Mapping)
            else dict(enumerate(inputs if isinstance(inputs, (list, tuple)) else [inputs]))
        )
        for name, column in columns.items():
            if (found := _count(column)) is not None:
                return f"{name!r} in the batch contains {found}"
    for name, parameter in model.named_parameters():
        if (found := _count(parameter)) is not None:
            return f"the weight {name} contains {found}"
    if compute_loss is not None:
        try:
            for inputs in group:
                with torch.no_grad(), checked_forward(model):
                    loss = compute_loss(model, inputs)
                if (found := _count(loss)) is not None:
                    return f"the loss contains {found}, but all model outputs are finite"
        except NonFiniteError as error:
            return error.what
    return _first_bad_gradient(model)


def _first_bad_gradient(model: nn.Module) -> str | None:
    """Return the nonfinite gradient that the backward pass computed first, that is, the last parameter's, or None."""
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and (found := _count(parameter.grad)) is not None:
            return f"the gradient of {name} contains {found}"
    return None


def _count(data: Any) -> str | None:
    """Describe how many values in ``data`` are nan and infinite, or return None if all are finite."""
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
    return f"{' and '.join(parts)} among {total} values"


def _largest(data: Any) -> float:
    sizes: list[float] = []

    def _add(tensor: torch.Tensor) -> None:
        if tensor.is_floating_point() and tensor.numel():
            sizes.append(float(tensor.detach().abs().max()))

    batches.map_tensors(_add, data)
    return max(sizes, default=0.0)
