"""DataLoader subclasses with an ``__iter__`` of their own: it is used with any number of processes, or an error names it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator, DataLoaderConfiguration
from echelon.accelerator.prepare.data_loaders import skip_first_batches
from echelon.base.errors import EchelonError
from echelon.distributed.collectives import gather_object
from tests.harness import run_on_ranks
from tests.reference import NumberStream


class Scaled(DataLoader[Any]):
    """Multiplies its samples by what its constructor was given."""

    def __init__(self, factor: int, data: Any, **options: Any) -> None:
        super().__init__(data, **options)
        self.factor = factor

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return (self._scaled(batch) for batch in super().__iter__())

    def _scaled(self, batch: Any) -> Any:
        return batch * self.factor if isinstance(batch, torch.Tensor) else [item * self.factor for item in batch]


class OneAhead(Scaled):
    """Reads one batch ahead, in a generator function, as loaders that copy to a device do."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        ahead = next(batches, None)
        while ahead is not None:
            batch, ahead = ahead, next(batches, None)
            yield batch


class Derived(Scaled):
    """Inherits its ``__iter__``."""


class Every2nd(DataLoader[Any]):
    """Drops every second batch."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return itertools.islice(super().__iter__(), None, None, 2)


class Limited(DataLoader[Any]):
    """Ends after two batches."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return itertools.islice(super().__iter__(), 2)


class Endless(DataLoader[Any]):
    """Keeps an iterator over the batches that it had when it was made, as loaders that keep their workers do."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.iterator = super().__iter__()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self.iterator


def _data(num_samples: int) -> TensorDataset:
    return TensorDataset(torch.arange(num_samples))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"split_batches": True},
    {"dispatch_batches": True},
    {"use_seedable_sampler": True},
    {"even_batches": False},
]


def _read(parity: str, options: dict[str, Any]) -> list[Any]:
    """Return the kinds of loaders with which the scaled samples, in a second and a partly skipped pass too, differ."""
    accelerator = Accelerator(cpu=True, parity=parity, dataloader_config=DataLoaderConfiguration(**options))
    wrong = []
    for kind, workers, shuffle in itertools.product([Scaled, OneAhead, Derived], [0, 1], [False, True]):
        if workers and (kind is not OneAhead or shuffle):
            continue
        loader = accelerator.prepare(kind(10, _data(14), batch_size=2, num_workers=workers, shuffle=shuffle))
        for passing in (loader, loader, skip_first_batches(loader, 1)):
            own = []
            with torch.no_grad():
                for (batch,) in passing:
                    own += accelerator.trim_for_metrics(batch).tolist()
            found = sorted(gather_object(own))
            num_skipped = 2 * (1 if parity == "exact" or options.get("split_batches") else accelerator.num_processes)
            if passing is loader:
                is_right = found == [10 * i for i in range(14)]
            else:
                is_right = len(set(found)) == 14 - num_skipped and {*found} <= {10 * i for i in range(14)}
            if not is_right:
                wrong.append((kind.__name__, workers, shuffle, passing is loader, found))
    return wrong


@pytest.mark.sample(3)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("parity", "options"), [*(("off", options) for options in OPTIONS), ("exact", {})])
def test_the_batches_are_those_of_the_subclass(parity: str, options: dict[str, Any], world_size: int) -> None:
    assert run_on_ranks(_read, parity, options, world_size=world_size) == [[]] * world_size


def _shortened() -> list[int]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(OneAhead(1, _data(7), batch_size=2))
    found = []
    for _ in range(2):
        for (batch,) in loader:
            found += accelerator.gather_for_metrics(batch).tolist()
    limited = accelerator.prepare(Limited(_data(14), batch_size=1))
    return [*sorted(found), *sorted(accelerator.gather(torch.cat([batch for (batch,) in limited])).tolist())]


def test_the_last_step_is_trimmed() -> None:
    assert run_on_ranks(_shortened) == [[*sorted([*range(7), *range(7)]), 0, 1, 2, 3]] * 2


def _error(kind: Any, parity: str, data: Any, **options: Any) -> str:
    accelerator = Accelerator(cpu=True, parity=parity, dataloader_config=DataLoaderConfiguration(**options))
    try:
        for _ in accelerator.prepare(kind(data, batch_size=2)):
            pass
    except EchelonError as error:
        return str(error)
    return ""


def _errors(parity: str) -> list[str]:
    found = [_error(Every2nd, parity, _data(14)), _error(Endless, parity, _data(14))]
    found.append(_error(Every2nd, parity, NumberStream(8), dispatch_batches=False))
    return [*found, _error(Every2nd, parity, _data(8), use_stateful_dataloader=parity == "off")]


@pytest.mark.parametrize("parity", ["off", "exact"])
def test_what_cannot_be_divided_is_refused_by_name(parity: str) -> None:
    for found in run_on_ranks(_errors, parity):
        filtered, endless, stream, stateful = found
        assert "Every2nd.__iter__ has yielded" in filtered
        assert "Endless.__iter__ has yielded 1 batches where its batch sampler drew 0" in endless
        assert "Every2nd reads its batches in its own __iter__" in stream
        assert ("StatefulDataLoader" if parity == "off" else "has yielded") in stateful


def test_one_process_reads_as_the_subclass_does() -> None:
    accelerator = Accelerator(cpu=True)
    assert [b.tolist() for (b,) in accelerator.prepare(Limited(_data(14), batch_size=2))] == [[0, 1], [2, 3]]
    loader = accelerator.prepare(Scaled(3, NumberStream(4), batch_size=2))
    assert [batch.tolist() for batch in loader] == [[0, 3], [6, 9]]
    for skipped in (skip_first_batches(Scaled(3, NumberStream(6), batch_size=2), 1), skip_first_batches(loader, 1)):
        assert next(iter(skipped)).tolist() == [6, 9]
    plain = skip_first_batches(Scaled(3, _data(8), batch_size=2), 1)
    assert [batch.tolist() for (batch,) in skip_first_batches(plain, 1)] == [[12, 15], [18, 21]]
    assert len(plain) == 3


def _streamed() -> list[int]:
    accelerator = Accelerator(cpu=True)  # the default for iterable data: rank zero reads
    loader = accelerator.prepare(Scaled(3, NumberStream(8), batch_size=2))
    return sorted(accelerator.gather(torch.cat(list(loader))).tolist())


def test_a_stream_is_read_by_the_subclass_on_rank_zero() -> None:
    assert run_on_ranks(_streamed) == [[3 * i for i in range(8)]] * 2
