"""Saving: which rank writes what, and the steps that all ranks take together."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from echelon._version import __version__
from echelon.base.errors import CheckpointError, EchelonError
from echelon.checkpoint import typed_json
from echelon.checkpoint.commit import PendingFolder, new_token, require_replaceable, sync_tree
from echelon.checkpoint.manifest import (
    OBJECTS,
    Manifest,
    chunk_key,
    is_inside,
    is_part,
    rank_objects_file,
    read_manifest,
    tensors_file,
)
from echelon.checkpoint.regions import ChunkBounds, LocalShard, ShardPart, TensorLayout, assign_writers, box_of
from echelon.checkpoint.storage import LocalStorage, Storage
from echelon.checkpoint.tensor_file import FileFacts, require_dtype, sync_file, write_file, write_tensors
from echelon.distributed.small_messages import gather_bytes
from echelon.world.world import World

__all__ = [
    "Content",
    "Gather",
    "Save",
    "SaveFailedError",
    "as_save_failure",
    "begin_save",
    "save",
    "save_folder",
    "run_on_all_ranks",
]

Gather = Callable[[bytes], list[bytes]]
"""All-gathers bytes: returns those of every rank, in rank order."""


class SaveFailedError(CheckpointError):
    """A rank could not write to its file system; every rank raises this error, and existing checkpoints are untouched.

    Causes: a full disk or quota, a folder that cannot be written, a network file system that is gone.
    Do: free the bytes that the message names, or save elsewhere. The Accelerator reports it and continues; the third failure in
        a row ends the run.
    """


# For a full disk torch's own writer reports only its position in the file.
_FILE_REFUSED = re.compile(r"inline_container|PytorchStreamWriter|unexpected pos|file write failed|iostream error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What is saved."""

    tensors: Mapping[str, torch.Tensor | ShardPart] = field(default_factory=dict)
    """This rank's: whole tensors, DTensors, or parts; equal names are one tensor on all ranks."""
    objects: Mapping[str, Any] = field(default_factory=dict)
    """Plain data and tensors that all ranks share; those of the first rank are saved."""
    rank_objects: Mapping[str, Any] = field(default_factory=dict)
    """Plain data and tensors of this rank alone."""
    progress: Mapping[str, Any] | None = None
    config: Any = None
    layout: Any = None


@dataclass(slots=True, kw_only=True)
class Save:
    """A save that is prepared: every rank knows what it writes, and nothing of the state is written yet."""

    pending: PendingFolder
    rank: int
    crew: Sequence[int]
    """The ranks that write into this folder; the first commits it."""
    tensors: list[tuple[str, torch.Tensor]]
    """What this rank writes, by the names in its file: the tensors themselves, which must not change until it is done."""
    objects: dict[str, bytes]
    """The other files that this rank writes."""
    manifest: Manifest
    """Without the files."""
    is_part: Callable[[str], bool]

    @property
    def target(self) -> Path:
        """Where the checkpoint goes."""
        return self.pending.target

    @property
    def folder(self) -> Path:
        """Where it is written."""
        return self.pending.path

    @property
    def token(self) -> str:
        """The name of this save among all saves."""
        return self.pending.token

    @property
    def _storage(self) -> Storage:
        return self.pending.storage

    @property
    def num_bytes(self) -> int:
        """Return what this rank writes, about."""
        return sum(t.numel() * t.element_size() for _, t in self.tensors) + sum(map(len, self.objects.values()))

    def finish(self, gather: Gather = gather_bytes) -> Path:
        """Write and commit; return the path of the checkpoint once it is on disk.

        Collective: every rank; by ``gather`` alone, so that it may run in a thread with a ``gather`` of its own.

        Raises:
            CheckpointError: a rank could not write; the ranks are named, and what existed before is untouched.
        """
        try:
            files = run_on_all_ranks(f"writing {self.target}", self._counted(self._write), gather)
            run_on_all_ranks(f"renaming {self.folder}", self._counted(lambda: self._commit(files)), gather)
        except BaseException:
            self.give_up()
            raise
        return self.target

    def _write(self) -> dict[str, list[Any]]:
        files = {}
        if self.tensors:
            name = tensors_file(self.rank)
            files[name] = write_tensors(self._storage, self.folder / name, self.tensors)
        for name, content in self.objects.items():
            files[name] = write_file(self._storage, self.folder / name, [content])
        if self.rank == self.crew[0]:
            files |= self._added("")
        return {name: [facts.size, facts.xxh3_128] for name, facts in files.items()}

    def _added(self, inside: str) -> dict[str, FileFacts]:
        """Sync the files that hooks have written into the folder, and return their sizes and checksums."""
        found: dict[str, FileFacts] = {}
        for name in self._storage.entries(self.folder / inside):
            path = f"{inside}{name}"
            kind = self._storage.kind(self.folder / path)
            if kind == "folder":
                found |= self._added(f"{path}/")
            elif kind == "file" and (inside or not is_part(name)):
                if not is_inside(path):
                    raise CheckpointError(
                        f"a hook wrote the file {path!r} into {self.target}, and its name is not valid UTF-8 or could lead out of "
                        "the folder",
                        where="a hook of save_state",
                        do="give it a name in UTF-8 without backslashes",
                    )
                found[path] = sync_file(self._storage, self.folder / path)
        if inside:
            self._storage.sync_folder(self.folder / inside)
        return found

    def _commit(self, files: Sequence[dict[str, list[Any]]]) -> None:
        if self.rank != self.crew[0]:
            return
        merged = {name: FileFacts(*facts) for rank in self.crew for name, facts in files[rank].items()}
        self.pending.commit(manifest=replace(self.manifest, files=merged).to_bytes(), is_part=self._is_part_of_old())

    def _is_part_of_old(self) -> Callable[[str], bool]:
        """Return the predicate for files of the checkpoint that is replaced."""
        try:
            old = read_manifest(self._storage, self.target).files
        except CheckpointError:
            return self.is_part
        return lambda name: self.is_part(name) or name in old

    def _counted(self, action: Callable[[], Any]) -> Callable[[], Any]:
        return as_save_failure(action, self.target, details=self._missing_bytes)

    def _missing_bytes(self) -> str:
        try:
            free = self._storage.free_bytes(self.folder.parent)
        except OSError:
            return ""
        names = [tensors_file(self.rank), *self.objects]
        missing = self.num_bytes - sum(self._written_bytes(self.folder / name) for name in names) - free
        lacks = f": {missing:,} bytes are missing" if missing > 0 else ""
        return f" (rank {self.rank} writes {self.num_bytes:,} bytes, {free:,} are free{lacks})"

    def _written_bytes(self, path: Path) -> int:
        try:
            handle = self._storage.open(path)
        except OSError:
            return 0
        try:
            return self._storage.size(handle)
        finally:
            self._storage.close(handle)

    def leave_out(self, prefix: str) -> None:
        """Do not write the tensors whose names begin with ``prefix``. The same on every rank."""
        kept = {name: layout for name, layout in self.manifest.tensors.items() if not name.startswith(prefix)}
        aliases = {name: target for name, target in self.manifest.aliases.items() if target in kept}
        self.manifest = replace(self.manifest, tensors=kept, aliases=aliases)
        self.tensors = [(name, tensor) for name, tensor in self.tensors if not name.startswith(prefix)]

    def give_up(self) -> None:
        """Remove what was written, unless it is committed."""
        self.pending.give_up()


def as_save_failure(
    action: Callable[[], Any], target: Path, *, details: Callable[[], str] | None = None
) -> Callable[[], Any]:
    """Return ``action`` with file system errors as ``SaveFailedError``, which is counted and does not end the run.

    Args:
        action: writes.
        target: the checkpoint that it writes.
        details: returns what to add to the message; None: the free space.
    """

    def run() -> Any:
        try:
            return action()
        except (OSError, SafetensorError, RuntimeError) as error:
            cause = _refusal(error)
            if cause is None:
                raise
            raise SaveFailedError(
                f"{target} could not be saved: {cause}{_free_bytes(target) if details is None else details()}",
                do="free disk space, or resolve the system error above; existing checkpoints are untouched",
            ) from error

    return run


def _refusal(error: BaseException) -> BaseException | None:
    """Return the file system's error behind ``error``; None if there is none."""
    if isinstance(error, OSError):
        return error
    if isinstance(error, SafetensorError):
        return error
    if isinstance(error, EchelonError) or not _FILE_REFUSED.search(str(error)):
        return None
    inner = error.__cause__ or error.__context__
    return (None if inner is None else _refusal(inner)) or error


def _free_bytes(target: Path) -> str:
    folder = target.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return f" ({LocalStorage().free_bytes(folder):,} bytes are free)"
    except OSError:
        return ""


def run_on_all_ranks(what: str, action: Callable[[], Any], gather: Gather) -> list[Any]:
    """Do ``action`` on every rank and return the results (plain JSON) of all; if some ranks fail, all raise.

    Collective: every rank, by ``gather`` alone; ``action`` must not communicate.

    Raises:
        CheckpointError: other ranks failed; they are named. A rank that failed raises its own error.
    """
    failure: Exception | None = None
    result = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - raised below, when the other ranks know
        failure = error
    note = None if failure is None else failure.what if isinstance(failure, EchelonError) else repr(failure)
    mine = {"result": result, "failure": note, "is_storage": isinstance(failure, SaveFailedError)}
    outcomes = [json.loads(outcome) for outcome in gather(json.dumps(mine).encode())]
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome["failure"] is not None}
    if not failed:
        return [outcome["result"] for outcome in outcomes]
    is_storage = all(outcome["is_storage"] for outcome in failed.values())
    if failure is not None and isinstance(failure, SaveFailedError) == is_storage:
        raise failure
    listing = "\n".join(f"    rank {rank}: {outcome['failure']}" for rank, outcome in failed.items())
    kind = SaveFailedError if is_storage else CheckpointError
    raise kind(f"{what} failed on other ranks\n{listing}", do="fix the error on the ranks listed") from failure


def save(target: Path, content: Content, *, world: World, **options: Any) -> Path:
    """Save ``content`` as the checkpoint ``target`` and return its path once it is on disk; options: ``begin_save``.

    Collective: every rank.
    """
    prepared = begin_save(target, content, world=world, **options)
    return prepared.finish(options.get("gather", gather_bytes))


def begin_save(
    target: Path,
    content: Content,
    *,
    world: World,
    storage: Storage | None = None,
    is_part: Callable[[str], bool] = is_part,
    fence: Callable[[], None] | None = None,
    on_each_node: bool = False,
    gather: Gather = gather_bytes,
) -> Save:
    """Decide with all ranks what each writes, and make the folder.

    Args:
        target: where the checkpoint goes; an existing one is replaced once the new one is complete.
        content: of this rank.
        world: of this process.
        storage: where; None: the file systems of this machine.
        is_part: whether a file of this name in an old ``target`` belongs to it; other files are kept.
        fence: raises when this run may not write here any more (``RunLock.require``); asked on the first rank.
        on_each_node: every machine keeps a checkpoint of its own; for machines that share no files.
        gather: how the ranks communicate.

    Collective: every rank.

    Raises:
        CheckpointError: something cannot be saved, or the ranks do not see one folder.
        UsageError: ``target`` cannot be replaced.
        DesyncError: the ranks have different tensors under one name.
    """
    storage = storage or LocalStorage()
    target = storage.real_path(target)
    is_first = world.rank == 0 or (on_each_node and world.is_local_rank_zero)
    own = _LocalContent()
    announced = run_on_all_ranks(f"saving {target}", lambda: own.collect(content, world, is_first=is_first), gather)
    nodes = [each["node"] for each in announced]
    crew = [rank for rank, node in enumerate(nodes) if node == world.node_rank or not on_each_node]
    aliases = _common_aliases([announced[rank] for rank in crew])
    pending = PendingFolder(storage=storage, target=target, token=announced[0]["token"], fence=fence)

    def make_folder() -> dict[str, TensorLayout]:
        layouts = assign_writers({rank: _shards_of(announced[rank], without=aliases) for rank in crew})
        require_replaceable(storage, target)
        if is_first:
            pending.make()
        return layouts

    try:
        layouts = _on_all_ranks(f"making {pending.path}", as_save_failure(make_folder, target), gather)
        _require_shared(pending, announced, crew, gather)
    except BaseException:
        pending.give_up()
        raise
    objects = {OBJECTS: own.objects} if is_first else {}
    if content.rank_objects:
        objects[rank_objects_file(world.rank)] = own.rank_objects
    manifest = Manifest(
        token=pending.token,
        created=announced[0]["created"],
        written_by=f"echelon {__version__}",
        world_size=world.world_size,
        progress=content.progress,
        config=content.config,
        layout=content.layout,
        files={},
        tensors=layouts,
        aliases=aliases,
    )
    return Save(
        pending=pending,
        rank=world.rank,
        crew=crew,
        tensors=own.to_write(layouts, world.rank),
        objects=objects,
        manifest=manifest,
        is_part=is_part,
    )


def _on_all_ranks(what: str, action: Callable[[], Any], gather: Gather) -> Any:
    """Return the result of ``action`` on this rank, which need not be JSON. Otherwise as ``run_on_all_ranks``."""
    results: list[Any] = []
    run_on_all_ranks(what, lambda: results.append(action()), gather)
    return results[0]


def save_folder(
    target: Path,
    write: Callable[[Path, bool], None],
    *,
    world: World,
    storage: Storage | None = None,
    is_part: Callable[[str], bool],
    fence: Callable[[], None] | None = None,
    gather: Gather = gather_bytes,
) -> bool:
    """Make ``target`` a checkpoint of another program's layout, which has no manifest: the files that ``write`` creates.

    Returns whether this rank made the folder: rank zero, and one rank of each machine that does not see rank zero's files.

    Args:
        target: complete or absent at every instant; an existing one is replaced.
        write: called as ``write(folder, is_owner)`` on every rank; ``is_owner`` where the result is True. It must not
            communicate, and need not sync what it writes.
        world: of this process.
        storage: where; None: the file systems of this machine.
        is_part: whether a file of this name in an old ``target`` belongs to it; other files are kept.
        fence: raises when this run may not write here any more (``RunLock.require``).
        gather: how the ranks communicate.

    Collective: every rank, by ``gather`` alone.

    Raises:
        CheckpointError: a rank could not write; the ranks are named, and what existed before is untouched.
        UsageError: ``target`` cannot be replaced.
    """
    storage = storage or LocalStorage()
    target = storage.real_path(target)
    token = gather(new_token().encode())[0].decode()
    pending = PendingFolder(storage=storage, target=target, token=token, fence=fence)

    def require_visible() -> None:
        if not pending.is_visible():
            raise CheckpointError(
                f"rank {world.rank} on {socket.gethostname()} does not see {pending.path}, which the first rank of this "
                "machine sees",
                do="use a folder that all ranks of a machine share",
            )

    def run(what: str, action: Callable[[], None], *, here: bool = True) -> None:
        run_on_all_ranks(what, as_save_failure(action if here else lambda: None, target), gather)

    making, is_first_of_machine = f"making {pending.path}", world.is_local_rank_zero
    try:
        run(making, pending.make, here=world.rank == 0)
        # Machines that do not see rank zero's folder make their own.
        run(making, lambda: pending.make(may_exist=True), here=is_first_of_machine and world.rank != 0)
        run(making, require_visible)
        run(f"writing {target}", lambda: write(pending.path, pending.is_owner))
        # By one rank of each machine: what a machine has written is synced there, on a network file system, too.
        run(f"syncing {pending.path}", lambda: sync_tree(storage, pending.path), here=is_first_of_machine)
        run(f"renaming {pending.path}", lambda: pending.commit(manifest=None, is_part=is_part))
    except BaseException:
        pending.give_up()
        raise
    return pending.is_owner


class _LocalContent:
    """The content of this rank, encoded."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self.objects = self.rank_objects = b""

    def collect(self, content: Content, world: World, *, is_first: bool) -> dict[str, Any]:
        """Encode ``content``, and return what the other ranks must know of it."""
        tensors: dict[str, torch.Tensor | ShardPart] = dict(content.tensors)

        def put_tensor(name: str, tensor: torch.Tensor) -> None:
            if name in tensors:
                raise CheckpointError(f"two tensors are named {name!r}", do="give one of them another name")
            tensors[name] = tensor

        # The first rank's shared objects are saved; those of the others are only checked.
        objects = {
            name: typed_json.encode(value, name=name, put_tensor=put_tensor if is_first else lambda *_: None)
            for name, value in content.objects.items()
        }
        rank_objects = {
            name: typed_json.encode(value, name=f"rank {world.rank} {name}", put_tensor=put_tensor)
            for name, value in content.rank_objects.items()
        }
        for name in ("progress", "config", "layout"):  # of the manifest, which is written when everything else is
            typed_json.encode(getattr(content, name), name=name)
        self.objects, self.rank_objects = typed_json.to_bytes(objects), typed_json.to_bytes(rank_objects)
        shards, aliases = [], {}
        seen: dict[Any, str] = {}
        for name, tensor in tensors.items():
            shape, box, values = box_of(tensor)
            dtype = str(values.dtype).removeprefix("torch.")
            require_dtype(dtype)
            if values.device.type == "meta":
                raise CheckpointError(f"{name} has no values: it is on the meta device", do="load the weights first")
            self._tensors[name] = values
            shards.append([name, dtype, shape, box.offset, box.lengths])
            view = (values.device, values.data_ptr(), dtype, shape, box, values.stride())
            if values.numel() and seen.setdefault(view, name) != name:
                aliases[name] = seen[view]
        return {
            "token": new_token(),
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "node": world.node_rank,
            "host": socket.gethostname(),
            "shards": shards,
            "aliases": aliases,
        }

    def to_write(self, layouts: Mapping[str, TensorLayout], rank: int) -> list[tuple[str, torch.Tensor]]:
        """Return what ``rank`` writes, by the names in its file."""
        return [
            (chunk_key(name, layout, chunk), self._tensors[name])
            for name, layout in layouts.items()
            for chunk in layout.chunks
            if chunk.rank == rank
        ]


def _common_aliases(announced: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the further names of tensors on which all ranks that have them agree."""
    has = [{shard[0] for shard in each["shards"]} for each in announced]
    return {
        name: target
        for name, target in announced[0]["aliases"].items()
        if all(each["aliases"].get(name) == target for each, names in zip(announced, has) if name in names)
    }


def _shards_of(announced: dict[str, Any], *, without: Mapping[str, str]) -> list[LocalShard]:
    return [
        LocalShard(name, dtype, tuple(shape), ChunkBounds(tuple(offset), tuple(lengths)))
        for name, dtype, shape, offset, lengths in announced["shards"]
        if name not in without
    ]


def _require_shared(
    pending: PendingFolder, announced: Sequence[dict[str, Any]], crew: Sequence[int], gather: Gather
) -> None:
    """Raise on every rank unless all ranks of the crew see the folder that the first one made.

    Collective: every rank.
    """
    seen = gather(b"1" if pending.is_visible() else b"0")
    blind = [rank for rank in crew if seen[rank] != b"1"]
    if blind:
        hosts = ", ".join(f"rank {rank} on {announced[rank]['host']}" for rank in blind)
        raise CheckpointError(
            f"{pending.target.parent} is not shared by all ranks: rank {crew[0]} on {announced[crew[0]]['host']} created "
            f"{pending.path.name} in it, and these ranks do not see it: {hosts}",
            do="use a folder that all machines share, or ProjectConfiguration(save_on_each_node=True) if every machine has the "
            "whole state",
        )
