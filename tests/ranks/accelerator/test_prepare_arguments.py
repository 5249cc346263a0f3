"""Arguments that ``prepare`` returns unchanged: silent where that is meant, a warning or an error where data stays unsharded."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator
from echelon.base.errors import UsageError
from echelon.base.warnings import EchelonWarning
from tests.harness import run_on_ranks
from tests.prepared_loop import marked_line

X = torch.arange(8.0).view(4, 2)
DATA: dict[str, tuple[Any, str]] = {
    "generator": (lambda: (x for x in X), "generator"),
    "iterator of a loader": (lambda: iter(DataLoader(TensorDataset(X))), "_SingleProcessDataLoaderIter"),
    "zip": (lambda: zip(X, X), "zip"),
    "dataset": (lambda: TensorDataset(X), "TensorDataset"),
    "tensor": (lambda: X, "Tensor"),
    "list of batches": (lambda: [(X, X), (X, X)], "list"),
    "dict of tensors": (lambda: {"x": X}, "dict"),
}
OTHER: dict[str, Any] = {
    "no scheduler": lambda model: None,
    "parameters": lambda model: list(model.parameters()),
    "parameter": lambda model: model.weight,
    "config": lambda model: {"lr": 0.1, "name": "x"},
    "function": lambda model: torch.nn.functional.mse_loss,
    "empty list": lambda model: [],
    "nested": lambda model: {"loader": DataLoader(TensorDataset(X)), "name": "x"},
}


def _prepare(kind: str, parity: str) -> tuple[list[tuple[str, str]], str, bool]:
    accelerator = Accelerator(cpu=True, parity=parity, seed=0)
    model = torch.nn.Linear(2, 1)
    third = DATA[kind][0]() if kind in DATA else OTHER[kind](model)
    text, is_same = "", False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _, _, result = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), third)  # PREPARE
            is_same = result is third
        except UsageError as error:
            text = str(error)
    said = [(str(w.message), f"{Path(w.filename).name}:{w.lineno}") for w in caught if w.category is EchelonWarning]
    return said, text, is_same


@pytest.mark.parametrize("kind", DATA)
def test_data_that_is_no_loader_is_a_warning_on_several_processes(kind: str) -> None:
    first, second = run_on_ranks(_prepare, kind, "off", world_size=2)
    ((text, line),) = first[0]
    assert line == marked_line(__file__, "PREPARE")
    assert f"argument 3 of prepare(), a {DATA[kind][1]}, unchanged: each of the 2 processes reads all of it" in text
    assert "pass a DataLoader" in text
    assert "do not pass this object to prepare()" in text
    assert second[0] == []
    assert first[2] or kind in ("list of batches", "dict of tensors")  # a container is rebuilt


def test_data_that_is_no_loader_is_an_error_in_an_exact_mode() -> None:
    for said, text, _ in run_on_ranks(_prepare, "generator", "exact", world_size=2):
        assert said == []
        assert "argument 3 of prepare(), a generator, unchanged" in text
        assert marked_line(__file__, "PREPARE") in text


@pytest.mark.parametrize("kind", OTHER)
def test_other_arguments_are_returned_without_a_warning(kind: str) -> None:
    for said, text, _ in run_on_ranks(_prepare, kind, "off", world_size=2):
        assert (said, text) == ([], "")


def test_one_process_reads_all_data_anyway() -> None:
    for kind in DATA:
        said, text, _ = _prepare(kind, "off")
        assert (said, text) == ([], "")


def test_none_is_returned_as_none() -> None:
    """Scripts prepare a scheduler that may be None, alone or with others."""
    accelerator = Accelerator(cpu=True)
    assert accelerator.prepare(None) is None
    assert accelerator.prepare(None, None) == (None, None)
    assert accelerator.prepare_scheduler(None) is None  # type: ignore[arg-type]


def test_a_string_alone_is_an_error_and_beside_others_it_is_returned() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UsageError, match=r"prepare\(\) got no object that it can prepare: str"):
        accelerator.prepare("model")
    model = torch.nn.Linear(2, 1)
    assert accelerator.prepare(model, "model") == (model, "model")
