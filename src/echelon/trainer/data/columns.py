"""Which columns of a data set reach the model: those that its forward takes, and the labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn

from echelon.base.errors import UsageError
from echelon.trainer.signatures import parameters_of, takes_anything

__all__ = ["ColumnFilter", "Table", "drop_columns", "find_labels", "forward_of", "kept_columns"]

# Names under which tutorials keep what only an overridden compute_loss reads.
_LABEL_WORDS = ("label", "target")
_LABEL_LETTERS = ("y",)


@runtime_checkable
class Table(Protocol):
    """A data set with named columns, as those of the library `datasets`."""

    column_names: Any

    def remove_columns(self, column_names: list[str]) -> Any:
        """Return the data set without these columns."""
        ...


@runtime_checkable
class _Wrapper(Protocol):
    """What PEFT puts around a model; its own ``forward`` names only some of the parameters of the model's."""

    def get_base_model(self) -> nn.Module:
        """Return the model inside."""
        ...


def forward_of(model: nn.Module) -> Callable[..., Any]:
    """Return the ``forward`` whose parameters say what ``model`` takes: of a model inside PEFT's, its own."""
    inner = model.get_base_model() if isinstance(model, _Wrapper) else model
    return inner.forward


def find_labels(forward: Callable[..., Any]) -> list[str]:
    """Return the parameters of ``forward`` that are labels, by their names."""
    names = parameters_of(forward)
    if "start_positions" in names and "end_positions" in names:  # question answering
        return [name for name in names if "label" in name or name in ("start_positions", "end_positions")]
    return [name for name in names if "label" in name]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptColumns:
    """The columns to keep."""

    names: frozenset[str]
    by_word: bool
    """Keep also what is named like a label: an overridden compute_loss may read it."""

    def keeps(self, name: str) -> bool:
        """Tell whether the column ``name`` stays."""
        if name in self.names:
            return True
        return self.by_word and (name.lower() in _LABEL_LETTERS or any(word in name.lower() for word in _LABEL_WORDS))


def kept_columns(model: nn.Module, *, label_names: Sequence[str], own_loss: bool) -> KeptColumns | None:
    """Return which columns ``model`` uses; None when its forward takes any.

    Args:
        model: its ``forward`` is looked at, or that of the model inside PEFT's.
        label_names: labels, also those that forward does not take.
        own_loss: the loss is computed outside of the model.
    """
    forward = forward_of(model)
    names = parameters_of(forward)
    if not names and takes_anything(forward):
        return None
    return KeptColumns(names=frozenset([*names, "label", "label_ids", *label_names]), by_word=own_loss)


def drop_columns(table: Table, kept: KeptColumns, *, model: nn.Module) -> tuple[Any, list[str]]:
    """Return ``table`` without the columns that are not kept, and their names.

    Raises:
        UsageError: none would be left.
    """
    columns = [str(name) for name in table.column_names]
    dropped = [name for name in columns if not kept.keeps(name)]
    if len(dropped) == len(columns):
        raise UsageError(
            f"{type(model).__name__}.forward takes none of the columns of the data set ({', '.join(columns)}); "
            f"it takes {', '.join(parameters_of(model.forward))}",
            where="TrainingArguments.remove_unused_columns",
            do="rename the columns, or set remove_unused_columns=False if compute_loss or the collator reads them",
        )
    return (table.remove_columns(dropped), dropped) if dropped else (table, [])


class ColumnFilter:
    """A collator that leaves out of each sample (where it is a mapping) the columns that are not kept."""

    def __init__(self, collator: Callable[[Any], Any], kept: KeptColumns) -> None:
        self.collator = collator
        self.kept = kept
        self.dropped: frozenset[str] = frozenset()

    def __call__(self, features: Sequence[Any]) -> Any:
        """Return the batch of ``features``."""
        if features and isinstance(features[0], Mapping):
            dropped = [name for name in features[0] if not self.kept.keeps(name)]
            if dropped:
                self.dropped = frozenset(dropped)
                features = [{k: v for k, v in row.items() if k not in self.dropped} for row in features]
        return self.collator(features)
