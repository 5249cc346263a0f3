"""Reads checkpoints: verifies them, finds the newest intact checkpoint, and loads sharded tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from echelon.base.errors import CheckpointError
from echelon.base.progress import BarOpener, no_bar, progress_bar
from echelon.checkpoint import typed_json
from echelon.checkpoint.commit import place_of
from echelon.checkpoint.damage import damaged
from echelon.checkpoint.manifest import (
    OBJECTS,
    Manifest,
    chunk_key,
    is_part,
    rank_objects_file,
    read_manifest,
    tensors_file,
)
from echelon.checkpoint.regions import ChunkBounds, ShardPart, TensorLayout, box_of, overlaps
from echelon.checkpoint.save import Gather
from echelon.checkpoint.storage import LocalStorage, Storage
from echelon.checkpoint.tensor_file import FileFacts, Stored, checksum_of, read_header, require_dtype, stored_form
from echelon.distributed.small_messages import gather_bytes
from echelon.world.world import World

__all__ = ["Checkpoint", "CheckpointSearch", "newest", "open_verified", "try_open"]


class Checkpoint:
    """A checkpoint on disk. The constructor reads only the manifest; other files are read when they are needed.

    Raises:
        CheckpointError: ``folder`` is not a checkpoint, or its manifest is damaged.
    """

    def __init__(self, folder: Path, *, storage: Storage | None = None) -> None:
        self._storage = storage or LocalStorage()
        self.folder = place_of(self._storage, folder)
        self.manifest: Manifest = read_manifest(self._storage, self.folder)
        self._headers: dict[str, Mapping[str, Stored]] = {}

    def problems(self, *, share: int = 0, num_shares: int = 1, show: BarOpener = no_bar) -> list[str]:
        """Read all files (or one share of them) in full, and return a description of each damaged file.

        ``show`` opens the progress bar.
        """
        files = [file for i, file in enumerate(sorted(self.manifest.files.items())) if i % num_shares == share]
        with show(f"verifying {self.folder.name}", sum(facts.size for _, facts in files)) as progress:
            return self._problems(files, progress)

    def _problems(self, files: Sequence[tuple[str, FileFacts]], progress: Callable[[int], None]) -> list[str]:
        found = []
        for name, facts in files:
            path = self.folder / name
            try:
                self._require_own_folders(name)
                checksum = checksum_of(self._storage, path, expected_bytes=facts.size, progress=progress)
                if checksum is None:
                    found.append(f"{path} has the wrong size: expected the {facts.size:,} bytes that were written")
                elif checksum != facts.xxh3_128:
                    found.append(f"{path} is damaged: its checksum does not match the manifest")
                elif is_part(name) and name.endswith(".safetensors"):
                    self._require_tensors(name)
            except FileNotFoundError:
                found.append(f"{path} is missing")
            except (OSError, CheckpointError) as error:
                found.append(f"{path}: {error.what if isinstance(error, CheckpointError) else error}")
        return found

    def _require_own_folders(self, name: str) -> None:
        """Raise an error if one of a file's parent folders is a link, because it may point outside the checkpoint."""
        for parent in list(Path(name).parents)[:-1]:
            if self._storage.kind(self.folder / parent) != "folder":
                raise damaged(f"{self.folder / parent} is missing or not a folder")

    # ---- objects -----------------------------------------------------------------------------------------------------

    def objects(self) -> dict[str, Any]:
        """Return the objects shared by all ranks, by name."""
        return self._objects(OBJECTS)

    def rank_objects(self, rank: int) -> dict[str, Any] | None:
        """Return the objects of ``rank`` by name, or None if that rank saved no objects or did not exist."""
        name = rank_objects_file(rank)
        return self._objects(name) if name in self.manifest.files else None

    def _objects(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        facts = self.manifest.files.get(name)
        if facts is None:
            raise damaged(f"{self.folder} has no {name}")
        text = bytearray(facts.size)
        self._read(path, 0, memoryview(text))
        content = typed_json.from_bytes(bytes(text), source=str(path))
        decoded = typed_json.decode(content, source=str(path), get_tensor=self.read)
        if not isinstance(decoded, dict):
            raise damaged(f"{path} does not contain a dict of objects")
        return decoded

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of all tensors, including aliases."""
        return sorted({*self.manifest.tensors, *self.manifest.aliases})

    def layout(self, name: str) -> TensorLayout:
        """Return the shape, dtype and chunks of a tensor.

        Raises:
            CheckpointError: the checkpoint has no tensor with this name.
        """
        layout = self.manifest.of(name)
        if layout is None:
            raise CheckpointError(
                f"{self.folder} has no tensor {name!r}",
                do=f"load one of the tensors listed by `echelon checkpoint show {self.folder}`",
            )
        return layout

    def num_bytes(self, name: str) -> int:
        """Return a tensor's size in bytes."""
        layout = self.layout(name)
        return math.prod(layout.shape) * require_dtype(layout.dtype).itemsize

    def read(self, name: str, box: ChunkBounds | None = None) -> torch.Tensor:
        """Read a tensor, or only its part in ``box``, into host memory."""
        layout = self.layout(name)
        box = box or ChunkBounds.whole(layout.shape)
        values = torch.empty(box.lengths, dtype=require_dtype(layout.dtype))
        self._fill(name, layout, box, values)
        return values

    def read_into(
        self,
        targets: Mapping[str, torch.Tensor | ShardPart],
        *,
        optional: Collection[str] = (),
        show: BarOpener = no_bar,
    ) -> list[str]:
        """Copy tensors from the checkpoint into this rank's tensors and shards, and return the names of missing tensors.

        Besides the targets, only one chunk at a time is held in host memory.

        Args:
            targets: destinations by name. Their dtypes may differ from the saved dtypes, but their shapes must match.
            optional: names that may be missing.
            show: opens the progress bar.

        Raises:
            CheckpointError: a tensor is missing or has a different shape. In this case, nothing is copied.
        """
        wanted = {name: box_of(target) for name, target in targets.items()}
        missing = self.require_fit({name: shape for name, (shape, _, _) in wanted.items()}, optional=optional)
        num_bytes = {name: values.numel() * values.element_size() for name, (_, _, values) in wanted.items()}
        with show(f"loading {self.folder.name}", sum(num_bytes.values())) as progress:
            for name, (_, box, values) in wanted.items():
                if name not in missing:
                    with torch.no_grad():
                        self._fill(name, self.layout(name), box, values)
                progress(num_bytes[name])
        return missing

    def require_fit(self, shapes: Mapping[str, Sequence[int]], *, optional: Collection[str] = ()) -> list[str]:
        """Return the names in ``shapes`` that are missing from the checkpoint.

        Raises:
            CheckpointError: a tensor that is not ``optional`` is missing, or a tensor has a different shape.
        """
        missing = [name for name in shapes if self.manifest.of(name) is None]
        required = [name for name in missing if name not in optional]
        if required:
            raise CheckpointError(
                f"{self.folder} does not contain {', '.join(required[:5])}{' and others' if len(required) > 5 else ''}",
                do="load a checkpoint of this model, or pass load_state(allow_missing=) to allow these names to be "
                "missing",
            )
        for name, shape in shapes.items():
            if name not in missing and self.layout(name).shape != tuple(shape):
                raise CheckpointError(
                    f"{name} has shape {list(self.layout(name).shape)} in {self.folder}, but {list(shape)} in this run",
                    do="load a checkpoint of this model",
                )
        return missing

    def _fill(self, name: str, layout: TensorLayout, box: ChunkBounds, values: torch.Tensor) -> None:
        stored_name = self.manifest.aliases.get(name, name)
        dtype = require_dtype(layout.dtype)
        for part in overlaps(layout, box):
            file = tensors_file(part.chunk.rank)
            entry = self._require_entry(file, chunk_key(stored_name, layout, part.chunk), layout, part.chunk.box)
            # Read only the requested rows, which are contiguous in the file.
            lengths = part.chunk.box.lengths
            row = math.prod(lengths[1:]) * dtype.itemsize
            rows = part.source[0] if part.source else slice(0, 1)
            buffer = bytearray(row * (rows.stop - rows.start))
            self._read(self.folder / file, entry.begin + rows.start * row, memoryview(buffer))
            chunk = torch.frombuffer(buffer, dtype=dtype).reshape(
                (rows.stop - rows.start, *lengths[1:]) if lengths else ()
            )
            values[part.target].copy_(chunk[(slice(None), *part.source[1:])] if lengths else chunk)

    def _require_tensors(self, file: str) -> None:
        """Raise an error if the header of ``file`` does not match the manifest."""
        header = self._header(file)
        expected = {
            chunk_key(name, layout, chunk): stored_form(layout.dtype, chunk.box.lengths)
            for name, layout in self.manifest.tensors.items()
            for chunk in layout.chunks
            if tensors_file(chunk.rank) == file
        }
        if {name: (entry.dtype, entry.shape) for name, entry in header.items()} != expected:
            raise damaged(f"the header of {file} and the manifest list different tensors")

    def _require_entry(self, file: str, key: str, layout: TensorLayout, box: ChunkBounds) -> Stored:
        entry = self._header(file).get(key)
        if entry is None or (entry.dtype, entry.shape) != stored_form(layout.dtype, box.lengths):
            raise damaged(f"{key} in {self.folder / file} does not match its description in the manifest")
        return entry

    def _header(self, file: str) -> Mapping[str, Stored]:
        if file not in self._headers:
            handle = self._open(self.folder / file)
            try:
                self._headers[file] = read_header(self._storage, handle, source=str(self.folder / file))
            finally:
                self._storage.close(handle)
        return self._headers[file]

    def _read(self, path: Path, offset: int, buffer: memoryview) -> None:
        handle = self._open(path)
        try:
            self._storage.read(handle, offset, buffer)
        except OSError as error:
            raise damaged(f"{path} cannot be read: {error}") from error
        finally:
            self._storage.close(handle)

    def _open(self, path: Path) -> int:
        try:
            return self._storage.open(path)
        except OSError as error:
            raise damaged(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSearch:
    """The newest intact checkpoint, and the newer checkpoints that were skipped."""

    checkpoint: Checkpoint | None
    skipped: Sequence[tuple[Path, str]]
    """Skipped checkpoints, newest first, each with the reason for skipping it."""


def open_verified(
    folder: Path, *, world: World, storage: Storage | None = None, gather: Gather = gather_bytes
) -> Checkpoint:
    """Verify all of a checkpoint's files and open it. The ranks on each machine divide the verification among themselves.

    Collective: call on every rank.

    Raises:
        CheckpointError: the checkpoint is damaged. The error on every rank names the damaged files.
    """
    checkpoint, problem = try_open(folder, world=world, storage=storage, gather=gather)
    if checkpoint is None:
        raise damaged(f"{folder} cannot be loaded; no state was changed: {problem}")
    return checkpoint


def newest(
    candidates: Sequence[Path],
    *,
    world: World,
    storage: Storage | None = None,
    usable: Callable[[Checkpoint], str | None] = lambda _: None,
    gather: Gather = gather_bytes,
) -> CheckpointSearch:
    """Return the first of ``candidates`` that is intact on every machine, along with those that were skipped and why.

    Args:
        candidates: paths, newest first. Some of them may be missing on some machines.
        world: the ranks and machines in the run.
        storage: file system to use; None means this machine's.
        usable: returns the reason for rejecting an intact checkpoint, or None to accept it. Must return the same on all ranks.
        gather: how the ranks communicate.

    Collective: call on every rank.
    """
    listed = [json.loads(text) for text in gather(json.dumps([str(path) for path in candidates]).encode())]
    names = list(dict.fromkeys(name for each in listed for name in each))  # rank zero's order first
    skipped: list[tuple[Path, str]] = []
    for name in names:
        checkpoint, problem = try_open(Path(name), world=world, storage=storage, gather=gather)
        if checkpoint is not None:
            problem = usable(checkpoint)
            if problem is None:
                return CheckpointSearch(checkpoint=checkpoint, skipped=skipped)
        assert problem is not None
        skipped.append((Path(name), problem))
    return CheckpointSearch(checkpoint=None, skipped=skipped)


def try_open(
    folder: Path, *, world: World, storage: Storage | None = None, gather: Gather = gather_bytes
) -> tuple[Checkpoint | None, str | None]:
    """Return the checkpoint, or a description of a problem with it on any machine.

    Collective: call on every rank.
    """
    checkpoint = None
    try:
        checkpoint = Checkpoint(folder, storage=storage)
        token = checkpoint.manifest.token
        problems = checkpoint.problems(share=world.local_rank, num_shares=world.local_world_size, show=progress_bar)
    except (CheckpointError, OSError) as error:
        token, problems = "", [error.what if isinstance(error, CheckpointError) else str(error)]
    reports = [json.loads(text) for text in gather(json.dumps([token, problems]).encode())]
    for rank, (_, theirs) in enumerate(reports):
        if theirs:
            where = f"rank {rank}: " if len(reports) > 1 else ""
            return None, f"{where}{'; '.join(theirs[:3])}{f'; and {len(theirs) - 3} more' if len(theirs) > 3 else ''}"
    if len({token for token, _ in reports}) > 1:
        return None, "this name refers to different checkpoints on different machines"
    return checkpoint, None
