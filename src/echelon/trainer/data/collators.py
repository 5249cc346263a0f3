"""The Trainer's default collators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import default_collate

__all__ = ["PaddingCollator", "Tokenizer", "default_data_collator"]


@runtime_checkable
class Tokenizer(Protocol):
    """An object that pads samples, such as a transformers tokenizer or feature extractor."""

    def pad(self, features: Any, **options: Any) -> Any:
        """Pad ``features`` and return a batch."""
        ...


def default_data_collator(features: Sequence[Any], return_tensors: str = "pt") -> Any:
    """Stack samples into a batch: mappings key by key, other samples with torch's ``default_collate``.

    In a mapping, ``label`` and ``label_ids`` become ``labels`` (int64 for integers, otherwise float32); strings and
    None are dropped. Any other object is treated as a mapping of its attributes.

    Source: the transformers function of the same name.
    """
    first = features[0]
    if isinstance(first, (tuple, list, torch.Tensor, np.ndarray, int, float)):
        return default_collate(list(features))
    rows: Sequence[Mapping[str, Any]] = (
        list(features) if isinstance(first, Mapping) else [vars(feature) for feature in features]
    )
    batch = _labels(rows)
    for name, value in rows[0].items():
        if name not in ("label", "label_ids") and value is not None and not isinstance(value, str):
            batch[name] = _stack([row[name] for row in rows])
    return batch


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


def _labels(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    for name in ("label", "label_ids"):
        label = rows[0].get(name)
        if label is None:
            continue
        if isinstance(label, (torch.Tensor, np.ndarray)):
            return {"labels": _stack([row[name] for row in rows])}
        leaf = label
        while isinstance(leaf, Sequence) and not isinstance(leaf, str) and leaf:
            leaf = leaf[0]
        whole = isinstance(leaf, (int, np.integer))
        return {"labels": torch.tensor([row[name] for row in rows], dtype=torch.long if whole else torch.float)}
    return {}


def _stack(values: list[Any]) -> torch.Tensor:
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values)
    if isinstance(values[0], np.ndarray):
        return torch.from_numpy(np.stack(values))
    return torch.tensor(values)
