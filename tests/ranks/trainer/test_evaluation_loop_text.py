"""Evaluations whose batches hold no tensor, as those of trl's trainers that generate: each sample counts once in the mean loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.trainer import Trainer
from tests.harness import run_on_ranks
from tests.trainer_models import Net, arguments

_COLLATORS: dict[str, Any] = {
    "samples": list,
    "columns": lambda samples: {"number": [sample["number"] for sample in samples], "kind": "square"},
}


class _OfTexts(Trainer):
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
