"""Whole batches of in-memory tensors are those that a DataLoader collates sample by sample, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, Subset, TensorDataset, random_split

from echelon import Accelerator
from echelon.data.whole_batches import WholeBatches, read_whole_batches


class _Given(Sampler[Any]):
    def __init__(self, indices: list[Any]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def _tensors(rng: random.Random, rows: int) -> list[torch.Tensor]:
    whole: list[torch.Tensor] = [
        torch.randn(rows, 3, 4),
        torch.arange(rows),
        torch.randint(0, 2, (rows,)).bool(),
        torch.randn(rows, 2).half(),
        torch.randn(rows, dtype=torch.complex64),
        torch.empty(rows, 0),
        torch.randn(5, rows).t(),  # not contiguous
        torch.randn(rows, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.randn(1, 2).expand(rows, 2),
        torch.randn(rows, requires_grad=True),
        torch.nn.Parameter(torch.randn(rows)),
        torch.from_numpy(np.arange(rows, dtype=np.int16)),
    ]
    return [rng.choice(whole) for _ in range(rng.randint(1, 3))]


def _indices(rng: random.Random, rows: int) -> list[Any]:
    own = [rng.randrange(rows) for _ in range(rng.randint(1, 2 * rows))]
    kind = rng.choice(["ints", "ints", "negative", "tensors", "numpy"])
    if kind == "negative":
        own = [-1 - index for index in own]
    convert: Any = {"tensors": torch.tensor, "numpy": np.int64}.get(kind, int)
    return [convert(index) for index in own]


@pytest.mark.parametrize("seed", range(40))
def test_batches_are_equal_to_those_of_a_data_loader(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows = rng.randint(2, 12)
    dataset: Dataset[Any] = TensorDataset(*_tensors(rng, rows))
    for _ in range(rng.randint(0, 2)):
        places: Any = [rng.randrange(rows) for _ in range(rows)]
        dataset = Subset(dataset, torch.tensor(places) if rng.random() < 0.5 else places)  # type: ignore[arg-type]
    order = _indices(rng, rows)
    options: dict[str, Any] = rng.choice(
        [
            {"shuffle": True, "batch_size": 3},
            {"batch_size": 4, "drop_last": True},
            {"sampler": _Given(order), "batch_size": 3},
            {"batch_sampler": BatchSampler(_Given(order), 2, drop_last=False)},
        ]
    )
    torch.manual_seed(seed)
    expected = list(DataLoader(dataset, **options))
    torch.manual_seed(seed)
    loader = Accelerator(cpu=True).prepare(DataLoader(dataset, **options))
    found = list(loader)
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert type(one) is type(other)
        for tensor, reference in zip(one, other, strict=True):
            assert torch.equal(tensor, reference)
            assert tensor.dtype is reference.dtype
            assert tensor.stride() == reference.stride()
            assert tensor.requires_grad == reference.requires_grad
            assert type(tensor) is type(reference)
    assert loader.dataset is dataset


def test_a_batch_is_indexed_once_and_does_not_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = TensorDataset(torch.arange(8.0), torch.arange(8))
    first, _ = random_split(dataset, [6, 2])
    loader = Accelerator(cpu=True).prepare(DataLoader(first, batch_size=3))

    def refuse(*_: Any) -> None:
        raise AssertionError("a sample was read alone")

    monkeypatch.setattr(TensorDataset, "__getitem__", refuse)
    for batch, _ in loader:
        batch.zero_()
    assert dataset.tensors[0].tolist() == list(range(8))
    dataset.tensors[0].fill_(7)  # changed in place: the next pass reads the new values
    assert all(batch.eq(7).all() for batch, _ in loader)


def test_an_index_out_of_range_raises_the_error_of_the_dataset() -> None:
    dataset = TensorDataset(torch.arange(4))
    options: dict[str, Any] = {"sampler": _Given([0, 4]), "batch_size": 2}
    with pytest.raises(IndexError) as plain:
        list(DataLoader(dataset, **options))
    with pytest.raises(IndexError) as raised:
        list(Accelerator(cpu=True).prepare(DataLoader(dataset, **options)))
    assert str(raised.value) == str(plain.value)


class _Own(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return tuple(tensor[index] + 1 for tensor in self.tensors)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(_Own(torch.arange(4)), batch_size=2),
        DataLoader(TensorDataset(torch.arange(4)), batch_size=2, collate_fn=lambda samples: samples),
        DataLoader(TensorDataset(torch.arange(4)), batch_size=None),
        DataLoader(TensorDataset(torch.arange(4)), batch_size=2, num_workers=1),
    ],
    ids=["own dataset", "own collate_fn", "no batches", "workers"],
)
def test_other_loaders_are_read_as_they_are(loader: DataLoader[Any]) -> None:
    assert read_whole_batches(loader) is None


def test_attributes_are_those_of_the_dataset() -> None:
    dataset = TensorDataset(torch.arange(4))
    whole = WholeBatches(dataset)
    assert whole.tensors is dataset.tensors
    assert len(whole) == 4
    assert whole[1] == (1,)
    with pytest.raises(AttributeError, match="nothing"):
        _ = whole.nothing
