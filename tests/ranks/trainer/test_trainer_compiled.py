"""A compiled model on several ranks: evaluations and training give the plain model's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.trainer import Trainer
from tests.harness import run_on_ranks
from tests.trainer_models import Net, arguments, net_data


def _evaluate(folder: str, engine: str, how: str) -> list[float]:
    model: Any = torch.compile(Net(), backend="eager") if how == "script" else Net()
    options = {"torch_compile": True, "torch_compile_backend": "eager"} if how == "argument" else {}
    args = arguments(folder, per_device_eval_batch_size=2, engine=engine, optim="sgd", learning_rate=0.1, **options)
    trainer = Trainer(model, args, train_dataset=net_data(8), eval_dataset=net_data(8))
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return [before, trainer.evaluate()["eval_loss"], trainer.predict(net_data(5)).metrics["test_loss"]]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["argument", "script"])
@pytest.mark.parametrize("engine", ["ddp", "zero1"])
def test_a_compiled_model_is_evaluated_as_the_plain_one(tmp_path: Any, engine: str, how: str) -> None:
    plain, compiled = (run_on_ranks(_evaluate, str(tmp_path), engine, kind, world_size=2) for kind in ("plain", how))
    for mine, wanted in zip(compiled, plain):
        assert mine == pytest.approx(wanted, rel=1e-12)  # float64; the same operations
