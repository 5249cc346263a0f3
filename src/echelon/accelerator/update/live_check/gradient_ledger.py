"""Sketches of an update's gradients: local, reduced, and after each change that echelon knows of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import nn

from echelon.base.sharded import is_dtensor
from echelon.distributed.checks.gradient_hook import GradientHook
from echelon.distributed.checks.named_sketches import shard_layout
from echelon.distributed.checks.sketch import NUM_BUCKETS, LatestSketches, Sketches, sketches_of
from echelon.distributed.uncompiled import uncompiled
from echelon.engines.base import Engine
from echelon.engines.state_dicts import plain_parameters

_WIDTH = NUM_BUCKETS + 1  # numbers of a sketch; the last one is the sum of squares
_PLAIN = (torch.Tensor, nn.Parameter)  # types that are no DTensor
_SMALL = 4096  # elements of a gradient that is copied, to be sketched together with others


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedParameter:
    """A parameter that an optimizer of the run may step."""

    name: str
    parameter: torch.Tensor
    num_elements: int
    """Of the whole parameter."""
    is_sharded: bool
    offset: int
    """Number of this rank's first element in the whole parameter."""
    share: float
    """1 / number of ranks that hold the same shard."""
    shard: int
    """Number of this rank's shard."""
    is_late: bool
    """Whether its gradient is reduced by the optimizer step, not in the backward pass."""


def watched_parameters(
    engine: Engine, models: Sequence[nn.Module], stepped: Iterable[torch.Tensor]
) -> list[WatchedParameter]:
    """Return the trainable parameters of prepared models, then those of ``stepped``, which optimizers hold, that are in no model."""
    found: dict[int, WatchedParameter] = {}
    shards = engine.capabilities.shards_parameters
    for number, model in enumerate(models):
        prefix = f"model {number}: " if len(models) > 1 else ""
        parameter: torch.Tensor
        for name, parameter in plain_parameters(engine.unwrap(model)):
            if parameter.requires_grad and id(parameter) not in found:
                is_late = shards and not is_dtensor(parameter)
                watched = _watched(prefix + name.removeprefix("module."), parameter, is_late=is_late)
                if watched is not None:
                    found[id(parameter)] = watched
    strays = [p for p in (() if shards else stepped) if p.requires_grad and id(p) not in found]
    for number, parameter in enumerate(strays):
        watched = _watched(f"parameter {number} outside of the models", parameter, is_late=True)
        if watched is not None:
            found[id(parameter)] = watched
    return list(found.values())


def _watched(name: str, parameter: torch.Tensor, *, is_late: bool) -> WatchedParameter | None:
    layout = shard_layout(parameter)
    if layout is not None and not layout.is_contiguous:
        return None
    place = 0 if layout is None else layout.positions()
    assert isinstance(place, int)
    return WatchedParameter(
        name=name,
        parameter=parameter,
        num_elements=parameter.numel(),
        is_sharded=layout is not None,
        offset=place,
        share=1.0 if layout is None else 1 / layout.num_replicas,
        shard=0 if layout is None else layout.shard,
        is_late=is_late,
    )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``tensor`` without a copy."""
    if type(tensor) in _PLAIN:
        return tensor.detach()
    local: torch.Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return local.detach()


def _numbers(found: Sketches) -> torch.Tensor:
    """Return the sketches, ``[number of tensors, _WIDTH]``; nan for a tensor whose elements are not all finite."""
    numbers = torch.from_numpy(found.numbers.copy())
    numbers[torch.from_numpy(found.counts[:, 2] > 0)] = torch.nan
    return numbers


class GradientLedger:
    """Keeps sketches, rows by parameter, float64 on the CPU.

    Args:
        watched: parameters.
        engine: tells where local gradients can be observed.
    """

    def __init__(self, watched: Sequence[WatchedParameter], engine: Engine) -> None:
        self.watched = watched
        self.number_of = {id(one.parameter): i for i, one in enumerate(watched)}
        """Row of each parameter, by id."""
        self._engine = engine
        num = len(watched)
        self.local = torch.zeros(num, NUM_BUCKETS, dtype=torch.float64)
        """Sum of the gradients that this rank's backward passes computed, before any reduction."""
        self.norms = torch.zeros(num, dtype=torch.float64)
        """Sum of their norms: the absolute sum, which bounds rounding errors."""
        self.base = torch.zeros(num, _WIDTH, dtype=torch.float64)
        """Gradients from before the update."""
        self.factors = torch.ones(num, dtype=torch.float64)
        """By what these three were multiplied."""
        self.counts = torch.zeros(num, dtype=torch.float64)
        """Number of gradients added."""
        self.roundoffs = torch.zeros(num, dtype=torch.float64)
        self.spacings = torch.zeros(num, dtype=torch.float64)
        self.reduced = torch.zeros(num, _WIDTH, dtype=torch.float64)
        """After the last backward pass of the update."""
        self.is_reduced = torch.zeros(num, dtype=torch.bool)
        self.is_unknown = torch.zeros(num, dtype=torch.bool)
        """Gradients that cannot be sketched: sparse ones, or those that a communication hook changes."""
        self.changed = torch.zeros(num, dtype=torch.bool)
        """Gradients that something other than echelon changed after the reduction."""
        self.ratios = torch.full((num,), torch.nan, dtype=torch.float64)
        """If such a change was a multiplication: by what."""
        self._latest = LatestSketches()
        """Of each gradient, after the last change that echelon knows of."""
        self._held: list[tuple[int, torch.Tensor]] = []
        self._sketched: list[tuple[int, torch.Tensor]] = []
        self._is_begun = False

    # ---- backward passes ---------------------------------------------------------------------------------------------

    def begin_backward(self, *, keeps_gradients: bool) -> None:
        """Note what the gradients hold before a backward pass.

        Args:
            keeps_gradients: whether a missing gradient means that the loop has cleared it.
        """
        if not self._is_begun:
            self._is_begun = True
            present = [i for i in range(len(self.watched)) if self._gradient(i) is not None]
            if present:
                self.base[present] = _numbers(sketches_of(*self._locals(present)))
            return
        if keeps_gradients:
            self.clear(i for i, one in enumerate(self.watched) if one.parameter.grad is None and not one.is_sharded)

    @contextmanager
    def observing(self, *, adds_zeros: bool) -> Iterator[None]:
        """Add the gradients that a backward pass in the block computes on this rank."""
        hooks, rows, errors = [], [], []
        for i, local in enumerate(self._engine.local_gradients([one.parameter for one in self.watched])):
            if local.leaf is None or is_dtensor(local.leaf):
                self.is_unknown[i] = True
                continue
            dtypes = (local.leaf.dtype, local.reduce_dtype, self.watched[i].parameter.dtype)
            rows.append(i)
            errors.append((roundoff(*dtypes), smallest(*dtypes)))
            if not adds_zeros and local.leaf.requires_grad:
                hooks.append(GradientHook(local.leaf, partial(self._hold, i)))
        if rows:
            self.roundoffs[rows], self.spacings[rows] = torch.tensor(errors, dtype=torch.float64).T
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._add_held()

    @uncompiled
    def _hold(self, number: int, gradient: torch.Tensor) -> None:
        if gradient.layout is not torch.strided or is_dtensor(gradient):
            self.is_unknown[number] = True
        elif gradient.numel() <= _SMALL:
            self._held.append((number, gradient.clone()))  # DDP may reduce it in place
        else:
            self._sketched.append((number, self._sketch([number], [gradient])))

    def _add_held(self) -> None:
        held, self._held = self._held, []
        sketched, self._sketched = self._sketched, []
        if held:
            numbers = [number for number, _ in held]
            self._add(numbers, self._sketch(numbers, [gradient for _, gradient in held]))
        if sketched:
            self._add([number for number, _ in sketched], torch.cat([sketch for _, sketch in sketched]))

    def _sketch(self, numbers: Sequence[int], gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return _numbers(self._latest.sketches_of(numbers, gradients))

    def _add(self, numbers: list[int], sketches: torch.Tensor) -> None:
        places = torch.tensor(numbers)
        self.local.index_add_(0, places, sketches[:, :NUM_BUCKETS])
        self.norms.index_add_(0, places, sketches[:, NUM_BUCKETS].sqrt())
        self.counts.index_add_(0, places, torch.ones(len(numbers), dtype=torch.float64))

    def clear(self, numbers: Iterable[int]) -> None:
        """Forget gradients that the loop has cleared."""
        cleared = list(numbers)
        for values in (self.local, self.norms, self.base, self.counts, self.reduced):
            values[cleared] = 0
        self.is_reduced[cleared] = False
        for number in cleared:
            self._latest.forget(number)

    def multiply(self, parameters: Iterable[torch.Tensor], factor: float) -> None:
        """Note that echelon has multiplied the accumulated gradients of ``parameters``."""
        numbers = self.numbers(parameters)
        self.factors[numbers] *= factor
        for values in (self.local, self.norms, self.base):
            values[numbers] *= factor

    def undo_multiply(self) -> None:
        """Note that the next backward pass recomputes the sum of all gradients, which is not multiplied yet."""
        for values in (self.local, self.norms, self.base):
            values /= self.factors.reshape(-1, *[1] * (values.ndim - 1))
        self.factors[:] = 1.0

    # ---- the reduced gradients ---------------------------------------------------------------------------------------

    def numbers(self, parameters: Iterable[torch.Tensor]) -> list[int]:
        """Return the rows of those ``parameters`` that are watched."""
        found = (self.number_of.get(id(parameter)) for parameter in parameters)
        return sorted({number for number in found if number is not None})

    def take_reduced(self, numbers: Iterable[int] | None = None) -> None:
        """Sketch the gradients after their reduction (default: all that the backward pass reduces)."""
        chosen = [i for i, one in enumerate(self.watched) if not one.is_late] if numbers is None else list(numbers)
        self.reduced[chosen] = self.now(chosen)
        self.is_reduced[chosen] = True

    def now(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return the sketches of the current gradients, zero for missing ones; they become known."""
        present = {i: local_of(gradient) for i in numbers if (gradient := self._gradient(i)) is not None}
        self._latest.sketches_of(list(present), list(present.values()), [self.watched[i].offset for i in present])
        for i in numbers:
            if i not in present:
                self._latest.forget(i)
        return _numbers(self._latest.known(numbers))

    def note_changes(self, numbers: Sequence[int]) -> None:
        """Compare the gradients with what they were after the last change that echelon knows of."""
        chosen = [i for i in numbers if self.is_reduced[i] and not self.is_unknown[i]]
        before, after = _numbers(self._latest.known(chosen)), self.now(chosen)
        differs = (before != after) & ~(before.isnan() & after.isnan())
        for place in differs.any(dim=1).nonzero().flatten().tolist():
            i = chosen[place]
            self.changed[i] = True
            one, other = before[place, :NUM_BUCKETS], after[place, :NUM_BUCKETS]
            ratio = (one @ other) / (one @ one)
            error = torch.linalg.vector_norm(other - ratio * one)
            if bool(error <= NUM_BUCKETS * self.roundoffs[i] * torch.linalg.vector_norm(other)):
                self.ratios[i] = ratio

    def _gradient(self, number: int) -> torch.Tensor | None:
        gradient = self.watched[number].parameter.grad
        if gradient is None:
            return None
        if gradient.layout is not torch.strided:
            self.is_unknown[number] = True
            return None
        return gradient

    def _locals(self, numbers: Sequence[int]) -> tuple[list[torch.Tensor], list[int]]:
        gradients = [self._gradient(i) for i in numbers]
        return [local_of(g) for g in gradients if g is not None], [self.watched[i].offset for i in numbers]


@cache
def roundoff(*dtypes: torch.dtype | None) -> float:
    """Return the unit roundoff of the coarsest dtype."""
    return max((kind.eps / 2 for kind in _inexact(dtypes)), default=0.0)


@cache
def smallest(*dtypes: torch.dtype | None) -> float:
    """Return the distance between numbers near zero in the coarsest dtype."""
    return max((kind.tiny * kind.eps for kind in _inexact(dtypes)), default=0.0)


def _inexact(dtypes: Sequence[torch.dtype | None]) -> list[torch.finfo]:
    return [
        torch.finfo(dtype) for dtype in dtypes if dtype is not None and (dtype.is_floating_point or dtype.is_complex)
    ]
