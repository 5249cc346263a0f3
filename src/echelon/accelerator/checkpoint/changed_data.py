"""Compares a resumed run's data with the checkpoint's data, and decides where the run continues if they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.accelerator.state_names import START_OVER
from echelon.base.errors import CheckpointError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.checkpoint.typed_json import read_json
from echelon.data.data_facts import (
    DataChange,
    DataFacts,
    changes_between,
    moved_position,
)
from echelon.data.loader import PreparedLoader
from echelon.data.order_state import is_of_evaluation, is_within_training_pass


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPolicy:
    """How a resumed run handles changes in its data."""

    allows_changes: bool = False
    """Accept changes in the middle of an epoch."""
    is_at_boundary: bool = False
    """The run resumes at an epoch boundary, regardless of what the loaders recorded."""
    finds_batches: bool = False
    """Accept a different batch size, because positions are counted in samples."""
    is_of_trainer: bool = False
    """The Trainer loads the checkpoint: it says where the run resumes, and takes no ``allow_missing=`` or ``strict=``."""


def reconcile_data(
    loaders: Sequence[PreparedLoader],
    states: Sequence[Mapping[str, Any]],
    *,
    source: object,
    num_saved: int,
    num_ranks: int,
    policy: DataPolicy,
) -> tuple[list[Mapping[str, Any]], frozenset[int]]:
    """Return the ``order_state`` of each loader for the current data, and the indices of loaders whose data changed
    mid-pass.

    Warns about a change between two epochs.

    Args:
        states: saved states; those from older checkpoints contain no data facts and are not compared.

    Raises:
        CheckpointError: the data changed in the middle of an epoch and ``policy`` does not allow it.
    """
    found: list[Mapping[str, Any]] = list(states)
    changed, mid_epoch, positions, at_boundary = set(), [], [], []
    for i, (loader, state) in enumerate(zip(loaders, states)):
        stored = state.get("data")
        # A position saved in another parity mode has no meaning here, and evaluations always start over.
        if stored is None or is_of_evaluation(state) or ("exact" in state) is not loader.is_exact:
            continue
        saved, here = DataFacts.from_json(stored), loader.data_facts()
        changes = changes_between(saved, here, num_ranks_saved=num_saved, num_ranks=num_ranks)
        changes = [change for change in changes if not (policy.finds_batches and change.fact == "batches")]
        if not changes:
            continue
        description = f"loader[{i}]: {'; '.join(change.what for change in changes)}"
        if policy.is_at_boundary or not is_within_training_pass(state):
            at_boundary.append(description)
            continue
        found[i], position = moved_position(state, saved, here, changes, num_ranks=num_ranks)
        changed.add(i)
        mid_epoch.append(description)
        positions.append(f"loader[{i}] continues {position}")
    if mid_epoch and not policy.allows_changes:
        raise changed_data_error(source, mid_epoch, positions)
    if mid_epoch:
        changes_text, positions_text = _("; ").join(mid_epoch), "; ".join(positions)
        warn(
            _(
                "{source} was saved in the middle of an epoch over different data ({changes_text}): {positions_text}",
                source=source,
                changes_text=changes_text,
                positions_text=positions_text,
            )
        )
    if at_boundary:
        warn(
            _(
                "{source} was saved with different data; the next epoch uses the current data: {at_boundary}",
                source=source,
                at_boundary=_("; ").join(at_boundary),
            )
        )
    return found, frozenset(changed)


def changed_data_error(source: object, changes: Sequence[str], positions: Sequence[str]) -> CheckpointError:
    """Return the error for data that changed in the middle of an epoch."""
    return CheckpointError(
        _(
            "{source} was saved in the middle of an epoch, and its data has changed since: {changes}. Samples would be "
            "repeated or skipped",
            source=source,
            changes=_("; ").join(changes),
        ),
        do=_(
            "resume with the same data, batch size and order, or from a checkpoint saved at the end of an epoch; or pass "
            "allow_changed_data=True (echelon launch --allow_changed_data): then {positions}; {start_over}",
            positions=_("; ").join(positions),
            start_over=_(START_OVER),
        ),
    )


# ---- checkpoint layouts of other libraries --------------------------------------------------------------------------------


def positions_error(source: object, num_saved: int, *, rank: int, world_size: int) -> CheckpointError:
    """Return the error for positions of stateful loaders that were saved by another number of processes."""
    what = _(
        "{path} stores data positions for {num_saved} process{es}, but this is rank {rank} of {world_size}",
        path=source,
        num_saved=num_saved,
        es="es" if num_saved != 1 else "",
        rank=rank,
        world_size=world_size,
    )
    return CheckpointError(what, do=_("resume with the same number of processes, or without use_stateful_dataloader"))


def stored_facts(loader: Any) -> dict[str, Any] | None:
    """Return the data facts of ``loader`` as plain data; None for a loader that was not prepared."""
    return loader.data_facts().to_json() if isinstance(loader, PreparedLoader) else None


def read_optional_json(path: Path) -> Mapping[str, Any]:
    """Return the content of a JSON file; empty if the file does not exist."""
    return read_json(path) if path.is_file() else {}


def read_facts(path: Path) -> DataFacts | None:
    """Read the result of ``stored_facts`` from a JSON file; None if the file does not exist."""
    return DataFacts.from_json(read_json(path)) if path.is_file() else None


def changes_since(saved: DataFacts | None, loader: Any, *, num_saved: int, num_ranks: int) -> Sequence[DataChange]:
    """Return the changes since ``saved``; empty if nothing is known about the data."""
    if saved is None or not isinstance(loader, PreparedLoader):
        return []
    return changes_between(saved, loader.data_facts(), num_ranks_saved=num_saved, num_ranks=num_ranks)
