"""Merges consecutive batches of the script's loaders, so that one process takes in one step what several take together."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from types import FrameType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.lr_scheduler import ReduceLROnPlateau
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
from echelon.verify.recorders.user_code import frames, line_of_user
from echelon.verify.recording import Recording

# Libraries that rebuild a loader from the attributes of the script's loader, which has been merged already.
_REBUILDERS = ("accelerate.", "echelon.data.", "echelon.distributed.", "echelon.accelerator.", "torch.", "torchdata.")
_SCHEDULERS = ("echelon.accelerator.update.scheduler", "accelerate.scheduler")


class MergedBatches:
    """Makes each DataLoader that the script builds return batches that are ``batch_factor`` times as large.

    The result is what a loader with the larger batch size returns: the same order, and at the end a smaller batch or, with drop_last, none.
    """

    def __init__(self, recording: Recording) -> None:
        self._factor = recording.run.batch_factor
        self._own_lengths: WeakKeyDictionary[DataLoader[Any], Callable[[], int]] = WeakKeyDictionary()
        recording.wrap(DataLoader, "__init__", self._construct)
        recording.wrap(DataLoader, "__len__", self._length)
        for module in _SCHEDULERS:
            recording.wrap_when_imported(module, "AcceleratedScheduler", "step", self._step)

    def _construct(self, construct: Callable[..., None], loader: Any, *args: Any, **kwargs: Any) -> None:
        if not _is_rebuilt():
            given = inspect.signature(construct).bind(loader, *args, **kwargs)
            given.apply_defaults()
            options, own = _merged_options(given.arguments, self._factor), _own_length(given.arguments)
            if own is not None:
                self._own_lengths[loader] = own
            given.arguments.update(options)
            args, kwargs = given.args[1:], given.kwargs
        construct(loader, *args, **kwargs)

    def _length(self, length: Callable[[Any], int], loader: DataLoader[Any]) -> int:
        """Return the length of a loader: for a script with an Accelerator, that which the script gave it.

        On each of several processes, a loader that is not prepared has all batches of the data, and a schedule may be computed from its
        length. Prepared loaders are others, and libraries that iterate need the true length.
        """
        own = self._own_lengths.get(loader)
        caller = next(one for one in frames(sys._getframe(1)) if not _is_own(one))
        is_users = line_of_user() == f"{caller.f_code.co_filename}:{caller.f_lineno}"
        if own is not None and is_users and (_has_accelerator() or _uses_accelerator(caller)):
            return own()
        return length(loader)

    def _step(self, step: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """Step once for each merged batch.

        echelon and accelerate step a prepared scheduler ``num_processes`` times per update, because the user's schedule counts the
        batches of one process.
        """
        is_per_batch = scheduler.step_with_optimizer and not scheduler.split_batches
        # A scheduler that follows a metric counts evaluations.
        is_repeated = is_per_batch and not isinstance(scheduler.scheduler, ReduceLROnPlateau)
        for _ in range(self._factor if is_repeated else 1):
            step(scheduler, *args, **kwargs)


def _has_accelerator() -> bool:
    own = sys.modules.get("echelon.accelerator.current")
    if own is not None and own.has_accelerator():
        return True
    theirs = sys.modules.get("accelerate.state")
    state = getattr(theirs, "AcceleratorState", None)
    return bool(getattr(state, "_shared_state", None))


def _uses_accelerator(script: FrameType) -> bool:
    """Return whether the script has imported an Accelerator."""
    found = [*script.f_globals.values()]
    modules = [one.__name__ if isinstance(one, ModuleType) else getattr(one, "__module__", None) for one in found]
    return any(str(one).startswith(("accelerate", "echelon.accelerator.")) for one in modules)


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("echelon.verify.")


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
    samples = sampler if sampler is not None else dataset
    batch_size, rounded = given["batch_size"], math.floor if given["drop_last"] else math.ceil
    return lambda: rounded(len(samples) / batch_size)


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
    for frame in frames(sys._getframe(1)):
        in_constructor = frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), DataLoader)
        if not in_constructor and not _is_own(frame):
            return f"{frame.f_globals.get('__name__', '')}.".startswith(_REBUILDERS)
    return False
