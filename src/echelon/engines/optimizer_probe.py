"""Finds out by trial steps on small tensors whether an optimizer can step parts of a tensor, or some of the tensors, on their own."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.distributed.tree import leaves
from echelon.engines.optimizer_copy import attribute_with_parameters, copy_optimizer
from echelon.engines.random_numbers import restore_states, save_states
from echelon.engines.shards import local_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh  # slow to import

# Halves have 4096 elements, from which on 8-bit optimizers quantize their state, in blocks of a power of two.
_SHAPES = ((128, 64), (64, 128))
# The norms of gradients are below and above the limits to which some optimizers clip. Some optimizers change nothing in their first steps.
_GRADIENT_SCALES = (1.0, 1e-3, 30.0, *[1.0] * 5)
_LEARNING_RATE = 0.01
_TOLERANCE = 1e-5
"""Relative to the largest update. Rounding in float32 gives 1e-7 to 1e-6; statistics of half a tensor change updates by tens of percents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerBehavior:
    """What the trial steps have shown."""

    elementwise: tuple[bool, ...]
    """For each parameter group: whether steps on the parts of a tensor equal steps on the whole tensor."""
    by_tensor: bool
    """Whether steps on some of the tensors equal steps on all of them together."""


class ProbeError(Exception):
    """The optimizer could not be tried; the text says why."""


def probe_optimizer(optimizer: Optimizer, *, dims: Collection[int] = (0,)) -> OptimizerBehavior:
    """Step copies of ``optimizer`` with small tensors on the device of its parameters, as wholes and in parts.

    Nothing of ``optimizer`` changes, and neither do the states of torch's random number generators. Hooks are not called.

    Args:
        optimizer: on any rank; its parameters are not read.
        dims: the dimensions along which parameters are split.

    Raises:
        ProbeError: no copy could be created, its step failed, or it changed nothing.
    """
    trial = _Trial(optimizer, optimizer.param_groups)
    with trial.undisturbed():
        tensors, gradients = trial.tensors, trial.gradients
        whole = trial.run(tensors, gradients)
        elementwise = [not irregular for irregular in trial.has_irregular_state]
        for dim in dims:
            halves = [
                trial.run(_halves(tensors, dim, i), [_halves(step, dim, i) for step in gradients]) for i in (0, 1)
            ]
            for number, (expected, first, second) in enumerate(zip(whole, *halves)):
                joined = [torch.cat(pair, dim) for pair in zip(first.updates, second.updates)]
                elementwise[number] &= _are_equal(joined, expected.updates)
                elementwise[number] &= first.options == second.options == expected.options
        by_tensor = True
        for i in range(len(_SHAPES)):
            alone = trial.run(
                [group[i : i + 1] for group in tensors], [[group[i : i + 1] for group in step] for step in gradients]
            )
            for one, expected in zip(alone, whole):
                by_tensor &= _are_equal(one.updates, expected.updates[i : i + 1]) and one.options == expected.options
    return OptimizerBehavior(elementwise=tuple(elementwise[i] for i in trial.numbers), by_tensor=by_tensor)


def steps_shards(
    optimizer: Optimizer, groups: Sequence[dict[str, Any]], mesh: DeviceMesh, *, is_elementwise: bool
) -> bool:
    """Return whether steps on DTensors, sharded along dim 0 over the last axis of ``mesh``, equal steps on the whole tensors.

    Args:
        optimizer: as for ``probe_optimizer``.
        groups: parameter groups of ``optimizer``.
        mesh: of the parameters.
        is_elementwise: whether steps on parts are known to be right; the steps then only show which operations DTensor lacks.

    Collective: call on every rank of ``mesh`` (optimizers that are elementwise do not communicate).
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: PLC0415 - slow to import, and only sharded runs need it

    axis = mesh.ndim - 1
    placements = [*[Replicate()] * axis, Shard(0)]
    place, num_parts = (0, 1) if is_elementwise else (mesh.get_local_rank(axis), mesh.size(axis))
    # Neighbours have other shards, and the last one has a smaller shard: sums over a shard must not be right by chance.
    trials = [_Trial(optimizer, groups, seed=i % 2) for i in range(num_parts)]

    def stacked(parts: Sequence[_Tensors]) -> _Tensors:
        joined = [[torch.cat(tensors) for tensors in zip(*group)] for group in zip(*parts)]
        return joined if is_elementwise else [[tensor[:-3] for tensor in group] for group in joined]

    def sharded(whole: torch.Tensor) -> torch.Tensor:
        if is_elementwise:  # each rank has a shard of the same values
            return DTensor.from_local(whole, mesh, placements, run_check=False)
        own = whole.chunk(num_parts)[place]
        return DTensor.from_local(own, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())

    tensors = stacked([trial.tensors for trial in trials])
    gradients = [stacked(step) for step in zip(*[trial.gradients for trial in trials])]
    with trials[0].undisturbed():
        try:
            whole = trials[0].run(tensors, gradients)
            shards = trials[0].run(
                [list(map(sharded, group)) for group in tensors],
                [[list(map(sharded, group)) for group in step] for step in gradients],
            )
        except ProbeError:
            return False
    return all(
        _are_equal(found.updates, [update.chunk(num_parts)[place] for update in expected.updates])
        and found.options == expected.options
        for found, expected in zip(shards, whole)
    )


def warn_of_assumption(optimizer: Optimizer, error: ProbeError, *, engine: str) -> None:
    """Warn that ``optimizer`` could not be tried, and what is assumed."""
    warn(
        _(
            "{kind} could not be tried on small tensors ({reason}), so echelon assumes that it updates each element (fsdp2) or each parameter "
            "(zero1) independently of the others, as the {engine} engine requires. If it does not, use engine='ddp'.",
            kind=type(optimizer).__name__,
            reason=error,
            engine=engine,
        )
    )


_Tensors = list[list[torch.Tensor]]  # by group


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a few steps have done in a parameter group."""

    updates: list[torch.Tensor]
    """By how much each tensor changed; of sharded tensors, this rank's shards."""
    options: dict[str, str]
    """Numbers in the group, where an optimizer may keep estimates, with six digits."""


class _Trial:
    """Small tensors for each kind of parameter group of an optimizer, and steps of its copies."""

    def __init__(self, optimizer: Optimizer, groups: Sequence[dict[str, Any]], *, seed: int = 0) -> None:
        self._optimizer = optimizer
        first = next((p for group in groups for p in group["params"]), torch.empty(0))
        self._device = torch.device("cpu") if first.is_meta else first.device
        kinds: dict[str, int] = {}  # groups that differ only in their learning rate behave alike
        self._groups: list[dict[str, Any]] = []
        self.numbers: list[int] = []
        """For each parameter group, which of the trial's groups stands for it."""
        for group in groups:
            options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
            kind = repr(sorted((name, value) for name, value in options.items() if name not in ("lr", "initial_lr")))
            self.numbers.append(kinds.setdefault(kind, len(kinds)))
            if len(kinds) > len(self._groups):
                self._groups.append(options)
        generator = torch.Generator().manual_seed(seed)  # not the program's random numbers

        def draw() -> _Tensors:
            return [[self._draw(shape, generator) for shape in _SHAPES] for _ in self._groups]

        self.tensors = draw()
        # Of one direction, for optimizers that estimate the distance to a minimum. In a half it is orthogonal to the first weights, for
        # optimizers that then project their updates.
        directions = [list(map(_orthogonal_in_a_half, *pair)) for pair in zip(draw(), self.tensors)]
        self.gradients = [
            [[scale * (mean + noise / 4) for mean, noise in zip(*pair)] for pair in zip(directions, noises)]
            for scale, noises in zip(_GRADIENT_SCALES, [directions, *[draw() for _ in _GRADIENT_SCALES[1:]]])
        ]
        self.has_irregular_state = [False] * len(self._groups)
        """For each group, whether the state of a parameter had a tensor of another shape, such as statistics of rows, or an object."""

    def _draw(self, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
        values = torch.randn(shape, generator=generator) / 8
        for dim in (0, 1):  # halves differ in their norms
            values.narrow(dim, 0, shape[dim] // 2).mul_(4.0)
        return values.to(self._device)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Restore the states of random number generators; silence warnings, which the user's own steps give in their place."""
        self._states = save_states(self._device)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            restore_states(self._device, self._states)

    def run(self, tensors: _Tensors, gradients: Sequence[_Tensors]) -> list[_Outcome]:
        """Step one optimizer for copies of ``tensors`` with each of ``gradients``.

        Raises:
            ProbeError: a step failed, or changed nothing.
        """
        takes_closure = "closure" in inspect.signature(type(self._optimizer).step).parameters
        first: Exception | None = None
        for needs_closure in (False, True) if takes_closure else (False,):
            try:
                return self._run(tensors, gradients, needs_closure=needs_closure)
            except Exception as error:  # noqa: BLE001 - of the user's code
                first = first or error
        text = next(iter(str(first).splitlines()), "")
        raise ProbeError(text if isinstance(first, ProbeError) else f"{type(first).__name__}: {text}") from first

    def _run(self, tensors: _Tensors, gradients: Sequence[_Tensors], *, needs_closure: bool) -> list[_Outcome]:
        restore_states(self._device, self._states)  # optimizers that draw random numbers draw the same ones each time
        trained = [[one.clone().requires_grad_() for one in group] for group in tensors]
        options = [{name: _copied(name, value) for name, value in group.items()} for group in self._groups]
        groups = [{**group, "params": list(own)} for group, own in zip(options, trained)]
        optimizer: Any = _build(self._optimizer, groups)
        if hasattr(optimizer, "train"):  # schedule-free optimizers step only in this mode
            optimizer.train()
        step: Any = type(optimizer).step
        step = getattr(step, "__wrapped__", step)  # without hooks
        # Compiled steps compute the same, and compiling takes long.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for now in gradients:
                set_gradients = _closure_for(trained, tensors, now)
                set_gradients()
                step(optimizer, set_gradients) if needs_closure else step(optimizer)
        changes = [local_tensors(new.detach() - old for new, old in zip(*pair)) for pair in zip(trained, tensors)]
        largest = [float(one.abs().max()) for group in changes for one in group if one.numel()]
        if not all(0.0 < change < math.inf for change in largest):
            raise ProbeError("its steps changed nothing, or gave infinite values")
        for number, group in enumerate(trained):
            regular = [all(map(partial(_is_regular, one), leaves(optimizer.state.get(one, {})))) for one in group]
            self.has_irregular_state[number] |= not all(regular)
        return [_Outcome(own, _numbers_in(group)) for own, group in zip(changes, optimizer.param_groups, strict=True)]


def _numbers_in(group: dict[str, Any]) -> dict[str, str]:
    return {
        name: f"{float(value):.6g}"
        for name, value in group.items()
        if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }


def _build(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer of the class and with the options of ``optimizer`` for ``groups``."""
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind.__init__).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    options = {n: _copied(n, value) for n, value in optimizer.defaults.items() if takes_all or n in accepted}
    try:
        built: Optimizer = kind([dict(group) for group in groups], **options)
    except Exception as error:  # such as arguments that are in no group: a copy has what became of them
        if attribute_with_parameters(optimizer) is not None:
            raise ProbeError(f"{kind.__name__}(...) raises {type(error).__name__}: {error}") from error
        built = copy_optimizer(optimizer, groups)
        own = {
            name: copy.deepcopy(value) for name, value in vars(built).items() if name not in ("param_groups", "state")
        }
        Optimizer.__setstate__(built, {**own, "param_groups": groups, "state": defaultdict(dict)})
        return built
    for name, value in vars(optimizer).items():  # arguments that are in no group
        if isinstance(value, (bool, int, float, str)) and name in vars(built):
            setattr(built, name, value)
    return built


def _closure_for(tensors: _Tensors, initial: _Tensors, gradients: _Tensors) -> Callable[[], torch.Tensor]:
    """Return a closure that sets ``gradients``, plus a part that changes if an optimizer changes the weights between two calls."""

    @torch.no_grad()
    def evaluate() -> torch.Tensor:
        for groups in zip(tensors, initial, gradients):
            for tensor, before, gradient in zip(*groups):
                tensor.grad = gradient + 0.1 * (tensor.detach() - before)
        return torch.ones(())  # the loss is that of the whole model, also where an optimizer has a part of it

    return evaluate


def _orthogonal_in_a_half(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``gradient`` with the rows of the second half made orthogonal to those of ``weight``."""
    along = (gradient * weight).sum(1, keepdim=True) / weight.square().sum(1, keepdim=True)
    along[: len(along) // 2] = 0
    return gradient - along * weight


def _copied(name: str, value: Any) -> Any:
    """Return a copy of an option. A learning rate may be 0 in a warm-up, which would show nothing."""
    if name == "lr" and value is not None:
        return torch.full_like(value, _LEARNING_RATE) if isinstance(value, torch.Tensor) else _LEARNING_RATE
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _halves(groups: _Tensors, dim: int, number: int) -> _Tensors:
    return [[tensor.chunk(2, dim)[number].contiguous() for tensor in group] for group in groups]


def _are_equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(
        float((one - other).abs().max()) <= _TOLERANCE * float(other.abs().max())
        for one, other in zip(found, expected, strict=True)
    )


def _is_regular(parameter: torch.Tensor, value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 or value.shape == parameter.shape
    return value is None or isinstance(value, (bool, int, float, str))
