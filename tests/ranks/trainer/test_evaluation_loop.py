"""Evaluations on several ranks: rows per token, lists in lists, batches without tensors, and compiled models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon.trainer import EvalPrediction, Trainer
from tests.harness import RanksFailed, run_on_ranks
from tests.trainer_models import Net, arguments, net_data


class Tokens(nn.Module):
    """Returns one row of logits per token, not per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        rows = ids[ids > 0].float()[:, None] * self.scale
        return {"loss": rows.mean(), "logits": torch.cat([rows, -rows], dim=1)}


def _ids(n: int) -> list[dict[str, torch.Tensor]]:
    return [
        {"ids": torch.tensor([k + 1] * (k % 3 + 1) + [0] * (2 - k % 3)), "labels": torch.tensor(k)} for k in range(n)
    ]


def _evaluate_tokens(folder: str, n: int) -> Any:
    found: list[Any] = []

    def metrics(prediction: EvalPrediction) -> dict[str, float]:
        found.append(prediction.predictions)
        return {}

    args = arguments(folder, per_device_eval_batch_size=2)
    Trainer(Tokens(), args, eval_dataset=_ids(n), compute_metrics=metrics).evaluate()
    return found[0]


class Nested(Trainer):
    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        ids = inputs["ids"].tolist()
        logits = ([[i for i in row if i] for row in ids], {"first": [str(row[0]) for row in ids]})
        return torch.zeros(()), logits, inputs["labels"]


def _evaluate_lists(folder: str, n: int) -> Any:
    found: list[Any] = []

    def metrics(prediction: EvalPrediction) -> dict[str, float]:
        found.append((prediction.predictions, prediction.label_ids.tolist()))
        return {}

    args = arguments(folder, per_device_eval_batch_size=2, eval_use_gather_object=True)
    Nested(Tokens(), args, eval_dataset=_ids(n), compute_metrics=metrics).evaluate()
    return found[0]


@pytest.mark.parametrize("n", [8, 7])
@pytest.mark.parametrize("world_size", [1, 2])
def test_lists_in_tuples_and_dicts_are_gathered_by_sample(tmp_path: Any, world_size: int, n: int) -> None:
    for (lists, named), labels in run_on_ranks(_evaluate_lists, str(tmp_path), n, world_size=world_size):
        assert labels == list(range(n))
        assert lists == [[k + 1] * (k % 3 + 1) for k in range(n)]
        assert named == {"first": [str(k + 1) for k in range(n)]}


def test_rows_per_token_are_refused_by_their_name(tmp_path: Any) -> None:
    one = run_on_ranks(_evaluate_tokens, str(tmp_path), 8, world_size=1)[0]
    assert one[:, 0].tolist() == [k + 1 for k in range(8) for _ in range(k % 3 + 1)]
    with pytest.raises(
        RanksFailed, match=r"logits have 3 rows on this rank for an evaluation batch of 2 samples"
    ) as error:
        run_on_ranks(_evaluate_tokens, str(tmp_path), 8, world_size=2)
    assert "return one row per sample" in str(error.value)


def _save_on_rank_zero(folder: str, parity: str) -> list[str]:
    args = arguments(folder, per_device_eval_batch_size=2, parity=parity)
    trainer = Trainer(Tokens(), args, train_dataset=_ids(8), eval_dataset=_ids(8))
    trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_model(f"{folder}/first")
    trainer.evaluate()
    trainer.save_model(f"{folder}/second")
    return sorted(path.name for path in Path(folder, "second").iterdir())  # on every rank, without another wait


@pytest.mark.parametrize("parity", ["off", "exact"])
def test_rank_zero_alone_saves_a_model_that_it_holds_whole(tmp_path: Any, parity: str) -> None:
    files = run_on_ranks(_save_on_rank_zero, str(tmp_path), parity, world_size=2)
    assert files[0] == files[1] == sorted(path.name for path in (tmp_path / "first").iterdir())
    assert "model.safetensors" in files[0]


_COLLATORS: dict[str, Any] = {
    "samples": list,
    "columns": lambda samples: {"number": [sample["number"] for sample in samples], "kind": "square"},
}


class _OfTexts(Trainer):
    """Its batches hold no tensor, as those of trl's trainers that generate."""

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, None, None]:
        texts = inputs["number"] if isinstance(inputs, dict) else [sample["number"] for sample in inputs]
        return torch.tensor([float(text) for text in texts]).mean(), None, None


def _mean_loss(folder: str, collator: str, num_samples: int) -> float:
    args = arguments(folder, per_device_eval_batch_size=4, remove_unused_columns=False)
    rows = [{"number": str(i * i)} for i in range(num_samples)]
    trainer = _OfTexts(Net(), args, eval_dataset=rows, data_collator=_COLLATORS[collator])
    return float(trainer.evaluate()["eval_loss"])


# One process: the last batch is short. Two: it is short on one rank, or all of it is padding on one rank (16 + 3, 8 + 1, 4 samples).
@pytest.mark.parametrize("collator", list(_COLLATORS))
@pytest.mark.parametrize(("world_size", "num_samples"), [(1, 19), (2, 19), (2, 13), (2, 9), (2, 4), (2, 16)])
def test_each_sample_of_a_batch_without_tensors_counts_once(
    tmp_path: Any, collator: str, world_size: int, num_samples: int
) -> None:
    mean = sum(i * i for i in range(num_samples)) / num_samples
    for found in run_on_ranks(_mean_loss, str(tmp_path), collator, num_samples, world_size=world_size):
        assert found == pytest.approx(mean, rel=1e-6)  # the means of batches are float32


def _evaluate(folder: str, engine: str, how: str) -> list[float]:
    model: Any = torch.compile(Net(), backend="eager") if how == "script" else Net()
    options = {"torch_compile": True, "torch_compile_backend": "eager"} if how == "argument" else {}
    args = arguments(folder, per_device_eval_batch_size=2, engine=engine, optim="sgd", learning_rate=0.1, **options)
    trainer = Trainer(model, args, train_dataset=net_data(8), eval_dataset=net_data(8))
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return [before, trainer.evaluate()["eval_loss"], trainer.predict(net_data(5)).metrics["test_loss"]]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["argument", "script"])
@pytest.mark.parametrize("engine", ["ddp", "zero1"])
def test_a_compiled_model_is_evaluated_as_the_plain_one(tmp_path: Any, engine: str, how: str) -> None:
    plain, compiled = (run_on_ranks(_evaluate, str(tmp_path), engine, kind, world_size=2) for kind in ("plain", how))
    for mine, wanted in zip(compiled, plain):
        assert mine == pytest.approx(wanted, rel=1e-12)  # float64; the same operations
