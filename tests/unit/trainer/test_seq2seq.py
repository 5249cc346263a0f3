"""Evaluations that generate text."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from echelon.base.errors import ConfigError, UsageError
from echelon.trainer import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)
from tests.trainer_models import DATA, Line


class Counts(nn.Module):
    """Generates the numbers after the first token, as many as that token says, at most ``max_length``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.generation_config = SimpleNamespace(max_length=6, max_new_tokens=None, pad_token_id=9)
        self.asked: list[dict[str, Any]] = []

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": self.weight * 3.0, "logits": F.one_hot(input_ids, 10).float()}

    def generate(self, input_ids: torch.Tensor, max_length: int = 6, **more: Any) -> torch.Tensor:
        self.asked.append({"max_length": max_length, **more})
        longest = min(int(input_ids[:, 0].max()), max_length)
        return torch.arange(longest).expand(len(input_ids), -1).clone()


PAIRS = [{"input_ids": torch.tensor([n, 0]), "labels": torch.tensor([n])} for n in (2, 3, 1)]


def test_an_evaluation_generates_where_asked_for(tmp_path: Path) -> None:
    seen = {}

    def metrics(result: Any) -> dict[str, float]:
        seen["predictions"], seen["labels"] = result.predictions.tolist(), result.label_ids.tolist()
        return {"length": float(result.predictions.shape[1])}

    options: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "per_device_eval_batch_size": 2}
    args = Seq2SeqTrainingArguments(**options, predict_with_generate=True, generation_num_beams=2, disable_tqdm=True)
    model = Counts()
    trainer = Seq2SeqTrainer(model, args, eval_dataset=PAIRS, compute_metrics=metrics)
    found = trainer.evaluate(max_length=4)
    assert (found["eval_loss"], found["eval_length"]) == (3.0, 4.0)
    assert model.asked == [{"max_length": 4, "num_beams": 2}] * 2
    # Padded to what was asked for, so that the batches fit together without -100.
    assert seen["predictions"] == [[0, 1, 2, 9], [0, 1, 2, 9], [0, 9, 9, 9]]
    assert seen["labels"] == [[2, 9, 9, 9], [3, 9, 9, 9], [1, 9, 9, 9]]
    args.generation_max_length = 5
    assert trainer.predict(PAIRS).predictions.shape == (3, 5)
    trainer.evaluate()
    assert model.asked[-1] == {"max_length": 5, "num_beams": 2}
    unlabelled = [{"input_ids": row["input_ids"]} for row in PAIRS]
    assert trainer.predict(unlabelled, max_new_tokens=2).predictions.shape[1] == 3
    plain = Seq2SeqTrainer(model, Seq2SeqTrainingArguments(**options, disable_tqdm=True))
    assert plain.predict(PAIRS).predictions.shape == (3, 2, 10)  # logits


def test_settings_of_none_that_a_subclass_passes_to_the_generation_are_dropped(tmp_path: Path) -> None:
    class Answers(Seq2SeqTrainer):
        def evaluate(self, *args: Any, **gen_kwargs: Any) -> Any:  # as in question answering
            self._gen_kwargs = {"max_length": None, "num_beams": None, **gen_kwargs}
            loader = self.get_eval_dataloader()
            return self.evaluation_loop(loader, description="Evaluation", metric_key_prefix="eval").metrics

    args = Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True, predict_with_generate=True)
    model = Counts()
    Answers(model, args, eval_dataset=PAIRS).evaluate(do_sample=False)
    assert model.asked == [{"max_length": 6, "do_sample": False}]  # 6 is the model's own


def test_a_generation_config_is_put_into_the_model(tmp_path: Path) -> None:
    config = SimpleNamespace(max_length=3, max_new_tokens=None, pad_token_id=0, to_dict=lambda: {"max_length": 3})
    args = Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True, generation_config=config)
    model = Counts()
    Seq2SeqTrainer(model, args)
    assert (model.generation_config.max_length, model.generation_config is config) == (3, False)
    assert args.to_dict()["generation_config"] == {"max_length": 3}
    args = Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True, predict_with_generate=True)
    with pytest.raises(UsageError, match=r"Line has no generate\(\)"):
        Seq2SeqTrainer(Line(), args).predict(DATA)
    with pytest.raises(ConfigError, match="sortish_sampler is not supported"):
        Seq2SeqTrainingArguments(output_dir=str(tmp_path), sortish_sampler=True)
