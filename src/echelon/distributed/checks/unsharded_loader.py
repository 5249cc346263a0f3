"""Plain DDP loops over a DataLoader that nobody cut for the ranks: every rank reads all samples, and one warning says so."""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from echelon.base.warnings import UserLine, user_line, warn
from echelon.distributed.stores import store_of

__all__ = ["UnshardedLoaderCheck"]

_LOOKS = 50  # steps at which rank zero looks whether the others have said what they read
_SHOWN = 8
_PLAIN = (int, float, str, bool, bytes, type(None))


@final
class UnshardedLoaderCheck:
    """Looks, at the first step of a DDP model, at the loader that is being read, and compares its data set with the other ranks'.

    The ranks leave a digest in the store, and rank zero reads them when they are there: nobody waits.
    """

    def __init__(self) -> None:
        self._passes: list[tuple[weakref.ref[Any], weakref.ref[DataLoader[Any]], UserLine]] = []
        self._looks_left = _LOOKS
        self._line: UserLine | None = None
        self._store: dist.Store | None = None
        self.stop = _watch_passes(self)
        """Watches no more."""

    def note_pass(self, loader: DataLoader[Any], iterator: object) -> None:
        """A loader begins to be read."""
        self._passes = [one for one in self._passes if one[0]() is not None]
        self._passes.append((weakref.ref(iterator), weakref.ref(loader), user_line()))

    def look(self) -> None:
        """Look at a step."""
        if not self._looks_left:
            return
        self._looks_left -= 1
        if self._store is None:
            self._tell()
        if dist.get_rank() == 0 and self._line is not None:
            self._compare(self._line)
        if not self._looks_left or (dist.get_rank() > 0 and self._store is not None):
            self._looks_left = 0
            self.stop()

    def _tell(self) -> None:
        """Say to rank zero what is read here."""
        read = [
            (loader, line)
            for iterator, reference, line in self._passes
            if iterator() is not None and (loader := reference()) is not None
        ]
        self._passes.clear()
        group = dist.group.WORLD
        assert group is not None
        self._store = dist.PrefixStore("echelon/unsharded_loader", store_of(group))
        digest = "cut"  # or nothing that is known to be whole
        if read and all(_may_be_whole(loader) for loader, _ in read):
            loader, self._line = read[-1]
            digest = hashlib.sha256(repr(_described(loader.dataset)).encode()).hexdigest()
        self._store.set(str(dist.get_rank()), digest)

    def _compare(self, line: UserLine) -> None:
        assert self._store is not None
        keys = [str(rank) for rank in range(dist.get_world_size())]
        if not self._store.check(keys):
            return
        self._looks_left = 0
        if len({self._store.get(key) for key in keys}) > 1:
            return
        warn(
            f"this DataLoader feeds a DistributedDataParallel model on {len(keys)} ranks, and each of them reads all of its samples: "
            f"an epoch trains on every sample {len(keys)} times. Write loader = echelon.distributed.shard(loader), or give it a "
            "DistributedSampler",
            at=line,
        )


def _may_be_whole(loader: DataLoader[Any]) -> bool:
    """Tell whether ``loader`` reads all of its data set, as far as its samplers say: torch's own, without a rank."""
    sampler = loader.sampler
    return (
        not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) in (BatchSampler, type(None))
        and (type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement))
        and not any(hasattr(loader.dataset, name) for name in ("num_replicas", "rank", "world_size"))
    )


def _described(value: Any, depth: int = 0) -> Any:
    """Return what tells the data set of one rank from that of another, without reading a sample."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return list(value.shape), str(value.dtype), [*_ends(value.detach().flatten())]
    if isinstance(value, (list, tuple, range)) or type(value).__module__ == "numpy":
        return type(value).__name__, getattr(value, "shape", None), [_described(one, depth + 1) for one in _ends(value)]
    found: list[Any] = [type(value).__qualname__]
    if depth == 0 and hasattr(value, "__len__"):
        found.append(len(value))
    if isinstance(getattr(value, "_fingerprint", None), str):  # of the library datasets
        return [*found, value._fingerprint]
    if isinstance(value, Subset):
        found.append(_described(list(value.indices), depth + 1))
    if depth < 3 and hasattr(value, "__dict__"):
        found += [(name, _described(one, depth + 1)) for name, one in sorted(vars(value).items())]
    return found


def _ends(value: Any) -> list[Any]:
    """Return the first and the last items."""
    if not getattr(value, "shape", (1,)):  # a number of numpy
        return [value.item()]
    count = len(value)
    ends = [*range(min(count, _SHOWN)), *range(max(_SHOWN, count - _SHOWN), count)]
    return [one.item() if hasattr(one := value[i], "item") and not getattr(one, "shape", ()) else one for i in ends]


def _watch_passes(check: UnshardedLoaderCheck) -> Callable[[], None]:
    """Show ``check`` each loader that begins to be read; return what ends that."""
    plain, seen_by = DataLoader.__iter__, weakref.ref(check)

    @functools.wraps(plain)
    def begin(self: Any) -> Any:
        iterator, found = plain(self), seen_by()
        if found is not None:
            found.note_pass(self, iterator)
        return iterator

    def stop() -> None:
        if DataLoader.__iter__ is begin:
            DataLoader.__iter__ = plain  # type: ignore[method-assign]

    DataLoader.__iter__ = begin  # type: ignore[method-assign]
    return stop
