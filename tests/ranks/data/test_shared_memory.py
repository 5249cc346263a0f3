"""Sharing one copy of a dataset on a machine, and splitting lists between processes."""

from __future__ import annotations

from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Subset, TensorDataset

from echelon.base.errors import UsageError
from echelon.data.sharding.split_between_processes import split_between_processes
from echelon.data.shared_memory import share_dataset
from tests.harness import RanksFailed, run_on_ranks


class Columns:
    def __init__(self, rank: int) -> None:
        self.x = torch.arange(6).reshape(2, 3).T  # not contiguous
        self.names = np.array(["a", "bcd"])
        self.nested = {"half": [torch.tensor([1.5, 2.5], dtype=torch.bfloat16), np.arange(3, dtype=">i2")], "n": 3}
        self.same = self.x
        self.own = object


def _pss_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Pss line")


def _total_pss() -> int:
    dist.barrier()
    total = torch.tensor(_pss_bytes())
    dist.all_reduce(total)
    dist.barrier()
    return int(total)


def _pages(megabytes: int) -> mmap:
    """Return newly mapped memory. malloc would reuse memory that an earlier test freed and that is already counted."""
    return mmap(-1, megabytes * 2**20, flags=MAP_PRIVATE | MAP_ANONYMOUS)


def _memory(share: bool, megabytes: int) -> float:
    before = _total_pss()
    data: Any = TensorDataset(torch.frombuffer(_pages(megabytes), dtype=torch.float32).fill_(1.0))
    if share:
        data = share_dataset(data)
    assert float(data[5][0]) == 1.0
    assert all(part.min() == 1.0 for part in data.tensors[0].split(2**20))  # touched by every rank
    return (_total_pss() - before) / (megabytes * 2**20)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="PSS is Linux's")
def test_four_ranks_share_one_copy() -> None:
    assert run_on_ranks(_memory, True, 200, world_size=4)[0] < 1.2
    assert run_on_ranks(_memory, False, 50, world_size=4)[0] > 3.8


def _all_kinds(first_only: bool) -> Any:
    rank = dist.get_rank()
    given = Columns(rank) if rank == 0 or not first_only else None
    data = share_dataset(given)
    assert given is None or data is given
    assert data.same is data.x
    seen = [data.x.tolist(), data.names.tolist(), data.nested["half"][0].tolist(), data.nested["half"][1].tolist()]
    kept = [
        str(data.names.dtype),
        str(data.nested["half"][0].dtype),
        data.nested["half"][1].dtype.str,
        data.nested["n"],
    ]
    dist.barrier()
    if rank == 1:
        data.x[0, 0] = 77
    dist.barrier()
    subset = share_dataset(Subset(TensorDataset(torch.arange(4)), [3, 1]))
    dist.barrier()  # rank 0 removes the name after all ranks have mapped it
    names = list(Path("/dev/shm").glob("echelon-share-*")) if Path("/dev/shm").is_dir() else []
    dist.barrier()
    return seen, kept, int(data.x[0, 0]), [int(x) for (x,) in subset], names


@pytest.mark.parametrize("first_only", [False, True])
def test_columns_of_every_kind_are_shared_without_leftover_files(first_only: bool) -> None:
    for seen, kept, written, subset, names in run_on_ranks(_all_kinds, first_only):
        assert seen == [[[0, 3], [1, 4], [2, 5]], ["a", "bcd"], [1.5, 2.5], [0, 1, 2]]
        assert kept == ["<U3", "torch.bfloat16", ">i2", 3]
        assert written == 77
        assert subset == [3, 1]
        assert names == []


def _different() -> None:
    share_dataset((torch.zeros(2 + dist.get_rank()),))


def _nothing() -> None:
    share_dataset(None)


def test_misuse_raises_on_every_rank() -> None:
    with pytest.raises(
        RanksFailed, match="ranks 0 and 1 are on the same machine, but their datasets contain"
    ) as failed:
        run_on_ranks(_different)
    assert len(failed.value.errors) == 2
    with pytest.raises(RanksFailed, match="the dataset is None on rank 0, which is the first rank on its machine"):
        run_on_ranks(_nothing)


# ---- split_between_processes -------------------------------------------------------------------------------------------


def _parts(inputs: Any, world_size: int, padding: bool = False) -> list[Any]:
    parts = []
    for rank in range(world_size):
        with split_between_processes(inputs, padding, rank=rank, world_size=world_size) as part:
            parts.append(part)
    return parts


def test_lists_are_split_in_order_and_padded_with_the_last_item() -> None:
    for n in range(12):
        for world_size in range(1, 5):
            items = list(range(n))
            parts = _parts(items, world_size)
            assert [i for part in parts for i in part] == items
            assert sorted((len(part) for part in parts), reverse=True) == [len(part) for part in parts]
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            padded = _parts(items, world_size, padding=True)
            assert {len(part) for part in padded} == {-(-n // world_size)}
            assert [part[: len(real)] for part, real in zip(padded, parts)] == parts
            assert all(i == n - 1 for part, real in zip(padded, parts) for i in part[len(real) :])


def test_each_container_keeps_its_type() -> None:
    assert _parts(("a", "b", "c"), 2, padding=True) == [("a", "b"), ("c", "c")]
    tensors = _parts(torch.arange(6).reshape(3, 2), 2, padding=True)
    assert [part.tolist() for part in tensors] == [[[0, 1], [2, 3]], [[4, 5], [4, 5]]]
    assert [part.tolist() for part in _parts(np.arange(3), 2)] == [[0, 1], [2]]
    given = {"x": [1, 2, 3], "y": torch.arange(3)}
    first, second = _parts(given, 2)
    assert (first["x"], first["y"].tolist(), second["x"], second["y"].tolist()) == ([1, 2], [0, 1], [3], [2])
    assert given["x"] == [1, 2, 3]  # accelerate modifies the caller's dict
    assert [list(part) for part in _parts(range(3), 2)] == [[0, 1], [2]]
    data = TensorDataset(torch.arange(3))
    assert [[int(x) for (x,) in part] for part in _parts(data, 2, padding=True)] == [[0, 1], [2, 2]]


def test_what_cannot_be_split_is_an_error() -> None:
    with pytest.raises(UsageError, match="to have the same length"):
        _parts({"x": [1], "y": [1, 2]}, 2)
    with pytest.raises(UsageError, match="cannot split a int"):
        _parts(3, 2)
