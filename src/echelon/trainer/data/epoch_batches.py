"""The batches of one epoch. The data determines how many there are; its length is used only for planning."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.protocols import KnowsItsEnd
from echelon.base.warnings import warn
from echelon.trainer.training_plan import TrainingPlan

if TYPE_CHECKING:
    from echelon.accelerator.accelerator import Accelerator


class EpochBatches(Iterator[Any]):
    """Iterates over one pass of ``loader`` and detects whether more batches follow.

    A prepared loader always reads one batch ahead. For any other iterable, ``has_more`` reads one batch ahead.

    Args:
        loader: a prepared loader, or any iterable.
        accelerator: makes all its ranks agree on ``has_more``; None for a local answer.
        num_planned: number of batches after which iteration stops if the data is known to be exhausted.
    """

    def __init__(self, loader: Any, accelerator: Accelerator | None = None, *, num_planned: int = sys.maxsize) -> None:
        self._prepared = loader if isinstance(loader, KnowsItsEnd) else None
        self._accelerator = accelerator
        self._batches = iter(loader)
        self._num_left = num_planned
        self._ahead: list[Any] = []
        self._has_started = self._is_over = False

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
        self._has_started = True
        self._num_left -= 1
        return batch

    def peek(self) -> Any:
        """Return the first batch without consuming it, or None if there are no batches."""
        batch = next(self, None)
        self._ahead = [] if batch is None else [batch]
        return batch

    @property
    def is_known_to_be_over(self) -> bool:
        """Whether the current batch is known to be the last one."""
        return self._is_over or (self._has_started and self._prepared is not None and self._prepared.end_of_dataloader)

    def has_more(self) -> bool:
        """Return whether a batch follows the current one; if the loader is not prepared, this may read that batch.

        Collective: call on every rank if there is an ``accelerator`` and the loader is not prepared.
        """
        if self._prepared is not None and self._has_started:
            return not self.is_known_to_be_over
        if not self._ahead and not self._is_over:
            batch = next(self._batches, _END)
            self._is_over = batch is _END
            self._ahead = [] if self._is_over else [batch]
        accelerator = self._accelerator
        if self._prepared is not None or accelerator is None or accelerator.session.num_readers == 1:
            return bool(self._ahead)
        num_ranks = accelerator.session.num_readers
        flag = torch.tensor(float(bool(self._ahead)), device=accelerator.device)
        num_with = round(float(accelerator.reduce(flag, "sum")))
        if 0 < num_with < num_ranks:
            warn(
                _(
                    "the epoch ends early: only {num_with} of {num_ranks} ranks have more batches, which are skipped. "
                    "Return accelerator.prepare(loader) from get_train_dataloader: a prepared loader yields the same "
                    "number of batches on every rank",
                    num_with=num_with,
                    num_ranks=num_ranks,
                )
            )
        if num_with < num_ranks:
            self._ahead, self._is_over = [], True
        return num_with == num_ranks

    def close(self) -> None:
        """End the iteration over a prepared loader, which counts as active until then."""
        if isinstance(self._batches, Generator):
            self._batches.close()


def warn_of_wrong_length(
    plan: TrainingPlan, loader: Any, *, epoch: int, num_batches: int, has_more: bool, ends: bool, max_steps: int
) -> None:
    """Warn that an epoch has more or fewer batches than planned.

    Args:
        ends: whether the epoch ends anyway, because the data seems infinite.
    """
    is_short = num_batches < plan.batches_per_epoch
    what = _(
        "epoch {epoch} had {number} batch{es} on this process{more}, but the data's length ({where}) is {planned}.",
        epoch=epoch + 1,
        number=num_batches,
        es="es" if num_batches != 1 else "",
        more=_(", with more to come") if has_more else "",
        where=_where(loader),
        planned=plan.batches_per_epoch,
    )
    parts: list[str] = [what]
    if ends:
        parts.append(
            _("The data seems infinite, so the rest of this epoch is skipped, and later epochs end as planned.")
        )
    elif not is_short:
        parts.append(_("Training uses all of them."))
    if max_steps <= 0 and is_short:
        text = N_("The learning rate schedule was set up for {steps} steps, which training does not reach.")
        parts.append(_(text, steps=plan.max_steps))
    elif max_steps <= 0:
        text = N_("The learning rate schedule was set up for {steps} steps and stays at its final value afterwards.")
        parts.append(_(text, steps=plan.max_steps))
    num_workers = getattr(loader, "num_workers", 0)
    if num_workers > 1 and not is_short:
        text = N_(
            "With num_workers={num_workers}, each worker produces its own incomplete last batch, and reads the whole dataset "
            "unless the dataset shards itself with get_worker_info()."
        )
        parts.append(_(text, num_workers=num_workers))
    advice = N_("Set max_steps= to the number of steps, or return the true number of samples per epoch from __len__")
    parts.append(_("Return the true number of samples per epoch from __len__") if max_steps > 0 else _(advice))
    warn(" ".join(parts))


def _where(loader: Any) -> str:
    """Return the ``__len__`` that defines the length of ``loader``, with its file and line."""
    whole = getattr(loader, "original", loader)
    owner = whole
    if isinstance(whole, DataLoader):
        owner = whole.dataset
        if not isinstance(owner, IterableDataset):
            owner = whole.sampler if whole.batch_sampler is None else whole.batch_sampler
            # torch's batch sampler delegates to the sampler
            owner = (
                owner.sampler if type(owner).__module__.startswith("torch.") and hasattr(owner, "sampler") else owner
            )
    code = getattr(inspect.unwrap(getattr(type(owner), "__len__", lambda _: 0)), "__code__", None)
    place = "" if code is None else f", {code.co_filename}:{code.co_firstlineno}"
    return f"{type(owner).__name__}.__len__{place}"


_END: Any = object()
