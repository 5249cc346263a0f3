"""Options for the deepspeed engine, and placeholders for the optimizer and scheduler in DeepSpeed's config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedOptions:
    """DeepSpeed's config, and settings that it has no keys for."""

    config: Mapping[str, Any] = field(default_factory=lambda: {"zero_optimization": {"stage": 2}})
    """Contents of ``ds_config.json``. ``prepare`` reads them and requires that all ``"auto"`` values are resolved."""
    loop_clips: bool = False
    """Whether the loop's own clipping replaces ``gradient_clipping``. Otherwise the smaller of the two norms applies."""
    makes_shards: bool = False
    """Whether models are already sharded when they are created (by ``deepspeed.zero.Init``, which transformers calls)."""
    leaf_classes: tuple[str, ...] = ()
    """Module classes (mixtures of experts) whose parameters stage 3 always gathers together."""


class DummyOptim:
    """A placeholder that ``prepare`` replaces with the optimizer from DeepSpeed's config.

    Args:
        params: parameters or parameter groups.
        lr: learning rate that replaces ``"auto"`` in the config.
        weight_decay: weight decay that replaces ``"auto"`` in the config.
        kwargs: other arguments, which are stored unchanged.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """A placeholder that ``prepare`` replaces with the config's scheduler or the one from ``lr_scheduler_callable``.

    Args:
        optimizer: a ``DummyOptim`` or an optimizer.
        total_num_steps: number of steps, in batches of the unprepared loader, that replaces ``"auto"`` in the config.
        warmup_num_steps: number of warmup steps that replaces ``"auto"`` in the config.
        lr_scheduler_callable: function that creates a scheduler for a given optimizer.
        kwargs: other arguments, which are stored unchanged.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


class DrivenScheduler:
    """A scheduler that DeepSpeed steps once per update, so its own ``step`` does nothing."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing, because the optimizer step also steps the scheduler."""

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)  # not set yet (unpickling)
        return getattr(self.scheduler, name)


def parameters_by_group(optimizer: Any) -> list[list[nn.Parameter]]:
    """Return the parameters in each group of an optimizer or a ``DummyOptim``."""
    if isinstance(optimizer, Optimizer):
        return [list(group["params"]) for group in optimizer.param_groups]
    optimizer.params = list(optimizer.params)  # a generator can be consumed only once
    if optimizer.params and isinstance(optimizer.params[0], Mapping):
        return [list(group["params"]) for group in optimizer.params]
    return [optimizer.params]
