"""Fingerprints of data: equal data has equal ones anywhere, other data other ones, and nothing is read by ``dataset[i]``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from echelon.distributed.checks.data_fingerprint import (
    are_of_different_data,
    are_shards,
    column_fingerprints,
    row_fingerprints,
    sample_fingerprints,
)
from tests.harness import run_on_ranks

X, Y = torch.arange(80.0).reshape(40, 2), torch.arange(40) % 2


class _Files(Dataset[Any]):
    def __init__(self, files: list[str], noise: torch.Tensor | None = None) -> None:
        self.files = files
        self.noise = noise

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> str:
        raise AssertionError("a sample was read")


class _Encodings(Dataset[Any]):
    def __init__(self, start: int) -> None:
        self.encodings = {"input_ids": [[start + i, 1, 2] for i in range(40)], "mask": np.ones((40, 3))}
        self.cache: list[Any] = [None] * 40

    def __len__(self) -> int:
        return 40


DATA: dict[str, Any] = {
    "tensors": lambda start: TensorDataset(X + start, Y + start),
    "tensor": lambda start: X + start,
    "range": lambda start: range(start, start + 40),
    "list of samples": lambda start: [{"x": torch.tensor([start + i]), "name": str(i)} for i in range(40)],
    "subset": lambda start: Subset(TensorDataset(X, Y), range(start % 2, 40, 2)),
    "joined": lambda start: ConcatDataset([TensorDataset(X + start, Y + start), TensorDataset(X - start)]),
    "stacked": lambda start: StackDataset(x=TensorDataset(X + start), y=TensorDataset(Y + start)),
    "files": lambda start: _Files([f"/somewhere/{start + i}.png" for i in range(40)]),
    "encodings": _Encodings,
}


@pytest.mark.parametrize("name", DATA)
def test_equal_data_has_equal_fingerprints_and_other_data_other_ones(name: str) -> None:
    make = DATA[name]
    assert column_fingerprints(make(0)) == column_fingerprints(make(0)) != {}
    assert column_fingerprints(make(0)) != column_fingerprints(make(3))
    assert not are_of_different_data(column_fingerprints(make(0)), column_fingerprints(make(0)))
    assert are_of_different_data(column_fingerprints(make(0)), column_fingerprints(make(3)))


def _fingerprint_and_hash() -> tuple[dict[str, Any], int]:
    return column_fingerprints(["a", "b", ("c", 1.5)]), hash("a")


def test_another_process_computes_the_same_fingerprint() -> None:
    # Hashes of strings differ between the processes.
    ((found, hashed),) = run_on_ranks(_fingerprint_and_hash, world_size=1)
    assert found == column_fingerprints(["a", "b", ("c", 1.5)])
    assert hashed != hash("a")


def test_the_folder_of_a_path_does_not_count() -> None:
    one, other = ([f"{root}/{i}.png" for i in range(9)] for root in ("/machine0/data", "/machine1/data"))
    assert column_fingerprints(_Files(one)) == column_fingerprints(_Files(other))


def test_a_random_column_does_not_change_the_fingerprint() -> None:
    files = [f"{i}.png" for i in range(40)]
    one, other = (column_fingerprints(_Files(files, torch.rand(40))) for _ in range(2))
    assert one != other
    assert not are_of_different_data(one, other)


def test_data_without_columns_has_no_fingerprint() -> None:
    assert column_fingerprints(_Files([])) == {}
    assert column_fingerprints(iter([1])) == {}
    assert column_fingerprints([object(), object()]) == {}


def test_rows_of_a_batch_are_distinguished_at_any_position() -> None:
    batch = {"x": torch.randn(8, 3, 500), "y": torch.arange(8), "name": [str(i) for i in range(8)], "flag": True}
    rows = row_fingerprints(batch)
    assert rows is not None
    assert len(set(rows.tolist())) == 8
    again = row_fingerprints(
        {"x": batch["x"].flip(0), "y": batch["y"].flip(0), "name": batch["name"][::-1], "flag": True}
    )  # type: ignore[attr-defined,index]
    assert again is not None
    assert again.tolist() == rows.tolist()[::-1]
    for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.float64, torch.complex64):
        kinds = row_fingerprints(torch.tensor([[0, 1, 0], [1, 0, 0], [0, 1, 0]]).to(dtype))
        assert kinds is not None
        assert [kinds[0] == kinds[1], kinds[0] == kinds[2]] == [False, True]
    assert row_fingerprints({"flag": True}) is None


def test_an_augmented_column_with_equal_labels_is_not_different_data() -> None:
    one, other = ([(torch.rand(3), label) for label in range(8)] for _ in range(2))
    assert not are_of_different_data(sample_fingerprints(one), sample_fingerprints(other))
    assert are_of_different_data(
        sample_fingerprints(one), sample_fingerprints([(torch.rand(3), 9 + i) for i in range(8)])
    )


def test_rank_specific_random_data_is_not_sharded_data() -> None:
    one, other = (column_fingerprints(TensorDataset(torch.rand(20, 2), torch.rand(20))) for _ in range(2))
    assert not are_shards(one, other, same_seeds=False)
    assert are_shards(one, other, same_seeds=True)
    for make in (DATA["files"], DATA["subset"]):
        assert are_shards(column_fingerprints(make(0)), column_fingerprints(make(3)), same_seeds=False)
