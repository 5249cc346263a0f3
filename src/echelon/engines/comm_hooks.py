"""DDP communication hooks that compress gradients (half precision, PowerSGD). Unlike torch's hooks, they work with gloo."""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with the classes themselves.

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from echelon.base.errors import ConfigError

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


_POWER_SGD = ("power_sgd", "batched_power_sgd")


def register_comm_hook(
    model: DistributedDataParallel,
    *,
    hook: str,
    wrapper: str = "no",
    state_options: Mapping[str, Any] | None = None,
) -> None:
    """Register a hook that compresses the model's gradients. Call this function once, before the first backward pass.

    Args:
        model: the DDP model.
        hook: ``no``, ``fp16`` or ``bf16`` (sends half as many bytes), ``power_sgd`` (sends low-rank factors of each matrix), or
            ``batched_power_sgd`` (sends low-rank factors of each bucket, which is coarser).
        wrapper: ``no``, or ``fp16`` or ``bf16`` to cast the bucket before the hook and back after it.
        state_options: arguments for ``PowerSGDState``.

    Raises:
        ConfigError: the combination is not supported.

    Source: torch.distributed.algorithms.ddp_comm_hooks; Vogels et al., "PowerSGD", NeurIPS 2019.
    """
    _check(hook, wrapper, state_options or {})
    if hook == "no":
        return
    group = model.process_group
    found = _HOOKS[hook]
    if wrapper != "no":
        found = _compressed(found, _DTYPES[wrapper])
    if hook in _POWER_SGD and dist.get_backend(group) == dist.Backend.GLOO:
        found = _one_at_a_time(found)
    state = powerSGD_hook.PowerSGDState(group, **(state_options or {})) if hook in _POWER_SGD else group
    model.register_comm_hook(state, found)


def _check(hook: str, wrapper: str, options: Mapping[str, Any]) -> None:
    if hook not in ("no", *_HOOKS):
        raise ConfigError(f"comm_hook={hook!r} is unknown", do=f"choose one of 'no', {', '.join(map(repr, _HOOKS))}")
    if wrapper not in ("no", *_DTYPES):
        raise ConfigError(
            f"comm_wrapper={wrapper!r} is unknown",
            do=f"choose one of 'no', {', '.join(map(repr, _DTYPES))}, and set other hooks with comm_hook",
        )
    if hook == "no" and wrapper != "no":
        raise ConfigError(
            f"comm_wrapper={wrapper!r} has no effect without a comm_hook", do=f"set comm_hook={wrapper!r} instead"
        )
    if options and hook not in _POWER_SGD:
        raise ConfigError(
            f"comm_state_option is set, but comm_hook={hook!r} does not use any state",
            do="remove comm_state_option, or set comm_hook='power_sgd'",
        )
    if hook == "batched_power_sgd" and not _batched_works():
        raise ConfigError(
            f"comm_hook='batched_power_sgd' does not work in torch {torch.__version__}, because torch's orthogonalization rejects "
            "the hook's matrices",
            do="set comm_hook='power_sgd', which is also more accurate",
        )


def _batched_works() -> bool:
    """Return whether torch's batched hook still works after its first compressed step.

    In torch 2.13 the hook passes a single matrix to a function that asserts a batch of matrices
    (test_batched_power_sgd_and_invalid_combinations_are_rejected). Calling torch's function detects versions with the defect.
    """
    try:
        powerSGD_hook._orthogonalize(torch.eye(2))  # type: ignore[no-untyped-call]
    except AssertionError:
        return False
    return True


def _half_hook(dtype: torch.dtype) -> Hook:
    def average_in_half(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        # Divide before the sum: fp16 overflows at 65504.
        sent = buffer.to(dtype).div_(dist.get_world_size(state))
        future = dist.all_reduce(sent, group=state, async_op=True).get_future()

        return cast("torch.futures.Future[torch.Tensor]", future.then(lambda done: buffer.copy_(_first(done.value()))))

    return average_in_half


def _compressed(hook: Hook, dtype: torch.dtype) -> Hook:
    """Wrap ``hook`` so that it receives the bucket in ``dtype``.

    Without NCCL, DDP rejects torch's own bf16 wrapper by its name.
    """

    def in_half(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        bucket.set_buffer(buffer.to(dtype))

        def widen(done: torch.futures.Future[Any]) -> torch.Tensor:
            buffer.copy_(_first(done.value()))
            bucket.set_buffer(buffer)
            return buffer

        return cast("torch.futures.Future[torch.Tensor]", hook(state, bucket).then(widen))

    return in_half


def _one_at_a_time(hook: Hook) -> Hook:
    """Wrap ``hook`` so that it finishes the collectives for one bucket before the next bucket starts.

    PowerSGD starts its second collective in a gloo thread when the first one finishes. With several buckets, the order of
    collectives then differs between ranks, and gloo adds tensors of different sizes or aborts (torch 2.7 to 2.13;
    test_power_sgd_works_with_several_buckets). DDP calls the hook in the same order on all ranks.
    """

    def in_order(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = hook(state, bucket)
        future.wait()
        return future

    return in_order


def _first(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value[0] if isinstance(value, list) else value
    return tensor


_DTYPES: Mapping[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
_HOOKS: Mapping[str, Any] = {
    "fp16": _half_hook(torch.float16),
    "bf16": _half_hook(torch.bfloat16),
    "power_sgd": powerSGD_hook.powerSGD_hook,
    "batched_power_sgd": powerSGD_hook.batched_powerSGD_hook,
}
