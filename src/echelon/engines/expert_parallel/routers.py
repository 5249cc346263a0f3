"""What is known of a model's routers: the load-balancing loss over the tokens of all ranks, and the gaps between experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.warnings import warn_here
from echelon.world.world import World


def load_balancing_loss(
    logits: Sequence[torch.Tensor],
    top_k: int,
    *,
    attention_mask: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the number of experts times the sum, over experts, of their share of the tokens times their mean probability.

    Args:
        logits: the routers' logits of each layer, (tokens, experts).
        top_k: number of experts of a token.
        attention_mask: tokens that count, (batch, length), the same for each layer.
        group: ranks whose tokens count together. The result is the same on each of them, and the backward pass of any rank's loss reaches
            the tokens of all of them.

    Collective: call on every rank of ``group``; the backward pass communicates, too.

    Source: Fedus et al., "Switch Transformers", 2021, equations 4 to 6; transformers' ``load_balancing_loss_func``, which computes it
    from the tokens of one rank, so that its mean over ranks depends on how the batch was divided.
    """
    num_experts = logits[0].shape[-1]
    sums = torch.zeros(3, num_experts, device=logits[0].device)
    for layer in logits:
        wide = layer.to(torch.promote_types(layer.dtype, torch.float32))
        probabilities = torch.softmax(wide, dim=-1)
        weights = torch.ones_like(wide[:, 0]) if attention_mask is None else attention_mask.reshape(-1).to(wide)
        chosen = torch.zeros_like(wide).scatter_(1, torch.topk(probabilities, top_k, dim=-1).indices, 1.0)
        parts = [
            (probabilities * weights.unsqueeze(1)).sum(0),
            (chosen * weights.unsqueeze(1)).sum(0),
            weights.sum().expand(num_experts),
        ]
        sums = sums + torch.stack(parts)
    if group is not None:
        sums = _SumOverRanks.apply(sums, group)  # type: ignore[no-untyped-call]
    probability, chosen, rows = sums
    total: torch.Tensor = (probability / rows * (chosen / rows).detach()).sum() * num_experts
    return total


def balance_over_ranks(model: nn.Module, group: dist.ProcessGroup, *, has_samples: Callable[[], bool]) -> None:
    """Let the auxiliary loss that a transformers model adds to its loss count the tokens of all ranks of ``group``.

    It changes the outputs of training passes that have ``router_logits``, ``aux_loss`` and ``loss`` (``output_router_logits=True``).

    Args:
        model: model whose outputs are changed.
        group: ranks whose tokens count together.
        has_samples: returns whether the tokens of this rank's forward pass count.
    """

    def after_forward(module: Any, _args: Any, kwargs: Any, output: Any) -> Any:
        found: list[Any] = [getattr(output, name, None) for name in ("loss", "aux_loss", "router_logits")]
        if not module.training or not torch.is_grad_enabled() or any(value is None for value in found):
            return
        loss, own, logits = found
        mask = kwargs.get("attention_mask")
        mask = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
        if not has_samples():
            mask = torch.zeros(1, logits[0].shape[0], device=logits[0].device)
        whole = load_balancing_loss(logits, module.num_experts_per_tok, attention_mask=mask, group=group)
        output.loss = loss + module.router_aux_loss_coef * (whole - own).to(loss.dtype)
        output.aux_loss = whole

    if hasattr(model, "router_aux_loss_coef") and hasattr(model, "num_experts_per_tok"):
        model.register_forward_hook(after_forward, with_kwargs=True)


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks, each of which uses it; so the gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _sum(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradient, ctx.group), None


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


# ---- gaps between chosen and rejected experts ------------------------------------------------------------------------


_logger = get_logger(__name__)

_FACTOR = 512  # rounding errors of a few updates, in units of the dtype's epsilon


class RoutingGaps:
    """Watches routers while the model is trained.

    A gap is the difference of the logits of a token's last chosen and first rejected expert, divided by the token's largest logit.
    """

    def __init__(self) -> None:
        self._smallest: torch.Tensor | None = None
        self._is_unsafe = False
        self._limit = 0.0

    def watch(self, name: str, router: nn.Module) -> None:
        """Watch a router, which returns logits (tokens, experts), weights, and indices (tokens, top_k)."""

        def after_forward(module: nn.Module, _inputs: Any, output: Any) -> None:
            if module.training and torch.is_grad_enabled() and isinstance(output, tuple) and len(output) == 3:
                self._add(name, output[0].detach(), output[2].shape[-1])

        router.register_forward_hook(after_forward)

    def _add(self, name: str, logits: torch.Tensor, top_k: int) -> None:
        if not logits.numel() or logits.shape[-1] <= top_k:
            return
        self._limit = _FACTOR * torch.finfo(logits.dtype).eps
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        best = torch.topk(logits, top_k + 1, dim=-1).values
        scale = logits.abs().amax(-1).clamp_min(torch.finfo(logits.dtype).tiny)
        gap = ((best[..., top_k - 1] - best[..., top_k]) / scale).min()
        # Read what the previous call left, which the device has computed by now.
        if self._smallest is not None and not self._is_unsafe and float(self._smallest) < self._limit:
            self._is_unsafe = True
            warn_here(
                _(
                    "two experts' scores of a token in {name} differ by {smallest:.1e} of the largest score. Below "
                    "{limit:.1e}, rounding errors decide which expert is chosen, so this run may differ from one on "
                    "a different number of processes. Use a wider dtype for the router, or compare the runs by their "
                    "losses.",
                    name=name,
                    smallest=float(self._smallest),
                    limit=self._limit,
                )
            )
        self._smallest = gap if self._smallest is None else torch.minimum(self._smallest, gap)

    def report(self, world: World) -> None:
        """Log the smallest gap of the run on all ranks of ``world``, if tokens were routed. Collective: call on every rank."""
        smallest = float("inf") if self._smallest is None else float(self._smallest)
        if world.world_size > 1:
            shared = torch.tensor([smallest], dtype=torch.float64, device=world.device)
            dist.all_reduce(shared, op=dist.ReduceOp.MIN, group=world.group)
            smallest = float(shared)
        if smallest != float("inf"):
            # A warning is visible by default.
            _logger.warning(
                N_(
                    "smallest routing gap of the run: %.1e of a token's largest score (rounding errors can change choices below %.1e)"
                ),
                smallest,
                self._limit,
            )
