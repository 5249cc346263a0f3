"""Detects a checkpoint folder's layout, and its weight files, from the names of its files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from echelon.base.errors import CheckpointError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.checkpoint import storage
from echelon.checkpoint.commit import place_of, require_folder_or_nothing
from echelon.checkpoint.damage import damaged
from echelon.checkpoint.manifest import MANIFEST
from echelon.checkpoint.object_store import Location, ObjectPath
from echelon.checkpoint.typed_json import read_json
from echelon.compat.constants import (
    FSDP_MODEL_NAME,
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    WEIGHTS_INDEX_NAME,
)

Layout = Literal["echelon", "accelerate", "transformers", "sharded"]
"""The known layouts. ``sharded`` is the format of torch.distributed.checkpoint, which Accelerate writes for FSDP."""

TRAINER_STATE = "trainer_state.json"
_OF_ACCELERATE = re.compile(
    rf"{SAFE_MODEL_NAME}(-\d+-of-\d+)?\.safetensors|{MODEL_NAME}(-\d+-of-\d+)?\.bin|{FSDP_MODEL_NAME}\.bin"
    rf"|{RNG_STATE_NAME}_0\.pkl|{OPTIMIZER_NAME}\.bin"
)
_SHARDED = re.compile(rf"\.metadata|.*\.distcp|{FSDP_MODEL_NAME}_\d+|{OPTIMIZER_NAME}_\d+")
_NUMBERED = re.compile(r"checkpoint[-_]\d+")


def layout_of(folder: Location) -> Layout | None:
    """Return the layout of ``folder``, or None if it is not a checkpoint. In object stores, only echelon's own is known."""
    folder = place_of(folder)
    if storage.kind(folder / MANIFEST) is not None:
        return "echelon"
    if isinstance(folder, ObjectPath):
        return None
    return foreign_layout(storage.entries(folder)) if folder.is_dir() else None


def foreign_layout(names: Sequence[str]) -> Layout | None:
    """Return the layout of a folder with these ``names``, written by another library; None if it is not a checkpoint."""
    if any(_SHARDED.fullmatch(name) for name in names):
        return "sharded"
    if TRAINER_STATE in names:
        return "transformers"
    return "accelerate" if any(_OF_ACCELERATE.fullmatch(name) for name in names) else None


def is_sharded_file(name: str) -> bool:
    """Return whether a file or folder with this name belongs to the layout of torch.distributed.checkpoint."""
    return _SHARDED.fullmatch(name) is not None


def require_layout(folder: Location) -> Layout:
    """Return the layout of ``folder``.

    Raises:
        UsageError: the folder does not exist.
        CheckpointError: the folder is not a checkpoint, or has shards that only DeepSpeed can read.
    """
    layout = layout_of(folder)
    is_bare = isinstance(folder, Path) and layout in (None, "accelerate") and not weight_files(folder)
    if is_bare and _has_zero_shards(folder):
        raise CheckpointError(
            _("{folder} holds the shards of DeepSpeed's ZeRO, which only DeepSpeed can put together", folder=folder),
            do=_(
                "run `python -m deepspeed.utils.zero_to_fp32 {folder} OUT --safe_serialization`, which needs deepspeed and writes the weights "
                "without the optimizer. It unpickles the files, so run it only on a checkpoint that you trust. To keep the optimizer, load the "
                "checkpoint with DeepSpeed in the program that wrote it",
                folder=folder,
            ),
        )
    if layout is None:
        if isinstance(folder, ObjectPath):
            raise CheckpointError(
                _("{folder} is not a checkpoint in echelon's format: it has no {file}", folder=folder, file=MANIFEST),
                do=_("pass the URL of a checkpoint; echelon checkpoint ls lists the checkpoints at a URL"),
            )
        require_folder_or_nothing(folder)
        if not folder.is_dir():
            raise UsageError(
                _("the folder {path} does not exist", path=folder),
                do=_(
                    "pass a checkpoint folder (echelon checkpoint ls FOLDER lists them), or call resume(), which finds the newest"
                ),
            )
        inside = [folder / "checkpoints", folder]
        found = [
            path for one in inside if one.is_dir() for path in sorted(one.iterdir()) if _NUMBERED.fullmatch(path.name)
        ]
        newest = max(found, key=lambda path: int(path.name[len("checkpoint_") :]), default=None)
        raise CheckpointError(
            _(
                "{folder} is not a checkpoint: it has no {file} and no weights in Accelerate's or transformers' layout",
                folder=folder,
                file=MANIFEST,
            ),
            do=_("pass a checkpoint folder; echelon checkpoint ls lists the checkpoints in a folder")
            if newest is None
            else _("pass one of the checkpoints in this folder, such as {newest}", newest=newest),
        )
    return layout


def _has_zero_shards(folder: Location) -> bool:
    """Return whether ``folder``, or a folder in it, has files that DeepSpeed's engine wrote for each rank."""
    return isinstance(folder, Path) and any(
        next(folder.glob(f"{inside}*zero_pp_rank_*_optim_states.pt"), None) for inside in ("", "*/", "*/*/")
    )


def weight_files(folder: Path, model: int = 0) -> list[Path]:
    """Return a model's weight files in Accelerate's or transformers' layout; empty if the model does not exist.

    Raises:
        CheckpointError: the index is damaged, or refers to files outside the folder.
    """
    ending = f"_{model}" if model else ""
    single = (f"{SAFE_MODEL_NAME}{ending}.safetensors", f"{MODEL_NAME}{ending}.bin", f"{FSDP_MODEL_NAME}{ending}.bin")
    for name in single:
        if (folder / name).is_file():
            return [folder / name]
    for name in () if model else (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        if (folder / name).is_file():
            weights = read_json(folder / name).get("weight_map")
            files = sorted(set(weights.values())) if isinstance(weights, dict) else []
            if not files or not all(isinstance(file, str) and Path(file).name == file for file in files):
                raise damaged(f"{folder / name} does not list weight files in the same folder")
            return [folder / file for file in files]
    return []
