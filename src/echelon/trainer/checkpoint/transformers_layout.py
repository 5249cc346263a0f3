"""A training saved to and loaded from the layout of transformers' Trainer; ``checkpoint/formats/transformers.py`` has its files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from echelon.accelerator.checkpoint.changed_data import stored_facts
from echelon.accelerator.checkpoint.rng_states import current_random_states
from echelon.base.errors import CheckpointError, UsageError
from echelon.checkpoint.formats.transformers import (
    ECHELON_DATA,
    OPTIMIZER,
    SCHEDULER,
    OptimizationState,
    is_state_file,
    read_state,
    write_random_states,
    write_state,
)
from echelon.trainer.checkpoint.checkpoint_folders import STATE_FILE, write_json
from echelon.trainer.checkpoint.train_cursor import TrainCursor
from echelon.trainer.hooks import TrainerHooks

__all__ = [
    "PLACE_NAMES",
    "PLACE_OF_RUN",
    "load_transformers",
    "save_transformers",
]

PLACE_OF_RUN = ("num_steps_beyond", "has_no_end")
"""Fields of ``TrainCursor`` that a training goes on with."""
PLACE_NAMES = ("epoch", "num_batches", "is_over", *PLACE_OF_RUN)
"""Fields of ``TrainCursor`` that are noted in ``ECHELON_DATA``: by its steps alone it is not known where epochs have another length."""


def save_transformers(
    hooks: TrainerHooks,
    folder: Path,
    *,
    cursor: TrainCursor,
    scheduler: Any,
    write_model: Callable[[Path, Any], None],
) -> bool:
    """Write ``folder``; False: the disk did not take it.

    Collective: every rank.

    Raises:
        UsageError: an engine whose optimizer is not to be had whole.
    """
    accelerator, args = hooks.accelerator, hooks.args
    if not accelerator.capabilities.exposes_state:
        raise UsageError(
            f"the engine {accelerator.capabilities.name} keeps its state in files of its own",
            where="TrainingArguments.checkpoint_format",
            do="leave checkpoint_format='transformers' out",
        )
    weights = accelerator.get_state_dict(hooks.model_wrapped)
    optimizer = None if args.save_only_model else hooks.optimizer.full_state_dict()

    facts = stored_facts(hooks.callback_handler.train_dataloader)
    places = {name: getattr(cursor, name) for name in PLACE_NAMES}

    def write(aside: Path, is_owner: bool) -> None:
        write_model(aside, weights)
        if args.should_save:
            hooks.state.save_to_json(aside / STATE_FILE)
        if args.save_only_model:
            return
        if args.should_save:
            if facts is not None:
                write_json(aside / ECHELON_DATA, {**facts, "place": places})
            scaler = None if accelerator.scaler is None else accelerator.scaler.state_dict()
            write_state(aside, OptimizationState(optimizer=optimizer, scheduler=scheduler.state_dict(), scaler=scaler))
        rank, num_ranks = accelerator.process_index, accelerator.num_processes
        write_random_states(aside, current_random_states(), rank=rank, num_ranks=num_ranks)

    return accelerator.checkpoints.store.write_files(folder, write, is_part=is_state_file)


def load_transformers(hooks: TrainerHooks, folder: Path, scheduler: Any) -> None:
    """Load the optimizer, the schedule and the loss scaler. Nothing of the files is run.

    Collective: where the optimizer's state is sharded.

    Raises:
        CheckpointError: a file is missing, damaged, or holds code.
    """
    state = read_state(folder)
    found = {OPTIMIZER: state.optimizer, SCHEDULER: state.scheduler}
    missing = [name for name, one in found.items() if one is None]
    if missing:
        raise CheckpointError(
            f"{folder} has no {' and no '.join(missing)}: a training cannot go on from it",
            do="load its weights into the model, and begin a new training",
        )
    hooks.optimizer.load_full_state_dict(state.optimizer)
    scheduler.load_state_dict(state.scheduler)
    scaler = hooks.accelerator.scaler
    if scaler is not None and state.scaler is not None:
        scaler.load_state_dict(state.scaler)
