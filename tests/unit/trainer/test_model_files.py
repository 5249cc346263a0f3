"""Files of a model that was loaded in bf16 and trains in float32: those of save_model, and those of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from echelon import Trainer, TrainingArguments
from tests.parallel_models import VOCABULARY, tiny_llama


@pytest.fixture(autouse=True)
def _set_variable_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' ``save_pretrained`` imports accelerate and, where it is installed, deepspeed, which sets this variable."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


class _OwnSave(Trainer):
    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)


class _RoundedSave(Trainer):
    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        Path(output_dir).mkdir(exist_ok=True)
        state = {name: value.bfloat16().contiguous() for name, value in self.model.state_dict().items()}
        save_file(state, Path(output_dir) / "model.safetensors")


def _trainer(folder: Path, kind: type[Trainer] = Trainer, **options: Any) -> Trainer:
    torch.manual_seed(0)
    rows = torch.randint(0, VOCABULARY, (12, 8)).tolist()
    args = TrainingArguments(
        str(folder),
        bf16=True,
        master_weights="float32",
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    return kind(tiny_llama(dtype=torch.bfloat16), args, train_dataset=data)


def _state(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.sample(3)
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("kind", [Trainer, _OwnSave])
@pytest.mark.parametrize("form", ["echelon", "transformers"])
def test_a_run_resumes_exactly_and_its_model_is_saved_as_it_was_loaded(
    form: str, kind: type[Trainer], blocking: bool, tmp_path: Path
) -> None:
    trainer = _trainer(tmp_path / "a", kind, checkpoint_format=form, save_blocking=blocking)
    trainer.train()
    uninterrupted = _state(trainer)
    assert {value.dtype for value in uninterrupted.values()} == {torch.float32}
    assert any(not torch.equal(value, value.bfloat16().float()) for value in uninterrupted.values())

    resumed = _trainer(tmp_path / "a", kind, checkpoint_format=form)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert all(torch.equal(value, uninterrupted[name]) for name, value in _state(resumed).items())

    resumed.save_model(str(tmp_path / "out"))
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(value, uninterrupted[name].bfloat16()) for name, value in saved.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    model = LlamaForCausalLM.from_pretrained(str(tmp_path / "out"))
    assert model.dtype == torch.bfloat16


def test_a_checkpoint_whose_files_are_rounded_holds_the_weights_itself(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, _RoundedSave)
    trainer.train()
    resumed = _trainer(tmp_path, _RoundedSave)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(value, _state(trainer)[name]) for name, value in _state(resumed).items())


def test_a_checkpoint_with_nothing_but_the_model_has_the_loaded_dtype(tmp_path: Path) -> None:
    _trainer(tmp_path, save_only_model=True).train()
    saved = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}


def test_files_that_are_saved_without_a_state_dict_have_the_loaded_dtype(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, save_strategy="no")
    trainer.train()
    trainer._save(str(tmp_path / "out"))
    assert {v.dtype for v in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
