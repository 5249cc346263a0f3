"""The tracker for Comet."""

from __future__ import annotations

from typing import Any

from echelon.base.optional import require
from echelon.trackers.base import GeneralTracker, on_main_process
from echelon.trackers.values import DroppedValues, hide_secrets, is_number, plain

__all__ = ["CometMLTracker"]


class CometMLTracker(GeneralTracker):
    """Logs to a ``comet_ml`` experiment; comet_ml reads the API key from its own configuration.

    Args:
        run_name: the project's name.
        kwargs: arguments for ``comet_ml.start`` (for ``comet_ml.Experiment`` before comet_ml 3.41).
    """

    name = "comet_ml"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.writer: Any = None
        self._dropped = DroppedValues("Comet")

    @on_main_process
    def start(self) -> None:
        """Start the experiment."""
        comet_ml: Any = require("comet_ml", extra="comet_ml", purpose="log_with='comet_ml'")
        # Since 3.41; it works offline and can resume an experiment.
        start = comet_ml.start if hasattr(comet_ml, "start") else comet_ml.Experiment
        self.writer = start(project_name=self.run_name, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The experiment; None before ``start`` and on ranks that do not write."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings as the experiment's parameters."""
        self.writer.log_parameters(plain(hide_secrets(values)))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log each value with ``log_metric``, ``log_other`` or ``log_metrics``, which receive ``kwargs``."""
        if step is not None:
            self.writer.set_step(step)
        for name, value in plain(values).items():
            if is_number(value):
                self.writer.log_metric(name, value, step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.log_other(name, value, **kwargs)
            elif isinstance(value, dict):
                self.writer.log_metrics(value, step=step, **kwargs)
            else:
                self._dropped.warn_once(name, value, "a number, a string or a dict of numbers")

    @on_main_process
    def finish(self) -> None:
        """Send pending data and end the experiment."""
        self.writer.end()
