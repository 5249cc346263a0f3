"""Trial steps tell elementwise optimizers from those that need whole tensors, or all of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from echelon.base.warnings import EchelonWarning
from echelon.engines.optimizer_probe import ProbeError, probe_optimizer, warn_of_assumption


class _Own(torch.optim.Optimizer):
    """An optimizer with the update ``rule(p, gradient, state, group)``."""

    def __init__(self, params: Any, rule: Callable[..., torch.Tensor], **options: Any) -> None:
        super().__init__(params, {"lr": 0.0, **options})  # as in the first step of a warm-up
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.rule(p, p.grad, self.state[p], group), alpha=group["lr"])


def _row_scaled(p: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
    return gradient / gradient.norm(dim=1, keepdim=True)


def _trust_ratio(p: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
    return gradient * p.norm() / gradient.norm() if group.get("is_scaled", True) else gradient


def _clipped(p: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
    """Clip large gradients only."""
    return gradient * torch.clamp(100.0 / gradient.norm(), max=1.0)


def _projected(p: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
    """Project the update only if the gradient is orthogonal to the weights, as AdamP."""
    cosine = torch.nn.functional.cosine_similarity(gradient, p, dim=1).abs().max()
    return gradient - (gradient * p).sum(1, keepdim=True) * p if cosine < 1e-3 else gradient * 2


def _later(p: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
    """Collect statistics of rows and columns, which are used from the 100th step on, as Shampoo."""
    state["left"] = state.get("left", 0) + gradient @ gradient.T
    return gradient


def _in_object(p: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
    state["preconditioner"] = object()
    return gradient


def _estimating(p: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
    """Estimate a step size in the group, which does not grow in the first steps, as D-Adaptation."""
    group["numerator"] = group.get("numerator", torch.zeros(())) + (gradient * p).sum()
    return gradient


def _elementwise(p: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
    state["count"] = state.get("count", 0) + 1
    state["mean"] = state.get("mean", torch.zeros_like(p)).lerp(gradient, 0.1)
    return state["mean"].sign() + 0.1 * p


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))]


_T = torch.optim


@pytest.mark.parametrize(
    ("make", "elementwise", "by_tensor"),
    [
        *[(kind, True, True) for kind in (_T.SGD, _T.AdamW, _T.Adagrad, _T.RMSprop, _T.Adadelta, _T.ASGD, _T.Rprop)],
        (lambda p: _T.AdamW(p, fused=True, lr=1e-5), True, True),
        (lambda p: _T.AdamW(p, foreach=True, lr=torch.tensor(0.0), capturable=False), None, None),
        (lambda p: _T.Adafactor(p, lr=0.0), False, True),
        (_T.LBFGS, False, False),
        (lambda p: _Own(p, _elementwise), True, True),
        (lambda p: _Own(p, _trust_ratio), False, True),
        (lambda p: _Own(p, _clipped), False, True),
        (lambda p: _Own(p, _projected), False, True),
        (lambda p: _Own(p, _later), False, True),
        (lambda p: _Own(p, _in_object), False, True),
        (lambda p: _Own(p, _estimating), False, False),
        (lambda p: _Own(p, _row_scaled), True, True),
    ],
)
def test_trial_steps_show_what_an_update_depends_on(
    make: Callable[[Any], Any], elementwise: bool | None, by_tensor: bool | None
) -> None:
    if elementwise is None:  # refused by torch
        with pytest.raises(ValueError, match="lr as a Tensor is not supported"):
            make(_parameters())
        return
    behavior = probe_optimizer(make(_parameters()))
    assert (behavior.elementwise, behavior.by_tensor) == ((elementwise,), by_tensor)


def test_rows_may_be_independent_where_columns_are_not() -> None:
    optimizer = _Own(_parameters(), _row_scaled)
    assert probe_optimizer(optimizer, dims=(0,)).elementwise == (True,)
    assert probe_optimizer(optimizer, dims=(0, 1)).elementwise == (False,)


def test_each_group_is_tried_with_its_own_options() -> None:
    groups = [{"params": [p], "is_scaled": i == 1} for i, p in enumerate([*_parameters(), *_parameters()][:3])]
    assert probe_optimizer(_Own(groups, _trust_ratio)).elementwise == (True, False, True)


def test_the_program_is_not_disturbed() -> None:
    calls: list[Any] = []
    weights = _parameters()
    optimizer = _Own(weights, lambda p, gradient, *_: calls.append(p) or gradient + torch.rand(p.shape))
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook was called"))
    handle = register_optimizer_step_pre_hook(lambda *_: pytest.fail("a hook of all optimizers was called"))
    before = torch.get_rng_state(), random.getstate(), repr(optimizer.param_groups)
    try:
        probe_optimizer(optimizer)
    finally:
        handle.remove()
    assert calls
    assert all(p is not one for one in calls for p in weights)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), repr(optimizer.param_groups)) == before[1:]
    assert not optimizer.state
    assert all(torch.equal(p, torch.ones_like(p)) and p.grad is None for p in weights)


class _Unbuildable(torch.optim.SGD):
    def __init__(self, params: Any, secret: int) -> None:
        super().__init__(params, lr=0.1)
        self.first = self.param_groups[0]["params"][0]


def test_what_cannot_be_tried_is_named_with_the_assumption() -> None:
    optimizer = _Unbuildable(_parameters(), 1)
    with pytest.raises(ProbeError, match=r"_Unbuildable\(\.\.\.\) raises TypeError") as caught:
        probe_optimizer(optimizer)
    with pytest.warns(EchelonWarning, match=r"_Unbuildable could not be tried .* assumes that it updates each element"):
        warn_of_assumption(optimizer, caught.value, engine="fsdp2")
    with pytest.raises(ProbeError, match="its steps changed nothing"):
        probe_optimizer(_Own(_parameters(), lambda p, *_: torch.zeros_like(p)))
    with pytest.raises(ProbeError, match="RuntimeError: only on a GPU"):
        probe_optimizer(_Own(_parameters(), _on_gpu))


def _on_gpu(*_: Any) -> torch.Tensor:
    raise RuntimeError("only on a GPU")
