"""One process that sees several accelerators: the Trainer uses them all by DataParallel, on stand-ins for devices."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon.base.errors import ConfigError
from echelon.base.warnings import EchelonWarning
from echelon.trainer import Trainer, TrainingArguments
from echelon.trainer.arguments.enums import ParallelMode
from tests.cpu_data_parallel import cpu_devices
from tests.trainer_models import (
    CONSTANT_SGD,
    DividingNet,
    Net,
    arguments,
    divided,
    logged,
    net_data,
    stacked,
    train_rows_plainly,
)

DEVICES = 2


@pytest.fixture(autouse=True)
def devices() -> Iterator[None]:
    with cpu_devices(DEVICES):
        yield


class Recording(DividingNet):
    """Records with how many samples each copy ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []  # the copies share it

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> dict[str, torch.Tensor]:
        self.seen.append(len(x))
        return super().forward(x, labels, **kwargs)


def _args(folder: Path, **options: Any) -> TrainingArguments:
    """Without use_cpu, which would leave the accelerators alone."""
    more = {"use_cpu": False, "per_device_eval_batch_size": 2, "train_sampling_strategy": "sequential"}
    return arguments(folder, **{**CONSTANT_SGD, **more, **options})


@pytest.mark.filterwarnings("ignore::echelon.base.warnings.EchelonWarning")
@pytest.mark.parametrize(
    ("model_class", "options"),
    [(DividingNet, {}), (Net, {"compute_loss_func": divided})],
)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("n", [16, 13])  # 13: the last batch of 4 has one sample, for one of the two devices
def test_every_label_of_an_update_weighs_the_same_on_all_devices(
    tmp_path: Path, model_class: Any, options: dict[str, Any], accumulation: int, n: int
) -> None:
    rows, model, expected = net_data(n, unlabelled=range(4, n, 5)), model_class(), Net()
    args = _args(tmp_path, gradient_accumulation_steps=accumulation, logging_steps=1)
    trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows, **options)
    trainer.train()
    plain = train_rows_plainly(expected, rows, batch_size=2 * DEVICES * accumulation)
    for ours, theirs in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)  # float64, sums in another order
    assert logged(trainer) == pytest.approx(plain.losses, rel=1e-12)
    x, labels = stacked(rows)
    parts = [slice(start, min(start + 4, n)) for start in range(0, n, 4)]
    total = sum(expected(x[part], labels[part])["loss"].item() * (part.stop - part.start) for part in parts)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(total / n, rel=1e-12)
    predictions = torch.from_numpy(trainer.predict(rows).predictions)
    torch.testing.assert_close(predictions, expected(x)["logits"].detach(), rtol=1e-12, atol=1e-14)
    assert trainer.model is model
    assert isinstance(trainer.model_wrapped, nn.DataParallel)


def test_a_mean_that_the_model_takes_is_that_of_the_devices(tmp_path: Path) -> None:
    rows, model, expected = net_data(16), Net(), Net()
    trainer = Trainer(model, _args(tmp_path), train_dataset=rows)
    with pytest.warns(EchelonWarning) as caught:
        trainer.train()
    (text,) = [str(one.message) for one in caught]
    assert "copies the model to 2 devices" in text
    assert "echelon launch --num_processes 2 " in text
    assert "\n" not in text
    train_rows_plainly(expected, rows, batch_size=4)  # every device has two of four samples
    for ours, theirs in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_the_arguments_say_how_many_devices_there_are_and_batches_are_theirs_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = _args(tmp_path, per_device_eval_batch_size=3)
    assert (args.n_gpu, args.train_batch_size, args.eval_batch_size) == (2, 4, 6)
    assert args.parallel_mode is ParallelMode.NOT_DISTRIBUTED
    assert args.world_size == 1
    model = Recording()
    with warnings.catch_warnings(), caplog.at_level("INFO", logger="echelon"):
        warnings.simplefilter("ignore", EchelonWarning)
        trainer = Trainer(model, args, train_dataset=net_data(8), eval_dataset=net_data(12))
        trainer.evaluate()  # before any training: a batch of both devices would not fit on one
        assert sorted(model.seen) == [3, 3, 3, 3]
        assert trainer.train().global_step == 2
    assert trainer.get_total_train_batch_size() == 4
    assert trainer.accelerator.capabilities.name == "dp"
    for line in (
        "  Instantaneous batch size per device = 2",
        "  Training with DataParallel so batch size has been adjusted to: 4",
        "  Total train batch size (w. parallel, distributed & accumulation) = 4",
    ):
        assert line in caplog.messages


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ({"engine": "single"}, {}),
        ({}, {"ECHELON_ENGINE": "single"}),
        ({"parity": "exact"}, {}),
        ({}, {"ECHELON_PARITY": "exact"}),
        ({}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29123"}),
    ],
)
def test_one_device_is_used_where_something_else_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    args = _args(tmp_path, **options)
    assert (args.n_gpu, args.train_batch_size) == (1, 2)
    assert args.parallel_mode is ParallelMode.NOT_PARALLEL


def test_a_script_that_sets_the_number_to_one_and_a_model_that_cannot_be_copied_run_on_one_device(
    tmp_path: Path,
) -> None:
    args = _args(tmp_path)
    args._n_gpu = 1  # type: ignore[misc]
    assert Trainer(Net(), args, train_dataset=net_data(4)).accelerator.capabilities.num_devices == 1
    spread: Any = Net()
    spread.hf_device_map = {"layers.0": 0, "layers.2": 1}
    args = _args(tmp_path)
    trainer = Trainer(spread, args, train_dataset=net_data(4))
    assert (args.n_gpu, trainer.accelerator.capabilities.num_devices) == (1, 1)

    def make() -> nn.Module:
        quantized: Any = Net()
        quantized.is_loaded_in_8bit = True
        made: nn.Module = quantized
        return made

    args = _args(tmp_path)
    trainer = Trainer(model_init=make, args=args, train_dataset=net_data(4))
    assert (args.n_gpu, trainer.accelerator.capabilities.num_devices) == (1, 1)


@pytest.mark.filterwarnings("ignore::echelon.base.warnings.EchelonWarning")
@pytest.mark.parametrize("checkpoint_format", ["echelon", "transformers"])
def test_a_training_on_several_devices_goes_on_from_its_checkpoint(tmp_path: Path, checkpoint_format: str) -> None:
    rows = net_data(24)
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "checkpoint_format": checkpoint_format}
    whole = Net()
    Trainer(whole, _args(tmp_path / "whole"), train_dataset=rows).train()
    Trainer(Net(), _args(tmp_path, max_steps=2, **options), train_dataset=rows).train()
    again = Net()
    trainer = Trainer(again, _args(tmp_path, **options), train_dataset=rows)
    assert trainer.train(resume_from_checkpoint=True).global_step == 6
    for ours, theirs in zip(again.parameters(), whole.parameters()):
        assert torch.equal(ours, theirs)


def test_an_engine_that_is_not_there_or_does_not_fit_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown engine 'ddpp'"):
        Trainer(Net(), _args(tmp_path, engine="ddpp"))
    with pytest.raises(ConfigError, match="are both set"):
        Trainer(Net(), _args(tmp_path, engine="dp", fsdp="full_shard"))


def test_an_engine_by_name_is_that_of_the_accelerator(tmp_path: Path) -> None:
    trainer = Trainer(Net(), _args(tmp_path, engine="single"), train_dataset=net_data(8))
    assert trainer.accelerator.capabilities.name == "single"
    assert str(trainer.accelerator.config.origins["engine"]).startswith("code")
    trainer.train()
    assert trainer.model_wrapped is trainer.model
