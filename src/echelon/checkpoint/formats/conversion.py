"""Code shared by the conversions between echelon's format and other layouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from echelon.base.errors import CheckpointError
from echelon.base.messages.translation import gettext as _
from echelon.base.progress import progress_bar
from echelon.base.warnings import warn
from echelon.checkpoint import storage, typed_json
from echelon.checkpoint.formats.layouts import weight_files
from echelon.checkpoint.formats.optimizer_states import named_states
from echelon.checkpoint.formats.weight_files import plain_names, read_model
from echelon.checkpoint.manifest import rank_objects_file
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.save import Content, PendingCheckpoint
from echelon.checkpoint.stored_weights import Weights, weights_in
from echelon.checkpoint.tensor_file import write_file
from echelon.checkpoint.tensor_names import model_prefix, rest_of_state
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


def write_imported(imported: ImportedCheckpoint, target: Path, *, source: Path) -> Path:
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
