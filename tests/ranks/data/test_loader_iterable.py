"""Iterable datasets on several ranks: sharded by sample, dispatched, or with their own shards; each sample exactly once."""

from __future__ import annotations

import itertools
from collections import UserDict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from echelon.accelerator.metrics import gather_samples
from echelon.accelerator.prepare.data_loaders import prepare_data_loader
from echelon.base.errors import DesyncError, UsageError
from echelon.data.loader import DispatchedLoader, PreparedLoader
from echelon.world.world import World
from tests.harness import errors_on_ranks, run_on_ranks
from tests.reference import EpochStream

Pair = namedtuple("Pair", ["x", "name"])


class Shards(IterableDataset[Any]):
    """Has shards like Hugging Face's iterable datasets."""

    def __init__(self, shards: list[list[int]]) -> None:
        self.shards = shards

    @property
    def n_shards(self) -> int:
        return len(self.shards)

    def shard(self, num_shards: int, index: int) -> Shards:
        return Shards(self.shards[index::num_shards])

    def __iter__(self) -> Iterator[Any]:
        yield from (torch.tensor(i) for shard in self.shards for i in shard)


def _once(loader: PreparedLoader) -> tuple[list[int], int]:
    """Return the values that a pass gathers, and the number of this rank's steps."""
    gathered, steps = [], 0
    for x in loader:
        steps += 1
        gathered += gather_samples(x, loader.last_step, world=World.current()).tolist()
    return gathered, steps


def _prepare(loader: DataLoader[Any], **choices: Any) -> Any:
    return prepare_data_loader(loader, **choices)


# ---- dealt -------------------------------------------------------------------------------------------------------------


def _read_all(dispatches: bool, split: bool, drop_last: bool, even: bool, sizes: list[int]) -> list[Any]:
    """Return the (n, batch) where the pass was wrong; if dispatched, rank zero alone has the data."""
    world, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    for n, batch in itertools.product(sizes, range(1, 5)):
        if split and batch % world:
            continue
        data = EpochStream(0 if dispatches and rank else n)
        loader = _prepare(
            DataLoader(data, batch_size=batch, drop_last=drop_last),
            split_batches=split,
            even_batches=even,
            put_on_device=dispatches,
        )
        assert (type(loader) is DispatchedLoader) == (dispatches and world > 1)
        whole = batch if split else batch * world
        rest = 0 if drop_last else n % whole
        leaves_ranks_idle = 0 < rest < world and not even
        expected = list(range(n - n % whole if drop_last or leaves_ranks_idle else n))
        num_steps = n // whole + bool(rest and not (leaves_ranks_idle and rank >= rest))
        length = n // whole + bool(rest) if dispatches else num_steps
        gathered, mine = [], []
        for x in loader:
            mine.append(x.tolist())
            if loader.last_step is None or min(loader.last_step.sizes) > 0:
                gathered += gather_samples(x, loader.last_step, world=World.current()).tolist()
        is_full = world > 1 and not dispatches and (even or not rest)
        if is_full and any(len(x) != whole // world for x in mine):
            wrong.append((n, batch, "sizes", mine))
        if gathered != expected or len(mine) != num_steps or len(loader) != length:
            wrong.append((n, batch, gathered, len(mine), len(loader)))
        if dispatches and (data.num_read != (0 if rank else n) or loader.total_dataset_length != n):
            wrong.append((n, batch, "read", data.num_read))
    return wrong


CHOICES = [choices for choices in itertools.product([False, True], repeat=3) if choices[1:] != (True, False)]
"""split_batches, drop_last, even_batches."""
SIZES = [pytest.param([*range(21)], id="all", marks=pytest.mark.soak), pytest.param([0, 1, 2, 7, 12, 17], id="some")]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sharded_samples_are_read_exactly_once(world_size: int, sizes: list[int]) -> None:
    for choices in CHOICES:
        assert run_on_ranks(_read_all, False, *choices, sizes, world_size=world_size) == [[]] * world_size


def _first_pieces() -> list[Any]:
    """Return the expected batches: slices of global batches, with the last one completed from the first, like accelerate."""
    return [x.tolist() for x in _prepare(DataLoader(EpochStream(10), batch_size=3))]


def test_local_batches_are_slices_of_global_batches() -> None:
    assert run_on_ranks(_first_pieces) == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 0, 1]]]


def _with_workers(even: bool) -> Any:
    loader = _prepare(DataLoader(EpochStream(23), batch_size=2, num_workers=2), even_batches=even)
    epochs = []
    for _ in range(2):
        epochs.append(_once(loader))
    return epochs


@pytest.mark.parametrize("even", [True, False])
def test_loader_workers_with_incomplete_batches_are_exact(even: bool) -> None:
    # The workers read 12 and 11 samples, so the incomplete batch of the second is in the middle or at the end of the pass.
    for (first, steps), (second, _) in run_on_ranks(_with_workers, even):
        assert sorted(first) == list(range(23))
        assert sorted(second) == list(range(100, 123))
        assert steps == 6


class Shuffled(IterableDataset[Any]):
    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[Any]:
        yield from torch.randperm(12, generator=self.generator)


def _same_randomness(num_workers: int) -> Any:
    torch.manual_seed(dist.get_rank())  # the ranks' own seeds differ
    generator = torch.Generator().manual_seed(7 + dist.get_rank()) if num_workers == 0 else None
    loader = _prepare(DataLoader(Shuffled(generator), batch_size=3, num_workers=num_workers))
    before = torch.get_rng_state()
    gathered = _once(loader)[0]
    return gathered, num_workers == 0 and bool(torch.equal(before, torch.get_rng_state()))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_shuffling_stream_has_the_same_order_on_all_ranks(num_workers: int) -> None:
    first, second = run_on_ranks(_same_randomness, num_workers)
    assert first[0] == second[0]
    assert sorted(first[0]) == list(range(12))
    if num_workers == 0:
        assert first[0] == torch.randperm(12, generator=torch.Generator().manual_seed(7)).tolist()


class Batches(IterableDataset[Any]):
    """Yields complete batches of unequal size."""

    def __iter__(self) -> Iterator[Any]:
        yield from torch.arange(15).split([3, 2, 3, 3, 4])


def _ready_batches(even: bool, dispatch: bool) -> Any:
    if dispatch:
        loader = _prepare(DataLoader(Batches(), batch_size=None), dispatch_batches=True, put_on_device=True)
        return _once(loader)
    loader = _prepare(DataLoader(Batches(), batch_size=None), even_batches=even)
    if even:
        return _once(loader)
    return [x.tolist() for x in loader], len(list(loader))


def test_a_dataset_that_yields_batches_is_sharded() -> None:
    assert run_on_ranks(_ready_batches, True, False) == [(list(range(15)), 3)] * 2
    assert run_on_ranks(_ready_batches, True, True) == [(list(range(15)), 3)] * 2
    first, second = run_on_ranks(_ready_batches, False, False)
    assert first == ([[0, 1, 2], [5, 6, 7], [11, 12, 13, 14]], 3)
    assert second == ([[3, 4], [8, 9, 10]], 2)


# ---- shards of its own -------------------------------------------------------------------------------------------------


def _read_shards(shards: list[list[int]], **choices: Any) -> Any:
    loader = _prepare(DataLoader(Shards(shards), batch_size=2, drop_last=choices.pop("drop_last", False)), **choices)
    mine, gathered = [], []
    for x in loader:
        mine.append(x.tolist())
        if loader.last_step is None or min(loader.last_step.sizes) > 0:
            gathered += gather_samples(x, loader.last_step, world=World.current()).tolist()
    return mine, gathered


def test_a_dataset_with_shards_gives_each_rank_its_own_shards() -> None:
    shards = [[0, 1, 2], [10], [3, 4]]
    (first, gathered), (second, again) = run_on_ranks(_read_shards, shards)
    assert first == [[0, 1], [2, 3], [4]]
    assert second == [[10], [10], [10]]  # repeated, so that the rank has the same number of steps
    assert gathered == again == [0, 1, 10, 2, 3, 4]
    (first, _), (second, _) = run_on_ranks(_read_shards, shards, even_batches=False)
    assert (first, second) == ([[0, 1], [2, 3], [4]], [[10]])
    (first, gathered), (second, _) = run_on_ranks(_read_shards, shards, drop_last=True)
    assert (first, second, gathered) == ([], [], [])
    # With too few shards, samples are distributed.
    (first, gathered), (second, _) = run_on_ranks(_read_shards, [[0, 1, 2, 3, 4]])
    assert (first, second, gathered) == ([[0, 1], [4, 0]], [[2, 3], [1, 2]], [0, 1, 2, 3, 4])


def test_an_error_names_a_rank_without_samples() -> None:
    for text in errors_on_ranks(UsageError, _read_shards, [[0, 1], []]):
        assert "rank 1 has no samples in its shards" in text


# ---- dispatched --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_dispatched_samples_are_used_once_and_read_by_rank_zero_only(world_size: int, sizes: list[int]) -> None:
    for choices in CHOICES:
        assert run_on_ranks(_read_all, True, *choices, sizes, world_size=world_size, timeout=30) == [[]] * world_size


def _dispatch_map(shuffle: bool) -> Any:
    torch.manual_seed(3)
    data = TensorDataset(torch.arange(11)) if dist.get_rank() == 0 else TensorDataset(torch.arange(1))
    plain: DataLoader[Any] = DataLoader(data, batch_size=2, shuffle=shuffle, num_workers=2 if shuffle else 0)
    loader = _prepare(plain, dispatch_batches=True, put_on_device=True)
    return [
        [i for (x,) in loader for i in gather_samples(x, loader.last_step, world=World.current()).tolist()]
        for _ in range(2)
    ], (
        loader.total_batch_size,
        len(loader),
    )


@pytest.mark.parametrize("shuffle", [False, True])
def test_dispatched_data_has_the_order_of_the_plain_program(shuffle: bool) -> None:
    torch.manual_seed(3)
    plain: DataLoader[Any] = DataLoader(
        TensorDataset(torch.arange(11)), batch_size=2, shuffle=shuffle, num_workers=2 if shuffle else 0
    )
    expected = [[i for (x,) in plain for i in x.tolist()] for _ in range(2)]
    assert run_on_ranks(_dispatch_map, shuffle) == [(expected, (4, 3))] * 2


class Rich(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from range(5)


def _rich_collate(kind: str) -> Any:
    def collate(samples: list[int]) -> Any:
        x = torch.tensor(samples)
        if kind == "plain":
            flags, names = x % 2 == 0, [f"n{i}" for i in samples]
            return {"x": x, 3: (x.to(torch.int16), flags), "name": names, "half": x.half()[:, None], "none": None}
        if kind == "objects":
            return UserDict({"x": x, "set": [frozenset({i}) for i in samples]})
        if kind == "dicts":
            return [{"i": i, "text": "t" * i} for i in samples]
        return Pair(x, tuple(f"n{i}" for i in samples))

    return collate


def _rich(kind: str) -> Any:
    loader = _prepare(
        DataLoader(Rich(), batch_size=1, collate_fn=_rich_collate(kind)), dispatch_batches=True, put_on_device=True
    )
    return list(loader)


@pytest.mark.parametrize("kind", ["plain", "objects", "dicts", "named"])
def test_dispatched_batches_keep_their_structure(kind: str) -> None:
    world = run_on_ranks(_rich, kind)
    for rank in range(2):
        assert len(world[rank]) == 3
        for step, batch in enumerate(world[rank]):
            i = (2 * step + rank) % 5
            expected = _rich_collate(kind)([i])
            assert type(batch) is type(expected)
            assert repr(batch) == repr(expected)
            if kind == "plain":
                assert [batch[3][0].dtype, batch[3][1].dtype, batch["half"].dtype] == [
                    torch.int16,
                    torch.bool,
                    torch.float16,
                ]


class Target:
    """An object of a batch, with tensors of its own."""

    def __init__(self, i: int) -> None:
        self.parameter = torch.nn.Parameter(torch.ones(1) * i)
        self.input = torch.ones(1, requires_grad=True)
        self.sparse = torch.eye(2).to_sparse()


def _objects() -> list[Any]:
    loader = _prepare(
        DataLoader(
            Rich(), batch_size=1, collate_fn=lambda samples: {"x": [torch.ones(1)], "of": [*map(Target, samples)]}
        ),
        dispatch_batches=True,
        put_on_device=True,
    )
    targets = [batch["of"][0] for batch in loader]
    return [(type(one.parameter), one.input.requires_grad, one.sparse.layout) for one in targets]


def test_dispatched_objects_keep_their_tensors() -> None:
    assert run_on_ranks(_objects) == [[(torch.nn.Parameter, True, torch.sparse_coo)] * 3] * 2


def _own_slices() -> Any:
    def cut(batch: Any, part: slice, process_index: int, num_processes: int) -> Any:
        return batch[part] * 10 + process_index

    loader = _prepare(
        DataLoader(EpochStream(4), batch_size=2),
        dispatch_batches=True,
        put_on_device=True,
        slice_fn_for_dispatch=cut,
    )
    return [x.tolist() for x in loader]


def test_the_users_slice_fn_is_used() -> None:
    assert run_on_ranks(_own_slices) == [[[0, 10]], [[21, 31]]]


class Broken(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(2)
        yield torch.zeros(2)
        yield torch.zeros(3)
        raise RuntimeError("the disk is gone")


def _read_broken(batch_size: int) -> str:
    try:
        list(_prepare(DataLoader(Broken(), batch_size=batch_size), dispatch_batches=True, put_on_device=True))
    except (RuntimeError, UsageError, DesyncError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_error_on_rank_zero_reaches_all_ranks() -> None:
    first, second = run_on_ranks(_read_broken, 1)
    assert first.startswith("RuntimeError: the disk is gone")
    assert "rank zero failed to read the next batch: RuntimeError: the disk is gone" in second
    assert second.startswith("DesyncError")


class Ragged(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(2)
        yield torch.zeros(3)


def _read_ragged() -> str:
    with pytest.raises((UsageError, DesyncError)) as caught:
        list(_prepare(DataLoader(Ragged(), batch_size=1), dispatch_batches=True, put_on_device=True))
    return str(caught.value)


def test_an_error_shows_batches_that_cannot_be_joined() -> None:
    first, second = run_on_ranks(_read_ragged)
    for text in (first, second):
        assert "they differ in more than their length" in text
        assert "float32[1, 2]" in text
        assert "float32[1, 3]" in text


def _no_split() -> str:
    with pytest.raises(UsageError) as caught:
        _prepare(DataLoader(EpochStream(4), batch_size=3), split_batches=True, put_on_device=True)
    return str(caught.value)


def test_an_indivisible_batch_is_rejected_before_the_first_step() -> None:
    assert all("but got batch_size=3" in text for text in run_on_ranks(_no_split))


def _epochs(dispatch: bool) -> Any:
    loader = _prepare(DataLoader(EpochStream(2), batch_size=1), dispatch_batches=dispatch, put_on_device=True)
    seen = [[x.tolist() for x in loader] for _ in range(2)]
    for _ in loader:
        break  # an incomplete pass does not advance the epoch
    seen.append([x.tolist() for x in loader])
    loader.set_epoch(7)
    seen.append([x.tolist() for x in loader])
    return seen, loader.iteration, loader.active.loaders


@pytest.mark.parametrize("dispatch", [False, True])
def test_the_epoch_reaches_the_dataset(dispatch: bool) -> None:
    for rank, (seen, iteration, reading) in enumerate(run_on_ranks(_epochs, dispatch)):
        assert seen == [[[rank]], [[100 + rank]], [[200 + rank]], [[700 + rank]]]
        assert iteration == 8
        assert reading == []
