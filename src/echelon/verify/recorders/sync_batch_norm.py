"""Runs ``torch.nn.SyncBatchNorm`` on the CPU, where ``echelon verify`` runs scripts and torch refuses it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.verify.recording import Recording


def run_sync_batch_norm_on_cpu(recording: Recording) -> None:
    """Replace the forward pass of SyncBatchNorm for tensors on the CPU, and switch off DDP's refusal.

    Source: torch.nn.SyncBatchNorm, with two differentiable sums over the ranks in place of its CUDA kernels.
    """
    recording.wrap(nn.SyncBatchNorm, "forward", _forward)
    if getattr(DistributedDataParallel, "_passing_sync_batchnorm_handle", None) is not None:
        recording.wrap(DistributedDataParallel, "_passing_sync_batchnorm_handle", _check)


def _forward(forward: Any, layer: nn.SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
    is_torchs = x.device.type != "cpu" or not layer.training or not dist.is_initialized()
    result: torch.Tensor = forward(layer, x) if is_torchs else _normalized(layer, x)
    return result


def _check(check: Any, model: Any, module: nn.Module) -> None:
    if getattr(model, "device_type", "") != "cpu":
        check(model, module)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)  # of the losses of all ranks
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _normalized(layer: nn.SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, ``(samples, channels, ...)``, normalized by the mean and variance of all ranks' samples.

    Collective: every rank of the layer's process group, also in the backward pass.
    """
    if x.dim() < 2:
        raise ValueError(f"expected at least 2D input (got {x.dim()}D input)")
    group = layer.process_group or dist.group.WORLD
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    dims = [0, *range(2, x.dim())]
    shape = [1, -1] + [1] * (x.dim() - 2)
    count = torch.tensor(float(x.numel() // x.size(1)), dtype=torch.float64)
    dist.all_reduce(count, group=group)
    num = float(count)
    if num < 2:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.size()}")
    sum_over_ranks: Any = _SumOverRanks.apply
    mean = sum_over_ranks(wide.sum(dims), group) / num
    centered = wide - mean.view(shape)
    variance = sum_over_ranks(centered.square().sum(dims), group) / num
    _update_statistics(layer, mean.detach(), variance.detach() * (num / (num - 1)))
    result: torch.Tensor = centered * torch.rsqrt(variance + layer.eps).view(shape)
    if layer.weight is not None:
        result = result * layer.weight.view(shape)
    if layer.bias is not None:
        result = result + layer.bias.view(shape)
    return result.to(x.dtype)


@torch.no_grad()
def _update_statistics(layer: nn.SyncBatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
    if not layer.track_running_stats or layer.running_mean is None or layer.running_var is None:
        return
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    momentum = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    layer.running_mean.mul_(1 - momentum).add_(mean.to(layer.running_mean.dtype), alpha=momentum)
    layer.running_var.mul_(1 - momentum).add_(variance.to(layer.running_var.dtype), alpha=momentum)
