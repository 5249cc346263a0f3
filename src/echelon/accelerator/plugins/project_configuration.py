"""Where a project keeps its checkpoints and logs, under Accelerate's names and defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from echelon.base.errors import UsageError

__all__ = ["ProjectConfiguration"]


@dataclass
class ProjectConfiguration:
    """The folders of a project, and how its checkpoints are named and kept.

    A relative folder is one of the working directory at the time when it is given: a later ``os.chdir`` changes nothing.
    """

    project_dir: str | os.PathLike[str] | None = None
    """Where data is stored."""
    logging_dir: str | os.PathLike[str] | None = None
    """Where trackers write; None: ``project_dir``."""
    automatic_checkpoint_naming: bool = False
    """``save_state`` numbers its folders: ``project_dir/checkpoints/checkpoint_0``, ..."""
    total_limit: int | None = None
    """The number of numbered checkpoints that are kept; None: all."""
    iteration: int = 0
    """The number of the next checkpoint."""
    save_on_each_node: bool = False
    """Save on every machine, not on the main one only."""
    checkpoint_format: Literal["echelon", "accelerate"] | None = None
    """How ``save_state`` writes: crash-safe, verified and layout-free, or as Accelerate; None: as
    ECHELON_CHECKPOINT_FORMAT says, else ``echelon``. ``load_state`` reads both."""
    max_failed_saves: int = 3
    """So many checkpoints in a row that the disk did not take end the run; fewer are reported."""
    keep_every: int | None = None
    """Numbered checkpoints whose number is a multiple of it are kept for good, and do not count; None: no such."""
    keep_best: int = 0
    """So many of the checkpoints that were saved with ``save_state(metric=)`` are kept, too: the best."""
    greater_is_better: bool = False
    """The best metric is the greatest one; else it is a loss."""

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, _absolute(value) if name in ("project_dir", "logging_dir") else value)

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)
        if self.keep_every is not None and self.keep_every < 1:
            raise UsageError(f"keep_every={self.keep_every} is below 1", do="give None to keep none for good")

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set ``project_dir``, and ``logging_dir`` too where it has none."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


def _absolute(folder: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
    """Return ``folder`` as it is where it is absolute, or the address of a service, else its path of now."""
    if folder is None or os.path.isabs(folder) or "://" in os.fspath(folder):
        return folder
    path = os.path.abspath(folder)
    return Path(path) if isinstance(folder, Path) else path
