"""The Accelerator's loader, accumulation and compilation options, with Accelerate's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from echelon.accelerator.plugins.kwargs_handlers import KwargsHandler
from echelon.base.errors import ConfigError
from echelon.base.keywords import suggest_keywords
from echelon.compat.enums import DynamoBackend
from echelon.config.sources import current
from echelon.data.exact.exact_batches import OrderKind


@suggest_keywords
@dataclass
class DataLoaderConfiguration:
    """How loaders are sharded across processes; see ``LoaderOptions`` for fields without a description."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    order: OrderKind = "randperm"
    """How the exact modes shuffle: with a stored permutation (``randperm``), or one that needs no memory or seek time
    (``feistel``)."""
    already_sharded: bool | None = None
    """Whether loaders already yield a different shard on each process and are not sharded again. None: detect this
    (``DistributedSampler`` and similar samplers, webdataset, MosaicML streaming, ``split_dataset_by_node``, ...)."""
    replay_iterable: bool = False
    """Whether the exact modes resume stateless iterable data by rereading everything before the saved position."""


@suggest_keywords
@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients are accumulated over micro-batches."""

    num_steps: int | None = None
    adjust_scheduler: bool = True
    """Has no effect, as in Accelerate: counting the steps that a scheduler skips during gradient accumulation would end
    OneCycleLR early."""
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is not None and self.num_steps < 1:
            raise ConfigError(f"num_steps={self.num_steps} is below 1", do="set num_steps to 1 or more")


@suggest_keywords
@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """``torch.compile`` arguments for prepared models. None: use the setting ``dynamo_*``."""

    backend: DynamoBackend | str | None = None
    """Compiler backend; ``no`` disables compilation. Never None after construction."""
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    """Whether to compile for dynamic shapes. None (if not configured anywhere): torch decides."""
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None
    """Compile the repeated blocks of a model separately, for a shorter first compilation."""

    _UNSET = MappingProxyType(
        {"backend": "no", "mode": "default", "fullgraph": False, "dynamic": None, "use_regional_compilation": False}
    )

    def __post_init__(self) -> None:
        config = current().value
        name = str(config.dynamo_backend if self.backend is None else self.backend)
        if name.upper() not in DynamoBackend:
            choices = ", ".join(backend.value.lower() for backend in DynamoBackend)
            raise ConfigError(f"{name!r} is not a torch.compile backend", do=f"use one of {choices}")
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
        """Return the fields, with the backend in lower case, as torch expects it."""
        return {**super().to_dict(), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the ``torch.compile`` arguments that differ from the defaults."""
        return {name: value for name, value in super().to_kwargs().items() if name != "use_regional_compilation"}
