"""Do the ranks read the same data?"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from echelon.base.errors import DesyncError
from echelon.data.lengths import length_of
from echelon.distributed.wire import gather_counts

__all__ = ["agree_on_data"]


def agree_on_data(loader: DataLoader[Any], batch_size: int | None) -> None:
    """Raise on every rank when the datasets, or the batches, do not have one length.

    Collective: every rank.

    Raises:
        DesyncError: the ranks and their lengths.
    """
    lengths, sizes = gather_counts(length_of(loader.dataset), -1 if batch_size is None else batch_size)
    for numbers, what, do in (
        (lengths, "dataset has", "give every rank the whole dataset: prepare() cuts it"),
        (sizes, "batch size is", "give the loader the same batch size on every rank"),
    ):
        if len(set(numbers)) > 1:
            named = ", ".join(f"rank {rank}: {_number(number)}" for rank, number in enumerate(numbers))
            raise DesyncError(
                f"the ranks were given different data: the {what} {named}", where="prepare(DataLoader)", do=do
            )


def _number(number: int) -> str:
    return "unknown" if number < 0 else str(number)
