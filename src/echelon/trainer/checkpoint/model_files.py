"""The files that ``save_model`` writes, in the formats that other programs read: weights, tokenizer and arguments."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from echelon.accelerator import Accelerator
from echelon.accelerator.checkpoint.folders import read_model_files
from echelon.accelerator.models.save_objects import bare_module
from echelon.accelerator.models.save_weights import load_weights
from echelon.accelerator.models.weight_check import shortened
from echelon.accelerator.process import first_rank_saves
from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.warnings import warn
from echelon.checkpoint.formats import transformers as transformers_format
from echelon.checkpoint.formats.torch_files import write_pickled
from echelon.checkpoint.formats.weight_files import write_tensors
from echelon.checkpoint.object_store import Location
from echelon.trainer.arguments.training_arguments import TrainingArguments
from echelon.trainer.checkpoint.adapters import (
    embedding_names,
    has_adapters,
    holds_adapters,
    load_adapted_model,
    saves_itself,
    trained_state,
    warn_of_weights_outside,
)
from echelon.trainer.checkpoint.checkpoint_folders import (
    ARGUMENTS_FILE,
    WEIGHTS_FILE,
    SavesItself,
    checkpoint_format,
    write_json,
)
from echelon.trainer.session import TrainerSession


def write_model_files(
    args: TrainingArguments,
    session: TrainerSession,
    wrapped: nn.Module,
    state: Mapping[str, Any],
    folder: Path,
    processing_class: Any,
) -> None:
    """Write the weights ``state``, the tokenizer and the arguments to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    model: Any = bare_module(wrapped)
    if saves_itself(model):
        floats = (v.dtype for v in state.values() if isinstance(v, torch.Tensor) and v.is_floating_point())
        dtype = next(floats, None)
        model.save_pretrained(str(folder), state_dict=state)  # may empty the dict
        if dtype in (torch.bfloat16, torch.float16):
            _note_dtype(folder / "config.json", dtype)
        if has_adapters(model) and not session.is_warned_of_weights_outside:
            session.is_warned_of_weights_outside = warn_of_weights_outside(model, trained_state(model, state), folder)
    else:
        write_state_tensors(args, session, state, folder / WEIGHTS_FILE)
    _write_companions(args, folder, processing_class)


def _write_companions(args: TrainingArguments, folder: Path, processing_class: Any) -> None:
    """Write the tokenizer and the arguments."""
    if isinstance(processing_class, SavesItself):
        processing_class.save_pretrained(str(folder))
    if checkpoint_format(args) == "transformers":
        args = copy.copy(args)
        args.hub_token = None  # a secret
        write_pickled(args, folder / transformers_format.ARGUMENTS)
    else:
        write_json(folder / ARGUMENTS_FILE, args.to_dict())


def write_sharded_model_files(
    args: TrainingArguments,
    session: TrainerSession,
    accelerator: Accelerator,
    wrapped: nn.Module,
    folder: Path,
    processing_class: Any,
    *,
    weights_to: Location,
) -> bool:
    """Write the same files without gathering the model on any rank; return False if it must be gathered.

    The weights go to ``weights_to``, which is ``folder`` or the place in an object store to which rank zero uploads ``folder``.

    It must be if transformers would write other names or fewer weights than the model has. Of a model with adapters, rank zero
    gathers what is trained.

    Collective: call on every rank.
    """
    model: Any = bare_module(wrapped)
    checkpoints, name = accelerator.checkpoints, f"save_model {folder}"
    changes_names = saves_itself(model) and not has_adapters(model) and not _keeps_names(model)
    state = checkpoints.sharded_state(wrapped, is_wanted=not changes_names)
    if state is None:
        return False
    if has_adapters(model):
        # peft also writes embeddings of another size than those of the base model.
        wanted = {*trained_state(model, dict.fromkeys(state.names)), *embedding_names(model)}
        tensors = checkpoints.gather_tensors(state, wrapped, wanted)
        if tensors is None:
            return False
        with first_rank_saves(name, on_each_machine=False):
            if args.should_save:
                write_model_files(args, session, wrapped, tensors, folder, processing_class)
        return True
    with first_rank_saves(name, on_each_machine=False):
        if args.should_save and saves_itself(model):
            model.save_pretrained(str(folder), state_dict={})  # the config; the weights follow
    if not checkpoints.write_sharded(state, wrapped, weights_to, max_shard_bytes=_MAX_SHARD_BYTES):
        return False
    with first_rank_saves(name, on_each_machine=False):
        if args.should_save:
            loaded = accelerator.session.masters.loaded_dtypes(model)
            floats = (loaded.get(name, p.dtype) for name, p in model.named_parameters() if p.is_floating_point())
            dtype = next(floats, None)
            if dtype in (torch.bfloat16, torch.float16):
                _note_dtype(folder / "config.json", dtype)
            _write_companions(args, folder, processing_class)
    return True


def _keeps_names(model: Any) -> bool:
    """Return whether ``model.save_pretrained`` writes the tensors of the state dict as they are, under their names."""
    try:
        loading = import_module("transformers.core_model_loading")
    except ImportError:  # before version 5
        return False
    state = {name: torch.empty(value.shape, device="meta") for name, value in model.state_dict().items()}
    written = loading.revert_weight_conversion(model, dict(state))
    is_same = written.keys() == state.keys() and all(written[name] is value for name, value in state.items())
    return is_same and not model._keys_to_ignore_on_save


def _note_dtype(config: Path, dtype: torch.dtype) -> None:
    """Correct the dtype in a config of transformers, which is that of the float32 weights in training, not of the saved ones.

    ``from_pretrained`` loads the model in this dtype.
    """
    entries = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    name = next((name for name in ("dtype", "torch_dtype") if entries.get(name) == "float32"), None)
    if name is not None:
        entries[name] = str(dtype).removeprefix("torch.")
        config.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")


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
            _(
                "{name} holds only tensors, not {names} of the model's state dict. Checkpoints hold "
                "them; files written by save_model() do not. To save them there, too, return a tensor "
                "from the module's get_extra_state()",
                name=path.name,
                names=shortened(others),
            )
        )
    write_tensors(tensors, path)


_MAX_SHARD_BYTES = 5_000_000_000  # so that several ranks write a large model


class _Loaded(NamedTuple):
    """The result of loading weights, with the fields that torch's ``load_state_dict`` returns."""

    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()


def load_model_from(
    model: nn.Module,
    folder: Path,
    *,
    report: Callable[[Any], None],
    select: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
) -> None:
    """Load the weights in ``folder`` into ``model``, or all that was trained for a PEFT model.

    Args:
        folder: a checkpoint, or a directory that ``save_model`` wrote.
        report: called with empty lists of missing and unexpected weights, because any such weight raises an error.
        select: returns the tensors of this rank's stages of a pipeline. None: ``model`` is whole.

    Raises:
        UsageError: ``folder`` has no weights.
        CheckpointError: the weights belong to another model or are damaged.
    """
    if has_adapters(bare_module(model)) and holds_adapters(folder):
        load_adapted_model(bare_module(model), folder, select=select)
        report(_Loaded())
        return
    tensors = read_model_files(folder)
    advice = N_("use the model that the weights were saved from; to start over, train without resume_from_checkpoint")
    load_weights(model, tensors if select is None else select(tensors), source=folder, advice=advice)
    report(_Loaded())
