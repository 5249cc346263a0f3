"""Tokens per second and MFU in the log: by the model's own count, and only where all numbers are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from echelon.base.peak_flops import peak_flops
from echelon.trainer import Trainer
from echelon.trainer.features import throughput
from tests.trainer_models import arguments

WIDTH, LENGTH, ROWS = 4, 6, 16


class Decoder(nn.Module):
    """A model of tokens that counts its parameters as transformers' do."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 10)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        return sum(p.numel() for p in self.head.parameters())

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), input_ids.flatten()), "logits": logits}


FLOPS = 6 * ROWS * LENGTH * (WIDTH * 10 + 10)


class _Clock:
    """Passes two seconds between two logs."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        self.now += 2.0
        return self.now


def _train(folder: Path, model: nn.Module, **options: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(10, (LENGTH,), generator=generator), "labels": 0} for _ in range(ROWS)]
    size = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **options}
    args = arguments(str(folder), log_throughput=True, logging_strategy="epoch", num_train_epochs=1, **size)
    trainer = Trainer(model, args, train_dataset=rows)
    trainer.train()
    assert trainer.state.total_flos == pytest.approx(FLOPS if isinstance(model, Decoder) else 0)
    return trainer.state.log_history[0]


@pytest.mark.parametrize("parity", ["off", "exact"])
def test_all_batches_of_a_window_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parity: str) -> None:
    """In the exact mode, the four samples of an update are two micro-batches, too."""
    monkeypatch.setattr(throughput, "time", _Clock())
    monkeypatch.setattr(throughput, "peak_flops", lambda _name: 1000.0)
    monkeypatch.setattr(torch.get_device_module("cpu"), "get_device_name", lambda _device: "any", raising=False)
    log = _train(tmp_path, Decoder(), parity=parity, bf16=True)
    assert log["tokens_per_second"] == ROWS * LENGTH / 2
    assert log["mfu"] == round(FLOPS / 2 / 1000.0, 4)
    assert log["samples_per_second"] == ROWS / 2


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    log = _train(tmp_path, Decoder())  # the peak of a CPU
    assert "mfu" not in log
    assert log["tokens_per_second"] > 0


def test_frozen_weights_and_float32_have_no_utilization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "peak_flops", lambda _name: 1000.0)
    monkeypatch.setattr(torch.get_device_module("cpu"), "get_device_name", lambda _device: "any", raising=False)
    frozen = Decoder()
    frozen.embed.weight.requires_grad_(False)
    assert "mfu" not in _train(tmp_path / "frozen", frozen, bf16=True)
    assert "mfu" not in _train(tmp_path / "float32", Decoder())


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", None),  # another device
        ("NVIDIA L40", 181e12),  # as the report says
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA T4", None),
    ],
)
def test_devices_are_known_by_their_whole_names(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak
