"""The Trainer's checkpoints of PEFT models on two ranks, sharded or not: resumed, they match a plain loop that never stops."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon.base.sharded import is_dtensor
from echelon.trainer import Trainer
from tests.harness import run_on_ranks
from tests.trainer_models import CONSTANT_SGD, EndsAfter, Net, arguments, net_data, stacked

N, SIZE, END = 32, 2, 4  # 8 updates of two batches


def _model(seed: int = 0) -> Any:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["layers.0"], init_lora_weights=False)
    model = Net()
    torch.manual_seed(seed)
    model = peft.get_peft_model(model, config)
    model.add_adapter("mine", config)
    model.set_adapter("mine")
    model.base_model.model.layers[2].requires_grad_(True)
    if seed:
        nn.init.zeros_(model.base_model.model.layers[2].weight)
    return model


def _train(folder: str, *, end: int | None = None, seed: int = 0, best: bool = False, **options: Any) -> Any:
    if best:
        steps = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
        options |= {"load_best_model_at_end": True, "save_only_model": True, **steps}
    settings = {"per_device_train_batch_size": SIZE, "train_sampling_strategy": "sequential"}
    args = arguments(folder, **CONSTANT_SGD, **settings, **options)
    model, rows = _model(seed), net_data(N)
    data = {"train_dataset": rows, "eval_dataset": rows if best else None}
    trainer = Trainer(model, args, **data, callbacks=[EndsAfter(end)])
    trainer.evaluate = lambda *_, **__: {"eval_loss": abs(trainer.state.global_step - END)}  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*belong to no adapter")
        trainer.train(resume_from_checkpoint=bool(seed))
    state = trainer.model.state_dict()
    return {name: value.full_tensor() if is_dtensor(value) else value for name, value in state.items()}


def _train_plainly(num_steps: int) -> dict[str, torch.Tensor]:
    model, rows = _model(), net_data(N)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=CONSTANT_SGD["learning_rate"])
    for start in range(0, num_steps * 2 * SIZE, 2 * SIZE):
        model(*stacked(rows[start : start + 2 * SIZE]))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _require_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """float64: only the order of additions differs."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", ["", "full_shard", "zero1"])
@pytest.mark.parametrize("layout", ["echelon", "transformers"])
def test_two_ranks_resume_what_is_trained_inside_and_outside_of_adapters(
    tmp_path: Path, layout: str, fsdp: str
) -> None:
    options = {"checkpoint_format": layout, **({"engine": fsdp} if fsdp == "zero1" else {"fsdp": fsdp})}
    run_on_ranks(_train, str(tmp_path), end=END, **options)
    for found in run_on_ranks(_train, str(tmp_path), seed=1, **options):
        _require_close(found, _train_plainly(8))


@pytest.mark.parametrize("fsdp", ["", "full_shard"])
def test_two_ranks_load_the_best_model_whole(tmp_path: Path, fsdp: str) -> None:
    for found in run_on_ranks(_train, str(tmp_path), best=True, fsdp=fsdp):
        _require_close(found, _train_plainly(END))
