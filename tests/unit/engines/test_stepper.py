"""Steps and clipping as torch's, bit for bit; a scaler that says whether a step was taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from echelon.engines.stepper import Stepper


def _gradients(dtypes: list[torch.dtype], scale: float) -> list[nn.Parameter]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 4 + i).to(dtype)) for i, dtype in enumerate(dtypes)]
    for p in parameters[:-1]:  # the last one has none
        p.grad = (torch.randn(p.shape) * scale).to(p.dtype)
    return parameters


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_skipped_by_the_scaler_is_reported(fused: bool) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused)
    stepper = Stepper(torch.amp.GradScaler("cpu", init_scale=4.0))
    taken = []
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        stepper.scale((parameter * factor).sum()).backward()
        before = parameter.detach().clone()
        told = stepper.step(optimizer)
        taken.append((told, not torch.equal(before, parameter)))
    assert taken == [(True, True), (False, False), (True, True)]


def test_the_scale_changes_after_the_steps_of_all_optimizers() -> None:
    """The second optimizer is unscaled by the scale of its own backward pass, not by one that the first one's inf halved."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    stepper = Stepper(scaler)
    bad, good = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    first, second = torch.optim.SGD([bad], lr=1.0), torch.optim.SGD([good], lr=1.0)
    stepper.scale((bad * float("inf")).sum() + good.sum()).backward()
    assert stepper.step(first) is False
    assert stepper.step(second) is True
    assert good.tolist() == [0.0, 0.0]
    stepper.scale(good.sum())
    assert scaler.get_scale() == 4.0


def test_a_step_is_the_optimizers_own_with_its_hooks_and_its_profiler_region(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = _gradients([torch.float32] * 3, 1.0)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    everywhere = register_optimizer_step_post_hook(lambda *_: calls.append("after, of all optimizers"))
    step: Any = optimizer.step
    monkeypatch.setattr(optimizer, "step", lambda *_: calls.append("wrapped") or step())
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            assert Stepper(None).step(optimizer)
    finally:
        everywhere.remove()
    assert calls == ["wrapped", "before", "after", "after, of all optimizers"]
    assert "Optimizer.step#SGD.step" in {event.key for event in seen.key_averages()}
