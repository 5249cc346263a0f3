"""Finds out that a loader has been cut for the ranks already: by its sampler, by its batch sampler, or by its dataset."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from echelon.base.errors import UsageError
from echelon.base.protocols import SupportsSetEpoch
from echelon.base.warnings import UserLine, warn

__all__ = [
    "OwnCut",
    "check_parts",
    "cutters_with_epoch",
    "find_own_cut",
    "is_divisible_again",
    "num_repeated",
    "samplers_of",
]

# Where samplers and datasets of others keep how many parts there are, and which one is theirs; also with a "_" before it.
_COUNTS = (
    "num_replicas",
    "world_size",
    "num_processes",
    "num_ranks",
    "num_shards",
    "shard_count",
    "data_parallel_size",
)
_INDICES = (
    "rank",
    "process_index",
    "global_rank",
    "shard_id",
    "shard_index",
    "cur_shard",
    "output_split_idx",  # Ray Data's streaming splits
    "data_parallel_rank",
)
# What code asks that divides data by itself: one of each.
_ASKS_COUNT = frozenset({"get_world_size", "num_processes", "WORLD_SIZE"})
_ASKS_INDEX = frozenset({"get_rank", "process_index", "RANK"})
# Their code is known: it is not searched for these words.
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
class OwnCut:
    """What has been cut for the ranks before it was given to echelon, on this rank."""

    what: str
    """What cuts it, for messages, such as ``its sampler (DistributedSampler)``."""
    place: Literal["sampler", "dataset", "user"]
    """The samplers, the dataset, or nobody knows: the user says so."""
    num_parts: int = -1
    """Into how many parts; -1: it does not say."""
    part: int = -1
    """Which one is that of this rank; -1: it does not say."""


def find_own_cut(loader: DataLoader[Any]) -> OwnCut | None:
    """Return how ``loader`` has been cut already; None where nothing shows that it has been."""
    for sampler in samplers_of(loader):
        numbers = _numbers_of(sampler)
        if numbers is not None:
            kind = "batch sampler" if sampler is getattr(loader, "batch_sampler", None) else "sampler"
            what = f"its {kind} ({type(sampler).__name__})"
            return OwnCut(what=what, place="sampler", num_parts=numbers[0], part=numbers[1])
    return _cut_of_dataset(loader.dataset)


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """Return the batch sampler and the samplers of ``loader``, each once, from the outermost to the innermost."""
    found: list[Any] = []
    waiting = deque([getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)])
    while waiting and len(found) < _MAX_DEPTH:
        sampler = waiting.popleft()
        if sampler is None or isinstance(sampler, (list, tuple, str)) or any(sampler is other for other in found):
            continue
        found.append(sampler)
        waiting.extend(getattr(sampler, name, None) for name in ("batch_sampler", "sampler", "base_sampler"))
    return found


def cutters_with_epoch(loader: DataLoader[Any]) -> list[Any]:
    """Return the samplers of ``loader`` that cut for ranks, and draw another order in each ``epoch``."""
    found = (s for s in samplers_of(loader) if _numbers_of(s) is not None and isinstance(s, SupportsSetEpoch))
    return [sampler for sampler in found if type(getattr(sampler, "epoch", None)) is int]


def is_divisible_again(sampler: Any) -> bool:
    """Is the whole order behind ``sampler`` known, so that its cut can be undone? That of torch's own class is."""
    return type(sampler) is DistributedSampler or (
        isinstance(sampler, DistributedSampler) and type(sampler).__module__.startswith("torchdata.")
    )


def num_repeated(loader: DataLoader[Any]) -> int:
    """Return how many samples at the end of this rank's part torch's DistributedSampler has put there again."""
    for sampler in samplers_of(loader):
        if is_divisible_again(sampler):
            missing = sampler.total_size - len(sampler.dataset)
            return int(missing > 0 and sampler.rank >= sampler.num_replicas - missing)
    return 0


def check_parts(cuts: list[OwnCut], *, world_size: int, line: UserLine) -> bool:
    """Return whether ``cuts``, of ranks 0, 1, ..., are parts of one whole; False where there is but one part: the whole.

    Args:
        cuts: equal on all ranks, so that all of them raise; where there is no process group, this one's only.
        world_size: the number of parts that there should be.
        line: where the loader was given to echelon.

    Raises:
        UsageError: they are parts for another number of processes, or two ranks have the same part.
    """
    numbers, parts = {cut.num_parts for cut in cuts}, [cut.part for cut in cuts]
    if numbers == {-1}:
        return True
    what = cuts[0].what
    if numbers == {1} and world_size > 1 and cuts[0].place == "sampler":
        warn(
            f"{what} was made for one process, and there are {world_size}: it gives each of them everything, so the loader is "
            "cut here, and each sample comes once. Make it after Accelerator() (or the process group) to keep its own cut, "
            "or leave it out",
            at=line,
        )
        return False
    if numbers != {world_size}:
        named = ", ".join(f"rank {rank}: {cut.num_parts}" for rank, cut in enumerate(cuts))
        raise UsageError(
            f"the loader has been cut by {what} for another number of processes: there are {world_size}, and it says "
            f"{named if len(numbers) > 1 else numbers.pop()}",
            where=str(line),
            do="leave it out (echelon cuts the loader), or make it after Accelerator() or the process group with "
            f"{world_size} parts",
        )
    if len(parts) == world_size and sorted(parts) != list(range(world_size)):
        named = ", ".join(f"rank {rank} has part {part}" for rank, part in enumerate(parts))
        raise UsageError(
            f"the loader has been cut by {what}, and the parts of the ranks are not {world_size} different ones: {named}",
            where=str(line),
            do="leave it out (echelon cuts the loader), or give it the rank of each process: torch.distributed.get_rank()",
        )
    return True


# ---- datasets -----------------------------------------------------------------------------------------------------------


def _cut_of_dataset(dataset: Any) -> OwnCut | None:
    is_iterable = isinstance(dataset, IterableDataset)
    name = type(dataset).__name__
    parts = list(_parts_of(dataset))
    by_library = next((cut for cut in map(_cut_by_library, parts) if cut is not None), None)
    if by_library is not None:
        return by_library
    for found in parts:
        if not is_iterable and found is not dataset:
            continue
        numbers = None if isinstance(found, types.FunctionType) else _numbers_of(found)
        if numbers is not None:
            inner = "" if found is dataset else f", by its {type(found).__name__}"
            return OwnCut(what=f"its dataset ({name}{inner})", place="dataset", num_parts=numbers[0], part=numbers[1])
        if is_iterable and _asks_for_rank(found):
            return OwnCut(what=f"its dataset ({name}, whose code asks for the rank)", place="dataset")
    return None


def _cut_by_library(found: Any) -> OwnCut | None:
    """Return the cut that a library's own object stands for."""
    kinds = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(found).__mro__]
    if ("datasets", "IterableDataset") in kinds:
        config = getattr(found, "_distributed", None)
        if config is not None:
            numbers = _numbers_of(config) or (-1, -1)
            what = "its dataset (datasets.distributed.split_dataset_by_node)"
            return OwnCut(what=what, place="dataset", num_parts=numbers[0], part=numbers[1])
    if ("streaming", "StreamingDataset") in kinds:
        return OwnCut(what=f"its dataset ({type(found).__name__} of MosaicML streaming)", place="dataset")
    if getattr(found, "__name__", None) == "split_by_node":
        return OwnCut(what="its dataset (webdataset.split_by_node)", place="dataset")
    if any(name.startswith("ShardingFilter") for _, name in kinds):
        return OwnCut(what=f"its dataset ({type(found).__name__})", place="dataset")
    return None


def _parts_of(dataset: Any) -> Iterator[Any]:
    """Yield ``dataset`` and what it reads from: datasets, iterables and functions in its attributes and closures."""
    seen: set[int] = set()
    waiting: deque[tuple[Any, int]] = deque([(dataset, 0)])
    while waiting and len(seen) < _MAX_OBJECTS:
        found, depth = waiting.popleft()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, (list, tuple)):
            children: Iterable[Any] = found[:32]
        else:
            yield found
            children = _children(found)
        if depth < _MAX_DEPTH:
            waiting.extend((child, depth + 1) for child in children if _may_read(child))


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


def _may_read(child: Any) -> bool:
    if isinstance(child, (list, tuple)):
        return len(child) > 0 and any(_may_read(item) for item in child[:32] if not isinstance(item, (list, tuple)))
    if isinstance(child, (str, bytes, Mapping, type, types.ModuleType)):
        return False
    if isinstance(child, (Dataset, functools.partial, types.FunctionType, types.MethodType)):
        return True
    if isinstance(child, nn.Module):
        return False
    if type(child).__module__.partition(".")[0] == "ray":  # its iterators cannot be iterated as they are
        return True
    # A tensor or an array is data; a library's stage, an iterator or a sampler may divide it.
    return (
        hasattr(child, "__dict__") and not hasattr(child, "dtype") and (callable(child) or hasattr(child, "__iter__"))
    )


def _numbers_of(found: Any) -> tuple[int, int] | None:
    """Return (number of parts, own part) where ``found`` has attributes for both."""
    count, index = _first_integer(found, _COUNTS), _first_integer(found, _INDICES)
    if count is None or index is None or not 0 <= index < max(count, 1):
        return None
    return count, index


def _first_integer(found: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        for written in (name, f"_{name}"):
            value = getattr(found, written, None)
            if type(value) is int:
                return value
    return None


# ---- code ---------------------------------------------------------------------------------------------------------------


def _asks_for_rank(found: Any) -> bool:
    """Does the user's own code in ``found`` ask for both its rank and the number of ranks?"""
    if isinstance(found, types.FunctionType):
        starts: list[Any] = [found]
    else:
        kinds = [kind for kind in type(found).__mro__ if not _is_known(kind.__module__)]
        starts = [vars(kind).get(name) for kind in kinds for name in ("__iter__", "__init__", "__next__", "__call__")]
    words: set[str] = set()
    seen: set[int] = set()
    waiting = deque((start, 0) for start in starts if isinstance(start, types.FunctionType))
    while waiting and len(seen) < _MAX_OBJECTS:
        function, depth = waiting.popleft()
        if id(function) in seen or _is_known(function.__module__):
            continue
        seen.add(id(function))
        names = set(_words_of(function.__code__))
        words |= names
        if depth < 3:
            called = [function.__globals__.get(name) for name in names]
            called += [getattr(type(found), name, None) for name in names if not isinstance(found, types.FunctionType)]
            waiting.extend((one, depth + 1) for one in called if isinstance(one, types.FunctionType))
    return bool(words & _ASKS_COUNT) and bool(words & _ASKS_INDEX)


def _words_of(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _words_of(constant)


def _is_known(module: str | None) -> bool:
    return module is None or module.partition(".")[0] in _LIBRARIES
