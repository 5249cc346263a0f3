"""Choices that are given to the Accelerator as objects, under Accelerate's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.base.errors import ConfigError

__all__ = ["DataLoaderConfiguration", "GradientAccumulationPlugin"]


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

    def __post_init__(self) -> None:
        for name in ("dispatch_batches", "use_stateful_dataloader"):
            if getattr(self, name):
                raise ConfigError(
                    f"DataLoaderConfiguration({name}=True) is not offered yet by this version of echelon",
                    do=f"leave {name} out",
                )


@dataclass
class GradientAccumulationPlugin:
    """How gradients are accumulated over micro-batches."""

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is not None and self.num_steps < 1:
            raise ConfigError(f"num_steps={self.num_steps} is below 1", do="accumulate over at least one micro-batch")
