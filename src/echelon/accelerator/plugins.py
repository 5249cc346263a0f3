"""Choices that are given to the Accelerator as objects, under Accelerate's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from echelon.accelerator.enums import DynamoBackend
from echelon.accelerator.handlers import KwargsHandler
from echelon.base.errors import ConfigError
from echelon.base.variables import parse_choice_from_env, parse_flag_from_env

__all__ = ["DataLoaderConfiguration", "GradientAccumulationPlugin", "TorchDynamoPlugin"]


@dataclass
class DataLoaderConfiguration:
    """How loaders are cut for the processes."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients are accumulated over micro-batches."""

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is not None and self.num_steps < 1:
            raise ConfigError(f"num_steps={self.num_steps} is below 1", do="accumulate over at least one micro-batch")


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """How prepared models are compiled: the arguments of ``torch.compile``. None: from ``ACCELERATE_DYNAMO_*``."""

    backend: DynamoBackend | str | None = None
    """In any case; ``no``: not compiled."""
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    """None also without a variable: torch finds out."""
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None
    """Compile the repeated blocks of a model one by one: a shorter first compilation."""

    def __post_init__(self) -> None:
        name = str(self.backend) if self.backend is not None else parse_choice_from_env("ACCELERATE_DYNAMO_BACKEND")
        if name.upper() not in DynamoBackend:
            choices = ", ".join(backend.value.lower() for backend in DynamoBackend)
            raise ConfigError(f"{name!r} is no backend of torch.compile", do=f"give one of {choices}")
        self.backend = DynamoBackend(name.upper())
        if self.mode is None:
            self.mode = parse_choice_from_env("ACCELERATE_DYNAMO_MODE", "default")
        if self.fullgraph is None:
            self.fullgraph = parse_flag_from_env("ACCELERATE_DYNAMO_USE_FULLGRAPH")
        if self.use_regional_compilation is None:
            self.use_regional_compilation = parse_flag_from_env("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION")
        if self.dynamic is None and parse_flag_from_env("ACCELERATE_DYNAMO_USE_DYNAMIC"):
            self.dynamic = True

    def to_dict(self) -> dict[str, Any]:
        """Return the fields; the backend in lower case, as torch spells it."""
        return {**super().to_dict(), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of ``torch.compile`` that differ from the defaults."""
        return {name: value for name, value in super().to_kwargs().items() if name != "use_regional_compilation"}
