"""What the deepspeed engine is told, and the objects that stand for an optimizer or a schedule of DeepSpeed's config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["DeepSpeedOptions", "DummyOptim", "DummyScheduler", "DrivenScheduler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedOptions:
    """DeepSpeed's own configuration, and what is not in it."""

    config: Mapping[str, Any] = field(default_factory=lambda: {"zero_optimization": {"stage": 2}})
    """As in ``ds_config.json``; read at ``prepare``, when no ``"auto"`` may be left in it."""
    loop_clips: bool = False
    """``gradient_clipping`` is a default: where the loop clips, its value counts instead of the smaller one of both."""
    makes_shards: bool = False
    """Models are made in shards before ``prepare`` (``deepspeed.zero.Init``, which transformers calls)."""
    leaf_classes: tuple[str, ...] = ()
    """Modules (of experts) whose parameters stage 3 gathers together, whichever of them a batch reaches."""


class DummyOptim:
    """Stands for the optimizer in DeepSpeed's config: ``prepare`` gives that one back.

    Args:
        params: of the model, or groups of them.
        lr: for ``"auto"`` in the config, as ``weight_decay``.
        weight_decay: see ``lr``.
        kwargs: other arguments; kept for the caller.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """Stands for the schedule in DeepSpeed's config, or for what ``lr_scheduler_callable`` makes of the real optimizer.

    Args:
        optimizer: a ``DummyOptim`` or an optimizer.
        total_num_steps: for ``"auto"`` in the config; of one process, as the steps of a loader before ``prepare``.
        warmup_num_steps: for ``"auto"`` in the config.
        lr_scheduler_callable: makes a schedule, given the optimizer.
        kwargs: other arguments; kept for the caller.
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
    """A schedule that DeepSpeed advances by itself, once with each update: ``step`` does nothing."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: the step of the optimizer has advanced it."""

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)  # not there yet (unpickling)
        return getattr(self.scheduler, name)
