"""Commits a checkpoint to an object store: the files are uploaded under names that no other save uses, then the manifest."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from echelon.base.errors import CheckpointError
from echelon.checkpoint import object_store
from echelon.checkpoint.manifest import MANIFEST, is_inside
from echelon.checkpoint.object_store import ObjectPath
from echelon.checkpoint.tensor_file import Checksum, FileFacts, sync_file

_SMALL_BYTES = 8 << 20


@dataclass(slots=True, kw_only=True)
class PendingObjects:
    """The files of a save to an object store, which nobody takes for a checkpoint before ``commit``.

    It has the methods of ``PendingFolder``. Each rank that writes has one of these objects.
    """

    target: ObjectPath
    """The checkpoint."""
    token: str
    """Unique token that identifies this save."""
    created: str
    """Time of the save (UTC, ISO 8601), by which the versions of a checkpoint are ordered."""
    fence: Callable[[], None] | None = None
    """Raises an error if this run may no longer write here. Called just before the manifest is created."""
    path: ObjectPath = field(init=False)
    """Where the files are written."""
    is_owner: bool = False
    _added: Path | None = None

    def __post_init__(self) -> None:
        time = self.created.partition("+")[0].replace("-", "").replace(":", "")
        self.path = self.target / f"{time}Z-{self.token}"

    def make(self, *, creates: bool = True) -> None:
        """Make this rank the owner if it ``creates`` the checkpoint. This sends no request, so that training is not held up."""
        self.is_owner = creates

    def is_visible(self) -> bool:
        """Return True: all ranks use the same store."""
        return True

    def folder_to_add(self) -> Path:
        """Create a local folder to which other code writes files of its own, before ``sync_added``."""
        if self._added is None:
            self._added = Path(tempfile.mkdtemp(prefix="echelon-save-"))
        return self._added

    @property
    def is_added_to(self) -> bool:
        """Whether this rank calls ``sync_added``. Each rank has a folder of its own."""
        return True

    def write(
        self,
        name: str,
        contents: Iterable[bytes | memoryview],
        *,
        num_bytes: int,
        progress: Callable[[int], None] = lambda _: None,
    ) -> FileFacts:
        """Upload a new file. Return once it is durable. ``num_bytes`` is its approximate size."""
        checksum = Checksum()
        blocks = checksum.blocks(contents, progress=progress)
        try:
            # One request, which can be repeated, if the file is small.
            content = b"".join(blocks) if num_bytes < _SMALL_BYTES else blocks
            object_store.write_object(self.path / name, content, num_bytes=num_bytes)
        finally:
            xxh3_128 = checksum.close()
        return FileFacts(checksum.num_bytes, xxh3_128)

    def sync_added(self, *, is_part: Callable[[str], bool]) -> dict[str, FileFacts]:
        """Upload the files that other code wrote to the local folder, and return their sizes and checksums.

        Args:
            is_part: returns whether a file with this name was written by ``write``.
        """
        found: dict[str, FileFacts] = {}
        folder = self._added
        if folder is None:
            return found
        for name in sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()):
            if not is_inside(name) or is_part(name):
                raise CheckpointError(
                    f"a hook wrote the file {name!r} for {self.target}; its name is not valid UTF-8, could refer to a file "
                    "outside the folder, or is one of echelon's own",
                    where="a save_state hook",
                    do="use another file name",
                )
            found[name] = sync_file(folder / name)
            object_store.write_object(self.path / name, folder / name, num_bytes=found[name].size)
        self._remove_added()
        return found

    def commit(self, manifest: Iterable[bytes] | None, *, is_part: Callable[[str], bool]) -> None:
        """Make the uploaded files the checkpoint, and delete the versions that it replaces. Other objects are kept.

        Args:
            manifest: contents of the manifest file, which marks the files as a checkpoint.
            is_part: not used: a version has a folder of its own, so no files of others are in it.
        """
        assert manifest is not None, "layouts without a manifest are written to local folders"
        content = b"".join(manifest)
        listed = json.loads(content)["manifest"]["files"]
        found = object_store.objects_in(self.path)
        if lacking := [n for n, facts in listed.items() if n not in found or found[n]["size"] != facts["size"]]:
            raise OSError(f"{self.path} lacks {', '.join(lacking[:3])}, which has been uploaded")
        if self.fence is not None:
            self.fence()
        object_store.write_object(self.path / MANIFEST, content)
        # Nothing may be reported as saved before the older versions are gone, because clocks may differ between machines.
        object_store.remove_versions(self.target, except_for=self.path.name)

    @contextmanager
    def discarded_on_error(self) -> Iterator[None]:
        """If the block raises, delete the files, unless the manifest exists."""
        try:
            yield
        except BaseException:
            # The original error matters more; the next start of the run removes the leftovers.
            with suppress(OSError):
                self._remove_added()
                if self.is_owner and not object_store.exists(self.path / MANIFEST):
                    object_store.remove_all(self.path)
            raise

    def _remove_added(self) -> None:
        if self._added is not None:
            shutil.rmtree(self._added, ignore_errors=True)
            self._added = None
