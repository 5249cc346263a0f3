"""The manifest, which lists a checkpoint's tensors and the size and checksum of each of its files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from echelon._version import __version__
from echelon.base.errors import CheckpointError
from echelon.checkpoint import storage, typed_json
from echelon.checkpoint.damage import damaged
from echelon.checkpoint.object_store import MANIFEST as MANIFEST, Location
from echelon.checkpoint.regions import ChunkBounds, ChunkTable, TensorLayout, uncovered
from echelon.checkpoint.tensor_file import FileFacts, itemsize

VERSION = 1
OBJECTS = "objects.json"
MAX_MANIFEST_BYTES = 1 << 30

_FORMAT = "echelon checkpoint"
_HEAD = b'{"xxh3_128":"%s","manifest":'
_TAIL = b"}\n"
_TENSORS = b',"tensors":'
# A tensor as ``encode_layouts`` writes it.
_TENSOR = re.compile(rb'("(?:[^"\\]|\\.)*"):\{"dtype":"(\w+)","shape":\[([\d,]*)\],"chunks":(\[[\[\]\d,]*\])\}')
_PART = re.compile(r"manifest\.json|objects\.json|rank_\d{5,7}\.(safetensors|json)")
_TENSOR_FILE = re.compile(r"rank_(\d{5,7})\.safetensors")
_CHECKSUM = re.compile(r"[0-9a-f]{32}")
_TOKEN = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of a checkpoint's manifest."""

    token: str
    """Unique token of the save that wrote the checkpoint: 16 hexadecimal digits."""
    created: str
    """Time at which the checkpoint was saved (UTC, ISO 8601)."""
    written_by: str
    """Program and version that wrote the checkpoint."""
    world_size: int
    progress: Mapping[str, Any] | None
    """Counters of the run."""
    config: Any
    """The run's settings with their origins, as plain data for human readers."""
    layout: Any
    """How the state was distributed over the ranks, as plain data for human readers."""
    files: Mapping[str, FileFacts]
    tensors: Mapping[str, TensorLayout]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Additional names of tensors, for tied weights."""

    def of(self, name: str) -> TensorLayout | None:
        """Return the layout of the tensor ``name``, which may be an alias, or None if the tensor does not exist."""
        return self.tensors.get(self.aliases.get(name, name))


def encode_layouts(layouts: Mapping[str, TensorLayout]) -> bytes:
    """Return ``layouts`` as JSON text."""
    entries = (
        {
            name: {
                "dtype": layout.dtype,
                "shape": layout.shape,
                "chunks": [*layout.chunks.rows()],
            }
        }
        for name, layout in sorted(layouts.items())
    )
    return b"{" + b",".join(typed_json.to_bytes(entry)[1:-1] for entry in entries) + b"}"


def manifest_blocks(
    *,
    token: str,
    created: str,
    world_size: int,
    progress: Any,
    config: Any,
    layout: Any,
    files: Mapping[str, FileFacts],
    tensors: bytes,
    aliases: Mapping[str, str],
) -> list[bytes]:
    """Return the contents of a manifest file; ``tensors`` is the result of ``encode_layouts``."""
    head = typed_json.to_bytes(
        {
            "format": _FORMAT,
            "version": VERSION,
            "token": token,
            "created": created,
            "written_by": f"echelon {__version__}",
            "world_size": world_size,
            "progress": typed_json.encode(progress, name="progress"),
            "config": typed_json.encode(config, name="config"),
            "layout": typed_json.encode(layout, name="layout"),
            "files": {name: {"size": facts.size, "xxh3_128": facts.xxh3_128} for name, facts in sorted(files.items())},
        }
    )
    body = [
        head[:-1],
        _TENSORS,
        tensors,
        b',"aliases":',
        typed_json.to_bytes(dict(sorted(aliases.items()))),
        b"}",
    ]
    checksum = xxhash.xxh3_128()
    for block in body:
        checksum.update(block)
    return [_HEAD % checksum.hexdigest().encode(), *body, _TAIL]


def is_inside(path: str) -> bool:
    """Return whether ``path``, which uses slashes, is a valid relative path that stays inside the folder."""
    try:
        path.encode()  # rejects unpaired surrogates
    except UnicodeEncodeError:
        return False
    return "\\" not in path and "\0" not in path and all(part not in ("", ".", "..") for part in path.split("/"))


def tensors_file(rank: int) -> str:
    """Return the name of the tensor file that ``rank`` writes."""
    return f"rank_{rank:05}.safetensors"


def rank_of_tensors_file(name: str) -> int | None:
    """Return the rank that writes the tensor file ``name``; None if it is another file."""
    match = _TENSOR_FILE.fullmatch(name)
    return int(match[1]) if match and tensors_file(int(match[1])) == name else None


def rank_objects_file(rank: int) -> str:
    """Return the name of the object file that ``rank`` writes."""
    return f"rank_{rank:05}.json"


def chunk_key(name: str, shape: Sequence[int], box: ChunkBounds) -> str:
    """Return a chunk's name in its file: the tensor's name, followed by the offset unless the chunk is the whole tensor."""
    return name if box.lengths == shape else f"{name}|{','.join(map(str, box.offset))}"


def is_part(name: str) -> bool:
    """Return whether a file with this name belongs to the checkpoint format."""
    return _PART.fullmatch(name) is not None


def read_manifest(folder: Location) -> Manifest:
    """Read and validate the manifest of ``folder``.

    Raises:
        CheckpointError: the manifest is missing, damaged or inconsistent.
    """
    path = folder / MANIFEST
    if storage.kind(path) is None:
        kind, link = storage.kind(storage.real_path(folder)), storage.link_target(folder)
        what = "not a checkpoint" if kind == "folder" else "not a folder"
        if kind is None and link is not None:
            what = f"a symbolic link to {link}, which does not exist"
        raise CheckpointError(f"{folder} is {what}: {MANIFEST} is missing", do="pass a checkpoint folder")
    try:
        return _parse(storage.read_file(path, max_bytes=MAX_MANIFEST_BYTES), path)
    except OSError as error:
        raise _damaged(path, str(error)) from error


def listed_files(folder: Location) -> Collection[str]:
    """Return the names of the files that the manifest of ``folder`` lists; empty if it is missing or damaged.

    This does not read the list of tensors, which takes longer than saving a checkpoint of thousands of ranks.
    """
    path = folder / MANIFEST
    try:
        body = _body_of(storage.read_file(path, max_bytes=MAX_MANIFEST_BYTES), path)
        try:
            return list(json.loads(body.partition(_TENSORS)[0] + b"}")["files"])
        except (ValueError, KeyError):  # the run's settings have such a key, too
            return list(json.loads(body)["files"])
    except (OSError, CheckpointError, ValueError, KeyError, TypeError):
        return ()


def _body_of(text: bytes, path: Location) -> bytes:
    body = text[len(_HEAD % (b"0" * 32)) : -len(_TAIL)]
    if text != _HEAD % xxhash.xxh3_128_hexdigest(body).encode() + body + _TAIL:
        raise _damaged(path, "its checksum does not match, or part of it is missing")
    return body


def _parse(text: bytes, path: Location) -> Manifest:
    body = _body_of(text, path)
    rest, entries = _split_tensors(body)
    content = typed_json.from_bytes(rest, source=str(path))
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise _damaged(path, f"it is not an {_FORMAT}")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has format version {content.get('version')!r}, but this version of echelon supports format "
            f"version {VERSION}",
            do="use the version of echelon that wrote the checkpoint, or a newer version",
        )
    try:
        files = {name: _facts(name, facts) for name, facts in content["files"].items()}
        sizes = _TensorFileSizes(files)
        if content["tensors"]:  # written by another program, in another form
            entries = [_entry_of(name, entry) for name, entry in content["tensors"].items()]
        tensors = {name: _layout(name, dtype, shape, table, sizes) for name, dtype, shape, table in entries}
        _require(len(tensors) == len(entries), "a tensor that occurs twice")
        manifest = Manifest(
            token=content["token"],
            created=_text(content["created"]),
            written_by=_text(content["written_by"]),
            world_size=content["world_size"],
            progress=typed_json.decode(content["progress"], source=str(path)),
            config=typed_json.decode(content["config"], source=str(path)),
            layout=typed_json.decode(content["layout"], source=str(path)),
            files=files,
            tensors=tensors,
            aliases={name: _text(target) for name, target in content["aliases"].items()},
        )
        _require(_TOKEN.fullmatch(_text(manifest.token)), "token")
        _require(type(manifest.world_size) is int and manifest.world_size > 0, "world_size")
        _require(manifest.progress is None or isinstance(manifest.progress, dict), "progress")
        _require(all(a not in tensors and name in tensors for a, name in manifest.aliases.items()), "aliases")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _damaged(path, f"{type(error).__name__} {error}") from error
    return manifest


def _facts(name: str, entry: Any) -> FileFacts:
    size, checksum = entry["size"], _text(entry["xxh3_128"])
    _require(name != MANIFEST and (is_part(name) or is_inside(name)), f"the file name {name!r}")
    _require(type(size) is int and 0 <= size < 1 << 62 and _CHECKSUM.fullmatch(checksum), f"the file {name}")
    return FileFacts(size, checksum)


_Entry = tuple[str, str, tuple[int, ...], ChunkTable]
"""A tensor's name, dtype, shape and chunks."""


def _split_tensors(body: bytes) -> tuple[bytes, list[_Entry]]:
    """Return a manifest without its tensors, and the tensors; all of it and no tensors if another program wrote it in another form.

    Parsed as JSON, the chunks of thousands of ranks would take a minute, and gigabytes.
    """
    head, _, tail = body.partition(_TENSORS + b"{")
    entries, position = [], 0
    try:
        json.loads(head + b"}")  # else this is a key in the settings
        while (match := _TENSOR.match(tail, position)) is not None:
            entries.append(_entry_in(*match.groups()))
            position = match.end() + (tail[match.end() : match.end() + 1] == b",")
    except (ValueError, TypeError, OverflowError, RecursionError):
        return body, []  # what is wrong with it is found by reading all of it
    if not entries or tail[position - 1 : position] == b"," or tail[position : position + 1] != b"}":
        return body, []
    return head + _TENSORS + b"{" + tail[position:], entries


def _entry_in(name: bytes, dtype: bytes, shape: bytes, chunks: bytes) -> _Entry:
    """Return a tensor, given its parts in the manifest. Raise ValueError if they are not as ``encode_layouts`` writes them."""
    sizes = _sizes(json.loads(b"[%s]" % shape))
    if not sizes or chunks == b"[]":
        _, _, _, table = _entry_of("", {"dtype": "", "shape": list(sizes), "chunks": json.loads(chunks)})
        return json.loads(name), dtype.decode(), sizes, table
    commas = b"," * (len(sizes) - 1)
    one = b"[,[%s],[%s]]" % (commas, commas)
    brackets = chunks.translate(None, b"0123456789")
    num_chunks = len(brackets) // (len(one) + 1)
    if brackets != b"[%s]" % b",".join([one] * num_chunks):
        raise ValueError("the chunks are not in their usual form")
    numbers = chunks.translate(None, b"[]").split(b",")
    rows = np.fromiter(map(int, numbers), np.int64, len(numbers)).reshape(num_chunks, 1 + 2 * len(sizes))
    if (rows >= 1 << 62).any():
        raise ValueError("a number is too large")
    return json.loads(name), dtype.decode(), sizes, ChunkTable(rows)


def _entry_of(name: str, entry: Any) -> _Entry:
    dtype, shape = _text(entry["dtype"]), _sizes(entry["shape"])
    rows = []
    for rank, offset, lengths in entry["chunks"]:
        row = _sizes([rank, *_sizes(offset), *_sizes(lengths)])
        _require(len(offset) == len(lengths) == len(shape), f"a chunk of {name}")
        rows.append(row)
    return name, dtype, shape, ChunkTable(np.array(rows, np.int64).reshape(len(rows), 1 + 2 * len(shape)))


class _TensorFileSizes:
    """The size of each rank's tensor file; -1 without one."""

    def __init__(self, files: Mapping[str, FileFacts]) -> None:
        found = {rank: facts.size for name, facts in files.items() if (rank := rank_of_tensors_file(name)) is not None}
        self._sizes = np.full(max(found, default=-1) + 1, -1, np.int64)
        self._sizes[[*found]] = [*found.values()]

    def of(self, ranks: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the sizes of the files of ``ranks``."""
        known = ranks < len(self._sizes)
        return (
            np.where(known, self._sizes[np.where(known, ranks, 0)], -1) if len(self._sizes) else np.full_like(ranks, -1)
        )


def _layout(name: str, dtype: str, shape: tuple[int, ...], table: ChunkTable, files: _TensorFileSizes) -> TensorLayout:
    layout = TensorLayout(dtype, shape, table)
    # A shape that contains a zero has no elements, but its other sizes must be valid, too.
    _require(math.prod(size for size in shape if size) * itemsize(dtype) < 1 << 62, f"the shape of {name}")
    problem = uncovered(layout)
    _require(problem is None, f"the tensor {name}: {problem}")
    sizes = files.of(table.ranks)
    _require((sizes >= 0).all(), f"a rank of {name}")
    _require((table.lengths.prod(axis=1) * itemsize(dtype) <= sizes).all(), f"the size of {name}")
    return layout


def _sizes(numbers: Any) -> tuple[int, ...]:
    _require(isinstance(numbers, list) and len(numbers) <= 64, f"the sizes {str(numbers)[:40]}")
    _require(all(type(number) is int and 0 <= number < 1 << 62 for number in numbers), f"the sizes {str(numbers)[:40]}")
    return tuple(numbers)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {str(value)[:40]!r}")
    return value


def _require(is_right: Any, what: str) -> None:
    if not is_right:
        raise ValueError(f"invalid value: {what}")


def _damaged(path: Location, why: str) -> CheckpointError:
    return damaged(f"{path} is damaged: {why}")
