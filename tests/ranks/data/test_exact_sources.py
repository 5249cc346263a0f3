"""``parity="exact"``: the samples of each update for every kind of dataset, against the batches of a plain DataLoader."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from echelon import Accelerator, DataLoaderConfiguration
from echelon.base.errors import DesyncError, UsageError
from echelon.base.warnings import EchelonWarning
from tests.harness import run_on_ranks
from tests.prepared_loop import all_warnings
from tests.reference import EpochStream, Numbers, batches_of, permutation

_SEED = 11


class StreamWithState(EpochStream):
    """Has a state dict with its position, and can seek without reading."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def __iter__(self) -> Iterator[Any]:
        while self.position < self.n:
            self.position += 1
            self.num_read += 1
            yield torch.tensor(self.position - 1 + 100 * self.epoch)
        self.position = 0


class NoisyStream(StreamWithState):
    """A stream whose samples contain random draws."""

    def __iter__(self) -> Iterator[Any]:
        for x in super().__iter__():
            yield torch.stack([x.double(), torch.rand((), dtype=torch.float64) + random.random() + np.random.rand()])


def _accelerator(*, accumulation: int = 1, max_micro: int | None = None, **choices: Any) -> Accelerator:
    return Accelerator(
        parity="exact",
        gradient_accumulation_steps=accumulation,
        max_micro_batch_size=max_micro,
        dataloader_config=DataLoaderConfiguration(data_seed=_SEED, **choices),
    )


def _mine(loader: Any, batch: torch.Tensor) -> list[Any]:
    """Return the samples of this rank in the batch, without padding samples."""
    last = loader.last_step
    items: list[Any] = batch.tolist()
    return items if last is None else items[: last.real[dist.get_rank()]]


def _read_pass(accelerator: Accelerator, loader: Any, *, stop_after: int | None = None) -> list[list[Any]]:
    """Return this rank's samples of each update of a pass, in order."""
    updates: list[list[Any]] = []
    mine: list[Any] = []
    for batch in loader:
        mine += _mine(loader, batch)
        if accelerator.sync_gradients:
            updates.append(mine)
            mine = []
            if len(updates) == stop_after:
                break
    assert mine == [] or stop_after is not None, "the pass ended in the middle of an update"
    return updates


def _end_workers(loader: Any) -> None:
    """End persistent workers now, because the garbage collector waits 5 s for each."""
    if loader.inner.persistent_workers:
        loader.inner._iterator._shutdown_workers()


def _joined(ranks: list[list[list[Any]]]) -> list[list[Any]]:
    """Join the ranks' parts of each update in rank order; all ranks have the same number of updates."""
    return [[item for part in parts for item in part] for parts in zip(*ranks, strict=True)]


def _shuffled(n: int, batch_size: int, epoch: int, *, drop_last: bool = False) -> list[list[int]]:
    return batches_of(permutation(n, seed=_SEED, epoch=epoch), batch_size, drop_last=drop_last)


# ---- streams, and data that rank zero dispatches ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    n: int
    batch_size: int
    accumulation: int = 1
    max_micro: int | None = None
    drop_last: bool = False
    num_workers: int = 0
    dispatches: bool = False
    has_index: bool = False
    persistent: bool = False


_CASES = [
    _Case(n=0, batch_size=3),
    _Case(n=23, batch_size=5, accumulation=2, drop_last=True),
    _Case(n=17, batch_size=7, max_micro=2, dispatches=True),
    _Case(n=29, batch_size=8, accumulation=3, dispatches=True, has_index=True),
    _Case(n=2, batch_size=4, max_micro=1, dispatches=True, has_index=True),
    _Case(n=23, batch_size=4, num_workers=2, drop_last=True, accumulation=2, persistent=True),
    _Case(n=23, batch_size=4, num_workers=2, max_micro=1, dispatches=True),
    _Case(n=23, batch_size=5, num_workers=2, accumulation=2, dispatches=True, has_index=True),
]
"""More are drawn, among the programs of tests/programs."""


def _loader(case: _Case, n: int) -> DataLoader[Any]:
    data: Any = Numbers(n) if case.has_index else EpochStream(n)
    return DataLoader(
        data,
        batch_size=case.batch_size,
        drop_last=case.drop_last,
        num_workers=case.num_workers,
        persistent_workers=case.persistent,
    )


def _read_cases(cases: list[_Case]) -> list[Any]:
    found = []
    for case in cases:
        accelerator = _accelerator(
            accumulation=case.accumulation, max_micro=case.max_micro, dispatch_batches=case.dispatches
        )
        has_data = not case.dispatches or dist.get_rank() == 0
        plain = _loader(case, case.n if has_data else 0)
        loader: Any = accelerator.prepare(plain)
        epochs = [_read_pass(accelerator, loader) for _ in range(2)]
        steps = None
        if case.num_workers == 0:  # each worker of a stream has an incomplete batch
            steps = (sum(1 for _ in loader), len(loader))
        _end_workers(loader)
        data: Any = plain.dataset
        facts = (loader.total_batch_size, loader.total_dataset_length)
        found.append((epochs, steps, len(data.read) if case.has_index else data.num_read, facts))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_updates_are_the_batches_of_a_plain_loader(world_size: int) -> None:
    results = run_on_ranks(_read_cases, _CASES, world_size=world_size, timeout=120)
    for case, *ranks in zip(_CASES, *results, strict=True):
        num_samples = 0
        for epoch in range(2):
            plain = _loader(case, case.n)
            if isinstance(plain.dataset, EpochStream):
                plain.dataset.set_epoch(epoch)
            expected = [batch.tolist() for batch in plain]
            num_samples = sum(map(len, expected))
            assert _joined([epochs[epoch] for epochs, *_ in ranks]) == expected, (case, epoch)
        for rank, (_, steps, num_read, facts) in enumerate(ranks):
            assert facts == (case.batch_size, case.n), case
            if case.dispatches and rank:
                assert num_read == 0, case  # only rank zero reads
            elif case.dispatches and case.num_workers == 0 and not case.drop_last:
                assert num_read == 3 * num_samples, case
            if steps is not None:
                assert steps[0] == steps[1], case


# ---- resuming in the middle --------------------------------------------------------------------------------------------


def _save_everywhere(folder: Path, kind: Any, num_workers: int, dispatches: bool) -> list[list[Any]]:
    """Save in and after each update of the second epoch."""
    accelerator = _accelerator(accumulation=2, dispatch_batches=dispatches)
    plain: DataLoader[Any] = DataLoader(kind(10), batch_size=4, num_workers=num_workers)
    loader: Any = accelerator.prepare(plain)
    _read_pass(accelerator, loader)
    updates: list[list[Any]] = []
    mine: list[Any] = []
    for batch in loader:
        mine += _mine(loader, batch)
        if accelerator.sync_gradients:
            updates.append(mine)
            mine = []
            accelerator.save_state(folder / f"after{len(updates)}")
        elif not updates or num_workers == 0:
            accelerator.save_state(folder / f"within{len(updates)}")
    return updates


def _go_on(folder: Path, kind: Any, num_workers: int, dispatches: bool) -> dict[str, Any]:
    found = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* contains RNG states for . process", category=EchelonWarning)
        for path in sorted(folder.iterdir()):
            accelerator = _accelerator(accumulation=2, dispatch_batches=dispatches, replay_iterable=kind is EpochStream)
            data = kind(10)
            loader: Any = accelerator.prepare(DataLoader(data, batch_size=4, num_workers=num_workers))
            accelerator.load_state(path)
            epoch = loader.iteration
            updates = _read_pass(accelerator, loader)
            found[path.name] = (epoch, updates, data.num_read)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_workers", "dispatches"),
    [
        (StreamWithState, 0, False),
        (NoisyStream, 0, True),
        (EpochStream, 2, False),
        (EpochStream, 1, True),
    ],
)
def test_a_stream_resumes_where_it_was_saved_on_any_number_of_ranks(
    tmp_path: Path, kind: Any, num_workers: int, dispatches: bool
) -> None:
    arguments = (tmp_path, kind, num_workers, dispatches)
    whole = _joined(run_on_ranks(_save_everywhere, *arguments, world_size=2, timeout=120))
    plain = kind(10)
    plain.set_epoch(1)
    expected = [batch.tolist() for batch in DataLoader(plain, batch_size=4, num_workers=num_workers)]
    if kind is NoisyStream:  # its random draws depend on (seed, epoch, position), unlike the plain program
        assert [[x for x, _ in update] for update in whole] == [[x for x, _ in update] for update in expected]
        assert len({noise for update in whole for _, noise in update}) == 10
    else:
        assert whole == expected
    ranks = run_on_ranks(_go_on, *arguments, world_size=3, timeout=120)
    assert set(ranks[0]) >= {"within0", "after1", "after2", "after3"}
    for name in ranks[0]:
        done = int(name.removeprefix("after").removeprefix("within"))
        epochs, updates, num_read = zip(*(rank[name] for rank in ranks), strict=True)
        if done == len(whole):  # saved after the last update, so the next epoch follows
            assert set(epochs) == {2}
            assert [len(update) for update in _joined(list(updates))] == [len(update) for update in whole]
            continue
        assert set(epochs) == {1}
        assert _joined(list(updates)) == whole[done:], name
        if kind is not EpochStream:  # no sample is read again
            left = 10 - 4 * done
            assert list(num_read) == [left] + [0 if dispatches else left] * 2, name


def _refused(folder: Path, dispatches: bool) -> str:
    accelerator = _accelerator(dispatch_batches=dispatches)
    loader: Any = accelerator.prepare(DataLoader(EpochStream(9), batch_size=4))
    for _ in loader:
        accelerator.save_state(folder)
        break
    accelerator = _accelerator(dispatch_batches=dispatches)
    loader = accelerator.prepare(DataLoader(EpochStream(9), batch_size=4))
    accelerator.load_state(folder)
    with pytest.raises((UsageError, DesyncError)) as error:
        next(iter(loader))
    return str(error.value)


@pytest.mark.parametrize("dispatches", [False, True])
def test_stream_that_cannot_seek_is_refused_on_every_rank(tmp_path: Path, dispatches: bool) -> None:
    for text in run_on_ranks(_refused, tmp_path, dispatches):
        assert (
            "cannot resume the pass after 4 samples, because an iterable dataset without state_dict() cannot seek"
            in text
        )
        assert "replay_iterable=True" in text or "rank zero failed to read" in text


def _dispatch_then_go_on(folder: Path, stop_after: int | None) -> Any:
    accelerator = _accelerator(dispatch_batches=True, max_micro=1)
    data = Numbers(17 if dist.get_rank() == 0 else 0)
    loader: Any = accelerator.prepare(DataLoader(data, batch_size=6, shuffle=dist.get_rank() == 0))
    if folder.exists():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* contains RNG states for . process", category=EchelonWarning)
            accelerator.load_state(folder)
    updates = _read_pass(accelerator, loader, stop_after=stop_after)
    if stop_after is not None:
        accelerator.save_state(folder)
        again: Any = _accelerator(dispatch_batches=True, max_micro=1).prepare(
            DataLoader(Numbers(17 if dist.get_rank() == 0 else 0), batch_size=6, shuffle=dist.get_rank() == 0)
        )
        again.load_state_dict(loader.state_dict())  # each rank its own
        next(iter(again))
        assert again.contribution.update == range(6, 12)
    return updates, data.read


def test_a_dispatched_shuffle_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    first = run_on_ranks(_dispatch_then_go_on, tmp_path / "state", 1, world_size=2)
    rest = run_on_ranks(_dispatch_then_go_on, tmp_path / "state", None, world_size=3)
    updates = _joined([updates for updates, _ in first]) + _joined([updates for updates, _ in rest])
    assert updates == _shuffled(17, 6, epoch=0)
    assert [len(read) for _, read in rest] == [11, 0, 0]


# ---- custom samplers ----------------------------------------------------------------------------------------------


class Backwards(Sampler[int]):
    """A custom sampler with an epoch."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter([(i + self.epoch) % self.n for i in reversed(range(self.n))])


class Buckets(Sampler[list[int]]):
    """Batches of unequal size."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([8, 1], [0, 2, 3, 4, 5], [6], [7, 9, 10, 11])


def _sampled(kind: str, data: Dataset[Any]) -> DataLoader[Any]:
    if kind == "buckets":
        return DataLoader(data, batch_sampler=Buckets())
    if kind == "batches by sampler":
        return DataLoader(data, sampler=BatchSampler(Backwards(11), 4, drop_last=True), batch_size=None)
    samplers: dict[str, Callable[[], Any]] = {
        "backwards": lambda: Backwards(11),
        "list": lambda: [5, 3, 1, 0, 2, 4, 7],
        "subset": lambda: SubsetRandomSampler([2, 3, 5, 7, 11, 1, 0]),
        "subset with generator": lambda: SubsetRandomSampler(
            [2, 3, 5, 7, 11, 1, 0], generator=torch.Generator().manual_seed(4 + _rank())
        ),
        "weighted": lambda: WeightedRandomSampler([1.0, 2.0, 3.0] * 4, 10, replacement=True),
    }
    return DataLoader(data, batch_size=4, sampler=samplers[kind]())


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


_KINDS = ("backwards", "list", "subset", "subset with generator", "weighted", "buckets", "batches by sampler")


class Whole(Numbers):
    """Accepts a list of indices as an index, too."""

    def __getitem__(self, i: Any) -> torch.Tensor:
        return torch.tensor(i)


def _read_sampled(dispatches: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in _KINDS:
        torch.manual_seed(3 + 5 * _rank())  # rank zero's order is used
        accelerator = _accelerator(dispatch_batches=dispatches)
        loader: Any = accelerator.prepare(_sampled(kind, Whole(12)))
        found[kind] = ([_read_pass(accelerator, loader) for _ in range(2)], len(loader), loader.total_batch_size)
    return found


@pytest.mark.parametrize(("world_size", "dispatches"), [(1, False), (2, False), (3, True), (4, False)])
def test_a_custom_sampler_gives_the_batches_of_the_plain_program(world_size: int, dispatches: bool) -> None:
    ranks = run_on_ranks(_read_sampled, dispatches, world_size=world_size)
    for kind in _KINDS:
        torch.manual_seed(3)
        plain = _sampled(kind, Whole(12))
        for epoch in range(2):
            for sampler in (plain.sampler, getattr(plain.sampler, "sampler", None)):
                if isinstance(sampler, Backwards):
                    sampler.set_epoch(epoch)
            if epoch == 0 or kind != "weighted":  # the RNG streams of the ranks diverge when training starts
                expected = [batch.tolist() for batch in plain]
                assert _joined([found[kind][0][epoch] for found in ranks]) == expected, (kind, epoch)
        for found in ranks:
            assert found[kind][1] == len(plain)
            assert found[kind][2] == (None if kind == "buckets" else 4)


def _draw_and_go_on(folder: Path, saves: bool) -> Any:
    """Save within and after the first update, with an order that the sampler has drawn."""
    torch.manual_seed(3 + _rank())
    accelerator = _accelerator(accumulation=2)
    sampler = WeightedRandomSampler([1.0, 2.0, 3.0] * 4, 10, replacement=True)
    if saves:
        loader: Any = accelerator.prepare(DataLoader(Numbers(12), batch_size=4, sampler=sampler))
        updates: list[list[int]] = []
        for step, batch in enumerate(loader):
            if step % 2 == 0:  # 4 + 4 samples in two micro-steps each, then 2 in one
                updates.append([])
            updates[-1] += _mine(loader, batch)
            if step < 2:
                accelerator.save_state(folder / str(step))
        return updates
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* contains RNG states for . process", category=EchelonWarning)
        for step in range(2):
            accelerator = _accelerator(accumulation=2)
            loader = accelerator.prepare(DataLoader(Numbers(12), batch_size=4, sampler=sampler))
            accelerator.load_state(folder / str(step))
            found.append(_read_pass(accelerator, loader))
    return found


def test_a_drawn_order_is_kept_when_the_pass_resumes(tmp_path: Path) -> None:
    whole = _joined(run_on_ranks(_draw_and_go_on, tmp_path, True))
    assert [len(update) for update in whole] == [4, 4, 2]
    ranks = run_on_ranks(_draw_and_go_on, tmp_path, False, world_size=3)
    assert _joined([within for within, _ in ranks]) == whole
    assert _joined([after for _, after in ranks]) == whole[1:]


def _bad_samplers() -> list[str]:
    texts = []
    loader: Any = _accelerator().prepare(DataLoader(Numbers(12), batch_size=2, sampler=[0, 1, 1, 2, 0]))
    with all_warnings() as caught:
        list(loader)
    texts.append(" ".join(str(w.message) for w in caught if w.category is EchelonWarning))
    for plain in (DataLoader(Numbers(5), batch_size=None), DataLoader(EpochStream(5), batch_size=None)):
        with pytest.raises(UsageError) as error:
            _accelerator(dispatch_batches=False).prepare(plain)
        texts.append(str(error.value))
    return texts


def test_samplers_without_a_valid_order_are_rejected_or_reported() -> None:
    for rank, (repeated, *no_batch) in enumerate(run_on_ranks(_bad_samplers)):
        assert "repeated 2 of 5 samples in one pass" in repeated if rank == 0 else repeated == ""
        assert ["batch_size=None" in text for text in no_batch] == [True] * 2


def _lengths_and_formula() -> Any:
    accelerator = _accelerator(accumulation=2)
    generator = torch.Generator().manual_seed(99)
    sampler = RandomSampler(range(10), generator=generator)
    loader: Any = accelerator.prepare(DataLoader(Numbers(10), batch_size=4, sampler=sampler))
    updates = _read_pass(accelerator, loader)
    remainders = []
    for _ in loader:
        remainders.append(accelerator.gradient_state.remainder)
    buckets: Any = accelerator.prepare(DataLoader(Numbers(12), batch_sampler=Buckets()))
    with pytest.raises(TypeError, match="their sizes vary"):
        len(buckets)
    return updates, (len(loader), loader.total_batch_size, loader.total_dataset_length), remainders


def test_a_generator_does_not_change_the_order_and_lengths_are_correct() -> None:
    ranks = run_on_ranks(_lengths_and_formula, world_size=2)
    assert _joined([updates for updates, _, _ in ranks]) == _shuffled(10, 4, epoch=0)
    # 4 + 4 + 2 samples: two micro-steps of 2, two of 2, one of 2.
    assert [facts for _, facts, _ in ranks] == [(5, 4, 10)] * 2
    assert [remainders for _, _, remainders in ranks] == [[0, 0, 0, 0, 2]] * 2


# ---- passes --------------------------------------------------------------------------------------------------------------


def _passes(num_workers: int) -> dict[str, Any]:
    accelerator = _accelerator(accumulation=2)
    more: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    loader: Any = accelerator.prepare(DataLoader(Numbers(10), batch_size=4, shuffle=True, **more))
    found: dict[str, Any] = {"broken off": _read_pass(accelerator, loader, stop_after=1)}
    found["again"] = _read_pass(accelerator, loader)
    found["next"] = _read_pass(accelerator, loader)
    loader.set_epoch(7)
    found["seventh"] = _read_pass(accelerator, loader)
    loader.set_epoch(0)
    found["skipped"] = _read_pass(accelerator, accelerator.skip_first_batches(loader, 2))
    loader.set_epoch(0)
    found["skipped all but the last"] = _read_pass(accelerator, accelerator.skip_first_batches(loader, 4))
    found["skipped all"] = _read_pass(accelerator, accelerator.skip_first_batches(loader, 5))
    loader.set_epoch(0)
    with pytest.raises(UsageError, match=r"first 3 micro-steps .* do not make up a whole number of updates"):
        _read_pass(accelerator, accelerator.skip_first_batches(loader, 3))
    _end_workers(loader)
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_pass_has_the_order_of_its_epoch(num_workers: int) -> None:
    ranks = run_on_ranks(_passes, num_workers)
    whole = {epoch: _shuffled(10, 4, epoch) for epoch in (0, 1, 7)}
    expected = {
        "broken off": whole[0][:1],
        "again": whole[0],  # an aborted pass does not count
        "next": whole[1],
        "seventh": whole[7],
        "skipped": whole[0][1:],
        "skipped all but the last": whole[0][2:],
        "skipped all": [],
    }
    assert {name: _joined([found[name] for found in ranks]) for name in expected} == expected


def _skip_in_a_stream(dispatches: bool) -> Any:
    accelerator = _accelerator(accumulation=2, dispatch_batches=dispatches)
    loader: Any = accelerator.prepare(DataLoader(EpochStream(10), batch_size=4))
    with pytest.raises(UsageError, match="first 1 micro-steps"):
        _read_pass(accelerator, accelerator.skip_first_batches(loader, 1))
    found = []
    for number in (2, 4, 5):
        loader.set_epoch(0)  # a complete pass of a copy is an epoch of the loader
        found.append(_read_pass(accelerator, accelerator.skip_first_batches(loader, number)))
    return found


@pytest.mark.parametrize("dispatches", [False, True])
def test_whole_updates_of_a_stream_can_be_skipped(dispatches: bool) -> None:
    ranks = run_on_ranks(_skip_in_a_stream, dispatches)
    batches = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [_joined([found[way] for found in ranks]) for way in range(3)] == [batches[1:], batches[2:], []]


def _nested() -> Any:
    accelerator = _accelerator(accumulation=2)
    model: Any = accelerator.prepare(nn.Linear(1, 1).double())
    loader: Any = accelerator.prepare(DataLoader(Numbers(10), batch_size=4, shuffle=True))
    evaluation: Any = accelerator.prepare(DataLoader(Numbers(7), batch_size=3))
    outer: list[list[int]] = []
    mine: list[int] = []
    inner, gradients = [], []
    for batch in loader:
        mine += _mine(loader, batch)
        with accelerator.accumulate(model):
            accelerator.backward((model(batch[:, None].double()) + 0).mean())
            before = accelerator.sync_gradients
            model.eval()
            with torch.no_grad():  # even in the middle of an update
                inner.append([int(i) for x in evaluation for i in accelerator.gather_for_metrics(x)])
            model.train()
            assert accelerator.sync_gradients == before
        if accelerator.sync_gradients:
            outer.append(mine)
            mine = []
            gradients.append(float(accelerator.unwrap_model(model).weight.grad))
            model.zero_grad()
        with torch.no_grad():
            assert len(next(iter(evaluation))) <= 2  # a pass that is aborted immediately
    return outer, inner, gradients


def _same_loader_twice() -> Any:
    """Read the first batch of a loader during a pass over the same loader."""
    accelerator = _accelerator()
    loader: Any = accelerator.prepare(DataLoader(Numbers(9), batch_size=4, shuffle=True, num_workers=1))
    updates, looked = [], []
    for batch in loader:
        updates.append(_mine(loader, batch))
        with torch.no_grad():
            looked += next(iter(loader)).tolist()
    return updates, looked


def test_an_evaluation_within_an_update_does_not_affect_it() -> None:
    ranks = run_on_ranks(_nested)
    expected = _shuffled(10, 4, epoch=0)
    assert _joined([outer for outer, _, _ in ranks]) == expected
    for _, inner, gradients in ranks:
        assert inner == [list(range(7))] * 5
        # d/dw of mean(w * x + b) is the mean of the update's x.
        assert gradients == pytest.approx([sum(update) / len(update) for update in expected], rel=1e-12)
    looks = run_on_ranks(_same_loader_twice)
    assert _joined([updates for updates, _ in looks]) == _shuffled(9, 4, epoch=0)


def _stateful(folder: Path) -> Any:
    """``use_stateful_dataloader=True`` uses the position of the exact modes, without torchdata."""
    accelerator = _accelerator(use_stateful_dataloader=True)
    loader: Any = accelerator.prepare(DataLoader(Numbers(10), batch_size=4, shuffle=True, num_workers=2))
    before = _read_pass(accelerator, loader, stop_after=1)
    state = loader.state_dict()
    accelerator.save_state(folder)
    after = []
    for _ in range(2):
        accelerator = _accelerator(use_stateful_dataloader=True)
        data = Numbers(10)
        loader = accelerator.prepare(DataLoader(data, batch_size=4, shuffle=True))
        accelerator.load_state(folder) if not after else loader.load_state_dict(state)
        after.append((_read_pass(accelerator, loader), len(data.read)))
    return before, after


def test_use_stateful_dataloader_uses_the_exact_position(tmp_path: Path) -> None:
    ranks = run_on_ranks(_stateful, tmp_path)
    assert _joined([before for before, _ in ranks]) == _shuffled(10, 4, epoch=0)[:1]
    for way in range(2):
        assert _joined([after[way][0] for _, after in ranks]) == _shuffled(10, 4, epoch=0)[1:]
        assert sum(after[way][1] for _, after in ranks) == 6


# ---- random draws ---------------------------------------------------------------------------------------------------------------


class Augmented(Dataset[Any]):
    """Uses every global RNG."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 11

    def __getitem__(self, i: int) -> list[float]:
        return [float(i), self.epoch, float(torch.rand(())), random.random(), float(np.random.rand())]


class AugmentedTogether(Augmented):
    """Reads several samples at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in indices]


def _collate(samples: list[Any]) -> torch.Tensor:
    return torch.tensor(samples, dtype=torch.float64)


def _augmented() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for data in (Augmented(), AugmentedTogether(), Subset(Augmented(), range(11))):
        for num_workers in (0, 2) if type(data) is AugmentedTogether else (0,):  # forking takes its time
            torch.manual_seed(7 * num_workers + _rank())  # independent of the ranks' own RNG streams
            accelerator = _accelerator(accumulation=2)
            plain: DataLoader[Any] = DataLoader(
                data, batch_size=4, shuffle=True, num_workers=num_workers, collate_fn=_collate
            )
            loader: Any = accelerator.prepare(plain)
            epochs = [_read_pass(accelerator, loader) for _ in range(2 if num_workers == 0 else 1)]
            found[f"{type(data).__name__} {num_workers}"] = epochs
    return found


@pytest.mark.slow
def test_augmentation_is_the_same_on_any_number_of_ranks_and_workers() -> None:
    one = run_on_ranks(_augmented, world_size=1)[0]
    first = one["Augmented 0"]
    assert [epochs == first[: len(epochs)] for name, epochs in one.items() if "Subset" not in name] == [True] * 3
    assert len({tuple(sample[2:]) for epoch in first for update in epoch for sample in update}) == 22  # all different
    assert [sample[0] for update in first[1] for sample in update] == [float(i) for u in _shuffled(11, 4, 1) for i in u]
    assert {sample[1] for update in first[1] for sample in update} == {1.0}  # the dataset receives the epoch
    for world_size in (2, 4):
        ranks = run_on_ranks(_augmented, world_size=world_size)
        for name in one:
            for epoch in range(len(one[name])):
                found = _joined([rank[name][epoch] for rank in ranks])
                if "Subset" in name:  # which has no epoch
                    found = [[[s[0], first[epoch][0][0][1], *s[2:]] for s in update] for update in found]
                assert found == first[epoch], (name, epoch, world_size)


def _mask(folder: Path, goes_on: bool) -> Any:
    accelerator = _accelerator()
    torch.manual_seed(_rank() + 10 * goes_on)
    loader: Any = accelerator.prepare(
        DataLoader(Numbers(14), batch_size=4, shuffle=True, collate_fn=_masking_of_numbers)
    )
    if goes_on:
        loader.load_state_dict(torch.load(folder / "state", weights_only=True))
        return [batch.tolist() for batch in loader]
    batches = []
    for batch in loader:
        before = torch.get_rng_state()
        batches.append(batch.tolist())
        if len(batches) == 2 and _rank() == 0:
            torch.save(loader.state_dict(), folder / "state")
        assert torch.equal(before, torch.get_rng_state())
    return batches


def _masking_of_numbers(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + torch.rand(len(samples), dtype=torch.float64)


def test_a_collate_fn_with_random_draws_repeats_them_after_a_resume(tmp_path: Path) -> None:
    whole = run_on_ranks(_mask, tmp_path, False)
    rest = run_on_ranks(_mask, tmp_path, True)
    assert [batches[2:] for batches in whole] == rest
    assert len({x for batches in whole for batch in batches for x in batch}) == 14
