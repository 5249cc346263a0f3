"""The whole weights of a checkpoint of any layout, in files that every program reads; without processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from echelon.base.errors import CheckpointError, UsageError
from echelon.base.warnings import warn
from echelon.checkpoint.commit import discard
from echelon.checkpoint.damage import damaged
from echelon.checkpoint.formats.conversion import num_models_in, weights_beside
from echelon.checkpoint.formats.layouts import require_layout, require_whole
from echelon.checkpoint.formats.torch_files import load
from echelon.checkpoint.formats.weight_files import read_model, weight_files, write_shards
from echelon.checkpoint.listing import Reading, problems_of
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.storage import LocalStorage
from echelon.checkpoint.stored_weights import PRECISIONS, weights_in, weights_of, write_weights
from echelon.checkpoint.tensor_names import model_prefix
from echelon.compat.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

__all__ = ["merge", "merge_fsdp_weights", "open_whole", "require_apart"]

_NO_LIMIT = 1 << 62


def merge(
    source: Path,
    folder: Path,
    *,
    model: int | None = None,
    max_shard_bytes: int | None = None,
    precision: str | None = None,
    reading: Reading | None = None,
) -> list[Path]:
    """Write the weights of a model in the checkpoint ``source`` into ``folder``, and return the files.

    Safetensors are copied a few megabytes at a time; files of ``torch.save`` are memory-mapped.

    Args:
        source: of echelon's own format (every file is verified first), or of Accelerate's or transformers' layout.
        folder: it exists; its files of these names are replaced.
        model: which one, by its place in ``prepare``; None: there is only one.
        max_shard_bytes: of one file, at most; None: one file.
        precision: one of ``PRECISIONS`` for floating-point tensors; None: as they are.
        reading: the progress bar.

    Raises:
        CheckpointError: it is damaged, or its index is a pickle.
        UsageError: there is no such model.
    """
    show = reading or _silent
    kind = None if precision is None else PRECISIONS[precision]
    if require_layout(source) == "echelon":
        checkpoint = open_whole(source, show)
        count = num_models_in(checkpoint)
        model = _chosen(model, count or 1, source)
        extras = checkpoint.objects().get("extra_states", [])
        if len(extras) > model and extras[model]:
            warn(f"model {model} has states that are no tensors, and are left out: {', '.join(extras[model])}")
        weights = weights_of(checkpoint, model_prefix(model)) if count else weights_beside(checkpoint)
    else:
        if not weight_files(source):
            require_whole(source)
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
    """Write the weights of the checkpoint ``checkpoint_dir``, of any layout, to one file in the folder ``output_path``.

    Args:
        checkpoint_dir: a checkpoint of one model.
        output_path: created if missing; the file in it is replaced.
        safe_serialization: write ``model.safetensors``; False: ``pytorch_model.bin``, which needs all of it in memory.
        remove_checkpoint_dir: delete the checkpoint, with its optimizers, once the file is on disk.

    Raises:
        CheckpointError: it is damaged, or its index is a pickle.
        UsageError: ``output_path`` is in the checkpoint.
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
    LocalStorage().sync_folder(target)
    if remove_checkpoint_dir:
        discard(LocalStorage(), source)


def open_whole(source: Path, reading: Reading) -> Checkpoint:
    """Return the checkpoint ``source`` after verifying every file.

    Raises:
        CheckpointError: the damaged files are named.
    """
    checkpoint = Checkpoint(source)
    problems = problems_of(checkpoint, reading)
    if problems:
        listing = "\n".join(f"    {problem}" for problem in problems)
        raise damaged(f"{source} is damaged\n{listing}")
    return checkpoint


def require_apart(source: Path, target: Path) -> None:
    """Raise when ``target`` is ``source``, or in it.

    Raises:
        UsageError: it is.
    """
    if source.resolve() in (target.resolve(), *target.resolve().parents):
        raise UsageError(f"{target} is in the checkpoint {source} itself", do="write to a folder beside it")


def _silent(label: str, num_bytes: int) -> AbstractContextManager[Any]:
    return nullcontext(lambda _: None)


def _chosen(model: int | None, count: int, source: Path) -> int:
    if not count:
        raise CheckpointError(
            f"{source} holds no weights of a model", do="list what it holds with echelon checkpoint show"
        )
    if model is None and count > 1:
        raise UsageError(
            f"{source} holds {count} models",
            do=f"choose one with echelon checkpoint merge --model N, N from 0 to {count - 1}",
        )
    if model is not None and not 0 <= model < count:
        raise UsageError(f"{source} has no model {model}: it holds {count}", do=f"give 0 to {count - 1}")
    return model or 0


def _rewrite(files: list[Path], folder: Path, max_shard_bytes: int | None, precision: str | None) -> list[Path]:
    """Write what ``torch.save`` wrote as safetensors."""
    state: dict[str, Any] = {}
    for file in files:
        state |= load(file, map_location="cpu", mmap=True)
    dtypes: Mapping[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    if precision is not None:
        state = {name: t.to(dtypes[precision]) if t.is_floating_point() else t for name, t in state.items()}
    limit = _NO_LIMIT if max_shard_bytes is None else max_shard_bytes
    write_shards(state, folder, max_shard_bytes=limit, safe_serialization=True)
    return sorted(path for path in folder.iterdir() if path.is_file())
