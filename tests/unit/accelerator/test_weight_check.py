"""The advice of errors about a checkpoint names only arguments of the function that the user has called."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon import Accelerator
from echelon.base.errors import CheckpointError
from echelon.checkpoint.read import open_verified
from echelon.utils import ProjectConfiguration
from echelon.world.world import World


def arguments_in(error: CheckpointError) -> set[str]:
    """Return the names of the arguments (``name=...``) in the advice of ``error``."""
    return set(re.findall(r"\b([a-z_]+)=", error.do or ""))


def _another_model(folder: Path, kind: Any) -> None:
    accelerator, model = _accelerator(folder, kind), nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_state()


def _accelerator(folder: Path, kind: Any) -> Accelerator:
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, checkpoint_format=kind)
    return Accelerator(cpu=True, project_config=project)


@pytest.mark.parametrize("method", ["load_state", "resume"])
@pytest.mark.parametrize("kind", ["echelon", "accelerate"])
@pytest.mark.parametrize("more", ["weights", "optimizers"])
def test_the_advice_names_arguments_of_the_called_method(kind: Any, method: str, more: str, tmp_path: Path) -> None:
    _another_model(tmp_path, kind)
    accelerator = _accelerator(tmp_path, kind)
    model = nn.Linear(2, 2) if more == "optimizers" else nn.ModuleDict({"head": nn.Linear(2, 2)})
    # accelerate's format has one optimizer file for each; another one is missing
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2 if more == "optimizers" else 1)]
    accelerator.prepare(model, *optimizers)
    load: Callable[..., Any] = getattr(accelerator, method)
    if kind == "accelerate" and more == "optimizers":
        with pytest.raises(CheckpointError, match="to start over, set another project_dir"):
            load()
        return
    with pytest.raises(CheckpointError, match="to start over, use another folder") as caught:
        load()
    named = arguments_in(caught.value)
    assert named
    parameters = {*inspect.signature(load).parameters} | ({"strict"} if method == "load_state" else set())
    assert named <= parameters


def test_the_advice_of_a_checkpoint_that_a_program_reads_itself_names_no_method(tmp_path: Path) -> None:
    _another_model(tmp_path, "echelon")
    checkpoint = open_verified(tmp_path / "checkpoints" / "checkpoint_0", world=World.current())
    with pytest.raises(CheckpointError, match="leave these names out of targets") as caught:
        checkpoint.read_into({"models.0.head": torch.empty(2)})
    assert "load_state" not in str(caught.value)
    assert arguments_in(caught.value) == set()
