"""Exact modes, index arithmetic only: every update has the samples that one process would give it, on any ranks."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings, strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from echelon.base.errors import UsageError
from echelon.data.exact.exact_batches import ExactBatches, ExactOptions, UpdateSplitter, make_order
from echelon.data.global_batch_slices import PassPlan


def _one_process(n: int, batch_size: int, drop_last: bool, seed: int, epoch: int) -> list[list[int]]:
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    batches = [order[i : i + batch_size] for i in range(0, n, batch_size)]
    return [batch for batch in batches if not drop_last or len(batch) == batch_size]


def _ranks(n: int, batch_size: int, drop_last: bool, *, world_size: int, options: ExactOptions) -> list[ExactBatches]:
    batches = BatchSampler(RandomSampler(range(n)), batch_size, drop_last)
    order = make_order(batches, range(n), options, alone=True)
    return [
        ExactBatches(order, UpdateSplitter(rank=rank, world_size=world_size, options=options, batch_size=batch_size))
        for rank in range(world_size)
    ]


def _read_updates(
    ranks: list[ExactBatches], plan: PassPlan, epoch: int, start: int, limit: int
) -> tuple[list[list[int]], int]:
    """Return the samples of up to ``limit`` updates, each in the order of the data, and where the pass goes on."""
    passes = []
    for one in ranks:
        one.epoch, one.start, one.plan = epoch, start, plan
        passes.append(zip(iter(one), iter(lambda one=one: one.ahead.popleft(), None)))  # type: ignore[misc]
    updates: list[list[int]] = []
    placed: list[tuple[int, int]] = []
    position = start
    while len(updates) < limit:
        step = [next(steps, None) for steps in passes]
        if step[0] is None:
            assert step == [None] * len(ranks), "a rank made more micro-steps than rank zero"
            break
        shares = []
        for entry in step:
            assert entry is not None, "a rank made fewer micro-steps than rank zero"
            piece, contribution = entry
            assert 1 <= len(piece) == len(contribution.samples)
            assert contribution.ends_update == step[0][1].ends_update
            shares.append(contribution.num_items)
            if not contribution.is_padding:
                placed += zip(contribution.samples, piece)
            assert set(contribution.samples) <= set(contribution.update), "a loan comes from the same update"
        if contribution.step is None:
            assert len(set(shares)) == 1
        else:
            assert contribution.step.real == shares
        if contribution.ends_update:
            assert sorted(p for p, _ in placed) == list(contribution.update), "each position once"
            updates.append([index for _, index in sorted(placed)])
            placed, position = [], contribution.next_position
    return updates, position


@pytest.mark.slow
@settings(max_examples=300, deadline=None, database=None, derandomize=True, phases=[Phase.generate, Phase.shrink])
@given(data=st.data())
def test_updates_are_those_of_one_process_also_when_the_number_of_ranks_changes(data: Any) -> None:
    _check_updates(data)


@pytest.mark.soak
@settings(max_examples=20_000, deadline=None, database=None)
@given(data=st.data())
def test_updates_are_those_of_one_process_in_many_more_cases(data: Any) -> None:
    _check_updates(data)


def _check_updates(data: Any) -> None:
    n, batch_size = data.draw(st.integers(1, 40), "n"), data.draw(st.integers(1, 20), "batch size")
    drop_last, seed = data.draw(st.booleans(), "drop_last"), data.draw(st.integers(0, 2**40), "seed")
    options = ExactOptions(
        seed=seed, max_micro_batch_size=data.draw(st.none() | st.integers(1, 5), "max micro batch size")
    )
    for epoch in range(data.draw(st.integers(1, 2), "epochs")):
        found: list[list[int]] = []
        position = 0
        while True:
            world_size = data.draw(st.integers(1, 6) | st.sampled_from([8, 13, 64]), "world size")
            plan = PassPlan(num_micro_steps=data.draw(st.integers(1, 4), "accumulation"))
            ranks = _ranks(n, batch_size, drop_last, world_size=world_size, options=options)
            stop_after = data.draw(st.integers(1, 4), "updates until the next change")
            updates, position = _read_updates(ranks, plan, epoch, position, stop_after)
            found += updates
            if len(updates) < stop_after:
                break
        assert found == _one_process(n, batch_size, drop_last, seed, epoch)


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(
    st.integers(0, 60),
    st.integers(1, 20),
    st.integers(1, 9),
    st.integers(1, 4),
    st.none() | st.integers(1, 5),
    st.booleans(),
)
def test_length_is_the_number_of_micro_steps(
    n: int, batch_size: int, world_size: int, accumulation: int, most: int | None, drop_last: bool
) -> None:
    options = ExactOptions(seed=0, max_micro_batch_size=most)
    batches = BatchSampler(SequentialSampler(range(n)), batch_size, drop_last)
    order = make_order(batches, range(n), options, alone=True)
    for rank in range(world_size):
        one = ExactBatches(
            order, UpdateSplitter(rank=rank, world_size=world_size, options=options, batch_size=batch_size)
        )
        for one.plan in (PassPlan(num_micro_steps=accumulation), PassPlan(trains=False)):
            pieces = list(one)
            assert len(pieces) == len(one)
            if most is not None:
                assert max(map(len, pieces), default=0) <= most


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 9), st.none() | st.integers(1, 5))
def test_evaluation_gives_the_order_of_the_data_step_by_step(
    n: int, batch_size: int, world_size: int, most: int | None
) -> None:
    options = ExactOptions(seed=0, max_micro_batch_size=most)
    batches = BatchSampler(SequentialSampler(range(n)), batch_size, drop_last=False)
    ranks = []
    for rank in range(world_size):
        order = make_order(batches, range(n), options, alone=True)
        one = ExactBatches(
            order, UpdateSplitter(rank=rank, world_size=world_size, options=options, batch_size=batch_size)
        )
        one.plan = PassPlan(trains=False)
        ranks.append((iter(one), one.ahead))
    gathered = []
    while True:
        step = [(next(pieces, None), ahead) for pieces, ahead in ranks]
        if step[0][0] is None:
            break
        for piece, ahead in step:
            assert piece is not None
            contribution = ahead.popleft()
            if most is None:  # batches are joined until every rank has a sample, and no rank gets much more than usual
                assert contribution.is_padding == (n < world_size and contribution.num_items == 0)
                assert len(piece) <= -(-batch_size // world_size) + 1
            gathered += piece[: contribution.num_items]
    assert gathered == list(range(n))


def test_share_of_a_rank_differs_by_one_sample_at_most() -> None:
    options = ExactOptions(seed=0)
    totals = []
    for one in _ranks(11, 11, False, world_size=4, options=options):
        one.plan = PassPlan(num_micro_steps=2)
        pieces = list(one)
        totals.append(sum(c.num_items for c in one.ahead))
        assert len(pieces) == 2
    assert totals == [3, 3, 3, 2]


def _drawn(sampler: Any, n: int, batch_size: int = 4, *, start: int = 0) -> list[list[int]]:
    options = ExactOptions(seed=0)
    order = make_order(BatchSampler(sampler, batch_size, drop_last=False), range(n), options, alone=True)
    one = ExactBatches(order, UpdateSplitter(rank=0, world_size=1, options=options, batch_size=batch_size))
    one.start = start
    return [list(piece) for piece in one]


def test_a_custom_sampler_keeps_its_order_and_can_be_resumed_anywhere() -> None:
    odd_first = [1, 3, 5, 7, 0, 2, 4, 6, 8]
    assert _drawn(odd_first, 9) == [[1, 3, 5, 7], [0, 2, 4, 6], [8]]
    assert _drawn(odd_first, 9, start=4) == [[0, 2, 4, 6], [8]]


@pytest.mark.parametrize("index", [-1, 9])
def test_index_outside_the_dataset_is_refused(index: int) -> None:
    with pytest.raises(UsageError, match=f"yielded the index {index}, but the dataset has 9 samples"):
        _drawn([0, 1, index], 9)


def test_repeated_indices_warn_unless_the_sampler_draws_with_replacement() -> None:
    with pytest.warns(UserWarning, match="repeated 2 of 5 samples in one pass"):
        _drawn([0, 1, 1, 2, 0], 9)
    weighted = WeightedRandomSampler([1.0, 1.0], 5, replacement=True)
    assert sum(len(piece) for piece in _drawn(weighted, 2)) == 5  # warnings are errors


def test_a_dataset_that_changes_its_length_is_rejected() -> None:
    data = list(range(9))
    options = ExactOptions(seed=0)
    loader = DataLoader(data, batch_size=4, shuffle=True)  # type: ignore[arg-type]
    order = make_order(loader.batch_sampler, data, options, alone=True)
    one = ExactBatches(order, UpdateSplitter(rank=0, world_size=1, options=options, batch_size=4))
    assert len(list(one)) == 3
    data.append(9)
    with pytest.raises(UsageError, match="had 9 samples when its loader was prepared, but now has 10"):
        list(one)


def test_seeking_far_into_an_order_is_immediate() -> None:
    n = 10**12
    options = ExactOptions(seed=3, order="feistel")
    sampler = RandomSampler(range(n))  # its own order is never drawn
    order = make_order(BatchSampler(sampler, 8, drop_last=False), range(n), options, alone=True)
    one = ExactBatches(order, UpdateSplitter(rank=1, world_size=2, options=options, batch_size=8))
    one.start = n - 16
    last = [list(piece) for piece in islice(one, 4)]
    assert [len(piece) for piece in last] == [4, 4]
    assert all(0 <= index < n for piece in last for index in piece)
