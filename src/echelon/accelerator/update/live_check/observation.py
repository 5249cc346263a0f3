"""What one rank records of an update that is checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from echelon.accelerator.update.live_check.gradient_ledger import GradientLedger, local_of
from echelon.distributed.checks.finding import Finding
from echelon.distributed.checks.sketch import Hashes, content_hashes, generator_hash
from echelon.engines.base import Engine
from echelon.engines.state_dicts import plain_name


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCall:
    """One call of ``clip_grad_norm_``."""

    norm: float
    """What the call returned."""
    norm_type: float
    own: float
    """Sum of the powers of this rank's elements, each element of the whole gradient counted once over all ranks."""
    num_elements: int
    roundoff: float
    line: str


@dataclass(frozen=True, slots=True)
class LossWeight:
    """One loss of an update."""

    micro_step: int
    weight: float
    """By which the loss was multiplied, measured on its value, times what the gradients were multiplied by later; nan if the value does
    not show it."""
    num_items: float | None
    roundoff: float
    line: str


@dataclass(slots=True)
class OptimizerSteps:
    """The steps of one optimizer."""

    optimizer: Optimizer
    num_steps: int = 0
    num_skipped: int = 0
    settings: dict[str, float] = field(default_factory=dict)
    """At the first step."""
    line: str = ""


class ForwardFacts:
    """Buffers and random numbers when the first training forward pass begins."""

    def __init__(self) -> None:
        self.is_complete = False
        self.generator = 0
        self.has_masks = False
        self.buffers: dict[str, int] = {}
        self.is_equal: dict[str, bool] = {}
        """Whether the engine keeps each buffer equal on all ranks; else only buffers that do not change must be equal."""
        self._read: list[tuple[str, torch.Tensor]] = []

    def add(self, prefix: str, model: nn.Module, engine: Engine, device: torch.device) -> None:
        """Read the facts of the prepared ``model``, before the user's module inside it computes."""
        inner = engine.unwrap(model)
        must_be_equal = engine.keeps_buffers_equal(model)
        found = []
        for name, module in inner.named_modules():
            self.has_masks |= isinstance(module, _DropoutNd) and module.training and module.p > 0
            for key, buffer in module.named_buffers(recurse=False):
                if must_be_equal or not isinstance(module, _NormBase):
                    found.append((prefix + plain_name(f"{name}.{key}" if name else key), buffer))
        found = [(name, buffer) for name, buffer in found if _is_readable(buffer)]
        for (name, _), value in zip(found, content_hashes([buffer for _, buffer in found])):
            self.buffers[name], self.is_equal[name] = int(value), must_be_equal
        self._read += found
        self.generator = generator_hash(device)
        self.is_complete = True

    def static(self) -> dict[str, int]:
        """Return the hashes of the buffers that must be equal on all ranks."""
        now = dict(zip((name for name, _ in self._read), content_hashes([buffer for _, buffer in self._read])))
        self._read.clear()
        return {
            name: value for name, value in self.buffers.items() if self.is_equal[name] or int(now.get(name, 0)) == value
        }


@dataclass(slots=True)
class Observation:
    """One update, from the batches that it reads to the weights that it leaves."""

    forward: ForwardFacts = field(default_factory=ForwardFacts)
    rows: list[np.ndarray[Any, np.dtype[np.uint64]]] = field(default_factory=list)
    """Hashes of the samples in this rank's batches."""
    has_padding: bool = False
    ledger: GradientLedger = field(init=False)
    """Set by the first backward pass."""
    update: int = 0
    """Number of the update, from 1."""
    is_whole: bool = True
    """Whether it began with the first micro-step of its accumulation window."""
    is_synced: bool = False
    """Whether the last backward pass has run."""
    is_abandoned: bool = False
    """Whether the update is local on purpose, so that there is nothing to compare."""
    draws_masks: bool = False
    losses: list[LossWeight] = field(default_factory=list)
    num_micro_steps: int | None = None
    """Of the accumulation window; None outside of one."""
    clips: list[ClipCall] = field(default_factory=list)
    steps: dict[int, OptimizerSteps] = field(default_factory=dict)
    """By the index of the optimizer."""
    hashes: dict[str, Hashes] = field(default_factory=dict)
    """Of weights before and after, and of the gradient that the optimizer used; one number per parameter."""
    found: list[Finding] = field(default_factory=list)
    """Mismatches that this rank sees alone."""

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps."""
        return sum(steps.num_steps for steps in self.steps.values())

    @property
    def line(self) -> str:
        """The user's line with the first step."""
        return next((steps.line for steps in self.steps.values() if steps.line), "")

    def hash_values(self, kind: str, numbers: Sequence[int], tensors: Sequence[torch.Tensor | None]) -> None:
        """Record the contents of ``tensors`` in the rows ``numbers`` of ``kind``; 0 stands for None."""
        values = self.hashes.setdefault(kind, np.zeros(len(self.ledger.watched), dtype=np.int64))
        present = [(i, local_of(t)) for i, t in zip(numbers, tensors) if t is not None and _is_readable(local_of(t))]
        values[[i for i, _ in present]] = content_hashes([t for _, t in present])


def _is_readable(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
