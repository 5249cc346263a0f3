"""Stores weights in a folder of safetensors files, with an index of tensor checksums; also reads Accelerate's folders.

A folder written by Accelerate has one file of raw bytes per weight (``NAME.dat``), and an index of dtypes and shapes.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote
from uuid import uuid4

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from echelon.base.errors import CheckpointError, UsageError
from echelon.checkpoint.tensor_file import stored_form
from echelon.distributed.small_messages import bytes_of

INDEX = "index.json"
SHARD_BYTES = 2**30
_SHARDS = "weights-{:05d}.safetensors"
Index = dict[str, dict[str, Any]]
_AGAIN = "restore the file from a copy, or offload the weights again into an empty folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadTensor:
    """A tensor that is not read until it is written to the folder."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


# ---- writing ---------------------------------------------------------------------------------------------------------------


class OffloadFolder:
    """Writes weights to a folder. Files that the index still refers to are kept; other old weight files are replaced.

    A file gets its final name only when it is complete, and the index is written last.

    Args:
        folder: created if missing.
        names: names of the weights that will be written.
    """

    def __init__(self, folder: str | os.PathLike[str], names: Iterable[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.index: Index = {}
        """Index entries of the weights written so far."""
        written = set(names)
        present = _read_index(self.folder) if has_index(self.folder) else {}
        self._kept = {
            Path(entry.get("safetensors_file", "")).name for name, entry in present.items() if name not in written
        }
        self._number = 0

    def write(self, tensors: Mapping[str, UnreadTensor], aliases: Mapping[str, str] | None = None) -> None:
        """Write ``tensors`` to files of about 1 GiB, with one tensor in memory at a time.

        Args:
            aliases: further names of tied tensors.
        """
        shard: dict[str, UnreadTensor] = {}
        for name, tensor in tensors.items():
            if shard and sum(one.num_bytes for one in shard.values()) + tensor.num_bytes > SHARD_BYTES:
                self._write_shard(shard, aliases or {})
                shard = {}
            shard[name] = tensor
        if shard:
            self._write_shard(shard, aliases or {})

    def _write_shard(self, tensors: Mapping[str, UnreadTensor], aliases: Mapping[str, str]) -> None:
        self._number += 1
        while _SHARDS.format(self._number) in self._kept:
            self._number += 1
        here = {name: target for name, target in aliases.items() if target in tensors}
        self.index |= write_file(self.folder / _SHARDS.format(self._number), tensors, here)

    def close(self) -> None:
        """Write the index, and remove old weight files."""
        save_offload_index(self.index, self.folder, even_empty=True)
        used = {Path(entry.get("safetensors_file", "")).name for entry in _read_index(self.folder).values()}
        for path in self.folder.glob("weights-[0-9][0-9][0-9][0-9][0-9].safetensors"):
            if path.name not in used:
                path.unlink()


def write_file(path: Path, tensors: Mapping[str, UnreadTensor], aliases: Mapping[str, str]) -> Index:
    """Write a safetensors file and return its index entries; a complete new file replaces an existing one."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))  # aligned, for mapping
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **aliases}}
    end = 0
    for name, tensor in ordered:
        kind, shape = stored_form(str(tensor.dtype).removeprefix("torch."), tensor.shape)
        begin, end = end, end + tensor.num_bytes
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    entries: Index = {}
    with _replacing(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in ordered:
            values = tensor.read().detach().resolve_conj().resolve_neg().to("cpu", tensor.dtype)
            assert tuple(values.shape) == tensor.shape, (name, values.shape, tensor.shape)
            file.write(bytes_of(values).numpy().data)
            entries[name] = {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "safetensors_file": str(path),
                "weight_name": name,
                "xxh3_128": checksum(values),
            }
    return entries | {name: entries[target] for name, target in aliases.items()}


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that is renamed to ``path`` when it is complete.

    The file is not synced, because weights can be offloaded again and checksums detect damage after a power failure.
    """
    aside = path.with_name(f"{path.name}.{uuid4().hex}.tmp")  # other ranks may write the same weights
    try:
        with open(aside, "wb") as file:
            yield file
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write ``state_dict`` to the folder ``save_dir``, storing tied weights once, and add it to the index there.

    Raises:
        UsageError: tensors are on the meta device.
    """
    if on_meta := [name for name, tensor in state_dict.items() if tensor.is_meta]:
        raise UsageError(
            f"{', '.join(on_meta[:5])} cannot be offloaded, because they are on the meta device and have no values",
            do="load the weights first, or pass a folder that already contains the offloaded weights",
        )
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state_dict.items():
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.data_ptr() and first.setdefault(key, name) != name:
            aliases[name] = first[key]
    folder = OffloadFolder(save_dir, state_dict)
    folder.write({name: unread(tensor) for name, tensor in state_dict.items() if name not in aliases}, aliases)
    folder.close()


def unread(tensor: torch.Tensor) -> UnreadTensor:
    """Return ``tensor`` in the form in which it is stored."""
    return UnreadTensor(dtype=tensor.dtype, shape=tuple(tensor.shape), read=lambda: tensor)


def offload_weight(
    weight: torch.Tensor,
    weight_name: str,
    offload_folder: str | os.PathLike[str],
    index: Index | None = None,
) -> Index | None:
    """Write one weight to a separate file, add its entry to ``index`` if given, and return ``index``.

    Args:
        weight_name: name in the index and of the file.
        offload_folder: an existing folder.
        index: entries by name, changed in place; ``save_offload_index`` writes them.
    """
    path = Path(offload_folder) / f"{quote(weight_name, safe='._-')}.safetensors"
    entries = write_file(path, {weight_name: unread(weight)}, {})
    if index is not None:
        index.update(entries)
    return index


def save_offload_index(
    index: Index | None, offload_folder: str | os.PathLike[str], *, even_empty: bool = False
) -> None:
    """Add ``index`` to the index file of ``offload_folder``; do nothing if ``index`` is empty, unless ``even_empty``."""
    if not index and not even_empty:
        return
    folder = Path(offload_folder)
    merged = _read_index(folder) if has_index(folder) else {}
    for name, entry in (index or {}).items():
        file = entry.get("safetensors_file")
        if file is not None and Path(file).parent.absolute() == folder.absolute():
            entry = {**entry, "safetensors_file": Path(file).name}  # so that the folder can be moved
        merged[name] = entry
    with _replacing(folder / INDEX) as file:
        file.write(json.dumps(merged, indent=1).encode())


# ---- reading ---------------------------------------------------------------------------------------------------------------


def has_index(folder: str | os.PathLike[str]) -> bool:
    """Return whether ``folder`` contains offloaded weights."""
    return (Path(folder) / INDEX).is_file()


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> torch.Tensor:
    """Return the memory-mapped weight in a file written by Accelerate (raw bytes) or by ``offload_weight``.

    Raises:
        CheckpointError: the file is missing, damaged or has the wrong size.
    """
    path = Path(weight_file)
    other = path.with_suffix(".safetensors")  # callers append .dat to the name of the weight
    if weight_info.get("safetensors_file") is not None and not path.exists():
        path = other if other.exists() else path.parent / weight_info["safetensors_file"]
    if path.suffix == ".safetensors":
        return _WeightFile(path).read({"weight_name": path.stem, **weight_info})
    dtype, shape = _dtype_of(weight_info), tuple(weight_info["shape"])
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(
            f"the offloaded weight {path} cannot be read: {error}", do="offload the weights again"
        ) from error
    if size != num_bytes:
        raise CheckpointError(
            f"expected {num_bytes} bytes in {path} for a {dtype} of shape {list(shape)}, but got {size}",
            do="offload the weights again into an empty folder",
        )
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    return torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8).view(dtype).reshape(shape)


class _WeightFile:
    """A safetensors file, or a link to one as in the Hugging Face Hub cache. Each tensor maps the file until it is freed.

    A tensor may be modified without changing the file or what is read later, because the file is opened for each.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._verified: set[tuple[str, int, int]] = set()
        self._spans: dict[str, tuple[int, int]] | None = None
        """First byte and number of bytes of each tensor, which are needed only to read ahead."""

    def read(self, entry: Mapping[str, Any]) -> torch.Tensor:
        """Return the tensor of an index entry. Its checksum is verified when it is first read.

        Raises:
            CheckpointError: the file is missing or damaged, or has no such tensor.
        """
        name = entry["weight_name"]
        try:
            with safe_open(self.path, framework="pt") as file:
                stored = (file.metadata() or {}).get(name, name)  # further names of tied weights
                if stored not in file.keys():  # noqa: SIM118 - not a dict
                    raise CheckpointError(f"{self.path} has no tensor {name}", do=_AGAIN)
                tensor: torch.Tensor = file.get_tensor(stored)
            facts = self.path.stat()
        except OSError as error:
            raise CheckpointError(f"the offloaded weights in {self.path} cannot be read: {error}", do=_AGAIN) from error
        except SafetensorError as error:
            raise CheckpointError(f"{self.path} is not a safetensors file: {error}", do=_AGAIN) from error
        if tensor.data_ptr() % tensor.itemsize:  # other writers may not align tensors
            tensor = tensor.clone()
        expected, key = entry.get("xxh3_128"), (name, facts.st_ino, facts.st_mtime_ns)
        if expected is not None and key not in self._verified:
            if checksum(tensor) != expected:
                raise CheckpointError(
                    f"{name} in {self.path} is corrupted: its checksum differs from the one that was written", do=_AGAIN
                )
            self._verified.add(key)
        if "dtype" not in entry:
            return tensor
        dtype = _dtype_of(entry)
        is_packed = dtype.is_complex or dtype.is_floating_point
        if is_packed and tensor.dtype == torch.uint8 and tensor.shape[-1:] == (dtype.itemsize,):  # stored as bytes
            return tensor.view(dtype).reshape(tensor.shape[:-1])
        return tensor.to(dtype)

    def read_ahead(self, name: str) -> None:
        """Ask the operating system to read the tensor ``name`` into its cache without waiting, if supported."""
        if not hasattr(os, "posix_fadvise"):  # not Linux
            return
        with suppress(OSError, ValueError, struct.error), open(self.path, "rb") as file:  # `read` reports damage
            if self._spans is None:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
                aliases = header.pop("__metadata__", {})
                offsets = {stored: facts["data_offsets"] for stored, facts in header.items()}
                self._spans = {stored: (8 + length + begin, end - begin) for stored, (begin, end) in offsets.items()}
                self._spans |= {alias: self._spans[of] for alias, of in aliases.items() if of in self._spans}
            if name in self._spans:
                os.posix_fadvise(file.fileno(), *self._spans[name], os.POSIX_FADV_WILLNEED)


def checksum(tensor: torch.Tensor) -> str:
    """Return the xxh3_128 of a CPU tensor's bytes."""
    return xxhash.xxh3_128_hexdigest(bytes_of(tensor.detach()).numpy().data)


class PrefixedDataset(Mapping[str, Any]):
    """A view of a mapping without a name prefix."""

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return iter([key for key in self.dataset if key.startswith(self.prefix)])

    def __len__(self) -> int:
        return len(self.dataset)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Weights by name, in memory or in a folder. Weights on disk are memory-mapped when they are read.

    Args:
        state_dict: weights in memory, which take precedence.
        index: entries by name. None: the index in ``save_folder``. An entry may refer to a file written by another
            library.
        device: device for weights from safetensors files. None: the CPU.

    Raises:
        UsageError: no state dict, folder or index was given.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Any] | None = None,
        device: Any = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise UsageError("OffloadedWeightsLoader() has no weights", do="pass state_dict=, save_folder= or index=")
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        if index is None and save_folder is not None:
            index = {name: _located(entry, Path(save_folder)) for name, entry in _read_index(Path(save_folder)).items()}
        self.index: Mapping[str, Any] = {} if index is None else index
        self.all_keys = list(dict.fromkeys([*self.state_dict, *self.index]))
        self.device = device
        self._files: dict[str, _WeightFile] = {}

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        entry = self.index[key]
        if entry.get("safetensors_file") is None:
            return load_offloaded_weight(Path(self.save_folder or "") / f"{key}.dat", entry)
        tensor = self._file(entry).read({"weight_name": key, **entry})
        return tensor if self.device is None else tensor.to(self.device)

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)

    def read_ahead(self, key: str) -> None:
        """Ask the operating system to read the weight ``key`` from disk without waiting."""
        entry = None if key in self.state_dict else self.index.get(key)
        if entry is not None and entry.get("safetensors_file") is not None:
            self._file(entry).read_ahead(entry.get("weight_name", key))

    def _file(self, entry: Mapping[str, Any]) -> _WeightFile:
        path = str(entry["safetensors_file"])
        if self.save_folder is not None and path == Path(path).name:  # as the index file lists them
            path = str(Path(self.save_folder) / path)
        if path not in self._files:
            self._files[path] = _WeightFile(path)
        return self._files[path]


def holder_of(weights: Mapping[str, Any], key: str) -> tuple[Mapping[str, Any], str]:
    """Return the underlying mapping in which ``weights`` looks up ``key``, and the name used there."""
    while isinstance(weights, PrefixedDataset):
        key = f"{weights.prefix}{key}"
        weights = weights.dataset
    return weights, key


def is_on_disk(weights: Mapping[str, Any], key: str) -> bool:
    """Return whether the weight ``key`` is read from disk each time."""
    holder, name = holder_of(weights, key)
    return isinstance(holder, OffloadedWeightsLoader) and name not in holder.state_dict


def read_ahead(weights: Mapping[str, Any], key: str) -> None:
    """Ask the operating system to read the weight ``key`` without waiting, if it is on disk."""
    holder, name = holder_of(weights, key)
    if isinstance(holder, OffloadedWeightsLoader):
        holder.read_ahead(name)


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Return the entries of ``state_dict`` that match or are below one of ``submodule_names``."""
    return {
        name: tensor
        for part in submodule_names
        for name, tensor in state_dict.items()
        if not part or name == part or name.startswith(f"{part}.")
    }


def _read_index(folder: Path) -> Index:
    path = folder / INDEX
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not an index of offloaded weights: {error}",
            do="pass a folder of offloaded weights, or delete this file and offload the weights again",
        ) from error
    if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
        raise CheckpointError(f"{path} is not an index of offloaded weights", do="pass a folder of offloaded weights")
    return found


def _located(entry: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return ``entry`` with its file's full path."""
    file = entry.get("safetensors_file")
    return dict(entry) if file is None else {**entry, "safetensors_file": str(folder / file)}


def _dtype_of(entry: Mapping[str, Any]) -> torch.dtype:
    found = getattr(torch, str(entry["dtype"]), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"the index contains an unknown dtype: {entry['dtype']!r}", do="use a newer torch")
    return found
