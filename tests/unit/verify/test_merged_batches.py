"""Merged batches are those of a loader with the larger batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from echelon.accelerator.accelerator import Accelerator
from echelon.base.errors import UsageError
from echelon.distributed import shard
from echelon.verify.recorders.merged_batches import MergedBatches
from echelon.verify.recording import recording
from echelon.verify.trace import RecordingSettings

DATA = torch.arange(23.0)[:, None] * torch.ones(3)


class _Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        return iter(DATA if info is None else DATA[info.id :: info.num_workers])


class _Batches(Dataset[torch.Tensor]):
    """Items are batches of two, the last of one."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return DATA[2 * index : 2 * index + 2]

    def __len__(self) -> int:
        return 12


class _StreamOfBatches(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter([{"x": part} for part in DATA.split(2)])

    def __len__(self) -> int:
        return 12


class _LongestFirst(BatchSampler):
    """A batch sampler of a script, with set_epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        yield from (batch[:: 1 if self.epoch else -1] for batch in super().__iter__())


def _merged(folder: Path, build: Callable[[], Any], factor: int = 3) -> Any:
    with recording(folder, RecordingSettings(steps=100, batch_factor=factor), rank=0) as one:
        MergedBatches(one)
        return build()


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.slow
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_is_that_of_the_larger_batch_size(
    drop_last: bool, shuffle: bool, num_workers: int, tmp_path: Path
) -> None:
    def build(batch_size: int) -> DataLoader[Any]:
        options: dict[str, Any] = {"shuffle": shuffle, "drop_last": drop_last, "num_workers": num_workers}
        return DataLoader(TensorDataset(DATA), batch_size=batch_size, generator=_generator(), **options)

    merged, whole = _merged(tmp_path, lambda: build(2)), build(6)
    assert len(merged) == len(whole) == (3 if drop_last else 4)
    _assert_equal(list(merged), list(whole))
    assert merged.batch_size == 6


@pytest.mark.parametrize("drop_last", [False, True])
def test_batch_samplers(drop_last: bool, tmp_path: Path) -> None:
    def build(batch_size: int, kind: type[BatchSampler] = BatchSampler) -> DataLoader[Any]:
        sampler = kind(RandomSampler(range(23), generator=_generator()), batch_size, drop_last)
        return DataLoader(TensorDataset(DATA), batch_sampler=sampler)

    merged, whole = _merged(tmp_path, lambda: build(2)), build(6)
    assert len(merged) == len(whole)
    assert merged.batch_sampler.batch_size == 6
    _assert_equal(list(merged), list(whole))
    # a sampler of the script: its own batches, joined
    merged, single = _merged(tmp_path, lambda: build(2, _LongestFirst)), build(2, _LongestFirst)
    for epoch in (0, 1):
        merged.batch_sampler.set_epoch(epoch)
        single.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
        parts = [one for (one,) in single]
        groups = [torch.cat(parts[start : start + 3]) for start in range(0, len(parts), 3)]
        _assert_equal([one for (one,) in merged], groups if not drop_last else [one for one in groups if len(one) == 6])
        assert len(merged) == (3 if drop_last else 4)
    assert merged.batch_sampler.epoch == 1


def test_a_sampler_of_batches(tmp_path: Path) -> None:
    class Items(Dataset[torch.Tensor]):
        def __getitem__(self, indices: list[int]) -> torch.Tensor:
            return DATA[indices]

    def build(batch_size: int) -> DataLoader[Any]:
        return DataLoader(Items(), batch_size=None, sampler=BatchSampler(range(23), batch_size, drop_last=False))

    merged, whole = _merged(tmp_path, lambda: build(2)), build(6)
    assert len(merged) == len(whole) == 4
    _assert_equal(list(merged), list(whole))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_streams(num_workers: int, drop_last: bool, tmp_path: Path) -> None:
    def build(batch_size: int) -> DataLoader[Any]:
        return DataLoader(_Stream(), batch_size=batch_size, num_workers=num_workers, drop_last=drop_last)

    _assert_equal(list(_merged(tmp_path, lambda: build(2))), list(build(6)))


def test_datasets_that_make_batches(tmp_path: Path) -> None:
    merged = _merged(tmp_path, lambda: DataLoader(_StreamOfBatches(), batch_size=None))
    assert len(merged) == 4
    _assert_equal([one["x"] for one in merged], list(DATA.split(6)))
    merged = _merged(tmp_path, lambda: DataLoader(_Batches(), batch_size=None))
    assert len(merged) == 4
    _assert_equal(list(merged), list(DATA.split(6)))
    torch.manual_seed(3)
    single = list(DataLoader(_Batches(), batch_size=None, shuffle=True))
    torch.manual_seed(3)
    merged = list(_merged(tmp_path, lambda: DataLoader(_Batches(), batch_size=None, shuffle=True)))
    _assert_equal(merged, [torch.cat(single[start : start + 3]) for start in range(0, 12, 3)])


def test_batches_of_different_shapes_cannot_be_merged(tmp_path: Path) -> None:
    class Ragged(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter([torch.zeros(2, 3), torch.zeros(2, 4)])

    loader = _merged(tmp_path, lambda: DataLoader(Ragged(), batch_size=None))
    with pytest.raises(UsageError, match="cannot be concatenated"):
        list(loader)


@pytest.mark.parametrize("build", ["echelon", "shard", "accelerate", "accelerate dispatch", "accelerate stream"])
def test_a_loader_that_a_library_rebuilds_is_merged_once(build: str, tmp_path: Path) -> None:
    def loader(batch_size: int) -> Any:
        own: Any = _Stream() if build.endswith("stream") else TensorDataset(DATA)
        given = DataLoader(own, batch_size=batch_size)
        if build == "echelon":
            return Accelerator(cpu=True).prepare(given)
        if build == "shard":
            return shard(given)
        import accelerate

        options = accelerate.DataLoaderConfiguration(dispatch_batches="dispatch" in build)
        return accelerate.Accelerator(cpu=True, dataloader_config=options).prepare_data_loader(
            given, device_placement=True
        )

    merged, whole = _merged(tmp_path, lambda: loader(2)), loader(6)
    if not build.endswith("stream"):
        assert len(merged) == len(whole) == 4
    _assert_equal(list(merged), list(whole))


def test_subclasses_and_distributed_samplers(tmp_path: Path) -> None:
    class Loader(DataLoader[Any]):
        def __init__(self, dataset: Any, size: int) -> None:
            sampler = DistributedSampler(dataset, num_replicas=1, rank=0, seed=4)
            super().__init__(dataset, size, None, sampler)

    _assert_equal(list(_merged(tmp_path, lambda: Loader(TensorDataset(DATA), 2))), list(Loader(TensorDataset(DATA), 6)))


def test_nothing_is_merged_after_the_recording(tmp_path: Path) -> None:
    before = DataLoader.__init__
    _merged(tmp_path, lambda: None)
    assert DataLoader.__init__ is before


def _assert_equal(got: list[Any], expected: list[Any]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        a, b = (one[0] if isinstance(one, (list, tuple)) else one for one in (a, b))
        assert torch.equal(a, b), (a, b)


def test_a_loader_that_is_prepared_later_keeps_its_length_until_then(tmp_path: Path) -> None:
    """A schedule that a script computes before ``prepare`` is that of several processes."""
    lengths: list[int] = []

    def script() -> None:
        given: DataLoader[Any] = DataLoader(TensorDataset(DATA), batch_size=2)
        lengths.append(len(given))  # this file imports Accelerator
        lengths.append(len(list(given)))
        lengths.append(len(Accelerator(cpu=True).prepare(given)))
        sharded: Any = DistributedSampler(DATA, num_replicas=1, rank=0)  # type: ignore[arg-type]
        lengths.append(len(DataLoader(TensorDataset(DATA), batch_size=2, sampler=sharded)))
        names = {"DataLoader": DataLoader, "data": TensorDataset(DATA)}
        exec("n = len(DataLoader(data, batch_size=2))", names)  # a script without a library that shards
        lengths.append(names["n"])  # type: ignore[arg-type]

    _merged(tmp_path, script)
    assert lengths == [12, 4, 4, 4, 4]
