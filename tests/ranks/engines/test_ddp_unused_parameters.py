"""Parameters without a gradient under DDP: an error that names them before the step, or none where DDP looks for them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon import Accelerator, DistributedDataParallelKwargs
from echelon.base.errors import UsageError
from echelon.trainer import Trainer, TrainingArguments
from tests.harness import run_on_ranks
from tests.prepared_loop import marked_line
from tests.reference import mean_square, train_updates


class _HalfUsed(nn.Module):
    """Uses ``first`` always, and ``second`` if the input is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        self.second = nn.Linear(2, 1, dtype=torch.float64)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters(), 1):
                parameter.fill_(number / 4)

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        y = self.first(x) + (self.second(x) if bool((x > 0).all()) else 0.0)
        return y if labels is None else {"loss": (y - labels).square().mean()}


POSITIVE, MIXED = torch.ones(2, 2, dtype=torch.float64), torch.tensor([[-1.0, 2.0]], dtype=torch.float64)


def _train(batches: list[torch.Tensor], how: str, engine: str) -> tuple[str, list[torch.Tensor]]:
    looks = [DistributedDataParallelKwargs(find_unused_parameters=True)] if how == "looks" else []
    accelerator = Accelerator(cpu=True, engine=engine, kwargs_handlers=looks)
    bare = _HalfUsed()
    if how == "frozen":
        bare.second.requires_grad_(False)
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    before = [p.detach().clone() for p in bare.parameters()]
    try:
        for x in batches:
            loss = model(x).square().mean()  # FORWARD
            accelerator.backward(loss)
            if how == "clips":
                accelerator.clip_grad_norm_(model.parameters(), 1.0)  # CLIP
            if how != "never steps":
                optimizer.step()  # STEP
                optimizer.zero_grad()
    except UsageError as error:
        torch.testing.assert_close(
            list(bare.parameters()), before, rtol=0, atol=0
        )  # no step with half of the gradients
        return str(error), []
    return "", [p.detach() for p in bare.parameters()]


def _plain(batches: list[torch.Tensor], *, freezes: bool) -> list[torch.Tensor]:
    model = _HalfUsed()
    if freezes:
        model.second.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train_updates(model, lambda x: mean_square(model(x)), [[x] for x in batches], optimizer).weights


@pytest.mark.parametrize(
    ("how", "engine", "mark"),
    [("steps", "ddp", "STEP"), ("steps", "zero1", "STEP"), ("clips", "ddp", "CLIP"), ("never steps", "ddp", "FORWARD")],
)
def test_unused_parameters_are_named_before_a_step_uses_the_others(how: str, engine: str, mark: str) -> None:
    for text, _ in run_on_ranks(_train, [MIXED, MIXED], how, engine, world_size=2):
        assert (
            "2 of the 3 trainable parameters received no gradient in the last backward pass: second.weight, second.bias"
            in text
        )
        assert marked_line(__file__, mark) in text
        assert "DistributedDataParallelKwargs(find_unused_parameters=True)" in text
        assert "ddp_find_unused_parameters=True" in text
        assert "requires_grad_(False)" in text


@pytest.mark.parametrize("how", ["looks", "frozen"])
def test_unused_parameters_that_ddp_knows_of_are_no_error(how: str) -> None:
    batches = [MIXED, POSITIVE, MIXED]
    expected = _plain(batches, freezes=how == "frozen")
    for text, weights in run_on_ranks(_train, batches, how, "ddp", world_size=2):
        assert text == ""
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=0)  # float64; equal batches on both ranks


def _train_by_trainer(folder: str, looks: bool) -> str:
    data = [{"x": -torch.ones(2, dtype=torch.float64), "labels": torch.zeros(1, dtype=torch.float64)}] * 8
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=looks,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            Trainer(_HalfUsed(), arguments, train_dataset=data).train()
        except UsageError as error:
            return str(error)
    return ""


def test_the_trainer_names_unused_parameters(tmp_path: Path) -> None:
    for text in run_on_ranks(_train_by_trainer, str(tmp_path), False, world_size=2):
        assert "second.weight, second.bias" in text
    assert run_on_ranks(_train_by_trainer, str(tmp_path), True, world_size=2) == ["", ""]
