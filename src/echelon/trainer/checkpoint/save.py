"""Saves a checkpoint: the complete training state, and the model files that other programs read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import nn

from echelon.accelerator.checkpoint.changed_data import stored_facts
from echelon.accelerator.models.save_objects import bare_module
from echelon.base.errors import UsageError
from echelon.checkpoint import storage
from echelon.checkpoint.formats.transformers import ECHELON_DATA, ECHELON_WEIGHTS, is_state_file
from echelon.checkpoint.formats.weight_files import aliases_in
from echelon.checkpoint.object_store import Location
from echelon.checkpoint.save import Content, PendingCheckpoint
from echelon.trainer.arguments.training_arguments import checkpoint_place
from echelon.trainer.checkpoint.adapters import has_adapters, trained_state
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
from echelon.trainer.session import TrainerSession
from echelon.trainer.state import callback_states
from echelon.trainer.trainer_methods import TrainerMethods


class CheckpointWriter:
    """Writes a run's checkpoints."""

    def __init__(self, trainer: TrainerMethods, session: TrainerSession) -> None:
        self._trainer = trainer
        self._session = session

    def save(self, trial: Any = None) -> bool:
        """Write ``checkpoint-<step>`` and delete surplus checkpoints; return whether the write succeeded.

        Collective: call on every rank.
        """
        trainer, session = self._trainer, self._session
        args, state = trainer.args, trainer.state
        trainer.store_flos()
        run_dir = storage.location(trainer._get_output_dir(trial))
        output_dir = checkpoint_place(args, run_dir)
        folder = output_dir / f"{PREFIX}{state.global_step}"
        before = state.best_model_checkpoint
        point_to_best(state, run_dir, saved=session.saved_steps | {state.global_step})
        state.stateful_callbacks = callback_states([trainer.control, *trainer.callback_handler.callbacks])
        with trainer.accelerator.checkpoints.store.alone_in(output_dir, prefix=PREFIX):
            if checkpoint_format(args) == "transformers":
                is_written = self._save_transformers(folder)
            else:
                is_written = self._save_own(folder)
        if is_written:
            session.saved_steps.add(state.global_step)
        else:
            state.best_model_checkpoint = before
        if is_written and args.should_save:
            remove_surplus(output_dir, limit=args.save_total_limit, best=state.best_model_checkpoint, newest=folder)
        if is_written and args.push_to_hub:
            trainer._push_from_checkpoint(str(folder))
        trainer.accelerator.wait_for_everyone()
        return is_written

    def _save_own(self, folder: Location) -> bool:
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
                on_each_node=accelerator.project_configuration.save_on_each_node,
            )
            return accelerator.checkpoints.store.save(pending)
        hook = accelerator.register_save_state_pre_hook(partial(self._before_save, averaged))
        try:
            accelerator.save_state(folder)
        finally:
            hook.remove()
        return accelerator.checkpoints.store.is_saved

    def _save_transformers(self, folder: Location) -> bool:
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
            trainer._save_optimizer_and_scheduler(str(aside))
            trainer._save_scaler(str(aside))
            trainer._save_rng_state(str(aside))

        session.optimizer.saved_state = None if args.save_only_model else trainer.optimizer.full_state_dict()
        try:
            pending = PendingCheckpoint(target=folder, world=accelerator.world, write=write, is_part=is_state_file)
            return accelerator.checkpoints.store.save(pending)
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
        if self._trainer.args.should_save and (self._files_hold_training(state) or _holds_weights(folder, state)):
            del weights[0]

    def _files_hold_training(self, state: Mapping[str, Any]) -> bool:
        """Return whether the files of a model with adapters hold all that is trained; they hold only tensors."""
        return self._has_adapters and all(isinstance(value, torch.Tensor) for value in self._trained(state).values())

    def _write_beside(self, weights: Any, folder: Path) -> None:
        self._write_model(folder, weights)
        if self._trainer.args.should_save:
            self._trainer.state.save_to_json(folder / STATE_FILE)

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


def _holds_weights(folder: Path, state: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the safetensors files in ``folder`` hold every tensor in ``state``; tied weights count as one.

    A file with rounded float32 weights does not hold them.
    """
    found: dict[str, tuple[list[int], str]] = {}
    for path in folder.glob("*.safetensors"):
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
