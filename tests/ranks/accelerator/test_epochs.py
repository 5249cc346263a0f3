"""``resume()`` and ``epochs()``: a run that was stopped anywhere continues as if it had not been stopped."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from echelon import Accelerator, DataLoaderConfiguration
from echelon.base.errors import CheckpointError, DesyncError
from echelon.base.warnings import EchelonWarning
from echelon.utils import ProjectConfiguration
from tests.harness import run_on_ranks
from tests.prepared_loop import all_warnings, train_prepared, weights_of
from tests.reference import Numbers, PlainTraining, dropout_net, mean_square, tanh_net, train_plainly

_EPOCHS = 2
_BATCH = 4


@dataclass(frozen=True)
class _Case:
    parity: str = "off"
    num_workers: int = 0
    accumulation: int = 1
    noise: float = 0.0
    n: int = 18
    draws: str = "torch"
    epochs: int = _EPOCHS
    has_generator: bool = False
    """The loader has its own generator."""


class _Samples(Dataset[torch.Tensor]):
    """Samples with random augmentation (``noise``) that record which of them this process reads."""

    def __init__(self, case: _Case) -> None:
        self.x = torch.randn(case.n, 6, generator=torch.Generator().manual_seed(7))
        self.noise = case.noise
        self.draws = case.draws
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> torch.Tensor:
        self.read.append(i)
        if not self.noise:
            return self.x[i]
        drawn = torch.randn(6)
        if self.draws == "all":
            drawn += random.gauss(0, 1) + torch.from_numpy(np.random.randn(6)).float()
        return self.x[i] + self.noise * drawn


def _objects(case: _Case, seed: int = 3) -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[torch.Tensor]]:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = dropout_net(6, 8, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    generator = torch.Generator().manual_seed(5) if case.has_generator else None
    loader = DataLoader(_Samples(case), _BATCH, shuffle=True, num_workers=case.num_workers, generator=generator)
    return model, optimizer, schedule, loader


def _one_ahead(loader: DataLoader[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Read one batch ahead like a prepared loader, because the order of reading affects random draws."""
    batches = iter(loader)
    held = next(batches)
    for batch in batches:
        yield held
        held = batch
    yield held


Result = tuple[list[torch.Tensor], list[float], float]


def _plain(case: _Case) -> Result:
    """Train with plain torch on this rank's batches. In the exact modes a formula gives the order."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model, optimizer, schedule, loader = _objects(case)
    wrapped: Any = DistributedDataParallel(model) if world_size > 1 else model
    for epoch in range(case.epochs):
        if case.parity == "exact":
            order = torch.randperm(case.n, generator=torch.Generator().manual_seed(3 + epoch))
            torch.empty((), dtype=torch.int64).random_()  # the seed that a DataLoader draws for its workers
            batches: Any = [loader.dataset.x[i] for i in order.split(_BATCH)]  # type: ignore[attr-defined]
        else:
            batches = _one_ahead(loader)
        mine = list(itertools.islice(batches, rank, None, world_size)) if world_size > 1 else batches
        count = 0
        for i, x in enumerate(mine):
            is_last = i + 1 == -(-case.n // _BATCH) // world_size
            count += 1
            ends = count == case.accumulation or is_last
            with nullcontext() if ends or world_size == 1 else wrapped.no_sync():
                (wrapped(x).square().mean() / case.accumulation).backward()
            if ends:
                if count < case.accumulation:  # a window shortened by the end of the epoch is a mean, too
                    for p in model.parameters():
                        assert p.grad is not None
                        p.grad.mul_(case.accumulation / count)
                optimizer.step()
                for _ in range(world_size):
                    schedule.step()
                optimizer.zero_grad()
                count = 0
    return [p.detach().clone() for p in model.parameters()], schedule.get_last_lr(), torch.rand(()).item()


def _train(case: _Case, *, resume: Path | None = None, save_to: Path | None = None) -> tuple[Result, list[int], int]:
    """Return the trained objects, the samples that this process read, and the optimizer steps of the whole run."""
    model, optimizer, schedule, loader = _objects(case)
    accelerator = Accelerator(parity=case.parity, gradient_accumulation_steps=case.accumulation)
    data: Any = loader.dataset
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    if resume is not None:
        torch.manual_seed(99)
        random.seed(99)
        np.random.seed(99)
        torch.rand(5)
        assert accelerator.resume(resume)
    steps = 0
    for epoch in accelerator.epochs(_EPOCHS):
        for x in loader:
            assert accelerator.progress.epoch == epoch
            train_prepared(accelerator, model, optimizer, [x], schedule=schedule)
            steps += 1
            if save_to is not None:
                accelerator.save_state(save_to / f"{steps}")
    result = weights_of(accelerator, model), schedule.get_last_lr(), torch.rand(()).item()
    return result, data.read, accelerator.progress.step


def _is_same(one: Result, other: Result) -> bool:
    return all(map(torch.equal, one[0], other[0])) and one[1:] == other[1:]


def _resume_everywhere(case: _Case, root: Path, has_plain: bool) -> tuple[dict[int, bool], dict[int, list[int]]]:
    whole, _, num_steps = _train(case)
    if has_plain:
        assert _is_same(whole, _plain(case))
    saving, _, _ = _train(case, save_to=root)
    assert _is_same(saving, whole)  # saving changes nothing
    same, read = {}, {}
    for folder in sorted(root.iterdir()):
        result, seen, steps = _train(case, resume=folder)
        same[int(folder.name)] = _is_same(result, whole) and steps == num_steps
        read[int(folder.name)] = seen
    return same, read


_OFF, _EXACT = _Case(), _Case("exact")
_CASES = {
    "off": (_OFF, 1),
    "off-workers": (_Case(num_workers=2, noise=0.1, n=14), 1),
    "off-2": (_OFF, 2),
    "off-2-workers": (_Case(num_workers=2, n=16), 2),
    "off-accumulation": (_Case(accumulation=3, n=27), 1),
    "off-2-accumulation": (_Case(accumulation=2, n=24), 2),
    "off-augmentation": (_Case(noise=0.1), 1),
    "off-all-augmentation": (_Case(noise=0.1, draws="all"), 1),
    "off-2-workers-augmentation": (_Case(num_workers=2, noise=0.1, n=28, draws="all", accumulation=2), 2),
    "off-augmentation-accumulation": (_Case(noise=0.1, accumulation=2), 1),
    "exact": (_EXACT, 1),
    "exact-workers": (_Case("exact", num_workers=2, noise=0.1, n=12, draws="all"), 1),
    "exact-2": (_EXACT, 2),
    "exact-2-accumulation": (_Case("exact", accumulation=2), 2),
    "exact-2-augmentation-accumulation": (_Case("exact", accumulation=2, noise=0.1, n=11, draws="all"), 2),
    "bitwise-2": (_Case("bitwise", n=9), 2),
}


# Each of these does less than another case does ("off-2-workers-augmentation", "exact-2-augmentation-accumulation").
_SIMPLER = ("off-workers", "off-2", "off-2-workers", "exact-2", "exact-2-accumulation")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak) if name in _SIMPLER else name for name in _CASES]
)
def test_a_run_resumed_after_any_step_is_bit_identical(name: str, tmp_path: Path) -> None:
    # Shuffle, dropout, AdamW's moments, the schedule, half windows: each would show in the weights.
    case, world_size = _CASES[name]
    # The reference computes DDP's batches, without samples that fill the last round.
    has_plain = case.parity == "off" and (world_size == 1 or case.n % (_BATCH * world_size) == 0)
    has_plain |= case == _EXACT and world_size == 1
    results = run_on_ranks(_resume_everywhere, case, tmp_path, has_plain, world_size=world_size, timeout=180)
    for same, _ in results:
        assert len(same) >= 4
        assert same == dict.fromkeys(same, True)
    if name in ("off", "exact", "exact-2"):  # nothing before the place is read again: batches of 4, 4, 4, 4, 2 samples
        left = {k: 36 - 18 * (k // 5) - 4 * (k % 5) for k in range(1, 11)}
        assert {k: sum(len(read[k]) for _, read in results) for k in results[0][1]} == left


# ---- another number of processes -------------------------------------------------------------------------------------


class _Drawn(Numbers):
    """Each sample comes with random draws."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), torch.rand(()) + random.random()


_Updates = list[tuple[int, list[tuple[int, float]]]]
"""The epoch of each update, and its samples with their draws."""


def _objects_of_a_part() -> tuple[Any, Any, Any]:
    model = tanh_net(4, 6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def _part(parity: str, num_samples: int, project: Path, stop_after: int) -> tuple[list[torch.Tensor], _Updates, int]:
    """Train for some updates and save. Return the weights, the updates, and the number of samples evaluated."""
    config = ProjectConfiguration(project, automatic_checkpoint_naming=True, total_limit=2)
    shards = {"canonical_shards": 4} if parity == "bitwise" else {}
    accelerator = Accelerator(parity=parity, project_config=config, max_micro_batch_size=4, seed=5, **shards)
    loaders = DataLoader(_Drawn(num_samples), batch_size=6, shuffle=True), DataLoader(Numbers(8), batch_size=4)
    model, optimizer, schedule, loader, evaluation = accelerator.prepare(*_objects_of_a_part(), *loaders)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* contains RNG states for . process", category=EchelonWarning)
        accelerator.resume()
    updates: _Updates = []
    seen: list[tuple[int, float]] = []
    num_evaluated = 0
    for epoch in accelerator.epochs(3):
        model.train()
        for i, drawn in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mean_square(model(_features(i))))
                seen += zip(*(one.tolist() for one in accelerator.gather_for_metrics((i, drawn))))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                updates.append((epoch, sorted(seen)))
                seen = []
                if len(updates) == stop_after:
                    accelerator.save_state()
                    return weights_of(accelerator, model), updates, 0
        model.eval()
        for i in evaluation:
            num_evaluated += len(accelerator.gather_for_metrics(i))
    return weights_of(accelerator, model), updates, num_evaluated


def _features(indices: torch.Tensor) -> torch.Tensor:
    return torch.stack([indices, indices**2, indices * 0 + 1, indices.sin()], dim=1).double() / 26


def _plain_part(num_samples: int) -> PlainTraining:
    model, optimizer, schedule = _objects_of_a_part()
    return train_plainly(
        model,
        lambda batch: mean_square(model(_features(torch.tensor(batch)))),
        num_samples=num_samples,
        batch_size=6,
        optimizer=optimizer,
        epochs=3,
        seed=5,
        schedule=schedule,
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(("parity", "num_samples"), [("exact", 26), ("bitwise", 30)])
def test_the_number_of_processes_may_change_at_any_stop(parity: str, num_samples: int, tmp_path: Path) -> None:
    whole, of_whole, num_evaluated = run_on_ranks(_part, parity, num_samples, tmp_path / "whole", 99, world_size=1)[0]
    updates: _Updates = []
    # In the middle of an epoch, at its end (5 updates are one), after a single update.
    for world_size, stop_after in [(1, 2), (3, 3), (2, 1), (1, 99)]:
        results = run_on_ranks(_part, parity, num_samples, tmp_path / "parts", stop_after, world_size=world_size)
        weights, made, _ = results[0]
        updates += made
        assert all(other[1] == made for other in results)
    expected = _plain_part(num_samples)
    assert updates == of_whole  # with the same draws
    assert [[i for i, _ in samples] for _, samples in updates] == [sorted(batch) for batch in expected.batches]
    assert num_evaluated == 3 * 8
    assert sorted(p.name for p in (tmp_path / "parts" / "checkpoints").glob("c*")) == ["checkpoint_1", "checkpoint_2"]
    torch.testing.assert_close(weights, expected.weights, rtol=1e-12, atol=1e-14)  # sums in another order
    if parity == "bitwise":
        assert all(map(torch.equal, weights, whole))


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(17).tolist()  # drawn when the pass starts


class _Counted(_Samples):
    """Counts the samples that its workers read."""

    def __init__(self, case: _Case) -> None:
        super().__init__(case)
        self.counts = torch.zeros(2, dtype=torch.int64).share_memory_()

    def __getitem__(self, i: int) -> torch.Tensor:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        self.counts[info.id] += 1
        return super().__getitem__(i)


def _batches_of_an_epoch(parity: str, dispatches: bool, folder: Path) -> list[tuple[bool, int]]:
    """Check the batches after some positions in an epoch, and return the number of samples read."""

    def read(resume: Path | None = None, save_to: Path | None = None) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(3 if resume is None else 99)
        accelerator = Accelerator(
            parity=parity, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatches), seed=3
        )
        batch_size = 4 if parity == "exact" else 2  # there it is the state of all ranks
        samples = _Counted(_Case(noise=0.1, n=32))
        loader: Any = DataLoader(samples, batch_size=batch_size, shuffle=True, num_workers=2)
        loader = accelerator.prepare(loader)
        if resume is not None:
            assert accelerator.resume(resume)
        found = []
        for _ in accelerator.epochs(1):
            for number, x in enumerate(loader):
                found.append(x.clone())
                if save_to is not None and number in places:
                    accelerator.save_state(save_to / f"{number}")
        return found, int(samples.counts.sum())

    places = (0, 3, 4)  # no round of the workers is over, one is, and another has begun
    whole, _ = read(save_to=folder)
    found = []
    for number in places:
        rest, num_read = read(resume=folder / f"{number}")
        is_same = len(rest) == len(whole) - number - 1 and all(map(torch.equal, whole[number + 1 :], rest))
        found.append((is_same, num_read))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("parity", "dispatches"), [("off", False), ("off", True), ("exact", False)])
def test_augmented_batches_of_workers_are_identical_from_any_position(
    parity: str, dispatches: bool, tmp_path: Path
) -> None:
    results = run_on_ranks(_batches_of_an_epoch, parity, dispatches, tmp_path, timeout=180)
    for found in results:
        assert [is_same for is_same, _ in found] == [True] * 3
        if (parity, dispatches) == ("off", False):
            # Of 8 batches of 2 samples, 1, 4 and 5 were given; of these, the one that begins a round is read once more.
            assert [num_read for _, num_read in found] == [16, 8, 8]


def _read_stream(project: Path, dispatches: bool) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the samples and the next random draw of an uninterrupted run and of a run in two parts."""

    def run(stop_after: int) -> list[Any]:
        torch.manual_seed(3)
        accelerator = Accelerator(
            project_config=ProjectConfiguration(project, automatic_checkpoint_naming=True),
            dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatches),
        )
        loader: Any = accelerator.prepare(DataLoader(_Stream(), batch_size=2))
        read: list[Any] = []
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".* batches of iterable data were read again", category=EchelonWarning
            )
            accelerator.resume()
            for epoch in accelerator.epochs(2):
                for i in loader:
                    read.append((epoch, i.tolist(), torch.rand(()).item()))
                    if len(read) == stop_after:
                        accelerator.save_state()
                        return read
        return read

    return run(0), run(2), run(0)


@pytest.mark.parametrize("dispatches", [True, False])
def test_iterable_data_resumes_on_several_ranks(dispatches: bool, tmp_path: Path) -> None:
    for whole, first, rest in run_on_ranks(_read_stream, tmp_path, dispatches):
        assert len(whole) == 10
        assert first + rest == whole


def _refused(project: Path, stop: bool) -> str:
    accelerator = Accelerator(project_config=ProjectConfiguration(project, automatic_checkpoint_naming=True))
    loader: Any = accelerator.prepare(DataLoader(range(12), batch_size=2))  # type: ignore[arg-type]
    if not stop:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* contains RNG states for . process", category=EchelonWarning)
            with pytest.raises((CheckpointError, DesyncError)) as caught:
                accelerator.resume()
        return str(caught.value)
    for _ in loader:
        break
    accelerator.save_state()
    return ""


def test_without_parity_another_number_of_processes_is_rejected_in_mid_epoch(tmp_path: Path) -> None:
    run_on_ranks(_refused, tmp_path, True, world_size=1)
    for text in run_on_ranks(_refused, tmp_path, False):
        assert (
            "saved during an epoch with 1 process, but this run has 2, so samples would be repeated or skipped" in text
        )
        assert "train with parity='exact', which can resume with any number" in text


def _read_other_data(folder: str, kind: str, num_samples: int, batch_size: int, stop: int) -> Any:
    options: dict[str, Any] = {"parity": "exact", "seed": 1} if kind == "exact" else {}
    data_options: dict[str, Any] = {"dispatch_batches": True} if kind == "dispatch" else {}
    accelerator = Accelerator(
        project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True),
        dataloader_config=DataLoaderConfiguration(**data_options),
        **options,
    )
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(num_samples)), batch_size=batch_size))
    try:
        is_resumed = accelerator.resume()
        text = ""
    except (CheckpointError, DesyncError) as error:
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            text, is_resumed = str(error), accelerator.resume(allow_changed_data=True)
    read = []
    for _ in accelerator.epochs(1):
        for number, (samples,) in enumerate(loader, 1):
            read += samples.tolist()
            if number == stop:
                accelerator.save_state()
                accelerator.end_training()
                break
        break
    return is_resumed, text, read


@pytest.mark.parametrize("kind", ["off", "dispatch", "exact"])
def test_different_data_is_rejected_or_accepted_on_every_rank(kind: str, tmp_path: Path) -> None:
    size = 8 if kind == "exact" else 4
    run_on_ranks(_read_other_data, str(tmp_path), kind, 40, size, 3)  # 24 samples
    results = run_on_ranks(_read_other_data, str(tmp_path), kind, 48, size, 0)
    read = []
    for is_resumed, text, samples in results:
        assert is_resumed
        assert "it had 40 samples but now has 48" in text
        assert "after 24 of 48 samples" in text
        read += samples
    assert sorted(read) == [*range(24, 48)]


def _load_with_data_of_ones_own(folder: str) -> list[int]:
    accelerator = Accelerator()
    data = TensorDataset(torch.randn(32, 2, generator=torch.Generator().manual_seed(dist.get_rank())))
    with all_warnings() as caught:
        loader = accelerator.prepare(DataLoader(data, batch_size=4))
    assert [str(w.message)[:35] for w in caught] == ["the ranks have different data: their"[:35]] * (
        dist.get_rank() == 0
    )
    sizes = []
    for number, (x,) in enumerate(loader):
        sizes.append(len(x))
        if number == 1:
            accelerator.save_state(folder)
            accelerator.load_state(folder)
    return sizes


def test_ranks_with_different_data_load_their_checkpoint(tmp_path: Path) -> None:
    """As a script's own torch.randn makes them, without a seed; the checkpoint has the fingerprint of rank zero's."""
    assert run_on_ranks(_load_with_data_of_ones_own, str(tmp_path / "state"), world_size=2) == [[4] * 4] * 2
