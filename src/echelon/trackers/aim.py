"""The tracker for Aim."""

from __future__ import annotations

import os
from typing import Any

from echelon.base.optional import require
from echelon.trackers.base import GeneralTracker, on_main_process
from echelon.trackers.values import hide_secrets, plain

__all__ = ["AimTracker"]


class AimTracker(GeneralTracker):
    """Logs to an ``aim.Run``.

    Args:
        run_name: the run's name.
        logging_dir: Aim repository.
        kwargs: arguments of ``aim.Run``.
    """

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.aim_repo_path = logging_dir
        self.init_kwargs = kwargs
        self.writer: Any = None

    @on_main_process
    def start(self) -> None:
        """Start the run."""
        self.writer = _aim().Run(repo=self.aim_repo_path, **self.init_kwargs)
        self.writer.name = self.run_name

    @property
    def tracker(self) -> Any:
        """The run; None before ``start`` and on ranks that do not write."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings under ``hparams``."""
        self.writer["hparams"] = plain(hide_secrets(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Track each value; ``kwargs`` are passed to ``Run.track``."""
        for name, value in plain(values).items():
            self.writer.track(value, name=name, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Track images or (image, caption) pairs.

        Args:
            values: images by name.
            step: global step.
            kwargs: arguments for ``aim.Image`` and ``Run.track``, as ``{"aim_image": {...}, "track": {...}}``.
        """
        given = kwargs or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            aim_image = _aim().Image(image, caption=caption, **given.get("aim_image", {}))
            self.writer.track(aim_image, name=name, step=step, **given.get("track", {}))

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.writer.close()


def _aim() -> Any:
    return require("aim", extra="aim", purpose="log_with='aim'")
