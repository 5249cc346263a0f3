"""Saves a checkpoint: the complete training state, and the model files that other programs read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import nn

from echelon.accelerator.models.save_objects import bare_module
from echelon.checkpoint.formats.transformers import ECHELON_WEIGHTS
from echelon.checkpoint.formats.weight_files import aliases_in
from echelon.trainer.arguments.training_arguments import resolve_path
from echelon.trainer.checkpoint.adapters import has_adapters, trained_state
from echelon.trainer.checkpoint.best_model import point_to_best
from echelon.trainer.checkpoint.checkpoint_folders import (
    PREFIX,
    STATE_FILE,
    checkpoint_format,
    remove_surplus,
)
from echelon.trainer.checkpoint.save_model import write_state_tensors
from echelon.trainer.checkpoint.transformers_layout import save_transformers
from echelon.trainer.hooks import TrainerHooks
from echelon.trainer.session import TrainerSession
from echelon.trainer.state import callback_states

__all__ = ["CheckpointWriter"]


class CheckpointWriter:
    """Writes a run's checkpoints."""

    def __init__(self, hooks: TrainerHooks, session: TrainerSession) -> None:
        self._hooks = hooks
        self._session = session

    def save(self, trial: Any = None) -> bool:
        """Write ``checkpoint-<step>`` and delete surplus checkpoints; return whether the write succeeded.

        Collective: call on every rank.
        """
        hooks, session = self._hooks, self._session
        args, state = hooks.args, hooks.state
        hooks.store_flos()
        run_dir = Path(hooks._get_output_dir(trial))
        output_dir = resolve_path(args, run_dir)
        folder = output_dir / f"{PREFIX}{state.global_step}"
        before = state.best_model_checkpoint
        point_to_best(hooks, run_dir, saved=session.saved_steps | {state.global_step})
        state.stateful_callbacks = callback_states([hooks.control, *hooks.callback_handler.callbacks])
        with hooks.accelerator.checkpoints.store.alone_in(output_dir, prefix=PREFIX):
            if checkpoint_format(args) == "transformers":
                is_written = save_transformers(hooks, session, folder, write_model=self._write_model)
            else:
                is_written = self._save_own(folder)
        if is_written:
            session.saved_steps.add(state.global_step)
        else:
            state.best_model_checkpoint = before
        if is_written and args.should_save:
            remove_surplus(output_dir, limit=args.save_total_limit, best=state.best_model_checkpoint, newest=folder)
        if is_written and args.push_to_hub:
            hooks._push_from_checkpoint(str(folder))
        hooks.accelerator.wait_for_everyone()
        return is_written

    def _save_own(self, folder: Path) -> bool:
        accelerator = self._hooks.accelerator
        if self._hooks.args.save_only_model:
            weights = accelerator.get_state_dict(self._hooks.model_wrapped)
            return accelerator.checkpoints.store.save_files(folder, partial(self._write_beside, weights))
        hook = accelerator.register_save_state_pre_hook(self._before_save)
        try:
            accelerator.save_state(folder)
        finally:
            hook.remove()
        return accelerator.checkpoints.store.is_saved

    def _before_save(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        """Write the files that other programs read; if they hold all weights, the checkpoint omits them."""
        folder, state = Path(output_dir), weights[0]
        self._write_beside(state, folder)
        if self._hooks.args.should_save and (self._files_hold_training(state) or _holds_weights(folder, state)):
            del weights[0]

    def _files_hold_training(self, state: Mapping[str, Any]) -> bool:
        """Return whether the files of a model with adapters hold all that is trained; they hold only tensors."""
        return self._has_adapters and all(isinstance(value, torch.Tensor) for value in self._trained(state).values())

    def _write_beside(self, weights: Any, folder: Path) -> None:
        self._write_model(folder, weights)
        if self._hooks.args.should_save:
            self._hooks.state.save_to_json(folder / STATE_FILE)

    def _write_model(self, folder: Path, weights: Any) -> None:
        """Write the model files, through the user's ``save_model`` if it is overridden."""
        if self._session.interface.overrides_save_model:
            self._hooks.save_model(str(folder), _internal_call=True)
        elif self._hooks.args.should_save:
            self._hooks._save(str(folder), state_dict=weights)
        if self._hooks.args.should_save and self._has_adapters:
            trained = self._trained(weights)
            write_state_tensors(self._hooks.args, self._session, trained, folder / ECHELON_WEIGHTS)

    @property
    def _has_adapters(self) -> bool:
        return has_adapters(bare_module(self._hooks.model))

    def _trained(self, state: Mapping[str, Any]) -> dict[str, Any]:
        groups = self._hooks.optimizer.param_groups
        optimized = {id(parameter) for group in groups for parameter in group["params"]}
        return trained_state(bare_module(self._hooks.model), state, optimized=optimized)


def _holds_weights(folder: Path, state: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the safetensors files in ``folder`` hold every tensor in ``state``; tied weights count as one."""
    found: dict[str, list[int]] = {}
    for path in folder.glob("*.safetensors"):
        with safetensors.safe_open(path, framework="pt") as file:
            found |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no mapping
    aliases = aliases_in(state)
    first = {aliases.get(name, name) for name in found}
    return (
        bool(found)
        and all(name in state and list(state[name].shape) == shape for name, shape in found.items())
        and all(aliases.get(name, name) in first for name in state)
    )
