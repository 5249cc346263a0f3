"""The Trainer of one process on the accelerators of this machine: all of them, and the training is that of a plain loop."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from echelon.base.warnings import EchelonWarning
from echelon.trainer import Trainer, TrainingArguments
from tests.trainer_models import Net, net_data

pytestmark = pytest.mark.gpu


class Dividing(Net):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        if labels is None:
            return {"logits": logits}
        items = kwargs.get("num_items_in_batch")
        if items is None:
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}
        return {"loss": F.cross_entropy(logits, labels, reduction="sum") / items, "logits": logits}


def test_one_process_trains_on_all_devices_as_a_plain_loop(tmp_path: Path) -> None:
    devices = torch.accelerator.device_count()
    rows = [
        {**row, "labels": torch.tensor(-100) if i % 5 == 4 else row["labels"]} for i, row in enumerate(net_data(43))
    ]
    args = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, per_device_eval_batch_size=64, num_train_epochs=1,
        gradient_accumulation_steps=2, save_strategy="no", disable_tqdm=True, train_sampling_strategy="sequential",
        learning_rate=0.1, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0,
    )  # fmt: skip
    assert (args.n_gpu, args.train_batch_size) == (devices, 2 * devices)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = Dividing()
        trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows)
        trainer.train()
    # Of several devices one warning, how to start ddp, and none of torch's about numbers that are gathered.
    assert [issubclass(one.category, EchelonWarning) for one in told] == [True] * (devices > 1)
    reference = Net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    size = 2 * devices * 2
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        labels = torch.stack([row["labels"] for row in part])
        F.cross_entropy(reference.layers(torch.stack([row["x"] for row in part])), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-10, atol=1e-12)  # float64, another device's sums
    logits = reference.layers(torch.stack([row["x"] for row in rows]))
    labels = torch.stack([row["labels"] for row in rows])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-10)
