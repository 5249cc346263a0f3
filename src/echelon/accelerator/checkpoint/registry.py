"""Objects and hooks that a script registers with the Accelerator for its checkpoints."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

from echelon.accelerator.checkpoint.accelerate_layout import require_plain
from echelon.accelerator.plugins.project_configuration import ProjectConfiguration
from echelon.base.errors import CheckpointError, UsageError
from echelon.base.protocols import SupportsStateDict
from echelon.checkpoint import typed_json
from echelon.config.variables import checkpoint_format as checkpoint_format

__all__ = ["CheckpointRegistry"]


class CheckpointRegistry:
    """A run's custom objects, save hooks and load hooks."""

    def __init__(self, project: ProjectConfiguration) -> None:
        self._project = project
        self.custom_objects: list[Any] = []
        """Objects that are saved and loaded in addition to the prepared ones."""
        self.save_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self.load_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    def chosen_format(self) -> str:
        """Return the run's checkpoint format, ``echelon`` or ``accelerate``."""
        chosen = self._project.checkpoint_format or checkpoint_format() or "echelon"
        if chosen == "transformers" and self._project.checkpoint_format is None:
            chosen = "accelerate"  # the variable is for both levels of a program
        if chosen not in ("echelon", "accelerate"):
            raise UsageError(
                f"checkpoint_format must be 'echelon' or 'accelerate', but got {chosen!r}", do="set one of them"
            )
        return chosen

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include the state of ``objects`` in checkpoints.

        Raises:
            UsageError: an object lacks ``state_dict`` or ``load_state_dict``, or its state is not plain data.
        """
        invalid = [f"{i} ({type(o).__name__})" for i, o in enumerate(objects) if not isinstance(o, SupportsStateDict)]
        if invalid:
            raise UsageError(
                f"register_for_checkpointing: these arguments lack state_dict or load_state_dict: {', '.join(invalid)}",
                do="define both methods, or store the state in an object that has them",
            )
        require = _require_savable if self.chosen_format() == "echelon" else require_plain
        for one in objects:
            require(one)
        self.custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` on every rank when ``save_state`` writes.

        Entries that the hook removes from ``weights`` are not written; files that the hook writes into ``output_dir``
        become part of the checkpoint. The folder has a temporary name while it is written. Call ``remove()`` on the
        returned handle to remove the hook.
        """
        return _add_hook(self.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` on every rank before ``load_state`` reads.

        Entries that the hook removes from ``models`` are not loaded. Call ``remove()`` on the returned handle to remove
        the hook.
        """
        return _add_hook(self.load_hooks, hook)


def _add_hook(hooks: OrderedDict[int, Callable[..., Any]], hook: Callable[..., Any]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _require_savable(one: Any) -> None:
    """Raise if the state of ``one`` is not plain data."""
    try:
        typed_json.encode(one.state_dict(), name=f"the state of {type(one).__name__}", put_tensor=lambda *_: None)
    except CheckpointError as error:
        raise UsageError(
            error.what, where="register_for_checkpointing", do=f"in its state_dict(), {error.do}"
        ) from error
