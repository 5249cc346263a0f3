"""Detects a checkpoint folder's layout, and its weight files, from the names of its files."""

from __future__ import annotations

import re
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
    names = storage.entries(folder) if folder.is_dir() else []
    if any(_SHARDED.fullmatch(name) for name in names):
        return "sharded"
    if TRAINER_STATE in names:
        return "transformers"
    return "accelerate" if any(_OF_ACCELERATE.fullmatch(name) for name in names) else None


def require_layout(folder: Location) -> Layout:
    """Return the layout of ``folder``.

    Raises:
        UsageError: the folder does not exist.
        CheckpointError: the folder is not a checkpoint.
    """
    layout = layout_of(folder)
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


def require_whole(folder: Location) -> Layout:
    """Return the layout of ``folder``; raise an error if it can be read only by unpickling.

    Raises:
        UsageError: the folder does not exist.
        CheckpointError: the folder is not a checkpoint, or was written by torch.distributed.checkpoint.
    """
    layout = require_layout(folder)
    if layout == "sharded":
        raise CheckpointError(
            f"{folder} was written by torch.distributed.checkpoint; its index (.metadata) is a pickle, and unpickling can run "
            "code",
            do="if you trust the checkpoint, convert it with `accelerate merge-weights` and use the result, or save "
            "it again with FSDP_STATE_DICT_TYPE=FULL_STATE_DICT",
        )
    return layout


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
