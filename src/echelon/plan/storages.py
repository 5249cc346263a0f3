"""Follows the memory of a step: when each tensor's storage is made and freed, and what it is for."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
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
class _Storage:
    num_bytes: int
    made: int  # number of the operator that made it
    freed: int | None = None  # number of the first operator that ran without it
    kind: str = "temporaries"  # a field of Moment, or "" for what is not counted


class StorageLedger:
    """The operators of a step and the storages that they made. Views and in-place operators make none."""

    def __init__(self, outside: Iterable[torch.Tensor]) -> None:
        self.operators: list[Operator] = []
        self._living: dict[int, tuple[weakref.ref[torch.UntypedStorage], _Storage]] = {}
        self._all: list[_Storage] = []
        self._num_forward = 0
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
        self._num_forward = len(self.operators)
        for _reference, storage in self._living.values():
            if storage.kind == "temporaries":
                storage.kind = "activations"

    def name(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Say what storages are, from when they were made: ``"gradients"``, or ``""`` for optimizer states."""
        for tensor in tensors:
            if tensor.layout == torch.strided:
                self._follow(tensor).kind = kind

    def _follow(self, tensor: torch.Tensor) -> _Storage:
        # Python keeps one object for a storage as long as the storage exists.
        memory = tensor.untyped_storage()
        key = id(memory)
        if key in self._living:
            return self._living[key][1]
        storage = _Storage(rounded(memory.nbytes()), len(self.operators) - 1)

        def free(_reference: object) -> None:
            storage.freed = len(self.operators)
            self._living.pop(key, None)

        self._living[key] = weakref.ref(memory, free), storage
        self._all.append(storage)
        return storage

    def moments(self) -> Iterator[Moment]:
        """Yield the live bytes while each operator ran."""
        count = len(self.operators)
        changes: list[dict[str, int]] = [{} for _ in range(count + 1)]
        for one in self._all:
            if one.kind and one.num_bytes:
                for at, sign in ((max(one.made, 0), 1), (count if one.freed is None else one.freed, -1)):
                    changes[at][one.kind] = changes[at].get(one.kind, 0) + sign * one.num_bytes
        now = dict.fromkeys(("activations", "temporaries", "gradients", "offloaded", "weight_copies"), 0)
        for operator, change in zip(self.operators, changes, strict=False):
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
