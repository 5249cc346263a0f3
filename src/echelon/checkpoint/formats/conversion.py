"""Code shared by the conversions between echelon's format and other layouts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

from echelon.base.errors import CheckpointError
from echelon.base.messages.translation import gettext as _
from echelon.base.progress import BarOpener, progress_bar
from echelon.base.warnings import warn
from echelon.checkpoint import storage, typed_json
from echelon.checkpoint.commit import new_token
from echelon.checkpoint.damage import damaged
from echelon.checkpoint.formats.layouts import weight_files
from echelon.checkpoint.formats.optimizer_states import named_states
from echelon.checkpoint.formats.weight_files import plain_names, read_model
from echelon.checkpoint.manifest import (
    OBJECTS,
    chunk_key,
    encode_layouts,
    is_part,
    manifest_blocks,
    rank_objects_file,
    tensors_file,
)
from echelon.checkpoint.object_store import Location
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.regions import Chunk, ChunkBounds, ChunkTable, TensorLayout
from echelon.checkpoint.save import Content, PendingCheckpoint, pending_files
from echelon.checkpoint.stored_weights import Weights, weights_in
from echelon.checkpoint.tensor_file import header_of, itemsize, stored_form, write_file
from echelon.checkpoint.tensor_names import model_prefix, rest_of_state
from echelon.distributed.small_messages import bytes_of
from echelon.world.world import World

_COPY_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedCheckpoint:
    """A checkpoint from another layout, loaded into memory."""

    content: Content
    """The tensors, and the objects shared by all ranks."""
    ranks: Sequence[Mapping[str, Any]]
    """Objects of each rank."""
    read: frozenset[str]
    """Names of the files that the checkpoint was loaded from. All other files are copied."""


def build_import(
    folder: Path,
    layout: str,
    *,
    optimizers: Sequence[Mapping[str, Any]],
    parameters: Sequence[Sequence[str]],
    objects: Mapping[str, Any],
    ranks: Sequence[Mapping[str, Any]],
    step: int = 0,
    progress: Mapping[str, Any] | None,
    read: Callable[[str], object],
) -> ImportedCheckpoint:
    """Return the checkpoint in ``folder``, given what its layout stores beside the models.

    Args:
        parameters: for each optimizer, its parameter names in the order of its parameter groups. Required unless the
            states contain the names.
        step: micro-batches so far.
        read: returns whether a file with this name was read, and is not copied.

    Raises:
        CheckpointError: a model or the names of parameters are missing, or a file is damaged.
    """
    tensors, extras = read_models(folder)
    groups, values = named_states(folder, optimizers, tensors, parameters)
    rests = [rest_of_state(state) for state in optimizers]
    content = Content(
        tensors=tensors,
        objects={
            "accelerator": {"step": step, "num_models": len(extras)},
            "extra_states": extras,
            "optimizer_groups": groups,
            **({"optimizer_rests": rests} if any(rests) else {}),
            **objects,
        },
        progress=progress,
        layout={"imported_from": layout, "world_size": len(ranks)},
    )
    first = {"optimizer_values": values} if any(values) else {}
    own = [
        {"positions": [], "pass": None, **of_rank, **(first if rank == 0 else {})} for rank, of_rank in enumerate(ranks)
    ]
    return ImportedCheckpoint(
        content=content, ranks=own, read=frozenset(path.name for path in folder.iterdir() if read(path.name))
    )


def write_imported(imported: ImportedCheckpoint, target: Location, *, source: Path) -> Location:
    """Write ``imported`` and the other files in ``source`` to the checkpoint ``target``. One process writes for all ranks."""
    world = World(
        rank=0,
        local_rank=0,
        world_size=len(imported.ranks),
        local_world_size=1,
        node_rank=0,
        device=torch.device("cpu"),
        backend="gloo",
    )
    tensors: dict[str, Any] = dict(imported.content.tensors)
    encoded = [
        {
            name: typed_json.encode(value, name=f"rank {rank} {name}", put_tensor=tensors.__setitem__)
            for name, value in own.items()
        }
        for rank, own in enumerate(imported.ranks)
    ]
    content = replace(imported.content, tensors=tensors)
    pending = PendingCheckpoint(
        target=target,
        world=world,
        gather=lambda payload: [payload],
        collect=lambda _: content,
        write=lambda folder, _: copy_other_files(source, folder, without=lambda name: name in imported.read),
    )
    pending.begin()
    pending.objects |= {rank_objects_file(rank): typed_json.to_bytes(own) for rank, own in enumerate(encoded)}
    pending.finish(show=progress_bar)
    return target


def write_converted(
    checkpoint: Checkpoint, target: Location, *, without: Callable[[str], object], show: BarOpener = progress_bar
) -> Location:
    """Write a checkpoint of another format, and the other files in its folder, to ``target``. Only one chunk at a time is in memory.

    Args:
        without: returns whether a file with this name was read, and is not copied.
    """
    manifest = checkpoint.manifest
    layouts = dict(manifest.tensors)
    own: dict[int, list[_StoredChunk]] = {}
    for name, layout in layouts.items():
        for chunk in layout.chunks:
            read = partial(checkpoint.read, name, chunk.box)
            own.setdefault(chunk.rank, []).append(_StoredChunk.of(name, layout, chunk.box, read))
    objects: dict[str, bytes] = {}

    def put_tensor(rank: int, name: str, tensor: torch.Tensor) -> None:
        box = ChunkBounds.whole(tensor.shape)
        chunks = ChunkTable.of([Chunk(rank, box)] if tensor.numel() else [], tensor.ndim)
        layouts[name] = layout = TensorLayout(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), chunks)
        if tensor.numel():
            own.setdefault(rank, []).append(_StoredChunk.of(name, layout, box, lambda: tensor))

    def encode(values: Mapping[str, Any], rank: int, label: str) -> bytes:
        put = partial(put_tensor, rank)
        return typed_json.to_bytes(
            {name: typed_json.encode(value, name=f"{label}{name}", put_tensor=put) for name, value in values.items()}
        )

    objects[OBJECTS] = encode(checkpoint.objects(), 0, "")
    for rank in range(manifest.world_size):
        if (of_rank := checkpoint.rank_objects(rank)) is not None:
            objects[rank_objects_file(rank)] = encode(of_rank, rank, f"rank {rank} ")
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    folder = pending_files(storage.real_path(target), token=new_token(), created=created)
    folder.make()
    size = sum(chunk.num_bytes for chunks in own.values() for chunk in chunks)
    with folder.discarded_on_error(), show(f"saving {target.name}", size) as progress:
        files = {
            name: folder.write(
                name,
                _chunk_blocks(name, chunks),
                num_bytes=sum(chunk.num_bytes for chunk in chunks),
                progress=progress,
            )
            for name, chunks in ((tensors_file(rank), chunks) for rank, chunks in sorted(own.items()))
        }
        files |= {name: folder.write(name, [text], num_bytes=len(text)) for name, text in objects.items()}
        copy_other_files(checkpoint.local_folder, folder.folder_to_add(), without=without)
        files |= folder.sync_added(is_part=is_part)
        blocks = manifest_blocks(
            token=folder.token,
            created=created,
            world_size=manifest.world_size,
            progress=manifest.progress,
            config=manifest.config,
            layout=manifest.layout,
            files=files,
            tensors=encode_layouts(layouts),
            aliases=manifest.aliases,
        )
        folder.commit(blocks, is_part=is_part)
    return target


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredChunk:
    """A chunk that is read when it is written."""

    key: str
    dtype: str
    lengths: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @staticmethod
    def of(name: str, layout: TensorLayout, box: ChunkBounds, read: Callable[[], torch.Tensor]) -> _StoredChunk:
        return _StoredChunk(key=chunk_key(name, layout.shape, box), dtype=layout.dtype, lengths=box.lengths, read=read)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.lengths) * itemsize(self.dtype)


def _chunk_blocks(name: str, chunks: Sequence[_StoredChunk]) -> Iterator[bytes | memoryview]:
    """Yield the contents of a tensor file, like ``tensor_blocks``."""
    ordered = sorted(chunks, key=lambda chunk: (-itemsize(chunk.dtype), chunk.key))
    if len({chunk.key for chunk in chunks}) != len(chunks):
        raise damaged(f"{name} would contain two tensors with the same name")
    yield header_of([(c.key, *stored_form(c.dtype, c.lengths), c.num_bytes) for c in ordered])
    for chunk in ordered:
        yield bytes_of(chunk.read().contiguous()).numpy().data


def read_models(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Load all models from another layout. Return their tensors by checkpoint name, and each model's remaining entries.

    Raises:
        CheckpointError: the folder contains no models, or a file is damaged or contains code.
    """
    tensors: dict[str, Any] = {}
    extras: list[dict[str, Any]] = []
    while files := weight_files(folder, len(extras)):
        state = plain_names(read_model(files))
        prefix = model_prefix(len(extras))
        tensors |= {f"{prefix}{name}": value for name, value in state.items() if isinstance(value, torch.Tensor)}
        extras.append({name: value for name, value in state.items() if not isinstance(value, torch.Tensor)})
    if not extras:
        raise CheckpointError(
            f"{folder} contains no model weights", do="pass a folder that contains a complete checkpoint"
        )
    return tensors, extras


def num_models_in(checkpoint: Checkpoint) -> int:
    """Return the number of models that an Accelerator saved in a checkpoint."""
    found = {match[1] for name in checkpoint.names() if (match := re.match(r"models\.(\d+)\.", name))}
    return max(map(int, found), default=-1) + 1


def weights_beside(checkpoint: Checkpoint) -> Weights:
    """Return the weights that a Trainer saved in separate files for other programs.

    Raises:
        CheckpointError: no such files exist, for example because only adapters are trained.
    """
    files = weight_files(checkpoint.local_folder)
    if not files or any(file.suffix != ".safetensors" for file in files):
        raise CheckpointError(
            f"{checkpoint.folder} contains no model weights", do="run `echelon checkpoint show` to see what it contains"
        )
    return weights_in(files)


def training_objects_in(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the objects that an Accelerator saved once for all ranks.

    Raises:
        CheckpointError: the checkpoint was not saved by an Accelerator, or a model's state contains entries that are not
            tensors.
    """
    objects = checkpoint.objects()
    missing = [name for name in ("accelerator", "optimizer_groups", "schedulers", "orders") if name not in objects]
    if missing:
        raise CheckpointError(
            f"{checkpoint.folder} was not saved by an Accelerator: it has no {', '.join(missing)}",
            do="export its weights with `echelon checkpoint merge`, or use echelon.checkpoint.read to read it",
        )
    extras = [i for i, extra in enumerate(objects["extra_states"]) if extra]
    if extras:
        raise CheckpointError(
            f"the state of model {extras[0]} in {checkpoint.folder} has entries that are not tensors "
            f"({', '.join(objects['extra_states'][extras[0]])}), which safetensors files cannot contain",
            do="load it in the training script and save it there with safe_serialization=False",
        )
    if objects.get("averages"):
        kinds = ", ".join(average["kind"] for average in objects["averages"])
        raise CheckpointError(
            _(
                "{folder} has an average of the weights ({kinds}), which other layouts do not have",
                folder=checkpoint.folder,
                kinds=kinds,
            ),
            do=_(
                "load it in a script without the average (load_state(..., allow_missing=('average',))), save it there, and export "
                "the result"
            ),
        )
    return objects


def rank_objects_in(checkpoint: Checkpoint) -> dict[int, Any]:
    """Return each rank's objects. Some are missing if each machine wrote a separate checkpoint."""
    world_size = checkpoint.manifest.world_size
    found = {rank: own for rank in range(world_size) if (own := checkpoint.rank_objects(rank)) is not None}
    if len(found) < world_size:
        warn(
            _(
                "{folder} contains RNG states for only {num_found} of {world_size} processes",
                folder=checkpoint.folder,
                num_found=len(found),
                world_size=world_size,
            )
        )
    return found


def custom_states_in(objects: Mapping[str, Any]) -> Sequence[Any]:
    """Return the states of objects registered for checkpointing."""
    return [objects[f"custom.{i}"] for i in range(sum(name.startswith("custom.") for name in objects))]


def copy_other_files(source: Path, target: Path, *, without: Callable[[str], object]) -> None:
    """Copy ``source`` to ``target``, except for names accepted by ``without`` and (with a warning) links and special files."""
    for name in storage.entries(source):
        kind = storage.kind(source / name)
        if without(name):
            continue
        if kind == "folder":
            storage.make_folder(target / name)
            copy_other_files(source / name, target / name, without=lambda _: False)
        elif kind == "file":
            with (source / name).open("rb") as file:
                write_file(target / name, iter(lambda: file.read(_COPY_BYTES), b""))
        else:
            warn(_("{name} is a link or a special file and was not copied", name=source / name))
    storage.sync_folder(target)
