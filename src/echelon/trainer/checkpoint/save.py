"""Saving a training: checkpoint-N with everything that going on needs, beside what other programs read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import torch
from torch import nn

from echelon.accelerator.checkpoint.folders import alone_in, is_saved, save_files
from echelon.checkpoint.formats.weight_files import aliases_in
from echelon.trainer.checkpoint.checkpoint_folders import (
    PREFIX,
    STATE_FILE,
    checkpoint_format,
    has_adapters,
    remove_surplus,
    write_model,
)
from echelon.trainer.checkpoint.transformers_layout import save_transformers

if TYPE_CHECKING:
    from echelon.trainer.trainer import Trainer

__all__ = ["save_checkpoint"]


def save_checkpoint(trainer: Trainer) -> bool:
    """Write ``checkpoint-<step>``, and delete what is too much; False: the disk did not take it.

    Collective: every rank.
    """
    args, state = trainer.args, trainer.state
    folder = trainer._output_dir / f"{PREFIX}{state.global_step}"
    best, before = state.best_global_step, state.best_model_checkpoint
    if best is not None:
        name = f"{PREFIX}{best}"
        if best == state.global_step or (trainer._output_dir / name).exists():
            state.best_model_checkpoint = str(trainer._output_dir_as_given / name)
    state.stateful_callbacks = _callback_states(trainer)
    with alone_in(trainer.accelerator, trainer._output_dir, prefix=PREFIX):
        if checkpoint_format(args) == "transformers":
            took_place = save_transformers(trainer, folder)
        else:
            took_place = _save_own(trainer, folder)
    if not took_place:
        state.best_model_checkpoint = before
    elif args.should_save:
        limit, best_model = args.save_total_limit, state.best_model_checkpoint
        remove_surplus(trainer._output_dir, limit=limit, best=best_model, newest=folder)
        if args.push_to_hub and trainer.is_world_process_zero():
            trainer._tell("on_push_begin")
            trainer._hub.upload_checkpoint(folder, step=state.global_step)
    trainer.accelerator.wait_for_everyone()
    return took_place


def _save_own(trainer: Trainer, folder: Path) -> bool:
    accelerator = trainer.accelerator
    if trainer.args.save_only_model:
        weights = accelerator.get_state_dict(trainer.model_wrapped)
        return save_files(accelerator, folder, partial(_write_beside, trainer, weights))
    hook = accelerator.register_save_state_pre_hook(partial(_save_hook, trainer))
    try:
        accelerator.save_state(folder)
    finally:
        hook.remove()
    return is_saved(accelerator)


def _save_hook(trainer: Trainer, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
    """Write what others read; weights that stand there whole, under their own names, are not written a second time."""
    folder, state = Path(output_dir), weights[0]
    _write_beside(trainer, state, folder)
    if trainer.args.should_save and (has_adapters(trainer.model) or _stands_in(folder, state)):
        del weights[0]


def _write_beside(trainer: Trainer, weights: Any, folder: Path) -> None:
    write_model(trainer, folder, weights)
    if trainer.args.should_save:
        trainer.state.save_to_json(folder / STATE_FILE)


def _stands_in(folder: Path, state: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether the files of weights in ``folder`` hold ``state``, name by name, tied weights once."""
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


def _callback_states(trainer: Trainer) -> dict[str, Any]:
    states: dict[str, Any] = {"TrainerControl": trainer.control.state()}
    for callback in trainer.callback_handler.callbacks:
        state = getattr(callback, "state", None)  # the user's object, or one written for transformers
        if not callable(state):
            continue
        name = type(callback).__name__
        if name in states:
            others = states[name] if isinstance(states[name], list) else [states[name]]
            states[name] = [*others, state()]
        else:
            states[name] = state()
    return states
