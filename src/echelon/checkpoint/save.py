"""Saves checkpoints: assigns data to ranks, and coordinates the steps that all ranks perform together."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from echelon._version import __version__
from echelon.base.errors import CheckpointError, EchelonError
from echelon.base.progress import BarOpener, no_bar
from echelon.checkpoint import storage, typed_json
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
from echelon.checkpoint.tensor_file import FileFacts, require_dtype, sync_file, write_file, write_tensors
from echelon.distributed.record.recorder import recorder_of_process
from echelon.distributed.small_messages import gather_bytes
from echelon.world.world import World

Gather = Callable[[bytes], list[bytes]]
"""All-gathers bytes. Returns every rank's bytes, in rank order."""


class SaveFailedError(CheckpointError):
    """A rank could not write to its file system. Every rank raises this error, and existing checkpoints are unchanged.

    Causes: the disk is full or the quota is exceeded; the folder is not writable; a network file system is unavailable.
    Do: free at least the number of bytes given in the message, or save to another location. The Accelerator reports the error
        and training continues; the third consecutive failure ends the run.
    """


# On a full disk, torch's writer reports only a position in the file.
_FILE_REFUSED = re.compile(r"inline_container|PytorchStreamWriter|unexpected pos|file write failed|iostream error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What this rank contributes to a checkpoint."""

    tensors: Mapping[str, torch.Tensor | ShardPart] = field(default_factory=dict)
    """This rank's tensors: full tensors, DTensors or shards. If several ranks use the same name, it refers to the same
    tensor."""
    may_differ: Collection[str] = ()
    """Names of tensors of which ranks may hold different values, such as buffers. Those of the first rank are saved."""
    objects: Mapping[str, Any] = field(default_factory=dict)
    """Plain data and tensors shared by all ranks. The first rank's values are saved."""
    rank_objects: Mapping[str, Any] = field(default_factory=dict)
    """Plain data and tensors that are specific to this rank."""
    progress: Mapping[str, Any] | None = None
    config: Any = None
    layout: Any = None


@dataclass(slots=True, kw_only=True)
class Save:
    """A prepared save: every rank knows what to write, but no state has been written yet."""

    pending: PendingFolder
    rank: int
    crew: Sequence[int]
    """Ranks that write to this folder. The first of them commits it."""
    tensors: list[tuple[str, torch.Tensor]]
    """The tensors that this rank writes, with their names in its file. They must not change until the save is finished."""
    objects: dict[str, bytes]
    """Other files that this rank writes, as a mapping from name to contents."""
    manifest: Manifest
    """The manifest, whose list of files is still empty."""
    is_part: Callable[[str], bool]
    began_ns: int = field(default_factory=time.monotonic_ns)

    @property
    def num_bytes(self) -> int:
        """Approximate number of bytes that this rank writes."""
        return sum(tensor.nbytes for _, tensor in self.tensors) + sum(map(len, self.objects.values()))

    def write_others(self, what: str, write: Callable[[], Any], *, gather: Gather = gather_bytes) -> list[Any]:
        """Let ``write`` add files to the folder, and return all ranks' results. ``write`` must not communicate.

        Collective: call on every rank.
        """
        with self.pending.discarded_on_error():
            return run_on_all_ranks(what, write, gather, target=self.pending.target)

    def finish(self, gather: Gather = gather_bytes, *, show: BarOpener = no_bar) -> Path:
        """Write and commit the checkpoint. Return its path once it is on disk. ``show`` opens the progress bar.

        Collective: call on every rank. Ranks communicate only through ``gather``, so this method can run in a thread if
        ``gather`` is thread-safe.

        Raises:
            CheckpointError: some ranks, which the error names, could not write. Existing checkpoints are unchanged.
        """
        options: dict[str, Any] = {"target": self.pending.target, "details": self._missing_bytes}
        with self.pending.discarded_on_error():
            files = run_on_all_ranks(f"writing {self.pending.target}", lambda: self._write(show), gather, **options)
            run_on_all_ranks(f"renaming {self.pending.path}", lambda: self._commit(files), gather, **options)
        progress, recorder = self.manifest.progress, recorder_of_process()
        if self.rank == 0 and progress is not None and recorder is not None:  # weights alone have no progress
            duration_s = (time.monotonic_ns() - self.began_ns) / 1e9
            recorder.checkpoint(self.pending.target, step=progress.get("step"), duration_s=duration_s)
        return self.pending.target

    def _write(self, show: BarOpener) -> dict[str, list[Any]]:
        files = {}
        with show(f"saving {self.pending.target.name}", self.num_bytes) as progress:
            if self.tensors:
                name = tensors_file(self.rank)
                files[name] = write_tensors(self.pending.path / name, self.tensors, progress=progress)
            for name, content in self.objects.items():
                files[name] = write_file(self.pending.path / name, [content], progress=progress)
        if self.rank == self.crew[0]:
            files |= self._added("")
        return {name: [facts.size, facts.xxh3_128] for name, facts in files.items()}

    def _added(self, inside: str) -> dict[str, FileFacts]:
        """Sync files that hooks wrote to the folder, and return their sizes and checksums."""
        found: dict[str, FileFacts] = {}
        for name in storage.entries(self.pending.path / inside):
            path = f"{inside}{name}"
            kind = storage.kind(self.pending.path / path)
            if kind == "folder":
                found |= self._added(f"{path}/")
            elif kind == "file" and (inside or not is_part(name)):
                if not is_inside(path):
                    raise CheckpointError(
                        f"a hook wrote the file {path!r} to {self.pending.target}; its name is not valid UTF-8 or could refer to a file "
                        "outside the folder",
                        where="a save_state hook",
                        do="use a UTF-8 file name without backslashes",
                    )
                found[path] = sync_file(self.pending.path / path)
        if inside:
            storage.sync_folder(self.pending.path / inside)
        return found

    def _commit(self, files: Sequence[dict[str, list[Any]]]) -> None:
        if self.rank != self.crew[0]:
            return
        replaced: Collection[str] = ()
        if storage.kind(self.pending.target) is not None:
            with suppress(CheckpointError):  # not a checkpoint in this format, or a damaged one
                replaced = read_manifest(self.pending.target).files
        merged = {name: FileFacts(*facts) for rank in self.crew for name, facts in files[rank].items()}
        self.pending.commit(
            manifest=replace(self.manifest, files=merged).to_bytes(),
            is_part=lambda name: self.is_part(name) or name in replaced,
        )

    def _missing_bytes(self) -> str:
        try:
            free = storage.free_bytes(self.pending.path.parent)
        except OSError:
            return ""
        names = [tensors_file(self.rank), *self.objects]
        missing = self.num_bytes - sum(_size_of(self.pending.path / name) for name in names) - free
        lacks = f": {missing:,} bytes are missing" if missing > 0 else ""
        return f" (rank {self.rank} writes {self.num_bytes:,} bytes, and {free:,} bytes are free{lacks})"

    def update(self, content: Content, *, world: World, gather: Gather = gather_bytes) -> None:
        """Replace the content to save, which may have changed since ``begin_save``.

        Collective: call on every rank. Ranks communicate only through ``gather``.

        Raises:
            CheckpointError: part of the content cannot be saved.
            DesyncError: ranks have different tensors with the same name.
        """
        own, is_first, what = _LocalContent(), self.rank == self.crew[0], f"saving {self.pending.target}"
        with self.pending.discarded_on_error():
            announced = run_on_all_ranks(what, lambda: own.collect(content, world, is_first=is_first), gather)
            run_on_all_ranks(what, lambda: own.plan(announced, self.crew), gather)
        self.tensors, self.objects = own.writes, own.objects
        self.manifest = replace(self.manifest, tensors=own.layouts, aliases=own.aliases, progress=content.progress)

    def leave_out(self, prefix: str) -> None:
        """Exclude tensors whose names start with ``prefix``. Call this on every rank."""
        kept = {name: layout for name, layout in self.manifest.tensors.items() if not name.startswith(prefix)}
        aliases = {name: target for name, target in self.manifest.aliases.items() if target in kept}
        self.manifest = replace(self.manifest, tensors=kept, aliases=aliases)
        self.tensors = [(name, tensor) for name, tensor in self.tensors if not name.startswith(prefix)]


def _size_of(path: Path) -> int:
    try:
        with storage.opened(path) as handle:
            return storage.size(handle)
    except OSError:
        return 0


def run_on_all_ranks(
    what: str,
    action: Callable[[], Any],
    gather: Gather,
    *,
    target: Path | None = None,
    details: Callable[[], str] | None = None,
) -> list[Any]:
    """Run ``action`` on every rank and return all ranks' results, as plain JSON. If any rank fails, all ranks raise an error.

    Args:
        what: what is done, for messages.
        action: function that must not communicate.
        gather: how the ranks communicate.
        target: path of the checkpoint. If given, file system errors are raised as ``SaveFailedError``, which by itself does not
            end the run.
        details: returns text to append to that error's message. If None, the free space is appended.

    Collective: call on every rank. Ranks communicate only through ``gather``.

    Raises:
        CheckpointError: other ranks, which the error names, failed. A rank that failed raises its own error instead.
    """
    failure: Exception | None = None
    result = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - raised below, after the other ranks are notified
        failure = error if target is None else _as_save_failure(error, target, details)
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
    raise kind(f"{what} failed on other ranks\n{listing}", do="fix the errors on the ranks listed above") from failure


def _as_save_failure(error: Exception, target: Path, details: Callable[[], str] | None) -> Exception:
    """Return the error to raise for ``error``: a ``SaveFailedError`` if the file system caused it."""
    cause = _refusal(error)
    if cause is None:
        return error
    failure = SaveFailedError(
        f"{target} could not be saved: {cause}{_free_bytes(target) if details is None else details()}",
        do="free disk space, or resolve the system error above; existing checkpoints are unchanged",
    )
    failure.__cause__ = error
    return failure


def _refusal(error: BaseException) -> BaseException | None:
    """Return the file system error that caused ``error``, or None if it has a different cause."""
    if isinstance(error, (OSError, SafetensorError)):
        return error
    if not isinstance(error, RuntimeError) or isinstance(error, EchelonError) or not _FILE_REFUSED.search(str(error)):
        return None
    inner = error.__cause__ or error.__context__
    return (None if inner is None else _refusal(inner)) or error


def _free_bytes(target: Path) -> str:
    folder = target.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return f" ({storage.free_bytes(folder):,} bytes are free)"
    except OSError:
        return ""


def save(target: Path, content: Content, *, world: World, gather: Gather = gather_bytes, **options: Any) -> Path:
    """Save ``content`` as the checkpoint ``target`` and return its path once it is on disk. ``options`` are those of
    ``begin_save``.

    Collective: call on every rank.
    """
    return begin_save(target, content, world=world, gather=gather, **options).finish(gather)


def begin_save(
    target: Path,
    content: Content,
    *,
    world: World,
    is_part: Callable[[str], bool] = is_part,
    fence: Callable[[], None] | None = None,
    on_each_node: bool = False,
    gather: Gather = gather_bytes,
) -> Save:
    """Assign data to ranks and create the folder.

    Args:
        target: path of the checkpoint. An existing checkpoint is replaced once the new one is complete.
        content: what this rank contributes to the checkpoint.
        world: the ranks and machines in the run.
        is_part: returns whether a file with this name in an existing ``target`` belongs to the checkpoint. Other files are
            kept.
        fence: raises an error if this run may no longer write here (``RunLock.require``). Called on the first rank.
        on_each_node: whether each machine writes a separate checkpoint, for machines without a shared file system.
        gather: how the ranks communicate.

    Collective: call on every rank.

    Raises:
        CheckpointError: part of the content cannot be saved, or the ranks do not share a folder.
        UsageError: ``target`` cannot be replaced.
        DesyncError: ranks have different tensors with the same name.
    """
    target = storage.real_path(target)
    is_first = world.rank == 0 or (on_each_node and world.is_local_rank_zero)
    own = _LocalContent()
    announced = run_on_all_ranks(f"saving {target}", lambda: own.collect(content, world, is_first=is_first), gather)
    nodes = [each["node"] for each in announced]
    crew = [rank for rank, node in enumerate(nodes) if node == world.node_rank or not on_each_node]
    pending = PendingFolder(target=target, token=announced[0]["token"], fence=fence)

    def make_folder() -> None:
        own.plan(announced, crew)
        require_replaceable(target)
        if is_first:
            pending.make()

    with pending.discarded_on_error():
        run_on_all_ranks(f"creating {pending.path}", make_folder, gather, target=target)
        _require_shared(pending, announced, crew, gather)
    manifest = Manifest(
        token=pending.token,
        created=announced[0]["created"],
        written_by=f"echelon {__version__}",
        world_size=world.world_size,
        progress=content.progress,
        config=content.config,
        layout=content.layout,
        files={},
        tensors=own.layouts,
        aliases=own.aliases,
    )
    return Save(
        pending=pending,
        rank=world.rank,
        crew=crew,
        tensors=own.writes,
        objects=own.objects,
        manifest=manifest,
        is_part=is_part,
    )


def save_folder(
    target: Path,
    write: Callable[[Path, bool], None],
    *,
    world: World,
    is_part: Callable[[str], bool],
    fence: Callable[[], None] | None = None,
    gather: Gather = gather_bytes,
) -> bool:
    """Save the files created by ``write`` as ``target``, a checkpoint in another program's layout, without a manifest.

    Return whether this rank owns the folder. Rank zero does, as does one rank on each machine that cannot see rank zero's
    files.

    Args:
        target: path of the checkpoint, which at any moment is either complete or absent. An existing checkpoint is replaced.
        write: called as ``write(folder, is_owner)`` on every rank, where ``is_owner`` is the value that this function returns
            on that rank. It must not communicate, and does not need to sync its files.
        world: the ranks and machines in the run.
        is_part: returns whether a file with this name in an existing ``target`` belongs to the checkpoint. Other files are
            kept.
        fence: raises if this run may no longer write here (``RunLock.require``).
        gather: how the ranks communicate.

    Collective: call on every rank. Ranks communicate only through ``gather``.

    Raises:
        CheckpointError: some ranks, which the error names, could not write. Existing checkpoints are unchanged.
        UsageError: ``target`` cannot be replaced.
    """
    target = storage.real_path(target)
    token = gather(new_token().encode())[0].decode()
    pending = PendingFolder(target=target, token=token, fence=fence)

    def require_visible() -> None:
        if not pending.is_visible():
            raise CheckpointError(
                f"rank {world.rank} on {socket.gethostname()} cannot see {pending.path}, which the first rank on this "
                "machine can see",
                do="use a folder that is shared by all ranks on a machine",
            )

    creating, is_first_of_machine = f"creating {pending.path}", world.is_local_rank_zero
    steps: tuple[tuple[str, bool, Callable[[], None]], ...] = (
        (creating, world.rank == 0, pending.make),
        # Machines that do not see rank zero's folder create their own.
        (creating, is_first_of_machine and world.rank != 0, lambda: pending.make(may_exist=True)),
        (creating, True, require_visible),
        (f"writing {target}", True, lambda: write(pending.path, pending.is_owner)),
        # One rank of each machine syncs. On network file systems, too, a machine must sync the data that it wrote.
        (f"syncing {pending.path}", is_first_of_machine, lambda: sync_tree(pending.path)),
        (f"renaming {pending.path}", True, lambda: pending.commit(manifest=None, is_part=is_part)),
    )
    with pending.discarded_on_error():
        for what, is_here, action in steps:
            run_on_all_ranks(what, action if is_here else lambda: None, gather, target=target)
    return pending.is_owner


class _LocalContent:
    """The content of this rank, encoded for writing."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._rank = 0
        self.objects: dict[str, bytes] = {}
        """Files of objects that this rank writes."""
        self.writes: list[tuple[str, torch.Tensor]] = []
        """Tensors that this rank writes, with their names in its file."""
        self.layouts: dict[str, TensorLayout] = {}
        """Where each tensor is stored."""
        self.aliases: dict[str, str] = {}

    def collect(self, content: Content, world: World, *, is_first: bool) -> dict[str, Any]:
        """Encode ``content`` and return the description that the other ranks need."""
        tensors: dict[str, torch.Tensor | ShardPart] = dict(content.tensors)

        def put_tensor(name: str, tensor: torch.Tensor) -> None:
            if name in tensors:
                raise CheckpointError(f"two tensors are named {name!r}", do="rename one of them")
            tensors[name] = tensor

        # The first rank's shared objects are saved. On other ranks they are only checked.
        objects = {
            name: typed_json.encode(value, name=name, put_tensor=put_tensor if is_first else lambda *_: None)
            for name, value in content.objects.items()
        }
        rank_objects = {
            name: typed_json.encode(value, name=f"rank {world.rank} {name}", put_tensor=put_tensor)
            for name, value in content.rank_objects.items()
        }
        for name in ("progress", "config", "layout"):  # checked early, because the manifest is written last
            typed_json.encode(getattr(content, name), name=name)
        self._rank = world.rank
        self.objects = {OBJECTS: typed_json.to_bytes(objects)} if is_first else {}
        if rank_objects:
            self.objects[rank_objects_file(world.rank)] = typed_json.to_bytes(rank_objects)
        shards, aliases = [], {}
        seen: dict[Any, str] = {}
        for name, tensor in tensors.items():
            shape, box, values = box_of(tensor)
            dtype = str(values.dtype).removeprefix("torch.")
            require_dtype(dtype)
            if values.device.type == "meta":
                raise CheckpointError(
                    f"{name} is on the meta device, so it has no values to save", do="load the weights first"
                )
            self._tensors[name] = values
            shards.append([name, dtype, shape, box.offset, box.lengths, name in content.may_differ])
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

    def plan(self, announced: Sequence[dict[str, Any]], crew: Sequence[int]) -> None:
        """Assign data to the ranks in ``crew``, based on what ``collect`` returned on each of them."""
        self.aliases = _common_aliases([announced[rank] for rank in crew])
        self.layouts = assign_writers({rank: _shards_of(announced[rank], without=self.aliases) for rank in crew})
        self.writes = [
            (chunk_key(name, layout, chunk), self._tensors[name])
            for name, layout in self.layouts.items()
            for chunk in layout.chunks
            if chunk.rank == self._rank
        ]


def _common_aliases(announced: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the tensor aliases on which all ranks that hold the tensor agree."""
    has = [{shard[0] for shard in each["shards"]} for each in announced]
    return {
        name: target
        for name, target in announced[0]["aliases"].items()
        if all(each["aliases"].get(name) == target for each, names in zip(announced, has) if name in names)
    }


def _shards_of(announced: dict[str, Any], *, without: Mapping[str, str]) -> list[LocalShard]:
    return [
        LocalShard(name, dtype, tuple(shape), ChunkBounds(tuple(offset), tuple(lengths)), may_differ)
        for name, dtype, shape, offset, lengths, may_differ in announced["shards"]
        if name not in without
    ]


def _require_shared(
    pending: PendingFolder, announced: Sequence[dict[str, Any]], crew: Sequence[int], gather: Gather
) -> None:
    """Raise an error on every rank if some ranks in ``crew`` cannot see the folder created by the first of them.

    Collective: call on every rank.
    """
    seen = gather(b"1" if pending.is_visible() else b"0")
    blind = [rank for rank in crew if seen[rank] != b"1"]
    if blind:
        hosts = ", ".join(f"rank {rank} on {announced[rank]['host']}" for rank in blind)
        raise CheckpointError(
            f"{pending.target.parent} is not shared by all ranks: rank {crew[0]} on {announced[crew[0]]['host']} "
            f"created {pending.path.name} in it, but these ranks cannot see it: {hosts}",
            do="use a folder shared by all machines, or pass ProjectConfiguration(save_on_each_node=True) if each "
            "machine has the whole state",
        )
