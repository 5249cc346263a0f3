"""Models, data and arguments for tests of the Trainer, and a plain loop over the same rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from echelon.base.warnings import EchelonWarning
from echelon.trainer import Trainer, TrainerCallback, TrainingArguments
from tests.prepared_loop import all_warnings
from tests.reference import PlainTraining, train_plainly

Rows = list[dict[str, torch.Tensor]]

CONSTANT_SGD: dict[str, Any] = {
    "learning_rate": 0.1,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
}


class Line(nn.Module):
    """y = w x + b, initialized to zero; computes its loss like the models of transformers."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        nn.init.constant_(self.layer.weight, start)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        y = self.layer(x).squeeze(-1)
        return {"logits": y} if labels is None else {"loss": F.mse_loss(y, labels), "logits": y}


DATA = [{"x": torch.tensor([float(i)]), "labels": torch.tensor(2.0 * i)} for i in range(10)]


class Net(nn.Module):
    """Two layers in float64 with fixed initial weights, so that ranks can be compared with a plain loop to 1e-12."""

    main_input_name = "x"

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(4)
        layers = [nn.Linear(6, 8), nn.Tanh(), *([nn.Dropout(dropout)] if dropout else []), nn.Linear(8, 3)]
        self.layers = nn.Sequential(*layers).double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class DividingNet(Net):
    """Model that divides the sum of its losses by ``num_items_in_batch``, like the language models of transformers."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> dict[str, torch.Tensor]:
        outputs = super().forward(x, labels)
        items = kwargs.get("num_items_in_batch")
        if labels is not None and items is not None:
            outputs["loss"] = divided(outputs, labels, items)
        return outputs


class IgnoringNet(Net):
    """Model that accepts any keyword argument and returns the mean."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> dict[str, torch.Tensor]:
        return super().forward(x, labels)


class RecordingModel(nn.Module):
    """Model that records the samples of its forward passes; its loss is their mean times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += x.flatten().tolist()
        return {"loss": (self.weight * x).mean(), "logits": x}


class RecordingTrainer(Trainer):
    """Trainer that records the column ``x`` of the batches of its training steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: list[torch.Tensor] = []
        super().__init__(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.seen.append(inputs["x"])
        return super().training_step(model, inputs, num_items_in_batch)

    def samples(self) -> list[float]:
        """Return the first value of each sample."""
        return [value for x in self.seen for value in x[:, 0].tolist()]


def divided(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return the sum over the labels divided by their number; without a number, raise an error."""
    return F.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


def net_data(n: int, *, unlabelled: Any = ()) -> Rows:
    """Return ``n`` samples for ``Net``; samples in ``unlabelled`` have the label -100."""
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(6, generator=generator, dtype=torch.float64),
            "labels": torch.tensor(-100 if i in unlabelled else i % 3),
        }
        for i in range(n)
    ]


def stacked(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and the labels of ``rows`` as one batch."""
    return torch.stack([row["x"] for row in rows]), torch.stack([row["labels"] for row in rows])


def train_rows_plainly(
    model: nn.Module, rows: Rows, *, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> PlainTraining:
    """Train ``model``, which computes its loss, on ``rows`` in a plain loop, by default like ``CONSTANT_SGD``."""
    return train_plainly(
        model,
        lambda batch: model(*stacked([rows[i] for i in batch]))["loss"],
        num_samples=len(rows),
        optimizer=optimizer or torch.optim.SGD(model.parameters(), lr=0.1),
        **options,
    )


def arguments(folder: Path | str, **options: Any) -> TrainingArguments:
    """Return arguments without logging, saving and progress bars, updated by ``options``."""
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    if "logging_steps" in options:
        defaults["logging_strategy"] = "steps"
    return TrainingArguments(**{**defaults, **options})


def warnings_of(run: Callable[[], Any]) -> list[str]:
    """Call ``run``, and return the texts of echelon's warnings."""
    with all_warnings() as caught:
        run()
    return [str(one.message) for one in caught if issubclass(one.category, EchelonWarning)]


def logged(trainer: Trainer, name: str = "loss") -> list[float]:
    """Return the values of ``name`` in the logs of the training steps."""
    return [entry[name] for entry in trainer.state.log_history if "loss" in entry]


class EndsAfter(TrainerCallback):
    """Callback that saves and stops training after a step; None: never."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True
