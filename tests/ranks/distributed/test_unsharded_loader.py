"""Plain DDP loops with an unsharded loader: reported once at its line, while every kind of sharding is recognised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

from echelon.distributed import barrier, process_group, shard
from tests.harness import run_on_ranks
from tests.prepared_loop import all_warnings

WHOLE = TensorDataset(torch.arange(64.0)[:, None])


class _Files(Dataset[torch.Tensor]):
    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1) * int(self.names[index])


class _Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.ones(1) * i for i in range(dist.get_rank(), 64, 2))


LOADERS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: DataLoader(WHOLE, batch_size=8),
    "shuffled": lambda: DataLoader(WHOLE, batch_size=8, shuffle=True),
    "files": lambda: DataLoader(_Files([str(i) for i in range(64)]), batch_size=8),
    "part of all": lambda: DataLoader(Subset(WHOLE, range(32)), batch_size=4),
    "DistributedSampler": lambda: DataLoader(WHOLE, batch_size=4, sampler=DistributedSampler(WHOLE)),
    "shard": lambda: shard(DataLoader(WHOLE, batch_size=4, shuffle=True)),
    "subset": lambda: DataLoader(Subset(WHOLE, range(dist.get_rank(), 64, 2)), batch_size=4),
    "own files": lambda: DataLoader(_Files([str(i) for i in range(dist.get_rank(), 64, 2)]), batch_size=4),
    "own data": lambda: DataLoader(TensorDataset(torch.rand(32, 1) + dist.get_rank()), batch_size=4),
    "stream": lambda: DataLoader(_Stream(), batch_size=4),
    "with replacement": lambda: DataLoader(WHOLE, batch_size=4, sampler=RandomSampler(WHOLE, replacement=True)),
}
MISTAKES = ("sequential", "shuffled", "files", "part of all")


def _train(name: str) -> list[tuple[str, str, int]]:
    with process_group(), all_warnings() as caught:
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        loader, held_out = LOADERS[name](), DataLoader(WHOLE, batch_size=32)
        for _ in range(2):
            with torch.no_grad():
                for batch in held_out:  # each rank evaluates all data, which is correct
                    model.module(*batch) if isinstance(batch, list) else model.module(batch)
            for batch in loader:  # the loop of the test
                optimizer.zero_grad()
                (model(*batch) if isinstance(batch, list) else model(batch)).mean().backward()
                optimizer.step()
                barrier()
    return [(str(one.message), one.filename, one.lineno) for one in caught]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", LOADERS)
def test_an_unsharded_loader_is_reported_at_its_line(name: str) -> None:
    said = [one for rank in run_on_ranks(_train, name, init_group=False) for one in rank]  # the last rank reports
    if name not in MISTAKES:
        assert said == []
        return
    ((message, file, line),) = said
    assert "on 2 ranks, and each rank reads all of its samples" in message
    assert "echelon.distributed.shard(loader)" in message
    assert file == __file__
    assert "# the loop of the test" in Path(__file__).read_text().splitlines()[line - 1]


def _loops(kind: str) -> Iterator[Any]:
    def read() -> Iterator[Any]:
        yield from DataLoader(WHOLE, batch_size=8)

    if kind == "workers":
        return iter(DataLoader(WHOLE, batch_size=8, num_workers=1))
    if kind == "persistent workers":
        return iter(DataLoader(WHOLE, batch_size=8, num_workers=1, persistent_workers=True))
    batches: dict[str, Callable[[], Any]] = {
        "in the for statement": lambda: iter(DataLoader(WHOLE, batch_size=8)),
        "enumerate": lambda: (batch for _, batch in enumerate(DataLoader(WHOLE, batch_size=8))),
        "zip": lambda: (batch for batch, _ in zip(DataLoader(WHOLE, batch_size=8), range(8))),
        "generator": read,
        "sharded": lambda: iter(shard(DataLoader(WHOLE, batch_size=4))),
    }
    return batches[kind]()


def _train_from(kind: str) -> list[str]:
    with process_group(), all_warnings() as caught:
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        for (x,) in _loops(kind):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        barrier()
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(
    "kind",
    [
        *("in the for statement", "enumerate", "zip", "generator", "workers", "sharded"),
        pytest.param("persistent workers", marks=pytest.mark.soak),
    ],
)
def test_a_loader_that_no_variable_holds_is_reported_too(kind: str) -> None:
    first, second = run_on_ranks(_train_from, kind, init_group=False)
    assert len(first + second) == (kind != "sharded")
