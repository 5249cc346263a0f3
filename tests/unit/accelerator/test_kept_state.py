"""``KeptState`` goes back and forth between two states of weights and optimizers, to the last bit."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from echelon.accelerator.update.kept_state import KeptState


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5


@pytest.mark.parametrize("num_steps", [0, 2])  # 0: the optimizer has no state yet
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad", "capturable"])
def test_the_kept_state_and_the_current_one_change_places(kind: str, num_steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    if kind == "SGD":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    elif kind == "capturable":
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    else:
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    prepared: Any = SimpleNamespace(optimizer=optimizer, param_groups=optimizer.param_groups, averages=[])
    kept = KeptState(SimpleNamespace(optimizers=[prepared]))  # type: ignore[arg-type]
    assert not kept.is_there
    for _ in range(num_steps):
        _step(model, optimizer)
        kept.keep()
    kept.keep()
    before = _state(model, optimizer)
    parameters = list(model.parameters())
    for _ in range(2):
        _step(model, optimizer)
    after = _state(model, optimizer)
    for expected in (before, after, before):
        kept.swap()
        torch.testing.assert_close(_state(model, optimizer), expected, rtol=0, atol=0)
    assert all(one is other for one, other in zip(parameters, model.parameters()))
    _step(model, optimizer)  # the states still belong to the parameters
    kept.swap()
    torch.testing.assert_close(_state(model, optimizer), after, rtol=0, atol=0)
