"""Data whose length is not the number of batches that they give: a Trainer reads all of them, and says so."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from echelon import Accelerator, Trainer, TrainingArguments
from echelon.distributed import shard
from tests.trainer_models import EndsAfter, RecordingModel, arguments, logged, warnings_of


class Stream(IterableDataset[Any]):
    """Gives ``real`` samples, and says that they are ``said``."""

    def __init__(self, real: int | None, said: int) -> None:
        self.real, self.said = real, said

    def __len__(self) -> int:
        return self.said

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for i in itertools.count() if self.real is None else range(self.real):
            yield {"x": torch.tensor([float(i)])}


class Places(Stream):
    """As it, and knows its place: the exact modes go on in the middle of nothing else."""

    def __init__(self, real: int, said: int) -> None:
        super().__init__(real, said)
        self.place = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.place < (self.real or 0):
            self.place += 1
            yield {"x": torch.tensor([float(self.place - 1)])}
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Samples(Sampler[int]):
    """Draws ``real`` of the samples, and says that they are ``said``."""

    def __init__(self, real: int, said: int) -> None:
        self.real, self.said = real, said

    def __len__(self) -> int:
        return self.said

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.real))


class Plain(Trainer):
    """Its loader of the training data is its own, and not prepared."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=2)  # type: ignore[arg-type]


class ByItsSampler(Trainer):
    """Its order is that of a sampler of its own."""

    given: Any = None

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return self.given


def _arguments(folder: Path, **options: Any) -> TrainingArguments:
    return arguments(folder, per_device_eval_batch_size=2, logging_steps=1, **options)


CASES = [
    *((kind, accumulation, "off") for kind in (Trainer, Plain) for accumulation in (1, 2, 3)),
    (Trainer, 1, "exact"),
]


@pytest.mark.parametrize(("kind", "accumulation", "parity"), CASES)
def test_every_sample_of_each_epoch_is_read_when_the_length_is_too_small(
    kind: type[Trainer], accumulation: int, parity: str, tmp_path: Path
) -> None:
    model = RecordingModel()
    args = _arguments(
        tmp_path, num_train_epochs=2, gradient_accumulation_steps=accumulation, learning_rate=0.6, parity=parity
    )
    trainer = kind(model, args, train_dataset=Stream(10, said=6))
    texts = warnings_of(trainer.train)
    assert model.seen == 2 * [float(i) for i in range(10)]
    steps = -(-5 // accumulation)  # of five batches
    planned = 2 * -(-3 // accumulation)
    assert trainer.state.global_step == trainer.state.max_steps == 2 * steps
    assert trainer.state.epoch == 2.0
    rates = logged(trainer, "learning_rate")
    # transformers' linear schedule for the steps that were planned; the last of them is kept.
    assert rates == pytest.approx([0.6 * (1 - min(i, planned - 1) / planned) for i in range(2 * steps)])
    assert logged(trainer, "epoch") == sorted(logged(trainer, "epoch"))
    (text,) = texts
    assert "epoch 1 had 5 batches" in text
    assert "the data's length (Stream.__len__, " in text
    assert "test_trainer_wrong_length.py:" in text
    assert "max_steps" in text


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_length_that_is_too_large_is_reported(accumulation: int, tmp_path: Path) -> None:
    model = RecordingModel()
    args = _arguments(tmp_path, num_train_epochs=2, gradient_accumulation_steps=accumulation)
    trainer = Trainer(model, args, train_dataset=Stream(6, said=10))
    (text,) = warnings_of(trainer.train)
    assert model.seen == 2 * [float(i) for i in range(6)]
    assert trainer.state.global_step == 2 * -(-3 // accumulation)
    assert "epoch 1 had 3 batches" in text
    assert "the data's length (Stream.__len__, " in text


@pytest.mark.parametrize(("said", "seen"), [(6, [*range(10), *range(4)]), (20, [*range(10), *range(4)])])
def test_max_steps_bounds_the_training_and_the_data_their_epoch(said: int, seen: list[int], tmp_path: Path) -> None:
    model = RecordingModel()
    trainer = Trainer(model, _arguments(tmp_path, max_steps=7), train_dataset=Stream(10, said=said))
    (text,) = warnings_of(trainer.train)
    assert model.seen == [float(i) for i in seen]
    assert trainer.state.global_step == trainer.state.max_steps == 7
    assert "epoch 1 had 5 batches" in text


def test_a_part_of_an_epoch_is_as_long_as_it_was_planned(tmp_path: Path) -> None:
    model = RecordingModel()
    args = _arguments(tmp_path, num_train_epochs=1.5)
    warnings_of(Trainer(model, args, train_dataset=Stream(10, said=8)).train)  # 4 batches: 2 are half of them
    assert model.seen == [float(i) for i in (*range(10), *range(4))]


def test_a_limit_is_kept(tmp_path: Path) -> None:
    model = RecordingModel()
    trainer = Trainer(
        model, _arguments(tmp_path, num_train_epochs=2, limit_train_batches=2), train_dataset=Stream(10, 8)
    )
    assert warnings_of(trainer.train) == []
    assert model.seen == 2 * [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("kind", [Trainer, Plain])
def test_an_endless_stream_is_limited_with_a_warning(kind: type[Trainer], tmp_path: Path) -> None:
    model = RecordingModel()
    trainer = kind(model, _arguments(tmp_path, num_train_epochs=2), train_dataset=Stream(None, said=6))
    (text,) = warnings_of(trainer.train)
    assert model.seen == [float(i) for i in (*range(12), *range(6))]  # twice as much as it says, and from then on that
    assert "epoch 1 had 6 batches" in text
    assert "with more to come" in text
    assert "max_steps" in text


@pytest.mark.parametrize(("real", "said"), [(10, 6), (6, 10)])
def test_the_length_of_a_sampler_may_be_wrong_too(real: int, said: int, tmp_path: Path) -> None:
    model = RecordingModel()
    data = [{"x": torch.tensor([float(i)])} for i in range(12)]
    trainer = ByItsSampler(model, _arguments(tmp_path, num_train_epochs=1), train_dataset=data)
    trainer.given = Samples(real, said)
    (text,) = warnings_of(trainer.train)
    assert model.seen == [float(i) for i in range(real)]
    assert f"epoch 1 had {real // 2} batches" in text
    assert "the data's length (Samples.__len__, " in text
    assert f") is {said // 2}." in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["off", "exact", "transformers"])
@pytest.mark.parametrize(
    ("real", "said", "end"),
    [(real, said, end) for real, said in ((10, 6), (6, 10), (6, 6)) for end in range(1, 8 if real == 10 else 6)],
)
def test_training_with_a_wrong_length_resumes_from_each_step(
    real: int, said: int, end: int, kind: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"checkpoint_format": kind} if kind == "transformers" else {"parity": kind}

    def train(folder: Path, *callbacks: Any, resume: bool = False) -> tuple[list[float], Any]:
        model = RecordingModel()
        args = _arguments(folder, num_train_epochs=2, **options)
        trainer = Trainer(model, args, train_dataset=Places(real, said), callbacks=list(callbacks))
        warnings_of(lambda: trainer.train(resume_from_checkpoint=resume))
        return model.seen, trainer

    whole, trainer = train(tmp_path / "whole")
    before, _ = train(tmp_path / "parts", EndsAfter(end))
    after, again = train(tmp_path / "parts", resume=True)
    assert before + after == whole == 2 * [float(i) for i in range(real)]
    assert again.state.global_step == trainer.state.global_step
    assert logged(again, "learning_rate") == logged(trainer, "learning_rate")
    assert logged(again, "epoch") == logged(trainer, "epoch")


@pytest.mark.parametrize("said", [4, 6, 12])
def test_an_evaluation_reads_all_and_computes_its_metrics_at_the_end(said: int, tmp_path: Path) -> None:
    results: list[tuple[int, bool]] = []

    def metrics(prediction: Any, compute_result: bool) -> dict[str, float]:
        results.append((len(np.asarray(prediction.predictions)), compute_result))
        return {"rows": float(sum(rows for rows, _ in results))} if compute_result else {}

    args = _arguments(tmp_path, batch_eval_metrics=True, label_names=["x"])
    trainer = Trainer(RecordingModel(), args, eval_dataset=Stream(6, said), compute_metrics=metrics)
    found = {}
    assert warnings_of(lambda: found.update(trainer.evaluate())) == []
    assert results == [(2, False), (2, False), (2, True)]
    assert found["eval_rows"] == 6.0
    results.clear()
    predicted = trainer.predict(Stream(6, said))
    assert results[-1] == (2, True)
    assert predicted.predictions.flatten().tolist() == [float(i) for i in range(6)]
    rate = predicted.metrics["test_samples_per_second"] * predicted.metrics["test_runtime"]
    assert rate == pytest.approx(6, rel=0.2)


@pytest.mark.parametrize("said", [4, 6, 12])
@pytest.mark.parametrize("parity", ["off", "exact"])
def test_a_prepared_loader_gives_what_its_dataset_gives(said: int, parity: str) -> None:
    accelerator = Accelerator(cpu=True, parity=parity)
    loader = accelerator.prepare(DataLoader(Stream(6, said), batch_size=2))
    found: list[float] = []
    for batch in loader:
        found += accelerator.gather_for_metrics(batch["x"]).flatten().tolist()
    assert found == [float(i) for i in range(6)]


@pytest.mark.parametrize("said", [4, 6, 12])
def test_shard_reads_what_its_sampler_gives(said: int) -> None:
    loader = shard(DataLoader(TensorDataset(torch.arange(12.0)), batch_size=2, sampler=Samples(7, said)))
    assert [float(value) for (batch,) in loader for value in batch] == [float(i) for i in range(7)]
