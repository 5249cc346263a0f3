"""``plan=True``: a Trainer prints the plan of its step, trains as without it, and refuses a step that does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.base import environ
from echelon.base.errors import ConfigError, DesyncError, UsageError
from echelon.trainer import Trainer
from tests.harness import run_on_ranks
from tests.trainer_models import Net, arguments, net_data


def _trained(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    args = arguments(folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, **options)
    trainer = Trainer(Net(dropout=0.5), args, train_dataset=net_data(16))
    trainer.train()
    return trainer.model.state_dict()


def test_the_plan_of_a_step_is_printed_and_the_training_is_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = _trained(tmp_path)
    capsys.readouterr()
    planned = _trained(tmp_path, plan=True)
    assert all(torch.equal(value, plain[name]) for name, value in planned.items())
    out = capsys.readouterr().out
    assert out.startswith(
        "Net: 83 parameters, 83 trained, AdamW, mixed precision no\nsingle, micro-batch 4, 2 accumulation"
    )
    assert "FIT" not in out  # the memory is unknown
    monkeypatch.setenv("ECHELON_GPU_MEMORY", "80GB")
    _trained(tmp_path, plan=True)
    assert "\nFITS: single, micro-batch 4, 2 accumulation steps needs " in capsys.readouterr().out


def _refused(folder: str) -> tuple[str, str]:
    with environ.patch({"ECHELON_GPU_MEMORY": "1GB"}), pytest.raises((ConfigError, DesyncError)) as caught:
        _trained(Path(folder), plan=True)
    return type(caught.value).__name__, str(caught.value)


def test_a_step_that_does_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    (kind, text), (other, other_text) = run_on_ranks(_refused, str(tmp_path))
    assert (kind, other) == ("DesyncError", "DesyncError")
    for one in (text, other_text):
        assert (
            "rank 0: ConfigError: DOES NOT FIT: ddp dp_replicate=2, micro-batch 4, 2 accumulation steps needs " in one
        )
        assert "TrainingArguments.plan" in one


class _Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(net_data(8))


def test_data_without_indices_are_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, plan=True, max_steps=1)
    with pytest.raises(UsageError, match="plan=True reads the first samples by their indices"):
        Trainer(Net(), args, train_dataset=_Stream()).train()
