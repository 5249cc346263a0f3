"""Streams safetensors files to disk, computing checksums while writing, and reads slices of such files.

The safetensors library opens files itself, so files cannot be synced or checksummed while they are being written. The format
is simple: eight bytes for the header's length, a JSON header, and the tensors' bytes. Any safetensors reader can read the
files written here.
"""

from __future__ import annotations

import json
import math
import queue
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import safetensors
import xxhash

from echelon.base.errors import CheckpointError
from echelon.checkpoint import storage
from echelon.checkpoint.damage import damaged
from echelon.checkpoint.object_store import Location
from echelon.checkpoint.typed_json import from_bytes

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 4 << 20  # unit of reading, writing and hashing
MAX_HEADER_BYTES = 100_000_000
"""Maximum header size that the safetensors library can read."""

# Names of the dtypes in the format, and bytes per element.
_STORED: Mapping[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
# Not all versions of the format have names for these dtypes. They are stored as bytes with one more dimension.
_AS_BYTES: Mapping[str, int] = {
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
_DTYPES: Mapping[str, str] = {kind: dtype for dtype, (kind, _) in _STORED.items()}
_WIDTHS: Mapping[str, int] = dict(_STORED.values())


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Size and checksum of a file."""

    size: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor's dtype, shape and position in its file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset from the start of the file, in bytes."""


def itemsize(dtype: str) -> int:
    """Return the size in bytes of one element of the torch dtype with the given name.

    Raises:
        CheckpointError: the dtype is not supported in checkpoints.
    """
    if dtype in _STORED:
        return _STORED[dtype][1]
    if dtype not in _AS_BYTES:
        raise CheckpointError(f"checkpoints do not support tensors of dtype {dtype!r}", do="convert to another dtype")
    return _AS_BYTES[dtype]


def require_dtype(name: str) -> torch.dtype:
    """Return the torch dtype with the given name.

    Raises:
        CheckpointError: the dtype is not supported in checkpoints or by this version of torch.
    """
    import torch  # noqa: PLC0415 - echelon checkpoint reads manifests and headers without torch

    itemsize(name)
    dtype: torch.dtype | None = getattr(torch, name, None)
    if dtype is None:
        raise CheckpointError(f"this version of torch does not support dtype {name!r}", do="use a newer torch")
    return dtype


def dtype_name(kind: str) -> str:
    """Return the name of the torch dtype that a safetensors header calls ``kind``."""
    return _DTYPES[kind]


def torch_dtype(kind: str) -> torch.dtype:
    """Return the torch dtype that a safetensors header calls ``kind``."""
    return require_dtype(_DTYPES[kind])


def stored_form(dtype: str, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Return a tensor's dtype and shape according to the header."""
    return (_STORED[dtype][0], tuple(shape)) if dtype in _STORED else ("U8", (*shape, itemsize(dtype)))


def tensor_blocks(name: str, tensors: Sequence[tuple[str, torch.Tensor]]) -> Iterator[bytes | memoryview]:
    """Yield the contents of the file ``name``, which holds the named ``tensors``.

    Tensors on other devices are copied to the host one at a time.
    """
    from echelon.distributed.small_messages import bytes_of  # noqa: PLC0415 - torch

    # The largest elements come first. Each tensor is then aligned to its element size, as memory-mapping readers require.
    ordered = sorted(tensors, key=lambda item: (-item[1].element_size(), item[0]))
    if len({"__metadata__", *(key for key, _ in ordered)}) != len(ordered) + 1:
        raise CheckpointError(
            f"the tensor names for {name} are not unique or are reserved",
            do="do not use '|' or '__metadata__' in tensor names",
        )
    header = header_of(
        [
            (key, *stored_form(str(tensor.dtype).removeprefix("torch."), tensor.shape), tensor.nbytes)
            for key, tensor in ordered
        ]
    )
    if len(header) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{name} would contain {len(ordered)} tensors, which is more than its header can hold",
            do="use more ranks",
        )
    yield header
    for _, tensor in ordered:
        on_host = tensor.detach().resolve_conj().resolve_neg().to("cpu")
        yield bytes_of(on_host).numpy().data


def header_of(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], aliases: Mapping[str, str] = MappingProxyType({})
) -> bytes:
    """Return the beginning of a safetensors file.

    Args:
        tensors: each tensor's name, dtype according to the format, shape and number of bytes, in the order of the file.
        aliases: additional names of tensors, for tied weights.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **aliases}}
    end = 0
    for name, kind, shape, num_bytes in tensors:
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_file(
    path: Path, contents: Iterable[bytes | memoryview], *, progress: Callable[[int], None] = lambda _: None
) -> FileFacts:
    """Write a new file. Return once it is on disk.

    ``progress`` is called with the number of bytes written since the last call.
    """
    checksum = Checksum()
    handle = storage.create(path)
    try:
        for block in checksum.blocks(contents, progress=progress):
            storage.write(handle, block)
        storage.sync(handle)
    finally:
        xxh3_128 = checksum.close()  # first, because it ends the thread even if closing the file fails
        storage.close(handle)
    return FileFacts(checksum.num_bytes, xxh3_128)


class Checksum:
    """The xxh3_128 checksum of a stream. A thread hashes blocks while they are written; both operations release the GIL."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._blocks: queue.Queue[memoryview | None] = queue.Queue(2)  # bounded, because blocks hold memory
        self._thread: threading.Thread | None = None
        self.num_bytes = 0
        """Length of the blocks so far."""

    def blocks(
        self, contents: Iterable[bytes | memoryview], *, progress: Callable[[int], None]
    ) -> Iterator[memoryview]:
        """Yield ``contents`` in blocks and add each; ``progress`` is called with its length once it has been written."""
        for content in contents:
            data = memoryview(content)
            for start in range(0, len(data), BLOCK_BYTES):
                block = data[start : start + BLOCK_BYTES]
                self.update(block)
                yield block
                progress(len(block))

    def update(self, block: memoryview) -> None:
        """Add ``block``, which must not change until ``close`` is called."""
        self.num_bytes += len(block)
        if self._thread is None and len(block) == BLOCK_BYTES:
            self._start()
        if self._thread is None:
            self._hash.update(block)
        else:
            self._blocks.put(block)

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name="checksum", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down, or the thread limit is reached
            return
        self._thread = thread

    def _work(self) -> None:
        while (block := self._blocks.get()) is not None:
            self._hash.update(block)

    def close(self) -> str:
        """Return the checksum of all blocks."""
        if self._thread is not None:
            self._blocks.put(None)
            self._thread.join()
        return self._hash.hexdigest()


def checksum_of(path: Location, *, expected_bytes: int, progress: Callable[[int], None] = lambda _: None) -> str | None:
    """Return a file's checksum, or None if its size is not the expected size, in which case the file is not read.

    ``progress`` is called with the number of bytes read since the last call.
    """
    with storage.opened(path) as handle:
        if storage.size(handle) != expected_bytes:
            return None
        return _checksum(handle, expected_bytes, progress)


def sync_file(path: Path) -> FileFacts:
    """Sync a file written by another program, and return its size and checksum."""
    with storage.opened(path) as handle:
        storage.sync(handle)
        size = storage.size(handle)
        return FileFacts(size, _checksum(handle, size))


def _checksum(handle: storage.Handle, size: int, progress: Callable[[int], None] = lambda _: None) -> str:
    checksum = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(BLOCK_BYTES, size)))
    for start in range(0, size, BLOCK_BYTES):
        block = buffer[: min(BLOCK_BYTES, size - start)]
        storage.read(handle, start, block)
        checksum.update(block)
        progress(len(block))
    return checksum.hexdigest()


def read_header(handle: storage.Handle, *, source: str) -> dict[str, Stored]:
    """Return the position of each tensor in an open file.

    Raises:
        CheckpointError: the file is not in the safetensors format, or its tensors overlap or leave gaps.
    """
    size = storage.size(handle)
    start = bytearray(8)
    if size >= 8:
        storage.read(handle, 0, memoryview(start))
    (length,) = struct.unpack("<Q", start)
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise _malformed(
            source, f"its header gives a header length of {length} bytes, which is invalid for a file of {size} bytes"
        )
    text = bytearray(length)
    storage.read(handle, 8, memoryview(text))
    header = from_bytes(bytes(text), source=source)
    if not isinstance(header, dict):
        raise _malformed(source, "its header is not a JSON object")
    header.pop("__metadata__", None)
    found = {name: _entry(entry, source, base=8 + length) for name, entry in header.items()}
    position = 8 + length
    for begin, end in sorted((stored.begin, end) for stored, end in found.values()):
        if begin != position:
            raise _malformed(
                source,
                f"bytes {min(begin, position)} to {max(begin, position)} belong either to no tensor or to two tensors",
            )
        position = end
    if position != size:
        raise _malformed(source, f"its tensors end at byte {position}, but the file ends at byte {size}")
    return {name: stored for name, (stored, _) in found.items()}


def stored_tensors(path: Location) -> dict[str, Stored]:
    """Return the position of each tensor in a safetensors file.

    Raises:
        CheckpointError: the file cannot be read, or is not in the safetensors format.
    """
    try:
        with storage.opened(path) as handle:
            return read_header(handle, source=str(path))
    except OSError as error:
        raise damaged(f"{path} cannot be read: {error}") from error


def stored_aliases(path: Path, names: Collection[str]) -> dict[str, str]:
    """Return the tied-weight aliases that Accelerate stores in a safetensors file's metadata."""
    with safetensors.safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
    return {name: target for name, target in metadata.items() if target in names and name not in names}


def _entry(entry: Any, source: str, *, base: int) -> tuple[Stored, int]:
    try:
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        width = _WIDTHS[kind]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(source, f"its header has the invalid entry {str(entry)[:80]}") from error
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise _malformed(source, f"its header has the invalid entry {str(entry)[:80]}")
    if end - begin != math.prod(shape) * width:
        raise _malformed(source, f"a {kind} tensor of shape {shape} cannot have {end - begin} bytes")
    return Stored(kind, tuple(shape), base + begin), base + end


def _malformed(source: str, why: str) -> CheckpointError:
    return damaged(f"{source} is not a safetensors file: {why}")
