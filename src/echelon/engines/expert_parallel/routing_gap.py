"""The smallest gap between a chosen and a rejected expert, below which rounding errors can change the choice."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.base.logging import get_logger
from echelon.base.warnings import warn_here
from echelon.world.world import World

__all__ = ["RoutingGaps"]

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
                f"two experts' scores of a token in {name} differ by {float(self._smallest):.1e} of the largest score. Below "
                f"{self._limit:.1e}, rounding errors decide which expert is chosen, so this run may differ from one on another number of "
                "processes. Use a wider dtype for the router, or compare the runs by their losses."
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
                "smallest routing gap of the run: %.1e of a token's largest score (rounding errors can change choices below %.1e)",
                smallest,
                self._limit,
            )
