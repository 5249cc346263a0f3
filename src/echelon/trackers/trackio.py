"""Trackio."""

from __future__ import annotations

from typing import Any

from echelon.base.optional import require
from echelon.trackers.base import GeneralTracker, on_main_process
from echelon.trackers.values import hide_secrets, plain

__all__ = ["TrackioTracker"]


class TrackioTracker(GeneralTracker):
    """Logs to a run of ``trackio``.

    Args:
        run_name: the project.
        kwargs: of ``trackio.init``.
    """

    name = "trackio"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        self.run = _trackio().init(project=self.run_name, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The run; None before ``start``."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings in the run's config."""
        _trackio().config.update(plain(hide_secrets(values)), allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log ``values``; ``kwargs`` are those of the run's ``log``."""
        self.run.log(plain(values), step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish()


def _trackio() -> Any:
    return require("trackio", extra="trackio", purpose="log_with='trackio'")
