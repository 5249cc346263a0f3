"""Records which samples a training forward pass used: the batches that the script's loop received, or else the model's inputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import numpy as np
import torch
import xxhash
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from echelon.data.whole_batches import already_collated
from echelon.distributed.tree import leaves
from echelon.verify.recorders.sample_rows import SampleRows, item_lengths, num_rows, rows_of
from echelon.verify.recorders.user_code import line_of_batch
from echelon.verify.recording import Recording
from echelon.verify.trace import Batch

# Of accelerate: loaders that are no subclasses of DataLoader.
_OTHER_LOADERS = ("DataLoaderShard", "DataLoaderDispatcher", "MpDeviceLoaderWrapper", "SkipDataLoader")
_MAX_HELD = 4096
"""Batches that are kept until a forward pass uses them; skipped batches stay until then."""


class Batches:
    """Recognizes each batch of a loader when a training forward pass uses it.

    Only the outermost loader counts: accelerate's and echelon's loaders read one batch ahead from the loader inside them.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._patched: set[type] = set()
        self._held: list[_Batch] = []
        self._used: list[_Batch] = []
        """Batches of the latest training forward pass that used a new one."""
        self._place_of_used: tuple[int, int] | None = None
        self._num_used_rows = 0
        self._is_looped_over: bool | None = None
        """Whether the script trains on batches of loaders; None before the first training forward pass."""
        self._inputs: Any = None
        self._rows: SampleRows | None = None
        self.transform: Callable[[Any], Any] = lambda batch: batch
        """What the script receives in place of each batch."""
        self.while_reading: Callable[[], AbstractContextManager[None]] = nullcontext
        """Each batch is read inside it."""
        self._nested = threading.local()
        self._num_iterators = 0
        self._lengths: dict[bytes, np.ndarray] = {}
        """Lengths of the items of the batches that the script's collate function has returned lately, by the content of a batch's integer
        tensors: accelerate copies batches to ``cpu:0``, so their storages are others."""
        self._thread = threading.get_ident()
        for name in _OTHER_LOADERS:
            recording.wrap_when_imported("accelerate.data_loader", name, "__iter__", self._iterate)
        self._patch_loaders()
        recording.wrap(DataLoader, "__init__", self._construct)
        recording.patch(DataLoader, "__init_subclass__", classmethod(self._init_subclass))
        recording.wrap(_MapDatasetFetcher, "__init__", self._init_fetcher)
        recording.input_transforms.append(self._before_forward)

    @property
    def rows(self) -> SampleRows | None:
        """The samples of the training forward pass that is running; None if its inputs have no samples along dimension 0."""
        if self._rows is None and self._inputs is not None:
            self._rows, self._inputs = rows_of(self._inputs), None
        return self._rows

    def _patch_loaders(self) -> None:
        self._recording.wrap_imported()
        kinds: list[type] = [DataLoader]
        while kinds:
            kind = kinds.pop()
            self._patch(kind)
            kinds += kind.__subclasses__()

    def _patch(self, kind: type) -> None:
        if "__iter__" in vars(kind) and kind not in self._patched:
            self._patched.add(kind)
            self._recording.wrap(kind, "__iter__", self._iterate)

    def _iterate(self, begin: Callable[..., Any], loader: Any) -> Any:
        self._patch_loaders()
        iterator = begin(loader)
        if threading.get_ident() != self._thread:
            return iterator
        self._num_iterators += 1
        return _Iterator(iterator, self, self._num_iterators)

    def _construct(self, construct: Callable[..., None], loader: Any, *args: Any, **kwargs: Any) -> None:
        self._patch_loaders()
        construct(loader, *args, **kwargs)

    def _init_subclass(self, kind: Any, /, **kwargs: Any) -> None:
        super(DataLoader, kind).__init_subclass__(**kwargs)  # type: ignore[misc]
        self._patch(kind)

    def _init_fetcher(self, construct: Callable[..., None], fetcher: Any, *args: Any, **kwargs: Any) -> None:
        construct(fetcher, *args, **kwargs)
        # A worker process cannot tell. default_collate neither pads nor cuts: a row that ends in a repeated token is not padded.
        if fetcher.auto_collation and get_worker_info() is None:
            fetcher.collate_fn = self._noting_items(fetcher.collate_fn)

    def next_of(self, iterator: _Iterator) -> Any:
        """Return the next batch of ``iterator``, and hold it until a forward pass uses it."""
        depth = getattr(self._nested, "depth", 0)
        if depth:
            return next(iterator.inner)
        self._nested.depth = 1
        try:
            with self.while_reading():
                batch = next(iterator.inner)
        finally:
            self._nested.depth = 0
        rows = rows_of(batch, self._lengths_of_items(batch)) if torch.is_grad_enabled() else None
        batch = self.transform(batch)
        if rows is not None:
            self._hold(batch, rows, iterator)
        return batch

    def _noting_items(self, collate: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Return ``collate``, which notes the lengths of the items that it is given."""

        def noting(items: list[Any]) -> Any:
            batch = collate(items)
            lengths = item_lengths(list(zip(*items)) if collate is already_collated else items)
            if lengths is not None:
                self._lengths |= dict.fromkeys(_contents(batch), lengths)
                while len(self._lengths) > _MAX_HELD:
                    del self._lengths[next(iter(self._lengths))]
            return batch

        return noting

    def _lengths_of_items(self, batch: Any) -> np.ndarray | None:
        """Return the lengths of the items from which ``batch`` was collated, or None if that is not known."""
        if not self._lengths:
            return None
        return next((self._lengths[one] for one in _contents(batch) if one in self._lengths), None)

    def _hold(self, batch: Any, rows: SampleRows, iterator: _Iterator) -> None:
        storages = {_key(leaf): _reference(leaf) for leaf in leaves(batch) if _has_storage(leaf)}
        self._held = self._held[-_MAX_HELD:]
        self._held.append(
            _Batch(iterator=ref(iterator), index=iterator.index, rows=rows, storages=storages, line=line_of_batch())
        )

    def _before_forward(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Record the batches of a forward pass; return the arguments unchanged."""
        recording = self._recording
        inputs = {"args": args, **kwargs}
        storages = {_key(leaf) for leaf in leaves(inputs) if _has_storage(leaf)}
        if not (root.training and torch.is_grad_enabled()):
            for one in self._found(storages) or self._held[-1:]:
                one.is_evaluated = True
            return args, kwargs
        place = (recording.update, recording.micro_step)
        if self._is_looped_over is None:
            self._is_looped_over = bool(self._held)
        if not self._is_looped_over:
            rows = rows_of(inputs)
            self._rows, self._inputs = rows, None
            if rows is not None:
                self._record(rows, "inputs", line_of_batch())
            return args, kwargs
        found = self._found(storages)
        if not found and self._place_of_used != place and not any(one.holds(storages) for one in self._used):
            found = self._oldest()
        if found:
            self._use(found, place)
        self._choose_rows(inputs)
        return args, kwargs

    def _found(self, storages: set[int]) -> list[_Batch]:
        return [one for one in self._held if one.holds(storages)]

    def _oldest(self) -> list[_Batch]:
        """Return the batches that a forward pass probably uses whose inputs were computed from them: one of each loader."""
        held = [one for one in self._held if not one.is_evaluated] or self._held
        alive = [one for one in held if one.is_alive()] or held[-1:]
        # A batch of an iterator that does not exist anymore was looked at before the loop.
        alive = [one for one in alive if one.iterator() is not None] or alive
        first: dict[int, _Batch] = {}
        for one in alive:
            first.setdefault(one.index, one)
        return list(first.values())

    def _use(self, found: list[_Batch], place: tuple[int, int]) -> None:
        for one in found:
            self._record(one.rows, "loader", one.line)
        self._held = [one for one in self._held if one not in found]
        self._used = found if self._place_of_used != place else self._used + found
        self._place_of_used = place
        self._num_used_rows = 0

    def _record(self, rows: SampleRows, source: Any, line: str) -> None:
        self._recording.add(
            Batch(
                update=self._recording.update,
                micro_step=self._recording.micro_step,
                source=source,
                rows=rows.rows,
                num_items=rows.num_items,
                line=line,
            )
        )

    def _choose_rows(self, inputs: Any) -> None:
        """Find the samples among the inputs of the model: those of a batch, the next part of one, or else what the inputs contain."""
        self._rows, self._inputs = None, None
        count = num_rows(inputs)
        if count is None:
            return
        for each in [one.rows for one in reversed(self._used)] + [_together([one.rows for one in self._used])]:
            if len(each.rows) == count:
                self._rows = each
                return
        start, rows = self._num_used_rows, self._used[-1].rows if self._used else None
        if rows is not None and start + count <= len(rows.rows):
            self._rows, self._num_used_rows = rows.part(start, start + count), start + count
            return
        self._inputs = inputs


@dataclass(slots=True, kw_only=True, eq=False)
class _Batch:
    """A batch that the script has received."""

    iterator: ref[_Iterator]
    index: int
    """Index of the iterator."""
    rows: SampleRows
    storages: dict[int, Callable[[], bool]]
    """The storages of its tensors; the function tells whether one does not exist anymore."""
    line: str
    is_evaluated: bool = False

    def is_alive(self) -> bool:
        """Whether the script still has a tensor of the batch, or a view of one."""
        return not self.storages or not all(is_gone() for is_gone in self.storages.values())

    def holds(self, storages: set[int]) -> bool:
        """Whether one of ``storages`` belongs to the batch."""
        return any(key in storages and not is_gone() for key, is_gone in self.storages.items())


class _Iterator:
    """The iterator that a patched loader returns."""

    def __init__(self, inner: Iterator[Any], batches: Batches, index: int) -> None:
        self.inner = inner
        self.index = index
        self._batches = batches

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> Any:
        return self._batches.next_of(self)

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _together(parts: list[SampleRows]) -> SampleRows:
    if not parts:
        return SampleRows(rows=[], keys=np.zeros(0, dtype=np.uint64), lengths={})
    return replace(
        parts[0],
        rows=[row for part in parts for row in part.rows],
        keys=np.concatenate([part.keys for part in parts]),
        lengths={},
        num_items=None,
    )


def _has_storage(leaf: Any) -> bool:
    return (
        isinstance(leaf, torch.Tensor) and type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout is torch.strided
    )


def _contents(batch: Any) -> list[bytes]:
    """Return a hash of each integer tensor of ``batch``."""
    found = [one for one in leaves(batch) if _has_storage(one) and one.dim() > 0 and not one.is_floating_point()]
    return [
        xxhash.xxh3_64_digest(one.detach().cpu().contiguous().numpy()) + repr(tuple(one.shape)).encode()
        for one in found
        if not one.is_complex()
    ]


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _reference(tensor: torch.Tensor) -> Callable[[], bool]:
    expired: Callable[[], bool] = StorageWeakRef(tensor.untyped_storage()).expired  # type: ignore[no-untyped-call]
    return expired
