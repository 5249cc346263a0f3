"""Accelerate's loader classes, constructed or subclassed by a script, on one and on two processes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from echelon import Accelerator
from echelon.base.errors import UsageError
from echelon.data_loader import (
    BatchSamplerShard,
    DataLoaderAdapter,
    DataLoaderDispatcher,
    DataLoaderShard,
    DataLoaderStateMixin,
    IterableDatasetShard,
    SkipDataLoader,
    get_sampler,
    skip_first_batches,
)
from echelon.state import GradientState
from tests.harness import run_on_ranks


class _Epochs(BatchSampler):
    """A batch sampler that starts at its epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[index + 100 * self.epoch for index in batch] for batch in super().__iter__()])


class _Count(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))

    def __len__(self) -> int:
        return 5


def _values(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_a_shard_reads_what_it_is_given_and_knows_its_end() -> None:
    accelerator = Accelerator(cpu=True)
    loader = DataLoaderShard(list(range(7)), batch_size=3, device="cpu", rng_types=["torch"])
    for _ in range(2):
        seen = []
        for batch in loader:
            assert accelerator.gradient_state.active_dataloader is loader
            seen.append((batch.tolist(), loader.end_of_dataloader, GradientState().end_of_dataloader, loader.remainder))
        assert seen == [([0, 1, 2], False, False, 1), ([3, 4, 5], False, False, 1), ([6], True, True, 1)]
    assert accelerator.gradient_state.active_dataloader is None
    assert loader.iteration == 2
    assert (len(loader), loader.total_batch_size, loader.total_dataset_length) == (3, 3, 7)
    assert (loader.device, loader.rng_types, loader.use_stateful_dataloader) == (torch.device("cpu"), ["torch"], False)
    assert isinstance(loader.base_dataloader, DataLoader)
    assert DataLoaderShard(list(range(7)), batch_size=3, _drop_last=True).remainder == -1
    assert accelerator.prepare(loader) is loader


def test_epochs_reach_the_batch_sampler_or_the_dataset() -> None:
    batches = _Epochs(SequentialSampler(range(4)), 2, False)
    loader = DataLoaderShard(range(1000), batch_sampler=batches, iteration=3)
    assert _values(loader) == [[300, 301], [302, 303]]
    assert _values(loader) == [[400, 401], [402, 403]]
    loader.set_epoch(1)
    skipping = skip_first_batches(loader, 1)
    assert (type(skipping), skipping.iteration, len(skipping)) == (DataLoaderShard, 1, 1)
    assert _values(skipping) == [[102, 103]]
    assert _values(DataLoaderShard(range(9), batch_size=2, skip_batches=3)) == [[6, 7], [8]]
    # With prepare(), too, and with one process as with several.
    prepared = Accelerator(cpu=True).prepare(DataLoader(range(1000), batch_sampler=_Epochs(range(2), 2, False)))
    prepared.set_epoch(5)
    assert _values(prepared) == [[500, 501]]


def test_a_subclass_changes_batches_and_is_recognized() -> None:
    class Doubled(DataLoaderShard):
        def __init__(self, dataset: Any, *, factor: int, **kwargs: Any) -> None:
            super().__init__(dataset, **kwargs)
            self.factor = factor

        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                yield batch * self.factor

    loader = Doubled(list(range(4)), factor=2, batch_size=2)
    assert _values(loader) == [[0, 2], [4, 6]]
    assert _values(skip_first_batches(loader, 1)) == [[4, 6]]
    prepared = Accelerator(cpu=True).prepare(DataLoader(list(range(4)), batch_size=2))
    for kind in (DataLoader, DataLoaderShard, DataLoaderStateMixin, DataLoaderAdapter):
        assert isinstance(loader, kind)
        assert isinstance(prepared, kind)
    assert not isinstance(prepared, (Doubled, DataLoaderDispatcher))
    assert not isinstance(DataLoaderDispatcher(list(range(4))), DataLoaderShard)


def test_samplers_are_found_and_replaced() -> None:
    loader = DataLoaderShard(list(range(4)), batch_size=2, shuffle=True)
    assert isinstance(get_sampler(loader), RandomSampler)
    loader.set_sampler(SequentialSampler(range(4)))
    assert _values(loader) == [[0, 1], [2, 3]]


def test_shuffling_draws_as_torch_does() -> None:
    torch.manual_seed(3)
    expected = [_values(DataLoader(list(range(9)), batch_size=4, shuffle=True)) for _ in range(2)]
    torch.manual_seed(3)
    loader = DataLoaderShard(list(range(9)), batch_size=4, shuffle=True)
    assert [_values(loader) for _ in range(2)] == expected


def test_stateful_loaders_continue_where_they_were_saved() -> None:
    for kind in (DataLoaderShard, DataLoaderDispatcher):
        loader = kind(list(range(8)), batch_size=2, use_stateful_dataloader=True)
        for number, _ in enumerate(loader):
            if number == 1:
                state = loader.state_dict()
        other = kind(list(range(8)), batch_size=2, use_stateful_dataloader=True)
        other.load_state_dict(state)
        assert _values(other) == [[4, 5], [6, 7]]
    skipping = SkipDataLoader(list(range(8)), batch_size=2, skip_batches=3, use_stateful_dataloader=True)
    assert _values(skipping) == [[6, 7]]
    assert len(skipping) == 1
    assert skipping.state_dict()
    assert not hasattr(SkipDataLoader([1]), "state_dict")


def test_an_adapter_forwards_to_its_loader() -> None:
    adapter = DataLoaderAdapter(list(range(4)), batch_size=2)
    assert isinstance(adapter, DataLoader)
    assert (_values(adapter), len(adapter), adapter.batch_size) == ([[0, 1], [2, 3]], 2, 2)
    stateful = DataLoaderAdapter(list(range(4)), use_stateful_dataloader=True, batch_size=2)
    next(iter(stateful))
    other = DataLoaderAdapter(list(range(4)), use_stateful_dataloader=True, batch_size=2)
    other.load_state_dict(stateful.state_dict())
    stateful.adjust_state_dict_for_prefetch()
    assert _values(other) == [[2, 3]]
    assert pickle.loads(pickle.dumps(DataLoaderAdapter([1, 2], batch_size=2).dataset)) == [1, 2]


class _Own(DataLoader[Any], DataLoaderStateMixin):
    """A loader of one's own, whose last batch is filled."""

    _drop_last = False
    total_batch_size = 4

    def __init__(self, dataset: Any, batches: list[list[int]]) -> None:
        super().__init__(dataset, batch_sampler=batches)
        self.gradient_state = GradientState()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.begin()
        found = list(super().__iter__())
        for number, batch in enumerate(found):
            self.end_of_dataloader = number == len(found) - 1
            yield batch
        self.end()
        assert self.end_of_dataloader
        self.reset()
        assert (self.end_of_dataloader, self.remainder) == (False, -1)


def _with_own_loader() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    # Six samples in batches of two on two ranks; the second round is filled.
    loader = _Own(list(range(6)), [[[0, 1], [4, 5]], [[2, 3], [0, 1]]][rank])
    seen = []
    for batch in loader:
        gathered = accelerator.gather_for_metrics(batch).tolist()
        seen.append((gathered, GradientState().end_of_dataloader, GradientState().remainder))
    return [seen, accelerator.gradient_state.in_dataloader, accelerator.gradient_state.active_dataloader is None]


def test_loaders_of_ones_own_tell_which_samples_are_new() -> None:
    expected = [[([0, 1, 2, 3], False, 2), ([4, 5], True, 2)], False, True]
    assert run_on_ranks(_with_own_loader) == [expected, expected]


def _with_shards() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    generator = torch.Generator().manual_seed(rank)
    batches = BatchSamplerShard(BatchSampler(range(6), 2, False), 2, rank)
    loader = DataLoaderShard(
        list(range(6)), batch_sampler=batches, rng_types=["generator"], synchronized_generator=generator
    )
    gathered = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
    stream = IterableDatasetShard(_Count(), batch_size=2, num_processes=2, process_index=rank)
    streamed = _values(DataLoaderShard(stream, batch_size=2))
    facts = (loader.total_batch_size, loader.total_dataset_length, len(loader), loader.remainder)
    return [gathered, facts, streamed, generator.initial_seed(), torch.rand(1, generator=generator).item()]


def test_shards_of_two_processes_are_gathered_once() -> None:
    first, second = run_on_ranks(_with_shards)
    assert first[:2] == second[:2] == [[[0, 1, 2, 3], [4, 5]], (4, 6, 2, 2)]
    assert (first[2], second[2]) == ([[0, 1], [4, 0]], [[2, 3], [1, 2]])
    expected = torch.rand(1, generator=torch.Generator().manual_seed(0)).item()
    assert first[4] == second[4] == expected


def _dispatched() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    # Only rank zero reads.
    data = list(range(7)) if accelerator.is_main_process else [-1] * 7
    loader = DataLoaderDispatcher(data, batch_size=2)
    whole = [(batch.tolist(), loader.end_of_dataloader) for batch in loader]
    loader = DataLoaderDispatcher(data, batch_size=2)
    gathered = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
    split = _values(DataLoaderDispatcher(data, split_batches=True, batch_size=4, _drop_last=True))
    return [whole, gathered, split]


def test_a_dispatcher_sends_each_process_its_part() -> None:
    first, second = run_on_ranks(_dispatched)
    assert first[0] == [([0, 1], False), ([4, 5], True)]
    assert second[0] == [([2, 3], False), ([6, 0], True)]
    assert first[1] == second[1] == [[0, 1, 2, 3], [4, 5, 6]]
    assert (first[2][0], second[2][0]) == ([0, 1], [2, 3])


def test_the_exact_modes_refuse_loaders_that_they_cannot_cut() -> None:
    accelerator = Accelerator(cpu=True, parity="exact")
    loader = DataLoaderShard(list(range(4)), batch_size=2)
    with pytest.raises(
        UsageError, match="a DataLoaderShard constructed by the script cannot be used in the exact modes"
    ):
        next(iter(loader))
    assert accelerator.gradient_state.in_dataloader is False
