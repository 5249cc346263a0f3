"""Saves a checkpoint: the complete training state, and the model files that other programs read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import nn

from echelon.accelerator.checkpoint.changed_data import stored_facts
from echelon.accelerator.models.save_objects import bare_module
from echelon.base.errors import CheckpointError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.checkpoint import storage
from echelon.checkpoint.formats.transformers import (
    ECHELON_DATA,
    ECHELON_WEIGHTS,
    OptimizationState,
    is_state_file,
    write_state,
)
from echelon.checkpoint.formats.weight_files import aliases_in
from echelon.checkpoint.manifest import is_part
from echelon.checkpoint.object_store import Location
from echelon.checkpoint.save import Content, PendingCheckpoint
from echelon.trainer.arguments.training_arguments import checkpoint_place
from echelon.trainer.checkpoint.adapters import has_adapters, saves_itself, trained_state
from echelon.trainer.checkpoint.checkpoint_folders import (
    PREFIX,
    STATE_FILE,
    checkpoint_format,
    point_to_best,
    remove_surplus,
    write_json,
)
from echelon.trainer.checkpoint.model_files import write_state_tensors
from echelon.trainer.checkpoint.train_cursor import CURSOR_FIELDS
from echelon.trainer.session import StartedSave, TrainerSession
from echelon.trainer.state import callback_states
from echelon.trainer.trainer_methods import TrainerMethods, is_overridden


class CheckpointWriter:
    """Writes one checkpoint of a run."""

    def __init__(self, trainer: TrainerMethods, session: TrainerSession) -> None:
        self._trainer = trainer
        self._session = session
        self._is_blocking = trainer.args.save_blocking
        # Overrides may read the model, so they must run before training changes it.
        self._copies_model = not (
            self._is_blocking or session.interface.overrides_save_model or is_overridden(trainer, "_save")
        )
        self._copies_optimizer = not (self._is_blocking or is_overridden(trainer, "_save_optimizer_and_scheduler"))
        self._copied_weights: dict[str, Any] | None = None
        self._copied_optimization: OptimizationState | None = None
        self._must_hold_weights = False
        """Whether the checkpoint leaves out the weights, because the model files will hold them."""

    def save(self, trial: Any = None) -> None:
        """Write ``checkpoint-<step>``, and then delete surplus checkpoints.

        With ``save_blocking=False``, return once the state is copied; ``settle_save`` waits for the rest.

        Collective: call on every rank.
        """
        trainer, session = self._trainer, self._session
        settle_save(trainer, session)
        args, state = trainer.args, trainer.state
        trainer.store_flos()
        run_dir = storage.location(trainer._get_output_dir(trial))
        output_dir = checkpoint_place(args, run_dir)
        folder = output_dir / f"{PREFIX}{state.global_step}"
        before = state.best_model_checkpoint
        point_to_best(state, run_dir, saved=session.saved_steps | {state.global_step})
        state.stateful_callbacks = callback_states([trainer.control, *trainer.callback_handler.callbacks])
        store, best = trainer.accelerator.checkpoints.store, state.best_model_checkpoint
        with store.alone_in(output_dir, prefix=PREFIX):
            store.on_committed = lambda _: remove_surplus(args, output_dir, best=best, newest=folder)
            earlier = store.latest
            try:
                if checkpoint_format(args) == "transformers":
                    self._save_transformers(folder)
                else:
                    self._save_own(folder)
            finally:
                store.on_committed = None
            pending = None if store.latest is earlier else store.latest
            session.started_save = StartedSave(step=state.global_step, best_before=before, pending=pending)
            if self._is_blocking:
                settle_save(trainer, session)
        if not self._is_blocking:
            return
        if state.global_step in session.saved_steps and args.push_to_hub:
            trainer._push_from_checkpoint(str(folder))
        trainer.accelerator.wait_for_everyone()

    def _save_own(self, folder: Location) -> None:
        accelerator = self._trainer.accelerator
        averaged = self._averaged_weights()
        if self._trainer.args.save_only_model:
            weights = self._weights() if averaged is None else averaged
            content = Content(progress=accelerator.session.progress.to_json())
            pending = PendingCheckpoint(
                target=folder,
                world=accelerator.world,
                collect=lambda _: content,
                write=lambda aside, is_owner: self._write_beside(weights, aside),
                write_later=self._later,
                on_each_node=accelerator.project_configuration.save_on_each_node,
            )
            accelerator.checkpoints.store.save(pending, blocking=self._is_blocking)
            return
        hook = accelerator.register_save_state_pre_hook(partial(self._before_save, averaged))
        accelerator.checkpoints.write_later = self._later
        try:
            accelerator.save_state(folder, blocking=self._is_blocking)
        finally:
            hook.remove()
            accelerator.checkpoints.write_later = None

    def _save_transformers(self, folder: Location) -> None:
        """Write the checkpoint in transformers' format, in which the Trainer's methods each write their own files.

        Raises:
            UsageError: the engine does not expose its optimizer state.
        """
        trainer, session = self._trainer, self._session
        accelerator, args = trainer.accelerator, trainer.args
        if not accelerator.capabilities.exposes_state:
            raise UsageError(
                f"checkpoint_format='transformers' does not work with the {accelerator.capabilities.name} engine, which "
                "writes its state in its own format",
                where="TrainingArguments.checkpoint_format",
                do="remove checkpoint_format='transformers'",
            )
        accelerator.session.engine.update_loss_scale()  # otherwise due with the next loss
        accelerator.checkpoints.warn_of_weights_left_out()
        weights = self._weights()
        facts = stored_facts(trainer.callback_handler.train_dataloader)
        saved_fields = {name: getattr(session.cursor, name) for name in CURSOR_FIELDS}

        def write(aside: Path, is_owner: bool) -> None:
            self._write_beside(weights, aside)
            if args.save_only_model:
                return
            if args.should_save and facts is not None:
                write_json(aside / ECHELON_DATA, {**facts, "place": saved_fields})
            if self._copies_optimizer and args.should_save:
                self._copy_optimizer()
            else:
                trainer._save_optimizer_and_scheduler(str(aside))
            trainer._save_scaler(str(aside))
            trainer._save_rng_state(str(aside))

        session.optimizer.saved_state = None if args.save_only_model else trainer.optimizer.full_state_dict()
        try:
            pending = PendingCheckpoint(
                target=folder,
                world=accelerator.world,
                write=write,
                write_later=self._later,
                is_part=is_state_file,
            )
            accelerator.checkpoints.store.save(pending, blocking=self._is_blocking)
        finally:
            session.optimizer.saved_state = None

    def _weights(self) -> dict[str, Any] | None:
        """Return the weights that the model files of a checkpoint hold: those in training, unless nothing else is saved.

        Collective if parameters are sharded.
        """
        accelerator, model = self._trainer.accelerator, self._trainer.model_wrapped
        if self._trainer.args.save_only_model or not accelerator.session.masters:
            return accelerator.get_state_dict(model)
        return accelerator.get_state_dict(model, master_weights=True)

    def _averaged_weights(self) -> dict[str, Any] | None:
        """Return a copy of the state dict with the averaged weights on the saving rank; None without an average.

        Collective: call on every rank if the engine shards parameters or optimizer state.
        """
        if self._session.average is None:
            return None
        copies: dict[Any, torch.Tensor] = {}  # tied weights stay one
        with self._session.averaged():
            state = self._trainer.accelerator.get_state_dict(self._trainer.model_wrapped) or {}
            if not self._trainer.args.should_save:
                return {}
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = copies.setdefault((value.data_ptr(), value.shape, value.stride()), value.clone())
        return state

    def _before_save(
        self, averaged: dict[str, Any] | None, models: list[nn.Module], weights: list[Any], output_dir: str
    ) -> None:
        """Write the files that other programs read; if they hold all weights, the checkpoint omits them.

        The files hold the ``averaged`` weights if there are any, and the checkpoint those of training.
        """
        folder, state = Path(output_dir), weights[0]
        if averaged is not None:
            self._write_beside(averaged, folder)
            return
        self._write_beside(state, folder)
        if self._trainer.args.should_save and (
            self._files_will_hold_weights(state)
            if self._copies_model
            else self._files_hold_training(state) or _holds_weights(folder, state)
        ):
            del weights[0]

    def _files_will_hold_weights(self, state: Mapping[str, Any]) -> bool:
        """Return whether the model files, which are not written yet, will hold all weights of a checkpoint.

        transformers may write other names, so the first checkpoint of a run has the weights of its models twice.
        """
        model = bare_module(self._trainer.model)
        if saves_itself(model) and not self._has_adapters:
            self._must_hold_weights = self._session.model_files_hold_weights
        else:
            self._must_hold_weights = all(isinstance(value, torch.Tensor) for value in state.values())
            if self._has_adapters:
                self._must_hold_weights = self._files_hold_training(state)
        return self._must_hold_weights

    def _files_hold_training(self, state: Mapping[str, Any]) -> bool:
        """Return whether the files of a model with adapters hold all that is trained; they hold only tensors."""
        return self._has_adapters and all(isinstance(value, torch.Tensor) for value in self._trained(state).values())

    def _write_beside(self, weights: Any, folder: Path) -> None:
        """Write the model files, or copy the weights for ``_write_rest``; write the state."""
        if not self._copies_model or weights is None:
            self._write_model(folder, weights)
        elif self._trainer.args.should_save:
            self._copied_weights = self._session.weights_copy.copy(weights)
        if self._trainer.args.should_save:
            self._trainer.state.save_to_json(folder / STATE_FILE)

    @property
    def _later(self) -> Callable[[Path], None] | None:
        return None if self._is_blocking else self._write_rest

    def _copy_optimizer(self) -> None:
        """Copy what ``_save_optimizer_and_scheduler`` writes."""
        optimizer = self._session.optimizer
        state = OptimizationState(optimizer=optimizer.saved_state, scheduler=optimizer.scheduler.state_dict())
        self._copied_optimization = OptimizationState(
            optimizer=self._session.optimizer_copy.copy(state.optimizer), scheduler=copy.deepcopy(state.scheduler)
        )

    def _write_rest(self, folder: Path) -> None:
        """Write what was copied, possibly in a thread.

        Raises:
            CheckpointError: the model files lack weights that the checkpoint leaves out.
        """
        weights, optimization = self._copied_weights, self._copied_optimization
        self._copied_weights = self._copied_optimization = None
        if optimization is not None:
            write_state(folder, optimization)
        if weights is None:
            return
        self._write_model(folder, dict(weights))
        holds_weights = self._files_hold_training(weights) or _holds_weights(folder, weights)
        if self._must_hold_weights and not holds_weights:
            raise CheckpointError(
                _("the model files of {folder} lack weights, which earlier ones had", folder=folder.name),
                do=_("remove save_blocking=False"),
            )
        self._session.model_files_hold_weights = holds_weights

    def _write_model(self, folder: Path, weights: Any) -> None:
        """Write the model files, through the user's ``save_model`` if it is overridden."""
        if self._session.interface.overrides_save_model:
            self._session.saves_master_weights = not self._trainer.args.save_only_model
            try:
                self._trainer.save_model(str(folder), _internal_call=True)
            finally:
                self._session.saves_master_weights = False
        elif self._trainer.args.should_save:
            self._trainer._save(str(folder), state_dict=weights)
        if self._trainer.args.should_save and self._has_adapters:
            trained = self._trained(weights)
            write_state_tensors(self._trainer.args, self._session, trained, folder / ECHELON_WEIGHTS)

    @property
    def _has_adapters(self) -> bool:
        return has_adapters(bare_module(self._trainer.model))

    def _trained(self, state: Mapping[str, Any]) -> dict[str, Any]:
        groups = self._trainer.optimizer.param_groups
        optimized = {id(parameter) for group in groups for parameter in group["params"]}
        return trained_state(bare_module(self._trainer.model), state, optimized=optimized)


def settle_save(trainer: TrainerMethods, session: TrainerSession) -> None:
    """Wait for the checkpoint that is being written, if any, and note whether it is on disk.

    Raises:
        TooManyFailedSavesError: ``max_failed_saves`` consecutive saves have failed.
        CheckpointError: it could not be saved, for another reason than the file system.
    """
    started, session.started_save = session.started_save, None
    if started is None:
        return
    try:
        trainer.accelerator.checkpoints.store.wait()
    finally:
        if started.pending is not None and started.pending.is_saved:
            session.saved_steps.add(started.step)
        else:
            trainer.state.best_model_checkpoint = started.best_before


def _holds_weights(folder: Path, state: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the safetensors files in ``folder`` hold every tensor in ``state``; tied weights count as one.

    A file with rounded float32 weights does not hold them.
    """
    found: dict[str, tuple[list[int], str]] = {}
    for path in folder.glob("*.safetensors"):
        if is_part(path.name):  # of another rank, which may be writing it now
            continue
        with safetensors.safe_open(path, framework="pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            found |= {name: (part.get_shape(), part.get_dtype()) for name, part in parts.items()}
    aliases = aliases_in(state)
    first = {aliases.get(name, name) for name in found}
    return (
        bool(found)
        and all(name in state and list(state[name].shape) == shape for name, (shape, _) in found.items())
        and all(dtype == "F32" for name, (_, dtype) in found.items() if state[name].dtype == torch.float32)
        and all(aliases.get(name, name) in first for name in state)
    )
