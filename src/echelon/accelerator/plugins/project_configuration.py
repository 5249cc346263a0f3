"""Folders and retention for a project's checkpoints and logs, with Accelerate's names and defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from echelon.base.errors import UsageError
from echelon.base.keywords import suggest_keywords
from echelon.checkpoint.object_store import ObjectPath, local_folder_of, location


@suggest_keywords
@dataclass
class ProjectConfiguration:
    """A project's folders, and how its checkpoints are named and retained.

    Relative folders are resolved when they are set, so a later ``os.chdir`` has no effect.
    """

    project_dir: str | os.PathLike[str] | None = None
    """Folder for the project's files, or a URL such as ``s3://bucket/run`` for its checkpoints."""
    logging_dir: str | os.PathLike[str] | None = None
    """Folder for trackers. None: use ``project_dir``; if this is a URL, a local folder that is named after its last part."""
    automatic_checkpoint_naming: bool = False
    """Whether ``save_state`` numbers its folders: ``project_dir/checkpoints/checkpoint_0``, ..."""
    total_limit: int | None = None
    """Number of numbered checkpoints to keep. None: keep all."""
    iteration: int = 0
    """Number of the next checkpoint."""
    save_on_each_node: bool = False
    """Whether to save on every machine, not only on the first."""
    checkpoint_format: Literal["echelon", "accelerate"] | None = None
    """Format that ``save_state`` writes: echelon's own (crash-safe, verified, independent of engine and rank count) or
    Accelerate's. None: use ECHELON_CHECKPOINT_FORMAT, else ``echelon``. ``load_state`` reads both."""
    max_failed_saves: int = 3
    """Number of consecutive failed saves after which the run ends; fewer failures are only reported."""
    keep_every: int | None = None
    """Keep each checkpoint whose number is a multiple of this value, in addition to ``total_limit``. None: keep none.
    """
    keep_best: int = 0
    """Number of checkpoints with the best ``save_state(metric=...)`` to keep, in addition to ``total_limit``."""
    greater_is_better: bool = False
    """Whether a greater metric is better; by default a smaller one is better, as for a loss."""

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, _absolute(value) if name in ("project_dir", "logging_dir") else value)

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)
        if self.keep_every is not None and self.keep_every < 1:
            raise UsageError(
                f"keep_every={self.keep_every} is below 1", do="pass None if no checkpoint should be kept permanently"
            )

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set ``project_dir``, and also ``logging_dir`` if it is not set: for a URL, to a local folder with its last part."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            place = None if project_dir is None else location(project_dir)
            self.logging_dir = local_folder_of(place) if isinstance(place, ObjectPath) else project_dir


def _absolute(folder: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
    """Return ``folder`` unchanged if it is absolute or a URL, else as an absolute path."""
    if folder is None or os.path.isabs(folder) or "://" in os.fspath(folder):
        return folder
    path = os.path.abspath(folder)
    return Path(path) if isinstance(folder, Path) else path
