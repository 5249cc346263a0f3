"""Saves and loads training state in the format of transformers' Trainer."""

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
from echelon.trainer.override_points import OverridePoints

__all__ = [
    "CURSOR_FIELDS",
    "LENGTH_FIELDS",
    "load_transformers",
    "save_transformers",
]

LENGTH_FIELDS = ("num_steps_beyond", "has_no_end")
"""``TrainCursor`` fields that describe data whose reported length is wrong; a resumed run keeps them."""
CURSOR_FIELDS = ("epoch", "num_batches", "is_over", *LENGTH_FIELDS)
"""``TrainCursor`` fields saved in ``ECHELON_DATA``; the global step alone is ambiguous if the epoch length changes."""


def save_transformers(
    hooks: TrainerHooks,
    folder: Path,
    *,
    cursor: TrainCursor,
    scheduler: Any,
    points: OverridePoints,
    write_model: Callable[[Path, Any], None],
) -> bool:
    """Write the checkpoint to ``folder``; return whether the write succeeded.

    The methods ``_save_optimizer_and_scheduler``, ``_save_scaler`` and ``_save_rng_state`` in ``points`` each write
    their own files.

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
    optimizer = None if args.save_only_model else hooks.optimizer.full_state_dict()

    def save_optimizer_and_scheduler(output_dir: str) -> None:
        if args.should_save:
            write_state(Path(output_dir), OptimizationState(optimizer=optimizer, scheduler=scheduler.state_dict()))

    def save_scaler(output_dir: str) -> None:
        if args.should_save and accelerator.scaler is not None:
            write_state(Path(output_dir), OptimizationState(scaler=accelerator.scaler.state_dict()))

    def save_rng_state(output_dir: str) -> None:
        rank, num_ranks = accelerator.process_index, accelerator.num_processes
        write_random_states(Path(output_dir), current_random_states(), rank=rank, num_ranks=num_ranks)

    savers = [
        points.bind("_save_optimizer_and_scheduler", save_optimizer_and_scheduler),
        points.bind("_save_scaler", save_scaler),
        points.bind("_save_rng_state", save_rng_state),
    ]
    facts = stored_facts(hooks.callback_handler.train_dataloader)
    saved_fields = {name: getattr(cursor, name) for name in CURSOR_FIELDS}

    def write(aside: Path, is_owner: bool) -> None:
        write_model(aside, weights)
        if args.should_save:
            hooks.state.save_to_json(aside / STATE_FILE)
        if args.save_only_model:
            return
        if args.should_save and facts is not None:
            write_json(aside / ECHELON_DATA, {**facts, "place": saved_fields})
        for save in savers:
            save(str(aside))

    return accelerator.checkpoints.store.write_files(folder, write, is_part=is_state_file)


def load_transformers(hooks: TrainerHooks, folder: Path, scheduler: Any, points: OverridePoints) -> None:
    """Load the optimizer, the scheduler and the loss scaler without executing code from the files.

    The methods ``_load_optimizer_and_scheduler`` and ``_load_scaler`` in ``points`` load them.

    Collective: call on every rank if the optimizer state is sharded.

    Raises:
        CheckpointError: a file is missing or damaged, or contains code.
    """

    def load_optimizer_and_scheduler(checkpoint: str) -> None:
        state = _whole_state(Path(checkpoint))
        hooks.optimizer.load_full_state_dict(state.optimizer)
        scheduler.load_state_dict(state.scheduler)

    def load_scaler(checkpoint: str) -> None:
        scaler, state = hooks.accelerator.scaler, read_state(Path(checkpoint)).scaler
        if scaler is not None and state is not None:
            scaler.load_state_dict(state)

    points.bind("_load_optimizer_and_scheduler", load_optimizer_and_scheduler)(str(folder))
    points.bind("_load_scaler", load_scaler)(str(folder))


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
