"""Merges consecutive batches of the script's loaders, so that one process takes in one step what several take together."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import islice
from types import FrameType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from echelon.base.errors import UsageError
from echelon.data.batch import join_batches
from echelon.verify.recording import Recording

__all__ = ["MergedBatches"]

# Libraries that rebuild a loader from the attributes of the script's loader, which has been merged already.
_REBUILDERS = ("accelerate.", "echelon.data.", "echelon.distributed.", "echelon.accelerator.", "torch.", "torchdata.")


class MergedBatches:
    """Makes each DataLoader that the script builds return batches that are ``recording.batch_factor`` times as large.

    The result is what a loader with the larger batch size returns: the same order, and at the end a smaller batch or, with drop_last, none.
    """

    def install(self, recording: Recording) -> Callable[[], None]:
        """Patch the constructor of DataLoader."""
        construct, factor = DataLoader.__init__, recording.batch_factor
        if factor == 1:
            return lambda: None
        signature = inspect.signature(construct)
        unmerged: WeakKeyDictionary[Any, Callable[[], int]] = WeakKeyDictionary()

        @wraps(construct)
        def merged(loader: Any, *args: Any, **kwargs: Any) -> None:
            if not _is_rebuilt():
                given = signature.bind(loader, *args, **kwargs)
                given.apply_defaults()
                options = _merged_options(given.arguments, factor)
                own = _own_length(given.arguments)
                if own is not None:
                    unmerged[loader] = own
                given.arguments.update(options)
                args, kwargs = given.args[1:], given.kwargs
            construct(loader, *args, **kwargs)

        length = DataLoader.__len__

        @wraps(length)
        def length_for_caller(loader: Any) -> int:
            """Before it is prepared, a loader has the length that the script gave it; a schedule may be computed from it."""
            own = unmerged.get(loader)
            if own is not None and _is_prepared_later(sys._getframe(1)):
                return own()
            return length(loader)

        loaders: Any = DataLoader
        loaders.__init__, loaders.__len__ = merged, length_for_caller

        def remove() -> None:
            loaders.__init__, loaders.__len__ = construct, length

        return remove


def _merged_options(given: dict[str, Any], factor: int) -> dict[str, Any]:
    """Return the arguments of DataLoader that are replaced."""
    batch_sampler, sampler, dataset = given["batch_sampler"], given["sampler"], given["dataset"]
    if batch_sampler is not None:
        return {"batch_sampler": _merged_sampler(batch_sampler, factor)}
    if given["batch_size"] is not None:
        return {"batch_size": given["batch_size"] * factor}
    if isinstance(sampler, BatchSampler):  # each item of it is a batch
        return {"sampler": _merged_sampler(sampler, factor)}
    if isinstance(dataset, IterableDataset):  # it makes the batches itself
        return {"dataset": _MergedStream(dataset, factor)}
    if sampler is None:
        sampler = (
            RandomSampler(dataset, generator=given["generator"]) if given["shuffle"] else SequentialSampler(dataset)
        )
    groups = BatchSampler(sampler, factor, drop_last=False)
    return {"dataset": _MergedItems(dataset), "sampler": groups, "shuffle": None}


def _own_length(given: dict[str, Any]) -> Callable[[], int] | None:
    """Return the length of the loader without merging; None if it is sharded, so that several processes have shorter loaders, too."""
    batches, sampler, dataset = given["batch_sampler"], given["sampler"], given["dataset"]
    owners = (sampler, batches, getattr(batches, "sampler", None))
    if any(hasattr(one, "num_replicas") for one in owners) or (batches is None and given["batch_size"] is None):
        return None
    if batches is not None:
        return lambda: len(batches)
    samples, batch_size, drop_last = (
        sampler if sampler is not None else dataset,
        given["batch_size"],
        given["drop_last"],
    )
    return lambda: len(samples) // batch_size if drop_last else math.ceil(len(samples) / batch_size)


def _is_prepared_later(caller: FrameType) -> bool:
    """Return whether the caller is a script that has a library which shards the loaders that it is given."""
    if str(caller.f_globals.get("__name__", "")).startswith((*_REBUILDERS, "transformers.", "echelon.")):
        return False
    for one in [*caller.f_globals.values()]:
        module = one.__name__ if isinstance(one, ModuleType) else getattr(type(one), "__module__", None)
        module = getattr(one, "__module__", module) if isinstance(one, (type, FunctionType)) else module
        if str(module).startswith(("accelerate", "echelon")):
            return True
    return False


def _merged_sampler(sampler: Any, factor: int) -> Any:
    if type(sampler) is BatchSampler:
        return BatchSampler(sampler.sampler, sampler.batch_size * factor, sampler.drop_last)
    return _MergedSampler(sampler, factor)


class _MergedSampler(Sampler[list[Any]]):
    """Joins ``factor`` consecutive batches of a batch sampler. Other attributes are those of the batch sampler."""

    def __init__(self, batches: Any, factor: int) -> None:
        self._batches = batches
        self._factor = factor

    def __iter__(self) -> Iterator[list[Any]]:
        batches = iter(self._batches)
        while group := list(islice(batches, self._factor)):
            if len(group) < self._factor and self._drops_last():
                return
            yield [index for batch in group for index in batch]

    def __len__(self) -> int:
        count = len(self._batches)
        return count // self._factor if self._drops_last() else math.ceil(count / self._factor)

    @property
    def batch_size(self) -> Any:
        """The larger batch size, if the batch sampler has one."""
        return self._batches.batch_size * self._factor

    def _drops_last(self) -> bool:
        return bool(getattr(self._batches, "drop_last", False))

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # not yet set, in a worker
            raise AttributeError(name)
        return getattr(self._batches, name)


class _MergedStream(IterableDataset[Any]):
    """Joins ``factor`` consecutive batches of an iterable dataset."""

    def __init__(self, dataset: Any, factor: int) -> None:
        self._dataset = dataset
        self._factor = factor

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._dataset)
        while group := list(islice(batches, self._factor)):
            yield _joined(group)

    def __len__(self) -> int:
        return math.ceil(len(self._dataset) / self._factor)

    def __getattr__(self, name: str) -> Any:
        if name in ("_dataset", "_factor"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


class _MergedItems(Dataset[Any]):
    """A dataset whose items are batches; it joins those that it is asked for at once. Other attributes are those of the dataset."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, indices: list[Any]) -> Any:
        return _joined([self._dataset[index] for index in indices])

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)


def _joined(batches: list[Any]) -> Any:
    try:
        return join_batches(batches)
    except UsageError as error:
        raise UsageError(
            "the script's loader (batch_size=None) returns batches that cannot be concatenated, so one process cannot take in one step "
            "the batches of several",
            do="pass a script that trains on the larger batches as --against, or let the DataLoader collate the batches",
        ) from error


def _is_rebuilt() -> bool:
    """Return whether a library builds the loader from another loader; the constructors of subclasses are left out."""
    frame = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", "")) + "."
        in_constructor = frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), DataLoader)
        if not in_constructor and not name.startswith("echelon.verify."):
            return name.startswith(_REBUILDERS)
        frame = frame.f_back  # type: ignore[assignment]
    return False
