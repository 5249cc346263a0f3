"""Keeps checkpoints in object stores: S3 and stores with its interface, Google Cloud Storage, Azure.

A store has no folders and no renames. A checkpoint ``run/checkpoint_3`` is the objects ``run/checkpoint_3/<version>/<file>``, where
no other save uses the same version. The last object that a save creates is ``manifest.json``, and a version without it is not a
checkpoint. This needs neither conditional writes nor an order of requests, which not all stores have.

The requests are those of obstore, which uploads large files in parallel parts, with checksums, and repeats requests that fail.
Errors are ``OSError``, as in ``storage``.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.optional import require

SCHEMES = ("s3", "gs", "az", "abfs", "abfss", "memory")
"""Schemes of the URLs. ``memory`` is a store in this process, for tests."""

MANIFEST = "manifest.json"

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://([^/]*)/*(.*)", re.DOTALL)
_VERSION = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{16}")
_PART_BYTES = 32 << 20  # of an upload or download; at most _NUM_REQUESTS are in memory at a time
_MAX_PARTS = 9_000  # S3 allows 10,000 parts
_NUM_REQUESTS = 8
_PATIENCE_S = 180.0
"""For how long failing requests are repeated, here and by obstore."""
_DETAILS = "\n\nDebug source"  # of an error of obstore
_T = TypeVar("_T")
_ABANDONED_AFTER = timedelta(days=1)
"""How old the remains of a save must be to be removed by a run that does not hold the lock."""


@dataclass(frozen=True, slots=True, order=True)
class ObjectPath:
    """A place in an object store: an object, or a prefix of objects' names, which is used like a folder."""

    root: str
    """URL of the bucket or container: ``s3://bucket``."""
    key: str
    """Name in it, with slashes between the parts; empty for the bucket itself."""

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """The path without its last part."""
        return ObjectPath(self.root, self.key.rpartition("/")[0])

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.root, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        return f"{self.root}/{self.key}"


Location = Path | ObjectPath
"""Where checkpoints are kept."""


def is_url(path: object) -> bool:
    """Return whether ``path`` is the URL of an object store, as text or as an ``ObjectPath``."""
    return isinstance(path, ObjectPath) or (isinstance(path, str) and _URL.match(path) is not None)


def location(path: str | os.PathLike[str] | ObjectPath) -> Location:
    """Return the place that a user's ``path`` names: a local path, in which ``~`` is expanded, or a URL.

    Raises:
        UsageError: the URL's scheme is unknown, or it has no bucket or lacks a slash.
    """
    if isinstance(path, ObjectPath):
        return path
    match = _URL.match(path) if isinstance(path, str) else None
    if match is None:
        scheme, _colon, rest = os.fspath(path).partition(":/")
        if rest and scheme in SCHEMES:
            raise UsageError(
                _(
                    "{path} has only one slash after the scheme, so it is not a URL (pathlib.Path removes the other one)",
                    path=path,
                ),
                do=_("pass the URL as text: {url}", url=f"{scheme}://{rest}"),
            )
        return Path(path).expanduser()
    scheme, bucket, key = match.groups()
    if scheme not in SCHEMES or not (bucket or scheme == "memory"):
        raise UsageError(
            _("{path} is not the URL of an object store", path=path),
            do=_("pass a URL such as s3://bucket/run, gs://bucket/run or az://container/run, or a local folder"),
        )
    parts = [part for part in key.split("/") if part]
    if any(part in (".", "..") for part in parts):
        raise UsageError(_("{path} contains '.' or '..'", path=path), do=_("pass the URL without them"))
    return ObjectPath(f"{scheme}://{bucket}", "/".join(parts))


def local_folder_of(path: ObjectPath) -> Path:
    """Return the local folder for the files of a run that are not checkpoints, such as logs: the last part of its URL."""
    return Path(path.name or path.root.rpartition("/")[2] or "run")


# ---- requests --------------------------------------------------------------------------------------------------------


def _obstore() -> Any:
    return require("obstore", extra="object-store", purpose=_("a checkpoint in an object store"))


@cache
def _store(root: str) -> Any:
    from_url = _obstore().store.from_url
    if root.startswith("memory:"):
        return from_url("memory:///")
    # The rest of the configuration is in the environment: credentials, AWS_ENDPOINT_URL, AWS_ALLOW_HTTP, AWS_TIMEOUT and so on
    # (client_options= would hide these). The store verifies the checksum of each part that it receives.
    return from_url(f"{root}/", config={"checksum_algorithm": "SHA256"} if root.startswith("s3:") else None)


def _ask(path: ObjectPath, request: Callable[[Any, Any, str], _T], *, is_repeatable: bool = True) -> _T:
    """Return the result of ``request(obstore, store, key)``. Errors are ``OSError``.

    obstore repeats requests that fail, but not those whose reply broke off. They are repeated here, for as long as obstore would.
    """
    obstore, store = _obstore(), _store(path.root)
    errors, began, delay_s = obstore.exceptions, time.monotonic(), 0.1
    while True:
        try:
            return request(obstore, store, path.key)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{path}: {str(error).partition(_DETAILS)[0]}") from error
        except errors.BaseError as error:
            is_broken = isinstance(error, errors.GenericError) and is_repeatable
            if not is_broken or time.monotonic() - began + delay_s > _PATIENCE_S:
                raise OSError(f"{path}: {str(error).partition(_DETAILS)[0]}") from error
        time.sleep(delay_s)
        delay_s *= 2


def read_object(path: ObjectPath) -> bytes:
    """Return an object's contents."""
    return _ask(path, lambda obstore, store, key: bytes(obstore.get(store, key).bytes()))


def write_object(path: ObjectPath, content: Any, *, num_bytes: int = 0) -> None:
    """Create or replace an object. Return once it is durable.

    Args:
        content: bytes; or the path of a local file, or an iterator of buffers, which are uploaded in parts under a new name.
        num_bytes: approximate size, which determines the size of the parts.
    """
    options = {"chunk_size": max(_PART_BYTES, num_bytes // _MAX_PARTS), "max_concurrency": _NUM_REQUESTS}
    if isinstance(content, bytes):
        _ask(path, lambda obstore, store, key: obstore.put(store, key, content, **options))
        return
    size = content.stat().st_size if isinstance(content, Path) else None

    def counted() -> Iterator[Any]:
        nonlocal size
        found = 0
        for block in content:
            found += len(block)
            yield block
        size = found

    data = content if isinstance(content, Path) else counted()
    try:
        _ask(path, lambda obstore, store, key: obstore.put(store, key, data, **options), is_repeatable=data is content)
    except OSError:
        # If the reply to the last request of an upload in parts is lost, a store may refuse its repetition. The object is then
        # there, because only this save uses the name, and objects appear when they are complete.
        if size is None or _size(path) != size:
            raise


def create_object(path: ObjectPath, content: bytes) -> bool:
    """Create an object. Return False if it exists.

    Stores that refuse conditional writes replace it: the last one who writes wins.
    """

    def create(obstore: Any, store: Any, key: str) -> bool:
        errors = obstore.exceptions
        try:
            obstore.put(store, key, content, mode="create")
        except errors.AlreadyExistsError:
            # The reply to an earlier attempt may have been lost.
            return bytes(obstore.get(store, key).bytes()) == content
        except errors.BaseError as error:
            if not isinstance(error, errors.NotSupportedError) and "501 Not Implemented" not in str(error):
                raise
            obstore.put(store, key, content)
        return True

    return _ask(path, create)


def objects_in(folder: ObjectPath) -> dict[str, Mapping[str, Any]]:
    """Return the ``size`` and time of the last change (``last_modified``) of all objects in ``folder``, by name in it."""
    found = _ask(folder, lambda obstore, store, key: [one for page in obstore.list(store, key or None) for one in page])
    prefix = f"{folder.key}/" if folder.key else ""
    return {one["path"].removeprefix(prefix): one for one in found if one["path"] != folder.key}


def _children(folder: ObjectPath) -> tuple[list[str], list[str]]:
    """Return the sorted names of the folders and of the objects directly in ``folder``."""
    found = _ask(folder, lambda obstore, store, key: obstore.list_with_delimiter(store, key or None))
    objects = [one["path"] for one in found["objects"] if one["path"] != folder.key]
    folders, objects = ([path.rpartition("/")[2] for path in paths] for paths in (found["common_prefixes"], objects))
    return sorted(folders), sorted(objects)


def delete(*paths: ObjectPath) -> None:
    """Delete objects of one bucket. Objects that do not exist are not an error."""
    keys = [path.key for path in paths]
    if keys:
        _ask(paths[0], lambda obstore, store, _key: obstore.delete(store, keys))


def exists(path: ObjectPath) -> bool:
    """Return whether there is an object with this name."""
    return _size(path) is not None


def _size(path: ObjectPath) -> int | None:
    """Return the size of an object; None if it does not exist."""
    try:
        size: int = _ask(path, lambda obstore, store, key: obstore.head(store, key))["size"]
    except FileNotFoundError:
        return None
    return size


def is_folder(path: ObjectPath) -> bool:
    """Return whether there are objects in ``path``."""
    return any(_children(path))


def entries(folder: ObjectPath) -> list[str]:
    """Return the sorted names of what is directly in ``folder``."""
    folders, objects = _children(folder)
    return sorted({*folders, *objects})


class ObjectFile:
    """An object that is open for reading."""

    def __init__(self, path: ObjectPath) -> None:
        self.path = path
        self.size: int = _ask(path, lambda obstore, store, key: obstore.head(store, key))["size"]

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with data starting at ``offset``. Raise ``OSError`` if the object ends too early."""
        if buffer.nbytes:
            buffer.cast("B")[:] = _range(self.path, offset, buffer.nbytes)


def _range(path: ObjectPath, start: int, length: int) -> memoryview:
    found = _ask(path, lambda obstore, store, key: obstore.get_range(store, key, start=start, length=length))
    if len(found) != length:
        raise OSError(f"{path} ends at byte {start + len(found)}")
    return memoryview(found)


def now_of(folder: ObjectPath) -> float:
    """Return the time according to the store's clock, in seconds since the epoch, by creating an object in ``folder``."""
    probe = folder / f"now-{os.urandom(8).hex()}"
    write_object(probe, b"")
    found: float = _ask(probe, lambda obstore, store, key: obstore.head(store, key))["last_modified"].timestamp()
    delete(probe)
    return found


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def place_of(path: ObjectPath) -> ObjectPath:
    """Return where the files of the checkpoint ``path`` are: its newest version with a manifest.

    If it has none, or is a folder that was copied to the store, ``path`` is returned.
    """
    folders, objects = _children(path)
    if MANIFEST in objects:
        return path
    versions = [name for name in folders if _VERSION.fullmatch(name)]
    return next((path / name for name in reversed(versions) if exists(path / name / MANIFEST)), path)


def is_checkpoint(path: ObjectPath) -> bool:
    """Return whether ``path`` is a checkpoint, without reading it."""
    return exists(place_of(path) / MANIFEST)


def remove(path: ObjectPath) -> None:
    """Delete the checkpoint ``path``, or the one of which it is a version: first the manifests, the oldest one first."""
    path = path.parent if _VERSION.fullmatch(path.name) else path
    names = sorted(objects_in(path))
    if MANIFEST not in names:
        names = [name for name in names if _VERSION.fullmatch(name.partition("/")[0])]
    _remove_objects(path, names)


def remove_all(folder: ObjectPath) -> None:
    """Delete all objects in ``folder``: first a manifest."""
    _remove_objects(folder, list(objects_in(folder)))


def remove_versions(path: ObjectPath, *, except_for: str) -> None:
    """Delete the versions of a checkpoint that have a manifest, except for one, and the remains of old saves."""
    _remove_others(path, keep=except_for, abandoned_for=_ABANDONED_AFTER)


def _remove_objects(folder: ObjectPath, names: Collection[str]) -> None:
    for name in sorted(name for name in names if name.rpartition("/")[2] == MANIFEST):
        delete(folder / name)
    delete(*(folder / name for name in names if name.rpartition("/")[2] != MANIFEST))


def clean(parent: ObjectPath, *, belongs: Callable[[str], bool], abandoned_for: timedelta = timedelta(0)) -> list[str]:
    """Remove versions without a manifest in ``parent``, and versions that a newer one replaces. Return their names.

    Only a run that holds the lock may remove those that have changed recently.
    """
    return [
        f"{name}/{version}"
        for name in filter(belongs, _children(parent)[0])
        for version in _remove_others(parent / name, keep=None, abandoned_for=abandoned_for)
    ]


def _remove_others(path: ObjectPath, *, keep: str | None, abandoned_for: timedelta) -> list[str]:
    """Delete the versions of a checkpoint other than ``keep`` (None: the newest one with a manifest). Return their names.

    Versions without a manifest are deleted only if they have not changed for ``abandoned_for``: they may be being written.
    """
    found = objects_in(path)
    inside: dict[str, list[str]] = {}
    for name in found:
        if _VERSION.fullmatch(version := name.partition("/")[0]):
            inside.setdefault(version, []).append(name)
    whole = sorted(version for version in inside if f"{version}/{MANIFEST}" in found)
    keep = keep or (whole[-1] if whole else None)
    removed = []
    for version, names in sorted(inside.items()):
        age_s = time.time() - max(found[name]["last_modified"].timestamp() for name in names)
        if version != keep and (version in whole or not abandoned_for or age_s > abandoned_for.total_seconds()):
            _remove_objects(path, names)
            removed.append(version)
    return removed


def leftover_bytes(path: ObjectPath) -> int | None:
    """Return the size of versions without a manifest in ``path``; None if there are none."""
    found = objects_in(path)
    sizes = [one["size"] for name, one in found.items() if _VERSION.fullmatch(name.partition("/")[0])]
    return sum(sizes) if sizes else None


def download(place: ObjectPath, folder: Path, *, share: int = 0, num_shares: int = 1) -> None:
    """Copy the files of a checkpoint, or one share of their parts, to the local ``folder``, in parallel requests."""
    parts = []
    for name, found in sorted(objects_in(place).items()):
        _require_inside(name, place)
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
        parts += [
            (name, start, min(_PART_BYTES, found["size"] - start)) for start in range(0, found["size"], _PART_BYTES)
        ]

    def copy(part: tuple[str, int, int]) -> None:
        name, start, length = part
        content = _range(place / name, start, length)
        with (folder / name).open("r+b") as file:
            file.seek(start)
            file.write(content)

    with ThreadPoolExecutor(_NUM_REQUESTS, thread_name_prefix="download") as pool:
        for _done in pool.map(copy, parts[share::num_shares]):
            pass


def _require_inside(name: str, place: ObjectPath) -> None:
    if "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise OSError(f"{place} has an object named {name!r}, which could refer to a file outside of a folder")


def upload(folder: Path, target: ObjectPath) -> list[str]:
    """Copy the files in the local ``folder`` to ``target``, a manifest last. Return their names."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    for name in sorted(names, key=lambda name: name == MANIFEST):
        write_object(target / name, folder / name, num_bytes=(folder / name).stat().st_size)
    return names


@contextmanager
def uploaded_from(place: Location) -> Iterator[Path]:
    """Yield the local folder ``place``, or a temporary folder whose files are uploaded to ``place`` if the block succeeds."""
    if isinstance(place, Path):
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="echelon-save-") as folder:
        yield Path(folder)
        upload(Path(folder), place)
