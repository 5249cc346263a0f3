"""Reads a file's tensors as views of memory-mapped pages, which are released with the last tensor that uses them."""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import torch
import xxhash

from echelon.base.errors import CheckpointError
from echelon.checkpoint.storage import LocalStorage
from echelon.checkpoint.tensor_file import Stored, read_header, torch_dtype
from echelon.distributed.small_messages import bytes_of

__all__ = ["MappedFile", "checksum", "map_tensor"]

_AGAIN = "restore the file from a copy, or offload the weights again into an empty folder"


class MappedFile:
    """A safetensors file. Each read maps only one tensor's pages, so reading a model needs memory for only one tensor.

    Args:
        path: the file, or a link to it, as in the Hugging Face Hub cache.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._identity: tuple[int, ...] = ()
        self._header: dict[str, Stored] = {}
        self._aliases: dict[str, str] = {}
        self._verified: set[str] = set()

    def read(
        self, name: str, *, dtype: torch.dtype | None = None, checksum_of_bytes: str | None = None
    ) -> torch.Tensor:
        """Return the tensor ``name``; modifying it does not change the file.

        Args:
            name: name in the file, or an alias for a tied weight.
            dtype: dtype of a tensor that is stored as bytes because safetensors does not support its dtype.
            checksum_of_bytes: expected xxh3_128, verified when the tensor is first read.

        Raises:
            CheckpointError: the file is missing or damaged, or has no such tensor.
        """
        handle = self._open()
        try:
            self._load_header(handle)
            stored = self._header.get(self._aliases.get(name, name))
            if stored is None:
                raise CheckpointError(f"{self.path} has no tensor {name}", do=_AGAIN)
            kind = torch_dtype(stored.dtype)
            tensor = map_tensor(handle, stored.begin, kind, stored.shape)
        finally:
            os.close(handle)
        if checksum_of_bytes is not None and name not in self._verified:
            if checksum(tensor) != checksum_of_bytes:
                raise CheckpointError(
                    (f"{name} in {self.path} is corrupted: its checksum differs from the one that was written"),
                    do=_AGAIN,
                )
            self._verified.add(name)
        if dtype is not None and kind == torch.uint8 and stored.shape[-1:] == (dtype.itemsize,):
            is_packed = dtype.is_complex or dtype.is_floating_point
            return tensor.view(dtype).reshape(stored.shape[:-1]) if is_packed else tensor
        return tensor

    def read_ahead(self, name: str) -> None:
        """Ask the operating system to read the tensor ``name`` into its cache without waiting, if supported."""
        if not hasattr(os, "posix_fadvise"):  # not Linux
            return
        handle = self._open()
        try:
            self._load_header(handle)
            stored = self._header.get(self._aliases.get(name, name))
            if stored is not None:
                num_bytes = math.prod(stored.shape) * torch_dtype(stored.dtype).itemsize
                os.posix_fadvise(handle, stored.begin, num_bytes, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(handle)

    def _open(self) -> int:
        try:
            return LocalStorage().open(Path(os.path.realpath(self.path)))
        except OSError as error:
            raise CheckpointError(f"the offloaded weights in {self.path} cannot be read: {error}", do=_AGAIN) from error

    def _load_header(self, handle: int) -> None:
        """Read the header, or read it again if the file was replaced."""
        facts = os.fstat(handle)
        identity = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)
        if identity == self._identity:
            return
        try:
            self._header = read_header(LocalStorage(), handle, source=str(self.path))
        except CheckpointError as error:
            raise CheckpointError(error.what, where=error.where, do=_AGAIN) from error
        (length,) = struct.unpack("<Q", os.pread(handle, 8, 0))
        metadata: Any = json.loads(os.pread(handle, length, 8)).get("__metadata__", {})
        self._aliases = {name: target for name, target in metadata.items() if target in self._header}
        self._identity, self._verified = identity, set()


def map_tensor(handle: int, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor at byte offset ``begin`` in an open file. It stays valid after the file is closed or removed."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    floor = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    # A private mapping may be written, as torch.frombuffer requires; the file does not change.
    pages = mmap.mmap(handle, begin - floor + num_bytes, access=mmap.ACCESS_COPY, offset=floor)
    values = torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes, offset=begin - floor)
    if (begin - floor) % dtype.itemsize:  # other writers may not align tensors
        values = values.clone()
    return values.view(dtype).reshape(shape)


def checksum(tensor: torch.Tensor) -> str:
    """Return the xxh3_128 of a CPU tensor's bytes."""
    return xxhash.xxh3_128_hexdigest(bytes_of(tensor.detach()).numpy().data)
