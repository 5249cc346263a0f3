"""``TrainingArguments(deepspeed=)`` with "auto" values, with and without an optimizer and a scheduler in the config."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon import Trainer
from echelon.base.errors import ConfigError
from tests.harness import run_on_ranks
from tests.reference import PlainTraining, warmup_then_linear
from tests.trainer_models import EndsAfter, arguments, logged, train_rows_plainly

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.deepspeed

CONFIG: dict[str, Any] = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "offload_param": {"device": "cpu", "pin_memory": False},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}
OPTIMIZER = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": {
        **dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
        "warmup_type": "linear",
    },
}


SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "num_train_epochs": 2,
    "learning_rate": 0.05,
    "logging_steps": 1,
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.config = type("Config", (), {"hidden_size": 16})()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.layers(x)
        return {"loss": nn.functional.mse_loss(output, labels), "logits": output}


def _samples() -> list[dict[str, torch.Tensor]]:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    return [{"x": one, "labels": one.sum(0, keepdim=True)} for one in x]


def _train(folder: Path) -> tuple[float, float, list[float], float | None]:
    """Return the loss before and after, the learning rates, and how far a fresh model with the saved weights is off."""
    path = folder / "ds.json"
    options = {**SETTINGS, "gradient_accumulation_steps": 2, "warmup_steps": 2}
    args = arguments(folder / "out", bf16=True, deepspeed=str(path), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of DeepSpeed's, about torch
        trainer = Trainer(model=Model(), args=args, train_dataset=_samples(), eval_dataset=_samples())  # type: ignore[arg-type]
        trainer.train()
        rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
        losses = logged(trainer)
        loss = trainer.evaluate()["eval_loss"]
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    off = None
    if state is not None:
        fresh = Model()
        fresh.load_state_dict(state)
        with torch.no_grad():
            whole = torch.stack([fresh(s["x"][None], s["labels"][None])["loss"] for s in _samples()]).mean()
        off = abs(float(whole) / loss - 1)
    return losses[0], loss, rates, off


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{}, {"optimizer": OPTIMIZER}, {"optimizer": OPTIMIZER, "scheduler": SCHEDULE}],
    ids=["own optimizer", "its optimizer", "its optimizer and schedule"],
)
def test_a_trainer_trains_under_a_config_full_of_auto(more: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({**CONFIG, **more}))
    results = run_on_ranks(_train, tmp_path, world_size=2, timeout=120)
    before, after, seen, off = results[0]
    assert after < before / 2
    assert len(seen) == 8  # 64 samples / (4 x 2 x 2 processes), twice
    assert seen[-1] < 0.01
    assert max(seen) == pytest.approx(0.05, rel=0.2)
    assert off is not None
    assert off < 0.05  # bf16 on one side, float32 on the other


def _train_in_parts(folder: str, config: dict[str, Any], *, end: int | None, resume: bool) -> tuple[list[float], Any]:
    """Return the losses of all steps and the weights."""
    in_background = config["zero_optimization"]["stage"] != 2
    args = arguments(folder, deepspeed=config, seed=3, max_grad_norm=0.5, save_blocking=not in_background, **SETTINGS)
    model = Model()
    if resume:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(9.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of DeepSpeed's, about torch
        trainer = Trainer(model=model, args=args, train_dataset=_samples(), callbacks=[EndsAfter(end)])  # type: ignore[arg-type]
        trainer.train(resume_from_checkpoint=resume)
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return logged(trainer), state


def _plain_loop() -> PlainTraining:
    """Train on batches of both processes' samples, by a plain loop."""
    model = Model()
    return train_rows_plainly(
        model,
        _samples(),
        batch_size=8,
        epochs=2,
        seed=3,
        optimizer=torch.optim.AdamW(model.parameters(), weight_decay=0.0),
        rate=warmup_then_linear(0.05, warmup=0, total=16),
        clip=lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5),
    )


@pytest.mark.soak
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_resumed_training_run_matches_an_uninterrupted_one(stage: int, tmp_path: Path) -> None:
    config = {
        **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    whole = run_on_ranks(_train_in_parts, str(tmp_path / "whole"), config, end=None, resume=False, timeout=120)
    run_on_ranks(_train_in_parts, str(tmp_path / "parts"), config, end=11, resume=False, timeout=120)  # in epoch 1
    again = run_on_ranks(_train_in_parts, str(tmp_path / "parts"), config, end=None, resume=True, timeout=120)
    plain = _plain_loop()
    assert again[0][0] == whole[0][0]
    assert whole[0][0] == pytest.approx(plain.losses, rel=1e-4)  # float32, summed in another order over 16 steps
    for name, value in plain.model.state_dict().items():
        assert torch.equal(again[0][1][name], whole[0][1][name]), name
        torch.testing.assert_close(whole[0][1][name], value, rtol=1e-3, atol=1e-5)


def test_a_config_that_contradicts_the_arguments_is_an_error(tmp_path: Path) -> None:
    for config, parts in (
        ({"gradient_accumulation_steps": 8}, ("gradient_accumulation_steps=8", "2 (from code TrainingArguments.grad")),
        ({"train_micro_batch_size_per_gpu": 3}, ("train_micro_batch_size_per_gpu=3", "4 (from derived DataLoader")),
        ({"optimizer": {"params": {"lr": 1.0}}}, ("optimizer.params.lr=1.0", "TrainingArguments.learning_rate")),
    ):
        deepspeed = {"zero_optimization": {"stage": 2}, **config}
        args = arguments(tmp_path, gradient_accumulation_steps=2, deepspeed=deepspeed, **SETTINGS)
        with pytest.raises(ConfigError) as caught:
            Trainer(model=Model(), args=args)
        assert all(part in str(caught.value) for part in parts), str(caught.value)
