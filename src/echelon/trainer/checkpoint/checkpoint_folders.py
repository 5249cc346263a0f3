"""Names and formats of checkpoint-N directories; finds the newest valid one and deletes surplus ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from echelon.accelerator.checkpoint.folders import checkpoints_in, problems_in, remove_checkpoints
from echelon.accelerator.checkpoint.registry import checkpoint_format as format_of_environment
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
    """A tokenizer or processor with ``save_pretrained``, as in transformers."""

    def save_pretrained(self, save_directory: str, **options: Any) -> Any:
        """Write the object to a directory."""
        ...


def checkpoint_format(args: TrainingArguments) -> str:
    """Return the checkpoint format: ``echelon`` or ``transformers``.

    Raises:
        ConfigError: the format is unknown.
    """
    chosen, where = args.checkpoint_format, "TrainingArguments.checkpoint_format"
    if chosen is None:
        chosen, where = format_of_environment(), "env ECHELON_CHECKPOINT_FORMAT"
        if chosen == "accelerate":
            chosen = "transformers"  # the variable is for both levels of a program
    if (chosen or "echelon") not in FORMATS:
        raise ConfigError(
            f"checkpoint_format={chosen!r} is not one of {', '.join(FORMATS)}",
            where=where,
            do="use one of these",
        )
    return chosen or "echelon"


# ---- finding ---------------------------------------------------------------------------------------------------------


def get_last_checkpoint(folder: str | Path) -> str | None:
    """Return the newest valid checkpoint-N in ``folder``, or None; log every checkpoint that is skipped."""
    for path in reversed(checkpoints_in(Path(folder), prefix=PREFIX)):
        problems = problems_in(path)
        if not problems:
            return str(path)
        logger.warning("%s is damaged or incomplete (%s); trying an older checkpoint", path, problems[0])
    return None


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_json(path: Path, values: Any) -> None:
    """Write ``values`` as indented JSON."""
    path.write_text(json.dumps(values, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8")


# ---- deleting --------------------------------------------------------------------------------------------------------


def remove_surplus(folder: Path, *, limit: int | None, best: str | None, newest: Path) -> None:
    """Keep at most ``limit`` checkpoints: delete the oldest, but never the best or the newest one."""
    if limit is None or limit <= 0:
        return
    keep = {newest} | ({Path(best)} if best is not None else set())
    try:
        remove_checkpoints(folder, prefix=PREFIX, limit=max(limit, len(keep)), keep=keep)
    except OSError as error:
        warn(f"saved {newest}, but could not delete older checkpoints: {error}")


def remove_last(folder: Path, *, best: str) -> None:
    """Delete all checkpoints except the best one."""
    remove_checkpoints(folder, prefix=PREFIX, limit=1, keep=[Path(best)])
