"""What a loop does without the Accelerator, and is told of: schedulers that are not saved, models made anew, early resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon import Accelerator, ProjectConfiguration
from echelon.base.errors import UsageError
from tests.prepared_loop import all_warnings


def _run() -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _told(call: Any) -> str:
    with all_warnings() as caught:
        call()
    return " ".join(str(warning.message) for warning in caught)


@pytest.mark.parametrize("kind", ["none", "left out", "prepared", "registered"])
def test_a_scheduler_that_no_checkpoint_holds_is_told(kind: str, tmp_path: Path) -> None:
    accelerator, _, optimizer = _run()
    if kind != "none":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        if kind == "prepared":
            accelerator.prepare(scheduler)
        elif kind == "registered":
            accelerator.register_for_checkpointing(scheduler)
    told = _told(lambda: accelerator.save_state(tmp_path / "state"))
    assert ("do not hold the learning rate scheduler of SGD" in told) is (kind == "left out")


def test_a_model_that_is_made_anew_in_the_middle_is_told_once() -> None:
    accelerator, model, optimizer = _run()

    def step(one: nn.Module) -> str:
        def take() -> None:
            accelerator.backward(one(torch.ones(3, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()

        return _told(take)

    assert [step(model), step(model)] == ["", ""]
    other = nn.Linear(2, 1)
    assert "step 3 of SGD finds no gradients" in step(other)
    assert step(other) == ""


def test_resume_before_prepare_is_refused_though_there_is_no_checkpoint(tmp_path: Path) -> None:
    project = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True)
    with pytest.raises(UsageError, match=r"resume\(\) was called before prepare\(\)"):
        Accelerator(cpu=True, project_config=project).resume()
