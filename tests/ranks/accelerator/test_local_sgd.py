"""Local SGD against two replicas simulated in one process with plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon import Accelerator
from echelon.accelerator.update.local_sgd import LocalSGD
from tests.harness import run_on_ranks
from tests.reference import gaussian, tanh_net

STEPS = 7  # not a multiple of the period, so the average at the end matters
PERIOD = 3


def _model() -> nn.Module:
    return tanh_net(4, 8, 1)


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = gaussian(5, 4, seed=100 * rank + step)
    return inputs, inputs.sum(1, keepdim=True)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _simulate(world_size: int) -> torch.Tensor:
    models = [_model() for _ in range(world_size)]
    optimizers = [_optimizer(model) for model in models]
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers)):
            inputs, targets = _batch(rank, step)
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if (step + 1) % PERIOD == 0 or step + 1 == STEPS:
            with torch.no_grad():
                for copies in zip(*(model.parameters() for model in models)):
                    mean = torch.stack(copies).mean(0)
                    for parameter in copies:
                        parameter.copy_(mean)
    return _weights(models[0])


def _train(enabled: bool) -> tuple[torch.Tensor, bool, int, int]:
    accelerator = Accelerator(cpu=True)
    model = _model()
    model, optimizer = accelerator.prepare(model, _optimizer(model))
    drifted = False
    with LocalSGD(accelerator, model, PERIOD, enabled) as local_sgd:
        for step in range(STEPS):
            inputs, targets = _batch(accelerator.process_index, step)
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            local_sgd.step()
            if step == 0:
                both = accelerator.gather(_weights(model)).view(accelerator.num_processes, -1)
                drifted = not torch.equal(both[0], both[-1])
    return _weights(model), drifted, local_sgd.num_steps, dist.get_world_size()


def test_two_ranks_match_two_replicas_in_one_process() -> None:
    (first, drifted, steps, _), (second, _, _, _) = run_on_ranks(_train, True)
    assert drifted  # the ranks trained independently
    assert steps == STEPS
    assert torch.equal(first, second)
    torch.testing.assert_close(first, _simulate(2), rtol=1e-12, atol=1e-12)


def test_disabled_local_sgd_has_no_effect() -> None:
    (first, drifted, steps, _), (second, _, _, _) = run_on_ranks(_train, False)
    assert not drifted
    assert steps == STEPS
    assert torch.equal(first, second)


def _raise_everywhere() -> bool:
    accelerator = Accelerator(cpu=True)
    model = _model()
    model, _ = accelerator.prepare(model, _optimizer(model))
    with torch.no_grad():
        next(model.parameters()).fill_(accelerator.process_index)
    with pytest.raises(ZeroDivisionError), LocalSGD(accelerator, model, PERIOD):
        raise ZeroDivisionError("planted")
    return bool((next(model.parameters()) == accelerator.process_index).all())


def test_leaving_the_block_with_an_exception_does_not_communicate() -> None:
    assert run_on_ranks(_raise_everywhere) == [True, True]


def _refuse() -> list[str]:
    accelerator: Any = Accelerator(cpu=True)
    with pytest.raises(ValueError) as error:
        LocalSGD(accelerator, _model(), 0)
    return str(error.value).splitlines()[:1]


def test_a_period_below_one_is_refused() -> None:
    assert run_on_ranks(_refuse, world_size=1) == [["local_sgd_steps=0 is below 1"]]
