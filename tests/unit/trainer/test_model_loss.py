"""The Trainer with models that return their loss in containers of every kind: the numbers of the model that returns a dict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from echelon.testing.model_outputs import OUTPUT_KINDS
from echelon.trainer import Trainer
from tests.reference import train_plainly
from tests.trainer_models import CONSTANT_SGD, Net, arguments, net_data, stacked


class _Named(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Record:
    loss: torch.Tensor
    logits: torch.Tensor
    note: None = None


_OF_TWO: dict[str, Callable[..., Any]] = {
    **{
        kind: make
        for kind, make in OUTPUT_KINDS.items()
        if "dataclass" not in kind and kind not in ("nested", "namedtuple")
    },
    "namedtuple": _Named,
    "dataclass": _Record,
}


class _Returning(Net):
    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.make = make
        self.float()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        logits = self.layers(x.float())
        return self.make(loss=F.cross_entropy(logits, labels), logits=logits)


def _plain(precision: str) -> tuple[dict[str, torch.Tensor], float, np.ndarray[Any, Any]]:
    """Train and evaluate by a plain loop."""
    model, (x, labels) = _Returning(dict), stacked(net_data(8))

    def outputs_of(batch: list[int]) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            outputs: dict[str, torch.Tensor] = model(x[batch], labels[batch])
        return outputs

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_plainly(model, lambda batch: outputs_of(batch)["loss"], num_samples=8, batch_size=2, optimizer=optimizer)
    logits = outputs_of([*range(8)])["logits"].float().detach()
    return dict(model.state_dict()), float(F.cross_entropy(logits, labels)), logits.numpy()


@pytest.mark.sample(5)
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("kind", _OF_TWO)
def test_models_train_and_evaluate_whatever_they_return(kind: str, precision: str, tmp_path: Path) -> None:
    seen: list[Any] = []

    def compute_metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions)
        return {}

    model: nn.Module = _Returning(_OF_TWO[kind])
    args = arguments(tmp_path, **CONSTANT_SGD, bf16=precision == "bf16", train_sampling_strategy="sequential")
    data = net_data(8)
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data, compute_metrics=compute_metrics)
    trainer.train()
    metrics = trainer.evaluate()
    weights, loss, logits = _plain(precision)
    # The same operations on the same CPU; an evaluation in batches of eight.
    for name, value in weights.items():
        assert torch.allclose(model.state_dict()[name], value, rtol=1e-6, atol=1e-7), (kind, name)
    assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-5 if precision == "no" else 1e-2)
    assert isinstance(seen[0], np.ndarray), type(seen[0])
    np.testing.assert_allclose(seen[0], logits, rtol=1e-5, atol=1e-6 if precision == "no" else 1e-2)
