"""The Trainer with ``cp_size`` or ``sp_size`` has the losses of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echelon import ParallelismConfig, Trainer
from echelon.base.errors import ConfigError
from tests.harness import errors_on_ranks, import_ahead, run_on_ranks
from tests.parallel_models import loss_without_float32, ragged_batches, tiny_llama
from tests.trainer_models import arguments

import_ahead("transformers.models.llama.modeling_llama")


def _rows() -> list[dict[str, torch.Tensor]]:
    return [{k: v[i] for k, v in batch.items()} for batch in ragged_batches(4) for i in range(4)]


def _losses(folder: Path, sizes: dict[str, int], parity: str, batch_size: int) -> list[float]:
    model = tiny_llama(attention="sdpa")
    model.loss_function = loss_without_float32
    args = arguments(
        folder, per_device_train_batch_size=batch_size, max_steps=4, logging_steps=1, eval_strategy="steps", eval_steps=2,
        parity=parity, parallelism_config=ParallelismConfig(**sizes) if sizes else None,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=_rows(), eval_dataset=_rows()[:4])
    trainer.train()
    return [entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry]


@pytest.mark.parametrize("sizes", [{"cp_size": 2}, {"sp_size": 2}], ids=str)
def test_losses_are_those_of_one_process(tmp_path: Path, sizes: dict[str, int]) -> None:
    """The two ranks are one reader, so the global batch is that of one process."""
    whole = run_on_ranks(_losses, tmp_path / "one", {}, "exact", 4, world_size=1)[0]
    found = run_on_ranks(_losses, tmp_path / "cut", sizes, "exact", 4, world_size=2)
    assert len(whole) == 6
    assert found[0] == pytest.approx(whole, rel=1e-9)


def test_other_modes_are_refused(tmp_path: Path) -> None:
    for text in errors_on_ranks(ConfigError, _losses, tmp_path, {"cp_size": 2}, "off", 4, world_size=2):
        assert "parity='exact'" in text
