"""``echelon checkpoint``: lists, verifies, shows, merges, converts and deletes checkpoints.

Exit codes: 0 on success, 1 if a checkpoint is damaged or cannot be converted, 2 if the command line is invalid.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

import click

from echelon.base.errors import CheckpointError, UsageError
from echelon.base.messages.terminal import align_columns
from echelon.base.messages.translation import gettext as _, gettext_noop as N_, in_english
from echelon.base.printable import printable
from echelon.base.progress import progress_bar
from echelon.base.similar_path import suggest_path
from echelon.checkpoint import object_store, storage
from echelon.checkpoint.commit import new_folder, place_of, require_apart, retire
from echelon.checkpoint.formats.layouts import (
    TRAINER_STATE,
    foreign_layout,
    is_sharded_file,
    layout_of,
    require_layout,
    weight_files,
)
from echelon.checkpoint.listing import CheckpointEntry, Listing, folder_bytes, is_numbered, list_folder
from echelon.checkpoint.lock import RunLock
from echelon.checkpoint.manifest import OBJECTS
from echelon.checkpoint.object_store import Location, ObjectPath
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.rotation import best_of
from echelon.checkpoint.tensor_file import dtype_name, itemsize, stored_aliases, stored_tensors
from echelon.cli.help.completion import complete_folders
from echelon.compat.byte_sizes import convert_file_size_to_int
from echelon.config.origin import Origin, SettingSource
from echelon.data.order_state import position_in_epoch

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("checkpoint")
def command() -> None:
    """List, verify, show, merge, export, import and prune checkpoints.

    These commands never run code from a checkpoint. Exit codes: 0 on success, 1 if a checkpoint is damaged, 2 if the command
    line is invalid.
    """


@command.command("ls")
@click.argument("folder", default=".", shell_complete=complete_folders)
@click.option(
    "--verify", is_flag=True, help="Verify the checksum of every file; exit with code 1 if any file is damaged."
)
@_JSON
@click.pass_context
def ls(ctx: click.Context, folder: str, verify: bool, as_json: bool) -> None:
    """List the checkpoints in FOLDER (or in FOLDER/checkpoints), newest first, and any leftovers from interrupted saves."""
    path, found = _listed(require_folder(folder), verify=progress_bar if verify else None)
    if as_json:
        click.echo(_json({"folder": str(path), **asdict(found)}))
    else:
        click.echo(_listing(path, found))
    ctx.exit(1 if verify and any(entry.state == "damaged" for entry in found.entries) else 0)


@command.command("verify")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, shell_complete=complete_folders)
@_JSON
@click.pass_context
def verify(ctx: click.Context, paths: tuple[str, ...], as_json: bool) -> None:
    """Verify the checksums of each checkpoint PATH (or of all checkpoints in a folder); exit with code 1 if any is damaged."""
    results = [_verified(folder) for path in paths for folder in _all_in(require_folder(path))]
    if as_json:
        click.echo(_json(results))
    else:
        for result in results:
            click.echo("\n  ".join([f"{result['path']}: {result['status']}", *result["problems"]]))
    ctx.exit(1 if any(result["problems"] for result in results) else 0)


@command.command("show")
@click.argument("path", shell_complete=complete_folders)
@_JSON
def show(path: str, as_json: bool) -> None:
    """Print the tensors, optimizers, progress, settings and layout of a checkpoint, or of the newest checkpoint in a folder."""
    folder = _newest_in(require_folder(path))
    layout = require_layout(folder)
    if layout == "sharded" and isinstance(folder, Path):
        from echelon.checkpoint.formats.dcp import open_dcp  # noqa: PLC0415 - torch

        content = _content(open_dcp(folder))
    elif layout == "echelon" or isinstance(folder, ObjectPath):
        content = _content(Checkpoint(folder))
    else:
        content = _foreign_content(folder)
    click.echo(_json(content) if as_json else _readable(content))


@command.command("merge")
@click.argument("path", shell_complete=complete_folders)
@click.argument("out", shell_complete=complete_folders)
@click.option(
    "--max_shard_size",
    metavar="SIZE",
    default="5GB",
    help="Maximum file size; larger weights are split into several files with an index (default: 5GB).",
)
@click.option(
    "--model",
    metavar="N",
    type=int,
    help="Index of the model in the prepare() call, starting at 0; required if there are several models.",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16", "bf16"]),
    help="Convert floating-point weights (default: keep their dtype).",
)
def merge(path: str, out: str, max_shard_size: str, model: int | None, precision: str | None) -> None:
    """Write the full weights of a model in checkpoint PATH to the new folder OUT as safetensors.

    If PATH contains several checkpoints, the newest is used. One process and a few megabytes of memory are enough, no matter
    how many ranks saved the checkpoint.
    """
    limit = convert_file_size_to_int(max_shard_size)
    with _local_copy(_newest_in(require_folder(path))) as whole, _new_folder(whole, out) as (source, folder):
        from echelon.checkpoint.formats import merged_weights  # noqa: PLC0415 - torch

        files = merged_weights.merge(
            source, folder, model=model, max_shard_bytes=limit, precision=precision, show=progress_bar
        )
    click.echo(_("wrote {files} to {out}", files=", ".join(file.name for file in files), out=out))


_FORMATS = ("accelerate", "transformers", "dcp")


@command.command("export")
@click.argument("path", shell_complete=complete_folders)
@click.argument("out", shell_complete=complete_folders)
@click.option("--format", "layout", type=click.Choice(_FORMATS), required=True, help="The format to write.")
def export(path: str, out: str, layout: str) -> None:
    """Convert checkpoint PATH to a format that Accelerate's load_state, transformers' Trainer, or torch.distributed.checkpoint
    (dcp) can read, in the new folder OUT.

    If PATH contains several checkpoints, the newest is used.
    """
    _export(path, out, layout)


def _export(path: str, out: str, layout: str) -> None:
    found = _newest_in(require_folder(path))
    if (present := require_layout(found)) not in ("echelon", "sharded"):
        raise UsageError(
            _("{path} is in {present}'s format, not in echelon's", path=path, present=present),
            where="echelon checkpoint export",
            do=_("use it as it is, or run echelon checkpoint import on it and export the result"),
        )
    _require_new(storage.location(out))
    from echelon.checkpoint.formats import accelerate, dcp_export, merged_weights, transformers  # noqa: PLC0415 - torch

    write = {
        "accelerate": accelerate.export_accelerate,
        "transformers": transformers.export_transformers,
        "dcp": dcp_export.export_dcp,
    }[layout]
    with _local_copy(found) as whole, _new_folder(whole, out) as (source, folder):
        checkpoint = merged_weights.open_whole(source, progress_bar)
        size = sum(facts.size for facts in checkpoint.manifest.files.values())
        with progress_bar("writing", size) as progress:
            write(checkpoint, folder, progress=progress)
        has_state = (checkpoint.local_folder / TRAINER_STATE).exists()
    click.echo(_("wrote {out}", out=out))
    if layout == "transformers" and not has_state:
        text = N_(
            "note: its {file} sets the logging, evaluation and saving intervals to 500 steps. A resumed Trainer reads these "
            "intervals from this file, not from its arguments; edit the file to change them."
        )
        click.echo(_(text, file=TRAINER_STATE))
    if layout == "dcp":
        text = N_(
            "note: it holds the models, optimizers and schedulers, but neither RNG states nor positions in the data, and no other files"
        )
        click.echo(_(text))


_PARAMETERS = click.option(
    "--parameters",
    multiple=True,
    metavar="FILE",
    help="File that lists an optimizer's parameter names, one per line, in the order of its parameter groups; "
    "repeat for each optimizer.",
)


@command.command("import")
@click.argument("path", shell_complete=complete_folders)
@click.argument("out", shell_complete=complete_folders)
@_PARAMETERS
def import_(path: str, out: str, parameters: tuple[str, ...]) -> None:
    """Convert checkpoint PATH, written by Accelerate, transformers' Trainer, or torch.distributed.checkpoint (as FSDP2,
    torchtitan and Lightning do), to echelon's format in the new folder OUT.
    """
    _import(path, out, parameters)


def _import(path: str, out: str, parameters: tuple[str, ...]) -> None:
    found, target = require_folder(path), storage.location(out)
    if isinstance(found, Path) and isinstance(target, Path):
        require_apart(found, target)
    _require_new(target)
    is_foreign = isinstance(found, ObjectPath) and foreign_layout(object_store.entries(found)) is not None
    if not is_foreign and require_layout(found) == "echelon":
        raise UsageError(
            _("{path} already has echelon's format", path=path),
            where="echelon checkpoint import",
            do=_("use it as it is"),
        )
    from echelon.checkpoint.formats import (  # noqa: PLC0415 - torch
        accelerate,
        conversion,
        dcp,
        merged_weights,
        transformers,
    )

    with _local_copy(found) as source:
        layout = require_layout(source)
        if layout == "sharded":
            checkpoint = merged_weights.open_whole(source, progress_bar)
            dcp.warn_of_missing_state(checkpoint)
            conversion.write_converted(
                checkpoint, target, without=lambda name: is_sharded_file(name) or accelerate.is_state_file(name)
            )
        else:
            read = {"accelerate": accelerate.import_accelerate, "transformers": transformers.import_transformers}[
                layout
            ]
            imported = read(source, parameters=[_lines(name) for name in parameters])
            conversion.write_imported(imported, target, source=source)
    click.echo(_("wrote {out}", out=out))


@command.command("prune")
@click.argument("folder", shell_complete=complete_folders)
@click.option(
    "--keep", metavar="N", type=click.IntRange(min=1), required=True, help="Number of newest checkpoints to keep."
)
@click.option(
    "--best", metavar="K", type=click.IntRange(min=1), help="Also keep the K checkpoints with the best metric."
)
@click.option(
    "--metric",
    metavar="NAME",
    help="Metric of a Trainer's evaluations, such as eval_loss (default: the metric passed to save_state).",
)
@click.option(
    "--greater_is_better",
    type=bool,
    help="Whether a larger metric is better (default: if --metric is given and its name does not end in loss).",
)
@click.option("--yes", is_flag=True, help="Do not ask before deleting.")
def prune(
    folder: str, keep: int, best: int | None, metric: str | None, greater_is_better: bool | None, yes: bool
) -> None:
    """Delete the older checkpoints in FOLDER (or in FOLDER/checkpoints), after asking.

    Only complete checkpoints with a number in their names are counted and deleted. The command fails while a run is saving to
    the folder.
    """
    if best is None and (metric is not None or greater_is_better is not None):
        raise click.UsageError(_("--metric and --greater_is_better require --best"))
    from echelon.accelerator.checkpoint.checkpoint_store import metric_of  # noqa: PLC0415 - torch
    from echelon.accelerator.checkpoint.folders import problems_in  # noqa: PLC0415 - torch
    from echelon.checkpoint.formats.transformers import evaluated_metric  # noqa: PLC0415 - torch

    place, found = _listed(require_folder(folder))
    numbered = [entry for entry in found.entries if is_numbered(entry.name) and entry.state != "damaged"]
    entries = [one for one in numbered if one.layout == "echelon" or not problems_in(place / one.name)]
    kept = {entry.name for entry in entries[:keep]}
    if best is not None:
        is_greater = metric is not None and not metric.endswith("loss")
        ranked = best_of(
            [place / entry.name for entry in reversed(entries)],
            metric_of if metric is None else partial(evaluated_metric, name=metric),
            number=best,
            greater_is_better=is_greater if greater_is_better is None else greater_is_better,
        )
        if entries and not ranked:
            raise UsageError(
                _("no checkpoint in {folder} has the metric", folder=place)
                if metric is None
                else _("no checkpoint in {folder} has an evaluation with {metric}", folder=place, metric=metric),
                where="echelon checkpoint prune",
                do=_("pass --metric with a name from the log_history in {file}, or omit --best", file=TRAINER_STATE),
            )
        kept |= {path.name for path in ranked}
    doomed = [entry for entry in entries if entry.name not in kept]
    if not doomed:
        click.echo(_("nothing to delete in {folder}", folder=place))
        return
    for entry in reversed(doomed):
        click.echo(f"{entry.name}  {_size(entry.num_bytes)}")
    size = _size(sum(entry.num_bytes for entry in doomed))
    question = _(
        "Delete these {number} of {total} checkpoints ({size})?", number=len(doomed), total=len(entries), size=size
    )
    if not yes and not click.confirm(question):
        return
    lock = RunLock(place / ".lock")
    try:
        for entry in reversed(doomed):
            retire(place_of(place / entry.name))
    finally:
        lock.release()
    click.echo(_("deleted {number} checkpoints ({size})", number=len(doomed), size=size))


@command.command("convert")
@click.argument("path", shell_complete=complete_folders)
@click.argument("out", shell_complete=complete_folders)
@click.option(
    "--format",
    "layout",
    type=click.Choice(("echelon", *_FORMATS)),
    default="echelon",
    help="The format to write (default: echelon).",
)
@_PARAMETERS
def convert(path: str, out: str, layout: str, parameters: tuple[str, ...]) -> None:
    """Convert checkpoint PATH to another format in the new folder OUT: `import` to echelon's format, `export` to another one."""
    if layout == "echelon":
        _import(path, out, parameters)
    else:
        _export(path, out, layout)


# ---- folders ---------------------------------------------------------------------------------------------------------


def require_folder(path: str) -> Location:
    """Return ``path`` if it exists, even if a crash during a commit has left it under a temporary name."""
    folder = storage.location(path)
    if isinstance(folder, ObjectPath):
        if not object_store.is_folder(folder):
            raise UsageError(
                _("there are no objects in {path}", path=path), where="echelon checkpoint", do=_("check the URL")
            )
        return folder
    if folder.is_file():
        raise UsageError(
            _("{path} is a file, not a folder", path=path),
            where="echelon checkpoint",
            do=_("pass a folder, such as {folder}", folder=folder.parent),
        )
    if not place_of(folder).is_dir():
        raise UsageError(
            _("the folder {path} does not exist", path=path),
            where="echelon checkpoint",
            do=suggest_path(folder, otherwise=_("check the path")),
        )
    return folder


def _listed(folder: Location, *, verify: Any = None) -> tuple[Location, Listing]:
    """List ``folder`` or, if it contains no checkpoints, its ``checkpoints`` folder; return the folder and the listing."""
    found = list_folder(folder, verify=verify)
    if not found.entries and storage.kind(storage.real_path(folder / "checkpoints")) == "folder":
        folder = folder / "checkpoints"
        found = list_folder(folder, verify=verify)
    return folder, found


def _all_in(folder: Location) -> list[Location]:
    """Return ``[folder]`` if it is a checkpoint in echelon's format, else the checkpoints that it contains."""
    place, found = (folder, None) if layout_of(folder) == "echelon" else _listed(folder)
    return [place / entry.name for entry in found.entries] if found and found.entries else [folder]


def _newest_in(folder: Location) -> Location:
    """Return ``folder`` if it is a checkpoint; otherwise return and print the newest checkpoint in it."""
    if layout_of(folder) is not None:
        return folder
    place, found = _listed(folder)
    intact = [entry for entry in found.entries if entry.state != "damaged"]
    if not intact:
        return folder  # the reader reports it
    click.echo(
        _("using {path}, the newest of {num_entries}", path=place / intact[0].name, num_entries=len(found.entries)),
        err=True,
    )
    return place / intact[0].name


def _require_new(target: Location) -> None:
    is_taken = object_store.is_folder(target) if isinstance(target, ObjectPath) else _is_taken(target)
    if is_taken:
        raise UsageError(
            _("{target} already exists", target=target),
            where="echelon checkpoint",
            do=_("pass a folder that does not exist yet, or remove this one"),
        )


def _is_taken(target: Path) -> bool:
    return target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir())))


@contextmanager
def _local_copy(path: Location) -> Iterator[Path]:
    """Yield ``path``, or a local copy of a checkpoint in an object store, which is deleted afterwards."""
    if not isinstance(path, ObjectPath):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="echelon-") as folder:
        copy = Path(folder) / (path.name or "checkpoint")
        object_store.download(object_store.place_of(path), copy)
        yield copy


@contextmanager
def _new_folder(source: Path, out: str) -> Iterator[tuple[Path, Path]]:
    """Yield ``source`` and a temporary folder that becomes ``out`` if the block succeeds."""
    place = storage.location(out)
    _require_new(place)
    if isinstance(place, ObjectPath):
        with object_store.uploaded_from(place) as made:
            yield source, made
        return
    target = place.absolute()
    require_apart(source, target)
    with new_folder(storage.real_path(target)) as folder:
        yield source, folder


def _lines(path: str) -> list[str]:
    try:
        return [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            _("cannot read {path}: {error}", path=path, error=error), where="--parameters", do=_("check the path")
        ) from error


# ---- output ---------------------------------------------------------------------------------------------------------


def _verified(folder: Location) -> dict[str, Any]:
    try:
        layout = require_layout(folder)
        if layout != "echelon":
            raise UsageError(
                _("{folder} is in {layout}'s format, which has no checksums to verify", folder=folder, layout=layout),
                where="echelon checkpoint verify",
                do=_("convert it to echelon's format with echelon checkpoint import"),
            )
        checkpoint = Checkpoint(folder)
        problems = checkpoint.problems(show=progress_bar)
    except CheckpointError as error:
        return {"path": str(folder), "status": _("damaged"), "problems": [error.what]}
    num_files, size = len(checkpoint.manifest.files) + 1, _size(folder_bytes(checkpoint.folder))
    status = _("damaged") if problems else _("intact: {number} files, {size}", number=num_files, size=size)
    return {"path": str(folder), "status": status, "problems": problems}


_MAX_NAMED = 5


def _with_checkpoints(folder: Location) -> Iterator[str]:
    """Yield the folders in ``folder`` that contain checkpoints; not in an object store, where this takes many requests."""
    if isinstance(folder, ObjectPath):
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and os.access(path, os.R_OK | os.X_OK) and _listed(path)[1].entries:
            yield str(path)


def _listing(folder: Location, found: Listing) -> str:
    if not found.entries and not found.leftovers:
        inner = list(islice(_with_checkpoints(folder), _MAX_NAMED))
        if inner:
            return _(
                "{folder} contains no checkpoints, but these folders do: {inner}",
                folder=folder,
                inner=printable(" ".join(inner)),
            )
        return _("{folder} contains no checkpoints", folder=folder)
    head = (N_("name"), N_("step"), N_("epoch"), N_("size"), N_("ranks"), N_("age"), N_("format"), N_("state"))
    lines = [tuple(map(_, head))]
    lines += [
        (
            entry.name,
            _or_dash(entry.step),
            _or_dash(entry.epoch),
            _size(entry.num_bytes),
            _or_dash(entry.world_size),
            _age(entry.created),
            entry.layout or "-",
            _state(entry),
        )
        for entry in found.entries
    ]
    text = _table(lines) if found.entries else ""
    why = _("left by an interrupted save")
    left = [f"{one.name}  {_size(one.num_bytes)}  {why}" for one in found.leftovers]
    return "\n".join([*([text] if text else []), *left])


_STATES: Mapping[str, str] = {
    "complete": N_("complete"),
    "verified": N_("verified"),
    "damaged": N_("damaged"),
    "unknown": N_("complete, has no checksums"),
}


def _state(entry: CheckpointEntry) -> str:
    parts = [
        _(_STATES[entry.state]),
        *entry.problems[:2],
        *([] if entry.place == entry.name else [_("stored as {place}", place=entry.place)]),
    ]
    return _("; ").join(parts)


def _content(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    files = sorted(manifest.files)
    if OBJECTS in files and (wrong := checkpoint.problems(share=files.index(OBJECTS), num_shares=len(files))):
        raise CheckpointError(
            "; ".join(wrong), do=_("run echelon checkpoint ls --verify on its folder to find an intact checkpoint")
        )

    def get_tensor(name: str) -> Any:  # a learning rate may be a tensor; the others are not shown
        return checkpoint.read(name) if name.startswith("optimizer_groups") else name

    layout = layout_of(checkpoint.folder)
    objects = checkpoint.objects(get_tensor=get_tensor) if layout == "sharded" or OBJECTS in files else {}
    loaders = [position_in_epoch(state, num_ranks=manifest.world_size) for state in objects.get("orders", [])]
    return {
        "path": str(checkpoint.folder),
        "format": layout,
        "created": manifest.created,
        "written_by": manifest.written_by,
        "world_size": manifest.world_size,
        "num_bytes": folder_bytes(checkpoint.folder),
        "progress": _progress(manifest.progress or {}, loaders),
        "loaders": loaders,
        "layout": manifest.layout,
        "config": manifest.config,
        "objects": sorted(objects),
        "optimizers": [
            [{**group, "params": len(group["params"])} for group in groups]
            for groups in objects.get("optimizer_groups", [])
        ],
        "tensors": [
            {
                "name": name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "num_bytes": sum(chunk.box.volume for chunk in tensor.chunks) * itemsize(tensor.dtype),
                "ranks": [chunk.rank for chunk in tensor.chunks],
            }
            for name, tensor in sorted(manifest.tensors.items())
        ]
        # A Trainer stores its weights only in files that other programs can read.
        + _tensors_in(checkpoint.folder),
        "aliases": dict(manifest.aliases),
    }


def _progress(saved: Mapping[str, Any], loaders: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the saved counters, with None for those that this run has not counted."""
    found = {name: value for name, value in saved.items() if name != "micro_step"}  # always 0
    if not found.get("samples_seen"):  # only exact modes count them
        found["samples_seen"] = None
        known = [one["samples"] for one in loaders if one["trains"] and one["samples"] is not None]
        found["position"] = known[0] if len(known) == 1 else None
    found["tokens_seen"] = found.get("tokens_seen") or None  # no num_items= was given
    return found


def _progress_text(progress: Mapping[str, Any]) -> str:
    texts = {
        "step": N_("step {number}"),
        "epoch": N_("epoch {number}"),
        "samples_seen": N_("{number} samples seen"),
        "tokens_seen": N_("{number} tokens seen"),
    }
    known = {name: progress.get(name) for name in texts}
    return ", ".join(_(texts[name], number=number) for name, number in known.items() if number is not None)


def _loader_text(index: int, loader: Mapping[str, Any]) -> str:
    epoch = loader["epoch"]
    if loader["trains"] is False:
        return _("loader {index}: evaluation", index=index)
    if loader["samples"] == 0:
        return _("loader {index}: at the start of epoch {epoch}", index=index, epoch=epoch)
    samples = batches = ""
    if loader["samples"] is not None:
        of = "" if loader["num_samples"] is None else _(" of {num_samples}", num_samples=loader["num_samples"])
        samples = _(", after {samples}{of} samples", samples=loader["samples"], of=of)
    if loader["batches"]:
        batches = _(" ({batches} batches of each rank)", batches=loader["batches"])
    return _(
        "loader {index}: in epoch {epoch}{samples}{batches}", index=index, epoch=epoch, samples=samples, batches=batches
    )


def _origin(text: str) -> str:
    """Return the origin of a setting, which a checkpoint stores in English, in the user's language."""
    source, _space, detail = text.partition(" ")
    known = SettingSource.__members__.get(source.upper())
    return text if known is None else str(Origin(known, detail))


def _foreign_content(folder: Path) -> dict[str, Any]:
    tensors = _tensors_in(folder)
    names = {one["name"] for one in tensors}
    return {
        "path": str(folder),
        "format": layout_of(folder),
        "files": sorted(path.name for path in folder.iterdir()),
        "num_bytes": folder_bytes(folder),
        "tensors": tensors,
        "aliases": {k: v for file in _local_safetensors_in(folder) for k, v in stored_aliases(file, names).items()},
    }


def _safetensors_in(folder: Location) -> Sequence[Location]:
    if isinstance(folder, ObjectPath):
        names = storage.entries(folder)
        return [folder / name for name in names if name.startswith("model") and name.endswith(".safetensors")]
    return _local_safetensors_in(folder)


def _local_safetensors_in(folder: Path) -> list[Path]:
    return [file for file in weight_files(folder) if file.suffix == ".safetensors"]


def _tensors_in(folder: Location) -> list[dict[str, Any]]:
    """Return the tensors in the weight files of ``folder``, from the headers of the files."""
    found = [(name, one, file.name) for file in _safetensors_in(folder) for name, one in stored_tensors(file).items()]
    return [
        {"name": name, "dtype": dtype_name(one.dtype), "shape": list(one.shape), "file": file}
        for name, one, file in sorted(found, key=lambda item: item[0])
    ]


def _readable(content: dict[str, Any]) -> str:
    lines = [(N_("path"), content["path"]), (N_("format"), content["format"])]
    labels = {"created": N_("created"), "written_by": N_("written by"), "world_size": N_("ranks")}
    lines += [(label, content[key]) for key, label in labels.items() if key in content]
    lines.append((N_("size"), _size(content["num_bytes"])))
    lines.append((N_("progress"), _progress_text(content.get("progress") or {})))
    lines += [("", _loader_text(i, one)) for i, one in enumerate(content.get("loaders", []))]
    layout = {name: value for name, value in (content.get("layout") or {}).items() if name != "world_size"}
    lines.append((N_("layout"), ", ".join(f"{name} {value}" for name, value in layout.items() if value is not None)))
    parts: list[str] = [_table([(_(name), str(value)) for name, value in lines if value])]
    if content.get("config"):
        chosen = {name: one for name, one in content["config"].items() if str(one[1]) != "default"}
        own = [(f"  {name}", str(value), f"({_origin(origin)})") for name, (value, origin) in chosen.items()]
        parts.append(_("settings ({number} others have default values)", number=len(content["config"]) - len(own)))
        parts += [_table(own)] if own else []
    for i, groups in enumerate(content.get("optimizers", [])):
        lines_of_groups = [
            "  "
            + _("group {number}: {count} parameters", number=j, count=group["params"])
            + ", "
            + ", ".join(f"{key}={value}" for key, value in group.items() if key != "params" and value is not None)
            for j, group in enumerate(groups)
        ]
        parts.append("\n".join([_("optimizer {number}", number=i), *lines_of_groups]))
    tensors = [
        (
            "  " + one["name"],
            one["dtype"],
            str(one["shape"]),
            _("ranks {ranks}", ranks=_ranks(one["ranks"])) if "ranks" in one else one.get("file", ""),
        )
        for one in content["tensors"]
    ]
    parts.append("\n".join([_("{num_tensors} tensors", num_tensors=len(tensors)), _table(tensors)]))
    parts += [
        "  " + _("{name} is an alias of {target}", name=name, target=target)
        for name, target in content["aliases"].items()
    ]
    if content.get("objects"):
        parts.append(_("objects.json contains {names}", names=", ".join(content["objects"])))
    if content.get("files"):
        parts.append(_("files: {names}", names=", ".join(content["files"])))
    return "\n".join(parts)


def _ranks(ranks: list[int]) -> str:
    names = sorted(set(ranks))
    return ", ".join(map(str, names)) if len(names) < 4 else f"{names[0]} to {names[-1]} ({len(names)})"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(align_columns(rows))


def _json(value: Any) -> str:
    return json.dumps(in_english(_for_json(value)), indent=2)


def _for_json(value: Any) -> Any:
    """Return ``value`` with every type that strict JSON does not support converted to text."""
    if isinstance(value, dict):
        return {str(key): _for_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_json(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    is_plain = value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and isfinite(value))
    return value if is_plain else str(value)


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"


def _age(moment: datetime) -> str:
    seconds = max((datetime.now(timezone.utc) - moment).total_seconds(), 0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"
