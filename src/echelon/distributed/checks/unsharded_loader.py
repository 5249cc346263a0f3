"""Warns once if every rank in a plain DDP loop reads all samples because its DataLoader is not sharded."""

from __future__ import annotations

import hashlib
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import UserLine, user_line, warn_here
from echelon.distributed.stores import exchange_once, store_of
from echelon.distributed.torch_hooks import watch_calls

_NUM_ENDS = 8
_PLAIN = (int, float, str, bool, bytes, type(None))


@final
class UnshardedLoaderCheck:
    """Compares this rank's dataset with those on the other ranks at the first step of a DDP model.

    Each rank writes a digest to the store, and the last one to do so compares them. No rank waits.
    """

    def __init__(self) -> None:
        # By iterator: its dataset, whether it may read all of it, and the line. The loader itself may already be gone, as in
        # `for batch in DataLoader(...)`.
        self._passes: WeakKeyDictionary[Any, tuple[Any, bool, UserLine]] = WeakKeyDictionary()
        self._is_done = False
        self.stop = watch_calls(self, DataLoader, "__iter__", UnshardedLoaderCheck.add_pass)
        """Stops the check."""

    def add_pass(self, loader: DataLoader[Any], iterator: object) -> None:
        """Record the start of a pass."""
        self._passes.pop(iterator, None)  # persistent workers keep their iterator: this is its latest pass
        self._passes[iterator] = loader.dataset, _may_read_all(loader), user_line()

    def check_step(self) -> None:
        """Run the check at the first optimizer step of a DDP model."""
        if self._is_done:
            return
        self._is_done = True
        self.stop()
        read = list(self._passes.values())
        self._passes.clear()
        digest, line = b"sharded", None  # or possibly so
        if read and all(may_read_all for _dataset, may_read_all, _line in read):
            dataset, _may_read_all, line = read[-1]
            digest = hashlib.sha256(repr(_describe_dataset(dataset)).encode()).digest()
        store = dist.PrefixStore("echelon/unsharded_loader", store_of())
        try:
            digests = exchange_once(store, digest, rank=dist.get_rank(), world_size=dist.get_world_size())
        except dist.DistNetworkError:
            # Without a launcher rank zero holds the store, and it may have finished its work. If it has failed instead, the
            # next collective raises.
            return
        if digests is None or line is None or len(set(digests)) > 1:
            return
        # Only the last rank has compared the data, so it warns whatever its number.
        warn_here(
            _(
                "this DataLoader feeds a DistributedDataParallel model on {num_digests} ranks, and each rank reads "
                "all of its samples. An epoch therefore trains on every sample {num_digests} times. Use loader = "
                "echelon.distributed.shard(loader) or a DistributedSampler",
                num_digests=len(digests),
            ),
            at=line,
        )


def _may_read_all(loader: DataLoader[Any]) -> bool:
    """Return whether ``loader`` has torch's own samplers and a dataset without a rank, so it may read the whole dataset."""
    sampler = loader.sampler
    return (
        not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) in (BatchSampler, type(None))
        and (type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement))
        and not any(hasattr(loader.dataset, name) for name in ("num_replicas", "rank", "world_size"))
    )


def _describe_dataset(value: Any, depth: int = 0) -> Any:
    """Describe a dataset without loading any samples, so that two ranks' datasets can be distinguished."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return list(value.shape), str(value.dtype), [*_ends(value.detach().flatten())]
    if isinstance(value, (list, tuple, range)) or type(value).__module__ == "numpy":
        return (
            type(value).__name__,
            getattr(value, "shape", None),
            [_describe_dataset(one, depth + 1) for one in _ends(value)],
        )
    found: list[Any] = [type(value).__qualname__]
    if depth == 0 and hasattr(value, "__len__"):
        found.append(len(value))
    if isinstance(getattr(value, "_fingerprint", None), str):  # of the library datasets
        return [*found, value._fingerprint]
    if isinstance(value, Subset):
        found.append(_describe_dataset(list(value.indices), depth + 1))
    if depth < 3 and hasattr(value, "__dict__"):
        found += [(name, _describe_dataset(one, depth + 1)) for name, one in sorted(vars(value).items())]
    return found


def _ends(value: Any) -> list[Any]:
    if not getattr(value, "shape", (1,)):  # a NumPy scalar
        return [value.item()]
    count = len(value)
    ends = [*range(min(count, _NUM_ENDS)), *range(max(_NUM_ENDS, count - _NUM_ENDS), count)]
    return [one.item() if hasattr(one := value[i], "item") and not getattr(one, "shape", ()) else one for i in ends]
