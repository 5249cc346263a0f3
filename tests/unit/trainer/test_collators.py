"""The default collator: the shapes and dtypes of its columns, above all of the labels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from echelon.base.errors import UsageError
from echelon.trainer import default_data_collator

INT, FLOAT = torch.int64, torch.float32

_NUMBERS: list[Any] = [
    (True, INT), (2, INT), (2.0, FLOAT), (np.int32(2), INT), (np.float64(2), FLOAT), (np.array(2), INT),
    (np.array(2.0), FLOAT), (torch.tensor(2), INT), (torch.tensor(2, dtype=torch.int32), INT),
    (torch.tensor(True), INT), (torch.tensor(2.0, dtype=torch.float64), FLOAT), (torch.tensor([2]), INT),
    (torch.tensor([2.0]), FLOAT), (torch.tensor([[2.0]], dtype=torch.float64), FLOAT),
]  # fmt: skip


@pytest.mark.parametrize(("label", "dtype"), _NUMBERS, ids=lambda value: repr(value).replace(" ", ""))
def test_a_number_as_a_label_gives_one_dimension(label: Any, dtype: torch.dtype) -> None:
    labels = default_data_collator([{"label": label}] * 3)["labels"]
    torch.testing.assert_close(labels, torch.full((3,), 1 if labels[0] == 1 else 2, dtype=dtype), rtol=0, atol=0)


_LISTS: list[Any] = [
    ("label", [1, 0], FLOAT), ("label", [1.0, 0.0], FLOAT), ("label", (1, 0), FLOAT), ("label", np.array([1, 0]), FLOAT),
    ("label", torch.tensor([1, 0], dtype=torch.int32), INT),
    ("label", torch.tensor([1.0, 0.0], dtype=torch.float64), FLOAT),
    ("label_ids", [1, 0], INT), ("label_ids", [1.0, 0.0], FLOAT), ("label_ids", np.array([1, 0], np.int16), INT),
    ("label_ids", np.array([1.0, 0.0]), FLOAT), ("label_ids", torch.tensor([1, 0], dtype=torch.int32), torch.int32),
    ("label_ids", torch.tensor([1.0, 0.0], dtype=torch.float64), torch.float64),
    ("labels", [1, 0], INT), ("labels", torch.tensor([1, 0], dtype=torch.int32), torch.int32),
]  # fmt: skip


@pytest.mark.parametrize(("name", "label", "dtype"), _LISTS, ids=lambda value: repr(value).replace(" ", ""))
def test_several_numbers_as_labels_keep_their_dimension(name: str, label: Any, dtype: torch.dtype) -> None:
    labels = default_data_collator([{name: label}] * 3)["labels"]
    torch.testing.assert_close(labels, torch.tensor([[1, 0]] * 3, dtype=dtype), rtol=0, atol=0)


@pytest.mark.parametrize("label", [label for label, _ in _NUMBERS] + [label for name, label, _ in _LISTS if name == "label"], ids=repr)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy")  # theirs
def test_labels_are_those_of_transformers(label: Any) -> None:
    theirs = pytest.importorskip("transformers").default_data_collator
    is_extension = isinstance(label, torch.Tensor) and label.numel() > 1  # raises there
    is_float_there = isinstance(label, np.ndarray) and not label.ndim  # an integer's cross entropy raises
    if is_extension or is_float_there:
        pytest.skip("differs on purpose")
    ours, expected = (collate([{"label": label}] * 3)["labels"] for collate in (default_data_collator, theirs))
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def test_other_columns_and_objects() -> None:
    rows = [SimpleNamespace(x=[1.0, 2.0], text="dropped", none=None, label=None, label_ids=[i, 2]) for i in (0, 1)]
    batch = default_data_collator(rows)
    assert {name: column.tolist() for name, column in batch.items()} == {
        "labels": [[0, 2], [1, 2]],
        "x": [[1.0, 2.0], [1.0, 2.0]],
    }
    arrays = default_data_collator(rows, return_tensors="np")
    assert {name: (type(column), column.dtype.name) for name, column in arrays.items()} == {
        "labels": (np.ndarray, "int64"),
        "x": (np.ndarray, "float32"),
    }
    with pytest.raises(UsageError, match="return_tensors='tf' is not supported"):
        default_data_collator(rows, return_tensors="tf")
