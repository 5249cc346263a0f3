"""Is this micro-batch the last of its update? One object for the accelerator, its optimizers, schedulers and loaders."""

from __future__ import annotations

from typing import Any

from echelon.accelerator.plugins import GradientAccumulationPlugin
from echelon.data.loader import PreparedLoader, Reading

__all__ = ["GradientState"]


class GradientState:
    """The counters of the accumulation window, under Accelerate's names.

    Each Accelerator has its own: two of them in one process do not touch each other.
    """

    def __init__(self, plugin: GradientAccumulationPlugin | None = None) -> None:
        self.plugin = plugin or GradientAccumulationPlugin(num_steps=1)
        self.reading = Reading()
        self.sync_gradients = True

    @property
    def num_steps(self) -> int:
        """Micro-batches in one update."""
        return self.plugin.num_steps or 1

    @property
    def adjust_scheduler(self) -> bool:
        """Count skipped scheduler steps while accumulating."""
        return self.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """End the window with the loader."""
        return self.plugin.sync_with_dataloader

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The plugin's fields."""
        return dict(vars(self.plugin))

    @property
    def active_dataloader(self) -> PreparedLoader | None:
        """The loader whose loop is the innermost one now."""
        return self.reading.innermost

    @property
    def dataloader_references(self) -> list[PreparedLoader | None]:
        """The loaders that are being read, after a None (as Accelerate keeps them)."""
        return [None, *self.reading.loaders]

    @property
    def in_dataloader(self) -> bool:
        """Is a prepared loader being read?"""
        return bool(self.reading.loaders)

    @property
    def end_of_dataloader(self) -> bool:
        """Is the batch in hand the last one of its loader?"""
        loader = self.reading.innermost
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Real samples in the last step of all ranks; -1 when all are."""
        loader = self.reading.innermost
        return -1 if loader is None else loader.remainder

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Always False: there is no XLA device."""
        return False

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients
