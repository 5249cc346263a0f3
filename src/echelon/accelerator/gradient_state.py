"""The gradient accumulation state, shared by the Accelerator, its optimizers, schedulers and loaders."""

from __future__ import annotations

from typing import Any

from echelon.accelerator.current import current_accelerator, has_accelerator
from echelon.accelerator.plugins.configuration import GradientAccumulationPlugin
from echelon.accelerator.views import view
from echelon.data.active_loaders import ActiveLoaders
from echelon.data.loader import PreparedLoader


class _SharedState:
    """Accelerate's shared dict: a copy of the current state's attributes, or empty without an Accelerator."""

    def __get__(self, state: object, kind: type[GradientState]) -> dict[str, Any]:
        return dict(vars(kind())) if has_accelerator() else {}


class GradientState:
    """The counters of the accumulation window, under Accelerate's names.

    Each Accelerator has its own state, so several in one process do not interfere.

    Args:
        gradient_accumulation_plugin: plugin for a new state. None: share the state of the Accelerator built last, or
            create a new state if there is none.
    """

    _shared_state = _SharedState()

    plugin: GradientAccumulationPlugin
    reading: ActiveLoaders[PreparedLoader]
    sync_gradients: bool
    micro_step: int
    """Number of the current ``accumulate()`` block in its window, starting at 1; 0 after the last block of a window."""
    has_loss: bool
    """Whether this micro-step ran a backward pass outside optimizer closures."""
    num_losses: int
    """Number of backward passes that ``accelerator.backward`` has run so far."""
    in_closure: bool
    """Whether an optimizer closure is running."""
    has_loss_in_closure: bool
    """Whether the last optimizer closure ran a backward pass."""
    closures_waiting: object | None
    """``Closures`` that were evaluated in this update and whose optimizer has not stepped yet; None if there are none.
    """

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        if gradient_accumulation_plugin is None and has_accelerator():
            self.__dict__ = current_accelerator().gradient_state.__dict__
            return
        self.plugin = gradient_accumulation_plugin or GradientAccumulationPlugin(num_steps=1)
        self.reading = ActiveLoaders(self)
        self.sync_gradients = True
        self.micro_step = 0
        self.num_losses = 0
        self.has_loss = self.in_closure = self.has_loss_in_closure = False
        self.closures_waiting = None

    @property
    def initialized(self) -> bool:
        """Always True: the constructor builds the complete state."""
        return True

    @staticmethod
    def _reset_state() -> None:
        """Do nothing, because the next Accelerator has its own state."""

    @property
    def num_steps(self) -> int:
        """Micro-batches per update."""
        return self.plugin.num_steps or 1

    @num_steps.setter
    def num_steps(self, num_steps: int) -> None:
        self.plugin.num_steps = num_steps

    adjust_scheduler: bool = view("plugin.adjust_scheduler", "See ``GradientAccumulationPlugin``.")
    sync_with_dataloader: bool = view(
        "plugin.sync_with_dataloader", "Whether the end of a loader ends the accumulation window."
    )

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The plugin's fields that differ from their defaults."""
        return self.plugin.to_kwargs()

    active_dataloader: PreparedLoader | None = view(
        "reading.innermost", "Loader that the innermost loop iterates over."
    )

    @property
    def dataloader_references(self) -> list[PreparedLoader | None]:
        """Loaders being iterated over, preceded by None, as in Accelerate."""
        return [None, *self.reading.loaders]

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated over."""
        return bool(self.reading.loaders)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last one of its loader."""
        loader = self.reading.innermost
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Number of distinct samples across all ranks in the last step; 0 if no sample is repeated, -1 if unknown."""
        loader = self.reading.innermost
        return -1 if loader is None else loader.remainder

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Always False, because XLA devices are not supported."""
        return False

    def count_loss(self) -> None:
        """Count a backward pass that ``accelerator.backward`` runs."""
        self.num_losses += 1
        if self.in_closure:
            self.has_loss_in_closure = True
        else:
            self.has_loss = True

    def drop_update(self) -> None:
        """Forget the micro-steps so far; the next one starts a new update."""
        self.sync_gradients = True
        self.micro_step = 0
        self.has_loss = False
        self.closures_waiting = None

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    def _add_dataloader(self, dataloader: Any) -> None:
        self.reading.loaders.append(dataloader)

    def _remove_dataloader(self, dataloader: Any) -> None:
        self.reading.loaders = [loader for loader in self.reading.loaders if loader is not dataloader]

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )
