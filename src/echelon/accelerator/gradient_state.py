"""Is this micro-batch the last of its update? One object for the accelerator, its optimizers, schedulers and loaders."""

from __future__ import annotations

from typing import Any

from echelon.accelerator.current import current_accelerator, has_accelerator
from echelon.accelerator.plugins.configuration import GradientAccumulationPlugin
from echelon.data.active_loaders import ActiveLoaders
from echelon.data.loader import PreparedLoader

__all__ = ["GradientState"]


class _SharedState:
    """The dict that Accelerate's states share: here a copy of what the current one holds, empty without an Accelerator."""

    def __get__(self, state: object, kind: type[GradientState]) -> dict[str, Any]:
        return dict(vars(kind())) if has_accelerator() else {}


class GradientState:
    """The counters of the accumulation window, under Accelerate's names.

    Each Accelerator has its own: two of them in one process do not touch each other.

    Args:
        gradient_accumulation_plugin: of a new state; None: a view of the state of the Accelerator built last (a new
            state where there is none).
    """

    _shared_state = _SharedState()

    plugin: GradientAccumulationPlugin
    reading: ActiveLoaders[PreparedLoader]
    sync_gradients: bool
    micro_step: int
    """The number of the ``accumulate()`` that we are in, in its window, from 1; 0: in none that ends one."""
    has_loss: bool
    """Was a loss of this micro-step backpropagated, outside the closures of optimizers?"""
    in_closure: bool
    """Are we in such a closure?"""
    has_loss_in_closure: bool
    """Did the last one backpropagate?"""
    closures_waiting: object | None
    """Whose closures were evaluated in the update, whose steps are still to come; None: nobody's."""

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        if gradient_accumulation_plugin is None and has_accelerator():
            self.__dict__ = current_accelerator().gradient_state.__dict__
            return
        self.plugin = gradient_accumulation_plugin or GradientAccumulationPlugin(num_steps=1)
        self.reading = ActiveLoaders(self)
        self.sync_gradients = True
        self.micro_step = 0
        self.has_loss = self.in_closure = self.has_loss_in_closure = False
        self.closures_waiting = None

    @property
    def initialized(self) -> bool:
        """Always: a state is made whole."""
        return True

    @staticmethod
    def _reset_state() -> None:
        """Do nothing: the next Accelerator has a state of its own without it."""

    @property
    def num_steps(self) -> int:
        """Micro-batches in one update."""
        return self.plugin.num_steps or 1

    @num_steps.setter
    def num_steps(self, num_steps: int) -> None:
        self.plugin.num_steps = num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """See ``GradientAccumulationPlugin``."""
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
        """New samples of all ranks in the last step of the loader; 0 when all are, -1 when nobody knows."""
        loader = self.reading.innermost
        return -1 if loader is None else loader.remainder

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Always False: there is no XLA device."""
        return False

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )
