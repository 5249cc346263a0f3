"""Hooks on all optimizers and modules of the process: what they see, and that they end with their owner."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from echelon import Accelerator
from echelon.distributed.torch_hooks import is_in_backward, watch_calls, watch_module_changes, watch_optimizer_steps


class _Owner:
    def __init__(self) -> None:
        self.steps: list[str] = []
        self.modules: list[str] = []

    def before_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
        self.steps.append(type(optimizer).__name__)
        return None if closure is None else lambda: (closure(), self.steps.append("closure"))[0]

    def on_change(self, module: nn.Module) -> None:
        self.modules.append(type(module).__name__)


def _num_hooks() -> int:
    return sum(
        len(hooks)
        for hooks in (
            torch_optimizer._global_optimizer_pre_hooks,
            torch_module._global_parameter_registration_hooks,
            torch_module._global_module_registration_hooks,
        )
    )


class _Mine(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS, torch.optim.SparseAdam, _Mine])
def test_steps_of_every_optimizer_are_observed(kind: type[torch.optim.Optimizer]) -> None:
    owner = _Owner()
    watch_optimizer_steps(owner, _Owner.before_step)
    model = nn.Linear(2, 1)
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    is_sparse = kind is torch.optim.SparseAdam

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        if not is_sparse:
            loss.backward()
        return loss

    closure()
    if kind is torch.optim.LBFGS:
        optimizer.step(closure)
        assert set(owner.steps) == {"LBFGS", "closure"}
    else:
        optimizer.step()
        optimizer.step(closure=closure)
        assert owner.steps[0] == kind.__name__
        assert owner.steps[-1] == "closure"
        # A step that calls its base class's, which torch hooks, too, is seen as often.
        assert owner.steps.count(kind.__name__) == (4 if kind is _Mine else 2)


def test_adding_a_parameter_or_module_is_observed() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    owner = _Owner()
    watch_module_changes(owner, _Owner.on_change)
    model[0].bias = nn.Parameter(torch.ones(2))
    model[0] = nn.Identity()
    model.append(nn.Identity())
    assert owner.modules == ["Linear", "Sequential", "Sequential"]


def test_hooks_are_removed_with_their_owner() -> None:
    gc.collect()
    before = _num_hooks()
    owner = _Owner()
    remove = watch_optimizer_steps(owner, _Owner.before_step)
    watch_module_changes(owner, _Owner.on_change)
    assert _num_hooks() == before + 3
    remove()
    assert _num_hooks() == before + 2
    del owner
    assert _num_hooks() == before

    class _Dies(_Owner):
        def before_step(self, optimizer: torch.optim.Optimizer, closure: Any) -> Any:
            owners.clear()  # as the garbage collector may, in the middle of torch's walk over the hooks
            return super().before_step(optimizer, closure)

    owners = [_Dies(), _Dies()]
    for one in owners:
        watch_optimizer_steps(one, _Dies.before_step)
    del one
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    optimizer.step()
    assert not owners
    optimizer.step()
    other = _Owner()
    watch_optimizer_steps(other, _Owner.before_step)
    assert _num_hooks() == before + 1


def test_the_hooks_of_an_accelerator_end_with_it() -> None:
    gc.collect()
    before = _num_hooks()
    accelerator = Accelerator(cpu=True)
    model: nn.Module = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    dies = weakref.ref(accelerator)
    assert _num_hooks() > before
    del accelerator, model, optimizer
    gc.collect()
    assert dies() is None
    assert _num_hooks() == before


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, when it compiles for the first time
def test_compiled_steps_are_observed() -> None:
    owner = _Owner()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch_optimizer_steps(owner, _Owner.before_step)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for count in (1, 2):
        model(torch.ones(1, 2)).sum().backward()
        step()
        assert owner.steps == ["SGD"] * count


def test_a_hook_of_a_parameter_is_inside_the_backward_pass() -> None:
    seen = []
    model = nn.Linear(1, 1)
    model.weight.register_post_accumulate_grad_hook(lambda _: seen.append(is_in_backward()))
    model(torch.ones(1, 1)).sum().backward()
    assert (seen, is_in_backward()) == ([True], False)


class _Loop:
    def __init__(self) -> None:
        self.seen: list[tuple[object, str]] = []

    def note(self, called: object, result: str) -> None:
        self.seen.append((called, result))


class _Called:
    def run(self, text: str) -> str:
        return text.upper()


def test_a_watched_method_is_the_classs_own_again_when_nobody_watches() -> None:
    plain, called = _Called.run, _Called()
    first, second = _Loop(), _Loop()
    stop = watch_calls(first, _Called, "run", _Loop.note)
    watch_calls(second, _Called, "run", _Loop.note)
    assert called.run("a") == "A"
    stop()
    stop()
    assert called.run("b") == "B"
    assert first.seen == [(called, "A")]
    assert second.seen == [(called, "A"), (called, "B")]
    del second
    gc.collect()
    assert _Called.run is plain
    watch_calls(first, _Called, "run", _Loop.note)
    assert called.run("c") == "C"
    assert first.seen[-1] == (called, "C")
