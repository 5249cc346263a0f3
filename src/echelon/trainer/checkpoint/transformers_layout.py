"""Saves and loads training state in the format of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from echelon.accelerator.checkpoint.changed_data import stored_facts
from echelon.accelerator.rng_states import current_random_states
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
from echelon.trainer.hooks import TrainerHooks
from echelon.trainer.session import TrainerSession

__all__ = [
    "CURSOR_FIELDS",
    "LENGTH_FIELDS",
    "load_optimizer_and_scheduler",
    "load_scaler",
    "save_optimizer_and_scheduler",
    "save_rng_state",
    "save_scaler",
    "save_transformers",
]

LENGTH_FIELDS = ("num_steps_beyond", "has_no_end")
"""``TrainCursor`` fields that describe data whose reported length is wrong; a resumed run keeps them."""
CURSOR_FIELDS = ("epoch", "num_batches", "is_over", *LENGTH_FIELDS)
"""``TrainCursor`` fields saved in ``ECHELON_DATA``; the global step alone is ambiguous if the epoch length changes."""


def save_transformers(
    hooks: TrainerHooks, session: TrainerSession, folder: Path, *, write_model: Callable[[Path, Any], None]
) -> bool:
    """Write the checkpoint to ``folder``; return whether the write succeeded.

    The Trainer's methods ``_save_optimizer_and_scheduler``, ``_save_scaler`` and ``_save_rng_state`` each write their own
    files.

    Collective: call on every rank.

    Raises:
        UsageError: the engine does not expose its optimizer state.
    """
    accelerator, args = hooks.accelerator, hooks.args
    if not accelerator.capabilities.exposes_state:
        raise UsageError(
            f"checkpoint_format='transformers' does not work with the {accelerator.capabilities.name} engine, which "
            "writes its state in its own format",
            where="TrainingArguments.checkpoint_format",
            do="remove checkpoint_format='transformers'",
        )
    accelerator.session.engine.update_loss_scale()  # otherwise due with the next loss
    accelerator.checkpoints.warn_of_weights_left_out()
    weights = accelerator.get_state_dict(hooks.model_wrapped)
    facts = stored_facts(hooks.callback_handler.train_dataloader)
    saved_fields = {name: getattr(session.cursor, name) for name in CURSOR_FIELDS}

    def write(aside: Path, is_owner: bool) -> None:
        write_model(aside, weights)
        if args.should_save:
            hooks.state.save_to_json(aside / STATE_FILE)
        if args.save_only_model:
            return
        if args.should_save and facts is not None:
            write_json(aside / ECHELON_DATA, {**facts, "place": saved_fields})
        hooks._save_optimizer_and_scheduler(str(aside))
        hooks._save_scaler(str(aside))
        hooks._save_rng_state(str(aside))

    session.optimizer.saved_state = None if args.save_only_model else hooks.optimizer.full_state_dict()
    try:
        return accelerator.checkpoints.store.write_files(folder, write, is_part=is_state_file)
    finally:
        session.optimizer.saved_state = None


def save_optimizer_and_scheduler(session: TrainerSession, state: dict[str, Any], folder: Path) -> None:
    """Write optimizer.pt, with the optimizer's whole ``state``, and scheduler.pt."""
    write_state(folder, OptimizationState(optimizer=state, scheduler=session.optimizer.scheduler.state_dict()))


def save_scaler(hooks: TrainerHooks, folder: Path) -> None:
    """Write scaler.pt on the saving rank, if there is a loss scaler."""
    if hooks.args.should_save and hooks.accelerator.scaler is not None:
        write_state(folder, OptimizationState(scaler=hooks.accelerator.scaler.state_dict()))


def save_rng_state(hooks: TrainerHooks, folder: Path) -> None:
    """Write this rank's RNG states."""
    rank, num_ranks = hooks.accelerator.process_index, hooks.accelerator.num_processes
    write_random_states(folder, current_random_states(), rank=rank, num_ranks=num_ranks)


def load_optimizer_and_scheduler(hooks: TrainerHooks, session: TrainerSession, folder: Path) -> None:
    """Load the optimizer and the scheduler without executing code from the files.

    Collective: call on every rank if the optimizer state is sharded.

    Raises:
        CheckpointError: a file is missing or damaged, or contains code.
    """
    state = _whole_state(folder)
    hooks.optimizer.load_full_state_dict(state.optimizer)
    session.optimizer.scheduler.load_state_dict(state.scheduler)


def load_scaler(hooks: TrainerHooks, folder: Path) -> None:
    """Load the loss scaler, if there is one, without executing code from the file.

    Raises:
        CheckpointError: the file is damaged, or contains code.
    """
    scaler, state = hooks.accelerator.scaler, read_state(folder).scaler
    if scaler is not None and state is not None:
        scaler.load_state_dict(state)


def _whole_state(folder: Path) -> OptimizationState:
    state = read_state(folder)
    found = {OPTIMIZER: state.optimizer, SCHEDULER: state.scheduler}
    missing = [name for name, one in found.items() if one is None]
    if missing:
        raise CheckpointError(
            f"{folder} has no {' and no '.join(missing)}, so training cannot resume from it",
            do="load its weights into the model and start a new training run",
        )
    return state
