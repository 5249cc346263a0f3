"""Checkpoints of the engine deepspeed in echelon's format, to and from any other layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon import Accelerator
from echelon.utils import DeepSpeedPlugin
from tests.harness import run_on_ranks, shut_down
from tests.ranks.accelerator.test_checkpoints import check_load, save_in

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.deepspeed

OTHERS = [("single", 1), ("ddp", 2), ("zero1", 3), ("fsdp2", 4), ("fsdp2 stage 2", 2), ("fsdp2 hybrid", 4)]
OWN = [("deepspeed 0", 2), ("deepspeed 1", 3), ("deepspeed 2", 2), ("deepspeed 3", 3)]
LARGE = [("deepspeed 1", 5), ("deepspeed 2", 8), ("deepspeed 3", 1), ("deepspeed 3", 8), ("fsdp2", 7), ("zero1", 6)]
ALL = OTHERS + OWN + LARGE


@pytest.fixture(autouse=True)
def own_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_CHECKPOINT_FORMAT", "echelon")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("savers", "loaders"), [([OWN[3]], [OWN[3], OTHERS[1]]), pytest.param(ALL, ALL, marks=pytest.mark.soak)]
)
def test_a_checkpoint_of_any_layout_resumes_in_any_other(
    savers: list[tuple[str, int]], loaders: list[tuple[str, int]], tmp_path: Path
) -> None:
    # DeepSpeed keeps state in module variables, so that ranks with different histories train incorrectly together.
    # Each layout therefore has its own processes, like a program.
    saved = []
    for number, layout in enumerate(savers):
        shut_down()
        saved.append(save_in(layout, str(tmp_path / str(number)), torch.float32))
    for layout in loaders:
        shut_down()
        for one in saved:
            check_load(one, layout, torch.float32, tolerance=2e-6)


def _frozen_and_evaluated(folder: str, saves: bool, stage: int | None) -> dict[str, list[float]]:
    """Save or load a partly frozen model and a model for evaluation; return their weights."""
    torch.manual_seed(0 if saves else 9)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    teacher = nn.Linear(3, 2)
    if stage is None:
        accelerator = Accelerator(cpu=True)
    else:
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero}))
    optimizer: Any = torch.optim.AdamW(
        model.parameters(), lr=0.1
    )  # includes frozen parameters, which DeepSpeed would omit
    model, optimizer, teacher = accelerator.prepare(model, optimizer, teacher)
    if saves:
        accelerator.backward(model(torch.ones(2, 3)).square().mean())
        optimizer.step()
        accelerator.save_state(folder)
    else:
        accelerator.load_state(folder)
    states = [accelerator.get_state_dict(one) or {} for one in (model, teacher)]
    found = {f"{i}.{name}": value.tolist() for i, state in enumerate(states) for name, value in state.items()}
    accelerator.free_memory()
    return found


@pytest.mark.slow
def test_frozen_parameters_and_evaluation_models_are_restored(tmp_path: Path) -> None:
    of_stage_3, *_ = run_on_ranks(_frozen_and_evaluated, str(tmp_path / "3"), True, 3, timeout=180)
    assert len(of_stage_3) == 6
    assert run_on_ranks(_frozen_and_evaluated, str(tmp_path / "3"), False, 3, timeout=180)[0] == of_stage_3
    for found in run_on_ranks(_frozen_and_evaluated, str(tmp_path / "3"), False, None):
        assert found == of_stage_3
    run_on_ranks(_frozen_and_evaluated, str(tmp_path / "plain"), True, None)
    whole = run_on_ranks(_frozen_and_evaluated, str(tmp_path / "plain"), False, None)[0]
    assert run_on_ranks(_frozen_and_evaluated, str(tmp_path / "plain"), False, 3, timeout=180)[0] == whole


def _num_trained() -> int:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero}))
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):  # the library compares the order of the parameters from the second pass on
        accelerator.backward(model(torch.ones(2, 3)).square().mean())
        optimizer.step()
    accelerator.free_memory()
    return 1


@pytest.mark.slow
def test_ranks_with_different_earlier_groups_train_together() -> None:
    run_on_ranks(_num_trained, world_size=1, timeout=180)
    assert run_on_ranks(_num_trained, world_size=2, timeout=180) == [1, 1]
