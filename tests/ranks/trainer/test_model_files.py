"""``Trainer.save_model`` of a sharded model: the files of transformers and peft, without the whole model on any rank."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from echelon.trainer import Trainer
from tests.harness import import_ahead, run_on_ranks
from tests.parallel_models import VOCABULARY, tiny_llama
from tests.trainer_models import arguments

import_ahead("transformers.models.llama.modeling_llama", "peft")


def _model(kind: str) -> Any:
    model = tiny_llama(num_layers=2, tied=True, dtype=torch.float32)
    if kind == "lora":
        import peft

        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses an older name of transformers
            model = peft.get_peft_model(model, config)
    return model


def _saved(folder: str, kind: str) -> list[str]:
    """Save an untrained model, and return the tensors that are gathered on this rank."""
    rows: Any = [{"input_ids": row, "labels": row} for row in torch.randint(0, VOCABULARY, (4, 8)).tolist()]
    args = arguments(folder, fsdp="full_shard", max_steps=1, save_strategy="no", learning_rate=0.0)
    trainer = Trainer(_model(kind), args, train_dataset=rows)
    trainer.train()
    engine, gathered = trainer.accelerator.session.engine, []

    def whole(*_: Any) -> Any:
        raise AssertionError("the whole model is gathered")

    def counted(value: torch.Tensor, rank: int) -> Any:
        full = type(engine)._gather_for(engine, value, rank)
        gathered.extend([] if full is None else [list(full.shape)])
        return full

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "full_state_dict", whole)
        patch.setattr(engine, "_gather_for", counted)
        patch.setattr("echelon.trainer.checkpoint.model_files._MAX_SHARD_BYTES", 20_000)
        trainer.save_model(f"{folder}/out")
    return gathered


def test_a_model_of_transformers_is_read_by_from_pretrained(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    answers = run_on_ranks(_saved, str(tmp_path), "whole")
    assert all(len(one) > 2 for one in answers)  # both ranks write
    read = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    wanted = _model("whole").state_dict()
    assert read.dtype == torch.float32
    assert read.state_dict().keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in read.state_dict().items())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert {path.name for path in (tmp_path / "out").glob("*.safetensors")} == set(index["weight_map"].values())
    assert (tmp_path / "out" / "training_args.json").is_file()


def test_adapters_are_written_as_peft_does_and_nothing_else_is_gathered(tmp_path: Path) -> None:
    answers = run_on_ranks(_saved, str(tmp_path), "lora")
    plain: nn.Module = _model("lora")
    plain.save_pretrained(tmp_path / "plain")
    found, wanted = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "plain"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    # The adapters and the embeddings, which peft may write, too.
    assert len(answers[0]) == len(wanted) + 1
    assert answers[1] == []
