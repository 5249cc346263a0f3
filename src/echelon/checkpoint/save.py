"""Saves checkpoints, in the steps that all ranks perform together."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from echelon.base.errors import CheckpointError, EchelonError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.progress import BarOpener, no_bar
from echelon.base.sharded import is_dtensor
from echelon.checkpoint import storage, typed_json
from echelon.checkpoint.commit import PendingFolder, new_token
from echelon.checkpoint.commit_objects import PendingObjects
from echelon.checkpoint.manifest import OBJECTS, is_part, manifest_blocks, rank_objects_file, tensors_file
from echelon.checkpoint.object_store import Location, ObjectPath
from echelon.checkpoint.plan import Gather, Planner, gather_json
from echelon.checkpoint.regions import ShardPart
from echelon.checkpoint.tensor_file import FileFacts, tensor_blocks
from echelon.distributed.record.recorder import recorder_of_process
from echelon.distributed.small_messages import gather_bytes
from echelon.world.world import World


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
class PendingCheckpoint:
    """A save, from the request to the committed files. Each rank has one of these objects.

    ``begin`` creates the folder and collects what is to be saved, and ``finish``, which may run in a thread, writes and commits
    it. An error in either of them discards the files and leaves existing checkpoints unchanged.
    """

    target: Location
    """Place of the checkpoint. An existing checkpoint is replaced once the new one is complete."""
    world: World
    """The ranks and machines that save together."""
    collect: Callable[[Any], Content] | None = None
    """Returns what this rank contributes, once ``write`` has returned; called with what ``write`` returned on the first rank.
    None: the checkpoint has another program's layout, without a manifest, and consists of what ``write`` writes."""
    write: Callable[[Path, bool], Any] | None = None
    """Writes further files to the folder that it is given, along with whether this rank owns the folder. It must not
    communicate, and does not need to sync its files. In layouts without a manifest, one rank on each machine that cannot see
    rank zero's files owns a folder, too."""
    write_later: Callable[[Path], None] | None = None
    """Writes further files to the given folder while the save is finished, possibly in a thread. Called on every rank; what it
    writes on a rank that does not own the folder is not part of a checkpoint with a manifest. It must not communicate."""
    written_by: str = ""
    """What ``write`` is, for error messages."""
    is_part: Callable[[str], bool] = is_part
    """Returns whether a file with this name in an existing ``target`` belongs to the checkpoint. Other files are kept."""
    fence: Callable[[], None] | None = None
    """Raises an error if this run may no longer write here (``RunLock.require``). Called on the first rank."""
    on_each_node: bool = False
    """Whether each machine writes a separate checkpoint, for machines without a shared file system."""
    planner: Planner = field(default_factory=Planner)
    """Has the plan of the last save."""
    gather: Gather = gather_bytes
    """How the ranks communicate."""
    on_committed: Callable[[Any], None] = lambda _: None
    """Called on the rank that owns the folder, once the checkpoint is on disk, for example to delete old checkpoints. It must
    not communicate."""
    files: PendingFolder | PendingObjects = field(init=False)
    """The files that are written, until they are committed."""
    writers: Sequence[int] = field(init=False)
    """Ranks that write to this folder. The first of them commits it."""
    created: str = field(init=False)
    content: Content | None = field(init=False, default=None)
    """What the manifest says beside the tensors; None in a layout without a manifest."""
    tensors: list[tuple[str, torch.Tensor]] = field(init=False, default_factory=list)
    """The tensors that this rank writes, with their names in its file. They must not change until the save is finished."""
    objects: dict[str, bytes] = field(init=False, default_factory=dict)
    """Other files that this rank writes, as a mapping from name to contents."""
    has_added: bool = field(init=False, default=False)
    """Whether the folder has files that ``write`` wrote."""
    layouts: bytes = field(init=False)
    """The chunks of all tensors, as the manifest lists them; only on the first rank."""
    aliases: Mapping[str, str] = field(init=False)
    is_saved: bool = field(init=False, default=False)
    """Whether the checkpoint is on disk."""
    began_ns: int = field(init=False, default_factory=time.monotonic_ns)

    def begin(self) -> PendingCheckpoint:
        """Create the folder, call ``write`` and ``collect``, and decide which rank writes what. Return this object.

        Collective: call on every rank. Ranks communicate only through ``gather``.

        Raises:
            CheckpointError: part of the content cannot be saved, or the ranks do not share a folder.
            UsageError: ``target`` cannot be replaced.
            DesyncError: ranks have different tensors with the same name.
        """
        world, gather, self.target = self.world, self.gather, storage.real_path(self.target)
        if isinstance(self.target, ObjectPath) and (self.on_each_node or self.collect is None):
            setting = "save_on_each_node=True" if self.on_each_node else "another program's format"
            raise UsageError(
                _(
                    "{target} is in an object store, where {setting} is not supported",
                    target=self.target,
                    setting=setting,
                ),
                do=_("save in echelon's own format, and without save_on_each_node; all machines share the store"),
            )
        is_first = creates_folder(world, on_each_node=self.on_each_node)
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        ids = [new_token(), created] if world.rank == 0 else None
        announced = gather_json([ids, world.node_rank, socket.gethostname()], gather)
        nodes = [node if self.on_each_node else 0 for _, node, _ in announced]
        by_node: dict[int, list[int]] = {}
        for rank, node in enumerate(nodes):
            by_node.setdefault(node, []).append(rank)
        self.writers = by_node[nodes[world.rank]]
        token, self.created = announced[0][0]
        self.files = files = pending_files(self.target, token=token, created=self.created, fence=self.fence)
        with files.discarded_on_error():
            creating, at = f"creating {files.path}", self.target
            run_on_all_ranks(creating, lambda: files.make(creates=is_first), gather, target=at)
            if self.collect is None:
                self._make_on_other_machines()
            else:
                seen = gather(b"1" if files.is_owner or files.is_visible() else b"0")
                if blind := [rank for rank in self.writers if seen[rank] != b"1"]:
                    raise self._not_shared(blind, [host for _, _, host in announced])
            written: list[Any] = [None] * len(announced)
            if (write := self.write) is not None:
                self.has_added = True
                what = self.written_by or f"writing {self.target}"
                written = run_on_all_ranks(
                    what, lambda: write(files.folder_to_add(), files.is_owner), gather, target=at
                )
            if self.collect is None:
                return self
            content, objects, planner = self.collect(written[self.writers[0]]), self.objects, self.planner

            def describe() -> list[str]:
                tensors = _encode_objects(content, objects, rank=world.rank, is_first=is_first)
                return planner.describe(tensors, may_differ=content.may_differ)

            run = partial(run_on_all_ranks, f"saving {self.target}", gather=gather)
            announced = run(describe)
            writers = [by_node[node] for node in nodes]
            self.tensors = planner.update(announced, rank=world.rank, writers=writers, run=run, gather=gather)
            self.layouts, self.aliases = planner.layouts, planner.aliases
        # Other ranks' tensors are not kept until the save is finished, nor what the functions hold.
        self.content = replace(content, tensors={}, objects={}, rank_objects={})
        self.write = self.collect = None
        return self

    def _make_on_other_machines(self) -> None:
        """Let machines that do not see rank zero's folder create one of their own."""
        files, world = self.files, self.world
        assert isinstance(files, PendingFolder)

        def make() -> None:
            if world.is_local_rank_zero and world.rank != 0:
                files.make(may_exist=True)

        def require_visible() -> None:
            if not files.is_visible():
                raise CheckpointError(
                    f"rank {world.rank} on {socket.gethostname()} cannot see {files.path}, which the first rank on this "
                    "machine can see",
                    do="use a folder that is shared by all ranks on a machine",
                )

        for action in (make, require_visible):
            run_on_all_ranks(f"creating {files.path}", action, self.gather, target=self.target)

    def _not_shared(self, blind: Sequence[int], hosts: Sequence[str]) -> CheckpointError:
        """Return the error for ranks that cannot see the folder that the first of them created."""
        listing = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in blind)
        return CheckpointError(
            f"{self.target.parent} is not shared by all ranks: rank {self.writers[0]} on {hosts[self.writers[0]]} "
            f"created {self.files.path.name} in it, but these ranks cannot see it: {listing}",
            do="use a folder shared by all machines, or pass ProjectConfiguration(save_on_each_node=True) if each "
            "machine has the whole state",
        )

    def finish(self, *, show: BarOpener = no_bar) -> Location:
        """Write and commit the checkpoint. Return its place once it is on disk, or in the store. ``show`` opens the progress bar.

        Collective: call on every rank. Ranks communicate only through ``gather``, so this method can run in a thread if
        ``gather`` is thread-safe.

        Raises:
            CheckpointError: some ranks, which the error names, could not write. Existing checkpoints are unchanged.
        """
        files, gather, later = self.files, self.gather, self.write_later
        options: dict[str, Any] = {"target": self.target}
        with files.discarded_on_error():
            if self.content is None:
                assert isinstance(files, PendingFolder)
                if later is not None:
                    run_on_all_ranks(f"writing {self.target}", lambda: later(files.path), gather, **options)
                # One rank of each machine syncs. On network file systems, too, a machine must sync the data that it wrote.
                sync = files.sync if self.world.is_local_rank_zero else lambda: None
                written = run_on_all_ranks(f"syncing {files.path}", sync, gather, **options)
            else:
                options["details"] = self._missing_bytes
                written = run_on_all_ranks(f"writing {self.target}", lambda: self._write(show), gather, **options)
            run_on_all_ranks(f"renaming {files.path}", lambda: self._commit(written), gather, **options)
        self.is_saved, self.write_later = True, None
        recorder = recorder_of_process()
        progress = None if self.content is None else self.content.progress  # weights alone have no progress
        if self.world.rank == 0 and progress is not None and recorder is not None:
            duration_s = (time.monotonic_ns() - self.began_ns) / 1e9
            place = str(self.target) if isinstance(self.target, ObjectPath) else self.target
            recorder.checkpoint(place, step=progress.get("step"), duration_s=duration_s)
        return self.target

    def _write(self, show: BarOpener) -> dict[str, list[Any]]:
        files = {}
        if self.write_later is not None:
            self.write_later(self.files.folder_to_add())
            self.has_added = True
        with show(f"saving {self.target.name}", _num_bytes(self.tensors, self.objects)) as progress:
            if self.tensors:
                name = tensors_file(self.world.rank)
                num_bytes = _num_bytes(self.tensors, {})
                blocks = tensor_blocks(name, self.tensors)
                files[name] = self.files.write(name, blocks, num_bytes=num_bytes, progress=progress)
            for name, content in self.objects.items():
                files[name] = self.files.write(name, [content], num_bytes=len(content), progress=progress)
        if self.has_added and self.files.is_added_to:
            files |= self.files.sync_added(is_part=is_part)
        return {name: [facts.size, facts.xxh3_128] for name, facts in files.items()}

    def _commit(self, written: Sequence[dict[str, list[Any]]]) -> None:
        if not self.files.is_owner:
            return
        manifest = None
        if self.content is not None:
            files: dict[str, FileFacts] = {}
            for rank in self.writers:
                for name, (size, checksum) in written[rank].items():
                    if files.setdefault(name, FileFacts(size, checksum)) != FileFacts(size, checksum):
                        raise CheckpointError(
                            f"{self.written_by or 'other code'} wrote different files {name!r} on several ranks, the last of "
                            f"which is rank {rank}",
                            do="write the file on one rank, or use a name that contains the rank",
                        )
            manifest = manifest_blocks(
                token=self.files.token,
                created=self.created,
                world_size=self.world.world_size,
                progress=self.content.progress,
                config=self.content.config,
                layout=self.content.layout,
                files=files,
                tensors=self.layouts,
                aliases=self.aliases,
            )
        self.files.commit(manifest, is_part=self.is_part)
        self.on_committed(self.target)

    def _missing_bytes(self) -> str:
        if isinstance(self.files, PendingObjects):
            return ""
        try:
            free = self.files.free_bytes()
        except OSError:
            return ""
        num_bytes, rank = _num_bytes(self.tensors, self.objects), self.world.rank
        missing = num_bytes - self.files.written_bytes([tensors_file(rank), *self.objects]) - free
        lacks = f": {missing:,} bytes are missing" if missing > 0 else ""
        return f" (rank {rank} writes {num_bytes:,} bytes, and {free:,} bytes are free{lacks})"


def pending_files(
    target: Location, *, token: str, created: str, fence: Callable[[], None] | None = None
) -> PendingFolder | PendingObjects:
    """Return the files of a save to ``target``, which nobody takes for a checkpoint before they are committed."""
    if isinstance(target, ObjectPath):
        return PendingObjects(target=target, token=token, created=created, fence=fence)
    return PendingFolder(target=target, token=token, fence=fence)


def creates_folder(world: World, *, on_each_node: bool) -> bool:
    """Return whether this rank creates the folder of a checkpoint."""
    return world.rank == 0 or (on_each_node and world.is_local_rank_zero)


def _num_bytes(tensors: Sequence[tuple[str, torch.Tensor]], objects: Mapping[str, bytes]) -> int:
    """Return the approximate number of bytes that a rank writes."""
    return sum(tensor.nbytes for _, tensor in tensors) + sum(map(len, objects.values()))


def _encode_objects(
    content: Content, objects: dict[str, bytes], *, rank: int, is_first: bool
) -> dict[str, torch.Tensor | ShardPart]:
    """Put the files of the objects that this rank writes into ``objects``. Return all of its tensors."""
    tensors: dict[str, torch.Tensor | ShardPart] = dict(content.tensors)

    def put_tensor(name: str, tensor: torch.Tensor) -> None:
        if name in tensors:
            raise CheckpointError(f"two tensors are named {name!r}", do="rename one of them")
        tensors[name] = tensor

    def put_shard(name: str, tensor: torch.Tensor) -> None:
        if is_dtensor(tensor):
            put_tensor(name, tensor)

    # The first rank's shared objects are saved. On other ranks they are only checked, but for their shards of tensors.
    shared = {
        name: typed_json.encode(value, name=name, put_tensor=put_tensor if is_first else put_shard)
        for name, value in content.objects.items()
    }
    of_rank = {
        name: typed_json.encode(value, name=f"rank {rank} {name}", put_tensor=put_tensor)
        for name, value in content.rank_objects.items()
    }
    for name in ("progress", "config", "layout"):  # checked early, because the manifest is written last
        typed_json.encode(getattr(content, name), name=name)
    if is_first:
        objects[OBJECTS] = typed_json.to_bytes(shared)
    if of_rank:
        objects[rank_objects_file(rank)] = typed_json.to_bytes(of_rank)
    return tensors


def run_on_all_ranks(
    what: str,
    action: Callable[[], Any],
    gather: Gather,
    *,
    target: Location | None = None,
    details: Callable[[], str] | None = None,
) -> list[Any]:
    """Run ``action`` on every rank and return all ranks' results, as plain JSON. If any rank fails, all ranks raise an error.

    Args:
        what: what is done, for messages.
        action: function that must not communicate.
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
    outcomes = gather_json(mine, gather)
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome["failure"] is not None}
    if not failed:
        return [outcome["result"] for outcome in outcomes]
    is_storage = all(outcome["is_storage"] for outcome in failed.values())
    if failure is not None and isinstance(failure, SaveFailedError) == is_storage:
        raise failure
    listing = "\n".join(f"    rank {rank}: {outcome['failure']}" for rank, outcome in failed.items())
    kind = SaveFailedError if is_storage else CheckpointError
    raise kind(f"{what} failed on other ranks\n{listing}", do="fix the errors on the ranks listed above") from failure


def _as_save_failure(error: Exception, target: Location, details: Callable[[], str] | None) -> Exception:
    """Return the error to raise for ``error``: a ``SaveFailedError`` if the file system caused it."""
    cause = _refusal(error)
    if cause is None:
        return error
    failure = SaveFailedError(
        f"{target} could not be saved: {cause}{_free_bytes(target) if details is None else details()}",
        do="resolve the error of the store above (its credentials, quota, network); existing checkpoints are unchanged"
        if isinstance(target, ObjectPath)
        else "free disk space, or resolve the system error above; existing checkpoints are unchanged",
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


def _free_bytes(target: Location) -> str:
    if isinstance(target, ObjectPath):
        return ""
    folder = target.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return f" ({storage.free_bytes(folder):,} bytes are free)"
    except OSError:
        return ""


def save(target: Location, content: Content, *, world: World, **options: Any) -> Location:
    """Save ``content`` as the checkpoint ``target`` and return its place once it is on disk. ``options`` are those of
    ``PendingCheckpoint``.

    Collective: call on every rank.

    Examples:
        >>> content = Content(tensors=model.state_dict())
        >>> folder = save("checkpoint", content, world=world)
    """
    return begin_save(target, content, world=world, **options).finish()


def begin_save(target: Location, content: Content, *, world: World, **options: Any) -> PendingCheckpoint:
    """Prepare to save ``content`` as the checkpoint ``target``. ``options`` are those of ``PendingCheckpoint``.

    Collective: call on every rank.
    """
    return PendingCheckpoint(target=target, world=world, collect=lambda _: content, **options).begin()
