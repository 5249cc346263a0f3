"""``parity="exact"`` with several micro-steps: updates that a loop leaves, or whose step never comes, against the plain loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator
from echelon.base.errors import UsageError
from tests.harness import run_on_ranks
from tests.reference import mean_square, train_updates

X = torch.arange(64.0, dtype=torch.float64).reshape(32, 2).sin()


def _model() -> nn.Linear:
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, 0.5)
    return model


def _plain(batches: list[torch.Tensor]) -> torch.Tensor:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train_updates(model, lambda x: mean_square(model(x)), [[x] for x in batches], optimizer).weights[0]


def _prepared(
    loop: Callable[[Accelerator, Any, Any, Any], None], micro: int | None = 4
) -> tuple[torch.Tensor, list[str]]:
    accelerator = Accelerator(cpu=True, parity="exact", max_micro_batch_size=micro)
    model = _model()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(X), batch_size=16)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop(accelerator, model, optimizer, loader)
    return accelerator.unwrap_model(model).weight.detach().clone(), [str(one.message) for one in caught]


def _step(accelerator: Accelerator, model: Any, optimizer: Any, x: Any) -> None:
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def _leaves_at_the_last_micro_batch(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for (x,) in loader:
        if accelerator.progress.samples_seen == 32 and accelerator.sync_gradients:  # the second update's last one
            break
        _step(accelerator, model, optimizer, x)
    for (x,) in loader:
        _step(accelerator, model, optimizer, x)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_of_an_update_left_at_its_last_micro_batch_are_dropped(world_size: int) -> None:
    expected = _plain([X[:16], X[:16], X[16:]])
    ranks = run_on_ranks(_prepared, _leaves_at_the_last_micro_batch, world_size=world_size)
    for weight, _ in ranks:
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=0)  # float64, sums in another order
    assert any("a loop ended in the middle of an update with several micro-steps" in text for text in ranks[0][1])


def _updates_after_the_loop(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for (x,) in loader:
        with accelerator.accumulate(model):
            _step(accelerator, model, optimizer, x)
    with accelerator.accumulate(model):
        _step(accelerator, model, optimizer, X[16:])


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_update_after_the_loop_counts_whole(world_size: int) -> None:
    expected = _plain([X[:16], X[16:], X[16:]])
    for weight, _ in run_on_ranks(_prepared, _updates_after_the_loop, None, world_size=world_size):
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=0)


def _reads_one_piece(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    (x,) = next(iter(loader))
    _step(accelerator, model, optimizer, x)


def test_a_piece_of_a_batch_whose_iterator_is_closed_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"next\(iter\(loader\)\)"):
        _prepared(_reads_one_piece)


def _steps_in_the_first_micro_step(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for _ in range(2):
        for (x,) in loader:
            accelerator.backward(model(x).square().mean())
            if accelerator.progress.micro_step == 1:
                optimizer.step()


def _guards_its_steps(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for _ in range(2):
        for (x,) in loader:
            accelerator.backward(model(x).square().mean())
            if accelerator.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()


def test_a_step_that_never_comes_is_a_warning() -> None:
    _, texts = _prepared(_steps_in_the_first_micro_step)
    assert [text for text in texts if "was called in an earlier micro-step" in text] != []
    for loop in (_guards_its_steps, lambda a, m, o, batches: [_step(a, m, o, x) for (x,) in batches]):
        weight, texts = _prepared(loop)
        assert texts == []
    torch.testing.assert_close(weight, _plain([X[:16], X[16:]]), rtol=1e-12, atol=0)
