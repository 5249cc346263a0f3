"""The Trainer of one process on the accelerators of this machine: all of them, and the training is that of a plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echelon.base.warnings import EchelonWarning
from echelon.trainer import Trainer
from tests.prepared_loop import all_warnings
from tests.trainer_models import CONSTANT_SGD, DividingNet, Net, arguments, net_data, stacked, train_rows_plainly

pytestmark = pytest.mark.gpu


def test_one_process_trains_on_all_devices_as_a_plain_loop(tmp_path: Path) -> None:
    devices = torch.accelerator.device_count()
    rows = net_data(43, unlabelled=range(4, 43, 5))
    args = arguments(
        tmp_path, per_device_eval_batch_size=64, gradient_accumulation_steps=2, train_sampling_strategy="sequential",
        use_cpu=False, **CONSTANT_SGD,
    )  # fmt: skip
    assert (args.n_gpu, args.train_batch_size) == (devices, 2 * devices)
    with all_warnings() as caught:
        model = DividingNet()
        trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows)
        trainer.train()
    # Of several devices one warning, how to start ddp, and none of torch's about numbers that are gathered.
    assert [issubclass(one.category, EchelonWarning) for one in caught] == [True] * (devices > 1)
    reference = Net()
    train_rows_plainly(reference, rows, batch_size=2 * devices * 2)
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-10, atol=1e-12)  # float64, another device's sums
    x, labels = stacked(rows)
    loss = reference(x, labels)["loss"].item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-10)
