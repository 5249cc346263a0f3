"""Trackers for Weights & Biases, and for SwanLab and Trackio, which share its interface.

wandb works offline with ``init_kwargs={"wandb": {"mode": "offline"}}`` or WANDB_MODE=offline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.base.optional import require
from echelon.trackers.base import GeneralTracker, on_main_process
from echelon.trackers.values import hide_secrets, plain

__all__ = ["SwanLabTracker", "TrackioTracker", "WandBTracker"]


class _RunTracker(GeneralTracker):
    """Logs to the run that the library's ``init(project=)`` starts.

    Args:
        run_name: the project's name.
        kwargs: arguments for the library's ``init``.
    """

    requires_logging_directory = False
    main_process_only = False
    name: str
    run: Any = None

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @property
    def tracker(self) -> Any:
        """The run; None before ``start``."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Start the run."""
        self.run = self._library().init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings in the run's config."""
        self._config().update(plain(hide_secrets(values)), allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log ``values``; ``kwargs`` are passed to the run's ``log``."""
        self.run.log(self._loggable(values), step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish()

    def _library(self) -> Any:
        return require(self.name, extra=self.name, purpose=f"log_with={self.name!r}")

    def _config(self) -> Any:
        return self._library().config

    def _loggable(self, values: Mapping[str, Any]) -> Any:
        return plain(values)

    def _log_images(self, values: dict[str, Any], step: int | None, kwargs: dict[str, Any]) -> None:
        for name, images in values.items():
            self.log({name: [self._library().Image(image) for image in images]}, step=step, **kwargs)


class WandBTracker(_RunTracker):
    """Logs to a ``wandb`` run. Tensors with multiple elements become histograms.

    Args:
        run_name: the project's name.
        kwargs: arguments of ``wandb.init``.
    """

    name = "wandb"

    def _config(self) -> Any:
        return self.run.config

    def _loggable(self, values: Mapping[str, Any]) -> Any:
        return {name: value if isinstance(plain(value), list) else plain(value) for name, value in values.items()}

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images; ``kwargs`` are passed to ``Run.log``."""
        self._log_images(values, step, kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table of arbitrary objects, given as ``columns`` and ``data`` or as ``dataframe``."""
        table = self._library().Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)


class SwanLabTracker(_RunTracker):
    """Logs to a ``swanlab`` run.

    Args:
        run_name: the project's name.
        kwargs: arguments of ``swanlab.init``.
    """

    name = "swanlab"

    @on_main_process
    def start(self) -> None:
        """Start the run."""
        super().start()
        self._config()["FRAMEWORK"] = "echelon"

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images; ``kwargs`` are passed to the run's ``log``."""
        self._log_images(values, step, kwargs)


class TrackioTracker(_RunTracker):
    """Logs to a ``trackio`` run.

    Args:
        run_name: the project's name.
        kwargs: arguments of ``trackio.init``.
    """

    name = "trackio"
