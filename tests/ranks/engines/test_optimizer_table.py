"""The table of optimizers in docs/engines.md: what each engine does with each of them, and that it trains like one process."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon import Accelerator, ParallelismConfig
from echelon.base.errors import EchelonError, UsageError
from echelon.engines.gathered_optimizer import GatheredOptimizer
from echelon.utils import TorchTensorParallelConfig
from tests.harness import errors_on_ranks, run_on_ranks

_COLUMNS: dict[str, dict[str, Any]] = {
    "`zero1`": {"engine": "zero1"},
    "`fsdp2`": {"engine": "fsdp2"},
    "`fsdp2` with `tp_size`": {"tp_size": 2},
}
_FLOAT32 = ("torchao", "bitsandbytes", "torch.optim.Muon")
"""Float32: rounding of gradients may change a code of an 8-bit state by one, or a value in bfloat16 by one place."""


def _made(name: str) -> Callable[[list[nn.Parameter]], Any] | None:
    """Return what creates the optimizer; None if its package is not installed, or torch is older."""
    package, _, kind = name.rpartition(".")
    if package == "echelon.Trainer":
        package = "echelon.trainer.optim.adafactor"
    try:
        found = getattr(importlib.import_module(package), kind, None)
    except ImportError:
        return None
    options: dict[str, Any] = {"lr": 0.01}
    if kind in ("SGD", "SGD8bit", "SGDScheduleFree"):
        options["momentum"] = 0.9
    if package == "echelon.trainer.optim.adafactor":
        options["relative_step"] = False
    if kind == "Prodigy":
        options = {}
    if found is None:
        return None

    def make(parameters: list[nn.Parameter]) -> Any:
        return found([p for p in parameters if p.dim() == 2] if kind == "Muon" else parameters, **options)

    return make


@cache
def _table() -> dict[str, dict[str, str]]:
    """Return, by optimizer, the cell of each column."""
    page = (Path(__file__).parents[3] / "docs" / "engines.md").read_text()
    lines = page.split("<!-- optimizers -->")[1].strip().splitlines()
    header = [cell.strip() for cell in lines[0].strip("|").split("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {name.strip(" `"): dict(zip(header[1:], row[1:])) for row in rows for name in row[0].split(",")}


def _net(dtype: torch.dtype) -> nn.Sequential:
    """Return layers of which one has 8192 elements, because 8-bit optimizers keep smaller states in float32."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 6)).to(dtype)


def _inputs(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(1), dtype=dtype)


def _train(model: Any, optimizer: Any, x: torch.Tensor, *, backward: Callable[[torch.Tensor], None]) -> None:
    if hasattr(optimizer, "train"):
        optimizer.train()

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(x) - 1).square().mean()
        backward(loss)
        return loss.detach()

    for _ in range(4):
        if isinstance(optimizer, torch.optim.LBFGS) or isinstance(
            getattr(optimizer, "optimizer", None), torch.optim.LBFGS
        ):
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
    if hasattr(optimizer, "eval"):
        optimizer.eval()


def _dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name.startswith(_FLOAT32) else torch.float64


def _by_plain_torch(name: str) -> dict[str, torch.Tensor]:
    make = _made(name)
    assert make is not None
    model = _net(_dtype_of(name))
    with torch.compiler.set_stance("force_eager"):
        _train(model, make(list(model.parameters())), _inputs(_dtype_of(name)), backward=lambda loss: loss.backward())
    return model.state_dict()


def _on_ranks(column: str, names: list[str]) -> dict[str, tuple[str, dict[str, torch.Tensor]]]:
    """Return, by optimizer, what became of it, and the trained weights."""
    found: dict[str, tuple[str, dict[str, torch.Tensor]]] = {}
    for name in names:
        make = _made(name)
        assert make is not None
        settings = dict(_COLUMNS[column])
        samples = _inputs(_dtype_of(name))
        if "tp_size" in settings:
            handler = TorchTensorParallelConfig(plan={"0": "colwise", "2": "rowwise"})
            settings = {"parallelism_config": ParallelismConfig(**settings, tp_handler=handler)}
        else:
            samples = samples.chunk(dist.get_world_size())[dist.get_rank()]
        accelerator = Accelerator(cpu=True, **settings)
        bare = _net(_dtype_of(name))
        try:
            model, optimizer = accelerator.prepare(bare, make(list(bare.parameters())))
            with torch.compiler.set_stance("force_eager"):
                _train(model, optimizer, samples, backward=accelerator.backward)
        except UsageError as error:
            found[name] = ("refused" if "ddp" in str(error) else str(error), {})
            accelerator.free_memory()
            continue
        how = "by parameter" if column == "`zero1`" else "shards"
        if isinstance(optimizer.optimizer, GatheredOptimizer):
            how = "gathered"
        found[name] = (how, copy.deepcopy(accelerator.get_state_dict(model) or {}))
        accelerator.free_memory()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("column", _COLUMNS)
def test_each_cell_is_what_the_engine_does_and_the_weights_are_those_of_one_process(column: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages, when they are imported
        names = [name for name in _table() if _made(name) is not None]
    found = run_on_ranks(_on_ranks, column, names, world_size=2)[0]
    assert {name: how for name, (how, _) in found.items()} == {name: _table()[name][column] for name in names}
    for name, (how, weights) in found.items():
        if how == "refused":
            continue
        # In float64, ranks add gradients in another order. Each of four steps changes a weight by about 0.01; 8-bit states have some
        # percents of that, and Newton-Schulz in bfloat16 about a tenth.
        # Prodigy estimates its step size in float32.
        allowed = (
            1e-8
            if name.endswith("Prodigy")
            else 1e-11
            if _dtype_of(name) is torch.float64
            else 4e-3
            if name.endswith("Muon")
            else 1e-3
        )
        for key, value in _by_plain_torch(name).items():
            assert float((weights[key] - value).abs().max()) <= allowed, (name, key)


def _saved(engine: str, folder: str) -> None:
    from torchao.optim import AdamW8bit

    accelerator = Accelerator(cpu=True, engine=engine)
    bare = _net(torch.float32)
    model, optimizer = accelerator.prepare(bare, AdamW8bit(bare.parameters(), lr=0.01))
    with torch.compiler.set_stance("force_eager"):
        _train(model, optimizer, _inputs(torch.float32), backward=accelerator.backward)
    accelerator.save_state(folder)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "zero1", "fsdp2"])
def test_state_of_other_tensor_classes_is_not_saved(engine: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    for text in errors_on_ranks(EchelonError, _saved, engine, str(tmp_path / "saved"), world_size=2):
        assert "the optimizer's state has tensors of the class OptimState8bit" in text
        assert "bitsandbytes" in text
