"""What scripts for Accelerate read on a prepared loader, the shards that they build by hand, and GradientState()."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from echelon import Accelerator, GradientAccumulationPlugin
from echelon.base.errors import UsageError
from echelon.data_loader import BatchSamplerShard, DataLoaderShard, IterableDatasetShard, prepare_data_loader
from echelon.state import GradientState


def test_gradient_state_without_arguments_is_a_view_of_the_most_recent_accelerator() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=3)
    view = GradientState()
    assert (view.num_steps, view.sync_gradients) == (3, True)
    accelerator.sync_gradients = False
    assert view.sync_gradients is False
    view.sync_gradients = True
    assert accelerator.sync_gradients is True
    accelerator.gradient_accumulation_steps = 5
    assert view.num_steps == 5
    other = Accelerator(gradient_accumulation_steps=2)
    assert (view.num_steps, GradientState().num_steps) == (5, 2)
    GradientState._reset_state()
    assert other.gradient_accumulation_steps == 2


def test_gradient_state_with_a_plugin_is_separate() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=3)
    own = GradientState(GradientAccumulationPlugin(num_steps=7))
    own.sync_gradients = False
    assert (own.num_steps, accelerator.gradient_accumulation_steps, accelerator.sync_gradients) == (7, 3, True)


def test_gradient_state_without_an_accelerator_has_the_defaults() -> None:
    gc.collect()  # Accelerators of other tests
    state = GradientState()
    assert (state.num_steps, state.sync_gradients, state.in_dataloader, state.remainder) == (1, True, False, -1)
    assert GradientState._shared_state == {}


def test_a_manually_prepared_loader_is_known_to_the_accelerator_during_a_pass() -> None:
    accelerator = Accelerator()
    loader = prepare_data_loader(DataLoader(list(range(5)), batch_size=2))
    assert accelerator.gradient_state.active_dataloader is None
    seen = []
    for _ in loader:
        assert accelerator.gradient_state.active_dataloader is loader
        seen.append((GradientState().end_of_dataloader, GradientState().remainder))
    assert seen == [(False, 1), (False, 1), (True, 1)]  # 5 % 2
    assert accelerator.gradient_state.active_dataloader is None


def test_a_prepared_loader_has_accelerates_attributes() -> None:
    accelerator = Accelerator(rng_types=["torch", "generator"])
    generator = torch.Generator()
    original = DataLoader(list(range(22)), batch_size=4, shuffle=True, generator=generator)
    loader = accelerator.prepare(original)
    assert isinstance(loader, DataLoaderShard)
    assert loader.gradient_state is accelerator.gradient_state
    assert loader.rng_types == ["torch", "generator"]
    assert loader.synchronized_generator is generator
    assert type(loader.base_dataloader) is DataLoader
    assert len(loader.base_dataloader) == 6
    assert (loader.total_batch_size, loader.total_dataset_length, loader.remainder) == (4, 22, 2)
    assert (loader.iteration, loader.skip_batches, loader.end_of_dataloader) == (0, 0, False)


class _Count(IterableDataset[int]):
    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num))


@pytest.mark.parametrize(
    ("dataset", "drop_last", "remainder"),
    [
        (range(8), False, 0),  # full batches only
        (range(9), False, 1),
        (range(9), True, -1),  # as in Accelerate: nothing is left over
        (_Count(9), False, -1),  # without a length
    ],
)
def test_remainder_is_the_length_modulo_the_batch(dataset: object, drop_last: bool, remainder: int) -> None:
    loader = Accelerator().prepare(DataLoader(dataset, batch_size=4, drop_last=drop_last))  # type: ignore[arg-type]
    assert loader.remainder == remainder


def test_batch_sampler_shards_match_accelerate() -> None:
    batches = BatchSampler(SequentialSampler(range(8)), batch_size=4, drop_last=False)
    whole = [BatchSamplerShard(batches, num_processes=2, process_index=rank) for rank in (0, 1)]
    assert [list(shard) for shard in whole] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    pieces = [BatchSamplerShard(batches, 2, rank, split_batches=True) for rank in (0, 1)]
    assert [list(shard) for shard in pieces] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    shard = pieces[0]
    assert isinstance(shard, BatchSampler)
    assert (len(shard), shard.total_length, shard.batch_size, shard.drop_last) == (2, 2, 4, False)
    assert shard.sampler is batches.sampler
    with pytest.raises(UsageError, match="but got batch_size=4"):
        BatchSamplerShard(batches, 3, 0, split_batches=True)


@pytest.mark.parametrize(
    ("split", "drop_last", "of_rank_0", "of_rank_1"),
    [
        (False, False, [0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 0, 1]),
        (False, True, [0, 1, 4, 5], [2, 3, 6, 7]),
        (True, False, [0, 2, 4, 6, 8], [1, 3, 5, 7, 9]),
    ],
)
def test_iterable_dataset_shards_yield_samples(
    split: bool, drop_last: bool, of_rank_0: list[int], of_rank_1: list[int]
) -> None:
    shards = [
        IterableDatasetShard(
            _Count(10), batch_size=2, drop_last=drop_last, num_processes=2, process_index=rank, split_batches=split
        )
        for rank in (0, 1)
    ]
    assert [list(shard) for shard in shards] == [of_rank_0, of_rank_1]
    with pytest.raises(TypeError):
        len(shards[0])  # the dataset has none


class _Shuffled(_Count):
    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.generator = torch.Generator()

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[int]:
        return iter(RandomSampler(range(self.num), generator=self.generator))


def test_iterable_dataset_shards_draw_one_order_for_each_epoch() -> None:
    shards = [IterableDatasetShard(_Shuffled(9), num_processes=2, process_index=rank) for rank in (0, 1)]
    for epoch in (0, 3):
        for shard in shards:
            shard.set_epoch(epoch)
        order = list(RandomSampler(range(9), generator=torch.Generator().manual_seed(epoch)))
        assert [list(shard) for shard in shards] == [order[0::2], [*order[1::2], order[0]]]
    assert [len(shard) for shard in shards] == [5, 5]
