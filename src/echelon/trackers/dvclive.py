"""The tracker for DVCLive."""

from __future__ import annotations

from typing import Any

from echelon.base.optional import require
from echelon.trackers.base import GeneralTracker, on_main_process
from echelon.trackers.values import DroppedValues, hide_secrets, plain

__all__ = ["DVCLiveTracker"]


class DVCLiveTracker(GeneralTracker):
    """Logs to a ``dvclive.Live``.

    Args:
        run_name: ignored, because DVCLive names its runs itself.
        live: an existing ``Live``.
        kwargs: arguments of ``dvclive.Live``.
    """

    name = "dvclive"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.live = live
        self.init_kwargs = kwargs
        self._dropped = DroppedValues("DVCLive")

    @on_main_process
    def start(self) -> None:
        """Create the ``Live`` object unless one was given."""
        if self.live is None:
            dvclive: Any = require("dvclive", extra="dvclive", purpose="log_with='dvclive'")
            self.live = dvclive.Live(**self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The ``Live`` object; None before ``start`` and on ranks that do not write."""
        return self.live

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings as parameters."""
        self.live.log_params(plain(hide_secrets(values)))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log ``values`` and advance to the next step; ``kwargs`` are passed to ``Live.log_metric``."""
        plots: Any = require("dvclive.plots", extra="dvclive", purpose="log_with='dvclive'")
        if step is not None:
            self.live.step = step
        for name, value in plain(values).items():
            if plots.Metric.could_log(value):
                self.live.log_metric(name, value, **kwargs)
            else:
                self._dropped.warn_once(name, value, "a number or a string")
        self.live.next_step()

    @on_main_process
    def finish(self) -> None:
        """End the ``Live``."""
        self.live.end()
