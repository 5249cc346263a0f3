"""Faults in torch and in echelon: context managers that patch one function on a rank of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

__all__: list[str] = []  # by name, from ``Mutant.fault``


def no_exchange_of_parts() -> AbstractContextManager[Any]:
    """ZeRO-1: no rank sends the weights that it has updated."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return mock.patch.object(ZeroRedundancyOptimizer, "_sync_params")


def rates_not_passed_on() -> AbstractContextManager[Any]:
    """ZeRO-1: the optimizer of a part does not get the rates that the schedule sets."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return mock.patch.object(ZeroRedundancyOptimizer, "_sync_param_groups", staticmethod(lambda source, target: None))


def gradients_divided_twice() -> AbstractContextManager[Any]:
    """FSDP2: the divisor is the square of the number of ranks."""
    return _divide_factor(lambda size: float(size * size))


def gradients_not_divided() -> AbstractContextManager[Any]:
    """FSDP2: the divisor is one."""
    return _divide_factor(lambda size: 1.0)


def _divide_factor(factor_of: Callable[[int], float]) -> AbstractContextManager[Any]:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    plain = _fsdp_collectives._get_gradient_divide_factors

    def changed(group: Any, other: Any, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        return plain(group, other, dtype, "cpu", factor_of(group.size()), True)

    return mock.patch.object(_fsdp_collectives, "_get_gradient_divide_factors", changed)


def norm_of_own_shards() -> AbstractContextManager[Any]:
    """FSDP2: each rank clips by the norm of its own shards."""
    return _norm(lambda own, whole: own)


def norm_too_large() -> AbstractContextManager[Any]:
    """FSDP2: the norm is too large by the square root of the number of shards."""
    return _norm(lambda own, whole: whole * dist.get_world_size() ** 0.5)


def _norm(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> AbstractContextManager[Any]:
    from echelon.engines.fsdp import fsdp2
    from echelon.engines.shards import local_tensors

    plain = fsdp2.total_norm

    def changed(gradients: Any, p: float, *args: Any, **options: Any) -> torch.Tensor:
        whole = plain(gradients, p, *args, **options)
        own = torch.stack([local.norm() for local in local_tensors(gradients)]).norm()
        return change(own, whole)

    return mock.patch.object(fsdp2, "total_norm", changed)


def earlier_micro_steps_dropped() -> AbstractContextManager[Any]:
    """Only the gradient of the last micro-step is left, as in ZeRO-2 of DeepSpeed (accelerate#3877)."""
    from echelon import Accelerator

    plain = Accelerator.backward

    def backward(self: Any, loss: torch.Tensor, **options: Any) -> None:
        if self.sync_gradients and dist.is_initialized():
            for optimizer in self._optimizers:
                optimizer.engine.zero_grad(optimizer.optimizer, set_to_none=True)
        plain(self, loss, **options)

    return mock.patch.object(Accelerator, "backward", backward)


def items_not_summed() -> AbstractContextManager[Any]:
    """The items of an update are those of the own rank, times the number of ranks."""
    from echelon.accelerator.update.gradient_normalization import AccumulationWindow

    plain = AccumulationWindow.__init__

    def init(self: Any, *, world_size: int, total_of: Any, **options: Any) -> None:
        plain(self, world_size=world_size, total_of=lambda own: own * world_size, **options)

    return mock.patch.object(AccumulationWindow, "__init__", init)


def average_over_too_many() -> AbstractContextManager[Any]:
    """DDP: the sum of the gradients is divided by one rank too many."""
    plain = DistributedDataParallel.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        size = dist.get_world_size()

        def hook(_: Any, bucket: Any) -> Any:
            reduced = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
            return reduced.then(lambda future: future.value()[0] / (size + 1))

        hook.__annotations__.clear()  # torch compares them with classes, and here they are strings
        self.register_comm_hook(None, hook)

    return mock.patch.object(DistributedDataParallel, "__init__", init)


def buckets_without_last_parameter() -> AbstractContextManager[Any]:
    """DDP: one parameter is missing in the buckets."""
    plain = DistributedDataParallel.__init__

    def init(self: Any, module: nn.Module, *args: Any, **options: Any) -> None:
        last = list(dict(module.named_parameters()))[-1]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [last])
        plain(self, module, *args, **options)

    return mock.patch.object(DistributedDataParallel, "__init__", init)


def sampler_without_epoch() -> AbstractContextManager[Any]:
    """DistributedSampler: set_epoch has no effect."""
    return mock.patch.object(DistributedSampler, "set_epoch")


def sampler_of_neighbours() -> AbstractContextManager[Any]:
    """DistributedSampler: the last rank reads the shard of the one before it."""
    plain = DistributedSampler.__iter__

    def changed(self: Any) -> Any:
        rank, self.rank = self.rank, min(self.rank, max(self.num_replicas - 2, 0))
        samples = list(plain(self))
        self.rank = rank
        return iter(samples)

    return mock.patch.object(DistributedSampler, "__iter__", changed)


def optimizer_state_shifted() -> AbstractContextManager[Any]:
    """torch: state of equal shapes is assigned to the wrong parameter."""
    plain = torch.optim.Optimizer.load_state_dict

    def changed(self: Any, state: Any) -> None:
        values = dict(state["state"])
        for key, value in values.items():
            values[key] = {n: v.flip(0) if v.ndim else v for n, v in value.items()}
        plain(self, {**state, "state": values})

    return mock.patch.object(torch.optim.Optimizer, "load_state_dict", changed)


def torch_norm_of_own_shards() -> AbstractContextManager[Any]:
    """torch: clip_grad_norm_ uses the norm of the rank's own shards (pytorch#149768)."""
    return _torch_norm(lambda tensors: [getattr(one, "_local_tensor", one) for one in tensors])


def norm_of_first_tensor() -> AbstractContextManager[Any]:
    """torch: clip_grad_norm_ uses the norm of one gradient."""
    return _torch_norm(lambda tensors: list(tensors)[:1])


def _torch_norm(choose: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    module: Any = import_module("torch.nn.utils.clip_grad")
    plain = module._get_total_norm

    def changed(tensors: Any, *args: Any, **options: Any) -> torch.Tensor:
        return plain(choose(tensors), *args, **options)  # type: ignore[no-any-return]

    return mock.patch.object(module, "_get_total_norm", changed)


def repeated_samples() -> AbstractContextManager[Any]:
    """echelon: the last rank gets the batches of the one before it."""
    from echelon.data.sharding.sharded_batches import RankBatchSampler

    plain = RankBatchSampler.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        self.process_index = min(self.process_index, max(self.num_processes - 2, 0))

    return mock.patch.object(RankBatchSampler, "__init__", init)


def weights_not_broadcast() -> AbstractContextManager[Any]:
    """DDP: the weights of rank 0 are not sent at the start, and another rank begins with others."""
    plain = DistributedDataParallel.__init__

    def init(self: Any, module: nn.Module, *args: Any, **options: Any) -> None:
        if dist.get_rank() == 1:
            with torch.no_grad():
                next(module.parameters()).mul_(1.01)
        plain(self, module, *args, init_sync=False, **options)

    return mock.patch.object(DistributedDataParallel, "__init__", init)


@contextmanager
def no_sync_leaks() -> Iterator[None]:
    """DDP: after a no_sync block the next backward pass is not synchronized, either."""
    plain = DistributedDataParallel.no_sync

    @contextmanager
    def changed(self: Any) -> Iterator[None]:
        with plain(self):
            yield
        self.require_backward_grad_sync = False

    with mock.patch.object(DistributedDataParallel, "no_sync", changed):
        yield


def steps_counted_twice() -> AbstractContextManager[Any]:
    """torch: Adam's step count on rank 1 is too large, so that its bias correction is wrong."""
    plain = torch.optim.AdamW.step

    def changed(self: Any, *args: Any, **options: Any) -> Any:
        result = plain(self, *args, **options)
        if dist.is_initialized() and dist.get_rank() == 1:
            for state in self.state.values():
                state["step"].add_(1)
        return result

    return mock.patch.object(torch.optim.AdamW, "step", changed)
