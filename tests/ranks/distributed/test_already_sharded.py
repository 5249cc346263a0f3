"""Loaders that are already sharded keep their sharding: each sample exactly once, or an error that names the loader."""

from __future__ import annotations

import importlib
import io
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from echelon import Accelerator, DataLoaderConfiguration
from echelon.accelerator.plugins.project_configuration import ProjectConfiguration
from echelon.base.errors import ConfigError, DesyncError, EchelonError, UsageError
from echelon.base.warnings import EchelonWarning
from echelon.distributed import shard
from echelon.trainer import Trainer, TrainingArguments
from tests.harness import run_on_ranks
from tests.prepared_loop import all_warnings
from tests.programs.program import Case, Layout, Program
from tests.programs.runner import require_plain
from tests.sharded_already import CUTS, STREAMS, HiddenSampler, StridedSampler, cut_loader, numbers
from tests.trainer_models import RecordingModel, arguments

ALL = [*CUTS, *STREAMS]


def _values(batch: Any) -> list[float]:
    return [float(value) for value in (batch if isinstance(batch, torch.Tensor) else batch[0])]


def _by_accelerator(name: str, n: int, num_workers: int) -> list[float]:
    """Return the values that gather_for_metrics gathers in a pass, equal on every rank."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(cut_loader(name, n, 2, num_workers))
    found = []
    for batch in loader:
        gathered = accelerator.gather_for_metrics(batch)
        found += _values(gathered)
    assert loader.end_of_dataloader
    return found


def _by_shard(name: str, n: int, num_workers: int) -> list[float]:
    loader = shard(cut_loader(name, n, 2, num_workers))
    return [value for batch in loader for value in _values(batch)]


def _collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([sample[0] if isinstance(sample, tuple) else sample for sample in samples])}


class _CutTrainer(Trainer):
    cut: Any = None

    def get_train_dataloader(self) -> Any:
        loader = self.cut
        loader.collate_fn = _collate
        return self.accelerator.prepare(loader)


def _by_trainer(name: str, n: int, num_workers: int, folder: str) -> list[float]:
    # Each worker of a stream has its own last batch. Samples of a map-style dataset go to the workers in whole batches.
    parts = max(num_workers, 1) if name in STREAMS else 1
    mine = n // dist.get_world_size()
    steps = sum(-(-len(range(part, mine, parts)) // 2) for part in range(parts))
    args = arguments(folder, max_steps=steps, dataloader_num_workers=num_workers, remove_unused_columns=False)
    model = RecordingModel()
    if name in STREAMS:
        trainer = Trainer(model, args, train_dataset=STREAMS[name](n), data_collator=_collate)
    else:
        trainer = _CutTrainer(model, args, train_dataset=numbers(n))
        trainer.cut = cut_loader(name, n, 2, num_workers)
    trainer.train()
    return model.seen


def _matrix(names: list[str], num_workers: int, levels: list[str], folder: str) -> dict[str, Any]:
    """Return the errors by case."""
    wrong: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", EchelonWarning)
        for name in names:
            for n in (24, 17):
                for level in levels:
                    if level == "trainer" and n != 24:  # it drops incomplete steps
                        continue
                    if level == "accelerator":
                        found = [_by_accelerator(name, n, num_workers)]
                    elif level == "shard":
                        found = _from_all(_by_shard(name, n, num_workers))
                    else:
                        found = _from_all(_by_trainer(name, n, num_workers, folder))
                    values = sorted(value for values in found for value in values)
                    # torch's sampler repeats up to world_size - 1 samples, and shard() keeps its batches.
                    repeats = level == "shard" and ("Sampler" in name or name == "torchdata")
                    if (sorted(set(values)) if repeats else values) != list(range(n)):
                        wrong[f"{name}, n={n}, {level}"] = found
    return wrong


def _from_all(mine: list[float]) -> list[list[float]]:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


LEVELS = ["accelerator", "shard", "trainer"]
MATRIX = [
    pytest.param(1, 0, LEVELS[:2], id="1 rank"),
    pytest.param(2, 0, LEVELS, id="2 ranks"),
    pytest.param(3, 0, LEVELS[:2], id="3 ranks"),
    *(
        pytest.param(world, workers, LEVELS, marks=pytest.mark.soak, id=f"{world} ranks, {workers} workers, all levels")
        for world in (1, 2, 3, 4)
        for workers in (0, 2)
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "num_workers", "levels"), MATRIX)
def test_each_sample_comes_exactly_once(world_size: int, num_workers: int, levels: list[str], tmp_path: Any) -> None:
    found = run_on_ranks(_matrix, ALL, num_workers, levels, str(tmp_path), world_size=world_size, timeout=500)
    assert found == [{}] * world_size


class _Sized(IterableDataset[Any]):
    """Shards itself by rank and worker, and reports the number of samples of a rank."""

    def __init__(self, n: int) -> None:
        self.stream = STREAMS["asks for its rank"](n)
        self.mine = n // dist.get_world_size()

    def __len__(self) -> int:
        return self.mine

    def __iter__(self) -> Any:
        return iter(self.stream)


class _Unprepared(Trainer):
    def get_train_dataloader(self) -> Any:
        dataset: Any = self.train_dataset
        return DataLoader(dataset, batch_size=2, collate_fn=_collate, num_workers=self.args.dataloader_num_workers)


def _epochs_of_a_trainer(n: int, num_workers: int, prepares: bool, folder: str) -> tuple[list[float], int, list[str]]:
    args = arguments(
        folder,
        num_train_epochs=2,
        dataloader_num_workers=num_workers,
        remove_unused_columns=False,
        already_sharded=True,
    )
    model = RecordingModel()
    kind = Trainer if prepares else _Unprepared
    trainer = kind(model, args, train_dataset=_Sized(n), data_collator=_collate)
    with all_warnings() as caught:
        trainer.train()
    return model.seen, trainer.state.global_step, [str(w.message) for w in caught if w.category is EchelonWarning]


@pytest.mark.parametrize(
    ("world_size", "prepares"), [(2, True), (2, False), pytest.param(4, True, marks=pytest.mark.soak)]
)
def test_the_trainer_uses_the_last_batches_of_all_workers(world_size: int, prepares: bool, tmp_path: Any) -> None:
    # 6 samples of a rank are 3 batches of 2; each of the two workers has 3 of them, and a last batch with one.
    n = 6 * world_size
    found = run_on_ranks(_epochs_of_a_trainer, n, 2, prepares, str(tmp_path), world_size=world_size, timeout=120)
    assert sorted(value for seen, _, _ in found for value in seen) == sorted(2 * [float(i) for i in range(n)])
    assert [steps for _, steps, _ in found] == [8] * world_size
    (text,) = found[0][2]
    assert "epoch 1 had 4 batches on this process, but the data's length (_Sized.__len__" in text
    assert ") is 3." in text
    assert "With num_workers=2, each worker produces its own incomplete last batch" in text
    assert all(texts == [] for _, _, texts in found[1:])


def test_loader_workers_divide_the_data_of_their_rank(tmp_path: Any) -> None:
    names = ["DistributedSampler", "asks for its rank"]
    assert run_on_ranks(_matrix, names, 2, ["accelerator"], str(tmp_path), timeout=200) == [{}] * 2


def _shares_of_a_trainer(says: Any, folder: str) -> list[Any]:
    mine = Subset(numbers(24), range(dist.get_rank(), 24, 2))
    model = RecordingModel()
    args = arguments(folder, per_device_eval_batch_size=2, remove_unused_columns=False, already_sharded=says)
    trainer = Trainer(model, args, train_dataset=mine, eval_dataset=numbers(10), data_collator=_collate)
    trainer.train()
    trained, model.seen = model.seen, []
    trainer.evaluate()
    return [trained, model.seen]


def test_a_trainer_shards_training_data_and_evaluates_all_data(tmp_path: Any) -> None:
    found = run_on_ranks(_shares_of_a_trainer, "train", str(tmp_path))
    assert [sorted(trained) for trained, _ in found] == [[float(i) for i in range(rank, 24, 2)] for rank in (0, 1)]
    assert {value for _, evaluated in found for value in evaluated} == {float(i) for i in range(10)}
    assert len(found[0][1]) < 10
    with pytest.raises(ConfigError, match="already_sharded='training' is not one of true, train, eval, false"):
        TrainingArguments(output_dir=str(tmp_path), use_cpu=True, already_sharded="training")
    assert TrainingArguments(output_dir=str(tmp_path), use_cpu=True, already_sharded=True).already_sharded == "true"


# ---- keeping the sharding --------------------------------------------------------------------------------------


def _epochs(kind: str) -> list[Any]:
    accelerator = Accelerator(cpu=True)
    sampler = StridedSampler(8)
    loader = DataLoader(numbers(8), batch_size=2, sampler=sampler)
    prepared = shard(loader) if kind == "shard" else accelerator.prepare(loader)
    first = [[_values(batch) for batch in prepared] for _ in range(2)]
    sampler.set_epoch(5)  # called by the script before a pass
    later = [[_values(batch) for batch in prepared] for _ in range(2)]
    return [first, later, sampler.epoch]


@pytest.mark.parametrize("kind", ["accelerator", "shard"])
def test_the_sampler_gets_the_epoch_from_echelon_or_the_script(kind: str) -> None:
    for rank, (first, later, epoch) in enumerate(run_on_ranks(_epochs, kind)):
        expected = [
            [[(i + e) % 8.0 for i in (rank, rank + 2)], [(i + e) % 8.0 for i in (rank + 4, rank + 6)]]
            for e in (0, 1, 5, 6)
        ]
        assert [*first, *later] == expected
        assert epoch == 6


def _uneven(even: bool) -> Any:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=even))
    loader = accelerator.prepare(DataLoader(numbers(9), batch_size=2, sampler=StridedSampler(9)))
    steps = [(_values(batch), None if loader.last_step is None else loader.last_step.real) for batch in loader]
    return len(loader), steps, loader.total_dataset_length, loader.total_batch_size


def test_a_rank_with_fewer_batches_repeats_its_first_batch_or_ends() -> None:
    whole = [([0.0, 2.0], None), ([4.0, 6.0], None), ([8.0], [1, 0])], [([1.0, 3.0], None), ([5.0, 7.0], None)]
    zero, one = run_on_ranks(_uneven, True)
    assert zero == (3, whole[0], 9, 4)
    assert one == (3, [*whole[1], ([1.0, 3.0], [1, 0])], 9, 4)
    zero, one = run_on_ranks(_uneven, False)
    assert zero == (3, whole[0], 9, 4)
    assert one == (2, whole[1], 9, 4)


def test_windows_of_a_sharded_loader_are_those_of_a_plain_loop() -> None:
    """The last one of a pass is short."""
    program = Program(num_samples=10, batch_size=1, order="sampler", already_sharded=True, accumulation=2)
    require_plain([Case(program=program, layout=Layout(world_size=n)) for n in (1, 2, 3)])


def _skipped(kind: str) -> list[Any]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(cut_loader(kind, 17, 2))
    found = []
    for batch in accelerator.skip_first_batches(loader, 2):
        found += _values(accelerator.gather_for_metrics(batch))
    return sorted(found)


@pytest.mark.parametrize("kind", ["DistributedSampler", "a batch sampler", "asks for its rank"])
def test_skipping_applies_to_the_ranks_own_batches(kind: str) -> None:
    assert run_on_ranks(_skipped, kind) == [[float(i) for i in range(8, 17)]] * 2


def _resumed(folder: str, stateful: bool) -> list[float]:
    def make() -> Any:
        config = DataLoaderConfiguration(use_stateful_dataloader=stateful)
        project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=True, project_config=project, dataloader_config=config)
        sampler = DistributedSampler(numbers(24), shuffle=True, seed=3)
        loader = DataLoader(numbers(24), batch_size=2, sampler=sampler)
        _, loader = accelerator.prepare(torch.nn.Linear(1, 1), loader)
        return accelerator, loader

    accelerator, loader = make()
    found: list[float] = []
    for epoch in accelerator.epochs(2):
        for number, batch in enumerate(loader):
            found += _values(batch)
            if epoch == 1 and number == 2:
                accelerator.save_state()
                break
    accelerator, loader = make()
    assert accelerator.resume()
    for _ in accelerator.epochs(2):
        for batch in loader:
            found += _values(batch)
    return found


@pytest.mark.parametrize("stateful", [False, True])
def test_a_pass_resumes_in_the_middle(stateful: bool, tmp_path: Any) -> None:
    folder = tmp_path / str(stateful)
    for rank, found in enumerate(run_on_ranks(_resumed, str(folder), stateful)):
        plain = []
        sampler = DistributedSampler(numbers(24), num_replicas=2, rank=rank, shuffle=True, seed=3)
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            plain += [float(i) for i in sampler]
        assert found == plain


# ---- exact and bitwise --------------------------------------------------------------------------------------------------


def _exact_pass(parity: str) -> list[Any]:
    accelerator = Accelerator(cpu=True, parity=parity, seed=1)
    loader = DataLoader(
        numbers(21), batch_size=6, sampler=DistributedSampler(numbers(21), *_size(), shuffle=True, seed=4)
    )
    prepared = accelerator.prepare(loader)
    found: list[Any] = []
    for epoch in (0, 1):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        found.append([])
        for batch in prepared:
            found[-1] += _values(accelerator.gather_for_metrics(batch))
    return found


def _size() -> tuple[int, int]:
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


@pytest.mark.parametrize("parity", ["exact", "bitwise"])
def test_exact_parity_undoes_torchs_distributed_sampler(parity: str) -> None:
    orders = [torch.randperm(21, generator=torch.Generator().manual_seed(4 + epoch)) for epoch in (0, 1)]
    for world_size in (1, 2, 3):
        for found in run_on_ranks(_exact_pass, parity, world_size=world_size):
            # Training samples of a rank are contiguous in a global batch, so the gathered values must be sorted to get its order.
            for order, samples in zip(orders, found):
                batches = [order[i : i + 6].tolist() for i in range(0, 21, 6)]
                assert sorted(samples) == [float(i) for i in range(21)]
                start = 0
                for batch in batches:
                    assert set(samples[start : start + len(batch)]) == set(map(float, batch))
                    start += len(batch)


def _refused(cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[str]:
    found = []
    for name, of_accelerator, of_config in cases:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**of_config), **of_accelerator)
        try:
            accelerator.prepare(cut_loader(name, 12, 2))
            found.append("no error")
        except UsageError as error:
            found.append(str(error))
    return found


def test_options_that_conflict_with_a_sharded_loader_are_rejected() -> None:
    cases: list[Any] = [
        ("num_replicas and rank", {"parity": "exact"}, {}),
        ("asks for its rank", {"parity": "bitwise"}, {}),
        ("DistributedSampler", {}, {"dispatch_batches": True}),
        ("webdataset", {}, {"dispatch_batches": True}),
        ("DistributedSampler", {}, {"split_batches": True}),
    ]
    for texts in run_on_ranks(_refused, cases):
        assert "already sharded by its sampler (StridedSampler), and parity='exact'" in texts[0]
        assert "its dataset (AsksStream, whose code uses the rank), and parity='bitwise'" in texts[1]
        assert "dispatch_batches=True, only rank zero reads data" in texts[2]
        assert "its dataset (webdataset.split_by_node)" in texts[3]
        assert "split_batches=True" in texts[4]
        for text in texts:
            assert "test_already_sharded.py:" in text
            assert "remove that sharding, so that echelon shards the loader" in text


def _wrong_numbers() -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for sampler in (
        DistributedSampler(numbers(12), 2 * size, rank),
        DistributedSampler(numbers(12), size, 0),
        DistributedSampler(numbers(12), size, (rank + 1) % size),
    ):
        loader = DataLoader(numbers(12), batch_size=2, sampler=sampler)
        for prepare in (Accelerator(cpu=True).prepare, shard):
            try:
                prepare(loader)
                found.append("no error")
            except EchelonError as error:
                found.append(str(error))
    return found


def test_a_sampler_for_other_ranks_is_an_error() -> None:
    for texts in run_on_ranks(_wrong_numbers):
        for text in texts[:2]:
            assert "one shard per process (world_size: 2)" in text
            assert "shards it for a different number of processes (4)" in text
        for text in texts[2:4]:
            assert "rank 0 has shard 0, rank 1 has shard 0" in text
        assert texts[4:] == ["no error"] * 2  # the ranks have all parts, but in another order


def test_a_sampler_for_two_ranks_is_an_error_on_one_process() -> None:
    for prepare in (Accelerator(cpu=True).prepare, shard):
        loader = DataLoader(numbers(12), batch_size=2, sampler=DistributedSampler(numbers(12), 2, 0))
        with pytest.raises(UsageError, match=r"world_size: 1\), but .* a different number of processes \(2\)"):
            prepare(loader)


# ---- sharding that cannot be recognised ----------------------------------------------------------------------------------------


class _Listed(IterableDataset[Any]):
    """Holds a list of files that belongs to one rank, which nothing else reveals."""

    def __init__(self, files: list[str]) -> None:
        self.files = files

    def __iter__(self) -> Any:
        return (torch.tensor(float(name.partition(".")[0])) for name in self.files)


class _Opaque(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(float(_START[0]), 32.0, dist.get_world_size()))


_START = [0]


class _Same(IterableDataset[Any]):
    """Has the attributes of a dataset that shards itself, but gives every rank all samples."""

    def __init__(self, order: list[int]) -> None:
        self.order = order
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def __iter__(self) -> Any:
        return (torch.tensor(float(i)) for i in self.order)


def _unrecognised(case: str, parity: str, level: str) -> list[str]:
    """Return the warnings of the first and the second pass."""
    rank, size = dist.get_rank(), dist.get_world_size()
    config = DataLoaderConfiguration(dispatch_batches=False if case == "a stream" else None)
    accelerator = Accelerator(cpu=True, parity=parity, dataloader_config=config)
    _START[0] = rank
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(rank)).tolist()
    loaders = {
        "a hidden sampler": lambda: DataLoader(numbers(32), batch_size=2, sampler=HiddenSampler(32)),
        "a share of the data": lambda: DataLoader(Subset(numbers(32), range(rank, 32, size)), batch_size=2),
        "a list of files": lambda: DataLoader(_Listed([f"{i}.tar" for i in range(rank, 32, size)]), batch_size=2),
        "a stream": lambda: DataLoader(_Opaque(), batch_size=2),
        "a false cut": lambda: DataLoader(_Same(list(range(32))), batch_size=2),
        "a false cut in another order": lambda: DataLoader(_Same(shuffled), batch_size=2),
        "a false claim": lambda: DataLoader(numbers(32), batch_size=2),
    }
    said = []
    with all_warnings() as caught:
        try:
            claim = True if case == "a false claim" else None
            if level == "shard":
                prepared: Any = shard(loaders[case](), already_sharded=claim)
            else:
                prepared = accelerator.prepare_data_loader(loaders[case](), already_sharded=claim)
            for _ in range(
                1 if parity == "exact" else 2
            ):  # an error ends the rank that detects it; a launcher would end the other ranks
                list(prepared)
        except (DesyncError, UsageError) as error:
            said.append(f"error: {error}")
        dist.barrier()
    said += [f"{w.filename}:{w.lineno} {w.message}" for w in caught if issubclass(w.category, EchelonWarning)]
    return said


CASES = {
    "a hidden sampler": ("yields different samples on each rank", "remove the sampler", "already_sharded=True"),
    "a share of the data": ("the ranks have different data", "whole dataset", "already_sharded=True"),
    "a list of files": ("the ranks have different data", "whole dataset", "already_sharded=True"),
    "a stream": ("ranks 0 and 1 read different streams", "same dataset", "already_sharded=True"),
    "a false cut": ("read the same samples", "different samples", "already_sharded=False"),
    "a false cut in another order": ("read the same samples", "different samples", "already_sharded=False"),
    "a false claim": ("read the same samples", "different samples", "already_sharded=False"),
}


@pytest.mark.parametrize(
    ("case", "level"),
    [*((case, "accelerator") for case in CASES), ("a share of the data", "shard"), ("a false claim", "shard")],
)
def test_unrecognised_sharding_is_reported_once_at_the_loaders_line(case: str, level: str) -> None:
    said = [text for texts in run_on_ranks(_unrecognised, case, "off", level) for text in texts]
    assert len(said) == 1, said
    for part in ("test_already_sharded.py:", *(CASES[case] if level == "accelerator" else ())):
        assert part in said[0]


@pytest.mark.parametrize(
    "case", ["a hidden sampler", "a share of the data", "a stream", "a false cut", "a false claim"]
)
def test_exact_parity_rejects_unrecognised_sharding(case: str) -> None:
    said = [text for texts in run_on_ranks(_unrecognised, case, "exact", "accelerator") for text in texts]
    assert said
    assert all(text.startswith("error: ") for text in said), said


# ---- no false positives -----------------------------------------------------------------------------------------------------


class _Augmented(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + torch.rand(()), y


class _Stream(IterableDataset[Any]):
    def __init__(self, n: int, noise: bool) -> None:
        self.n = n
        self.noise = noise

    def __iter__(self) -> Any:
        return ((torch.tensor([i + (torch.rand(()) if self.noise else 0.0)]), i % 3) for i in range(self.n))


def _ordinary(part: int, num_parts: int) -> list[str]:
    """Read ordinary loaders, and return the warnings about them."""
    torch.manual_seed(dist.get_rank())
    found: list[str] = []
    number = 0
    for n in (1, 2, 3, 8, 16, 17, 64, 100):
        x = torch.arange(float(n))[:, None]
        datasets: list[Any] = [
            TensorDataset(x, torch.arange(n) % 2),
            TensorDataset(torch.zeros(n, 3), torch.ones(n)),  # all samples are equal
            TensorDataset(x % 8, (torch.arange(n) % 8)),  # copies of a few samples samples
            TensorDataset((x % 2).repeat(1, 3)),
            _Augmented(x, torch.arange(n)),
            [{"x": torch.randn(3), "y": torch.randn(1)} for _ in range(n)],  # each rank draws different samples
            Subset(TensorDataset(x), range(0, n, 2)),
            _Stream(n, noise=False),
            _Stream(n, noise=True),
        ]
        for data in datasets:
            iterable = isinstance(data, IterableDataset)
            choices: list[dict[str, Any]] = [{}] if iterable else [{}, {"shuffle": True}]
            if not iterable and n > 2:
                choices.append({"sampler": RandomSampler(data, replacement=True, num_samples=n // 2)})
                choices.append({"sampler": SequentialSampler(range(len(data) // 2 or 1))})
            for choice in choices:
                for batch_size, dispatch in ((4, None), (16, False)):
                    number += 1
                    if number % num_parts != part:
                        continue
                    config = DataLoaderConfiguration(dispatch_batches=dispatch)
                    accelerator = Accelerator(cpu=True, dataloader_config=config)
                    with all_warnings() as caught:
                        loader = accelerator.prepare(DataLoader(data, batch_size=batch_size, **choice))
                        for _ in range(2):
                            list(loader)
                        dist.barrier()
                    found += [f"{type(data).__name__} {n} {choice}: {w.message}" for w in caught]
    assert number > 200, number
    return found


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.soak) for part in (1, 2, 3))])
def test_ordinary_loaders_are_not_reported(part: int) -> None:
    assert run_on_ranks(_ordinary, part, 4, timeout=300) == [[], []]


def _whole_on_purpose() -> list[str]:
    """Read a small evaluation set on every rank without prepare."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.allow_unsharded(DataLoader(numbers(32), batch_size=4))
    with all_warnings() as caught:
        list(loader)
    return [str(w.message) for w in caught]


def test_a_loader_that_every_rank_reads_intentionally_is_not_reported() -> None:
    assert run_on_ranks(_whole_on_purpose) == [[], []]


NUM = 48


def _webdataset(folder: str) -> Any:
    webdataset = importlib.import_module("webdataset")
    urls = sorted(map(str, Path(folder).glob("*.tar")))
    stream = webdataset.WebDataset(urls, nodesplitter=webdataset.split_by_node, shardshuffle=False)
    return stream.map(lambda sample: torch.tensor(int(sample["x.txt"])))


def _table(_: str) -> Any:
    datasets = importlib.import_module("datasets")
    split = importlib.import_module("datasets.distributed").split_dataset_by_node
    whole = datasets.Dataset.from_dict({"x": list(range(NUM))}).with_format("torch")
    return split(whole, dist.get_rank(), dist.get_world_size())


def _stream(_: str) -> Any:
    datasets = importlib.import_module("datasets")
    split = importlib.import_module("datasets.distributed").split_dataset_by_node
    whole = datasets.Dataset.from_dict({"x": list(range(NUM))}).to_iterable_dataset(num_shards=12).with_format("torch")
    return split(whole, dist.get_rank(), dist.get_world_size())


MADE = {"webdataset": _webdataset, "datasets, a table": _table, "datasets, a stream": _stream}


def _read(kind: str, folder: str) -> list[list[int]]:
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", EchelonWarning)
        for prepare in (Accelerator(cpu=True).prepare, shard):
            for num_workers in (0, 2):
                loader = prepare(DataLoader(MADE[kind](folder), batch_size=2, num_workers=num_workers))
                batches = [batch["x"] if isinstance(batch, dict) else batch for batch in loader]
                found.append([int(value) for batch in batches for value in batch])
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", MADE)
def test_the_sharding_of_a_library_is_kept(kind: str, world_size: int, tmp_path: Path) -> None:
    pytest.importorskip(kind.partition(",")[0], reason="not installed: make peers")
    for number in range(12):
        with tarfile.open(tmp_path / f"{number:02}.tar", "w") as archive:
            for sample in range(4 * number, 4 * number + 4):
                text = str(sample).encode()
                member = tarfile.TarInfo(f"{sample:04}.x.txt")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text))
    ranks = run_on_ranks(_read, kind, str(tmp_path), world_size=world_size, timeout=200)
    for case in zip(*ranks):
        assert sorted(value for values in case for value in values) == list(range(NUM))
