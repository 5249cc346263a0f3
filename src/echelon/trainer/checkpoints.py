"""Weights and the state of a training on disk: checkpoint-N folders, the best one, and how many are kept.

This version writes what an evaluation or another program needs: weights as safetensors, everything else as JSON. What a
resumed training needs comes with crash-safe checkpoints.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors.torch import load_file
from torch import nn

from echelon.base.errors import UsageError

__all__ = [
    "ARGUMENTS_FILE",
    "STATE_FILE",
    "WEIGHTS_FILE",
    "SavesItself",
    "checkpoints_in",
    "load_weights",
    "remove_surplus",
    "without_aliases",
    "write_json",
]

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


def without_aliases(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of ``state``, each memory once: tied weights have several names, a safetensors file has none."""
    seen: set[tuple[Any, ...]] = set()
    result = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        place = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and place in seen:
            continue
        seen.add(place)
        # A part of a larger memory would drag the whole of it along, and safetensors refuses it.
        shares = value.numel() * value.element_size() != value.untyped_storage().nbytes()
        result[name] = value.clone() if shares else value
    return result


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load the weights in ``folder`` into ``model``; names that share their memory with a loaded one may be missing.

    Raises:
        UsageError: the file holds another model's weights.
    """
    weights = load_file(folder / WEIGHTS_FILE)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tensors = {name for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    saved = without_aliases(model.state_dict()).keys()
    lost = [name for name in missing if name in tensors and name in saved]
    if lost or unexpected:
        raise UsageError(
            f"{folder / WEIGHTS_FILE} does not fit the model: missing {lost[:5]}, unexpected {list(unexpected)[:5]}",
            do="load it into a model of the class and sizes that it was saved from",
        )


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoint-N folders in ``folder``, the oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


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
