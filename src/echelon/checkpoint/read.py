"""Reading: verification, the newest intact checkpoint, and tensors in the parts that a rank wants."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from echelon.base.errors import CheckpointError
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
from echelon.checkpoint.tensor_file import Stored, checksum_of, read_header, require_dtype, stored_form
from echelon.distributed.small_messages import gather_bytes
from echelon.world.world import World

__all__ = ["Checkpoint", "CheckpointSearch", "newest", "open_verified", "try_open"]


class Checkpoint:
    """A checkpoint on disk. Its manifest is read at once, other files when they are needed.

    Raises:
        CheckpointError: there is none, or its manifest is damaged.
    """

    def __init__(self, folder: Path, *, storage: Storage | None = None) -> None:
        self._storage = storage or LocalStorage()
        self.folder = place_of(self._storage, folder)
        self.manifest: Manifest = read_manifest(self._storage, self.folder)
        self._headers: dict[str, Mapping[str, Stored]] = {}

    def problems(self, *, share: int = 0, num_shares: int = 1) -> list[str]:
        """Read every file whole (or one share of them) and return what is wrong, naming the files."""
        found = []
        for i, (name, facts) in enumerate(sorted(self.manifest.files.items())):
            if i % num_shares != share:
                continue
            path = self.folder / name
            try:
                self._require_own_folders(name)
                checksum = checksum_of(self._storage, path, expected_bytes=facts.size)
                if checksum is None:
                    found.append(f"{path} has another size than the {facts.size:,} bytes that were written")
                elif checksum != facts.xxh3_128:
                    found.append(f"{path} is damaged: its checksum differs from the one written")
                elif is_part(name) and name.endswith(".safetensors"):
                    self._require_tensors(name)
            except FileNotFoundError:
                found.append(f"{path} is missing")
            except (OSError, CheckpointError) as error:
                found.append(f"{path}: {error.what if isinstance(error, CheckpointError) else error}")
        return found

    def _require_own_folders(self, name: str) -> None:
        """Raise if a parent folder of a file is a link, which may lead out of the checkpoint."""
        for parent in list(Path(name).parents)[:-1]:
            if self._storage.kind(self.folder / parent) != "folder":
                raise damaged(f"{self.folder / parent} is missing, or no folder")

    # ---- objects -----------------------------------------------------------------------------------------------------

    def objects(self) -> dict[str, Any]:
        """Return the objects that all ranks share, by name."""
        return self._objects(OBJECTS)

    def rank_objects(self, rank: int) -> dict[str, Any] | None:
        """Return the objects of ``rank`` by name; None when the saved run had no such rank, or it saved none."""
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
            raise damaged(f"{path} holds no objects by name")
        return decoded

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of all tensors, aliases included."""
        return sorted({*self.manifest.tensors, *self.manifest.aliases})

    def layout(self, name: str) -> TensorLayout:
        """Return shape, dtype and chunks of a tensor.

        Raises:
            CheckpointError: there is none of this name.
        """
        layout = self.manifest.of(name)
        if layout is None:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}", do="load what was saved")
        return layout

    def num_bytes(self, name: str) -> int:
        """Return how much memory a tensor takes."""
        layout = self.layout(name)
        return math.prod(layout.shape) * require_dtype(layout.dtype).itemsize

    def read(self, name: str, box: ChunkBounds | None = None) -> torch.Tensor:
        """Return a tensor, or the part of it in ``box``, on the host."""
        layout = self.layout(name)
        box = box or ChunkBounds.whole(layout.shape)
        values = torch.empty(box.lengths, dtype=require_dtype(layout.dtype))
        self._fill(name, layout, box, values)
        return values

    def read_into(
        self, targets: Mapping[str, torch.Tensor | ShardPart], *, optional: Collection[str] = ()
    ) -> list[str]:
        """Copy each tensor into this rank's part of it, and return the names of the missing ones.

        Beside the targets, the host holds one chunk at a time.

        Args:
            targets: by name; dtypes may differ, shapes may not.
            optional: names that may be missing.

        Raises:
            CheckpointError: one is missing or has another shape; before anything is copied.
        """
        wanted = {name: box_of(target) for name, target in targets.items()}
        missing = self.require_fit({name: shape for name, (shape, _, _) in wanted.items()}, optional=optional)
        for name, (_, box, values) in wanted.items():
            if name not in missing:
                with torch.no_grad():
                    self._fill(name, self.layout(name), box, values)
        return missing

    def require_fit(self, shapes: Mapping[str, Sequence[int]], *, optional: Collection[str] = ()) -> list[str]:
        """Return which tensors of ``shapes`` are missing.

        Raises:
            CheckpointError: one that is not ``optional`` is missing, or one has another shape.
        """
        missing = [name for name in shapes if self.manifest.of(name) is None]
        required = [name for name in missing if name not in optional]
        if required:
            raise CheckpointError(
                f"{self.folder} has no {', '.join(required[:5])}{' and others' if len(required) > 5 else ''}",
                do="load the checkpoint of this model, or allow what may be missing by its name (load_state(allow_missing=))",
            )
        for name, shape in shapes.items():
            if name not in missing and self.layout(name).shape != tuple(shape):
                raise CheckpointError(
                    f"{name} is {list(self.layout(name).shape)} in {self.folder}, and {list(shape)} here",
                    do="load the checkpoint of this model",
                )
        return missing

    def _fill(self, name: str, layout: TensorLayout, box: ChunkBounds, values: torch.Tensor) -> None:
        stored_name = self.manifest.aliases.get(name, name)
        dtype = require_dtype(layout.dtype)
        for part in overlaps(layout, box):
            file = tensors_file(part.chunk.rank)
            entry = self._require_entry(file, chunk_key(stored_name, layout, part.chunk), layout, part.chunk.box)
            # Only the rows that are wanted: they are contiguous in the file.
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
        """Raise unless the header of ``file`` agrees with the manifest on each tensor."""
        header = self._header(file)
        expected = {
            chunk_key(name, layout, chunk): stored_form(layout.dtype, chunk.box.lengths)
            for name, layout in self.manifest.tensors.items()
            for chunk in layout.chunks
            if tensors_file(chunk.rank) == file
        }
        if {name: (entry.dtype, entry.shape) for name, entry in header.items()} != expected:
            raise damaged(f"its header and the manifest name different tensors: {file}")

    def _require_entry(self, file: str, key: str, layout: TensorLayout, box: ChunkBounds) -> Stored:
        entry = self._header(file).get(key)
        if entry is None or (entry.dtype, entry.shape) != stored_form(layout.dtype, box.lengths):
            raise damaged(f"{self.folder / file} does not hold {key} as the manifest says")
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
    """The newest intact checkpoint, and the newer ones that were skipped."""

    checkpoint: Checkpoint | None
    skipped: Sequence[tuple[Path, str]]
    """Newest first, each with its problem."""


def open_verified(
    folder: Path, *, world: World, storage: Storage | None = None, gather: Gather = gather_bytes
) -> Checkpoint:
    """Open a checkpoint after verifying every file; the ranks of a machine share the work.

    Collective: every rank.

    Raises:
        CheckpointError: it is damaged; every rank names the files.
    """
    checkpoint, problem = try_open(folder, world=world, storage=storage, gather=gather)
    if checkpoint is None:
        raise damaged(f"{folder} cannot be loaded, and nothing of it was used: {problem}")
    return checkpoint


def newest(
    candidates: Sequence[Path],
    *,
    world: World,
    storage: Storage | None = None,
    usable: Callable[[Checkpoint], str | None] = lambda _: None,
    gather: Gather = gather_bytes,
) -> CheckpointSearch:
    """Return the first of ``candidates`` (newest first) that is intact on every machine, and why others were skipped.

    Args:
        candidates: each machine may lack some.
        world: of this process.
        storage: where; None: the file systems of this machine.
        usable: returns why an intact checkpoint is not wanted, or None; the same on all ranks.
        gather: how the ranks communicate.

    Collective: every rank.
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
    """Return the checkpoint, or its problem on any machine.

    Collective: every rank.
    """
    checkpoint = None
    try:
        checkpoint = Checkpoint(folder, storage=storage)
        token = checkpoint.manifest.token
        problems = checkpoint.problems(share=world.local_rank, num_shares=world.local_world_size)
    except (CheckpointError, OSError) as error:
        token, problems = "", [error.what if isinstance(error, CheckpointError) else str(error)]
    told = [json.loads(text) for text in gather(json.dumps([token, problems]).encode())]
    for rank, (_, theirs) in enumerate(told):
        if theirs:
            where = f"rank {rank}: " if len(told) > 1 else ""
            return None, f"{where}{'; '.join(theirs[:3])}{f'; and {len(theirs) - 3} more' if len(theirs) > 3 else ''}"
    if len({token for token, _ in told}) > 1:
        return None, "the machines hold different checkpoints of this name"
    return checkpoint, None
