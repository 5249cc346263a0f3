"""Batch samplers whose batches have different sizes: every sample is read once per pass, and each step's sizes are known."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from echelon import Accelerator, DataLoaderConfiguration
from echelon.accelerator.prepare.data_loaders import prepare_data_loader, skip_first_batches
from echelon.distributed.collectives import gather_object
from tests.harness import run_on_ranks

BUCKETS = ([3, 4, 3, 4], [1, 1, 1, 1, 1], [4, 4], [2, 3, 5, 1], [7, 1, 4, 4], [5, 2], [1], [9, 9, 1], [2, 2, 2, 2])


class Buckets(BatchSampler):
    """Batches of at most ``batch_size`` samples from one bucket, so that each bucket may end with a shorter one."""

    def __init__(self, sizes: list[int], batch_size: int) -> None:
        super().__init__(SequentialSampler(range(sum(sizes))), batch_size, drop_last=False)
        self.sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in self.sizes:
            bucket = range(start, start + size)
            yield from ([*bucket[i : i + self.batch_size]] for i in range(0, size, self.batch_size))
            start += size

    def __len__(self) -> int:
        return sum(-(-size // self.batch_size) for size in self.sizes)


class Unsized:
    """The same batches from an object that does not tell a batch size."""

    def __init__(self, sizes: list[int], batch_size: int) -> None:
        self.batches = list(Buckets(sizes, batch_size))

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _read(options: dict[str, Any], parity: str) -> list[Any]:
    """Return the cases in which a sample is not gathered once, or not read (beside the repeated ones), or a length is wrong."""
    accelerator = Accelerator(cpu=True, parity=parity, dataloader_config=DataLoaderConfiguration(**options))
    splits, is_even = options.get("split_batches", False), options.get("even_batches", True)
    wrong: list[Any] = []
    kinds: list[Any] = [Buckets, Unsized]
    for sizes, batch_size, kind in itertools.product(BUCKETS, [2, 4], kinds):
        if splits and kind is Unsized:
            continue  # refused: the size of a batch must be known
        data = TensorDataset(torch.arange(sum(sizes)))
        loader = accelerator.prepare(DataLoader(data, batch_sampler=kind(sizes, batch_size)))
        for _ in range(2):
            seen, at_end = [], []
            with torch.no_grad():
                for (batch,) in loader:
                    at_end.append(loader.end_of_dataloader)
                    # Without even batches, ranks may have different numbers of steps.
                    seen += (accelerator.gather_for_metrics(batch) if is_even else batch).tolist()
            seen = sorted(seen if is_even else itertools.chain(*gather_object([seen])))
            is_long = parity == "off" and not splits and len(loader) != len(at_end)
            if (
                seen != list(range(sum(sizes)))
                or is_long
                or at_end != [False] * (len(at_end) - 1) + [True] * bool(at_end)
            ):
                wrong.append((sizes, batch_size, kind.__name__, seen, len(loader), at_end))
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parity", "world_size", "options"),
    [
        *(
            (parity, n, {})
            for parity, n in (("off", 1), ("off", 2), ("off", 3), ("exact", 1), ("exact", 2), ("bitwise", 2))
        ),
        *(("off", 2, {name: name != "even_batches"}) for name in ("split_batches", "even_batches", "dispatch_batches")),
    ],
)
def test_every_sample_of_short_batches_is_gathered_once(parity: str, world_size: int, options: dict[str, Any]) -> None:
    assert run_on_ranks(_read, options, parity, world_size=world_size) == [[]] * world_size


def _steps(sizes: list[int], batch_size: int, **options: Any) -> list[list[Any]]:
    data = TensorDataset(torch.arange(sum(sizes)))
    loader = prepare_data_loader(DataLoader(data, batch_sampler=Buckets(sizes, batch_size)), **options)
    return [[batch.tolist(), None if loader.last_step is None else loader.last_step.real] for (batch,) in loader]


def test_only_the_last_step_is_filled() -> None:
    assert run_on_ranks(_steps, [3, 4, 3], 2) == [
        [[[0, 1], [2, 1]], [[3, 4], None], [[7, 8], [2, 1]]],
        [[[2], [2, 1]], [[5, 6], None], [[9, 0], [2, 1]]],
    ]


def _split_steps() -> Any:
    return _steps([3, 4, 1, 2], 4, split_batches=True)


def test_a_short_batch_that_is_split_repeats_a_sample_of_its_own() -> None:
    assert run_on_ranks(_split_steps) == [
        [[[0, 1], [2, 1]], [[3, 4], None], [[7], [1, 0]], [[8, 9], [2, 0]]],
        [[[2, 0], [2, 1]], [[5, 6], None], [[7], [1, 0]], [[0, 1], [2, 0]]],
    ]


def _skipped(num_workers: int, stateful: bool) -> Any:
    data = TensorDataset(torch.arange(14))
    plain = DataLoader(data, batch_sampler=Buckets([3, 4, 3, 4], 2), num_workers=num_workers)
    loader = prepare_data_loader(plain, use_stateful_dataloader=stateful)

    def steps(reader: Any) -> list[Any]:
        return [(batch.tolist(), None if reader.last_step is None else reader.last_step.real) for (batch,) in reader]

    whole = steps(loader)
    if not stateful:
        return whole[2:], steps(skip_first_batches(loader, 2))
    passing = iter(loader)
    next(passing), next(passing)
    state = loader.state_dict()
    other = prepare_data_loader(plain, use_stateful_dataloader=True)
    other.load_state_dict(state)
    return whole[2:], steps(other)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("num_workers", "stateful"), [(0, False), (2, False), (0, True), (2, True)])
def test_the_sizes_belong_to_the_same_steps_after_skipping_and_resuming(num_workers: int, stateful: bool) -> None:
    for whole, again in run_on_ranks(_skipped, num_workers, stateful):
        assert whole == again
