"""Checkpoints as transformers' Trainer writes and reads them: optimizer.pt, scheduler.pt, rng_state.pth and the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from echelon.accelerator.checkpoint.changed_data import stored_facts
from echelon.accelerator.checkpoint.folders import write_files
from echelon.accelerator.checkpoint.rng_states import current_random_states
from echelon.base.errors import CheckpointError, UsageError
from echelon.checkpoint.formats.torch_files import load, write_pickled
from echelon.trainer.checkpoint.checkpoint_folders import STATE_FILE, write_json, write_model

if TYPE_CHECKING:
    from echelon.trainer.trainer import Trainer

__all__ = [
    "ARGUMENTS_BIN",
    "DATA_FILE",
    "PLACE_NAMES",
    "PLACE_OF_RUN",
    "load_transformers",
    "num_processes_of",
    "read_random_states",
    "save_transformers",
]

ARGUMENTS_BIN = "training_args.bin"
_OPTIMIZER, _SCHEDULER, _SCALER = "optimizer.pt", "scheduler.pt", "scaler.pt"
DATA_FILE = "echelon_data.json"
PLACE_OF_RUN = ("num_steps_beyond", "has_no_end")
"""Fields of ``Place`` that a training goes on with."""
PLACE_NAMES = ("epoch", "num_batches", "is_over", *PLACE_OF_RUN)
"""Fields of ``Place`` that are noted in ``DATA_FILE``: by its steps alone it is not known where epochs have another length."""
"""What the place in the data depends on; transformers does not look at it."""
_RANDOM = re.compile(r"rng_state(?:_(\d+))?\.pth")
# Every file of the layout: what an older checkpoint of this name has of them is not kept.
_PARTS = re.compile(
    r"(model|pytorch_model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?|.*\.json|(optimizer|scheduler|scaler)\.pt"
    r"|rng_state(_\d+)?\.pth|training_args\.bin|.*\.(txt|model|jinja)|rank_\d+\.(safetensors|json)"
)
_KEYS = {"python": "random_state", "numpy": "numpy_random_seed", "cpu": "torch_manual_seed"}


def save_transformers(trainer: Trainer, folder: Path) -> bool:
    """Write ``folder``; False: the disk did not take it.

    Collective: every rank.

    Raises:
        UsageError: an engine whose optimizer is not to be had whole.
    """
    accelerator, args = trainer.accelerator, trainer.args
    if not accelerator.capabilities.exposes_state:
        raise UsageError(
            f"the engine {accelerator.capabilities.name} keeps its state in files of its own",
            where="TrainingArguments.checkpoint_format",
            do="leave checkpoint_format='transformers' out",
        )
    weights = accelerator.get_state_dict(trainer.model_wrapped)
    optimizer = None if args.save_only_model else trainer.optimizer.full_state_dict()

    facts, place = stored_facts(trainer.callback_handler.train_dataloader), trainer._place
    places = {name: getattr(place, name) for name in PLACE_NAMES}

    def write(aside: Path, is_owner: bool) -> None:
        write_model(trainer, aside, weights)
        if args.should_save:
            trainer.state.save_to_json(aside / STATE_FILE)
        if args.save_only_model:
            return
        if args.should_save:
            if facts is not None:
                write_json(aside / DATA_FILE, {**facts, "place": places})
            write_pickled(optimizer, aside / _OPTIMIZER)
            write_pickled(trainer._prepared_schedule.state_dict(), aside / _SCHEDULER)
            if accelerator.scaler is not None:
                write_pickled(accelerator.scaler.state_dict(), aside / _SCALER)
        is_alone = accelerator.num_processes == 1
        name = "rng_state.pth" if is_alone else f"rng_state_{accelerator.process_index}.pth"
        write_pickled(_named_as_transformers(current_random_states(), is_alone=is_alone), aside / name)

    return write_files(accelerator, folder, write, is_part=lambda name: _PARTS.fullmatch(name) is not None)


def load_transformers(trainer: Trainer, folder: Path) -> None:
    """Load the optimizer, the schedule and the loss scaler. Nothing of the files is run.

    Collective: where the optimizer's state is sharded.

    Raises:
        CheckpointError: a file is missing, damaged, or holds code.
    """
    missing = [name for name in (_OPTIMIZER, _SCHEDULER) if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} has no {' and no '.join(missing)}: a training cannot go on from it",
            do="load its weights into the model, and begin a new training",
        )
    trainer.optimizer.load_full_state_dict(load(folder / _OPTIMIZER, map_location="cpu"))
    trainer._prepared_schedule.load_state_dict(load(folder / _SCHEDULER, map_location="cpu"))
    scaler = trainer.accelerator.scaler
    if scaler is not None and (folder / _SCALER).is_file():
        scaler.load_state_dict(load(folder / _SCALER, map_location="cpu"))


def num_processes_of(folder: Path) -> int:
    """Return how many processes saved ``folder``, by the files of their random states; 0: it has none."""
    return sum(_RANDOM.fullmatch(path.name) is not None for path in folder.iterdir())


def read_random_states(folder: Path, *, rank: int) -> Mapping[str, Any] | None:
    """Return the random states of ``rank``; None where the saved run had no such rank."""
    for name in (f"rng_state_{rank}.pth", *(["rng_state.pth"] if rank == 0 else [])):
        if (folder / name).is_file():
            states = load(folder / name, map_location="cpu")
            return {
                _KEYS.get(key, f"torch_{key}_manual_seed"): [value]
                if key not in _KEYS and isinstance(value, torch.Tensor)
                else value
                for key, value in states.items()
            }
    return None


def _named_as_transformers(states: Mapping[str, Any], *, is_alone: bool) -> dict[str, Any]:
    devices = {
        match[1]: value[0] if is_alone and len(value) == 1 else value
        for key, value in states.items()
        if (match := re.fullmatch(r"torch_(\w+)_manual_seed", key))
    }
    return {name: states[key] for name, key in _KEYS.items()} | devices
