"""What a process records of its training is what happened, at every level; and recording changes neither weights nor random numbers."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon.distributed as ed
from echelon import Accelerator
from echelon.base import environ
from echelon.base.errors import UsageError
from echelon.base.warnings import EchelonWarning
from echelon.distributed.record.device_values import DeviceValues
from echelon.distributed.record.recorder import ProcessRecorder, recorder_of_process
from echelon.distributed.record.run_place import RunWithoutLauncher
from echelon.report.run_folder import read_run
from echelon.status import run_recorder, step_records
from echelon.status.notes import notes_of_process
from echelon.status.run_files import read_info, read_lines, steps_path
from echelon.status.step_records import StepFile, StepRecorder, read_step_file
from echelon.trainer import Trainer, TrainingArguments
from echelon.world.launch_variables import NO_RECORD_VARIABLE, RECORD_VARIABLE
from tests.trainer_models import DATA, Line, arguments

SAMPLES = torch.arange(24.0).reshape(12, 2) / 24, torch.arange(12.0).reshape(12, 1)


@contextmanager
def recording(folder: Path, attempt: int = 0) -> Iterator[None]:
    """Record this process's training in ``folder``, as a rank of a launcher does."""
    with environ.patch({NO_RECORD_VARIABLE: None, RECORD_VARIABLE: f"{attempt}:{folder}"}):
        try:
            yield
        finally:
            recorder = recorder_of_process()
            assert recorder is not None
            recorder.close()


def _steps(folder: Path, attempt: int = 0) -> StepFile:
    return read_step_file(steps_path(folder, attempt=attempt, rank=0))


def _train(resume: Path | None = None, save: Path | None = None, **options: Any) -> tuple[torch.Tensor, list[float]]:
    """Train for an epoch of 3 updates of 2 micro-steps; return the weights and the losses of the micro-steps."""
    torch.manual_seed(3)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True, **options)
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(TensorDataset(*SAMPLES), batch_size=2, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if resume is not None:
        accelerator.load_state(resume)
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.log({"loss": losses[-1], "name": "x", "size": torch.tensor(2)}, step=7)
    if save is not None:
        accelerator.save_state(save)
    accelerator.end_training()
    return nn.utils.parameters_to_vector(model.parameters()).detach(), losses


def test_recording_changes_neither_weights_nor_losses_nor_random_numbers(tmp_path: Path) -> None:
    weights, losses = _train()
    after = torch.get_rng_state()
    with recording(tmp_path):
        recorded, its_losses = _train()
    assert torch.equal(recorded, weights)
    assert its_losses == losses
    assert torch.equal(torch.get_rng_state(), after)
    assert len(_steps(tmp_path).records) == 3


def test_each_step_is_recorded_with_its_values(tmp_path: Path) -> None:
    with recording(tmp_path):
        _, losses = _train(save=tmp_path / "saved")
    records = _steps(tmp_path).records
    assert [record.step for record in records] == [1, 2, 3]
    assert [record.num_losses for record in records] == [2, 2, 2]
    for record, one, other in zip(records, losses[::2], losses[1::2], strict=True):
        assert record.loss == (one + other) / 2
    # The rate that the step has used, not the next one.
    assert [record.lr for record in records] == [0.01, 0.01 / 2, 0.01 * (1 / 3)]
    assert [record.num_samples for record in records] == [4, 8, 12]
    assert all(record.grad_norm > 0.1 for record in records)  # before clipping
    assert all(50 < record.memory_mb < 100_000 for record in records)
    # Parts of a step: forward, backward and the optimizer have taken time, and the sums grow.
    assert all(records[0].spent_ns[part] > 0 for part in (1, 2, 4))
    assert all(a <= b for a, b in zip(records[0].spent_ns, records[1].spent_ns, strict=True))
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert (line["step"], line["attempt"], line["values"]) == (7, 0, {"loss": losses[-1], "size": 2})
    (event,) = read_lines(tmp_path / "events.jsonl")
    assert (event["kind"], event["step"], event["path"]) == ("checkpoint", 3, str(tmp_path / "saved"))
    assert 0 < event["duration_s"] < 60


def test_items_are_recorded(tmp_path: Path) -> None:
    with recording(tmp_path):
        accelerator = Accelerator(cpu=True)
        model: Any = Line()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for items in (5, 7):
            accelerator.backward(model(torch.ones(2, 1), torch.ones(2))["loss"], num_items=items)
            optimizer.step()
    assert [record.num_items for record in _steps(tmp_path).records] == [5, 12]


def test_a_resumed_run_continues_its_numbers(tmp_path: Path) -> None:
    _train(save=tmp_path / "saved")
    with recording(tmp_path, attempt=2):
        _train(resume=tmp_path / "saved")
    (event,) = [line for line in read_lines(tmp_path / "events.jsonl") if line["kind"] == "resume"]
    assert (event["attempt"], event["step"], event["text"]) == (2, 3, "resumed at step 3")
    # The saved pass is complete: the resumed loop has no batch left; the next one begins after step 3.
    recorder = None
    with recording(tmp_path, attempt=3):
        recorder = recorder_of_process()
        assert recorder is not None
        recorder.resume(40)
        _train()
    assert [record.step for record in _steps(tmp_path, attempt=3).records] == [41, 42, 43]


def test_a_second_training_continues_the_numbers_of_one_that_went_back_to_a_checkpoint(tmp_path: Path) -> None:
    with recording(tmp_path):
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(1, 6):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            if step == 2:
                accelerator.save_state(tmp_path / "saved")
        accelerator.load_state(tmp_path / "saved")
        _train()
    # Two steps in a row show that the other optimizer has replaced the first one.
    assert [record.step for record in _steps(tmp_path).records] == [1, 2, 3, 4, 5, 3, 4]


@pytest.mark.parametrize("goes_back", [False, True])
def test_a_second_accelerator_continues_the_numbers_of_the_same_optimizer(goes_back: bool, tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(tmp_path):
        for _ in range(2):
            accelerator = Accelerator(cpu=True)
            prepared, optimizer = accelerator.prepare(model, sgd)
            for step in range(3):
                accelerator.backward(prepared(torch.ones(1, 1)).sum())
                optimizer.step()
                if step == 0:
                    accelerator.save_state(tmp_path / "saved")
            if goes_back:
                accelerator.load_state(tmp_path / "saved")
    numbers = [record.step for record in _steps(tmp_path).records]
    assert numbers == ([1, 2, 3, 2, 3, 4] if goes_back else [1, 2, 3, 4, 5, 6])


def test_the_optimizer_with_the_most_steps_is_recorded_and_a_second_training_continues(tmp_path: Path) -> None:
    with recording(tmp_path):
        recorder = recorder_of_process()
        assert recorder is not None
        slow, fast, next_one = (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr) for lr in (1.0, 2.0, 3.0))
        for i in range(3):
            recorder.step(i + 1, slow)
            recorder.step(2 * i + 1, fast)
            recorder.step(2 * i + 2, fast)
        for i in range(3):
            recorder.step(i + 1, next_one)
    records = _steps(tmp_path).records
    assert [record.step for record in records] == sorted({record.step for record in records})
    assert [record.lr for record in records[-4:]] == [2.0, 2.0, 3.0, 3.0]


def test_level_1_records_the_steps_of_plain_optimizers(tmp_path: Path) -> None:
    with recording(tmp_path), ed.process_group(0, 1, backend="gloo"):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loader = ed.shard(DataLoader(TensorDataset(*SAMPLES), batch_size=4))
        for x, y in loader:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        ed.log({"accuracy": 0.75, "lr": math.nan})
        with torch.no_grad():
            assert len(list(loader)) == 3
    optimizer.step()  # after the group has been closed
    records = _steps(tmp_path).records
    assert [(record.step, record.lr, record.num_samples) for record in records] == [
        (1, 0.5, 4),
        (2, 0.5, 8),
        (3, 0.5, 12),
    ]
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert (line["step"], line["values"]["accuracy"]) == (3, 0.75)
    assert math.isnan(line["values"]["lr"])


def test_level_3_records_steps_and_logs(tmp_path: Path) -> None:
    with recording(tmp_path):
        args = arguments(tmp_path / "out", max_steps=4, logging_steps=2, max_grad_norm=1.0)
        Trainer(Line(), args, train_dataset=DATA).train()
    assert [record.step for record in _steps(tmp_path).records] == [1, 2, 3, 4]
    assert all(record.loss >= 0 and record.grad_norm >= 0 for record in _steps(tmp_path).records)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 4]
    assert lines[0]["values"].keys() >= {"loss", "grad_norm", "learning_rate"}
    assert lines[0]["epoch"] > 0
    assert "train_runtime" in lines[-1]["values"]


def _hyperparameters(folder: Path, group: str = "training") -> dict[str, Any]:
    return {one.name: one.value for one in read_run(folder).hyperparameters if one.group == group}


def test_level_1_records_what_it_trains_with(tmp_path: Path) -> None:
    with recording(tmp_path), ed.process_group(0, 1, backend="gloo"):
        ed.log_hyperparameters({"lr": 0.5, "model": {"api_key": "abc"}})
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        for x, y in ed.shard(DataLoader(TensorDataset(*SAMPLES), batch_size=4)):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            assert _hyperparameters(tmp_path)["optimizer.class"] == "SGD"  # from the first step on
    assert _hyperparameters(tmp_path, "logged") == {"lr": 0.5, "model.api_key": "***"}
    assert {
        "optimizer.class": "SGD",
        "optimizer.lr": 0.5,
        "optimizer.momentum": 0.9,
        "optimizer.num_trainable_parameters": 3,
        "dataloader.dataset_length": 12,
        "dataloader.batch_size": 4,
    }.items() <= _hyperparameters(tmp_path).items()
    assert len(read_lines(tmp_path / "hyperparameters.jsonl")) == 3  # once, not at each step


def test_level_2_records_what_it_trains_with(tmp_path: Path) -> None:
    with recording(tmp_path):
        _train(mixed_precision="bf16")
        accelerator = Accelerator(cpu=True)
        accelerator.init_trackers("name", config={"width": 4, "function": _train, "wandb_api_key": "abc"})
        accelerator.log_hyperparameters({"width": 8})
        with pytest.raises(UsageError, match="hyperparameter 'x' is of type Tensor"):
            accelerator.log_hyperparameters({"x": torch.zeros(1)})
    assert _hyperparameters(tmp_path, "logged") == {"width": 8, "function": "function", "wandb_api_key": "***"}
    assert {
        "mixed_precision": "no",  # of the second Accelerator
        "optimizer.class": "AdamW",
        "optimizer.lr": 0.01,
        "model.num_parameters": 17,
        "model.num_trainable_parameters": 17,
        "dataloader.dataset_length": 12,
        "dataloader.batch_size": 2,
        "dataloader.total_batch_size": 2,
    }.items() <= _hyperparameters(tmp_path).items()
    first = read_lines(tmp_path / "hyperparameters.jsonl")[0]["values"]
    assert (first["mixed_precision"], first["gradient_accumulation_steps"]) == ("bf16", 2)


def test_a_second_object_of_a_kind_has_a_number_and_an_equal_one_is_not_repeated(tmp_path: Path) -> None:
    with recording(tmp_path):
        accelerator = Accelerator(cpu=True)
        for lr in (0.1, 0.2, 0.1):
            accelerator.prepare(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr))
        for i in range(30):  # a search for hyperparameters
            accelerator.prepare(nn.Linear(1 + i, 1))
    found = _hyperparameters(tmp_path)
    assert (found["optimizer.lr"], found["optimizer 2.lr"], "optimizer 3.lr" in found) == (0.1, 0.2, False)
    assert sum(name.endswith("num_parameters") for name in found) == 20


def test_level_3_records_its_arguments_those_that_differ_from_the_defaults_first(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Arguments(TrainingArguments):
        width: int = 4

    options = {"max_steps": 2, "learning_rate": 3e-3, "hub_token": "hf_abc", "report_to": "none", "width": 8}
    with recording(tmp_path):
        args = Arguments(str(tmp_path / "out"), use_cpu=True, save_strategy="no", disable_tqdm=True, **options)
        Trainer(Line(), args, train_dataset=DATA).train()
    rows = [one for one in read_run(tmp_path).hyperparameters if one.group == "arguments"]
    differing = {one.name: one.value for one in rows if not one.is_default}
    given = {"output_dir", "use_cpu", "save_strategy", "disable_tqdm", *options} - {"report_to"}
    assert differing.keys() - {"dataloader_pin_memory"} == given
    assert (differing["learning_rate"], differing["width"], differing["hub_token"]) == (3e-3, 8, "***")
    assert [one.is_default for one in rows] == sorted(one.is_default for one in rows)
    assert {one.name: one.value for one in rows}["per_device_train_batch_size"] == 8
    assert {"max_steps": 2, "total_train_batch_size": 8, "optimizer.lr": 3e-3}.items() <= _hyperparameters(
        tmp_path
    ).items()
    assert "hf_abc" not in (tmp_path / "hyperparameters.jsonl").read_text()


def test_without_recording_there_is_no_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert recorder_of_process() is None
    assert notes_of_process() is None
    _train()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_warning_and_the_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, _ = _train()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(step_records.os, "posix_fallocate", full)
    with recording(tmp_path), pytest.warns(EchelonWarning, match="no longer records its run.*No space left") as warned:
        recorded, _ = _train()
    assert len(warned) == 1
    assert torch.equal(recorded, weights)


def test_a_child_program_with_the_rank_s_variables_writes_nothing(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with recording(tmp_path):
        rank, child = recorder_of_process(), ProcessRecorder(RunWithoutLauncher())
        child._run = rank._run  # type: ignore[union-attr]
        rank.step(1, optimizer)  # type: ignore[union-attr]
        child.step(1, optimizer)
        child.close()
        rank.step(2, optimizer)  # type: ignore[union-attr]
    assert [record.step for record in _steps(tmp_path).records] == [1, 2]


def test_values_on_a_device_are_filled_in_later(tmp_path: Path) -> None:
    values, steps = DeviceValues(), StepRecorder(tmp_path / "r.steps", rank=0, world_size=1)
    memory = torch.zeros(())
    for step in range(1, 201):
        for loss in (step, step + 1):
            memory.fill_(loss)  # as a CUDA graph writes each loss into the same memory
            values.add_loss(memory)
        if step % 2:
            values.set_norm(torch.tensor(step / 10, dtype=torch.float64))
        values.end_step(steps, steps.record(step, 0.1, [0] * 8))
    filled = [record for record in read_step_file(tmp_path / "r.steps").records if record.num_losses]
    assert len(filled) >= 64
    values.fill_in_all(steps)
    for record in read_step_file(tmp_path / "r.steps").records:
        assert (record.loss, record.num_losses) == (record.step + 0.5, 2)
        assert record.grad_norm == pytest.approx(record.step / 10, rel=1e-6) if record.step % 2 else True  # float32
        assert math.isnan(record.grad_norm) == (record.step % 2 == 0)


def _optimizer(**options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer.param_groups[0].update(options)
    return optimizer


@pytest.mark.parametrize("rate", [None, "auto", torch.tensor([1.0, 2.0])])
def test_a_learning_rate_that_is_no_number_is_unknown(rate: Any, tmp_path: Path) -> None:
    with recording(tmp_path):
        recorder_of_process().step(1, _optimizer(lr=rate))  # type: ignore[union-attr]
    assert [math.isnan(record.lr) for record in _steps(tmp_path).records] == [True]


def test_the_step_of_a_log_may_be_of_any_kind(tmp_path: Path) -> None:
    with recording(tmp_path):
        for step in (numpy.int64(3), torch.tensor(4), 5.5, "last"):
            recorder_of_process().log({"loss": 1}, step=step)  # type: ignore[union-attr, arg-type]
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [3, 4, 5.5, None]


def test_losses_on_a_device_that_no_step_takes_use_no_memory(tmp_path: Path) -> None:
    loss = torch.zeros((), device="meta")
    values = DeviceValues()
    for _ in range(3000):
        values.add_loss(loss)
    assert len(values._losses) < 1100
    with recording(tmp_path):
        recorder = recorder_of_process()
        assert recorder is not None
        with pytest.warns(EchelonWarning, match="no longer records"):
            recorder._give_up(OSError(28, "No space left on device"))
        recorder.add_loss(loss)
        recorder.set_norm(loss)
        assert recorder._on_device is None


def test_losses_that_were_added_up_keep_their_mean(tmp_path: Path) -> None:
    values, steps = DeviceValues(), StepRecorder(tmp_path / "r.steps", rank=0, world_size=1)
    for i in range(3000):
        values.add_loss(torch.tensor(float(i)))
    values.end_step(steps, steps.record(1, 0.1, [0] * 8))
    values.fill_in_all(steps)
    (record,) = read_step_file(tmp_path / "r.steps").records
    assert (record.loss, record.num_losses) == (pytest.approx(1499.5, rel=1e-6), 3000)  # float32 sums of 1024 integers


def test_the_values_of_a_model_on_several_devices_are_gathered_on_one() -> None:
    values = DeviceValues()
    values.add_loss(torch.zeros((), device="meta"))
    values.set_norm(torch.ones(()))
    assert values._norm is not None
    assert values._norm.device == values._losses[0].device


def _in_child(recorder: ProcessRecorder) -> None:
    recorder.step(1, _optimizer())
    raise ValueError("of the program")


def _run_without_launcher() -> None:
    with environ.patch({NO_RECORD_VARIABLE: None, RECORD_VARIABLE: None}):
        recorder = recorder_of_process()
        assert recorder is not None
        recorder.step(1, _optimizer())
        raise ValueError("of the program")


def test_a_forked_process_records_nothing(tmp_path: Path) -> None:
    with recording(tmp_path):
        child = multiprocessing.get_context("fork").Process(target=_in_child, args=(recorder_of_process(),))
        child.start()
        child.join(60)
    assert child.exitcode == 1
    assert list(tmp_path.iterdir()) == []


def test_the_failure_of_a_process_of_multiprocessing_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    child = multiprocessing.get_context("fork").Process(target=_run_without_launcher)
    child.start()
    child.join(60)
    (folder,) = (tmp_path / "echelon-runs").iterdir()
    assert (child.exitcode, read_info(folder)["outcome"]) == (1, "failed")


def test_without_a_launcher_a_full_disk_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_recorder, "write_info", full)
    monkeypatch.setattr(step_records.os, "posix_fallocate", full)
    recorder = ProcessRecorder(RunWithoutLauncher())
    with pytest.warns(EchelonWarning, match="no longer records its run.*No space left"):
        recorder.step(1, _optimizer())
    recorder.step(2, _optimizer())  # a second warning would be an error
    recorder.close()
    assert capsys.readouterr().err == ""


def test_runs_of_the_same_name_have_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = RunWithoutLauncher(), RunWithoutLauncher()
    runs[1]._name = runs[0]._name  # started in the same second, in containers where both have the same process id
    folders = []
    for run in runs:
        recorder = ProcessRecorder(run)
        recorder.step(1, _optimizer())
        recorder.close()
        assert recorder._place is not None
        folders.append(recorder._place.folder)
    assert folders[1].name == f"{folders[0].name}-2"
    assert [len(_steps(folder).records) for folder in folders] == [1, 1]
    assert [read_info(folder)["run_id"] for folder in folders] == [folder.name for folder in folders]


def test_the_batches_of_level_1_stay_an_iterator_of_a_loader(tmp_path: Path) -> None:
    class Once(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 1:
                raise ValueError("a damaged sample")
            return torch.ones(2)

    with recording(tmp_path):
        batches = iter(ed.shard(DataLoader(Once(), batch_size=1)))
        assert len(batches) == 3
        next(batches)
        with pytest.raises(ValueError, match="a damaged sample"):
            next(batches)
        assert len(next(batches)) == 1  # the loop goes on, as with torch's own iterator
