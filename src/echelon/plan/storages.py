"""Follows the memory of a step: when each tensor's storage is made and freed, and what it is for."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from echelon.plan.facts import Moment, Phase

_BLOCK = 512  # CUDA's caching allocator rounds each allocation up to this


def rounded(num_bytes: int) -> int:
    """Return the bytes that CUDA's caching allocator takes for a tensor of ``num_bytes``."""
    return -(-num_bytes // _BLOCK) * _BLOCK


@dataclass(slots=True)
class Operator:
    """One operator that ran, and the memory inside its kernel."""

    phase: Phase
    unit: str
    line: str
    inside: int = 0


@dataclass(slots=True)
class Storage:
    """The memory of a tensor and of its views."""

    num_bytes: int
    made: int  # number of the operator that made it
    freed: int | None = None  # number of the first operator that ran without it
    kind: str = "temporaries"  # a field of Moment, or "" for what is not counted
    away_from: int | None = None  # number of the operator after which it is in host memory
    away_until: int | None = None  # number of the first operator for which it is back


class StorageLedger:
    """The operators of a step and the storages that they made. Views and in-place operators make none."""

    def __init__(self, outside: Iterable[torch.Tensor]) -> None:
        self.operators: list[Operator] = []
        self._living: dict[int, tuple[weakref.ref[torch.UntypedStorage], Storage]] = {}
        self.storages: list[Storage] = []
        self._away: dict[int, list[tuple[Storage, Storage]]] = {}
        for tensor in outside:
            self.exclude(tensor)

    def exclude(self, tensor: torch.Tensor) -> None:
        """Do not count the storage of ``tensor``, such as that of a parameter."""
        self._follow(tensor).kind = ""

    def record(self, operator: Operator, outputs: Iterable[torch.Tensor], *, kind: str = "temporaries") -> None:
        """Add an operator that has just run; the new storages among ``outputs`` are of ``kind``."""
        self.operators.append(operator)
        for tensor in outputs:
            if tensor.layout == torch.strided and id(tensor.untyped_storage()) not in self._living:
                self._follow(tensor).kind = kind

    def end_forward(self) -> None:
        """Note that the storages that are alive are what the backward pass reads."""
        for _reference, storage in self._living.values():
            if storage.kind == "temporaries":
                storage.kind = "activations"

    def name(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Say what storages are, from when they were made: ``"gradients"``, or ``""`` for optimizer states."""
        for tensor in tensors:
            if tensor.layout == torch.strided:
                self._follow(tensor).kind = kind

    def _follow(self, tensor: torch.Tensor) -> Storage:
        # Python keeps one object for a storage as long as the storage exists.
        memory = tensor.untyped_storage()
        key = id(memory)
        if key in self._living:
            return self._living[key][1]
        storage = Storage(rounded(memory.nbytes()), len(self.operators) - 1)

        def free(_reference: object) -> None:
            storage.freed = len(self.operators)
            self._living.pop(key, None)

        self._living[key] = weakref.ref(memory, free), storage
        self.storages.append(storage)
        return storage

    def move_away(self, block: object, tensors: Iterable[torch.Tensor]) -> None:
        """Note that ``block``, which has just run, keeps these tensors in host memory until its backward pass."""
        for tensor in tensors:
            storage = self._follow(tensor)
            if storage.kind:
                storage.away_from = len(self.operators) - 1
                copy = Storage(storage.num_bytes, len(self.operators) - 1, kind="offloaded")
                self.storages.append(copy)
                self._away.setdefault(id(block), []).append((storage, copy))

    def bring_back(self, block: object) -> None:
        """Note that the backward pass of ``block`` begins."""
        for storage, copy in self._away.pop(id(block), ()):
            storage.away_until = copy.freed = len(self.operators)


def moments_of(operators: Sequence[Operator], storages: Iterable[Storage]) -> Iterator[Moment]:
    """Yield the live bytes while each operator ran."""
    count = len(operators)
    changes: list[dict[str, int]] = [{} for _ in range(count + 1)]
    for one in storages:
        if one.kind and one.num_bytes:
            for at, sign in _times(one, count):
                changes[at][one.kind] = changes[at].get(one.kind, 0) + sign * one.num_bytes
    now = dict.fromkeys(("activations", "temporaries", "gradients", "offloaded", "weight_copies"), 0)
    for operator, change in zip(operators, changes, strict=False):
        for kind, num_bytes in change.items():
            now[kind] += num_bytes
        yield Moment(
            phase=operator.phase,
            unit=operator.unit,
            line=operator.line,
            activations=now["activations"],
            temporaries=now["temporaries"] + operator.inside,
            gradients=now["gradients"],
            offloaded=now["offloaded"],
            weight_copies=now["weight_copies"],
        )


def _times(storage: Storage, count: int) -> Iterator[tuple[int, int]]:
    """Yield when a storage comes (1) to the memory that holds it, and when it goes (-1), as numbers of operators."""
    end = count if storage.freed is None else storage.freed
    yield max(storage.made, 0), 1
    if storage.away_from is not None and storage.away_until is not None and storage.away_until <= end:
        yield storage.away_from + 1, -1
        yield storage.away_until, 1
    yield end, -1
