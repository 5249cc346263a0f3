"""A model's weights on disk, and their conversion to safetensors files a few megabytes at a time.

The conversion never holds a whole tensor in memory, and does not need a process group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import safetensors
import torch

from echelon.base.errors import CheckpointError
from echelon.checkpoint.damage import damaged
from echelon.checkpoint.formats.weight_files import cut_into_shards, index_of
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.regions import ChunkBounds
from echelon.checkpoint.tensor_file import (
    header_of,
    stored_aliases,
    stored_form,
    stored_tensors,
    torch_dtype,
    write_file,
)
from echelon.compat.constants import SAFE_MODEL_NAME
from echelon.distributed.small_messages import bytes_of

_BLOCK_BYTES = 16 << 20
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
PRECISIONS: Mapping[str, str] = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
"""Dtypes that floating-point weights can be converted to. Maps the name that users pass to the name in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor on disk."""

    kind: str
    """The dtype's name in safetensors."""
    shape: tuple[int, ...]
    read: Callable[[ChunkBounds], torch.Tensor]
    """Reads a part of the tensor."""
    file: Path | None = None
    """The file that holds the whole tensor."""


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
        CheckpointError: a tensor has a dtype that some safetensors readers do not support.
    """
    found: dict[str, StoredTensor] = {}
    aliases: dict[str, str] = {}
    first: dict[str, str] = {}
    tied = checkpoint.manifest.aliases
    for name in sorted((n for n in checkpoint.names() if n.startswith(prefix)), key=lambda name: (name in tied, name)):
        stored, short = tied.get(name, name), name.removeprefix(prefix)
        if first.setdefault(stored, short) != short:
            aliases[short] = first[stored]
            continue
        # Also the first name with this prefix of a tensor that is tied to one with another prefix.
        layout = checkpoint.layout(stored)
        kind, extra = stored_form(layout.dtype, ())
        if extra:
            raise CheckpointError(
                f"{stored} has dtype {layout.dtype}, which some safetensors readers do not support",
                do="convert it in the training script before saving, or load the checkpoint in the training script",
            )
        found[short] = StoredTensor(kind=kind, shape=layout.shape, read=partial(checkpoint.read, stored))
    return Weights(tensors=found, aliases=aliases)


def weights_in(files: Sequence[Path]) -> Weights:
    """Return the tensors stored in safetensors files.

    Raises:
        CheckpointError: a file is damaged, or two files contain the same name.
    """
    found: dict[str, StoredTensor] = {}
    aliases: dict[str, str] = {}
    for path in files:
        header = stored_tensors(path)
        twice = found.keys() & header.keys()
        if twice:
            raise damaged(f"{sorted(twice)[0]} is in {path} and also in another file")
        found |= {
            name: StoredTensor(kind=entry.dtype, shape=entry.shape, read=partial(_read, path, name), file=path)
            for name, entry in header.items()
        }
        aliases |= stored_aliases(path, header)
    return Weights(tensors=found, aliases=aliases)


def _read(path: Path, name: str, part: ChunkBounds) -> torch.Tensor:
    try:
        # The file is opened for each part, because pages read through a mapping stay resident until it is closed.
        with safetensors.safe_open(path, framework="pt") as file:
            slices = tuple(slice(start, start + length) for start, length in zip(part.offset, part.lengths))
            values: torch.Tensor = file.get_slice(name)[slices] if slices else file.get_tensor(name)
            return values
    except (OSError, safetensors.SafetensorError) as error:
        raise damaged(f"{path} cannot be read: {error}") from error


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
        max_shard_bytes: maximum total size of the tensors in one file; a larger tensor gets a separate file. If several files
            are written, an index in transformers' format is added. None writes a single file.
        kind: dtype to convert floating-point tensors to, a value of ``PRECISIONS``.
        name: name of the file, without suffix.

    Raises:
        CheckpointError: a tensor has values that ``kind`` cannot represent.
    """
    sizes = {tensor: _num_bytes(stored, kind) for tensor, stored in weights.tensors.items()}
    shards = cut_into_shards(sizes, sum(sizes.values()) if max_shard_bytes is None else max_shard_bytes)
    files = {
        f"{name}.safetensors" if len(shards) == 1 else f"{name}-{i:05d}-of-{len(shards):05d}.safetensors": names
        for i, names in enumerate(shards, start=1)
    }
    for file, names in files.items():
        write_file(folder / file, _stream(weights, names, kind, progress))
    if len(files) == 1:
        return [folder / file for file in files]
    index = index_of(files, sum(sizes.values()))
    write_file(folder / f"{name}.safetensors.index.json", [index.encode()])
    return [*(folder / file for file in files), folder / f"{name}.safetensors.index.json"]


def _stream(
    weights: Weights, names: Sequence[str], kind: str | None, progress: Callable[[int], None]
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file, in order."""
    # The largest elements come first, which aligns each tensor to its element size.
    tensors = weights.tensors
    ordered = sorted(names, key=lambda name: (-torch_dtype(_kind(tensors[name], kind)).itemsize, name))
    yield header_of(
        [(name, _kind(tensors[name], kind), tensors[name].shape, _num_bytes(tensors[name], kind)) for name in ordered],
        {name: target for name, target in weights.aliases.items() if target in names},
    )
    for name in ordered:
        for part in _parts(tensors[name]):
            values = converted(tensors[name].read(part), name, _kind(tensors[name], kind))
            yield bytes_of(values).numpy().data
            progress(values.nbytes)


def _parts(tensor: StoredTensor) -> Iterator[ChunkBounds]:
    """Yield parts of a tensor that follow each other in memory and are no larger than a block."""
    shape, width = tensor.shape, torch_dtype(tensor.kind).itemsize
    if not shape:
        yield ChunkBounds((), ())
    if not shape or not math.prod(shape):
        return
    # Cut along the first dimension whose single steps fit into a block. Iterate over the dimensions before it.
    dim = next(d for d in range(len(shape)) if math.prod(shape[d + 1 :]) * width <= _BLOCK_BYTES)
    step = max(_BLOCK_BYTES // (math.prod(shape[dim + 1 :]) * width), 1)
    for lead in product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], step):
            lengths = (*(1,) * dim, min(step, shape[dim] - start), *shape[dim + 1 :])
            yield ChunkBounds((*lead, start, *(0,) * (len(shape) - dim - 1)), lengths)


def converted(before: torch.Tensor, name: str, wanted: str) -> torch.Tensor:
    """Return ``before`` with the dtype that a safetensors header calls ``wanted``.

    Raises:
        CheckpointError: a value is too large for it.
    """
    after = before.to(torch_dtype(wanted))
    if after.dtype != before.dtype and bool((after.isinf() & ~before.isinf()).any()):
        raise CheckpointError(
            f"{name} has values up to {before.abs().max().item():g}, which {wanted} cannot represent",
            do="keep the original precision, or convert to bf16 or fp32",
        )
    return after


def _kind(tensor: StoredTensor, wanted: str | None) -> str:
    return wanted if wanted is not None and tensor.kind in _FLOATS else tensor.kind


def _num_bytes(tensor: StoredTensor, kind: str | None) -> int:
    return math.prod(tensor.shape) * torch_dtype(_kind(tensor, kind)).itemsize
