"""Gradients that ``accelerator.backward`` did not compute are averaged, warned of, or an error; never silently another update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from echelon import Accelerator
from echelon.base.errors import UsageError
from echelon.base.warnings import EchelonWarning
from tests.harness import run_on_ranks
from tests.prepared_loop import all_warnings, marked_line
from tests.reference import gaussian, mean_square, tanh_net, train_updates

Result = tuple[list[torch.Tensor], list[tuple[str, str]], str]


def _data(num_samples: int = 32) -> torch.Tensor:
    return gaussian(num_samples, 6)


def _differentiate(form: str, accelerator: Accelerator, model: Any, x: torch.Tensor) -> None:
    loss = mean_square(model(x))
    if form in ("autograd.grad", "no zero_grad"):
        own = list(model.parameters())
        for p, gradient in zip(own, torch.autograd.grad(loss, own)):
            p.grad = gradient
    elif form == "loss.backward()":
        loss.backward()
    else:
        accelerator.backward(loss)


def _train(form: str, options: dict[str, Any], batch_size: int, num_samples: int = 32) -> Result:
    accelerator = Accelerator(cpu=True, **options)
    bare: Any = tanh_net(6, 5, 1)
    optimizer: Any = torch.optim.SGD(bare.parameters(), lr=0.1)
    loader: Any = DataLoader(_data(num_samples), batch_size=batch_size)  # type: ignore[arg-type]
    model: Any = bare
    if form == "only the loader":
        loader = accelerator.prepare(loader)
    else:
        model, optimizer, loader = accelerator.prepare(bare, optimizer, loader)
    direct = "loss.backward()" if form == "only the loader" else form
    text = ""
    with all_warnings() as caught:
        try:
            for x in loader:
                with accelerator.accumulate():
                    _differentiate(direct, accelerator, model, x)
                    optimizer.step()  # STEP
                if form == "twice":
                    for p in model.parameters():
                        p.grad.mul_(1.0)
                    optimizer.step()
                if form != "no zero_grad":
                    optimizer.zero_grad()
        except UsageError as error:
            text = str(error)
    said = [(str(w.message), f"{Path(w.filename).name}:{w.lineno}") for w in caught if w.category is EchelonWarning]
    return [p.detach() for p in bare.parameters()], said, text


def _plain() -> list[torch.Tensor]:
    model = tanh_net(6, 5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train_updates(model, lambda x: mean_square(model(x)), _data().view(-1, 1, 8, 6), optimizer).weights


@pytest.mark.parametrize("form", ["autograd.grad", "no zero_grad"])
@pytest.mark.parametrize(("engine", "parity"), [("ddp", "off"), ("zero1", "off"), ("ddp", "exact")])
def test_gradients_that_were_assigned_are_averaged_and_told_once(form: str, engine: str, parity: str) -> None:
    """Against a plain loop over whole batches: float64, SGD: 1e-12."""
    options = {"engine": engine, "parity": parity}
    results = run_on_ranks(_train, form, options, 8 if parity == "exact" else 4, world_size=2)
    for weights, _, text in results:
        assert text == ""
        torch.testing.assert_close(weights, _plain(), rtol=1e-12, atol=1e-12)
    (said,), silent = results[0][1], results[1][1]
    assert silent == []
    assert "assigned" in said[0]
    assert "accelerator.backward(loss)" in said[0]
    assert said[1] == marked_line(__file__)


@pytest.mark.parametrize(
    ("options", "batch_size", "num_samples", "said"),
    [
        ({"parity": "exact", "max_micro_batch_size": 2}, 8, 32, "2 micro-steps"),
        ({"parity": "exact"}, 8, 31, "7 samples"),
        ({"parity": "bitwise", "canonical_shards": 4}, 8, 32, "parity='bitwise'"),
        ({"spike_guard": "skip"}, 4, 32, "spike_guard does not know their loss"),
    ],
)
@pytest.mark.parametrize("form", ["loss.backward()", "autograd.grad"])
def test_losses_that_were_not_weighed_are_an_error(
    form: str, options: dict[str, Any], batch_size: int, num_samples: int, said: str
) -> None:
    for _, _, text in run_on_ranks(_train, form, {**options, "seed": 0}, batch_size, num_samples, world_size=2):
        assert said in text
        assert "accelerator.backward(loss)" in text
        assert marked_line(__file__) in text


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_that_was_not_divided_is_told_once(world_size: int) -> None:
    results = run_on_ranks(_train, "loss.backward()", {"gradient_accumulation_steps": 2}, 4, world_size=world_size)
    ((text, line),) = results[0][1]
    assert "did not divide their losses by gradient_accumulation_steps=2" in text
    assert line == marked_line(__file__)
    assert all(said == [] for _, said, _ in results[1:])


def test_a_loop_of_which_only_the_loader_is_prepared_is_told_once() -> None:
    results = run_on_ranks(_train, "only the loader", {}, 4, world_size=2)
    ((text, line),) = results[0][1]
    assert "accelerator.prepare(" in text
    assert "averages the gradients" in text
    assert line == marked_line(__file__)
    assert results[1][1] == []


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("prepared", {}),
        ("prepared", {"gradient_accumulation_steps": 2}),
        ("prepared", {"parity": "exact", "max_micro_batch_size": 2}),
        ("prepared", {"parity": "bitwise", "canonical_shards": 4}),
        ("twice", {}),
        ("twice", {"parity": "exact"}),
        ("loss.backward()", {}),
    ],
)
def test_what_is_right_is_silent(form: str, options: dict[str, Any]) -> None:
    """As is loss.backward() where every rank and micro-step counts the same, and DDP has averaged."""
    for _, said, text in run_on_ranks(_train, form, {**options, "seed": 0}, 8, world_size=2):
        assert (said, text) == ([], "")
