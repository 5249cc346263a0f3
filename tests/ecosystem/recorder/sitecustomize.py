"""Records what an unchanged script computes; python imports this file at the start of each process that ``scripts.py`` starts.

Each rank writes ``rank_N.jsonl`` into ``RECORD_FOLDER``: for each optimizer step the learning rate, the norm of the gradients, and
the norm and the sum of the weights after it; the loss that a model of transformers returns in training; the metrics of the
stand-in ``evaluate``. With ``RECORD_IN_ORDER=1``, ``DataLoader(shuffle=True)`` keeps the order of the dataset. With
``RECORD_KEEP_GROUP=1``, a process group outlives the model.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


def write(name: str, value: Any) -> None:
    """Append one value to the record of this rank."""
    file = Path(os.environ["RECORD_FOLDER"], f"rank_{os.environ.get('RANK', '0')}.jsonl")
    with file.open("a") as record:
        record.write(json.dumps([name, value]) + "\n")


_KEPT: set[Any] = set()


def _keep_group(distributed: ModuleType) -> None:
    """Keep the default process group until the script has ended.

    torch 2.13 deadlocks if DistributedDataParallel is freed after destroy_process_group() and holds the last reference to a gloo group:
    it holds the GIL while it waits for the group's threads, one of which may need the GIL to free a tensor of the last collective.
    Dropping a reference of Python releases the GIL.
    """
    if distributed.is_initialized() and distributed.group.WORLD not in _KEPT:
        _KEPT.add(distributed.group.WORLD)
        atexit.register(_KEPT.clear)


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    import torch

    if os.environ.get("RECORD_KEEP_GROUP") == "1":
        _keep_group(torch.distributed)
    weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad.double().norm() for parameter in weights if parameter.grad is not None]
    write(
        "steps",
        {
            "learning_rate": [float(group["lr"]) for group in optimizer.param_groups],
            "gradient_norm": float(torch.stack(gradients).norm()) if gradients else 0.0,
            "weight_norm": float(torch.stack([parameter.detach().double().norm() for parameter in weights]).norm()),
            "weight_sum": float(sum(parameter.detach().double().sum() for parameter in weights)),
        },
    )


def _after_forward(module: Any, args: Any, output: Any) -> None:
    if module.training and type(module).__module__.startswith("transformers.models."):
        loss = output.get("loss") if isinstance(output, dict) else None
        if loss is not None:
            write("losses", float(loss.detach().mean()))


def _keep_order(dataloader: ModuleType) -> None:
    original = dataloader.DataLoader.__init__

    def initialize(
        self: Any, dataset: Any, batch_size: Any = 1, shuffle: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        original(self, dataset, batch_size, False if shuffle else shuffle, *args, **kwargs)

    dataloader.DataLoader.__init__ = initialize


_AFTER_IMPORT: dict[str, Callable[[ModuleType], object]] = {
    "torch.optim.optimizer": lambda module: module.register_optimizer_step_post_hook(_after_step),
    "torch.nn.modules.module": lambda module: module.register_module_forward_hook(_after_forward),
}
if os.environ.get("RECORD_IN_ORDER") == "1":
    _AFTER_IMPORT["torch.utils.data.dataloader"] = _keep_order


class _AfterImport:
    """Calls a function when a module of torch was imported; nothing is imported early, which would change what the script tests."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in _AFTER_IMPORT:
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            _AFTER_IMPORT[fullname](module)

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


if "RECORD_FOLDER" in os.environ:
    sys.meta_path.insert(0, _AfterImport())
