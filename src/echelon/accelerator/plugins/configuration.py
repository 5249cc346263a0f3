"""Choices that are given to the Accelerator as objects, under Accelerate's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from echelon.accelerator.plugins.kwargs_handlers import KwargsHandler
from echelon.base.errors import ConfigError
from echelon.compat.enums import DynamoBackend
from echelon.config.sources import current
from echelon.data.exact.exact_batches import OrderKind

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
    order: OrderKind = "randperm"
    """Exact modes: shuffle by an explicit permutation, or (``feistel``) by one that takes no memory and no time to seek."""
    already_sharded: bool | None = None
    """Loaders give each process its own part already, and keep it (True); they do not, whatever it looks like (False); None: as
    it is recognised (``DistributedSampler`` and its like, webdataset, MosaicML streaming, ``split_dataset_by_node``, ...)."""
    replay_iterable: bool = False
    """Exact modes: resume iterable data without state by reading everything before the place again."""


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients are accumulated over micro-batches."""

    num_steps: int | None = None
    adjust_scheduler: bool = True
    """Without effect, as in Accelerate (which loses it on the way): to count the steps that a scheduler leaves out while
    gradients are accumulated would end OneCycleLR early."""
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is not None and self.num_steps < 1:
            raise ConfigError(f"num_steps={self.num_steps} is below 1", do="accumulate over at least one micro-batch")


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """How prepared models are compiled: the arguments of ``torch.compile``. None: from the environment or the launcher."""

    backend: DynamoBackend | str | None = None
    """In any case; ``no``: not compiled."""
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    """None there, too: torch finds out."""
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None
    """Compile the repeated blocks of a model one by one: a shorter first compilation."""

    def __post_init__(self) -> None:
        config = current().value
        name = str(config.dynamo_backend if self.backend is None else self.backend)
        if name.upper() not in DynamoBackend:
            choices = ", ".join(backend.value.lower() for backend in DynamoBackend)
            raise ConfigError(f"{name!r} is no backend of torch.compile", do=f"give one of {choices}")
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
        """Return the fields; the backend in lower case, as torch spells it."""
        return {**super().to_dict(), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of ``torch.compile`` that differ from the defaults."""
        return {name: value for name, value in super().to_kwargs().items() if name != "use_regional_compilation"}
