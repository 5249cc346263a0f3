"""A step of an optimizer that nobody prepared never uses gradients that the other ranks have not seen, and is named."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon import Accelerator
from echelon.base.warnings import EchelonWarning
from tests.harness import run_on_ranks

STEPS, MICRO = 4, 2
Said = list[tuple[str, str]]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def _batches(world_size: int) -> torch.Tensor:
    """Of all ranks: [steps, micro-steps, ranks, samples, features]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(STEPS, MICRO, world_size, 4, 6, generator=generator, dtype=torch.float64)


def _loss(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


def _stepped_in_each_micro_step(world_size: int, lr: float = 0.1) -> list[torch.Tensor]:
    """Plain PyTorch in one process: what an optimizer does that steps in each micro-step with the ranks' mean gradient."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for window in _batches(world_size):
        for shares in window:
            (sum(_loss(model(x)) for x in shares) / (world_size * MICRO)).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def _ours(caught: list[warnings.WarningMessage]) -> Said:
    return [(str(w.message), f"{Path(w.filename).name}:{w.lineno}") for w in caught if w.category is EchelonWarning]


def _weights(accelerator: Accelerator, model: Any) -> list[torch.Tensor] | None:
    whole = accelerator.get_state_dict(model)
    return None if whole is None else [value.cpu() for value in whole.values()]


def _lines(mark: str = "# LINE") -> list[str]:
    source = Path(__file__).read_text().splitlines()
    return [f"{Path(__file__).name}:{i}" for i, line in enumerate(source, 1) if line.endswith(mark)]


def _never_prepared(engine: str, form: str) -> tuple[list[torch.Tensor] | None, Said]:
    accelerator = Accelerator(gradient_accumulation_steps=MICRO, engine=engine)
    model: Any = _model()
    if form == "the one that was given":
        given = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, _prepared = accelerator.prepare(model, given)
        optimizer = given
    elif form == "the one inside":
        model, prepared = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        optimizer = prepared.optimizer
    else:
        model = accelerator.prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for window in _batches(dist.get_world_size()):
            for shares in window:
                with accelerator.accumulate(model):
                    accelerator.backward(_loss(model(shares[dist.get_rank()])))
                    optimizer.step()  # LINE
                    optimizer.zero_grad()
    return _weights(accelerator, model), _ours(caught)


@pytest.mark.parametrize("form", ["made after prepare", "the one that was given", "the one inside"])
@pytest.mark.parametrize("engine", ["ddp", "zero1", "fsdp2"])
def test_its_gradients_are_averaged_first_and_its_line_is_named_once(engine: str, form: str) -> None:
    """float64, 8 steps of AdamW, whose division enlarges rounding: 1e-9."""
    if (engine, form) == ("fsdp2", "the one that was given"):
        pytest.skip("fsdp2 gives that one the sharded parameters: it is the one inside")
    results = run_on_ranks(_never_prepared, engine, form, world_size=2)
    expected = _stepped_in_each_micro_step(2)
    for weights, _ in results:
        for weight, right in zip(weights or (), expected):
            torch.testing.assert_close(weight, right, rtol=1e-9, atol=1e-9)
    (said, *more), silent = results[0][1], results[1][1]
    assert (more, silent) == ([], [])
    text, line = said
    is_inside = form == "the one inside" or (form == "the one that was given" and engine == "ddp")
    assert ("was stepped itself" if is_inside else "AdamW was not prepared") in text
    assert "window of 2 micro-steps" in text
    assert "averages" in text
    assert line in _lines()
