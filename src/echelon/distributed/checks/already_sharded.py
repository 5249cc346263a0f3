"""Detects whether a loader's sampler, batch sampler or dataset already shards its data."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.protocols import SupportsSetEpoch
from echelon.base.warnings import UserLine, warn

# Attributes in which samplers and datasets store the number of shards and their own shard index, also with a leading "_".
_COUNT_NAMES = (
    "num_replicas",
    "world_size",
    "num_processes",
    "num_ranks",
    "num_shards",
    "shard_count",
    "data_parallel_size",
)
_INDEX_NAMES = (
    "rank",
    "process_index",
    "global_rank",
    "shard_id",
    "shard_index",
    "cur_shard",
    "output_split_idx",  # Ray Data's streaming splits
    "data_parallel_rank",
)
# Code that shards data itself uses one name of each set.
_RANK_COUNT_NAMES = frozenset({"get_world_size", "num_processes", "WORLD_SIZE"})
_RANK_NAMES = frozenset({"get_rank", "process_index", "RANK"})
# Code of these packages is not searched for the names above.
_LIBRARIES = frozenset(
    [
        "torch",
        "torchdata",
        "datasets",
        "webdataset",
        "streaming",
        "ray",
        "accelerate",
        "transformers",
        "lightning",
        "numpy",
        "pandas",
        "pyarrow",
        "echelon",
    ]
)
_MAX_OBJECTS = 300
_MAX_DEPTH = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ExistingSharding:
    """Describes how a loader was sharded on this rank before it was passed to echelon."""

    what: str
    """What shards the loader, as worded in messages, such as ``its sampler (DistributedSampler)``."""
    place: Literal["sampler", "dataset", "user"]
    """What shards the data; ``user`` if the user passed ``already_sharded=True``."""
    num_shards: int = -1
    """-1 if unknown."""
    shard: int = -1
    """This rank's shard index, or -1 if unknown."""


def find_existing_sharding(loader: DataLoader[Any]) -> ExistingSharding | None:
    """Return how ``loader`` is sharded, or None if no sharding is detected."""
    for sampler in samplers_of(loader):
        numbers = _shard_numbers(sampler)
        if numbers is not None:
            kind = "batch sampler" if sampler is getattr(loader, "batch_sampler", None) else "sampler"
            what = f"its {kind} ({type(sampler).__name__})"
            return ExistingSharding(what=what, place="sampler", num_shards=numbers[0], shard=numbers[1])
    return _sharding_of_dataset(loader.dataset)


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """Return the batch sampler and the samplers of ``loader`` without duplicates, outermost first."""
    found: list[Any] = []
    waiting = deque([getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)])
    while waiting and len(found) < _MAX_DEPTH:
        sampler = waiting.popleft()
        if sampler is None or isinstance(sampler, (list, tuple, str)) or any(sampler is other for other in found):
            continue
        found.append(sampler)
        waiting.extend(getattr(sampler, name, None) for name in ("batch_sampler", "sampler", "base_sampler"))
    return found


def set_epoch(epoch: int, *owners: Any) -> None:
    """Set the epoch of those ``owners`` that support epochs: samplers, batch samplers and datasets."""
    for owner in owners:
        if isinstance(owner, SupportsSetEpoch):
            owner.set_epoch(epoch)


class SamplerEpochs:
    """Detects which epoch a script sets on its own distributed sampler.

    Scripts call ``DistributedSampler.set_epoch`` before each pass.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        found = (s for s in samplers_of(loader) if _shard_numbers(s) is not None and isinstance(s, SupportsSetEpoch))
        self.samplers: list[Any] = [sampler for sampler in found if type(getattr(sampler, "epoch", None)) is int]
        """Samplers that shard across ranks and have an ``epoch``."""
        self.record()

    def record(self) -> None:
        """Record the current epochs of the samplers."""
        self._seen = [sampler.epoch for sampler in self.samplers]

    def changed(self) -> int | None:
        """Return the epoch that the script has set since ``record`` was called, or None if it has set none."""
        return next((s.epoch for s, seen in zip(self.samplers, self._seen) if s.epoch != seen), None)


def can_undo_sharding(sampler: Any) -> bool:
    """Return whether the global order that ``sampler`` shards is known, as for torch's DistributedSampler."""
    return type(sampler) is DistributedSampler or (
        isinstance(sampler, DistributedSampler) and type(sampler).__module__.startswith("torchdata.")
    )


def num_repeated(loader: DataLoader[Any]) -> int:
    """Return how many samples torch's DistributedSampler repeats at the end of this rank's shard."""
    for sampler in samplers_of(loader):
        if can_undo_sharding(sampler):
            missing = sampler.total_size - len(sampler.dataset)
            return int(missing > 0 and sampler.rank >= sampler.num_replicas - missing)
    return 0


def check_shards(shardings: list[ExistingSharding], *, world_size: int, line: UserLine) -> bool:
    """Return True if each rank holds one shard of the dataset, or False if each rank holds all of it.

    Args:
        shardings: each rank's sharding, in rank order, so that all ranks raise together. Without a process group, the
            list has one item.

    Raises:
        UsageError: the number of shards is not ``world_size``, or two ranks have the same shard.
    """
    numbers, shards = {sharding.num_shards for sharding in shardings}, [sharding.shard for sharding in shardings]
    if numbers == {-1}:
        return True
    what = shardings[0].what
    if numbers == {1} and world_size > 1 and shardings[0].place == "sampler":
        warn(
            _(
                "{what} was created for one process, but {world_size} are running, and each would read all samples. "
                "echelon shards the loader instead, so that each sample is used once. To keep the sampler, create it "
                "after Accelerator() (or the process group). Otherwise remove it",
                what=what,
                world_size=world_size,
            ),
            at=line,
        )
        return False
    if numbers != {world_size}:
        named = ", ".join(f"rank {rank}: {sharding.num_shards}" for rank, sharding in enumerate(shardings))
        raise UsageError(
            _(
                "expected the loader to have one shard per process (world_size: {world_size}), but {what} shards it "
                "for a different number of processes ({count})",
                world_size=world_size,
                what=what,
                count=named if len(numbers) > 1 else numbers.pop(),
            ),
            where=str(line),
            do=_(
                "remove it, so that echelon shards the loader, or create it with {world_size} shards after "
                "Accelerator() or the process group",
                world_size=world_size,
            ),
        )
    if len(shards) == world_size and sorted(shards) != list(range(world_size)):
        named = ", ".join(f"rank {rank} has shard {shard}" for rank, shard in enumerate(shards))
        raise UsageError(
            f"the loader is sharded by {what}, but the ranks do not have {world_size} different shards: {named}",
            where=str(line),
            do="remove it, so that echelon shards the loader, or pass torch.distributed.get_rank() to it in each process",
        )
    return True


# ---- datasets -----------------------------------------------------------------------------------------------------------


def _sharding_of_dataset(dataset: Any) -> ExistingSharding | None:
    is_iterable = isinstance(dataset, IterableDataset)
    name = type(dataset).__name__
    parts = list(_objects_read_by(dataset))
    by_library = next((sharding for sharding in map(_sharding_by_library, parts) if sharding is not None), None)
    if by_library is not None:
        return by_library
    for found in parts:
        if not is_iterable and found is not dataset:
            continue
        numbers = None if isinstance(found, types.FunctionType) else _shard_numbers(found)
        if numbers is not None:
            inner = "" if found is dataset else f", by its {type(found).__name__}"
            return ExistingSharding(
                what=f"its dataset ({name}{inner})", place="dataset", num_shards=numbers[0], shard=numbers[1]
            )
        if is_iterable and _code_uses_rank(found):
            return ExistingSharding(what=f"its dataset ({name}, whose code uses the rank)", place="dataset")
    return None


def _sharding_by_library(found: Any) -> ExistingSharding | None:
    """Return the sharding that ``found`` applies if it is an object from a known library."""
    kinds = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(found).__mro__]
    if ("datasets", "IterableDataset") in kinds:
        config = getattr(found, "_distributed", None)
        if config is not None:
            numbers = _shard_numbers(config) or (-1, -1)
            what = "its dataset (datasets.distributed.split_dataset_by_node)"
            return ExistingSharding(what=what, place="dataset", num_shards=numbers[0], shard=numbers[1])
    if ("streaming", "StreamingDataset") in kinds:
        return ExistingSharding(what=f"its dataset ({type(found).__name__} from MosaicML streaming)", place="dataset")
    if getattr(found, "__name__", None) == "split_by_node":
        return ExistingSharding(what="its dataset (webdataset.split_by_node)", place="dataset")
    if any(name.startswith("ShardingFilter") for _, name in kinds):
        return ExistingSharding(what=f"its dataset ({type(found).__name__})", place="dataset")
    return None


def _objects_read_by(dataset: Any) -> Iterator[Any]:
    """Yield ``dataset`` and the datasets, iterables and functions in its attributes and closures."""

    def held_by(found: Any) -> Iterable[Any]:
        return filter(_may_shard, found[:32] if isinstance(found, (list, tuple)) else _children(found))

    objects = _reachable([dataset], held_by, max_depth=_MAX_DEPTH)
    return (found for found in objects if not isinstance(found, (list, tuple)))


def _reachable(starts: Iterable[Any], next_of: Callable[[Any], Iterable[Any]], *, max_depth: int) -> Iterator[Any]:
    """Yield ``starts`` and what ``next_of`` leads to, nearest first, each object once."""
    seen: set[int] = set()
    waiting = deque((start, 0) for start in starts)
    while waiting and len(seen) < _MAX_OBJECTS:
        found, depth = waiting.popleft()
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        if depth < max_depth:
            waiting.extend((other, depth + 1) for other in next_of(found))


def _children(found: Any) -> list[Any]:
    if isinstance(found, functools.partial):
        return [found.func, *found.args, *found.keywords.values()]
    if isinstance(found, types.MethodType):
        return [found.__self__, found.__func__]
    if isinstance(found, types.FunctionType):
        cells = found.__closure__ or ()
        return [*_contents(cells), *(found.__defaults__ or ())]
    attributes = getattr(found, "__dict__", None)
    return list(attributes.values()) if isinstance(attributes, Mapping) else []


def _contents(cells: tuple[types.CellType, ...]) -> Iterator[Any]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _may_shard(child: Any) -> bool:
    if isinstance(child, (list, tuple)):
        return len(child) > 0 and any(_may_shard(item) for item in child[:32] if not isinstance(item, (list, tuple)))
    if isinstance(child, (str, bytes, Mapping, type, types.ModuleType)):
        return False
    if isinstance(child, (Dataset, functools.partial, types.FunctionType, types.MethodType)):
        return True
    if isinstance(child, nn.Module):
        return False
    if type(child).__module__.partition(".")[0] == "ray":  # Ray's DataIterator has no __iter__
        return True
    # Tensors and arrays are data; pipeline stages, iterators and samplers may shard it.
    return (
        hasattr(child, "__dict__") and not hasattr(child, "dtype") and (callable(child) or hasattr(child, "__iter__"))
    )


def _shard_numbers(found: Any) -> tuple[int, int] | None:
    """Return (number of shards, index of own shard) if ``found`` has attributes for both, also with a leading "_"."""
    numbers = []
    for names in (_COUNT_NAMES, _INDEX_NAMES):
        values = (getattr(found, written, None) for name in names for written in (name, f"_{name}"))
        numbers.append(next((value for value in values if type(value) is int), None))
    count, index = numbers
    return None if count is None or index is None or not 0 <= index < max(count, 1) else (count, index)


# ---- code ---------------------------------------------------------------------------------------------------------------


def _code_uses_rank(found: Any) -> bool:
    """Return whether the user's code in ``found`` reads both the rank and the number of ranks."""
    is_object = not isinstance(found, types.FunctionType)
    starts: list[Any] = [found]
    if is_object:
        kinds = [kind for kind in type(found).__mro__ if not _is_library(kind.__module__)]
        starts = [vars(kind).get(name) for kind in kinds for name in ("__iter__", "__init__", "__next__", "__call__")]

    def called_by(function: types.FunctionType) -> Iterable[Any]:
        names = set(_names_in(function.__code__))
        called = [function.__globals__.get(name) for name in names]
        called += [getattr(type(found), name, None) for name in names if is_object]
        return filter(_is_users_function, called)

    functions = _reachable(filter(_is_users_function, starts), called_by, max_depth=3)
    words = {name for function in functions for name in _names_in(function.__code__)}
    return bool(words & _RANK_COUNT_NAMES) and bool(words & _RANK_NAMES)


def _is_users_function(found: Any) -> bool:
    return isinstance(found, types.FunctionType) and not _is_library(found.__module__)


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _is_library(module: str | None) -> bool:
    return module is None or module.partition(".")[0] in _LIBRARIES
