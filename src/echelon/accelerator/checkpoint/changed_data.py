"""Whether the data of a run that is resumed are those of the checkpoint, and how it goes on where they are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.base.errors import CheckpointError
from echelon.base.warnings import warn
from echelon.checkpoint.typed_json import read_json
from echelon.data.data_facts import (
    DataChange,
    DataFacts,
    changes_between,
    is_of_evaluation,
    is_within_training_pass,
    moved_position,
)
from echelon.data.loader import PreparedLoader

__all__ = [
    "DataPolicy",
    "changed_data_error",
    "changes_since",
    "read_facts",
    "read_noted",
    "reconcile_data",
    "stored_facts",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPolicy:
    """What a change of the data means to the one who resumes."""

    allows_changes: bool = False
    """In the middle of an epoch, too."""
    is_at_boundary: bool = False
    """No place in an epoch is gone on from, whatever the loaders say."""
    finds_batches: bool = False
    """Another batch size is no change: the place is found in samples."""


def reconcile_data(
    loaders: Sequence[PreparedLoader],
    states: Sequence[Mapping[str, Any]],
    *,
    source: object,
    num_saved: int,
    num_ranks: int,
    policy: DataPolicy,
) -> tuple[list[Mapping[str, Any]], frozenset[int]]:
    """Return the ``order_state`` of each loader for the data of now, and which of them have changed in the middle of a pass.

    A change between two epochs is told.

    Args:
        loaders: of now.
        states: as they were saved; older checkpoints have no facts in them, and nothing is compared then.
        source: the checkpoint, for messages.
        num_saved: processes of the saved run.
        num_ranks: of this one.
        policy: what a change means.

    Raises:
        CheckpointError: the data have changed in the middle of an epoch, and that is not allowed.
    """
    found: list[Mapping[str, Any]] = list(states)
    changed, wrong, places, told = set(), [], [], []
    for i, (loader, state) in enumerate(zip(loaders, states)):
        stored = state.get("data")
        # Of another parity a place means nothing; and evaluations begin at their beginning.
        if stored is None or is_of_evaluation(state) or ("exact" in state) is not loader.is_exact:
            continue
        saved, here = DataFacts.from_json(stored), loader.data_facts()
        changes = changes_between(saved, here, num_ranks_saved=num_saved, num_ranks=num_ranks)
        changes = [change for change in changes if not (policy.finds_batches and change.fact == "batches")]
        if not changes:
            continue
        words = f"loader[{i}]: {'; '.join(change.what for change in changes)}"
        if policy.is_at_boundary or not is_within_training_pass(state):
            told.append(words)
            continue
        found[i], place = moved_position(state, saved, here, changes, num_ranks=num_ranks)
        changed.add(i)
        wrong.append(words)
        places.append(f"loader[{i}] goes on {place}")
    if wrong and not policy.allows_changes:
        raise changed_data_error(source, wrong, places)
    if wrong:
        warn(f"{source} is of the middle of an epoch over other data ({'; '.join(wrong)}): {'; '.join(places)}")
    if told:
        warn(f"{source} was saved with other data, and the next epoch is over those of now: {'; '.join(told)}")
    return found, frozenset(changed)


def changed_data_error(source: object, changes: Sequence[str], places: Sequence[str]) -> CheckpointError:
    """Return the error of data that have changed in the middle of an epoch."""
    return CheckpointError(
        f"{source} is of the middle of an epoch, and its data are others now: {'; '.join(changes)}. Samples would come twice, "
        "or never",
        do="resume with the data, the batch size and the order that it was saved with, or from a checkpoint of the end of an "
        f"epoch; or give allow_changed_data=True (echelon launch --allow_changed_data): then {'; '.join(places)}",
    )


# ---- for layouts that have no place for it --------------------------------------------------------------------------------


def stored_facts(loader: Any) -> dict[str, Any] | None:
    """Return what a place in a pass of ``loader`` depends on, as plain data; None for a loader that was not prepared."""
    return loader.data_facts().to_json() if isinstance(loader, PreparedLoader) else None


def read_noted(path: Path) -> Mapping[str, Any]:
    """Return what is in a file of JSON beside another library's; nothing where there is none."""
    return read_json(path) if path.is_file() else {}


def read_facts(path: Path) -> DataFacts | None:
    """Return what ``stored_facts`` gave, from a file of JSON; None where there is none."""
    return DataFacts.from_json(read_json(path)) if path.is_file() else None


def changes_since(saved: DataFacts | None, loader: Any, *, num_saved: int, num_ranks: int) -> Sequence[DataChange]:
    """Return what is not as it was saved for ``loader``; nothing where nothing is known."""
    if saved is None or not isinstance(loader, PreparedLoader):
        return []
    return changes_between(saved, loader.data_facts(), num_ranks_saved=num_saved, num_ranks=num_ranks)
