"""An optimizer with sharded state that is created from an ordinary optimizer."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from echelon.base.errors import UsageError
from echelon.engines.optimizer_copy import copy_optimizer, load_own_state, no_full_state, why_not_copied

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
        reason = why_not_copied(optimizer)
        if reason is not None:
            raise unshardable(optimizer, reason)

        make_copy: Any = lambda groups, **_defaults: copy_optimizer(optimizer, groups)  # noqa: E731 - torch's type is a class
        try:
            super().__init__(optimizer.param_groups, optimizer_class=make_copy, **optimizer.defaults)
        except (TypeError, ValueError) as error:
            if len({p.dtype for group in optimizer.param_groups for p in group["params"]}) > 1:
                raise unshardable(
                    optimizer,
                    f"torch's ZeroRedundancyOptimizer requires one dtype: {error}",
                    do="pass it only the trained parameters ([p for p in model.parameters() if p.requires_grad]) if those have one "
                    "dtype, or use the ddp or fsdp2 engine",
                ) from error
            raise unshardable(optimizer, f"torch's ZeroRedundancyOptimizer rejects it: {error}") from error
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
        raise no_full_state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of a full state dict."""
        load_own_state(self, self.optim, state_dict, self._own(state_dict["state"]))

    def _own(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        parameters = self._index_to_param
        # Unknown numbers are kept, so that torch reports the mismatch of the groups; other keys belong to no parameter.
        return {
            number: value
            for number, value in state.items()
            if not isinstance(number, int) or number >= len(parameters) or self.owner(parameters[number]) == self.rank
        }


def unshardable(optimizer: Optimizer, why: str, *, do: str | None = None) -> UsageError:
    """Return the error for an optimizer whose state cannot be divided among ranks."""
    return UsageError(
        f"the state of {type(optimizer).__name__} cannot be sharded: {why}",
        where="Accelerator(engine='zero1').prepare",
        do=do or "use AdamW, SGD or another optimizer that updates each parameter independently, or the ddp engine",
    )
