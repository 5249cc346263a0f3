"""Repeats an optimizer step on copies of a few parameters, to see that each was updated once, from its gradient and its state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from echelon.accelerator.update.live_check.gradient_ledger import local_of

_NUM_SAMPLED = 2
_MAX_ELEMENTS = 2**22
_FEW_ELEMENTS = 2**16  # of all samples, if there is more than one


@dataclass(frozen=True, slots=True)
class _Sample:
    number: int
    parameter: torch.Tensor
    before: torch.Tensor
    copy: torch.Tensor


class OptimizerTwin:
    """Copies of some parameters with their gradients, state and settings, from before a step.

    Args:
        outer: the prepared optimizer that the loop steps.
        optimizer: the one that updates this rank's parameters or shards; often the same.
        candidates: number and parameter; those that ``optimizer`` does not hold are left out.
        number: of the check; each check samples other parameters.
    """

    def __init__(
        self, outer: Optimizer, optimizer: Optimizer, candidates: Sequence[tuple[int, torch.Tensor]], *, number: int
    ) -> None:
        self._outer = outer
        self._optimizer = optimizer
        self._samples: list[_Sample] = []
        self._twin: Optimizer | None = None
        if not (_has_no_hooks(outer) and _is_repeatable(optimizer)):
            return
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        own = [(i, p) for i, p in candidates if id(p) in held and p.grad is not None and p.grad.layout is torch.strided]
        own = [(i, p) for i, p in own if 0 < local_of(p).numel() <= _MAX_ELEMENTS]
        for i, parameter in _sampled(own, number):
            assert parameter.grad is not None
            copy = local_of(parameter).clone().requires_grad_(parameter.requires_grad)
            copy.grad = local_of(parameter.grad).clone()
            self._samples.append(_Sample(i, parameter, copy.detach().clone(), copy))
        if self._samples:
            self._twin = self._build()

    def _build(self) -> Optimizer:
        copies = {id(sample.parameter): sample.copy for sample in self._samples}
        # An optimizer that steps a part of the parameters receives the settings in the step.
        groups = [
            {**{name: _copied(value) for name, value in settings.items() if name != "params"}, "params": own}
            for settings, group in zip(self._outer.param_groups, self._optimizer.param_groups, strict=True)
            if (own := [copies[id(p)] for p in group["params"] if id(p) in copies])
        ]
        state: dict[torch.Tensor, Any] = defaultdict(dict)
        for sample in self._samples:
            if sample.parameter in self._optimizer.state:
                state[sample.copy] = {
                    name: _copied(value) for name, value in self._optimizer.state[sample.parameter].items()
                }
        kept = {
            name: value
            for name, value in vars(self._optimizer).items()
            if name not in ("step", "grad_scale", "found_inf") and not name.startswith("_optimizer_")
        }
        twin: Optimizer = object.__new__(type(self._optimizer))
        Optimizer.__setstate__(twin, {**kept, "param_groups": groups, "state": state})
        return twin

    def compare(self) -> list[tuple[int, float]]:
        """Repeat the step; return number and difference, relative to its update, of each parameter that differs."""
        if self._twin is None:
            return []
        step: Any = type(self._optimizer).step
        getattr(step, "__wrapped__", step)(self._twin)  # without the hooks, which count steps
        found = []
        for sample in self._samples:
            now, expected = local_of(sample.parameter), sample.copy.detach()
            if torch.equal(now, expected):
                continue
            # The same operations in the same order: they round alike, or to a neighbour if the compiler fuses them differently in a
            # tensor of another length.
            wide = torch.promote_types(now.dtype, torch.float32)
            now, expected, before = now.to(wide), expected.to(wide), sample.before.to(wide)
            allowed = torch.finfo(sample.parameter.dtype).eps * (expected.abs() + before.abs())
            difference = (now - expected).abs()
            if bool((difference > allowed).any()):  # False for nan
                scale = float(torch.linalg.vector_norm(expected - before)) or 1.0
                found.append((sample.number, float(torch.linalg.vector_norm(difference)) / scale))
        return found


def _sampled(own: Sequence[tuple[int, torch.Tensor]], number: int) -> list[tuple[int, torch.Tensor]]:
    """Choose parameters across the model, from another one in each check, so that each comes first in one check of ``len(own)``."""
    step = max(len(own) // _NUM_SAMPLED, 1)
    chosen: list[tuple[int, torch.Tensor]] = []
    num_elements = 0
    for k in range(min(_NUM_SAMPLED, len(own))):
        candidate = own[(number + k * step) % len(own)]
        num_elements += local_of(candidate[1]).numel()
        if chosen and num_elements > _FEW_ELEMENTS:
            break
        chosen.append(candidate)
    return chosen


def _is_repeatable(optimizer: Optimizer) -> bool:
    """Return whether each parameter's update depends only on its gradient, state and group, without random numbers or hooks."""
    if not type(optimizer).__module__.startswith("torch.optim.") or isinstance(optimizer, LBFGS):
        return False
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        return False  # compiled, or the user's own
    groups: Sequence[Mapping[str, Any]] = optimizer.param_groups
    return not any(group.get("differentiable") for group in groups)


def _has_no_hooks(optimizer: Optimizer) -> bool:
    """Return whether no step hook of the script may change gradients before the step, or weights after it."""
    return not any(vars(optimizer).get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post"))


def _copied(value: Any) -> Any:
    return local_of(value).clone() if isinstance(value, torch.Tensor) else value
