"""A recording knows which samples each training forward pass used, whatever loader the script has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from echelon.accelerator.accelerator import Accelerator
from echelon.accelerator.plugins.configuration import DataLoaderConfiguration
from echelon.distributed import shard
from echelon.verify.recorders.batches import Batches
from echelon.verify.recorders.forwards import Forwards
from echelon.verify.recorders.sample_rows import rows_of
from echelon.verify.recording import recording
from echelon.verify.trace import Batch, Forward, RecordingSettings, Row, read_trace
from tests.harness import run_on_ranks

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
NUMBER = {row: index for index, row in enumerate(rows_of([X, torch.arange(24)]).rows)}  # type: ignore[union-attr]
DATA = TensorDataset(X, torch.arange(24))


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


class _Model(nn.Linear):
    """Counts its forward passes."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.train()


def _recorded(folder: Path, script: Callable[[nn.Module], Any], *, rank: int = 0) -> list[Batch]:
    with recording(folder, RecordingSettings(steps=100), rank=rank) as one:
        Batches(one)
        script(_Model())
    return [one for one in read_trace(folder).ranks[rank] if isinstance(one, Batch)]


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def _numbers(batches: list[Batch]) -> list[list[int | None]]:
    return [[NUMBER.get(row) for row in one.rows] for one in batches]


def _in_order(batch_size: int) -> list[list[int]]:
    return [list(range(start, min(start + batch_size, 24))) for start in range(0, 24, batch_size)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [DATA, _Stream()], ids=["map", "stream"])
def test_each_batch_is_recorded_once(num_workers: int, dataset: Any, tmp_path: Path) -> None:
    if num_workers and isinstance(dataset, _Stream):
        num_workers = 1  # without sharding each worker reads everything
    line = 0

    def script(model: nn.Module) -> None:
        nonlocal line
        line = script.__code__.co_firstlineno + 3
        for x, _ in DataLoader(dataset, batch_size=5, num_workers=num_workers):
            _step(model, x)

    found = _recorded(tmp_path, script)
    assert _numbers(found) == _in_order(5)
    assert {one.source for one in found} == {"loader"}
    assert {one.line for one in found} == {f"{__file__}:{line}"}
    assert [one.micro_step for one in found] == [0, 1, 2, 3, 4]  # no optimizer: one update


def test_shuffled_batches_and_persistent_workers(tmp_path: Path) -> None:
    orders: list[list[int]] = []

    def script(model: nn.Module) -> None:
        loader = DataLoader(DATA, batch_size=6, shuffle=True, num_workers=1, persistent_workers=True)
        for _ in range(2):
            for x, y in loader:
                orders.append(y.tolist())
                _step(model, x)

    assert _numbers(_recorded(tmp_path, script)) == orders
    assert len(orders) == 8


# What scripts do between the loader and the model.
def _transformed(model: nn.Module, loader: Any) -> None:
    for x, _ in loader:
        _step(model, x / 2 + 1)


def _grouped(model: nn.Module, loader: Any) -> None:
    batches = iter(loader)
    while group := list(islice(batches, 4)):
        for x, _ in group:
            _step(model, x)


def _grouped_and_transformed(model: nn.Module, loader: Any) -> None:
    batches = iter(loader)
    while group := list(islice(batches, 4)):
        for x, _ in group:
            _step(model, x * 2)


def _probed(model: nn.Module, loader: Any) -> None:
    next(iter(loader))
    kept = next(iter(loader))
    _transformed(model, loader)
    del kept


def _evaluated(model: nn.Module, loader: Any) -> None:
    other = DataLoader(TensorDataset(X + 9), batch_size=7)
    for index, (x, _) in enumerate(loader):
        _step(model, x * 3)
        if index % 2:
            model.eval()
            with torch.no_grad():
                for (y,) in other:
                    model(y)
            for (y,) in other:  # with gradients
                model(y * 1.0)
            model.train()


def _with_teacher(model: nn.Module, loader: Any) -> None:
    teacher = _Model().eval()
    for x, _ in loader:
        with torch.no_grad():
            teacher(x * 1.0)
        _step(model, x * 1.0)


def _called_twice(model: nn.Module, loader: Any) -> None:
    for x, _ in loader:
        (model(x) - model(x * 2)).sum().backward()


def _in_chunks(model: nn.Module, loader: Any) -> None:
    for x, _ in loader:
        for part in x.split(2):
            _step(model, part)


@pytest.mark.parametrize(
    "script",
    [_transformed, _grouped, _grouped_and_transformed, _probed, _evaluated, _with_teacher, _called_twice, _in_chunks],
)
def test_scripts_use_each_batch_once(script: Callable[[nn.Module, Any], None], tmp_path: Path) -> None:
    found = _recorded(tmp_path, lambda model: script(model, DataLoader(DATA, batch_size=6)))
    assert _numbers(found) == _in_order(6)


def test_skipped_batches_are_not_recorded(tmp_path: Path) -> None:
    def script(model: nn.Module) -> None:
        for index, (x, _) in enumerate(DataLoader(DATA, batch_size=3)):
            if index >= 5:
                _step(model, x * 2)

    assert _numbers(_recorded(tmp_path, script)) == _in_order(3)[5:]


def test_two_loaders_in_one_step(tmp_path: Path) -> None:
    def script(model: nn.Module) -> None:
        labelled, unlabelled = DataLoader(DATA, batch_size=4), DataLoader(TensorDataset(X[:12] + 1), batch_size=2)
        for (x, _), (u,) in zip(labelled, unlabelled):
            _step(model, torch.cat([x, u]))

    found = _recorded(tmp_path, script)
    assert [len(one.rows) for one in found] == [4, 2] * 6
    assert _numbers(found[::2]) == _in_order(4)
    assert [one.micro_step for one in found] == sorted([*range(6), *range(6)])


def test_a_loop_without_a_loader_is_recorded_by_its_inputs(tmp_path: Path) -> None:
    def script(model: nn.Module) -> None:
        for start in range(0, 24, 6):
            _step(model, X[start : start + 6])

    found = _recorded(tmp_path, script)
    assert [one.source for one in found] == ["inputs"] * 4
    assert [row for one in found for row in one.rows] == rows_of({"args": (X,)}).rows  # type: ignore[union-attr]


def test_labels_are_counted(tmp_path: Path) -> None:
    def script(model: nn.Module) -> None:
        samples = [{"x": x, "labels": torch.tensor([1, -100, 2])} for x in X[:4]]
        for batch in DataLoader(samples, batch_size=2):  # type: ignore[arg-type]
            _step(model, batch["x"])

    assert [one.num_items for one in _recorded(tmp_path, script)] == [4, 4]


def test_rows_that_end_in_a_repeated_token_are_not_padded(tmp_path: Path) -> None:
    """Blocks of tokens of one length, which default_collate stacks: the output of a row does not depend on the others of its batch."""
    blocks = torch.tensor([[3, 7, 7], [1, 2, 7], [4, 5, 6], [5, 1, 7]])
    torch.manual_seed(0)
    model = nn.Embedding(8, 2)
    outputs = []
    for batch_size in (1, 4):
        folder = tmp_path / str(batch_size)
        with recording(folder, RecordingSettings(steps=100), rank=0) as one:
            Forwards(one, Batches(one))
            for tokens in DataLoader(blocks, batch_size=batch_size):
                model(tokens).sum().backward()
        events = read_trace(folder).ranks[0]
        outputs.append(np.concatenate([event.rows for event in events if isinstance(event, Forward)]))
    np.testing.assert_array_equal(outputs[0], outputs[1])


def test_items_of_batches_that_a_loader_copies_are_known(tmp_path: Path) -> None:
    """accelerate copies batches to ``cpu:0``, and reads one ahead: the collated tensors are gone when the script gets the copies."""
    texts = [
        torch.tensor([3, 5, 0, 0]),
        torch.tensor([2, 4, 6, 0]),
        torch.tensor([1, 1, 0, 0]),
        torch.tensor([7, 8, 9, 0]),
    ]

    class Copying(DataLoader[Any]):
        def __iter__(self) -> Any:
            inner = super().__iter__()
            read = [next(inner).clone()]
            for batch in inner:
                read.append(batch.clone())
                yield read.pop(0)
            yield read.pop(0)

    lengths: list[Any] = []

    def script(model: nn.Module) -> None:
        for batch in Copying(texts, batch_size=2):
            _step(model, batch[:, :3].float())

    with recording(tmp_path, RecordingSettings(steps=100), rank=0) as one:
        batches = Batches(one)
        hook = torch.nn.modules.module.register_module_forward_hook(
            lambda *_: lengths.append(
                {} if batches.rows is None else {k: v.tolist() for k, v in batches.rows.lengths.items()}
            )
        )
        script(_Model())
        hook.remove()
    assert lengths == [{4: [4, 4]}, {4: [4, 4]}]  # the zeros belong to the items


def test_loaders_are_restored(tmp_path: Path) -> None:
    class Loader(DataLoader[Any]):
        def __iter__(self) -> Any:
            return super().__iter__()

    import accelerate.data_loader

    kinds = (DataLoader, Loader, accelerate.data_loader.DataLoaderShard, type(shard(DataLoader(DATA))))
    before = [kind.__iter__ for kind in kinds]

    def script(model: nn.Module) -> None:
        for x, _ in Loader(DATA, batch_size=8):
            _step(model, x)

    assert _numbers(_recorded(tmp_path, script)) == _in_order(8)
    assert [kind.__iter__ for kind in kinds] == before
    assert "__init_subclass__" not in vars(DataLoader)


# Loaders on two ranks: together, every sample once in the order of one process.


def _plain(batch_size: int) -> Any:
    loader: Any = DataLoader(DATA, batch_size=batch_size, sampler=DistributedSampler(DATA, shuffle=False))
    return loader


def _of_echelon(batch_size: int) -> Any:
    return Accelerator(cpu=True).prepare(DataLoader(DATA, batch_size=batch_size))


def _dispatched(batch_size: int) -> Any:
    config = DataLoaderConfiguration(dispatch_batches=True)
    return Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(_Stream(), batch_size=batch_size))


def _of_level_1(batch_size: int) -> Any:
    return shard(DataLoader(DATA, batch_size=batch_size))


def _of_accelerate(batch_size: int) -> Any:
    import accelerate

    return accelerate.Accelerator(cpu=True).prepare_data_loader(DataLoader(DATA, batch_size=batch_size))


def _dispatched_by_accelerate(batch_size: int) -> Any:
    import accelerate

    config = accelerate.DataLoaderConfiguration(dispatch_batches=True)
    return accelerate.Accelerator(cpu=True, dataloader_config=config).prepare_data_loader(
        DataLoader(DATA, batch_size=batch_size)
    )


def _on_rank(folder: str, build: Callable[[int], Any]) -> list[list[Row]]:
    def script(model: nn.Module) -> None:
        for x, _ in build(3):
            _step(model, x)

    found = _recorded(Path(folder), script, rank=dist.get_rank())
    assert {one.source for one in found} == {"loader"}
    return [one.rows for one in found]


@pytest.mark.parametrize(
    "build", [_plain, _of_echelon, _dispatched, _of_level_1, _of_accelerate, _dispatched_by_accelerate]
)
def test_ranks_record_their_own_samples(build: Callable[[int], Any], tmp_path: Path) -> None:
    first, second = run_on_ranks(_on_rank, str(tmp_path), build, world_size=2)
    assert [len(rows) for rows in first] == [len(rows) for rows in second] == [3] * 4
    for step, (a, b) in enumerate(zip(first, second, strict=True)):
        numbers = sorted(NUMBER[row] for row in a + b)
        assert numbers == list(range(6 * step, 6 * step + 6))
