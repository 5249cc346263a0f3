"""The examples in docstrings run, and every function that people call has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon import Accelerator, Trainer, TrainingArguments, World
from echelon.checkpoint.save import Content

ROOT = Path(__file__).resolve().parents[2]


def _reference() -> Iterator[tuple[str, Any]]:
    """Yield the functions of the API reference, and the methods of the classes that people call."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        site, members = importlib.import_module("site_pages"), importlib.import_module("api_members").MEMBERS
    finally:
        sys.path.remove(str(ROOT / "docs"))
    for name in (name for page in site.API for name in site.names_of(page)):
        module, _, own = name.rpartition(".")
        found = getattr(importlib.import_module(module), own)
        if inspect.isfunction(found):
            yield name, found
        elif name in ("echelon.Accelerator", "echelon.Trainer"):
            shown = [
                each for title, group in members[name].items() if not title.startswith("To override") for each in group
            ]
            for member in (each for each in shown if inspect.isfunction(getattr(found, each, None))):
                yield f"{name}.{member}", getattr(found, member)


FUNCTIONS = dict(_reference())
# They answer a question in one word, or are described with the function that they belong to.
WITHOUT = {
    "echelon.Accelerator.maybe_context_parallel",
    "echelon.Trainer.is_world_process_zero",
    "echelon.Trainer.is_local_process_zero",
    "echelon.Trainer.get_total_train_batch_size",
    "echelon.trackers.on_main_process",
}


class _Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.linear(x)
        return torch.nn.functional.mse_loss(output, labels), output


def _names(name: str) -> dict[str, Any]:
    """Return what an example of a function finds: its own name, and the objects of a training loop."""
    dataset = TensorDataset(torch.randn(8, 4), torch.randn(8, 2))
    x, y = dataset[:4]
    found: dict[str, Any] = {each: getattr(echelon, each) for each in dir(echelon) if not each.startswith("_")}
    found |= vars(importlib.import_module("echelon.distributed")) | vars(importlib.import_module("echelon.trackers"))
    found |= {"torch": torch, "DataLoader": DataLoader, "TensorDataset": TensorDataset, "Content": Content}
    found |= {name.rpartition(".")[2]: FUNCTIONS[name], "World": World, "world": World.current(cpu=True)}
    found |= {"dataset": dataset, "x": x, "y": y, "download": lambda: dataset, "run_name": "run"}
    found |= {"model": torch.nn.Linear(4, 2), "loss": torch.tensor(0.5), "tokens": torch.ones(2, 3)}
    if ".Accelerator." in name or name == "echelon.skip_first_batches":
        accelerator = Accelerator(
            cpu=True,
            project_config=echelon.utils.ProjectConfiguration("project", automatic_checkpoint_naming=name.endswith(("epochs", "resume"))),
        )  # fmt: skip
        optimizer = torch.optim.SGD(found["model"].parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        loaders = [DataLoader(dataset, batch_size=2) for _ in range(2)]
        model, optimizer, scheduler, loader, eval_loader = accelerator.prepare(
            found["model"], optimizer, scheduler, *loaders
        )
        found |= {"accelerator": accelerator, "model": model, "optimizer": optimizer, "scheduler": scheduler}
        found |= {
            "loader": loader,
            "eval_loader": eval_loader,
            "small_loader": loaders[0],
            "teacher": torch.nn.Linear(4, 2),
        }
    elif name == "echelon.get_scheduler":
        found["optimizer"] = torch.optim.SGD(found["model"].parameters(), lr=0.1)
    elif ".Trainer." in name:
        items = [{"x": x, "labels": y} for x, y in dataset]
        settings = TrainingArguments(
            "out", use_cpu=True, num_train_epochs=1, per_device_train_batch_size=4, report_to="none", disable_tqdm=True
        )
        found["dataset"] = items
        found["trainer"] = Trainer(_Regression(), settings, train_dataset=items, eval_dataset=items)
        if not name.endswith("_callback"):
            found["trainer"].remove_callback(echelon.PrinterCallback)  # prints times
    return found


def test_every_function_that_people_call_has_an_example() -> None:
    without = {name for name, function in FUNCTIONS.items() if "\nExamples:\n" not in (inspect.getdoc(function) or "")}
    assert without == WITHOUT
    assert len(FUNCTIONS) > 110


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - WITHOUT))
def test_an_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(FUNCTIONS[name]) or "", _names(name), name, None, None)
    problems: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=problems.append)
    assert problems == []
