"""checkpoint-N folders: their names and formats, which is the newest that is whole, and how many are kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn

from echelon.accelerator.checkpoint.folders import checkpoints_in, problems_in, remove_checkpoints
from echelon.base import environ
from echelon.base.errors import ConfigError
from echelon.base.logging import get_logger
from echelon.base.warnings import warn
from echelon.trainer.arguments.training_arguments import TrainingArguments

__all__ = [
    "ARGUMENTS_FILE",
    "PREFIX",
    "STATE_FILE",
    "WEIGHTS_FILE",
    "SavesItself",
    "checkpoint_format",
    "get_last_checkpoint",
    "has_adapters",
    "remove_last",
    "remove_surplus",
    "write_json",
]

logger = get_logger(__name__)

PREFIX = "checkpoint-"
WEIGHTS_FILE = "model.safetensors"
STATE_FILE = "trainer_state.json"
ARGUMENTS_FILE = "training_args.json"
FORMATS = ("echelon", "transformers")


@runtime_checkable
class SavesItself(Protocol):
    """A model or tokenizer of transformers."""

    def save_pretrained(self, save_directory: str, **options: Any) -> Any:
        """Write it to a folder."""
        ...


@runtime_checkable
class _Adapted(Protocol):
    """A model of PEFT: what is trained of it is saved in files of its own."""

    peft_config: Mapping[str, Any]

    def load_adapter(self, model_id: str, adapter_name: str, is_trainable: bool = False) -> Any:
        """Read it from a folder."""
        ...


def has_adapters(model: nn.Module) -> bool:
    """Tell whether ``model`` saves its adapters alone."""
    return isinstance(model, _Adapted)


def checkpoint_format(args: TrainingArguments) -> str:
    """Return how checkpoints are written: ``echelon`` or ``transformers``.

    Raises:
        ConfigError: another one is asked for.
    """
    chosen, where = args.checkpoint_format, "TrainingArguments.checkpoint_format"
    if chosen is None:
        chosen, where = environ.get("ECHELON_CHECKPOINT_FORMAT"), "env ECHELON_CHECKPOINT_FORMAT"
    if (chosen or "echelon") not in FORMATS:
        raise ConfigError(
            f"checkpoint_format={chosen!r} is none of the formats of a Trainer: {', '.join(FORMATS)}",
            where=where,
            do="choose one of them",
        )
    return chosen or "echelon"


# ---- finding ---------------------------------------------------------------------------------------------------------


def get_last_checkpoint(folder: str | Path) -> str | None:
    """Return the newest checkpoint-N in ``folder`` that is whole, None where there is none; what is skipped is told."""
    for path in reversed(checkpoints_in(Path(folder), prefix=PREFIX)):
        problems = problems_in(path)
        if not problems:
            return str(path)
        logger.warning("%s is not whole (%s): an older checkpoint is taken", path, problems[0])
    return None


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_json(path: Path, values: Any) -> None:
    """Write ``values`` as readable JSON."""
    path.write_text(json.dumps(values, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8")


# ---- deleting --------------------------------------------------------------------------------------------------------


def remove_surplus(folder: Path, *, limit: int | None, best: str | None, newest: Path) -> None:
    """Delete the oldest checkpoints beyond ``limit``; never the best, nor the one that was just written."""
    if limit is None or limit <= 0:
        return
    keep = {newest} | ({Path(best)} if best is not None else set())
    try:
        remove_checkpoints(folder, prefix=PREFIX, limit=max(limit, len(keep)), keep=keep)
    except OSError as error:
        warn(f"{newest} is saved, but older checkpoints could not be deleted: {error}")


def remove_last(folder: Path, *, best: str) -> None:
    """Delete all checkpoints but the best: the last one was kept to go on from."""
    remove_checkpoints(folder, prefix=PREFIX, limit=1, keep=[Path(best)])
