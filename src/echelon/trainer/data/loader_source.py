"""What an evaluation's loader was built from, to tell whether it can be used again."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from echelon.trainer.data.columns import KeptColumns

__all__ = ["LoaderSource"]


@dataclass(frozen=True, slots=True, eq=False)
class LoaderSource:
    """The objects and settings that a kept loader depends on."""

    dataset: Any
    collator: Any
    accelerator: Any
    _: KW_ONLY
    batch_size: int
    columns: KeptColumns | None

    def equals(self, other: LoaderSource) -> bool:
        """Return whether both name the same objects and equal settings."""
        are_same = (
            self.dataset is other.dataset and self.collator is other.collator and self.accelerator is other.accelerator
        )
        return are_same and (self.batch_size, self.columns) == (other.batch_size, other.columns)
