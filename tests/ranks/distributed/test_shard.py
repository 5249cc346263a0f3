"""shard(): every sample exactly once, the same order on every rank, and the same number of steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, TensorDataset

from echelon.base.errors import UsageError
from echelon.distributed import shard
from echelon.distributed.shard import ShardedBatchSampler, ShardedLoader
from tests.harness import run_on_ranks


def _samplers(n: int, batch: int, world: int, even: bool, drop_last: bool = False) -> list[ShardedBatchSampler]:
    """Return each rank's sampler of a sequential loader; pure arithmetic, no process group."""
    order = DataLoader(range(n), batch_size=batch).sampler  # type: ignore[arg-type]
    options = {"num_samples": n, "batch_size": batch, "world_size": world, "even": even, "drop_last": drop_last}
    return [ShardedBatchSampler(order, rank=rank, seed=0, **options) for rank in range(world)]


def _plan(n: int, batch: int, world: int, even: bool, drop_last: bool = False) -> list[list[list[int]]]:
    return [list(sampler) for sampler in _samplers(n, batch, world, even, drop_last)]


CASES = [(n, batch, world) for n in range(1, 41) for batch in range(1, 8) for world in (1, 2, 3)]


def test_evaluation_uses_each_sample_exactly_once() -> None:
    for n, batch, world in CASES:
        ranks = _plan(n, batch, world, even=False)
        assert sorted(i for batches in ranks for b in batches for i in b) == list(range(n)), (n, batch, world)
        assert all(0 < len(b) <= batch for batches in ranks for b in batches), (n, batch, world)


def test_training_makes_the_same_number_of_steps_on_every_rank() -> None:
    for n, batch, world in CASES:
        ranks = _plan(n, batch, world, even=True)
        steps = -(-n // (batch * world))
        assert [len(batches) for batches in ranks] == [steps] * world, (n, batch, world)
        used = sorted(i for batches in ranks for b in batches for i in b)
        assert set(used) == set(range(n)), (n, batch, world)
        if batch > 1 and n >= 2 * world:  # otherwise some steps have fewer samples than ranks
            assert used == list(range(n)), (n, batch, world)


def test_one_rank_gets_the_batches_of_the_plain_loader() -> None:
    for n, batch in [(10, 3), (9, 3), (1, 4)]:
        assert _plan(n, batch, 1, even=True)[0] == [b.tolist() for b in DataLoader(torch.arange(n), batch_size=batch)]  # type: ignore[arg-type]


def test_drop_last_keeps_only_whole_global_batches() -> None:
    assert _plan(23, 3, 2, even=True, drop_last=True) == [
        [[0, 1, 2], [6, 7, 8], [12, 13, 14]],
        [[3, 4, 5], [9, 10, 11], [15, 16, 17]],
    ]


def test_the_length_is_the_number_of_batches() -> None:
    for n, batch, world in CASES:
        for sampler in (*_samplers(n, batch, world, even=True), *_samplers(n, batch, world, even=False)):
            assert len(sampler) == len(list(sampler)), (n, batch, world, sampler.rank, sampler.even)


def _epochs(n: int, workers: int = 0) -> list[list[list[int]]]:
    loader = shard(DataLoader(TensorDataset(torch.arange(n)), batch_size=4, shuffle=True, num_workers=workers))
    seen = [[b[0].tolist() for b in loader] for _ in range(2)]
    for _ in loader:
        break  # an aborted pass counts as a pass
    seen.append([b[0].tolist() for b in loader])
    loader.sampler.set_epoch(0)  # type: ignore[attr-defined]  # as the tutorials write it
    seen.append([b[0].tolist() for b in loader])
    loader.set_epoch(1)
    seen.append([b[0].tolist() for b in loader])
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_the_global_order_depends_only_on_seed_and_epoch(workers: int) -> None:
    expected = [
        torch.randperm(22, generator=torch.Generator().manual_seed(epoch)).tolist() for epoch in (0, 1, 3, 0, 1)
    ]
    for world_size in (1, 2, 3) if workers == 0 else (2,):
        ranks = run_on_ranks(_epochs, 22, workers, world_size=world_size)
        for epoch in range(5):
            steps = zip(*(rank[epoch] for rank in ranks))
            assert [i for step in steps for part in step for i in part] == expected[epoch], (world_size, epoch)


def _own_sampler() -> list[list[int]]:
    torch.manual_seed(100 + dist.get_rank())  # the ranks' RNG states differ, as they do with augmentation
    sampler = RandomSampler(range(12), replacement=False, num_samples=8)
    return [b.tolist() for b in shard(DataLoader(torch.arange(12), batch_size=2, sampler=sampler))]  # type: ignore[arg-type]


def test_a_custom_sampler_is_drawn_once_for_all_ranks() -> None:
    ranks = run_on_ranks(_own_sampler, world_size=2)
    used = [i for batches in ranks for b in batches for i in b]
    assert len(used) == len(set(used)) == 8


class _Reversed(Sampler[int]):
    def __init__(self, n: int) -> None:
        self.n, self.epochs = n, []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n - 1, -1, -1))


def test_a_custom_sampler_receives_the_epoch() -> None:
    sampler = _Reversed(5)
    loader = shard(DataLoader(torch.arange(5), batch_size=2, sampler=sampler))  # type: ignore[arg-type]
    assert [b.tolist() for b in loader] == [[4, 3], [2, 1], [0]]
    list(loader)
    assert sampler.epochs == [0, 1]


def test_the_samplers_generator_determines_the_seed() -> None:
    loader = DataLoader(torch.arange(9), batch_size=9, shuffle=True, generator=torch.Generator().manual_seed(7))  # type: ignore[arg-type]
    expected = torch.randperm(9, generator=torch.Generator().manual_seed(7)).tolist()
    assert next(iter(shard(loader))).tolist() == expected


def _double(items: list[int]) -> list[int]:
    return [2 * i for i in items]


def test_the_users_settings_are_kept() -> None:
    loader = shard(DataLoader(range(6), batch_size=3, collate_fn=_double, drop_last=True))  # type: ignore[arg-type]
    assert list(loader) == [[0, 2, 4], [6, 8, 10]]
    assert isinstance(loader, DataLoader)
    assert len(loader) == 2


def test_a_repeated_sample_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    ShardedLoader(DataLoader(range(3), batch_size=1), _samplers(3, 1, 2, even=True)[0])  # type: ignore[arg-type]
    assert "1 sample(s) are used twice" in caplog.text


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_loaders_that_cannot_be_sharded_are_rejected() -> None:
    with pytest.raises(UsageError, match="iterable dataset"):
        shard(DataLoader(_Stream()))
    with pytest.raises(UsageError, match="batch size"):
        shard(DataLoader(range(3), batch_size=None))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="batch sampler, but got list"):
        shard(DataLoader(range(3), batch_sampler=[[0, 1], [2]]))  # type: ignore[arg-type]
