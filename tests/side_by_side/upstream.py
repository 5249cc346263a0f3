"""Runs accelerate's own test scripts from its wheel on echelon, which they import under the name accelerate."""

from __future__ import annotations

import ast
import importlib
import os
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

SCRIPTS = ("test_script", "test_sync", "test_ops", "test_cli", "test_distributed_data_loop")
_PEERS = Path(__file__).resolve().parents[2] / ".venv-peers"
_FROM_THE_WHEEL = "accelerate.test_utils"
_NO_TESTS = {"create_accelerator"}  # called by a main() for preparation only

# Each main() runs these on accelerators only, but they also pass on CPUs.
_ACCUMULATIONS = [
    {"split_batches": split, "dispatch_batches": dispatch, "sync_each_batch": sync_each}
    for split, dispatch, sync_each in product((False, True), repeat=3)
]
_ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "training_check": [{"use_seedable_sampler": False}, {"use_seedable_sampler": True}],
    "test_gradient_accumulation": _ACCUMULATIONS,
    "test_gradient_accumulation_with_opt_and_scheduler": _ACCUMULATIONS,
    "test_data_loader": [
        {"data_loader": kind} for kind in ("sequential", "shuffled", "batch sampler", "batch sampler as sampler")
    ],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A function of a script, and its arguments in addition to those that every ``main`` creates (see ``run``)."""

    script: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"{self.script}.{self.function}({given})"


def folder_of_accelerate() -> Path | None:
    """Return accelerate's package folder in the peers' environment, or None if ``make peers`` was not run."""
    return next(iter(_PEERS.glob("lib/python*/site-packages/accelerate")), None)


def calls(folder: Path, script: str) -> list[Call]:
    """Return the functions of ``script`` to call: each test that its ``main`` calls, and ``main`` itself."""
    tree = ast.parse((folder / "test_utils" / "scripts" / f"{script}.py").read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    called = {
        node.func.id
        for node in ast.walk(functions["main"])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    tests = [name for name in functions if name in {*called, *_ARGUMENTS} - _NO_TESTS]
    return [
        Call(script=script, function=name, arguments=arguments)
        for name in [*tests, "main"]
        for arguments in _ARGUMENTS.get(name, [{}])
    ]


def run(folder: Path, call: Call, *, inside: Path, without: Collection[str] = ()) -> None:
    """Run ``call`` on this rank. Arguments named ``accelerator`` and ``state`` are created as in the scripts.

    Args:
        folder: accelerate's package.
        call: the function to call.
        inside: the working directory, shared by the ranks.
        without: functions of the script to replace by no-ops, for a ``main`` that calls them.
    """
    import torch

    before = Path.cwd()
    os.chdir(inside)
    try:
        with _aliased(folder), warnings.catch_warnings():
            warnings.resetwarnings()  # as in a separate program; some functions check the warnings
            script = importlib.import_module(f"{_FROM_THE_WHEEL}.scripts.{call.script}")
            for name in without:
                setattr(script, name, lambda *_args, **_kwargs: None)
            arguments = dict(call.arguments)
            echelon = importlib.import_module("echelon")
            state = echelon.PartialState() if call.function != "main" else None
            # Kept alive while the function runs, as in a main(): some functions use the most recently created Accelerator.
            accelerator = echelon.Accelerator() if state is not None and hasattr(script, "Accelerator") else None
            function = getattr(script, call.function)
            wanted = function.__code__.co_varnames[: function.__code__.co_argcount]
            if state is not None:
                torch.manual_seed(
                    state.process_index
                )  # as in test_distributed_data_loop, where the ranks draw different numbers
            if "accelerator" in wanted:
                arguments["accelerator"] = accelerator
            if "state" in wanted:
                arguments["state"] = state
            if "data_loader" in wanted:
                arguments["data_loader"] = _user_loader(script, arguments["data_loader"])
            if "datasets_Dataset" in wanted:
                arguments["datasets_Dataset"] = importlib.import_module("datasets").Dataset
            function(**arguments)
    finally:
        os.chdir(before)


def _user_loader(script: ModuleType, kind: str) -> Any:
    """Return one of the four loaders that the ``main`` of test_distributed_data_loop creates."""
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, default_collate

    dataset, size, workers = script.DummyDataset(), script.BATCH_SIZE, script.NUM_WORKERS
    if kind in ("sequential", "shuffled"):
        return DataLoader(dataset, shuffle=kind == "shuffled", batch_size=size, num_workers=workers)
    batches = BatchSampler(RandomSampler(dataset), batch_size=size, drop_last=False)
    if kind == "batch sampler":
        return DataLoader(dataset, batch_sampler=batches, num_workers=workers)
    return DataLoader(dataset, sampler=batches, batch_size=None, collate_fn=default_collate, num_workers=workers)


@contextmanager
def _aliased(folder: Path) -> Iterator[None]:
    """Make ``import accelerate`` import echelon, and ``accelerate.test_utils`` the files of the wheel."""
    aside = _remove_accelerate()  # an earlier test of this rank may have imported the real one through transformers
    finder = _Alias(folder)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _remove_accelerate()
        sys.modules.update(aside)
        vars(importlib.import_module("echelon")).pop("test_utils", None)  # set by the import of a submodule


def _remove_accelerate() -> dict[str, ModuleType]:
    """Remove the modules of accelerate from ``sys.modules`` and return them."""
    names = [name for name in sys.modules if name.partition(".")[0] == "accelerate"]
    return {name: sys.modules.pop(name) for name in names}


class _Alias(MetaPathFinder, Loader):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "accelerate":
            return None
        if name != _FROM_THE_WHEEL and not name.startswith(f"{_FROM_THE_WHEEL}."):
            return ModuleSpec(name, self)
        place = self._folder.joinpath(*name.split(".")[1:])
        if place.is_dir():
            return spec_from_file_location(name, place / "__init__.py", submodule_search_locations=[str(place)])
        return spec_from_file_location(name, place.with_suffix(".py"))

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # The import system takes what stands here afterwards. Returned by create_module, echelon's own module would get
        # the alias's __spec__.
        name = module.__name__
        sys.modules[name] = importlib.import_module("echelon" + name.removeprefix("accelerate"))
