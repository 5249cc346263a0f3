"""An optimizer whose state the ranks share out, made of one that has it whole."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from echelon.base.errors import UsageError

with warnings.catch_warnings():
    # The folder compiles optimizers that nobody asked for by torch.jit.script, which is deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

__all__ = ["ShardedOptimizer"]


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """Each rank steps its part of the parameters by a copy of ``optimizer``, and sends them to the others.

    The groups are those of ``optimizer`` themselves: a learning rate set there counts here. The state that it has is
    kept, and moves here; so do its step hooks.

    Collective: every rank makes it of the same optimizer, and steps it.

    Raises:
        UsageError: a part of ``optimizer`` would not do what the whole does.

    Source: torch.distributed.optim.ZeroRedundancyOptimizer; Rajbhandari et al., "ZeRO", 2020, stage 1.
    """

    optim: Optimizer
    rank: int
    _param_to_rank: Mapping[torch.Tensor, int]  # torch's own: who owns what, and the numbers of its state dicts
    _index_to_param: Sequence[torch.Tensor]

    def __init__(self, optimizer: Optimizer) -> None:
        _require_divisible(optimizer)
        make_part: Any = partial(_part_of, optimizer)
        try:
            super().__init__(optimizer.param_groups, optimizer_class=make_part, **optimizer.defaults)
        except (TypeError, ValueError) as error:
            raise _refused(optimizer, f"torch's ZeroRedundancyOptimizer refuses it: {error}") from error
        self.state = self.optim.state
        self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
        optimizer.state = defaultdict(dict)

    def owner(self, parameter: torch.Tensor) -> int:
        """Return the rank that keeps the state of ``parameter``, and steps it."""
        return self._param_to_rank[parameter]

    def own_state(self) -> dict[str, Any]:
        """Return the state dict, numbered as torch does; of the state this rank's part only."""
        state = Optimizer.state_dict(self)
        return {**state, "state": self._own(state["state"])}

    def state_dict(self) -> dict[str, Any]:
        """Refuse: one rank cannot know it."""
        raise UsageError(
            "state_dict() of this optimizer would need all ranks: each keeps the state of a part of the parameters",
            do="use accelerator.save_state(), or optimizer.full_state_dict() on every rank: rank zero gets it",
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of the state dict of the whole optimizer; what it has of the others is left out."""
        groups = self.param_groups
        Optimizer.load_state_dict(self, {**state_dict, "state": self._own(state_dict["state"])})
        for group, loaded in zip(groups, self.param_groups):
            group.update(loaded)
        self.param_groups = groups  # those that whoever made the optimizer may hold
        self.optim.__setstate__({"state": self.state, "param_groups": self.optim.param_groups})

    def _own(self, state: Mapping[int, Any]) -> dict[int, Any]:
        parameters = self._index_to_param
        # Numbers that there are not stay in: torch says that the groups do not fit.
        return {
            number: value
            for number, value in state.items()
            if number >= len(parameters) or self.owner(parameters[number]) == self.rank
        }


def _part_of(optimizer: Optimizer, groups: list[dict[str, Any]], **_defaults: Any) -> Optimizer:
    """Return a copy of ``optimizer`` for the parameters of ``groups``: its class need not say how to make another."""
    own = {parameter for group in groups for parameter in group["params"]}
    state = {parameter: value for parameter, value in optimizer.state.items() if parameter in own}
    # Hooks, and the mark of a scheduler on ``step``, stay with the whole.
    kept = {n: v for n, v in vars(optimizer).items() if n != "step" and not n.startswith("_optimizer_")}
    part: Optimizer = object.__new__(type(optimizer))
    Optimizer.__setstate__(part, {**kept, "param_groups": groups, "state": defaultdict(dict, state)})
    return part


def _require_divisible(optimizer: Optimizer) -> None:
    """Raise unless all that ``optimizer`` does to a parameter depends on its group and its state alone."""
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise _refused(optimizer, "its step was replaced on the object")
    for name in ("train", "eval"):
        if hasattr(optimizer, name):
            raise _refused(optimizer, f"its {name}() changes the parameters, too")
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, value in vars(optimizer).items():
        if name in ("param_groups", "state"):
            continue
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(item, Optimizer) or id(item) in parameters for item in items):
            raise _refused(optimizer, f"it keeps parameters, or an optimizer, in {name!r}, beside its groups")


def _refused(optimizer: Optimizer, why: str) -> UsageError:
    return UsageError(
        f"the state of {type(optimizer).__name__} cannot be shared out between the ranks: {why}",
        where="Accelerator(engine='zero1').prepare",
        do="use another optimizer (those of torch.optim but LBFGS can be), or the engine ddp",
    )
