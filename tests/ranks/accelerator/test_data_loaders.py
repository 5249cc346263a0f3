"""Prepared loaders and gather_for_metrics: the distribution of samples, each used exactly once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

from echelon import Accelerator, DataLoaderConfiguration
from echelon.data.sharding.sharded_batches import RankBatchSampler
from tests.harness import run_on_ranks


def _evaluate_all(split: bool, even: bool, sizes: list[int]) -> list[tuple[int, int]]:
    """Return the (n, batch) for which the gathered samples were not each sample once, in order."""
    wrong = []
    for n, batch in itertools.product(sizes, range(1, 8)):
        world = dist.get_world_size()
        if split and batch % world:
            continue
        if not even and _leaves_a_rank_without(n, batch, world, split):
            continue  # gathering is impossible
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=split, even_batches=even))
        loader = accelerator.prepare(DataLoader(torch.arange(n), batch_size=batch))  # type: ignore[arg-type]
        tensors, objects, nested = [], [], []
        for x in loader:
            tensors += accelerator.gather_for_metrics(x).tolist()
            if n % 7 == 0:  # fewer cases for the slower kinds
                objects += accelerator.gather_for_metrics([str(int(i)) for i in x])
                nested += accelerator.gather_for_metrics({"x": (x, x.float()[:, None])})["x"][1].squeeze(1).tolist()
        if tensors != list(range(n)) or (n % 7 == 0 and (nested != tensors or objects != [str(i) for i in range(n)])):
            wrong.append((n, batch))
    return wrong


def _leaves_a_rank_without(n: int, batch: int, world: int, split: bool) -> bool:
    if split:
        return 0 < n % batch < world
    return -(-n // batch) % world != 0


SIZES = [
    pytest.param([*range(1, 41)], id="all", marks=pytest.mark.soak),
    pytest.param([1, 7, 12, 23], id="some"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("world_size", "split", "even"),
    [(1, False, True), (2, False, True), (3, False, True), (2, True, True), (2, True, False), (2, False, False)],
)
def test_gather_for_metrics_returns_each_sample_exactly_once(
    world_size: int, split: bool, even: bool, sizes: list[int]
) -> None:
    assert run_on_ranks(_evaluate_all, split, even, sizes, world_size=world_size, timeout=240) == [[]] * world_size


def _deal(n: int, batch: int, world: int, **choices: Any) -> list[list[list[int]]]:
    source = BatchSampler(SequentialSampler(range(n)), batch, choices.pop("drop_last", False))
    even, split = choices.pop("even", True), choices.pop("split", False)
    dealt = [RankBatchSampler(source, world, r, split, even) for r in range(world)]
    divided = choices.pop("divided", False)
    assert not divided or [d.divide_last_step() for d in dealt] == [n % (batch if split else batch * world) > 0] * world
    result = [list(d) for d in dealt]
    if not split or divided:
        assert [len(d) for d in dealt] == [len(r) for r in result]
    return result


@pytest.mark.parametrize(
    ("n", "batch", "world", "choices", "expected"),
    [
        (12, 2, 3, {}, [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]),
        # As accelerate 1.15 fills the last round: the short batch first, then whole ones, the samples running on.
        (9, 2, 3, {}, [[[0, 1], [6, 7]], [[2, 3], [8, 0]], [[4, 5], [1, 2]]]),
        (1, 2, 2, {}, [[[0, 0]], [[0, 0]]]),
        (9, 2, 3, {"even": False}, [[[0, 1], [6, 7]], [[2, 3], [8]], [[4, 5]]]),
        (9, 2, 3, {"drop_last": True}, [[[0, 1]], [[2, 3]], [[4, 5]]]),
        (10, 4, 2, {"split": True}, [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]),
        (9, 2, 3, {"divided": True}, [[[0, 1], [6]], [[2, 3], [7]], [[4, 5], [8]]]),
        (11, 4, 2, {"divided": True}, [[[0, 1, 2, 3], [8], [10]], [[4, 5, 6, 7], [9], [0]]]),
        (12, 2, 3, {"divided": True}, [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]),
        (1, 2, 2, {"divided": True}, [[[0]], [[0]]]),
        (11, 4, 2, {"split": True, "divided": True}, [[[0, 1], [4, 5], [8], [10]], [[2, 3], [6, 7], [9], [0]]]),
        (11, 4, 2, {"split": True, "even": False}, [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]),
    ],
)
def test_batches_go_to_the_ranks_in_turn_or_are_cut(
    n: int, batch: int, world: int, choices: dict[str, Any], expected: list[list[list[int]]]
) -> None:
    assert _deal(n, batch, world, **choices) == expected


def _orders(kind: str) -> tuple[list[int], list[int], Any]:
    """Return the samples of two epochs in global order, and whether the rank's generator is unchanged."""
    torch.manual_seed(7 if dist.get_rank() == 0 else 1234)  # only rank 0 has the seed of the plain program
    config = DataLoaderConfiguration(use_seedable_sampler=kind == "seedable", data_seed=5)
    accelerator = Accelerator(dataloader_config=config)
    loader = accelerator.prepare(_plain_loader(kind))
    epochs = []
    for _ in range(2):
        epochs.append([i for (x,) in loader for i in accelerator.gather(x).tolist()])
    return epochs[0], epochs[1], len(loader)


def _plain_loader(kind: str) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(24))
    if kind == "sequential":
        return DataLoader(data, batch_size=4)
    if kind == "generator":
        return DataLoader(data, batch_size=4, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(3)))
    if kind == "own sampler":
        return DataLoader(data, batch_size=4, sampler=torch.utils.data.SubsetRandomSampler(range(24)))
    if kind == "own batches":
        return DataLoader(data, batch_sampler=[[5, 4, 3], [2, 1, 0], [9, 8], [7, 6]])
    return DataLoader(data, batch_size=4, shuffle=True)


@pytest.mark.parametrize("kind", ["sequential", "shuffled", "generator", "own sampler", "own batches", "seedable"])
def test_the_sample_order_matches_the_plain_program(kind: str) -> None:
    torch.manual_seed(7)
    loader = _plain_loader(kind)
    if kind == "seedable":
        expected = [torch.randperm(24, generator=torch.Generator().manual_seed(5 + e)).tolist() for e in range(2)]
    else:
        expected = [[i for (x,) in loader for i in x.tolist()] for _ in range(2)]
    if kind == "own batches":  # whole batches in turn, of different sizes: gather refuses, so look at one rank alone
        first = run_on_ranks(_first_rank_s_batches, world_size=2)
        assert first == [[[5, 4, 3], [9, 8]], [[2, 1, 0], [7, 6]]]
        return
    for first, second, steps in run_on_ranks(_orders, kind, world_size=2):
        assert [first, second] == expected
        assert steps == 3


def _first_rank_s_batches() -> list[list[int]]:
    return [x.tolist() for (x,) in Accelerator().prepare(_plain_loader("own batches"))]


def test_on_one_process_the_loader_reads_like_the_original() -> None:
    torch.manual_seed(7)
    expected = [x.tolist() for _ in range(2) for (x,) in _plain_loader("shuffled")]
    torch.manual_seed(7)
    loader = Accelerator().prepare(_plain_loader("shuffled"))
    assert [x.tolist() for _ in range(2) for (x,) in loader] == expected


def _collate(samples: list[Any]) -> torch.Tensor:
    return torch.stack([s[0] for s in samples]) * 10


def test_a_prepared_loader_keeps_the_users_settings() -> None:
    data = TensorDataset(torch.arange(6))
    plain = DataLoader(data, batch_size=3, collate_fn=_collate, drop_last=True)
    accelerator = Accelerator()
    loader = accelerator.prepare(plain)
    assert isinstance(loader, DataLoader)
    assert (loader.batch_size, loader.dataset, loader.collate_fn) == (3, data, _collate)
    assert loader.drop_last is True
    assert [x.tolist() for x in loader] == [[0, 10, 20], [30, 40, 50]]
    assert len(loader) == 2
    assert loader.total_batch_size == 3
    assert accelerator.prepare(loader) is loader
    assert accelerator.prepare(plain) is loader


def test_the_last_batch_is_detected_and_an_aborted_pass_is_forgotten() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(5), batch_size=2))  # type: ignore[arg-type]
    ends = [(accelerator.gradient_state.end_of_dataloader, accelerator.gradient_state.in_dataloader) for _ in loader]
    assert ends == [(False, True), (False, True), (True, True)]
    for _ in loader:
        break
    assert accelerator.gradient_state.in_dataloader is False
    assert accelerator.gradient_state.active_dataloader is None


def _workers() -> list[int]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(22), batch_size=3, num_workers=2, shuffle=True))  # type: ignore[arg-type]
    return [i for x in loader for i in accelerator.gather_for_metrics(x).tolist()]


def test_gather_for_metrics_is_exact_with_loader_workers() -> None:
    first, second = run_on_ranks(_workers, world_size=2)
    assert first == second
    assert sorted(first) == list(range(22))
