"""Behaviours of transformers' Trainer that its own tests hold, and echelon's lacked (tests/ecosystem/suites.py runs those)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon import Accelerator
from echelon.base.errors import ConfigError
from echelon.base.warnings import EchelonWarning
from echelon.trainer import Trainer, TrainerCallback, TrainerState, TrainingArguments
from echelon.trainer.optim.adafactor import Adafactor
from tests.trainer_models import DATA, Line, RecordingTrainer, arguments


def test_a_changed_seed_changes_the_order_of_the_next_training(tmp_path: Path) -> None:
    orders = []
    trainer = RecordingTrainer(None, arguments(tmp_path), train_dataset=DATA, model_init=Line)
    for seed in (42, 314, 42):
        trainer.args.seed = seed
        trainer.train()
        orders.append(trainer.samples())
        trainer.seen.clear()
    other = RecordingTrainer(Line(), arguments(tmp_path, seed=314), train_dataset=DATA)
    other.train()
    assert orders[0] == orders[2]
    assert orders[1] == other.samples() != orders[0]


def test_accumulation_steps_of_the_accelerator_config_are_those_of_the_arguments(tmp_path: Path) -> None:
    config = {"gradient_accumulation_kwargs": {"num_steps": 5, "sync_each_batch": True}, "use_configured_state": True}
    trainer = Trainer(Line(), arguments(tmp_path, accelerator_config=config), train_dataset=DATA)
    assert trainer.args.gradient_accumulation_steps == 5
    assert trainer.train().global_step == 1
    with pytest.raises(ConfigError, match="is the class Config, not an instance"):
        Trainer(Line(), arguments(tmp_path, accelerator_config=type("Config", (), {})), train_dataset=DATA)


def test_plugin_kwargs_holds_what_was_set() -> None:
    assert Accelerator(cpu=True, gradient_accumulation_steps=3).gradient_state.plugin_kwargs == {"num_steps": 3}


def test_dtypes_are_saved_by_their_names() -> None:
    @dataclass
    class Mine(TrainingArguments):
        dtype: Any = torch.bfloat16
        model_kwargs: dict[str, Any] = field(default_factory=lambda: {"dtype": torch.float16, "layers": 2})

    values = Mine(use_cpu=True).to_dict()
    assert (values["dtype"], values["model_kwargs"]) == ("bfloat16", {"dtype": "float16", "layers": 2})


def test_the_control_is_restored_with_the_callbacks(tmp_path: Path) -> None:
    Trainer(Line(), arguments(tmp_path, max_steps=2, save_steps=2, save_strategy="steps"), train_dataset=DATA).train()
    state = TrainerState.load_from_json(tmp_path / "checkpoint-2" / "trainer_state.json")
    for restores in (False, True):
        args = arguments(tmp_path, restore_callback_states_from_checkpoint=restores)
        trainer = Trainer(Line(), args, train_dataset=DATA)
        trainer.state = state
        trainer._load_callback_state()
        assert trainer.control.should_training_stop is restores


def test_a_resumed_run_starts_with_the_batch_size_that_fitted(tmp_path: Path) -> None:
    class OutOfMemory(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            sizes.append(state.train_batch_size)
            if state.train_batch_size > limit:
                raise RuntimeError("CUDA out of memory.")

    sizes: list[int] = []
    limit = 2
    options: dict[str, Any] = {"auto_find_batch_size": True, "per_device_train_batch_size": 4, "save_strategy": "steps"}
    options |= {"save_steps": 1, "max_steps": 4}
    trainer = Trainer(Line(), arguments(tmp_path, **options), train_dataset=DATA * 2, callbacks=[OutOfMemory()])
    with pytest.warns(EchelonWarning, match="out of memory with a batch size of 4; the next attempt uses 2"):
        trainer.train()
    assert sizes == [4, 2, 2, 2, 2]
    sizes.clear()
    again = Trainer(Line(), arguments(tmp_path, **options), train_dataset=DATA * 2, callbacks=[OutOfMemory()])
    assert again._train_batch_size == 4
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert sizes == [2, 2]
    assert again._train_batch_size == 2


def test_adafactor_follows_its_formula() -> None:
    """The formula of arXiv 1804.04235 with a rate of its own, as transformers uses it; torch's class scales the rate."""
    generator = torch.Generator().manual_seed(3)
    matrix, vector = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((2, 3), (4,)))
    weights = [torch.nn.Parameter(matrix.clone()), torch.nn.Parameter(vector.clone())]
    optimizer = Adafactor(weights, lr=0.1, scale_parameter=False, relative_step=False, weight_decay=0.2)
    rows, columns, squares = torch.zeros(2), torch.zeros(3), torch.zeros(4)
    for step in range(1, 4):
        gradients = [torch.randn(one.shape, generator=generator, dtype=torch.float64) for one in (matrix, vector)]
        for weight, gradient in zip(weights, gradients):
            weight.grad = gradient
        optimizer.step()
        share = step**-0.8
        rows = (1 - share) * rows + share * (gradients[0] ** 2).mean(1)
        columns = (1 - share) * columns + share * (gradients[0] ** 2).mean(0)
        squares = (1 - share) * squares + share * gradients[1] ** 2
        updates = [gradients[0] / torch.outer(rows, columns).div(rows.mean()).sqrt(), gradients[1] / squares.sqrt()]
        updates = [update / max(1.0, update.square().mean().sqrt().item()) for update in updates]
        matrix, vector = ((1 - 0.2 * 0.1) * old - 0.1 * update for old, update in zip((matrix, vector), updates))
        for weight, expected in zip(weights, (matrix, vector)):
            torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=0)
    with pytest.raises(ConfigError, match="needs either lr or relative_step=True"):
        Adafactor(weights, lr=0.1)
