"""Sends each token to the ranks that hold its experts, and the results back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

__all__ = ["run_experts"]


def run_experts(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    num_experts: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts.

    A token is sent once for each of its experts. Ranks may have different numbers of tokens, also none, and experts may get none.

    Args:
        hidden: tokens of this rank, (tokens, width).
        index: experts of each token, (tokens, top_k), from 0 to ``num_experts`` - 1.
        weights: weights of these experts, (tokens, top_k).
        compute: gets rows for this rank's experts, (rows, width), and the local number of each row's expert, (rows,); returns (rows,
            width). It must use all parameters of the experts even if there are no rows, so that each gets a gradient.
        num_experts: number of experts of all ranks; each rank has the same number of them, in the order of ranks.
        group: ranks among which the experts are divided.

    Returns:
        (tokens, width), with the dtype of ``hidden``.

    Collective: call on every rank of ``group``; the backward pass communicates, too.

    Source: Lepikhin et al., "GShard", 2020, without a capacity: no token is dropped.
    """
    plan, order = _plan(index, num_experts, group)
    top_k = index.shape[1]
    sent = hidden[torch.div(order, top_k, rounding_mode="floor")]
    received = _all_to_all(sent, plan.send, plan.receive, group)
    computed = compute(received, plan.experts)
    returned = _all_to_all(computed, plan.receive, plan.send, group)
    by_token = returned[torch.argsort(order)].view(*index.shape, hidden.shape[-1])
    return (by_token * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


@dataclass(frozen=True, slots=True)
class _Plan:
    send: list[int]
    """Rows for each rank."""
    receive: list[int]
    """Rows from each rank."""
    experts: torch.Tensor
    """Local number of the expert of each received row."""


def _plan(index: torch.Tensor, num_experts: int, group: dist.ProcessGroup) -> tuple[_Plan, torch.Tensor]:
    """Return what is sent, and the order that sorts the pairs of a token and an expert by expert."""
    world_size = dist.get_world_size(group)
    num_local = num_experts // world_size
    experts = index.reshape(-1)
    order = torch.argsort(experts, stable=True)
    counts = torch.bincount(experts, minlength=num_experts)
    # All ranks' counts for this rank's experts: (world_size, num_local)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    # One transfer to the host for both; the splits of the exchange must be known there.
    send, receive = torch.stack([counts, received]).view(2, world_size, num_local).sum(2).tolist()
    numbers = torch.arange(num_local, device=index.device).repeat(world_size)
    return _Plan(send, receive, torch.repeat_interleave(numbers, received, output_size=sum(receive))), order


def _all_to_all(rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    result: torch.Tensor = _AllToAll.apply(rows, send, receive, group)  # type: ignore[no-untyped-call]
    return result


class _AllToAll(torch.autograd.Function):
    """Rows are sent to other ranks; their gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, send: list[int], receive: list[int], group: Any) -> torch.Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchange(rows, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(gradient, ctx.receive, ctx.send, ctx.group), None, None, None


def _exchange(rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    result = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(result, rows.contiguous(), receive, send, group=group)
    return result
