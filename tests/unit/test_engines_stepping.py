"""Steps and clipping as torch's, bit for bit; a scaler that says whether a step was taken."""

from __future__ import annotations

from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from echelon.engines.stepper import Stepper, clip_gradients, take_step


def _gradients(dtypes: list[torch.dtype], scale: float) -> list[nn.Parameter]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 4 + i).to(dtype)) for i, dtype in enumerate(dtypes)]
    for p in parameters[:-1]:  # the last one has none
        p.grad = (torch.randn(p.shape) * scale).to(p.dtype)
    return parameters


@pytest.mark.parametrize(
    "dtypes", [[torch.float32] * 4, [torch.float64] * 3, [torch.float32, torch.bfloat16] * 2, [torch.float32]]
)
@pytest.mark.parametrize(
    ("scale", "norm_type"), [(10.0, 2.0), (1e-3, 2.0), (10.0, 1.0), (10.0, float("inf")), (0.0, 2.0)]
)
def test_clipping_is_bit_identical_to_torch(dtypes: list[torch.dtype], scale: float, norm_type: float) -> None:
    mine, theirs = _gradients(dtypes, scale), _gradients(dtypes, scale)
    norm = clip_gradients(iter(mine), 1.0, norm_type)
    expected = nn.utils.clip_grad_norm_(theirs, 1.0, norm_type=norm_type)
    assert torch.equal(norm, expected)
    for p, q in zip(mine, theirs):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)


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


def _with_gradients(
    kind: type[torch.optim.Optimizer], **options: Any
) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    parameters = _gradients([torch.float32] * 3, 1.0)
    return parameters, kind([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5}], lr=0.1, **options)


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adafactor]
)
def test_a_step_without_the_profiler_region_is_torchs_step(kind: type[torch.optim.Optimizer]) -> None:
    mine, theirs = _with_gradients(kind), _with_gradients(kind)
    for _ in range(3):
        take_step(mine[1])
        theirs[1].step()
    for p, q in zip(mine[0], theirs[0], strict=True):
        assert torch.equal(p, q)
        assert not p.grad_fn
    for (name, held), other in zip(mine[1].state.items(), theirs[1].state.values(), strict=True):
        assert all(torch.equal(torch.as_tensor(held[key]), torch.as_tensor(other[key])) for key in held), name


def _regions(optimizer: torch.optim.Optimizer) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        take_step(optimizer)
    return {event.key for event in seen.key_averages()}


def test_a_profiler_sees_the_region_of_the_step() -> None:
    _, optimizer = _with_gradients(torch.optim.SGD)
    assert "Optimizer.step#SGD.step" in _regions(optimizer)


@pytest.mark.parametrize("place", ["optimizer, before", "optimizer, after", "all optimizers, before", "all, after"])
def test_hooks_run_in_torchs_order_and_see_the_weights_as_in_torch(place: str) -> None:
    parameters, optimizer = _with_gradients(torch.optim.SGD)
    start, seen = parameters[0].detach().clone(), []

    def hook(which: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen.append((which is optimizer, args[0] is optimizer, kwargs, torch.equal(parameters[0], start)))

    register = {
        "optimizer, before": optimizer.register_step_pre_hook,
        "optimizer, after": optimizer.register_step_post_hook,
        "all optimizers, before": register_optimizer_step_pre_hook,
        "all, after": register_optimizer_step_post_hook,
    }[place]
    handle = register(hook)
    try:
        take_step(optimizer)
    finally:
        handle.remove()
    assert seen == [(True, True, {}, "before" in place)]
    assert not torch.equal(parameters[0], start)


def test_a_hook_may_replace_the_arguments() -> None:
    _, optimizer = _with_gradients(torch.optim.SGD)
    calls: list[int] = []

    def add_closure(which: Any, args: Any, kwargs: Any) -> Any:
        return args, {"closure": lambda: calls.append(1)}

    handle = register_optimizer_step_pre_hook(add_closure)
    try:
        take_step(optimizer)
    finally:
        handle.remove()
    assert calls == [1]


@pytest.mark.parametrize(
    "place",
    ["object", "class", "class, as functools.wraps does", "object, over a scheduler's", "object, wraps its class's"],
)
def test_a_step_that_a_user_has_wrapped_is_called(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Own(torch.optim.SGD):
        """Its class attribute is replaced, not that of all SGD optimizers."""

    _, optimizer = _with_gradients(Own)
    if "scheduler" in place:
        torch.optim.lr_scheduler.ConstantLR(optimizer)
    target: Any = optimizer if place.startswith("object") else Own
    old: Any = Own.step if "its class" in place else target.step

    def step(*args: Any, **kwargs: Any) -> Any:
        calls.append("mine")
        return old(optimizer) if "its class" in place else old(*args, **kwargs)

    keeps_attributes = "wraps" in place or "scheduler" in place
    monkeypatch.setattr(target, "step", wraps(old)(step) if keeps_attributes else step)
    take_step(optimizer)
    assert calls == ["mine"]


def test_a_scheduler_knows_that_the_optimizer_has_stepped(recwarn: pytest.WarningsRecorder) -> None:
    parameters, optimizer = _with_gradients(torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    start = parameters[0].detach().clone()
    take_step(optimizer)
    scheduler.step()
    assert not [one for one in recwarn if "lr_scheduler.step()" in str(one.message)]
    assert torch.equal(parameters[0], start.add(parameters[0].grad, alpha=-0.1))
    with torch.no_grad():
        parameters[0].copy_(start)
    take_step(optimizer)
    assert torch.equal(parameters[0], start.add(parameters[0].grad, alpha=-0.05))


@pytest.mark.parametrize("result", [1, (1, 2, 3), [(), {}]])
def test_a_hook_that_returns_something_else_is_refused_as_by_torch(result: Any) -> None:
    _, optimizer = _with_gradients(torch.optim.SGD)
    handle = register_optimizer_step_pre_hook(lambda *_: result)
    try:
        with pytest.raises(RuntimeError) as refused:
            optimizer.step()
        with pytest.raises(RuntimeError) as found:
            take_step(optimizer)
    finally:
        handle.remove()
    assert str(found.value) == str(refused.value)


def test_no_profiler_region_is_entered_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = _with_gradients(torch.optim.SGD)

    def refuse(*_: Any) -> None:
        raise AssertionError("a region was entered")

    monkeypatch.setattr(torch.autograd.profiler.record_function, "__enter__", refuse)
    take_step(optimizer)
    with pytest.raises(AssertionError, match="a region"):
        optimizer.step()
