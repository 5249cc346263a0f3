"""SwanLab."""

from __future__ import annotations

from typing import Any

from echelon.base.optional import require
from echelon.trackers.base import GeneralTracker, on_main_process
from echelon.trackers.values import hide_secrets, plain

__all__ = ["SwanLabTracker"]


class SwanLabTracker(GeneralTracker):
    """Logs to a run of ``swanlab``.

    Args:
        run_name: the project.
        kwargs: of ``swanlab.init``.
    """

    name = "swanlab"
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
        self.run = _swanlab().init(project=self.run_name, **self.init_kwargs)
        _swanlab().config["FRAMEWORK"] = "echelon"

    @property
    def tracker(self) -> Any:
        """The run; None before ``start``."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings in the run's config."""
        _swanlab().config.update(plain(hide_secrets(values)), allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log ``values``; ``kwargs`` are those of the run's ``log``."""
        self.run.log(plain(values), step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images; ``kwargs`` are those of the run's ``log``."""
        for name, images in values.items():
            self.log({name: [_swanlab().Image(image) for image in images]}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish()


def _swanlab() -> Any:
    return require("swanlab", extra="swanlab", purpose="log_with='swanlab'")
