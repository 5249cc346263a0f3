"""The batches of one epoch, which the data end: their length is only what the training was planned by."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from echelon.base.protocols import KnowsItsEnd
from echelon.base.warnings import warn
from echelon.trainer.training_plan import TrainingPlan

if TYPE_CHECKING:
    from echelon.accelerator.accelerator import Accelerator

__all__ = ["EpochBatches", "warn_of_wrong_length"]


class EpochBatches(Iterator[Any]):
    """The batches of a pass over ``loader``; asked, they say whether there are more.

    A prepared loader looks one batch ahead. Of another one, which may be any iterable, a batch is read ahead only where
    somebody asks: after as many as were planned.

    Args:
        loader: prepared, or a user's own.
        accelerator: whose ranks must agree that there are more; None: each answers for itself.
        num_planned: batches after which a group of them ends with the data, without a look beyond.
    """

    def __init__(self, loader: Any, accelerator: Accelerator | None = None, *, num_planned: int = sys.maxsize) -> None:
        self._prepared = loader if isinstance(loader, KnowsItsEnd) else None
        self._accelerator = accelerator
        self._batches = iter(loader)
        self._num_left = num_planned
        self._ahead: list[Any] = []
        self._is_begun = self._is_over = False

    def __next__(self) -> Any:
        if self._ahead:
            return self._ahead.pop()
        if self._num_left <= 0 and self.is_known_to_be_over:
            raise StopIteration
        try:
            batch = next(self._batches)
        except StopIteration:
            self._is_over = True
            raise
        self._is_begun = True
        self._num_left -= 1
        return batch

    @property
    def is_known_to_be_over(self) -> bool:
        """Was the batch in hand the last one? Not every loader knows."""
        return self._is_over or (self._is_begun and self._prepared is not None and self._prepared.end_of_dataloader)

    def has_more(self) -> bool:
        """Whether there is a batch after the one in hand; a loader that does not know is read to find out.

        Collective: with an ``accelerator``, of a loader that is not prepared.
        """
        if self._prepared is not None and self._is_begun:
            return not self.is_known_to_be_over
        if not self._ahead and not self._is_over:
            batch = next(self._batches, _END)
            self._is_over = batch is _END
            self._ahead = [] if self._is_over else [batch]
        accelerator = self._accelerator
        if self._prepared is not None or accelerator is None or accelerator.num_processes == 1:
            return bool(self._ahead)
        num_ranks = accelerator.num_processes
        flag = torch.tensor(float(bool(self._ahead)), device=accelerator.device)
        num_with = round(float(accelerator.reduce(flag, "sum")))
        if 0 < num_with < num_ranks:
            warn(
                f"{num_with} of {num_ranks} ranks have more batches than the others in this epoch, which ends here: theirs are "
                "not trained on. Let get_train_dataloader return accelerator.prepare(loader), which gives every rank equally "
                "many, or give each rank as many batches"
            )
        if num_with < num_ranks:
            self._ahead, self._is_over = [], True
        return num_with == num_ranks

    def close(self) -> None:
        """End the reading of a prepared loader, which counts as being read until then."""
        if isinstance(self._batches, Generator):
            self._batches.close()


def warn_of_wrong_length(
    plan: TrainingPlan, loader: Any, *, epoch: int, num_batches: int, has_more: bool, ends: bool, max_steps: int
) -> None:
    """Warn that an epoch does not have as many batches as the training was planned with.

    Args:
        plan: of the training.
        loader: of its data.
        epoch: the epoch, from zero.
        num_batches: that were trained on in it.
        has_more: there are more.
        ends: and the epoch ends all the same, because it seems to have no end.
        max_steps: as the user set it.
    """
    is_short = num_batches < plan.batches_per_epoch
    more = " and goes on" if has_more else ""
    text = f"epoch {epoch + 1} had {num_batches} batches on this process{more}, and the training was planned with "
    text += f"{plan.batches_per_epoch} by its length ({_where(loader)})."
    if ends:
        text += " It is taken for data without an end: what comes after is not read, and later epochs end as planned."
    elif not is_short:
        text += " All of them are trained on."
    if max_steps <= 0:
        text += f" The schedule of the learning rate was made for {plan.max_steps} steps" + (
            ", which the training does not reach." if is_short else ": the rate of the last of them is kept."
        )
    num_workers = getattr(loader, "num_workers", 0)
    if num_workers > 1 and not is_short:
        text += (
            f" With num_workers={num_workers} each worker has a last batch of its own, and a dataset that does not divide itself "
            "by get_worker_info() is read by each of them."
        )
    steps = "" if max_steps > 0 else "Set max_steps= to the number of steps that the training is to have, or let "
    warn(f"{text} {steps or 'Let '}__len__ be the number of samples that an epoch gives")


def _where(loader: Any) -> str:
    """Return what says how long ``loader`` is, and the user's line of it."""
    whole = getattr(loader, "original", loader)
    owner = whole
    if isinstance(whole, DataLoader):
        owner = whole.dataset
        if not isinstance(owner, IterableDataset):
            owner = whole.sampler if whole.batch_sampler is None else whole.batch_sampler
            # torch's own counts what the sampler says
            owner = (
                owner.sampler if type(owner).__module__.startswith("torch.") and hasattr(owner, "sampler") else owner
            )
    code = getattr(inspect.unwrap(getattr(type(owner), "__len__", lambda _: 0)), "__code__", None)
    place = "" if code is None else f", {code.co_filename}:{code.co_firstlineno}"
    return f"{type(owner).__name__}.__len__{place}"


_END: Any = object()
