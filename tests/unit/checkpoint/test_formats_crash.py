"""Real saves in other programs' layouts: from every reconstructed crash state a run resumes with the old or the new checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from echelon.trainer import Trainer
from tests.checkpoint_runs import Run
from tests.recorded_storage import crash_folders, recorded
from tests.toy_storage import ToyStorage
from tests.trainer_models import DATA, Line, arguments


def _lost_after_the_first(toy: ToyStorage, scratch: Path, *, named: bool, layout: str) -> int:
    """Return in how many of the states after the first save had returned nothing is there."""
    lost = 0
    for done, folder in crash_folders(toy, scratch, start=0, max_pending=4, whole=False):
        path = None if named else folder / "run" / "a"
        again = Run(folder / "run", layout, named=named, total_limit=1)
        if again.accelerator.resume(path):
            assert again.value == 1.0
        else:
            lost += done == len(toy.operations)
    return lost


@pytest.mark.parametrize("layout", ["accelerate", "echelon"])
@pytest.mark.parametrize("named", [True, False])
def test_the_first_save_syncs_its_parent_folders(layout: str, named: bool, tmp_path: Path) -> None:
    assert _replay_accelerator(tmp_path, layout, named=named, exchanges=True, whole=False, is_first=True) == 0


def _replay_accelerator(
    tmp_path: Path, layout: str, *, named: bool, exchanges: bool, whole: bool, is_first: bool = False
) -> int:
    scratch, root = tmp_path / "states", tmp_path / "root"
    scratch.mkdir()
    root.mkdir()
    path = None if named else root / "run" / "a"
    with recorded(root, exchanges=exchanges) as toy:
        run = Run(root / "run", layout, named=named, total_limit=1)
        run.train_to(1.0)
        run.accelerator.save_state(path)
        start = len(toy.operations)
        run.train_to(2.0)
        if not is_first:
            run.accelerator.save_state(path)
        run.accelerator.end_training()
    if is_first:
        return _lost_after_the_first(toy, scratch, named=named, layout=layout)
    count = 0
    for done, folder in crash_folders(toy, scratch, start=start, max_pending=4 if not whole else 8, whole=whole):
        count += 1
        again = Run(folder / "run", layout, named=named, total_limit=1)
        at = None if named else folder / "run" / "a"
        assert again.accelerator.resume(at), f"a silent new run after {done} operations: {os.listdir(folder / 'run')}"
        assert again.value in ((2.0,) if done == len(toy.operations) else (1.0, 2.0)), f"after {done} operations"
        if whole and count % 10:
            continue
        again.train_to(3.0)
        again.accelerator.save_state(at)
        again.accelerator.end_training()
        last = Run(folder / "run", layout, named=named, total_limit=1)
        assert last.accelerator.resume(at, must_exist=True)
        assert last.value == 3.0
        if named:
            left = [name for name in os.listdir(folder / "run" / "checkpoints") if ".tmp-" in name or ".old-" in name]
            assert not left, f"after {done} operations"
    return count


CASES = [(True, True), (False, True), (False, False)]


@pytest.mark.slow
@pytest.mark.parametrize(("named", "exchanges"), CASES)
def test_every_crash_state_of_accelerates_layout_can_be_resumed(named: bool, exchanges: bool, tmp_path: Path) -> None:
    assert _replay_accelerator(tmp_path, "accelerate", named=named, exchanges=exchanges, whole=False) >= 4


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["accelerate", "echelon"])
@pytest.mark.parametrize(("named", "exchanges"), CASES)
def test_every_crash_state_in_all_subsets_can_be_resumed(
    named: bool, exchanges: bool, layout: str, tmp_path: Path
) -> None:
    assert _replay_accelerator(tmp_path, layout, named=named, exchanges=exchanges, whole=True) >= 50


def _trainer(folder: Path, **options: Any) -> Trainer:
    settings = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "max_steps": 4, **options}
    return Trainer(Line(), arguments(folder, checkpoint_format="transformers", **settings), train_dataset=DATA)


def _sum(trainer: Trainer) -> float:
    return float(sum(value.double().sum() for value in trainer.model.state_dict().values()))


def _replay_trainer(tmp_path: Path, *, rotates: bool, exchanges: bool, whole: bool) -> int:
    """Save checkpoint-2, and then checkpoint-4 (``rotates``), or checkpoint-2 once more in a new training."""
    scratch, root = tmp_path / "states", tmp_path / "root"
    scratch.mkdir()
    root.mkdir()
    trainer = _trainer(root / "out", max_steps=2)
    with recorded(root, exchanges=exchanges) as toy:
        trainer.train()
        weights = {2: [_sum(trainer)]}
        start = len(toy.operations)
        second = _trainer(root / "out", max_steps=4 if rotates else 2, **({} if rotates else {"learning_rate": 1.0}))
        second.train(resume_from_checkpoint=rotates)
        weights.setdefault(second.state.global_step, []).append(_sum(second))
    count = 0
    for done, folder in crash_folders(toy, scratch, start=start, max_pending=4, whole=whole):
        count += 1
        again = _trainer(folder / "out", max_steps=2, save_strategy="no" if count % 2 else "steps")
        again.train(resume_from_checkpoint="auto")
        step = again.state.global_step
        assert step in weights, f"a silent new run after {done} operations: {os.listdir(folder / 'out')}"
        assert _sum(again) in weights[step], f"after {done} operations"
        assert again.state.log_history[-1].get("train_loss") == 0.0, "it has trained, and not gone on"
        if done == len(toy.operations):
            assert _sum(again) == weights[step][-1]
    return count


TRAINER_CASES = [(True, True), (False, False)]


@pytest.mark.slow
@pytest.mark.parametrize(("rotates", "exchanges"), TRAINER_CASES)
def test_every_crash_state_of_transformers_layout_can_be_resumed(
    rotates: bool, exchanges: bool, tmp_path: Path
) -> None:
    assert _replay_trainer(tmp_path, rotates=rotates, exchanges=exchanges, whole=False) >= 4


@pytest.mark.soak
@pytest.mark.parametrize(("rotates", "exchanges"), [*TRAINER_CASES, (False, True)])
def test_every_crash_state_of_transformers_layout_in_all_its_subsets(
    rotates: bool, exchanges: bool, tmp_path: Path
) -> None:
    assert _replay_trainer(tmp_path, rotates=rotates, exchanges=exchanges, whole=True) >= 50
