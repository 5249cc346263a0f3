"""Reads the files of torch.distributed.checkpoint (DCP) without running code: ``.metadata``, and the entries of ``.distcp`` files.

All of them are pickles. The unpicklers of this module know only the names that DCP itself writes, and replace each of them with a
record or a function of this module; any other name is refused. No class or function of torch is called while a pickle is read.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from echelon.base.errors import CheckpointError
from echelon.base.messages.translation import gettext as _
from echelon.checkpoint import storage
from echelon.checkpoint.damage import damaged
from echelon.checkpoint.manifest import MAX_MANIFEST_BYTES, is_inside
from echelon.checkpoint.read import ChunkPlace
from echelon.checkpoint.regions import ChunkBounds
from echelon.checkpoint.tensor_file import itemsize, require_dtype

METADATA = ".metadata"

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
# Where the classes of the index are, in the versions of torch that wrote it.
_RECORDS: Mapping[tuple[str, str], str] = {
    **{
        (_METADATA_MODULE, name): name
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): "_StorageInfo",
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): "TensorProperties",
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): "_MEM_FORMAT_ENCODING",
    **{
        (module, name): "path"  # the folder to which the checkpoint was saved, which is not used
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}
_STORAGES: Mapping[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}
_MAX_PICKLE_BYTES = 1 << 28
_LOCAL_HEADER = struct.Struct("<4s22xHH")


@dataclass(frozen=True, slots=True)
class Entry:
    """Where an entry is: a file written by ``torch.save`` inside the file ``path``."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpTensor:
    """A tensor in an index, with the place of each of its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: Mapping[ChunkBounds, Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpIndex:
    """The content of a ``.metadata`` file."""

    tensors: Mapping[str, DcpTensor]
    objects: Mapping[str, Entry]
    """Entries that are not tensors."""
    paths: Mapping[str, tuple[str | int, ...]]
    """Where each entry was in the nested state dict that was saved: ``("model", "0.weight")`` for ``model.0.weight``."""

    def problems(self) -> list[str]:
        """Return a description of each file that is missing or truncated. There are no checksums."""
        ends: dict[Path, int] = {}
        chunks = (entry for tensor in self.tensors.values() for entry in tensor.chunks.values())
        for entry in (*chunks, *self.objects.values()):
            ends[entry.path] = max(ends.get(entry.path, 0), entry.offset + entry.length)
        return [problem for path, end in ends.items() if (problem := _problem_of(path, end))]


def _problem_of(path: Path, num_bytes: int) -> str | None:
    try:
        with storage.opened(path) as handle:
            size = storage.size(handle)
    except OSError as error:
        return f"{path} cannot be read: {error}"
    return f"{path} is truncated: it has {size:,} of {num_bytes:,} bytes" if size < num_bytes else None


# ---- the index -------------------------------------------------------------------------------------------------------


class _Record:
    """Stands for an object of one of the classes in the index. Holds what was pickled."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> _Record:
        self = object.__new__(cls)
        self.args, self.state = args, None
        return self

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _IndexUnpickler(pickle.Unpickler):
    def __init__(self, text: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(text))
        self._path = path
        # New classes and functions for each file, because a pickle can set attributes of what it names.
        self.kinds: dict[str, type[_Record]] = {name: type(name, (_Record,), {}) for name in set(_RECORDS.values())}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return self.kinds[_RECORDS[module, name]]
        if (module, name) == ("torch", "Size"):
            return lambda sizes: tuple(sizes)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda layout: layout
        if module == "torch" and (dtype := _dtype_called(name)) is not None:
            return dtype
        raise _refused(self._path, module, name)


def read_index(folder: Path) -> DcpIndex:
    """Read the ``.metadata`` file of ``folder``.

    Raises:
        CheckpointError: the file is damaged, inconsistent, or names anything that DCP's own index does not need.
    """
    path = folder / METADATA
    with _reading(path):
        unpickler = _IndexUnpickler(storage.read_file(path, max_bytes=MAX_MANIFEST_BYTES), path)
        return _Parser(folder, unpickler.kinds).index(unpickler.load())


class _Parser:
    """Checks the records of an index. Everything in it comes from the file and may be wrong."""

    def __init__(self, folder: Path, kinds: Mapping[str, type[_Record]]) -> None:
        self._folder, self._kinds = folder, kinds

    def index(self, record: Any) -> DcpIndex:
        fields = self._fields(record, "Metadata")
        entries: dict[str, dict[tuple[int, ...] | None, Entry]] = {}
        for key, place in _mapping(fields["storage_data"]).items():
            where = self._fields(key, "MetadataIndex")
            offset = where.get("offset")
            entry = self._entry(self._fields(place, "_StorageInfo"))
            entries.setdefault(_text(where["fqn"]), {})[None if offset is None else _sizes(offset)] = entry
        tensors, objects = {}, {}
        for name, one in _mapping(fields["state_dict_metadata"]).items():
            if isinstance(one, self._kinds["BytesStorageMetadata"]):
                objects[_text(name)] = entries[name][None]
            else:
                tensors[_text(name)] = self._tensor(self._fields(one, "TensorStorageMetadata"), entries[name])
        paths = fields.get("planner_data") or {}
        return DcpIndex(
            tensors=tensors, objects=objects, paths={_text(k): _path(p) for k, p in _mapping(paths).items()}
        )

    def _tensor(self, fields: Mapping[str, Any], entries: Mapping[tuple[int, ...] | None, Entry]) -> DcpTensor:
        properties, shape = fields["properties"], _sizes(fields["size"])
        dtype = properties.state[0] if isinstance(properties, self._kinds["TensorProperties"]) else None
        itemsize(_text(dtype))
        chunks = {}
        for chunk in fields["chunks"]:
            own = self._fields(chunk, "ChunkStorageMetadata")
            box = ChunkBounds(_sizes(own["offsets"]), _sizes(own["sizes"]))
            if len(box.offset) != len(shape) or len(box.lengths) != len(shape):
                raise ValueError(f"a chunk of size {box.lengths} in a tensor of shape {shape}")
            if box.volume:  # a rank without a part of the tensor writes an empty one
                chunks[box] = entries[box.offset]
        return DcpTensor(dtype=_text(dtype), shape=shape, chunks=chunks)

    def _entry(self, fields: Mapping[str, Any]) -> Entry:
        name = _text(fields["relative_path"])
        if not is_inside(name) or "/" in name:
            raise ValueError(f"the file name {name!r}")
        if fields.get("transform_descriptors"):
            transforms = ", ".join(map(str, fields["transform_descriptors"]))
            raise CheckpointError(
                _("{path} is compressed or encrypted ({transforms})", path=self._folder / name, transforms=transforms),
                do=_("load it with torch.distributed.checkpoint, and save it again without extensions"),
            )
        offset, length = _sizes([fields["offset"], fields["length"]])
        return Entry(self._folder / name, offset, length)

    def _fields(self, record: Any, kind: str) -> Mapping[str, Any]:
        if not isinstance(record, self._kinds[kind]):
            raise TypeError(f"expected {kind}, got {type(record).__name__}")
        return _mapping(record.state)


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected a dict, got {type(value).__name__}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {type(value).__name__}")
    return value


def _path(value: Any) -> tuple[str | int, ...]:
    if not isinstance(value, tuple) or not all(type(step) in (str, int) for step in value):
        raise TypeError(f"expected the path of an entry, got {str(value)[:40]}")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or len(value) > 64:
        raise TypeError(f"expected sizes, got {str(value)[:40]}")
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in value):
        raise ValueError(f"the sizes {str(value)[:40]}")
    return tuple(value)


# ---- entries ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    key: str
    num_elements: int


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor in a ``torch.save`` file."""

    storage: _Storage
    dtype: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """How many elements of the storage the tensor spans, from ``offset`` on."""
        return 1 + sum((n - 1) * step for n, step in zip(self.size, self.stride)) if 0 not in self.size else 0


class _EntryUnpickler(pickle.Unpickler):
    """Reads plain data. ``build`` makes each tensor."""

    def __init__(self, text: bytes, path: Path, build: Callable[[_View], Any]) -> None:
        super().__init__(io.BytesIO(text))
        self._path, self._build = path, build

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _location, num_elements = pid
        if kind != "storage":
            raise ValueError(f"it refers to a {kind!r}")
        return _Storage(_text(dtype), _text(key), _sizes([num_elements])[0])

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and (dtype := _dtype_called(name)) is not None:
            return require_dtype(dtype)
        known: dict[tuple[str, str], Any] = {
            ("torch._utils", "_rebuild_tensor_v2"): lambda storage, *args: self._tensor(storage, args, storage.dtype),
            ("torch._utils", "_rebuild_tensor_v3"): lambda storage, *args: self._tensor(
                storage, args, str(args[5]).removeprefix("torch.")
            ),
            ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
            ("torch", "Size"): lambda sizes: torch.Size(_sizes(sizes)),
            ("torch", "device"): lambda *names: torch.device(*names),
            ("collections", "OrderedDict"): OrderedDict,
            ("collections", "Counter"): lambda counts: Counter(_mapping(counts)),
            ("builtins", "set"): set,
            ("_codecs", "encode"): lambda text, _encoding: _text(text).encode("latin1"),
        }
        known[("__builtin__", "set")] = known[("builtins", "set")]
        if (module, name) not in known:
            raise _refused(self._path, module, name)
        return known[module, name]

    def _tensor(self, source: Any, args: Sequence[Any], dtype: str) -> Any:
        offset, size, stride = args[:3]
        view = _View(source, dtype, _sizes([offset])[0], _sizes(size), _sizes(stride))
        held = source.num_elements * itemsize(source.dtype)
        if len(view.size) != len(view.stride) or (view.offset + view.num_elements) * itemsize(dtype) > held:
            raise ValueError(f"a tensor of size {view.size} with strides {view.stride} exceeds its {held} bytes")
        return self._build(view)


def place_of_tensor(entry: Entry, *, dtype: str, shape: Sequence[int]) -> ChunkPlace:
    """Return where the values of the tensor in ``entry`` are.

    Raises:
        CheckpointError: the file is damaged, contains code, or holds another tensor.
    """
    with _reading(entry.path), _opened(entry) as archive:
        view = archive.load(lambda view: view)
        if not isinstance(view, _View) or (view.dtype, view.size) != (dtype, tuple(shape)):
            raise ValueError(f"byte {entry.offset} does not begin a {dtype} tensor of shape {list(shape)}")
        begin = archive.begin_of(view.storage) + view.offset * itemsize(dtype)
        is_row_major = view.stride == torch.empty(view.size, device="meta").stride()
        return ChunkPlace(entry.path, begin, None if is_row_major else view.stride)


def read_object(entry: Entry) -> Any:
    """Return the plain data in ``entry``, with its tensors.

    Raises:
        CheckpointError: the file is damaged, or contains anything but plain data.
    """
    with _reading(entry.path), _opened(entry) as archive:

        def build(view: _View) -> torch.Tensor:
            dtype = require_dtype(view.dtype)
            data = bytearray(archive.read(f"data/{view.storage.key}"))
            if not view.num_elements:
                return torch.empty(view.size, dtype=dtype)
            return torch.frombuffer(data, dtype=dtype).as_strided(view.size, view.stride, view.offset)

        return archive.load(build)


class _Archive:
    """A file written by ``torch.save``: an uncompressed zip file."""

    def __init__(self, archive: zipfile.ZipFile, handle: int, entry: Entry) -> None:
        self._archive, self._handle, self._entry = archive, handle, entry
        names = [name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(names) != 1:
            raise ValueError(f"byte {entry.offset} does not begin a file written by torch.save")
        self._folder = names[0].removesuffix("data.pkl")

    def load(self, build: Callable[[_View], Any]) -> Any:
        """Return the object in the file. ``build`` makes each tensor."""
        order = f"{self._folder}byteorder"
        if order in self._archive.namelist() and self._archive.read(order) != b"little":
            raise ValueError("it was written on a big-endian machine")
        return _EntryUnpickler(self.read("data.pkl"), self._entry.path, build).load()

    def read(self, name: str) -> bytes:
        """Return a file of the archive."""
        info = self._info(name)
        if info.file_size > (_MAX_PICKLE_BYTES if name == "data.pkl" else self._entry.length):
            raise ValueError(f"{name} has {info.file_size} bytes")
        return self._archive.read(info)

    def begin_of(self, kept: _Storage) -> int:
        """Return the position of a storage in the file on disk."""
        info = self._info(f"data/{kept.key}")
        header = bytearray(_LOCAL_HEADER.size)
        storage.read(self._handle, self._entry.offset + info.header_offset, memoryview(header))
        magic, len_name, len_extra = _LOCAL_HEADER.unpack(header)
        begin: int = info.header_offset + len(header) + len_name + len_extra
        num_bytes = kept.num_elements * itemsize(kept.dtype)
        if magic != b"PK\3\4" or info.file_size < num_bytes or begin + num_bytes > self._entry.length:
            raise ValueError(f"the storage {kept.key} exceeds its entry")
        return self._entry.offset + begin

    def _info(self, name: str) -> zipfile.ZipInfo:
        info = self._archive.getinfo(f"{self._folder}{name}")
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{info.filename} is compressed")
        return info


class _Slice(io.RawIOBase):
    """The bytes of an entry, as a file."""

    def __init__(self, handle: int, entry: Entry) -> None:
        self._handle, self._entry, self._position = handle, entry, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._entry.length}[whence]
        if base + offset < 0:
            raise OSError("the position is negative")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        part = memoryview(buffer)[: max(0, self._entry.length - self._position)]
        if part:
            storage.read(self._handle, self._entry.offset + self._position, part)
        self._position += len(part)
        return len(part)


@contextmanager
def _opened(entry: Entry) -> Iterator[_Archive]:
    with storage.opened(entry.path) as handle:
        assert isinstance(handle, int)  # a local file
        if entry.offset + entry.length > storage.size(handle):
            raise ValueError("the file is truncated")
        with zipfile.ZipFile(io.BufferedReader(_Slice(handle, entry))) as archive:
            yield _Archive(archive, handle, entry)


# ---- both ------------------------------------------------------------------------------------------------------------


def _dtype_called(name: str) -> str | None:
    """Return ``name`` if it is the name of a dtype."""
    return name if isinstance(getattr(torch, name, None), torch.dtype) else None


def _refused(path: Path, module: str, name: str) -> CheckpointError:
    return CheckpointError(
        _(
            "{path} was not loaded, because unpickling can run code, and it contains {name}, which is neither a tensor nor plain data",
            path=path,
            name=f"{module}.{name}",
        ),
        do=_("do not load it unless you know who wrote it; the entry can be left out when the checkpoint is saved"),
    )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise anything that goes wrong inside the block as a ``CheckpointError``."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # an invalid pickle or zip file can cause any of many errors
        raise damaged(f"{path} cannot be read: {type(error).__name__} {error}") from error
