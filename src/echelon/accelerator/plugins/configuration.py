"""Loader, accumulation and compilation options of the Accelerator, under Accelerate's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from echelon.accelerator.plugins.kwargs_handlers import KwargsHandler
from echelon.base.errors import ConfigError
from echelon.base.keywords import suggest_keywords
from echelon.compat.enums import DynamoBackend
from echelon.config.sources import current
from echelon.data.exact.exact_batches import OrderKind

__all__ = ["DataLoaderConfiguration", "GradientAccumulationPlugin", "TorchDynamoPlugin"]


@suggest_keywords
@dataclass
class DataLoaderConfiguration:
    """How loaders are sharded over the processes; see ``LoaderOptions`` for fields without a description."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    order: OrderKind = "randperm"
    """Exact modes: shuffle by an explicit permutation, or by one that needs no memory and no time to seek (``feistel``)."""
    already_sharded: bool | None = None
    """Whether loaders already give each process its own shard, which is kept; None: detected (``DistributedSampler`` and
    similar samplers, webdataset, MosaicML streaming, ``split_dataset_by_node``, ...)."""
    replay_iterable: bool = False
    """Exact modes: resume stateless iterable data by reading everything before the position again."""


@suggest_keywords
@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients are accumulated over micro-batches."""

    num_steps: int | None = None
    adjust_scheduler: bool = True
    """No effect, as in Accelerate, which drops it: counting the steps that a scheduler skips while gradients are accumulated
    would end OneCycleLR early."""
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is not None and self.num_steps < 1:
            raise ConfigError(f"num_steps={self.num_steps} is below 1", do="set num_steps to 1 or more")


@suggest_keywords
@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of ``torch.compile`` for prepared models. None: from the environment or the launcher."""

    backend: DynamoBackend | str | None = None
    """Backend; ``no`` disables compilation. Never None after construction."""
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    """None if it is not configured anywhere: torch decides."""
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None
    """Compile the repeated blocks of a model separately, for a shorter first compilation."""

    def __post_init__(self) -> None:
        config = current().value
        name = str(config.dynamo_backend if self.backend is None else self.backend)
        if name.upper() not in DynamoBackend:
            choices = ", ".join(backend.value.lower() for backend in DynamoBackend)
            raise ConfigError(f"{name!r} is not a backend of torch.compile", do=f"use one of {choices}")
        self.backend = DynamoBackend(name.upper())
        if self.mode is None:
            self.mode = config.dynamo_mode
        if self.fullgraph is None:
            self.fullgraph = config.dynamo_use_fullgraph
        if self.use_regional_compilation is None:
            self.use_regional_compilation = config.dynamo_use_regional_compilation
        if self.dynamic is None:
            self.dynamic = config.dynamo_use_dynamic

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, with the backend in lower case as torch spells it."""
        return {**super().to_dict(), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of ``torch.compile`` that differ from the defaults."""
        return {name: value for name, value in super().to_kwargs().items() if name != "use_regional_compilation"}
