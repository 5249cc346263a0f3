"""The cross-entropy of a linear layer's outputs, of which only one chunk is in memory at a time."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.autograd.function import Function

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.sharded import is_dtensor
from echelon.precision.policy import LOW_PRECISION


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    chunk_size: int,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
) -> torch.Tensor:
    """Return ``cross_entropy(linear(hidden, weight, bias), target)`` without the logits of all tokens in memory.

    The logits, and their gradients, exist for ``chunk_size`` tokens at a time. The gradients of ``hidden``, ``weight`` and ``bias`` are computed
    in the forward pass and stored, so a second backward pass through the graph (``retain_graph``) and higher derivatives are not supported.
    Under autocast, the product has autocast's dtype; losses of bf16 and fp16 logits are computed in float32.

    Args:
        hidden: [..., features].
        weight: [classes, features], whole on this rank.
        target: class indices, [...].
        chunk_size: tokens in a chunk.
        bias: [classes].
        ignore_index: targets that do not count.
        label_smoothing: see ``torch.nn.functional.cross_entropy``.
        reduction: the mean over the targets that count, or their sum.

    Raises:
        UsageError: ``weight`` is sharded, ``chunk_size`` is below 1, or ``reduction`` is another one.

    Source: torch.nn.functional.linear_cross_entropy (torch 2.13), which is used where it can; Hsu et al., "Liger Kernel", 2024.

    Examples:
        >>> hidden, head, target = torch.randn(8, 16), torch.nn.Linear(16, 100), torch.randint(100, (8,))
        >>> loss = linear_cross_entropy(hidden, head.weight, target, chunk_size=4, bias=head.bias)
    """
    if chunk_size < 1:
        raise UsageError(_("chunk_size={size} is below 1", size=chunk_size), do=_("set it to 1 or more tokens"))
    if reduction not in ("mean", "sum"):
        raise UsageError(
            _("reduction={reduction!r} is not one of mean, sum", reduction=reduction),
            do=_("use cross_entropy(linear(hidden, weight), target) for the losses of single tokens"),
        )
    if is_dtensor(weight):
        raise UsageError(
            _("linear_cross_entropy needs the whole weight of the head, but it is divided over ranks"),
            do=_(
                "call it inside the forward pass of the module that fsdp2 shards as a whole and that holds the head itself, and do not "
                "divide the head by tensor parallelism"
            ),
        )
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    hidden, target = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    with torch.autocast(device, enabled=False):
        total = _sum(hidden, weight, target, bias, chunk_size, ignore_index, label_smoothing)
    return total if reduction == "sum" else total / target.ne(ignore_index).sum()


def _sum(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    chunk_size: int,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    library: Any = getattr(F, "linear_cross_entropy", None)
    # That of torch 2.13 rounds the loss to the dtype of the logits, and computes the whole logits for label smoothing.
    if library is None or label_smoothing or hidden.dtype in LOW_PRECISION:
        total: torch.Tensor = _ChunkedSum.apply(hidden, weight, bias, target, chunk_size, ignore_index, label_smoothing)  # type: ignore[no-untyped-call]
        return total
    options: Any = torch.nn
    return library(  # type: ignore[no-any-return]
        hidden,
        weight,
        target,
        linear_bias=bias,
        reduction="sum",
        ignore_index=ignore_index,
        options=options.LinearCrossEntropyOptions(
            batch_chunk_size=chunk_size, chunking_method=None, acc_policy="accurate"
        ),
    )


class _ChunkedSum(Function):
    """The sum of the losses. Their gradients are computed with them, and multiplied by the gradient of the sum in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        chunk_size: int,
        ignore_index: int,
        label_smoothing: float,
    ) -> torch.Tensor:
        """Compute the sum and, if they are needed, the gradients of ``hidden``, ``weight`` and ``bias``."""
        inputs = (hidden, weight, bias)
        needed = [value is not None and value.requires_grad for value in inputs]
        wide = torch.float32 if hidden.dtype in LOW_PRECISION else hidden.dtype
        total = hidden.new_zeros((), dtype=wide)
        # Sums over the chunks are as wide as the losses.
        found = [torch.zeros_like(v, dtype=wide) if v is not None and n else None for v, n in zip(inputs, needed)]
        for start in range(0, len(hidden), chunk_size):
            part = slice(start, start + chunk_size)
            with torch.set_grad_enabled(any(needed)):
                logits = F.linear(hidden[part].detach(), weight.detach(), None if bias is None else bias.detach())
                logits = logits.requires_grad_(any(needed))
                loss = F.cross_entropy(
                    logits.to(wide),
                    target[part],
                    ignore_index=ignore_index,
                    label_smoothing=label_smoothing,
                    reduction="sum",
                )
            total += loss.detach()
            if not any(needed):
                continue
            (gradient,) = torch.autograd.grad(loss, logits)
            if found[0] is not None:
                found[0][part] = gradient @ weight
            if found[1] is not None:
                found[1] += gradient.T @ hidden[part]
            if found[2] is not None:
                found[2] += gradient.sum(0)
        ctx.save_for_backward(*(g if g is None or v is None else g.to(v.dtype) for g, v in zip(found, inputs)))
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Multiply the gradients by that of the sum."""
        return (*(None if g is None else g * grad.to(g.dtype) for g in ctx.saved_tensors), None, None, None, None)
