"""Reads checkpoints: verifies them, finds the newest intact checkpoint, and loads sharded tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.base.errors import CheckpointError
from echelon.base.messages.translation import gettext as _
from echelon.base.progress import BarOpener, no_bar, progress_bar
from echelon.checkpoint import object_store, storage, typed_json
from echelon.checkpoint.commit import place_of
from echelon.checkpoint.damage import damaged
from echelon.checkpoint.manifest import (
    OBJECTS,
    Manifest,
    chunk_key,
    is_part,
    rank_objects_file,
    rank_of_tensors_file,
    read_manifest,
    tensors_file,
)
from echelon.checkpoint.object_store import Location, ObjectPath
from echelon.checkpoint.regions import Chunk, ChunkBounds, ShardPart, TensorLayout, box_of, overlaps
from echelon.checkpoint.tensor_file import (
    FileFacts,
    Stored,
    checksum_of,
    itemsize,
    require_dtype,
    stored_form,
    stored_tensors,
)

if TYPE_CHECKING:
    import torch

    from echelon.checkpoint.plan import Gather
    from echelon.world.world import World


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where the values of a chunk are."""

    path: Location
    begin: int
    """Offset of the first element from the start of the file, in bytes."""
    stride: tuple[int, ...] | None = None
    """Strides in elements; None: in row-major order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignContent:
    """What a checkpoint of another format holds, as echelon's own format would."""

    manifest: Manifest
    """Without files, because there are no checksums."""
    objects: Mapping[str, Any]
    rank_objects: Mapping[int, Mapping[str, Any]]
    place: Callable[[str, Chunk], ChunkPlace]
    """Returns where a chunk of the named tensor is."""
    problems: Callable[[], list[str]]
    """Returns a description of each file that is missing or truncated."""


class Checkpoint:
    """A checkpoint on disk. The constructor reads only the manifest; other files are read when they are needed.

    Args:
        folder: the checkpoint.
        foreign: what a checkpoint of another format holds. None: ``folder`` has echelon's format.

    Raises:
        CheckpointError: ``folder`` is not a checkpoint, or its manifest is damaged.
    """

    def __init__(self, folder: Location, *, foreign: ForeignContent | None = None) -> None:
        self.folder: Location = place_of(folder)
        self._foreign = foreign
        self.manifest: Manifest = read_manifest(self.folder) if foreign is None else foreign.manifest
        self._headers: dict[str, Mapping[str, Stored]] = {}

    @property
    def local_folder(self) -> Path:
        """The folder of a checkpoint that is not in an object store."""
        assert isinstance(self.folder, Path), self.folder
        return self.folder

    def problems(self, *, share: int = 0, num_shares: int = 1, show: BarOpener | None = no_bar) -> list[str]:
        """Read all files (or one share of them) in full, and return a description of each damaged file.

        ``show`` opens the progress bar. None: compare only the sizes.
        """
        if self._foreign is not None:
            return self._foreign.problems() if share == 0 else []
        files = [file for i, file in enumerate(sorted(self.manifest.files.items())) if i % num_shares == share]
        if show is None and isinstance(self.folder, ObjectPath):
            found = object_store.objects_in(self.folder)  # one request instead of one per file
            sizes = {name: found[name]["size"] if name in found else None for name, _facts in files}
            return [self._wrong_size(name, facts) for name, facts in files if sizes[name] != facts.size]
        if show is None:
            return [problem for name, facts in files if (problem := self._problem_of(name, facts, None))]
        with show(f"verifying {self.folder.name}", sum(facts.size for _name, facts in files)) as progress:
            return [problem for name, facts in files if (problem := self._problem_of(name, facts, progress))]

    def _wrong_size(self, name: str, facts: FileFacts) -> str:
        return _(
            "{path} has the wrong size: expected the {number:,} bytes that were written",
            path=self.folder / name,
            number=facts.size,
        )

    def _problem_of(self, name: str, facts: FileFacts, progress: Callable[[int], None] | None) -> str | None:
        path = self.folder / name
        wrong_size = self._wrong_size(name, facts)
        try:
            for parent in list(Path(name).parents)[:-1]:  # a link may point outside the checkpoint
                if storage.kind(self.folder / parent.as_posix()) != "folder":
                    raise damaged(_("{path} is missing or not a folder", path=self.folder / parent.as_posix()))
            if progress is None:
                with storage.opened(path) as handle:
                    return wrong_size if storage.size(handle) != facts.size else None
            checksum = checksum_of(path, expected_bytes=facts.size, progress=progress)
            if checksum is None:
                return wrong_size
            if checksum != facts.xxh3_128:
                return _("{path} is damaged: its checksum does not match the manifest", path=path)
            if is_part(name) and name.endswith(".safetensors"):
                self._require_tensors(name)
        except FileNotFoundError:
            return _("{path} is missing", path=path)
        except (OSError, CheckpointError) as error:
            return f"{path}: {error.what if isinstance(error, CheckpointError) else error}"
        return None

    # ---- objects -----------------------------------------------------------------------------------------------------

    def objects(self, *, get_tensor: Callable[[str], Any] | None = None) -> dict[str, Any]:
        """Return the objects shared by all ranks, by name; ``get_tensor`` (default: ``read``) returns their tensors."""
        if self._foreign is not None:
            return dict(self._foreign.objects)
        return self._objects(OBJECTS, get_tensor or self.read)

    def rank_objects(self, rank: int) -> dict[str, Any] | None:
        """Return the objects of ``rank`` by name, or None if that rank saved no objects or did not exist."""
        if self._foreign is not None:
            own = self._foreign.rank_objects.get(rank)
            return None if own is None else dict(own)
        name = rank_objects_file(rank)
        return self._objects(name, self.read) if name in self.manifest.files else None

    def _objects(self, name: str, get_tensor: Callable[[str], Any]) -> dict[str, Any]:
        path = self.folder / name
        facts = self.manifest.files.get(name)
        if facts is None:
            raise damaged(f"{self.folder} has no {name}")
        text = bytearray(facts.size)
        self._read(path, 0, memoryview(text))
        content = typed_json.from_bytes(bytes(text), source=str(path))
        decoded = typed_json.decode(content, source=str(path), get_tensor=get_tensor)
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
        return math.prod(layout.shape) * itemsize(layout.dtype)

    def read(self, name: str, box: ChunkBounds | None = None) -> torch.Tensor:
        """Read a tensor, or only its part in ``box``, into host memory."""
        import torch  # noqa: PLC0415 - echelon checkpoint ls, show and verify read no tensors

        layout = self.layout(name)
        box = box or ChunkBounds.whole(layout.shape)
        values = torch.empty(box.lengths, dtype=require_dtype(layout.dtype))
        self._fill(name, layout, box, values)
        return values

    def read_into(self, targets: Mapping[str, torch.Tensor | ShardPart], *, show: BarOpener = no_bar) -> None:
        """Copy tensors from the checkpoint into this rank's tensors and shards.

        Besides the targets, only one chunk at a time is held in host memory.

        Args:
            targets: destinations by name. Their dtypes may differ from the saved dtypes, but their shapes must match.

        Raises:
            CheckpointError: a tensor is missing or has a different shape. In this case, nothing is copied.
        """
        import torch  # noqa: PLC0415 - as above

        missing = [name for name in targets if self.manifest.of(name) is None]
        if missing:
            raise CheckpointError(
                f"{self.folder} does not contain {', '.join(missing[:5])}{' and others' if len(missing) > 5 else ''}",
                do="load a checkpoint of this model, or leave these names out of targets",
            )
        wanted = {name: box_of(target) for name, target in targets.items()}
        for name, (shape, _dtype, _values) in wanted.items():
            if self.layout(name).shape != tuple(shape):
                raise CheckpointError(
                    f"{name} has shape {list(self.layout(name).shape)} in {self.folder}, but {list(shape)} in this run",
                    do="load a checkpoint of this model",
                )
        with show(
            f"loading {self.folder.name}", sum(values.nbytes for _shape, _dtype, values in wanted.values())
        ) as progress:
            for name, (_shape, box, values) in wanted.items():
                with torch.no_grad():
                    self._fill(name, self.layout(name), box, values)
                progress(values.nbytes)

    def _fill(self, name: str, layout: TensorLayout, box: ChunkBounds, values: torch.Tensor) -> None:
        import torch  # noqa: PLC0415 - as above

        stored_name = self.manifest.aliases.get(name, name)
        dtype = require_dtype(layout.dtype)
        for chunk, source, target in overlaps(layout, box):
            place, lengths = self._place(stored_name, layout, chunk), chunk.box.lengths
            if place.stride is None:
                first, shape = _contiguous(lengths, source)
                num_elements = math.prod(shape)
            else:
                first, num_elements = 0, 1 + sum((n - 1) * step for n, step in zip(lengths, place.stride))
            buffer = bytearray(num_elements * dtype.itemsize)
            self._read(place.path, place.begin + first * dtype.itemsize, memoryview(buffer))
            read = torch.frombuffer(buffer, dtype=dtype)
            if place.stride is not None:
                values[target].copy_(read.as_strided(lengths, place.stride)[source])
                continue
            values[target].copy_(
                read.reshape(shape)[
                    tuple(slice(None) if n == one.stop - one.start else one for n, one in zip(shape, source))
                ]
            )

    def _place(self, name: str, layout: TensorLayout, chunk: Chunk) -> ChunkPlace:
        if self._foreign is not None:
            return self._foreign.place(name, chunk)
        file = tensors_file(chunk.rank)
        entry = self._require_entry(file, chunk_key(name, layout.shape, chunk.box), layout, chunk.box)
        return ChunkPlace(self.folder / file, entry.begin)

    def _require_tensors(self, file: str) -> None:
        """Raise an error if the header of ``file`` does not match the manifest."""
        header, rank = self._header(file), rank_of_tensors_file(file)
        rank = -1 if rank is None else rank  # a name that no rank's file has
        expected = {
            chunk_key(name, layout.shape, chunk.box): stored_form(layout.dtype, chunk.box.lengths)
            for name, layout in self.manifest.tensors.items()
            for chunk in layout.chunks.of_rank(rank)
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
            self._headers[file] = stored_tensors(self.folder / file)
        return self._headers[file]

    def _read(self, path: Location, offset: int, buffer: memoryview) -> None:
        try:
            with storage.opened(path) as handle:
                storage.read(handle, offset, buffer)
        except OSError as error:
            raise damaged(f"{path} cannot be read: {error}") from error


def _contiguous(lengths: Sequence[int], part: Sequence[slice]) -> tuple[int, tuple[int, ...]]:
    """Return where the shortest run of a chunk's elements that contains ``part`` begins, and the shape of the run.

    In memory, all elements with the same first indices follow each other.
    """
    dim = 0
    while dim + 1 < len(part) and part[dim].stop - part[dim].start == 1:
        dim += 1
    first = 0
    for one, length in zip(part[: dim + 1], lengths):
        first = first * length + one.start
    return first * math.prod(lengths[dim + 1 :]), (
        *(one.stop - one.start for one in part[: dim + 1]),
        *lengths[dim + 1 :],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSearch:
    """The newest intact checkpoint, and the newer checkpoints that were skipped."""

    checkpoint: Checkpoint | None
    skipped: Sequence[tuple[Path, str]]
    """Skipped checkpoints, newest first, each with the reason for skipping it."""


def open_verified(folder: Path, *, world: World) -> Checkpoint:
    """Verify all of a checkpoint's files and open it. The ranks on each machine divide the verification among themselves.

    Collective: call on every rank.

    Raises:
        CheckpointError: the checkpoint is damaged. The error on every rank names the damaged files.

    Examples:
        >>> reader = open_verified("checkpoint", world)  # doctest: +SKIP
    """
    checkpoint, problem = try_open(folder, world=world)
    if checkpoint is None:
        raise damaged(f"{folder} cannot be loaded; no state was changed: {problem}")
    return checkpoint


def newest(
    candidates: Sequence[Path],
    *,
    world: World,
    gather: Gather | None = None,
) -> CheckpointSearch:
    """Return the first of ``candidates`` that is intact on every machine, along with those that were skipped and why.

    Args:
        candidates: paths, newest first. Some of them may be missing on some machines.

    Collective: call on every rank.

    Examples:
        >>> reader = newest(["checkpoint_1", "checkpoint_2"], world=world)  # doctest: +SKIP
    """
    from echelon.checkpoint.plan import gather_json  # noqa: PLC0415 - torch
    from echelon.distributed.small_messages import gather_bytes  # noqa: PLC0415 - torch

    listed = gather_json([str(path) for path in candidates], gather or gather_bytes)
    skipped: list[tuple[Path, str]] = []
    for name in dict.fromkeys(name for each in listed for name in each):  # rank zero's order first
        checkpoint, problem = try_open(Path(name), world=world, gather=gather)
        if checkpoint is not None:
            return CheckpointSearch(checkpoint=checkpoint, skipped=skipped)
        assert problem is not None
        skipped.append((Path(name), problem))
    return CheckpointSearch(checkpoint=None, skipped=skipped)


def try_open(folder: Path, *, world: World, gather: Gather | None = None) -> tuple[Checkpoint | None, str | None]:
    """Return the checkpoint, or a description of a problem with it on any machine.

    Collective: call on every rank.
    """
    from echelon.checkpoint.plan import gather_json  # noqa: PLC0415 - torch
    from echelon.distributed.small_messages import gather_bytes  # noqa: PLC0415 - torch

    checkpoint = None
    try:
        checkpoint = Checkpoint(folder)
        token = checkpoint.manifest.token
        problems = checkpoint.problems(share=world.local_rank, num_shares=world.local_world_size, show=progress_bar)
    except (CheckpointError, OSError) as error:
        token, problems = "", [error.what if isinstance(error, CheckpointError) else str(error)]
    reports = gather_json([token, problems], gather or gather_bytes)
    for rank, (_token, theirs) in enumerate(reports):
        if theirs:
            where = f"rank {rank}: " if len(reports) > 1 else ""
            return None, f"{where}{'; '.join(theirs[:3])}{f'; and {len(theirs) - 3} more' if len(theirs) > 3 else ''}"
    if len({token for token, _problem in reports}) > 1:
        return None, "this name refers to different checkpoints on different machines"
    return checkpoint, None
