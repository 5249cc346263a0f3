"""The Trainer with split layers: the losses of one process, evaluation, checkpoints that resume on another mesh."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from echelon import ParallelismConfig
from echelon.base.warnings import EchelonWarning
from echelon.trainer import Trainer
from tests.harness import run_on_ranks
from tests.parallel_models import IGNORED, ragged_batches, tiny_llama
from tests.trainer_models import arguments, logged

_MESHES: dict[str, dict[str, int]] = {
    "tp 2": {"tp_size": 2},
    "shard 2 x tp 2": {"dp_shard_size": 2, "tp_size": 2},
    "replicate 2 x tp 2": {"dp_replicate_size": 2, "tp_size": 2},
    "tp 4": {"tp_size": 4},
}


def _samples(num_batches: int) -> list[dict[str, torch.Tensor]]:
    return [
        {"input_ids": batch["input_ids"][i], "labels": batch["labels"][i]}
        for batch in ragged_batches(num_batches)
        for i in range(4)
    ]


def _mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """The loss in float64 (transformers' own is float32); labels are shifted already."""
    total = F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (num_items_in_batch if num_items_in_batch is not None else (labels != IGNORED).sum())


def _trained(folder: str, sizes: dict[str, int], steps: int, resume: bool) -> tuple[list[float], float]:
    args = arguments(
        folder,
        parallelism_config=ParallelismConfig(**sizes) if sizes else None,
        max_steps=steps,
        global_batch_size=8,
        parity="exact",
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        seed=3,
    )
    rows = _samples(10)
    trainer = Trainer(tiny_llama(), args, train_dataset=rows, eval_dataset=rows[:6], compute_loss_func=_mean)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*contains RNG states for 2 processes", category=EchelonWarning)
        trainer.train(resume_from_checkpoint=resume)
    return logged(trainer, "loss"), trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param("tp 2", "shard 2 x tp 2", marks=pytest.mark.soak),
        pytest.param("shard 2 x tp 2", "tp 4", marks=pytest.mark.soak),
        pytest.param("tp 4", "replicate 2 x tp 2", marks=pytest.mark.soak),
        pytest.param("replicate 2 x tp 2", "tp 2", marks=pytest.mark.soak),
    ],
)
def test_losses_are_those_of_one_process_and_another_mesh_resumes(first: str, then: str, tmp_path: Path) -> None:
    expected = run_on_ranks(_trained, str(tmp_path / "one"), {}, 4, False, world_size=1)[0]
    ranks = [2 if name == "tp 2" else 4 for name in (first, then)]
    folder = str(tmp_path / "mesh")
    begun = run_on_ranks(_trained, folder, _MESHES[first], 2, False, world_size=ranks[0], timeout=120)[0]
    ended = run_on_ranks(_trained, folder, _MESHES[then], 4, True, world_size=ranks[1], timeout=120)
    assert begun[0][:2] == pytest.approx(expected[0][:2], abs=1e-9)
    assert ended[0][0][-2:] == pytest.approx(expected[0][2:4], abs=1e-9)
    assert ended[0][1] == pytest.approx(expected[1], abs=1e-9)
