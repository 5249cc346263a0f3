"""The tracker for ClearML."""

from __future__ import annotations

from typing import Any

from echelon.base.errors import UsageError
from echelon.base.optional import require
from echelon.config.variables import library_variable
from echelon.trackers.base import GeneralTracker, on_main_process
from echelon.trackers.values import DroppedValues, hide_secrets, is_number, plain

__all__ = ["ClearMLTracker"]


class ClearMLTracker(GeneralTracker):
    """Logs to the script's current ClearML task, or to a new one.

    Args:
        run_name: name of a new project and task, unless CLEARML_PROJECT and CLEARML_TASK are set.
        kwargs: arguments of ``clearml.Task.init``.
    """

    name = "clearml"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.task: Any = None
        self._created_task = False
        self._dropped = DroppedValues("ClearML")

    @on_main_process
    def start(self) -> None:
        """Find or create the task."""
        clearml: Any = require("clearml", extra="clearml", purpose="log_with='clearml'")
        self.task = clearml.Task.current_task()
        if not self.task:
            names = {
                "project_name": library_variable("CLEARML_PROJECT") or self.run_name,
                "task_name": library_variable("CLEARML_TASK") or self.run_name,
            }
            self.task = clearml.Task.init(**{**names, **self.init_kwargs})
            self._created_task = True

    @property
    def tracker(self) -> Any:
        """The task; None before ``start`` and on ranks that do not write."""
        return self.task

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> Any:
        """Connect the settings to the task, and return the result of ``Task.connect_configuration``."""
        return self.task.connect_configuration(plain(hide_secrets(values)))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report numbers as scalars at ``step``, or as single values if ``step`` is None.

        Args:
            values: values by name; the name prefixes ``eval_``, ``test_`` and ``train_`` select the series (default:
                ``train``).
            step: iteration.
            kwargs: arguments for ``report_scalar`` or ``report_single_value``.
        """
        reporter = self.task.get_logger()
        for name, value in plain(values).items():
            if not is_number(value):
                self._dropped.warn_once(name, value, "a number")
            elif step is None:
                reporter.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = _title_and_series(name)
                reporter.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report images; ``kwargs`` are passed to ``report_image``."""
        for name, image in values.items():
            title, series = _title_and_series(name)
            self.task.get_logger().report_image(title=title, series=series, iteration=step, image=image, **kwargs)

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
        """Report a table, given as ``dataframe`` or as ``columns`` and ``data`` (default columns: the first row).

        Raises:
            UsageError: neither ``data`` nor ``dataframe`` is given.
        """
        if dataframe is None and data is None:
            raise UsageError("log_table() needs data or dataframe", do="pass one of them")
        table = dataframe if dataframe is not None else [*([columns] if columns else []), *(data or [])]
        title, series = _title_and_series(table_name)
        self.task.get_logger().report_table(title=title, series=series, table_plot=table, iteration=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the task, unless the script created it."""
        if self._created_task:
            self.task.close()


def _title_and_series(name: str) -> tuple[str, str]:
    series, _, title = name.partition("_")
    return (title, series) if title and series in ("eval", "test", "train") else (name, "train")
