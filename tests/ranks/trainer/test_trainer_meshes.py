"""The Trainer with split layers, pieces of sequences or stages: the losses of one process, and runs that resume on another mesh."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon import ParallelismConfig
from echelon.base.warnings import EchelonWarning
from echelon.trainer import Trainer
from tests.harness import import_ahead, run_on_ranks
from tests.parallel_models import loss_without_float32, ragged_batches, tiny_llama
from tests.trainer_models import arguments, logged

_SHARD_TP, _REPLICATE_TP = ({name: 2, "tp_size": 2} for name in ("dp_shard_size", "dp_replicate_size"))

import_ahead("transformers.models.llama.modeling_llama", "torch.distributed.pipelining")


def _trained(folder: str, sizes: dict[str, int], steps: int, resume: bool) -> dict[str, Any]:
    pipeline = {"pipeline_schedule": "1F1B", "pipeline_num_micro_batches": 2} if "pp_size" in sizes else {}
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
        **pipeline,
    )
    rows = [{k: v[i] for k, v in batch.items()} for batch in ragged_batches(12) for i in range(4)]
    model = tiny_llama(num_layers=4)
    model.loss_function = loss_without_float32
    trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows[:6])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*contains RNG states for", category=EchelonWarning)
        trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/final")
    return {
        "losses": logged(trainer, "loss"),
        "norms": logged(trainer, "grad_norm"),
        "after": trainer.evaluate()["eval_loss"],
    }


@pytest.mark.parametrize(
    "meshes",
    [
        pytest.param([{"pp_size": 2}, {}, {"dp_shard_size": 2}], id="pp 2, one process, shard 2"),
        pytest.param([{"cp_size": 2}, {"dp_shard_size": 2}, {"cp_size": 2}], id="cp 2, shard 2, cp 2"),
        pytest.param([{"sp_size": 2}, {"tp_size": 2}, {"pp_size": 2}], id="sp 2, tp 2, pp 2"),
        pytest.param([{"tp_size": 2}, _SHARD_TP, {"tp_size": 4}], id="tp 2, shard 2 x tp 2, tp 4"),
        pytest.param([{"tp_size": 4}, _REPLICATE_TP, {"tp_size": 2}], id="tp 4, replicate 2 x tp 2, tp 2"),
        pytest.param([{"pp_size": 2, "tp_size": 2}, {"cp_size": 2}, {"pp_size": 2}], id="pp 2 x tp 2, cp 2, pp 2"),
        pytest.param(
            [{"pp_size": 2, "cp_size": 2}, {}, {"pp_size": 2, "sp_size": 2}], id="pp 2 x cp 2, one process, pp 2 x sp 2"
        ),
    ],
)
@pytest.mark.soak
def test_losses_are_those_of_one_process_and_other_meshes_resume(meshes: list[dict[str, int]], tmp_path: Path) -> None:
    (whole,) = run_on_ranks(_trained, str(tmp_path / "one"), {}, 6, False, world_size=1)
    folder = str(tmp_path / "meshes")
    for number, sizes in enumerate(meshes):
        steps = 2 * (number + 1)
        answers = run_on_ranks(
            _trained, folder, sizes, steps, number > 0, world_size=math.prod(sizes.values()), timeout=120
        )
        for name in ("losses", "norms"):
            assert answers[0][name] == pytest.approx(whole[name][:steps], rel=1e-9), (sizes, name)
    assert answers[0]["after"] == pytest.approx(whole["after"], rel=1e-9)
    from safetensors.torch import load_file

    one, found = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("one", "meshes"))
    assert one.keys() == found.keys()
    for name, value in one.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)
