"""The Trainer's default collators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import default_collate

from echelon.base.errors import UsageError


@runtime_checkable
class Tokenizer(Protocol):
    """An object that pads samples, such as a transformers tokenizer or feature extractor."""

    def pad(self, features: Any, **options: Any) -> Any:
        """Pad ``features`` and return a batch."""
        ...


def default_data_collator(features: Sequence[Any], return_tensors: str = "pt") -> Any:
    """Stack samples into a batch: mappings key by key, other samples with torch's ``default_collate``.

    In a mapping, ``label`` (a number or a tensor) and ``label_ids`` (a list of numbers or a tensor) become ``labels``:
    int64 for integers, otherwise float32. A list under ``label`` becomes float32 (multi-hot labels), a tensor under
    ``label_ids`` keeps its dtype, and numbers give one dimension, [batch], also as tensors of one element. Other columns
    keep their dtype; strings and None are dropped. Any other object is treated as a mapping of its attributes.

    Args:
        features: samples.
        return_tensors: ``pt`` for torch tensors, ``np`` for arrays.

    Raises:
        UsageError: ``return_tensors`` is neither.

    Source: the transformers function of the same name.

    Examples:
        >>> default_data_collator([{"x": [1, 2], "label": 0}, {"x": [3, 4], "label": 1}])
        {'labels': tensor([0, 1]), 'x': tensor([[1, 2],
                [3, 4]])}
    """
    if return_tensors not in ("pt", "np"):
        raise UsageError(
            f"return_tensors={return_tensors!r} is not supported",
            where="default_data_collator(return_tensors=)",
            do="set return_tensors to 'pt' or 'np'",
        )
    first = features[0]
    if isinstance(first, (tuple, list, torch.Tensor, np.ndarray, int, float)):
        return default_collate(list(features))
    rows: Sequence[Mapping[str, Any]] = (
        list(features) if isinstance(first, Mapping) else [vars(feature) for feature in features]
    )
    batch: dict[str, Any] = _labels(rows)
    for name, value in rows[0].items():
        if name not in ("label", "label_ids") and value is not None and not isinstance(value, str):
            batch[name] = _stack([row[name] for row in rows])
    return {name: column.numpy() for name, column in batch.items()} if return_tensors == "np" else batch


class PaddingCollator:
    """Pads samples to the longest one in the batch with the tokenizer's ``pad``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a batch; ``label`` and ``label_ids`` become ``labels``."""
        batch = dict(self.tokenizer.pad(list(features), return_tensors="pt"))
        for old in ("label", "label_ids"):
            if old in batch:
                batch["labels"] = batch.pop(old)
        return batch


def _labels(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the column ``labels``, made from ``label`` (usually a number) or from ``label_ids`` (a list of numbers)."""
    label, ids = rows[0].get("label"), rows[0].get("label_ids")
    if isinstance(label, torch.Tensor):
        labels = torch.stack([row["label"] for row in rows])
        is_integer = not (labels.is_floating_point() or labels.is_complex())
        # One number per sample: [batch], whatever the dimensions of its tensor.
        labels = labels.reshape(len(rows)) if label.numel() == 1 else labels
        return {"labels": labels.to(torch.long if is_integer else torch.float)}
    if label is not None:
        return {"labels": _numbers([row["label"] for row in rows], first=label)}
    if isinstance(ids, torch.Tensor):
        return {"labels": torch.stack([row["label_ids"] for row in rows])}
    if ids is not None:
        first = ids[0] if isinstance(ids, (Sequence, np.ndarray)) and len(ids) else ids
        return {"labels": _numbers([row["label_ids"] for row in rows], first=first)}
    return {}


def _numbers(values: list[Any], *, first: Any) -> torch.Tensor:
    """Return ``values`` as int64 if ``first`` is an integer, otherwise as float32."""
    first = first.item() if isinstance(first, np.ndarray) and not first.ndim else first
    # np.asarray, because torch.tensor is slow for a list of arrays, and says so.
    return torch.tensor(np.asarray(values), dtype=torch.long if isinstance(first, (int, np.integer)) else torch.float)


def _stack(values: list[Any]) -> torch.Tensor:
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values)
    if isinstance(values[0], np.ndarray):
        return torch.from_numpy(np.stack(values))
    return torch.tensor(values)
