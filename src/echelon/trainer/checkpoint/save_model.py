"""Implements ``save_model``: writes weights, tokenizer and arguments in the formats that other programs read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from echelon.accelerator.models.save_objects import bare_module
from echelon.accelerator.models.weight_check import shortened
from echelon.accelerator.process import first_rank_saves
from echelon.base.errors import ConfigError, UsageError
from echelon.base.warnings import warn
from echelon.checkpoint.formats import transformers as transformers_format
from echelon.checkpoint.formats.torch_files import write_pickled
from echelon.checkpoint.formats.weight_files import write_tensors
from echelon.trainer.arguments.training_arguments import TrainingArguments
from echelon.trainer.checkpoint.adapters import has_adapters, saves_itself, trained_state, warn_of_weights_outside
from echelon.trainer.checkpoint.checkpoint_folders import (
    ARGUMENTS_FILE,
    WEIGHTS_FILE,
    SavesItself,
    checkpoint_format,
    write_json,
)
from echelon.trainer.hooks import TrainerHooks
from echelon.trainer.session import TrainerSession

__all__ = ["save_model", "save_model_and_wait", "write_model_files", "write_state_tensors"]


def save_model(hooks: TrainerHooks, folder: Path, *, write_files: Callable[..., None]) -> None:
    """Gather the weights and call ``write_files(folder, state_dict=)`` on the saving ranks.

    Collective: call on every rank.

    Raises:
        ConfigError: ``save_on_each_node`` is set and the model is sharded.
    """
    state_dict = hooks.accelerator.get_state_dict(hooks.model_wrapped)
    if not hooks.args.should_save:
        return
    if state_dict is None:  # only rank zero gathers a sharded model
        raise ConfigError(
            "save_on_each_node=True does not work with a sharded model, because only rank zero gathers its weights",
            where="TrainingArguments.save_on_each_node",
            do="remove save_on_each_node and put output_dir on a file system that all machines share",
        )
    write_files(str(folder), state_dict=state_dict)


def save_model_and_wait(hooks: TrainerHooks, folder: Path, *, write_files: Callable[..., None]) -> None:
    """Call ``save_model``; the ranks that do not save return when the files are there.

    Collective: call on every rank. If each rank has the whole model, rank zero may also call it alone, and does not wait.

    Raises:
        ConfigError: see ``save_model``.
        DesyncError: the saving rank failed.
    """
    if hooks.accelerator.capabilities.shards_parameters:
        save_model(hooks, folder, write_files=write_files)
        hooks.accelerator.wait_for_everyone()
        return
    with first_rank_saves(f"save_model {folder}", on_each_machine=hooks.args.save_on_each_node):
        save_model(hooks, folder, write_files=write_files)


def write_model_files(
    hooks: TrainerHooks, session: TrainerSession, folder: Path, state_dict: dict[str, Any] | None
) -> None:
    """Write the model files on the saving rank.

    Raises:
        UsageError: ``state_dict`` is None and the model is sharded, or only the model files are saved and cannot hold it.
    """
    if state_dict is None and hooks.accelerator.capabilities.shards_parameters:
        raise UsageError(
            "_save() without state_dict would write only this rank's shards of the model",
            do=(
                "call save_model() on every rank, or pass _save() the state_dict that accelerator.get_state_dict() "
                "returns on rank zero"
            ),
        )
    folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = bare_module(hooks.model), hooks.processing_class
    state = model.state_dict() if state_dict is None else state_dict
    if saves_itself(model):
        model.save_pretrained(str(folder), state_dict=state)
        if has_adapters(model) and not session.is_warned_of_weights_outside:
            session.is_warned_of_weights_outside = warn_of_weights_outside(model, trained_state(model, state), folder)
    else:
        write_state_tensors(hooks.args, session, state, folder / WEIGHTS_FILE)
    if isinstance(tokenizer, SavesItself):
        tokenizer.save_pretrained(str(folder))
    if checkpoint_format(hooks.args) == "transformers":
        args = copy.copy(hooks.args)
        args.hub_token = None  # a secret
        write_pickled(args, folder / transformers_format.ARGUMENTS)
    else:
        write_json(folder / ARGUMENTS_FILE, hooks.args.to_dict())


def write_state_tensors(args: TrainingArguments, session: TrainerSession, state: Mapping[str, Any], path: Path) -> None:
    """Write the tensors of ``state`` to a safetensors file; warn once of entries that it cannot hold.

    Raises:
        UsageError: there are such entries, and a checkpoint would not hold them elsewhere.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    others = sorted(state.keys() - tensors.keys())
    if others and (args.save_only_model or checkpoint_format(args) == "transformers"):
        setting = "save_only_model=True" if args.save_only_model else "checkpoint_format='transformers'"
        raise UsageError(
            f"{path.name} holds only tensors, not {shortened(others)} of the model's state dict, so a checkpoint with "
            f"{setting} would lack them",
            where="TrainingArguments",
            do=f"remove {setting}, or return a tensor from the module's get_extra_state()",
        )
    if others and not session.is_warned_of_other_state:
        session.is_warned_of_other_state = True
        warn(
            f"{path.name} holds only tensors, not {shortened(others)} of the model's state dict. Checkpoints hold them; "
            "files written by save_model() do not. To save them there, too, return a tensor from the module's "
            "get_extra_state()"
        )
    write_tensors(tensors, path)
