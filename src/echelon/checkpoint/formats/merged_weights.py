"""Exports a checkpoint's unsharded weights, from any layout, to standard weight files in a single process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from echelon.base.errors import CheckpointError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.progress import BarOpener, progress_bar
from echelon.base.warnings import warn
from echelon.checkpoint import storage
from echelon.checkpoint.commit import discard, require_apart
from echelon.checkpoint.damage import damaged
from echelon.checkpoint.formats.conversion import num_models_in, weights_beside
from echelon.checkpoint.formats.dcp import open_dcp
from echelon.checkpoint.formats.layouts import layout_of, require_layout, weight_files
from echelon.checkpoint.formats.torch_files import load
from echelon.checkpoint.formats.weight_files import read_model, write_shards
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.stored_weights import PRECISIONS, weights_in, weights_of, write_weights
from echelon.checkpoint.tensor_names import model_prefix
from echelon.compat.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

_NO_LIMIT = 1 << 62


def merge(
    source: Path,
    folder: Path,
    *,
    model: int | None = None,
    max_shard_bytes: int | None = None,
    precision: str | None = None,
    show: BarOpener = progress_bar,
) -> list[Path]:
    """Write a model's weights from the checkpoint ``source`` to ``folder``, and return the new files.

    Safetensors files are copied a few megabytes at a time, and ``torch.save`` files are memory-mapped.

    Args:
        source: checkpoint in Accelerate's, transformers' or DCP's layout, or in echelon's format (all its files are verified first).
        folder: existing folder to write to; files with the same names are replaced.
        model: index of the model in the ``prepare`` call; may be None if there is only one model.
        max_shard_bytes: maximum size per file; None writes a single file.
        precision: dtype to convert floating-point tensors to, a key of ``PRECISIONS``; None keeps their dtypes.

    Raises:
        CheckpointError: the checkpoint is damaged.
        UsageError: the checkpoint has no such model.
    """
    kind = None if precision is None else PRECISIONS[precision]
    if require_layout(source) in ("echelon", "sharded"):
        checkpoint = open_whole(source, show)
        count = num_models_in(checkpoint)
        model = _chosen(model, count or 1, source)
        extras = checkpoint.objects().get("extra_states", [])
        if len(extras) > model and extras[model]:
            warn(
                _(
                    "the state of model {model} has entries that are not tensors and were not exported: {extras}",
                    model=model,
                    extras=", ".join(extras[model]),
                )
            )
        if count and checkpoint.objects().get("averages"):
            warn(
                _(
                    "{source} also has an average of the weights; the merged weights are those of training. A Trainer has written the "
                    "averaged weights beside them; in a script of your own, call save_model() inside average_parameters()",
                    source=source,
                )
            )
        weights = weights_of(checkpoint, model_prefix(model)) if count else weights_beside(checkpoint)
    else:
        count = next(i for i in range(1 << 20) if not weight_files(source, i))
        files = weight_files(source, _chosen(model, count, source))
        if files[0].suffix != ".safetensors":
            return _rewrite(files, folder, max_shard_bytes, precision)
        weights = weights_in(files)
    with show("writing", weights.num_bytes(kind)) as progress:
        return write_weights(weights, folder, max_shard_bytes=max_shard_bytes, kind=kind, progress=progress)


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write a checkpoint's weights, from any layout, to one file in the folder ``output_path``.

    Args:
        checkpoint_dir: checkpoint that contains one model.
        output_path: folder for the file, which is created if it does not exist. An existing file is replaced.
        safe_serialization: whether to write ``model.safetensors``. Otherwise, ``pytorch_model.bin`` is written, which
            requires enough memory for all weights.
        remove_checkpoint_dir: whether to delete the checkpoint, including its optimizers, once the file is on disk.

    Raises:
        CheckpointError: the checkpoint is damaged.
        UsageError: ``output_path`` is inside the checkpoint.
    """
    source, target = Path(checkpoint_dir).resolve(), Path(output_path).resolve()
    require_apart(source, target)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".merge-", dir=target) as aside:
        (made,) = merge(source, Path(aside))
        if not safe_serialization:
            torch.save(read_model([made]), Path(aside) / WEIGHTS_NAME)
            made = Path(aside) / WEIGHTS_NAME
        with made.open("rb+") as file:
            os.fsync(file.fileno())
        made.replace(target / (SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME))
    storage.sync_folder(target)
    if remove_checkpoint_dir:
        discard(source)


def open_whole(source: Path, show: BarOpener) -> Checkpoint:
    """Verify every file of the checkpoint ``source``, in echelon's or DCP's format, and return it.

    Raises:
        CheckpointError: the checkpoint is damaged; the error names the files.
    """
    checkpoint = open_dcp(source) if layout_of(source) == "sharded" else Checkpoint(source)
    problems = checkpoint.problems(show=show)
    if problems:
        listing = "\n".join(f"    {problem}" for problem in problems)
        raise damaged(f"{source} is damaged\n{listing}")
    return checkpoint


def _chosen(model: int | None, count: int, source: Path) -> int:
    if not count:
        raise CheckpointError(
            f"{source} contains no model weights", do="see its contents with `echelon checkpoint show`"
        )
    if model is None and count > 1:
        raise UsageError(
            f"{source} contains {count} models",
            do=f"select one with `echelon checkpoint merge --model N`, where N is between 0 and {count - 1}",
        )
    if model is not None and not 0 <= model < count:
        raise UsageError(
            f"{source} has no model {model} (number of models: {count})",
            do=f"pass a number between 0 and {count - 1}",
        )
    return model or 0


def _rewrite(files: list[Path], folder: Path, max_shard_bytes: int | None, precision: str | None) -> list[Path]:
    """Rewrite ``torch.save`` files as safetensors files."""
    state: dict[str, Any] = {}
    for file in files:
        state |= load(file, map_location="cpu", mmap=True)
    dtypes: Mapping[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    if precision is not None:
        state = {name: t.to(dtypes[precision]) if t.is_floating_point() else t for name, t in state.items()}
    limit = _NO_LIMIT if max_shard_bytes is None else max_shard_bytes
    write_shards(state, folder, max_shard_bytes=limit, safe_serialization=True)
    return sorted(path for path in folder.iterdir() if path.is_file())
