"""Copies a user's DataLoader with a different dataset or different batches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from echelon.base.errors import UsageError
from echelon.base.optional import require
from echelon.distributed.shard import options_of


def has_own_reading(loader: DataLoader[Any]) -> bool:
    """Return whether the loader's class has an ``__iter__`` of its own, which may change what it reads."""
    for kind in type(loader).__mro__:
        if kind.__module__.startswith(("torch.", "torchdata.")):
            return False
        if "__iter__" in vars(kind):
            return True
    return False


def copy_loader(loader: DataLoader[Any], dataset: Any, *, kind: Any, **choices: Any) -> Any:
    """Return a loader over ``dataset`` with the other options of ``loader``.

    Args:
        kind: ``DataLoader`` or a class that takes the same arguments. A loader that reads in its own way keeps its class.
        choices: options that override the user's, and options that define batches (``batch_sampler``, or ``batch_size``, ...).
    """
    if has_own_reading(loader):
        same = copy.copy(loader)  # not a new object: the arguments of its class are unknown
        same.__dict__.update(choices, dataset=dataset)  # DataLoader forbids plain assignments
        return same
    return kind(dataset, **{**options_of(loader), **choices})


class FollowedBatches(BatchSampler):
    """The batches for a loader that reads in its own way, counted to check that it yields one batch for each of them."""

    def __init__(self, batches: Any, kind: type) -> None:
        # BatchSampler.__init__ is not called, because another batch sampler draws the batches.
        self.batches = batches
        self._kind = kind
        self._num_drawn = [0]

    def __getattr__(self, name: str) -> Any:
        if name == "batches":  # while an object is being unpickled or copied
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator function, so that nested passes have separate counts.
        self._num_drawn = [0]
        return self._draw(iter(self.batches), self._num_drawn)

    @staticmethod
    def _draw(batches: Iterator[list[int]], num_drawn: list[int]) -> Iterator[list[int]]:
        for batch in batches:
            num_drawn[0] += 1
            yield batch

    def follow(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the ``batches`` of a pass that begins.

        Raises:
            UsageError: there are more or fewer of them than were drawn here.
        """
        num_drawn, num_yielded = self._num_drawn, 0
        for batch in batches:
            num_drawn = self._num_drawn if num_yielded == 0 else num_drawn  # a generator function has begun only now
            num_yielded += 1
            if num_yielded > num_drawn[0]:
                break
            yield batch
        num_drawn = num_drawn if num_yielded else self._num_drawn
        if num_yielded != num_drawn[0]:
            raise UsageError(
                f"{self._kind.__name__}.__iter__ has yielded {num_yielded} batches where its batch sampler drew {num_drawn[0]}, "
                "so the batches cannot be assigned to ranks",
                where=f"the prepared {self._kind.__module__}.{self._kind.__qualname__}",
                do="make it yield one batch for each batch of super().__iter__(); or give each rank its own samples and pass "
                "already_sharded=True",
            )


def stateful_loader() -> Callable[..., Any]:
    """Return a factory for torchdata's StatefulDataLoader.

    Raises:
        MissingExtraError: torchdata is not installed.
    """
    module = require("torchdata.stateful_dataloader", extra="stateful", purpose="use_stateful_dataloader=True")

    def make(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            # torchdata 0.11 calls torch.set_vital, which is deprecated in torch 2.13.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)
            return module.StatefulDataLoader(*args, **kwargs)

    return make
