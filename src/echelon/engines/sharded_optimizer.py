"""An optimizer with sharded state that is created from an ordinary optimizer."""

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
    # The package compiles unused optimizers with torch.jit.script, which is deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """Each rank steps its part of the parameters with a copy of ``optimizer`` and broadcasts the results.

    It shares the parameter group dicts with ``optimizer``, so a learning rate set there takes effect here. It also takes over
    the state and the step hooks.

    Collective: create it from the same optimizer and step it on every rank.

    Raises:
        UsageError: ``optimizer`` would behave differently with only part of the parameters.

    Source: torch.distributed.optim.ZeroRedundancyOptimizer; Rajbhandari et al., "ZeRO", 2020, stage 1.
    """

    optim: Optimizer
    rank: int
    _param_to_rank: Mapping[torch.Tensor, int]  # attributes of torch: the owners, and the numbers in state dicts
    _index_to_param: Sequence[torch.Tensor]

    def __init__(self, optimizer: Optimizer) -> None:
        _require_shardable(optimizer)
        make_copy: Any = partial(_copy_for, optimizer)
        try:
            super().__init__(optimizer.param_groups, optimizer_class=make_copy, **optimizer.defaults)
        except (TypeError, ValueError) as error:
            if len({p.dtype for group in optimizer.param_groups for p in group["params"]}) > 1:
                raise _unshardable(
                    optimizer,
                    f"torch's ZeroRedundancyOptimizer requires one dtype: {error}",
                    do="pass it only the trained parameters ([p for p in model.parameters() if p.requires_grad]) if those have one "
                    "dtype, or use the ddp or fsdp2 engine",
                ) from error
            raise _unshardable(optimizer, f"torch's ZeroRedundancyOptimizer rejects it: {error}") from error
        self.state = self.optim.state
        self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
        optimizer.state = defaultdict(dict)

    def owner(self, parameter: torch.Tensor) -> int:
        """Return the rank that holds the state for ``parameter`` and steps it."""
        return self._param_to_rank[parameter]

    def own_state(self) -> dict[str, Any]:
        """Return the state dict in torch's format with only this rank's part of the state."""
        state = Optimizer.state_dict(self)
        return {**self.optim.state_dict(), **state, "state": self._own(state["state"])}

    def state_dict(self) -> dict[str, Any]:
        """Raise UsageError, because no rank has the full state."""
        raise UsageError(
            "state_dict() cannot return the full optimizer state, because this rank holds the state of only some parameters",
            do="use accelerator.save_state(), or call optimizer.full_state_dict() on every rank (only rank zero "
            "gets the state)",
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of a full state dict."""
        groups = self.param_groups
        Optimizer.load_state_dict(self, {**state_dict, "state": self._own(state_dict["state"])})
        for group, loaded in zip(groups, self.param_groups):
            group.update(loaded)
        self.param_groups = groups  # the user may hold references to these
        self.optim.__setstate__({"state": self.state, "param_groups": self.optim.param_groups})
        entries = {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}
        if entries:  # of a class whose state dict has more than torch's
            self.optim.load_state_dict({**entries, **Optimizer.state_dict(self.optim)})
            self.state = self.optim.state

    def _own(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        parameters = self._index_to_param
        # Unknown numbers are kept, so that torch reports the mismatch of the groups; other keys belong to no parameter.
        return {
            number: value
            for number, value in state.items()
            if not isinstance(number, int) or number >= len(parameters) or self.owner(parameters[number]) == self.rank
        }


def _copy_for(optimizer: Optimizer, groups: list[dict[str, Any]], **_defaults: Any) -> Optimizer:
    """Return a copy of ``optimizer`` for the parameters in ``groups`` without calling its constructor."""
    own = {parameter for group in groups for parameter in group["params"]}
    # Keys that are not parameters belong to the optimizer as a whole.
    state = {key: value for key, value in optimizer.state.items() if key in own or not isinstance(key, torch.Tensor)}
    # Hooks, and a scheduler's wrapper of ``step``, stay with the original.
    kept = {n: v for n, v in vars(optimizer).items() if n != "step" and not n.startswith("_optimizer_")}
    part: Optimizer = object.__new__(type(optimizer))
    Optimizer.__setstate__(part, {**kept, "param_groups": groups, "state": defaultdict(dict, state)})
    return part


def _require_shardable(optimizer: Optimizer) -> None:
    """Raise an error if a parameter's update visibly depends on more than its group and state."""
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise _unshardable(optimizer, "its step method was replaced on the instance")
    for name in ("train", "eval"):
        if hasattr(optimizer, name):
            raise _unshardable(optimizer, f"its {name}() modifies parameters")
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, value in vars(optimizer).items():
        if name in ("param_groups", "state"):
            continue
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(item, Optimizer) or id(item) in parameters for item in items):
            raise _unshardable(
                optimizer, f"its attribute {name!r} references parameters or an optimizer outside its groups"
            )


def _unshardable(optimizer: Optimizer, why: str, *, do: str | None = None) -> UsageError:
    return UsageError(
        f"the state of {type(optimizer).__name__} cannot be sharded: {why}",
        where="Accelerator(engine='zero1').prepare",
        do=do or "use a torch.optim optimizer other than LBFGS, or the ddp engine",
    )
