"""Compressed gradients with gloo, against plain DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.base.errors import ConfigError
from echelon.engines.comm_hooks import register_comm_hook
from tests.harness import run_on_ranks
from tests.reference import tanh_net

STEPS = 12


def _model() -> nn.Module:
    return tanh_net(32, 64, 64, 8, dtype=torch.float32)


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _train(rank: int, hook: str, bucket_cap_mb: float, **options: Any) -> tuple[torch.Tensor, float]:
    model = _model()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
    register_comm_hook(wrapped, hook=hook, **options)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.2)
    generator = torch.Generator().manual_seed(rank)
    last = 0.0
    for _ in range(STEPS):
        inputs = torch.randn(16, 32, generator=generator)
        loss = nn.functional.mse_loss(wrapped(inputs), inputs[:, :8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = loss.item()
    return _weights(model), last


def _compare(cases: list[tuple[str, float, dict[str, Any]]]) -> list[tuple[float, float, torch.Tensor]]:
    """Return for each case the relative distance to plain DDP's weights, the difference of the last losses, and the weights."""
    rank = torch.distributed.get_rank()
    plain, plain_loss = _train(rank, "no", 25)
    found = []
    for hook, bucket_cap_mb, options in cases:
        weights, loss = _train(rank, hook, bucket_cap_mb, **options)
        way = (plain - _weights(_model())).norm()
        found.append((((weights - plain).norm() / way).item(), abs(loss - plain_loss), weights))
    return found


LOW_RANK = {"state_options": {"start_powerSGD_iter": 3, "matrix_approximation_rank": 4}}
# The largest distances allowed, over the way that plain DDP's weights went. A rounding to fp16 (bf16) is at most 2^-11
# (2^-8) of each gradient, hence of each step. There is no such formula for low rank: a fifth, and the loss agrees to 0.02.
CASES: list[tuple[str, float, dict[str, Any], float]] = [
    ("fp16", 25, {}, 2**-11),
    ("bf16", 25, {}, 2**-8),
    ("fp16", 25, {"wrapper": "bf16"}, 2**-8),
    ("power_sgd", 25, LOW_RANK, 0.2),
    ("power_sgd", 0.005, LOW_RANK, 0.2),
    ("power_sgd", 0.005, {**LOW_RANK, "wrapper": "bf16"}, 0.2),
]


def test_every_hook_is_close_to_plain_ddp_and_the_ranks_agree() -> None:
    first, second = run_on_ranks(_compare, [case[:3] for case in CASES])
    for (hook, cap, options, limit), one, other in zip(CASES, first, second):
        case = f"{hook} {cap} {options}: {one[0]} {one[1]}"
        assert 0 < one[0] < limit, case  # compressed, hence not equal
        assert one[1] < 0.02, case
        assert torch.equal(one[2], other[2]), case


def test_power_sgd_works_with_several_buckets() -> None:
    """Without waiting for each bucket, gloo adds tensors of different sizes or aborts the process."""
    case = ("power_sgd", 0.005, {"state_options": {"start_powerSGD_iter": 2, "matrix_approximation_rank": 2}})
    first, second = run_on_ranks(_compare, [case] * 3)
    assert all(torch.equal(one[2], other[2]) for one, other in zip(first, second))


def _texts() -> list[str]:
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    texts = []
    for options in (
        {"hook": "batched_power_sgd"},
        {"hook": "no", "wrapper": "bf16"},
        {"hook": "fp16", "wrapper": "power_sgd"},
        {"hook": "fp16", "state_options": {"matrix_approximation_rank": 1}},
        {"hook": "int8"},
    ):
        with pytest.raises(ConfigError) as error:
            register_comm_hook(wrapped, **options)  # type: ignore[arg-type]
        texts.append(error.value.what)
    register_comm_hook(wrapped, hook="fp16")  # the rejected calls changed nothing
    return texts


def test_batched_power_sgd_and_invalid_combinations_are_rejected() -> None:
    (batched, alone, no_wrapper, no_state, unknown), _ = run_on_ranks(_texts)
    assert batched.startswith("comm_hook='batched_power_sgd' does not work in torch")
    assert alone == "comm_wrapper='bf16' has no effect without a comm_hook"
    assert no_wrapper == "comm_wrapper='power_sgd' is unknown"
    assert no_state == "comm_state_option is set, but comm_hook='fp16' does not use any state"
    assert unknown == "comm_hook='int8' is unknown"


def _through_the_accelerator() -> list[float]:
    from echelon import Accelerator, DistributedDataParallelKwargs

    handler = DistributedDataParallelKwargs(comm_hook="bf16")  # type: ignore[arg-type]  # as scripts write it
    accelerator = Accelerator(kwargs_handlers=[handler])
    model = accelerator.prepare(torch.nn.Linear(3, 1, bias=False))
    accelerator.backward(model(torch.full((1, 3), 1.0 + 2.0**-12)).sum())
    (parameter,) = model.parameters()
    return parameter.grad.flatten().tolist()


def test_the_handlers_hook_reaches_the_engine() -> None:
    # 1 + 2**-12 needs 12 bits of mantissa. bfloat16 has 7, so a gradient sent as bfloat16 is exactly 1.
    assert run_on_ranks(_through_the_accelerator, world_size=2) == [[1.0] * 3] * 2
