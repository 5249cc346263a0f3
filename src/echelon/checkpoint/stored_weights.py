"""A model's weights on disk, and their conversion to safetensors files a few megabytes at a time.

The conversion never holds a whole tensor in memory, and does not need a process group.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from echelon.base.errors import CheckpointError
from echelon.checkpoint.damage import damaged
from echelon.checkpoint.formats.weight_files import aliases_of
from echelon.checkpoint.manifest import chunk_key, tensors_file
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.regions import ChunkBounds
from echelon.checkpoint.storage import LocalStorage
from echelon.checkpoint.tensor_file import Stored, read_header, stored_form, write_file
from echelon.compat.constants import SAFE_MODEL_NAME

__all__ = ["PRECISIONS", "StoredTensor", "Weights", "weights_in", "weights_of", "write_weights"]

_BLOCK_BYTES = 16 << 20
_FLOATS: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
PRECISIONS: Mapping[str, str] = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
"""Dtypes that floating-point weights can be converted to. Maps the name that users pass to the name in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor on disk."""

    kind: str
    """The dtype's name in safetensors."""
    shape: tuple[int, ...]
    pieces: Sequence[tuple[ChunkBounds, Path, int]]
    """The tensor's chunks, each with its file and its byte offset in that file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A model's weights on disk."""

    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    """Aliases of tensors, for tied weights."""

    def num_bytes(self, kind: str | None = None) -> int:
        """Return the total size if floating-point tensors are converted to ``kind``."""
        return sum(_num_bytes(tensor, kind) for tensor in self.tensors.values())


def weights_of(checkpoint: Checkpoint, prefix: str) -> Weights:
    """Return the tensors in a checkpoint whose names start with ``prefix``, without that prefix.

    Raises:
        CheckpointError: a file is damaged, or a tensor has a dtype that some safetensors readers do not support.
    """
    headers = _Headers()
    found: dict[str, StoredTensor] = {}
    aliases: dict[str, str] = {}
    first: dict[str, str] = {}
    tied = checkpoint.manifest.aliases
    for name in sorted((n for n in checkpoint.names() if n.startswith(prefix)), key=lambda name: (name in tied, name)):
        stored, short = tied.get(name, name), name.removeprefix(prefix)
        if first.setdefault(stored, short) != short:
            aliases[short] = first[stored]
        else:  # also the first name with this prefix of a tensor that is tied to one with another prefix
            found[short] = _stored_tensor(checkpoint, stored, headers)
    return Weights(tensors=found, aliases=aliases)


def weights_in(files: Sequence[Path]) -> Weights:
    """Return the tensors stored in safetensors files.

    Raises:
        CheckpointError: a file is damaged, or two files contain the same name.
    """
    headers = _Headers()
    found: dict[str, StoredTensor] = {}
    aliases: dict[str, str] = {}
    for path in files:
        header = headers.of(path)
        twice = found.keys() & header.keys()
        if twice:
            raise damaged(f"{sorted(twice)[0]} is in {path} and also in another file")
        found |= {
            name: StoredTensor(
                kind=entry.dtype, shape=entry.shape, pieces=[(ChunkBounds.whole(entry.shape), path, entry.begin)]
            )
            for name, entry in header.items()
        }
        aliases |= aliases_of(path, header)
    return Weights(tensors=found, aliases=aliases)


def write_weights(
    weights: Weights,
    folder: Path,
    *,
    max_shard_bytes: int | None = None,
    kind: str | None = None,
    name: str = SAFE_MODEL_NAME,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Path]:
    """Write ``weights`` to new files in ``folder``. Return their paths once they are on disk.

    Args:
        weights: the weights to write.
        folder: existing folder.
        max_shard_bytes: maximum total size of the tensors in one file; a larger tensor gets a separate file. If several files
            are written, an index in transformers' format is added. None writes a single file.
        kind: dtype to convert floating-point tensors to, a value of ``PRECISIONS``.
        name: name of the file, without suffix.
        progress: called with the number of bytes written since the last call.

    Raises:
        CheckpointError: a tensor has values that ``kind`` cannot represent.
    """
    shards = _cut(weights, max_shard_bytes, kind)
    storage = LocalStorage()
    files = {
        f"{name}.safetensors" if len(shards) == 1 else f"{name}-{i:05d}-of-{len(shards):05d}.safetensors": names
        for i, names in enumerate(shards, start=1)
    }
    for file, names in files.items():
        write_file(storage, folder / file, _stream(weights, names, kind, progress))
    if len(files) == 1:
        return [folder / file for file in files]
    index = {
        "metadata": {"total_size": weights.num_bytes(kind)},
        "weight_map": {one: file for file, names in files.items() for one in names},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    write_file(storage, folder / f"{name}.safetensors.index.json", [text.encode()])
    return [*(folder / file for file in files), folder / f"{name}.safetensors.index.json"]


class _Headers:
    """Cache of safetensors headers."""

    def __init__(self) -> None:
        self._known: dict[Path, Mapping[str, Stored]] = {}

    def of(self, path: Path) -> Mapping[str, Stored]:
        if path not in self._known:
            storage = LocalStorage()
            try:
                handle = storage.open(path)
            except OSError as error:
                raise damaged(f"{path} cannot be read: {error}") from error
            try:
                self._known[path] = read_header(storage, handle, source=str(path))
            finally:
                storage.close(handle)
        return self._known[path]


def _stored_tensor(checkpoint: Checkpoint, name: str, headers: _Headers) -> StoredTensor:
    layout = checkpoint.layout(name)
    kind, extra = stored_form(layout.dtype, ())
    if extra:
        raise CheckpointError(
            f"{name} has dtype {layout.dtype}, which some safetensors readers do not support",
            do="convert it in the training script before saving, or load the checkpoint in the training script",
        )
    pieces = []
    for chunk in layout.chunks:
        path = checkpoint.folder / tensors_file(chunk.rank)
        entry = headers.of(path).get(chunk_key(name, layout, chunk))
        if entry is None or (entry.dtype, entry.shape) != (kind, chunk.box.lengths):
            raise damaged(f"{name} in {path} does not match its description in the manifest")
        pieces.append((chunk.box, path, entry.begin))
    return StoredTensor(kind=kind, shape=layout.shape, pieces=pieces)


def _cut(weights: Weights, limit: int | None, kind: str | None) -> list[list[str]]:
    """Distribute names over files, keeping their order."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in weights.tensors.items():
        more = _num_bytes(tensor, kind)
        if limit is not None and shards[-1] and size + more > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += more
    return shards


def _stream(
    weights: Weights, names: Sequence[str], kind: str | None, progress: Callable[[int], None]
) -> Iterator[bytes]:
    """Yield the bytes of a safetensors file, in order."""
    # The largest elements come first, which aligns each tensor to its element size.
    ordered = sorted(names, key=lambda name: (-_width(_kind(weights.tensors[name], kind)), name))
    aliases = {name: target for name, target in weights.aliases.items() if target in names}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **aliases}}
    end = 0
    for name in ordered:
        tensor = weights.tensors[name]
        begin, end = end, end + _num_bytes(tensor, kind)
        header[name] = {"dtype": _kind(tensor, kind), "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in ordered:
        tensor = weights.tensors[name]
        for block in _blocks(tensor):
            data = _converted(block, name, tensor.kind, _kind(tensor, kind))
            yield data
            progress(len(data))


def _blocks(tensor: StoredTensor) -> Iterator[np.ndarray[Any, Any]]:
    """Yield a tensor's bytes in order, block by block."""
    width = _width(tensor.kind)
    shape = tensor.shape or (1,)  # treat a scalar as a vector
    pieces = [
        (box if tensor.shape else ChunkBounds((0,), (1,)), path, begin)
        for box, path, begin in tensor.pieces
        if box.volume
    ]
    if not math.prod(shape):
        return
    # Cut along the first dimension whose single steps fit into a block. Iterate over the dimensions before it.
    dim = next(d for d in range(len(shape)) if math.prod(shape[d + 1 :]) * width <= _BLOCK_BYTES)
    step = max(_BLOCK_BYTES // (math.prod(shape[dim + 1 :]) * width), 1)
    for lead in product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], step):
            lengths = (*(1,) * dim, min(step, shape[dim] - start), *shape[dim + 1 :])
            slab = ChunkBounds((*lead, start, *(0,) * (len(shape) - dim - 1)), lengths)
            yield _slab(slab, pieces, dim, width)


def _slab(
    slab: ChunkBounds, pieces: Sequence[tuple[ChunkBounds, Path, int]], dim: int, width: int
) -> np.ndarray[Any, Any]:
    """Return the bytes in ``slab``, whose dimensions before ``dim`` all have length 1."""
    values = np.empty((*slab.lengths[dim:], width), np.uint8)
    for box, path, begin in pieces:
        common = box.common(slab)
        if common is None:
            continue
        # The requested rows are contiguous in the box, because the indices before ``dim`` are fixed.
        inside = common.within(box)
        row = math.prod(box.lengths[dim + 1 :]) * width
        first = 0
        for part, length in zip(inside[: dim + 1], box.lengths):
            first = first * length + part.start
        buffer = np.empty((common.lengths[dim], *box.lengths[dim + 1 :], width), np.uint8)
        _read(path, begin + first * row, buffer.reshape(-1).data)
        values[common.within(slab)[dim:]] = buffer[(slice(None), *inside[dim + 1 :])]
    return values


def _read(path: Path, offset: int, buffer: memoryview) -> None:
    storage = LocalStorage()
    try:
        handle = storage.open(path)
        try:
            storage.read(handle, offset, buffer)
        finally:
            storage.close(handle)
    except OSError as error:
        raise damaged(f"{path} cannot be read: {error}") from error


def _converted(block: np.ndarray[Any, Any], name: str, kind: str, wanted: str) -> bytes:
    if kind == wanted:
        return block.tobytes()
    before = torch.from_numpy(block).reshape(-1).view(_FLOATS[kind])
    after = before.to(_FLOATS[wanted])
    if bool((after.isinf() & ~before.isinf()).any()):
        raise CheckpointError(
            f"{name} has values up to {before.abs().max().item():g}, which {wanted} cannot represent",
            do="keep the original precision, or convert to bf16 or fp32",
        )
    return after.view(torch.uint8).numpy().tobytes()


def _kind(tensor: StoredTensor, wanted: str | None) -> str:
    return wanted if wanted is not None and tensor.kind in _FLOATS else tensor.kind


def _num_bytes(tensor: StoredTensor, kind: str | None) -> int:
    return math.prod(tensor.shape) * _width(_kind(tensor, kind))


def _width(kind: str) -> int:
    """Return the size of an element in bytes, based on the number of bits in the dtype's name (such as ``F8_E4M3``)."""
    bits = re.search(r"\d+", kind)
    return 1 if bits is None else int(bits[0]) // 8  # BOOL
