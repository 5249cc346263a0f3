"""``resume()`` and ``epochs()`` in one process: where a run goes on, whichever way its loops are written."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from echelon import Accelerator, DataLoaderConfiguration
from echelon.base.errors import CheckpointError, UsageError
from echelon.base.warnings import EchelonWarning
from echelon.utils import GradientAccumulationPlugin, ProjectConfiguration


def _numbers(n: int, batch_size: int = 2, *, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(range(n), batch_size=batch_size, shuffle=shuffle)  # type: ignore[arg-type]


class _Run:
    """An Accelerator with a model and these loaders, that has resumed from ``folder``."""

    def __init__(self, folder: Path, *loaders: DataLoader[Any], **options: Any) -> None:
        torch.manual_seed(0)
        config = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
        self.accelerator = Accelerator(project_config=config, **options)
        self.model = self.accelerator.prepare(nn.Linear(1, 1))
        self.loaders: list[Any] = [self.accelerator.prepare(loader) for loader in loaders]
        self.has_resumed = self.accelerator.resume()
        self.read: list[Any] = []

    def stops_after(self, number: int) -> bool:
        """Save and tell that this is the place, once so much was read."""
        if len(self.read) != number:
            return False
        self.accelerator.save_state()
        return True

    def train(self, stop: int) -> list[Any]:
        """Read each loader in each of two epochs, and draw a random number after each batch; save and end at ``stop``."""
        for epoch in self.accelerator.epochs(2):
            for name, loader in zip("ab", self.loaders):
                for i in loader:
                    self.read.append((epoch, name, i.tolist(), torch.rand(()).item()))
                    if self.stops_after(stop):
                        self.accelerator.end_training()
                        return self.read
        return self.read


@pytest.mark.parametrize("parity", ["off", "exact"])
def test_without_a_checkpoint_it_is_a_new_run_and_the_loop_is_range(
    parity: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = _Run(tmp_path, _numbers(6), parity=parity)
    assert run.has_resumed is False
    for epoch in run.accelerator.epochs(3):
        assert run.accelerator.progress.epoch == epoch == run.loaders[0].iteration
        run.read.append((epoch, [i.tolist() for i in run.loaders[0]]))
    assert run.read == [(epoch, [[0, 1], [2, 3], [4, 5]]) for epoch in range(3)]
    caplog.clear()
    assert list(run.accelerator.epochs(3)) == []  # they are made
    told = "epochs(3): the run has already completed 3 epochs, so there is nothing to train"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [told]
    assert list(run.accelerator.epochs(5)) == [3, 4]
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(DataLoader(range(2)))
    assert accelerator.resume(tmp_path / "nothing") is False
    with pytest.raises(UsageError, match=r"resume\(\) was called without a folder"):
        accelerator.resume()


@pytest.mark.parametrize(
    ("parity", "position"), [("off", "after 2 batches of each process"), ("exact", "after 4 samples")]
)
def test_a_resumed_run_says_from_which_checkpoint_step_and_position(
    parity: str, position: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def told(stop: int) -> tuple[list[str], int]:
        """Resume, train ``stop`` batches, save, and return what was logged, and the step at which it resumed."""
        caplog.clear()
        config = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True)
        accelerator = Accelerator(project_config=config, parity=parity)
        model = nn.Linear(1, 1)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), _numbers(6))
        accelerator.resume()
        step = accelerator.progress.step
        for _ in accelerator.epochs(3):
            for i in loader:
                accelerator.backward(model(i[:, None].float()).mean())
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.progress.step == step + stop:
                    accelerator.save_state()
                    return [r.getMessage() for r in caplog.records if "resuming" in r.getMessage()], step
        raise AssertionError

    folder = tmp_path / "checkpoints"
    assert told(5) == ([], 0)
    assert told(1) == ([f"resuming from {folder / 'checkpoint_0'}: step 5, epoch 1, {position}"], 5)
    assert told(1) == ([f"resuming from {folder / 'checkpoint_1'}: step 6, epoch 2"], 6)


@pytest.mark.parametrize("parity", ["off", "exact"])
@pytest.mark.parametrize("place", ["in the evaluation", "at the end", "after the training loop"])
def test_a_finished_epoch_is_not_repeated(parity: str, place: str, tmp_path: Path) -> None:
    def make(stops: bool) -> _Run:
        run = _Run(tmp_path, _numbers(6), _numbers(4), parity=parity)
        for epoch in run.accelerator.epochs(2):
            run.model.train()
            run.read += [(epoch, i.tolist()) for i in run.loaders[0]]
            if stops and place == "after the training loop":
                run.accelerator.save_state()
                return run
            run.model.eval()
            for i in run.loaders[1]:
                run.read.append((epoch, "evaluation", i.tolist()))
                if stops and place == "in the evaluation":
                    run.accelerator.save_state()
                    return run
            if stops:
                run.accelerator.save_state()
                return run
        return run

    assert make(stops=True).has_resumed is False
    resumed = make(stops=False)
    assert resumed.has_resumed
    of_training = [(1, [0, 1]), (1, [2, 3]), (1, [4, 5])]
    assert resumed.read == [*of_training, (1, "evaluation", [0, 1]), (1, "evaluation", [2, 3])]
    assert resumed.accelerator.project_configuration.iteration == 1
    assert resumed.accelerator.save_state().name == "checkpoint_1"
    assert make(stops=False).read == []  # the run is over


def test_a_stopped_evaluation_does_not_change_the_training_position(tmp_path: Path) -> None:
    def make(stop: int | None) -> _Run:
        run = _Run(tmp_path, _numbers(8, shuffle=True), _numbers(4))
        for epoch in run.accelerator.epochs(2):
            for i in run.loaders[0]:
                run.read.append((epoch, i.tolist()))
                run.model.eval()
                for number, _ in enumerate(run.loaders[1]):
                    if stop == len(run.read):
                        run.accelerator.save_state()
                        return run
                    if number == 0 and len(run.read) % 2:
                        break  # a look at a part of the data
                run.model.train()
        run.read.append(torch.rand(()).item())
        return run

    whole = make(None).read
    for stop in (1, 2, 3):
        parts = make(stop).read, make(None).read
        assert parts[0] + parts[1] == whole, stop
        for folder in (tmp_path / "checkpoints").glob("checkpoint_*"):
            folder.rename(tmp_path / f"{stop}{folder.name}")


@pytest.mark.parametrize("parity", ["off", "exact"])
def test_an_interrupted_loop_resumes_but_an_abandoned_epoch_does_not(parity: str, tmp_path: Path) -> None:
    run = _Run(tmp_path, _numbers(6), parity=parity)
    loader = run.loaders[0]
    for epoch in run.accelerator.epochs(2):
        for i in loader:
            run.read.append((epoch, i.tolist()))
            if len(run.read) == 2:
                break
        break
    run.accelerator.save_state()  # after the loop: the place is where it was left
    for one in (run, _Run(tmp_path, _numbers(6), parity=parity)):
        read = [(epoch, i.tolist()) for epoch in one.accelerator.epochs(2) for i in one.loaders[0]]
        assert read == [(0, [4, 5]), (1, [0, 1]), (1, [2, 3]), (1, [4, 5])]

    run = _Run(tmp_path / "other", _numbers(6), parity=parity)
    for epoch in run.accelerator.epochs(3):
        for i in run.loaders[0]:
            run.read.append((epoch, i.tolist()))
            break  # each epoch is its first batch
        if epoch == 1:
            run.accelerator.save_state()
    assert run.read == [(0, [0, 1]), (1, [0, 1]), (2, [0, 1])]
    if parity == "exact":  # what load_state() goes by
        for _ in run.loaders[0]:
            break
        assert run.loaders[0].state_dict()["position"] == 2
        run.loaders[0].set_epoch(7)
        assert run.loaders[0].state_dict() == {"epoch": 7, "position": 0, "source": None}


@pytest.mark.parametrize("parity", ["off", "exact"])
def test_a_pass_abandoned_in_an_earlier_epoch_is_finished(parity: str, tmp_path: Path) -> None:
    def make(stops: bool) -> list[Any]:
        run = _Run(tmp_path, _numbers(6, shuffle=True), parity=parity)
        for epoch in run.accelerator.epochs(2):
            if epoch == 1 and stops:
                run.accelerator.save_state()
                return run.read
            run.read += [(epoch, i.tolist()) for i in run.loaders[0]]
            for i in run.loaders[0]:  # one and a third passes are an epoch here
                run.read.append((epoch, i.tolist()))
                break
        return run.read

    whole = make(stops=False)
    assert len(whole) == 8
    assert make(stops=True) + make(stops=False) == whole


@pytest.mark.sample(4)
@pytest.mark.parametrize("parity", ["off", "exact"])
@pytest.mark.parametrize("stop", range(1, 10))
def test_two_training_loaders_one_after_the_other_are_each_read_once(parity: str, stop: int, tmp_path: Path) -> None:
    def make(folder: str, stop: int = 0) -> list[Any]:
        loaders = _numbers(6, shuffle=True), _numbers(4, shuffle=True)
        return [entry[:3] for entry in _Run(tmp_path / folder, *loaders, parity=parity).train(stop)]

    whole = make("whole")
    assert len(whole) == 10
    assert (
        make("a", stop) + make("a") == whole
    )  # after 3, nobody has seen yet that the second one trains; but it shuffles


def test_loaders_that_are_read_together_resume_together(tmp_path: Path) -> None:
    def make(stop: int) -> list[Any]:
        run = _Run(tmp_path, _numbers(6, shuffle=True), _numbers(10, shuffle=True))
        endless = _again_and_again(run.loaders[1])
        for epoch in run.accelerator.epochs(3):
            for i in run.loaders[0]:
                run.read.append((epoch, i.tolist(), next(endless).tolist()))
                if run.stops_after(stop):
                    return run.read
        return run.read

    whole = make(0)
    for stop in (1, 3, 4, 5, 7):
        parts = make(stop), make(0)
        assert parts[0] + parts[1] == whole, stop
        for folder in (tmp_path / "checkpoints").glob("checkpoint_*"):
            folder.rename(tmp_path / f"{stop}{folder.name}")


def test_a_loader_with_passes_across_epochs_keeps_no_epoch_open(tmp_path: Path) -> None:
    def make(stop: int) -> tuple[list[int], list[Any]]:
        run = _Run(tmp_path, _numbers(6, shuffle=True), _numbers(10, shuffle=True))
        endless = _again_and_again(run.loaders[1])
        epochs = []
        for epoch in run.accelerator.epochs(3):
            epochs.append(epoch)
            for i in run.loaders[0]:
                run.read.append((i.tolist(), next(endless).tolist()))
                if run.stops_after(stop):
                    return epochs, run.read
        return epochs, run.read

    _, whole = make(0)
    _, first = make(6)  # the second loader has begun its second pass, in this epoch, and is in the middle of it
    epochs, rest = make(0)
    assert epochs == [2]
    assert first + rest == whole


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_update_across_two_epochs_is_repeated(num_workers: int, tmp_path: Path) -> None:
    def make(stop: int) -> list[Any]:
        plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
        loader = DataLoader(range(10), batch_size=2, shuffle=True, num_workers=num_workers)  # type: ignore[arg-type]
        run = _Run(tmp_path, loader, gradient_accumulation_plugin=plugin)
        for epoch in run.accelerator.epochs(2):
            for i in run.loaders[0]:
                with run.accelerator.accumulate(run.model):
                    run.accelerator.backward(run.model(i[:, None].float()).sum())
                run.read.append((epoch, i.tolist(), torch.rand(()).item()))
                if run.stops_after(stop):
                    return run.read
        return run.read

    whole = make(0)
    assert len(whole) == 10
    make(6)  # the fifth and the sixth batch are half of the second update
    assert make(0) == whole[4:]


def test_a_stopped_evaluation_gets_a_new_order_in_the_next_epoch(tmp_path: Path) -> None:
    def make(stop: int) -> list[Any]:
        run = _Run(tmp_path, _numbers(6, shuffle=True), _numbers(8, shuffle=True))
        for epoch in run.accelerator.epochs(2):
            run.model.train()
            run.read += [(epoch, i.tolist()) for i in run.loaders[0]]
            run.model.eval()
            for i in run.loaders[1]:
                run.read.append((epoch, "evaluation", i.tolist()))
                if run.stops_after(stop):
                    return run.read
        return run.read

    whole = make(0)
    evaluations = [[i for epoch, *_, i in whole[7 * number + 3 : 7 * number + 7]] for number in (0, 1)]
    assert evaluations[0] != evaluations[1]
    make(5)
    assert make(0) == whole[7:]


def _again_and_again(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


class _Stream(IterableDataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.n).tolist()  # drawn when the pass begins
        yield from order


@pytest.mark.parametrize("num_workers", [0, 1])
def test_iterable_data_is_read_again_up_to_the_position_with_a_warning(num_workers: int, tmp_path: Path) -> None:
    def make(stop: int = 0) -> list[Any]:
        return _Run(tmp_path, DataLoader(_Stream(9), batch_size=2, num_workers=num_workers)).train(stop)

    whole = make()
    first = make(3)
    with pytest.warns(EchelonWarning, match=r"3 batches of iterable data were read again .* took \d+\.\d s"):
        assert first + make() == whole


@pytest.mark.parametrize("kind", ["a stateful loader", "accelerate's layout"])
def test_other_loaders_and_layouts_resume_at_the_position(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "accelerate's layout":
        monkeypatch.setenv("ECHELON_CHECKPOINT_FORMAT", "accelerate")
    config = DataLoaderConfiguration(use_stateful_dataloader=kind == "a stateful loader")

    def make(stop: int = 0) -> list[Any]:
        return _Run(tmp_path, _numbers(7, shuffle=True), dataloader_config=config).train(stop)

    whole = make()
    assert make(3) + make() == whole


def test_a_position_in_mid_epoch_is_rejected_with_another_parity(tmp_path: Path) -> None:
    _Run(tmp_path, _numbers(8), parity="exact").train(2)
    different = "during an epoch with parity='exact' or 'bitwise', and this run has parity='off', which counts progress in another way"
    with pytest.raises(CheckpointError, match=different):
        _Run(tmp_path, _numbers(8), parity="off")


def test_a_run_without_loaders_resumes_in_its_epoch(tmp_path: Path) -> None:
    run = _Run(tmp_path)
    for epoch in run.accelerator.epochs(4):
        if epoch == 2:
            run.accelerator.save_state()
            break
    assert list(_Run(tmp_path).accelerator.epochs(4)) == [2, 3]


@pytest.mark.slow
def test_the_example_of_the_document_resumes(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "checkpoints.md").read_text()
    (example,) = re.findall(r"```python resume\n(.*?)```", text, re.DOTALL)

    stopped = example.replace(
        "            accelerator.save_state()\n", "            accelerator.save_state(); break\n", 1
    )
    stopped += "    break\n"  # after 5 steps of 8
    runs = [("whole", example), ("parts", stopped), ("parts", example)]
    program = f"""
import os
for folder, text in {runs!r}:
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    print("#")
    exec(text, {{}})
    os.chdir("..")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    _, whole, first, rest = done.stdout.split("#\n")
    assert [line.split(",")[0] for line in whole.splitlines()] == ["epoch 0", "epoch 1", "epoch 2"]
    assert first.startswith("epoch 0, 5 steps")
    assert rest == whole
