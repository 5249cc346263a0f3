"""Prepared loaders: skipping, saving in the middle of a pass, uneven ends, RNG states, pickling."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from echelon.accelerator.metrics import gather_samples
from echelon.accelerator.prepare.data_loaders import get_sampler, prepare_data_loader, skip_first_batches
from echelon.base.errors import DesyncError, UsageError
from echelon.data import rebuild_loader as rebuild
from echelon.data.rng.host_rng import synchronize_rng_states
from echelon.data.sharding.sample_order import SeedableRandomSampler
from echelon.world.world import World
from tests.harness import errors_on_ranks, run_on_ranks
from tests.reference import Numbers, NumberStream

# ---- skip_first_batches ------------------------------------------------------------------------------------------------


def _skip_all(world_matters: bool) -> list[Any]:
    wrong: list[Any] = []
    kinds = ["map", "stream", "dispatch", "dispatch map"]
    for kind, n, batch, drop_last, skip in itertools.product(kinds, [0, 1, 7, 12], [1, 3], [False, True], [0, 1, 2, 9]):
        data: Any = Numbers(n) if kind.endswith("map") else NumberStream(n)
        plain = DataLoader(data, batch_size=batch, drop_last=drop_last)
        loader = prepare_data_loader(plain, dispatch_batches=kind.startswith("dispatch"), put_on_device=True)
        whole = _all_ranks(loader)
        data.read = []
        skipping = skip_first_batches(loader, skip)
        twice = skip_first_batches(skip_first_batches(loader, skip), 1)
        gathered = _all_ranks(skipping)
        read = list(data.read)
        after, again = _all_ranks(twice), _all_ranks(loader)
        if gathered != whole[skip:] or after != whole[skip + 1 :] or again != whole:
            wrong.append((kind, n, batch, drop_last, skip, gathered, whole))
        if (
            kind == "map"
            and (dist.get_world_size() == 1 or n == 12)
            and len(set(read)) * dist.get_world_size() != sum(map(len, gathered))
        ):
            wrong.append((kind, n, batch, skip, "read", read))
        if (
            kind == "dispatch map"
            and dist.get_rank() == 0
            and read
            and min(read) < skip * batch * dist.get_world_size()
        ):
            wrong.append((kind, n, batch, skip, "read", read))
        if kind.endswith("map") and len(skipping) != len(gathered):
            wrong.append((kind, n, batch, skip, "len", len(skipping)))
        if skipping.drop_last is not drop_last or skipping.batch_size != batch:
            wrong.append((kind, n, batch, skip, "kept"))
    return wrong


def _all_ranks(loader: Any) -> list[list[int]]:
    """Return the new samples of all ranks for each step."""
    return [gather_samples(x, loader.last_step, world=World.current()).tolist() for x in loader]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_skipped_batches_of_a_prepared_loader_are_not_read(world_size: int) -> None:
    assert run_on_ranks(_skip_all, True, world_size=world_size) == [[]] * world_size


def test_skipped_batches_of_a_plain_loader_are_not_read() -> None:
    data = Numbers(10)
    plain = DataLoader(data, batch_size=3, drop_last=True, collate_fn=lambda x: sum(x))
    skipping = skip_first_batches(plain, 1)
    assert [int(x) for x in skipping] == [3 + 4 + 5, 6 + 7 + 8]
    assert data.read == [3, 4, 5, 6, 7, 8]
    assert (len(skipping), skipping.batch_size, skipping.drop_last, skipping.collate_fn) == (
        2,
        3,
        True,
        plain.collate_fn,
    )
    assert [int(x) for x in skip_first_batches(skipping, 1)] == [21]
    stream = skip_first_batches(DataLoader(NumberStream(5), batch_size=2), 1)
    assert [x.tolist() for x in stream] == [[2, 3], [4]]
    assert [x.tolist() for x in skip_first_batches(stream, 1)] == [[4]]
    assert [x.tolist() for x in stream] == [[2, 3], [4]]
    assert [int(x) for x in skip_first_batches(DataLoader(Numbers(3), batch_size=None), 1)] == [1, 2]


def test_skipping_keeps_the_order_of_a_shuffled_pass() -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Numbers(8), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(5))

    whole = [x.tolist() for x in loader()]
    assert [x.tolist() for x in skip_first_batches(loader(), 3)] == whole[3:]
    assert [x.tolist() for x in skip_first_batches(prepare_data_loader(loader()), 3)] == whole[3:]


# ---- use_stateful_dataloader -------------------------------------------------------------------------------------------


def _plain(kind: str, num_workers: int) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(22))
    common: dict[str, Any] = {"batch_size": 2, "num_workers": num_workers}
    if kind == "stream":
        return DataLoader(NumberStream(22), **common)
    if kind == "subset":
        return DataLoader(data, sampler=SubsetRandomSampler(range(22)), **common)
    if kind == "generator":
        return DataLoader(data, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(3)), **common)
    return DataLoader(data, shuffle=True, **common)


def _flat(batch: Any) -> list[int]:
    return (batch[0] if isinstance(batch, (list, tuple)) else batch).tolist()  # type: ignore[no-any-return]


def _resume(kind: str, num_workers: int, dispatch: bool) -> Any:
    def make() -> Any:
        return prepare_data_loader(
            _plain(kind, num_workers),
            use_stateful_dataloader=True,
            put_on_device=True,
            dispatch_batches=dispatch,
            use_seedable_sampler=kind == "seedable",
        )

    torch.manual_seed(11)
    loader = make()
    first_pass = [_flat(x) for x in loader]
    states, passes = [pickle.dumps(loader.state_dict())], []
    for x in loader:
        passes.append(_flat(x))
        states.append(pickle.dumps(loader.state_dict()))
    random = torch.get_rng_state()
    wrong = []
    for given, state in enumerate(states):
        if given not in (0, 1, len(passes) - 1, len(passes)):
            continue
        torch.manual_seed(99)  # the process that resumes has another state
        new = make()
        if given == 0:  # after a whole pass: the next one
            torch.set_rng_state(random)
            new.load_state_dict(pickle.loads(state))
            if new.iteration != 1:
                wrong.append(("epoch", new.iteration))
            continue
        new.load_state_dict(pickle.loads(state))
        rest = [_flat(x) for x in new] if given < len(passes) else []
        if rest != passes[given:] or new.iteration != 2:
            wrong.append((given, rest, passes, new.iteration))
    return wrong, sorted(i for x in first_pass for i in x)


@pytest.mark.parametrize("kind", ["shuffle", "generator", "subset", "seedable", "stream"])
def test_a_saved_pass_resumes_at_its_position(kind: str) -> None:
    for wrong, seen in run_on_ranks(_resume, kind, 0, False, world_size=1):
        assert wrong == []
        assert seen == list(range(22))
    both = run_on_ranks(_resume, kind, 0, False)
    assert [wrong for wrong, _ in both] == [[], []]
    assert set(both[0][1] + both[1][1]) == set(range(22))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "num_workers", "dispatch"),
    [("shuffle", 2, False), ("stream", 2, False), ("shuffle", 0, True), ("stream", 0, True)],
)
def test_a_saved_pass_resumes_with_workers_and_dispatch(kind: str, num_workers: int, dispatch: bool) -> None:
    assert [wrong for wrong, _ in run_on_ranks(_resume, kind, num_workers, dispatch)] == [[], []]


def test_the_error_for_missing_torchdata_shows_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name="torchdata")

    monkeypatch.setattr("echelon.base.optional.import_module", missing)
    with pytest.raises(ImportError, match='pip install "torchdata>='):
        rebuild.stateful_loader()


def test_the_state_of_a_loader_without_saving_support_is_an_error() -> None:
    loader = prepare_data_loader(DataLoader(Numbers(3)))
    with pytest.raises(UsageError, match="use_stateful_dataloader=True"):
        loader.state_dict()


# ---- uneven ends -------------------------------------------------------------------------------------------------------


def _uneven(joined: bool) -> list[int]:
    loader = prepare_data_loader(DataLoader(Numbers(5), batch_size=1), even_batches=False)
    loader.active.joined = joined
    given = []
    for x in loader:
        loader.require_every_rank("backward()")
        given.append(int(x))
    return given


def test_error_names_the_rank_that_ended_early() -> None:
    (text,) = errors_on_ranks(DesyncError, _uneven, False)
    assert "backward() in step 3 of this pass would hang, because rank 1 ended after at most 2 batches" in text
    assert "join_uneven_inputs" in text
    assert run_on_ranks(_uneven, True) == [[0, 2, 4], [1, 3]]


class Parted(IterableDataset[Any]):
    """Two shards of 5 and 2 samples, like Hugging Face's iterable datasets."""

    n_shards = 2

    def __init__(self, sizes: tuple[int, ...] = (5, 2)) -> None:
        self.sizes = sizes

    def shard(self, num_shards: int, index: int) -> Any:
        return Parted(self.sizes[index::num_shards])

    def __iter__(self) -> Iterator[Any]:
        yield from (torch.tensor(i) for size in self.sizes for i in range(size))


UNEVEN: dict[str, Callable[[], tuple[DataLoader[Any], dict[str, Any]]]] = {
    "indexed": lambda: (DataLoader(Numbers(8), batch_size=3), {}),
    "loader workers": lambda: (DataLoader(Numbers(8), batch_size=3, num_workers=1), {}),
    "split": lambda: (DataLoader(Numbers(5), batch_size=4), {"split_batches": True}),
    "batch sampler": lambda: (DataLoader(Numbers(6), batch_sampler=[[0, 1], [2], [3, 4, 5]]), {}),
    "stream": lambda: (DataLoader(NumberStream(5), batch_size=2), {}),
    "stream, loader worker": lambda: (DataLoader(NumberStream(5), batch_size=2, num_workers=1), {}),
    "stream of ready batches": lambda: (DataLoader(NumberStream(5), batch_size=None), {}),
    "dispatched": lambda: (DataLoader(NumberStream(5), batch_size=2), {"dispatch_batches": True}),
    "own shards": lambda: (DataLoader(Parted(), batch_size=2), {}),
    "sharded already": lambda: (DataLoader(Numbers(7), batch_size=1, sampler=Own(7)), {"already_sharded": True}),
}


class Own(torch.utils.data.Sampler[int]):
    """Every second sample."""

    def __init__(self, n: int) -> None:
        self.mine = range(n)[dist.get_rank() :: 2]

    def __len__(self) -> int:
        return len(self.mine)

    def __iter__(self) -> Iterator[int]:
        return iter(self.mine)


def _ends(kind: str, skip: int) -> list[Any]:
    loader, choices = UNEVEN[kind]()
    found = []
    for even in (False, True):
        prepared = prepare_data_loader(loader, even_batches=even, **choices)
        for _ in range(2):
            pass_of = skip_first_batches(prepared, skip) if skip else prepared
            found.append([(pass_of.end_of_dataloader, pass_of.ends_early) for _ in pass_of])
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", UNEVEN)
def test_a_rank_detects_in_its_last_batch_that_other_ranks_have_more(kind: str) -> None:
    for skip in (0, 1):
        zero, one = run_on_ranks(_ends, kind, skip)
        for first, second in zip(zero, one):
            assert all(pair == (False, False) for pair in [*first[:-1], *second[:-1]])
            assert not first or first[-1] == (True, False)
            assert not second or second[-1] == (True, len(first) > len(second))
        assert all(len(first) > len(second) for first, second in zip(zero[:2], one[:2]))
        assert [len(first) for first in zero[2:]] == [len(second) for second in one[2:]]


def _even_again() -> Any:
    loader = prepare_data_loader(DataLoader(Numbers(5), batch_size=1))
    lengths = []
    for even in (False, True):
        loader.even_batches = even
        assert loader.batch_sampler.even_batches is even
        lengths.append((len(loader), len(list(loader))))
    return lengths


def test_even_batches_can_be_changed_between_passes() -> None:
    assert run_on_ranks(_even_again) == [[(3, 3), (3, 3)], [(2, 2), (3, 3)]]


# ---- other attributes of loaders ------------------------------------------------------------------------------------------


def _rng() -> Any:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(rank)
    synchronize_rng_states(["torch", "generator"], generator)
    after = (torch.rand(()).item(), torch.rand((), generator=generator).item())
    torch.manual_seed(rank)
    loader = prepare_data_loader(DataLoader(Numbers(2), batch_size=1), rng_types=["torch", "generator"])
    in_pass = [torch.rand(()).item() for _ in loader]
    with pytest.raises(UsageError, match="nonsense"):
        synchronize_rng_states(["nonsense"])
    return after, in_pass


def test_rng_states_are_copied_from_rank_zero() -> None:
    first, second = run_on_ranks(_rng)
    assert first == second
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_()  # drawn by the DataLoader at the start of a pass
    assert first[1] == [torch.rand(()).item()]


def _samplers() -> Any:
    data = TensorDataset(torch.arange(8))
    loader = prepare_data_loader(DataLoader(data, batch_size=2, shuffle=True), use_seedable_sampler=True, data_seed=4)
    assert type(loader.batch_sampler.batch_sampler.sampler) is SeedableRandomSampler
    assert type(get_sampler(loader)) is SeedableRandomSampler
    loader.set_sampler(SequentialSampler(data))
    own = [x.tolist() for (x,) in loader]
    batches = BatchSampler(SequentialSampler(data), 2, False)
    ready = prepare_data_loader(DataLoader(data, sampler=batches, batch_size=None, collate_fn=lambda x: x[0]))
    given = prepare_data_loader(DataLoader(data, batch_sampler=batches))
    given.set_sampler(range(7, -1, -1))
    whole = prepare_data_loader(DataLoader(data, batch_sampler=[[0, 1], [2, 3]]))
    assert whole.batch_sampler.batch_sampler == [[0, 1], [2, 3]]
    return own, [x.tolist() for x in ready], [x.tolist() for (x,) in given], (ready.total_batch_size, len(ready))


def test_samplers_can_be_read_and_replaced() -> None:
    first, second = run_on_ranks(_samplers)
    assert first == ([[0, 1], [4, 5]], [[0, 1], [4, 5]], [[7, 6], [3, 2]], (4, 2))
    assert second == ([[2, 3], [6, 7]], [[2, 3], [6, 7]], [[5, 4], [1, 0]], (4, 2))


def _pickled() -> Any:
    seen = []
    for kind, stateful in itertools.product(["shuffle", "stream"], [False, True]):
        for dispatch in (False, True):
            torch.manual_seed(1)
            loader = prepare_data_loader(
                _plain(kind, 0), dispatch_batches=dispatch, put_on_device=True, use_stateful_dataloader=stateful
            )
            torch.manual_seed(1)
            copy = pickle.loads(pickle.dumps(loader))
            assert type(copy) is type(loader)
            assert copy.batch_size == 2
            assert copy.collate_fn is default_collate
            both = []
            for each in (loader, copy):
                torch.manual_seed(1)
                both.append([_flat(x) for x in each])
            seen.append(both[0] == both[1] and len(both[0]) == 6)
    return seen


def test_prepared_loaders_pickle() -> None:
    assert run_on_ranks(_pickled) == [[True] * 8] * 2
