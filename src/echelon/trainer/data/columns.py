"""Selects the dataset columns that the model's forward accepts, and the labels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn

from echelon.accelerator.compile import uncompiled
from echelon.base.errors import UsageError
from echelon.trainer.signatures import parameters_of, takes_anything

# Common names of columns that only an overridden compute_loss reads.
_LABEL_WORDS = ("label", "target")
_LABEL_LETTERS = ("y",)


@runtime_checkable
class Table(Protocol):
    """A dataset with named columns, as in the `datasets` library."""

    column_names: Any

    def remove_columns(self, column_names: list[str]) -> Any:
        """Return the dataset without these columns."""
        ...


@runtime_checkable
class _Wrapper(Protocol):
    """A PEFT model, whose ``forward`` names only some of the base model's parameters."""

    def get_base_model(self) -> nn.Module:
        """Return the base model."""
        ...


def forward_of(model: nn.Module) -> Callable[..., Any]:
    """Return the ``forward`` of ``model``; if it is compiled or a PEFT model, the inner model's."""
    return base_model_of(model).forward


def base_model_of(model: nn.Module) -> nn.Module:
    """Return ``model`` itself; if it is compiled or a PEFT model, the inner model."""
    inner = uncompiled(model)  # the forward of a compiled module accepts anything
    return uncompiled(inner.get_base_model() if isinstance(inner, _Wrapper) else inner)


def find_labels(forward: Callable[..., Any]) -> list[str]:
    """Return the parameters of ``forward`` whose names suggest that they are labels."""
    names = parameters_of(forward)
    if "start_positions" in names and "end_positions" in names:  # question answering
        return [name for name in names if "label" in name or name in ("start_positions", "end_positions")]
    return [name for name in names if "label" in name]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptColumns:
    """The columns to keep."""

    names: frozenset[str]
    by_word: bool
    """Whether to keep columns with label-like names, which an overridden compute_loss may read."""

    def keeps(self, name: str) -> bool:
        """Return whether to keep column ``name``."""
        if name in self.names:
            return True
        return self.by_word and (name.lower() in _LABEL_LETTERS or any(word in name.lower() for word in _LABEL_WORDS))


def signature_columns(model: nn.Module, label_names: Sequence[str]) -> list[str]:
    """Return the parameters of the model's forward, and the labels."""
    found = list(inspect.signature(forward_of(model)).parameters)
    return [*found, *sorted({"label", "label_ids", *label_names} - set(found))]


def kept_columns(model: nn.Module, *, label_names: Sequence[str], own_loss: bool) -> KeptColumns | None:
    """Return the columns that ``model`` uses, or None if its forward accepts any column.

    Args:
        label_names: names of the label columns, including those that forward does not accept.
        own_loss: whether the loss is computed outside the model.
    """
    forward = forward_of(model)
    names = parameters_of(forward)
    if not names and takes_anything(forward):
        return None
    return KeptColumns(names=frozenset([*names, "label", "label_ids", *label_names]), by_word=own_loss)


def drop_columns(table: Table, kept: KeptColumns, *, model: nn.Module) -> tuple[Any, list[str]]:
    """Drop all other columns from ``table``; return the table and the names of the dropped columns.

    Raises:
        UsageError: no column would remain.
    """
    columns = [str(name) for name in table.column_names]
    dropped = [name for name in columns if not kept.keeps(name)]
    if len(dropped) == len(columns):
        raise _no_columns(columns, forward=f"{type(model).__name__}.forward", accepted=parameters_of(model.forward))
    return (table.remove_columns(dropped), dropped) if dropped else (table, [])


def _no_columns(columns: Sequence[str], *, forward: str, accepted: Sequence[str]) -> UsageError:
    return UsageError(
        f"{forward} accepts none of the dataset's columns ({', '.join(columns)}); it accepts {', '.join(accepted)}",
        where="TrainingArguments.remove_unused_columns",
        do="rename the columns, or set remove_unused_columns=False if compute_loss or the collator reads them",
    )


class ColumnFilter:
    """A collator that drops unused columns from samples that are mappings."""

    def __init__(self, collator: Callable[[Any], Any], kept: KeptColumns, *, model: nn.Module) -> None:
        self.collator = collator
        self.kept = kept
        self._forward, self._accepted = f"{type(model).__name__}.forward", parameters_of(model.forward)

    def __call__(self, features: Sequence[Any]) -> Any:
        """Collate ``features`` into a batch.

        Raises:
            UsageError: no column would remain.
        """
        if features and isinstance(features[0], Mapping):
            dropped = {name for name in features[0] if not self.kept.keeps(name)}
            if dropped:
                if len(dropped) == len(features[0]):
                    raise _no_columns(list(map(str, features[0])), forward=self._forward, accepted=self._accepted)
                features = [{k: v for k, v in row.items() if k not in dropped} for row in features]
        return self.collator(features)
