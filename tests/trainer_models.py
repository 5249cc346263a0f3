"""What the tests of the Trainer train: a line, its data, and quiet arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from echelon.trainer import TrainingArguments

__all__ = ["DATA", "Line", "Net", "arguments", "net_data"]


class Line(nn.Module):
    """y = w x + b, from zero; it computes its own loss, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        y = self.layer(x).squeeze(-1)
        return {"logits": y} if labels is None else {"loss": F.mse_loss(y, labels), "logits": y}


DATA = [{"x": torch.tensor([float(i)]), "labels": torch.tensor(2.0 * i)} for i in range(10)]


class Net(nn.Module):
    """Two layers in float64, always the same weights, so that ranks can be compared with a plain loop to 1e-12."""

    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def net_data(n: int) -> list[dict[str, torch.Tensor]]:
    """Return ``n`` samples for ``Net``."""
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(6, generator=generator, dtype=torch.float64), "labels": torch.tensor(i % 3)} for i in range(n)
    ]


def arguments(folder: Path | str, **options: Any) -> TrainingArguments:
    """Return arguments that neither log, save nor show anything, with ``options``."""
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(**{**defaults, **options})
