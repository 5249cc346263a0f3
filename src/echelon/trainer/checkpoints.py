"""Weights and the state of a training on disk: checkpoint-N folders, the best one, and how many are kept.

This version writes what an evaluation or another program needs: weights as safetensors, everything else as JSON. What a
resumed training needs comes with crash-safe checkpoints.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from echelon.base.logging import get_logger

__all__ = [
    "ARGUMENTS_FILE",
    "STATE_FILE",
    "WEIGHTS_FILE",
    "SavesItself",
    "checkpoints_in",
    "get_last_checkpoint",
    "remove_surplus",
    "write_json",
]

logger = get_logger(__name__)

WEIGHTS_FILE = "model.safetensors"
STATE_FILE = "trainer_state.json"
ARGUMENTS_FILE = "training_args.json"
_NAME = re.compile(r"checkpoint-(\d+)")


@runtime_checkable
class SavesItself(Protocol):
    """A model or tokenizer of transformers."""

    def save_pretrained(self, save_directory: str, **options: Any) -> Any:
        """Write it to a folder."""
        ...


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoint-N folders in ``folder``, the oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def get_last_checkpoint(folder: str | Path) -> str | None:
    """Return the newest checkpoint-N in ``folder`` that is whole, None where there is none; what is skipped is told."""
    for path in reversed(checkpoints_in(Path(folder)) if Path(folder).is_dir() else []):
        if (path / STATE_FILE).is_file():  # written last
            return str(path)
        logger.warning("%s is not whole (it has no %s): an older checkpoint is taken", path, STATE_FILE)
    return None


def remove_surplus(folder: Path, *, limit: int | None, best: str | None, keep_newest: bool) -> None:
    """Delete the oldest checkpoints beyond ``limit``; never the best, nor (``keep_newest``) the newest."""
    if limit is None or limit <= 0:
        return
    all_of_them = checkpoints_in(folder)
    kept = {Path(best)} if best is not None else set()
    if keep_newest and all_of_them:
        kept.add(all_of_them[-1])
    surplus = len(all_of_them) - max(limit, len(kept & set(all_of_them)))
    for path in all_of_them:
        if surplus <= 0:
            return
        if path not in kept:
            shutil.rmtree(path)
            surplus -= 1


def write_json(path: Path, values: Any) -> None:
    """Write ``values`` as readable JSON."""
    path.write_text(json.dumps(values, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8")
