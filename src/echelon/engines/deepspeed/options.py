"""Options of the engine deepspeed, and placeholders for the optimizer and scheduler in DeepSpeed's config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["DeepSpeedOptions", "DummyOptim", "DummyScheduler", "DrivenScheduler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedOptions:
    """DeepSpeed's config, and settings for which it has no keys."""

    config: Mapping[str, Any] = field(default_factory=lambda: {"zero_optimization": {"stage": 2}})
    """Contents of ``ds_config.json``. ``prepare`` reads them and requires that every ``"auto"`` is resolved."""
    loop_clips: bool = False
    """Whether a norm to which the loop clips replaces ``gradient_clipping``. Otherwise the smaller of both applies."""
    makes_shards: bool = False
    """Whether models are created sharded before ``prepare`` (by ``deepspeed.zero.Init``, which transformers calls)."""
    leaf_classes: tuple[str, ...] = ()
    """Classes of modules (mixtures of experts) whose parameters stage 3 always gathers together."""


class DummyOptim:
    """A placeholder for the optimizer in DeepSpeed's config, which ``prepare`` returns in its place.

    Args:
        params: parameters, or groups of them.
        lr: resolves ``"auto"`` in the config.
        weight_decay: resolves ``"auto"`` in the config.
        kwargs: other arguments, stored unchanged.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """A placeholder for the scheduler in DeepSpeed's config, or for the result of ``lr_scheduler_callable``.

    Args:
        optimizer: a ``DummyOptim`` or an optimizer.
        total_num_steps: resolves ``"auto"`` in the config; counts batches of loaders before ``prepare``.
        warmup_num_steps: resolves ``"auto"`` in the config.
        lr_scheduler_callable: creates a scheduler for the given optimizer.
        kwargs: other arguments, stored unchanged.
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
    """A scheduler that DeepSpeed steps itself once per update, so that ``step`` does nothing."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing, because the optimizer step also steps the scheduler."""

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)  # not set yet (unpickling)
        return getattr(self.scheduler, name)
