"""Reads a whole batch of in-memory tensors with one indexing operation instead of one per sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

_INTEGERS = {int}


class WholeBatches:
    """A ``TensorDataset`` (or a ``Subset`` of one) that returns batches as ``default_collate`` would build them, bit for bit.

    Args:
        dataset: the user's dataset. Its tensors may be modified in place or replaced, and its length may change.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        """The user's dataset."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # while an object is being unpickled or copied
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        tensors, places = _flat(self.dataset, indices)
        rows = _as_rows(places)
        if rows is None or not all(map(_is_plain, tensors)):
            return default_collate([self.dataset[index] for index in indices])
        try:
            return [tensor.index_select(0, rows) for tensor in tensors]
        except IndexError:  # a negative index counts from the end; of others, the dataset's own error tells
            return default_collate([self.dataset[index] for index in indices])


def read_whole_batches(loader: DataLoader[Any]) -> tuple[Any, Callable[[Any], Any]] | None:
    """Return the dataset and the ``collate_fn`` that read the batches of ``loader`` faster; None if its own are needed.

    They read samples that are rows of tensors in memory, are collated by torch's default, and are read in this process.
    """
    if loader.num_workers or loader.collate_fn is not default_collate or type(loader) is not DataLoader:
        return None
    if loader.batch_sampler is None or type(_root(loader.dataset)) is not TensorDataset:
        return None
    return WholeBatches(loader.dataset), already_collated


def already_collated(batch: Any) -> Any:
    """Return ``batch``, the ``collate_fn`` of ``WholeBatches``."""
    return batch


def _root(dataset: Any) -> Any:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def _flat(dataset: Any, indices: Sequence[Any]) -> tuple[Sequence[torch.Tensor], Sequence[Any]]:
    """Return the tensors of the innermost dataset, and the indices into them."""
    while type(dataset) is Subset:
        own = dataset.indices
        indices, dataset = [own[index] for index in indices], dataset.dataset
    return dataset.tensors, indices


def _as_rows(indices: Sequence[Any]) -> torch.Tensor | None:
    """Return the indices as a tensor; None if there are none, or they are not integers."""
    if set(map(type, indices)) != _INTEGERS:
        return None
    # torch.tensor(indices) takes five times as long
    return torch.from_numpy(np.fromiter(indices, np.int64, len(indices)))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether selected rows of ``tensor`` have the layout of stacked rows."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_quantized
    )
