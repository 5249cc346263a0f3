"""The Trainer with split layers, pieces of sequences or stages: the losses of one process, and runs that resume on another mesh."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon import ParallelismConfig
from echelon.base.errors import ConfigError
from echelon.base.warnings import EchelonWarning
from echelon.trainer import Trainer
from tests.harness import errors_on_ranks, import_ahead, run_on_ranks
from tests.parallel_models import loss_without_float32, ragged_batches, tiny_llama
from tests.reference import saved_weights
from tests.trainer_models import arguments, logged

_SHARD_TP, _REPLICATE_TP = ({name: 2, "tp_size": 2} for name in ("dp_shard_size", "dp_replicate_size"))

import_ahead("transformers.models.llama.modeling_llama", "torch.distributed.pipelining")


def _trained(
    folder: str, sizes: dict[str, int], parity: str, steps: int, resume: bool, save_blocking: bool = True
) -> dict[str, Any]:
    pipeline = {"pipeline_schedule": "1F1B", "pipeline_num_micro_batches": 2} if "pp_size" in sizes else {}
    batch: dict[str, Any] = {"global_batch_size": 8} if parity == "exact" else {"per_device_train_batch_size": 4}
    args = arguments(
        folder,
        parallelism_config=ParallelismConfig(**sizes) if sizes else None,
        max_steps=steps,
        parity=parity,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        save_blocking=save_blocking,
        seed=3,
        **batch,
        **pipeline,
    )
    rows = [{k: v[i] for k, v in batch.items()} for batch in ragged_batches(12) for i in range(4)]
    model = tiny_llama(num_layers=4, tied=True)
    model.loss_function = loss_without_float32
    trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows[:6])
    before = trainer.evaluate()["eval_loss"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*contains RNG states for", category=EchelonWarning)
        trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/final")
    return {
        "losses": logged(trainer, "loss"),
        "norms": logged(trainer, "grad_norm"),
        "before": before,
        "after": trainer.evaluate()["eval_loss"],
        "predictions": torch.as_tensor(trainer.predict(trainer.eval_dataset).predictions),
    }


_PP: dict[str, int] = {"pp_size": 2}


@pytest.mark.parametrize(
    ("meshes", "parity"),
    [
        pytest.param([_PP, _PP], "exact", id="pp 2 twice", marks=pytest.mark.slow),
        pytest.param([{"cp_size": 2}], "exact", id="cp 2", marks=pytest.mark.slow),
        pytest.param([{"sp_size": 2}], "exact", id="sp 2", marks=pytest.mark.slow),
        *(
            pytest.param(meshes, parity, id=f"{name}, {parity}", marks=pytest.mark.soak)
            for name, meshes, parity in (
                ("pp 2 twice", [_PP, _PP], "off"),
                ("pp 2, one process, shard 2", [_PP, {}, {"dp_shard_size": 2}], "exact"),
                ("cp 2, shard 2, cp 2", [{"cp_size": 2}, {"dp_shard_size": 2}, {"cp_size": 2}], "exact"),
                ("sp 2, tp 2, pp 2", [{"sp_size": 2}, {"tp_size": 2}, _PP], "exact"),
                ("tp 2, shard 2 x tp 2, tp 4", [{"tp_size": 2}, _SHARD_TP, {"tp_size": 4}], "exact"),
                ("tp 4, replicate 2 x tp 2, tp 2", [{"tp_size": 4}, _REPLICATE_TP, {"tp_size": 2}], "exact"),
                ("pp 2 x tp 2, cp 2, pp 2", [{**_PP, "tp_size": 2}, {"cp_size": 2}, _PP], "exact"),
                ("pp 2 x shard 2 twice", [{**_PP, "dp_shard_size": 2}] * 2, "exact"),
                ("pp 2 x cp 2, one process, pp 2 x sp 2", [{**_PP, "cp_size": 2}, {}, {**_PP, "sp_size": 2}], "exact"),
            )
        ),
    ],
)
def test_losses_are_those_of_one_process_and_other_meshes_resume(
    meshes: list[dict[str, int]], parity: str, tmp_path: Path
) -> None:
    """The schedule and the number of micro-batches are settings (pipeline_schedule, pipeline_num_micro_batches)."""
    (whole,) = run_on_ranks(_trained, str(tmp_path / "one"), {}, parity, 2 * len(meshes), False, world_size=1)
    folder = str(tmp_path / "meshes")
    for number, sizes in enumerate(meshes):
        steps, world_size = 2 * (number + 1), math.prod(sizes.values())
        # The first checkpoint is written in the background.
        options = (sizes, parity, steps, number > 0, number > 0)
        answers = run_on_ranks(_trained, folder, *options, world_size=world_size, timeout=120)
        for answer in answers:
            for name in ("losses", "norms"):
                assert answer[name] == pytest.approx(whole[name][:steps], rel=1e-9), (sizes, name)
            assert answer["before"] == pytest.approx(whole["before"], rel=1e-9)
    for answer in answers:
        assert answer["after"] == pytest.approx(whole["after"], rel=1e-9)
        torch.testing.assert_close(answer["predictions"], whole["predictions"], rtol=0, atol=1e-9)
    one, found = (saved_weights(tmp_path / name / "final") for name in ("one", "meshes"))
    assert one.keys() == found.keys()
    for name, value in one.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)


def test_other_modes_are_refused(tmp_path: Path) -> None:
    for text in errors_on_ranks(ConfigError, _trained, str(tmp_path), {"cp_size": 2}, "off", 2, False, world_size=2):
        assert "parity='exact'" in text
