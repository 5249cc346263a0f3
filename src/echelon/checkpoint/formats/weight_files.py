"""Sharded weight files (safetensors or ``torch.save``), named as in Accelerate and transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from echelon.base.errors import UsageError
from echelon.base.progress import progress_bar
from echelon.checkpoint.damage import damaged
from echelon.checkpoint.formats.torch_files import load
from echelon.checkpoint.object_store import Location, delete, uploaded_from, write_object
from echelon.checkpoint.storage import entries
from echelon.checkpoint.tensor_file import stored_aliases
from echelon.compat.constants import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_PATTERN_NAME,
)


def read_weights(path: Path, *, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a weight file: safetensors or ``torch.save``.

    Raises:
        CheckpointError: the file is damaged or contains code.
    """
    if path.suffix != ".safetensors":
        tensors: dict[str, Any] = load(path, map_location=map_location)
        return tensors
    try:
        return dict(safetensors.torch.load_file(path, device=str(map_location)))
    except safetensors.SafetensorError as error:
        raise damaged(f"{path} cannot be read: {error}") from error


def read_model(files: Sequence[Path]) -> dict[str, Any]:
    """Return the weights in one model's ``files``, with tied weights under each of their names.

    Raises:
        CheckpointError: a file is damaged or contains code.
    """
    state: dict[str, Any] = {}
    for file in files:
        state |= read_weights(file)
        if file.suffix == ".safetensors":
            state |= {name: state[target] for name, target in stored_aliases(file, state).items()}
    return state


def plain_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` without the prefixes that DDP and torch.compile add to the names."""
    plain = {name.replace("_orig_mod.", ""): value for name, value in state.items()}
    while plain and all(name.startswith("module.") for name in plain):
        plain = {name.removeprefix("module."): value for name, value in plain.items()}
    return plain


def write_tensors(state_dict: Mapping[str, Any], f: Any) -> None:
    """Write a safetensors file that contains each tensor once. Its metadata maps aliases of tied weights to the stored names.

    Raises:
        UsageError: ``state_dict`` is not a dict of tensors.
    """
    others = ["it"]
    if isinstance(state_dict, Mapping):
        others = [name for name, value in state_dict.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise UsageError(
            "Expected a dict of tensors for a safetensors file, but these entries are not tensors: "
            f"{', '.join(map(str, others[:3]))}",
            do="pass a state dict that contains only tensors, or pass safe_serialization=False",
        )
    aliases = aliases_in(state_dict)
    kept = {name: contiguous_copy(value) for name, value in state_dict.items() if name not in aliases}
    safetensors.torch.save_file(kept, f, metadata={"format": "pt", **aliases})


def write_shards(
    state_dict: Mapping[str, Any], folder: Path, *, max_shard_bytes: int, safe_serialization: bool
) -> None:
    """Write ``state_dict`` to files of at most ``max_shard_bytes`` each, with an index if there are several.

    A larger tensor gets a separate file. Files from an earlier save with different shards are deleted, because readers might
    load them instead.

    Source: the layout used by Accelerate, transformers and huggingface_hub.
    """
    aliases = aliases_in(state_dict)
    stored = {name: _num_bytes(tensor) for name, tensor in state_dict.items() if name not in aliases}
    shards = cut_into_shards(stored, max_shard_bytes)
    for alias, owner in aliases.items():
        next(shard for shard in shards if owner in shard).append(alias)
    files = shard_files(shards, safe_serialization=safe_serialization)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {file: sum(_num_bytes(state_dict[name]) for name in names) for file, names in files.items()}
    with progress_bar(f"saving {folder.name}", sum(sizes.values())) as progress:
        for file, names in files.items():
            aside = aside_of(folder / file)
            part = {name: state_dict[name] for name in names}
            write_tensors(part, aside) if safe_serialization else torch.save(part, aside)
            progress(sizes[file])
    left_out = aliases if safe_serialization else ()
    listed = {file: [name for name in names if name not in left_out] for file, names in files.items()}
    num_bytes = sum(_num_bytes(t) for name, t in state_dict.items() if name not in aliases)
    publish_shards(folder, listed, num_bytes, safe_serialization=safe_serialization)


def shard_files(shards: Sequence[Sequence[str]], *, safe_serialization: bool) -> dict[str, Sequence[str]]:
    """Return the files for the names in ``shards``, called as in transformers."""
    pattern = SAFE_WEIGHTS_PATTERN_NAME if safe_serialization else WEIGHTS_PATTERN_NAME
    return {
        pattern.format(suffix="" if len(shards) == 1 else f"-{number:05d}-of-{len(shards):05d}"): names
        for number, names in enumerate(shards, start=1)
    }


def aside_of(path: Path) -> Path:
    """Return where a weight file is written before ``publish_shards`` renames it."""
    return path.with_name(f"{path.name}.tmp")


def publish_shards(
    folder: Location, files: Mapping[str, Sequence[str]], num_bytes: int, *, safe_serialization: bool = True
) -> None:
    """Make the written ``files`` the weights in ``folder``: write their index if there are several, delete files of an earlier save.

    In a local folder, files are renamed (``aside_of``); in an object store, they already have their names.

    Args:
        files: the names of the tensors in each file.
        num_bytes: total size of the tensors.
    """
    kept = set(files)
    index = index_of(files, num_bytes) if len(files) > 1 else None
    index_name = SAFE_WEIGHTS_INDEX_NAME if safe_serialization else WEIGHTS_INDEX_NAME
    if isinstance(folder, Path):
        if index is not None:
            aside_of(folder / index_name).write_text(index, encoding="utf-8")
        for file in [*files, *([index_name] if index is not None else [])]:
            aside_of(folder / file).replace(folder / file)
    elif index is not None:
        write_object(folder / index_name, index.encode())
    if index is not None:
        kept.add(index_name)
    _remove_earlier(folder, kept)


def _remove_earlier(folder: Location, kept: Collection[str]) -> None:
    """Delete weight files that are not among the ``kept`` ones of their format, because readers might load them instead."""
    for pattern, index in (
        (SAFE_WEIGHTS_PATTERN_NAME, SAFE_WEIGHTS_INDEX_NAME),
        (WEIGHTS_PATTERN_NAME, WEIGHTS_INDEX_NAME),
    ):
        is_weights = re.compile(re.escape(pattern).replace(r"\{suffix\}", r"(-\d{5}-of-\d{5})?")).fullmatch
        if not any(map(is_weights, kept)):
            continue
        found = [name for name in entries(folder) if (is_weights(name) or name == index) and name not in kept]
        if isinstance(folder, Path):
            for name in found:
                (folder / name).unlink()
        else:
            delete(*(folder / name for name in found))


@contextmanager
def exported_to(place: Location) -> Iterator[Path]:
    """Yield the local folder ``place``, or a temporary one whose files replace a model at ``place`` if the block succeeds."""
    with uploaded_from(place) as folder:
        yield folder
        written = [] if folder == place else entries(folder)
    if written:
        _remove_earlier(place, written)


def index_of(files: Mapping[str, Sequence[str]], num_bytes: int) -> str:
    """Return the contents of the index in transformers' format, given the names of the tensors in each file."""
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def cut_into_shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Distribute tensors with these sizes over files, keeping their order. A tensor beyond ``limit`` gets a separate file."""
    shards: list[list[str]] = []
    current: list[str] = []
    current_bytes = 0
    for name, size in sizes.items():
        if size > limit:
            shards.append([name])
            continue
        if current_bytes + size > limit:
            shards.append(current)
            current, current_bytes = [], 0
        current.append(name)
        current_bytes += size
    if current or not shards:
        shards.append(current)
    return shards


def aliases_in(state_dict: Mapping[str, Any]) -> dict[str, str]:
    """Map each additional name of a tensor (for tied weights) to the tensor's first name.

    Different parts of one storage, such as an LSTM's weights on a GPU, count as different tensors.
    """
    first: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor) and value.numel() > 0 and value.device.type != "meta":
            view = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
            if first.setdefault(view, name) != name:
                aliases[name] = first[view]
    return aliases


def contiguous_copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # A part of a larger storage is copied, because safetensors rejects tensors that overlap.
    is_whole = value.numel() * value.element_size() == value.untyped_storage().nbytes()
    return value.contiguous() if is_whole else value.clone(memory_format=torch.contiguous_format)


def _num_bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
