"""Creates, starts, writes to and finishes all trackers of an Accelerator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from echelon.accelerator.plugins.project_configuration import ProjectConfiguration
from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.config.origin import SettingSource
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig, field_names
from echelon.config.variables import library_variable as library_variable
from echelon.distributed.record.recorder import recorder_of_process
from echelon.status.hyperparameters import Group
from echelon.trackers.base import GeneralTracker
from echelon.trackers.jsonl import JSONLTracker
from echelon.trackers.registry import filter_trackers, tracker_class


class Tracking:
    """The trackers selected by ``log_with``, and a JSONL record if the project has a folder.

    Call every method on every rank; each tracker decides on which ranks it acts. No method calls collectives.

    Args:
        log_with: see ``filter_trackers``.
        project: project configuration, whose ``logging_dir`` is read when the trackers start.

    Raises:
        UsageError: a tracker is unknown, or needs a folder but has none.
    """

    def __init__(self, log_with: Any, project: ProjectConfiguration) -> None:
        self._project = project
        self.log_with = filter_trackers(log_with, project.logging_dir)
        self.trackers: list[Any] = []
        self._record: JSONLTracker | None = None

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Start the trackers; each decides on which processes it writes.

        Args:
            project_name: name of the experiment.
            config: settings to store with the experiment, which the run's folder records, too (``log_hyperparameters``).
            init_kwargs: additional arguments for tracker initialization, by tracker name.

        Raises:
            UsageError: ``init_kwargs`` names a tracker that is not in use.

        Examples:
            >>> accelerator = Accelerator(log_with="tensorboard", project_dir="runs")  # doctest: +SKIP
            >>> accelerator.init_trackers("my_project", config={"learning_rate": 0.1})
            >>> accelerator.log({"loss": 0.5}, step=1)
            >>> accelerator.end_training()
        """
        given = dict(init_kwargs or {})
        self._warn_of_unused("init_kwargs", given)
        new = [self._make(kind, project_name, given.get(_name_of(kind), {})) for kind in self.log_with]
        self.trackers += new
        folder = self._project.logging_dir
        if folder is not None and self._record is None and not any(one.name == JSONLTracker.name for one in new):
            self._record = JSONLTracker(project_name, folder)
            new.append(self._record)
        for tracker in new:
            tracker.start()
        if config is not None:
            record_hyperparameters("logged", config)
            for tracker in new:
                tracker.store_init_configuration(dict(config))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker ``name``, or with ``unwrap`` its library's object (None on ranks that do not write).

        Before ``init_trackers``, this returns a tracker that does nothing.

        Raises:
            UsageError: there is no tracker with this name.

        Examples:
            >>> wandb_run = accelerator.get_tracker("wandb", unwrap=True)  # doctest: +SKIP
        """
        active = self._active()
        if not active:
            return GeneralTracker(_blank=True)
        for tracker in active:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        raise UsageError(
            _("get_tracker({name!r}): there is no such tracker", name=name),
            do=_("use one of {names}", names=", ".join(tracker.name for tracker in active)),
        )

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Log ``values`` at ``step`` with every tracker; call on every process.

        Args:
            values: numbers and strings by name.
            step: step of the run.
            log_kwargs: additional arguments for each tracker's ``log``, by tracker name.

        Examples:
            >>> accelerator.log({"loss": loss.item()}, step=10)
        """
        given = log_kwargs or {}
        record_values(values, step=step)
        for tracker in self._active():
            tracker.log(dict(values), step=step, **given.get(tracker.name, {}))

    def finish(self) -> None:
        """Finish every tracker, even if one fails, then raise the first failure. A second call does nothing."""
        active, self.trackers, self._record = self._active(), [], None
        failures = []
        for tracker in active:
            try:
                tracker.finish()
            except Exception as error:  # noqa: BLE001 - raised below, after the others are closed
                failures.append(error)
        if failures:
            raise failures[0]

    def _active(self) -> list[Any]:
        return [*self.trackers, *([self._record] if self._record is not None else [])]

    def _make(self, kind: Any, project_name: str, options: Mapping[str, Any]) -> Any:
        if isinstance(kind, GeneralTracker):
            return kind
        make = tracker_class(str(kind))
        folder = [self._project.logging_dir] if make.requires_logging_directory else []
        return make(project_name, *folder, **options)

    def _warn_of_unused(self, argument: str, given: Mapping[str, Any]) -> None:
        used = {_name_of(kind) for kind in self.log_with}
        unused = sorted(set(given) - used)
        if unused:
            warn(
                _(
                    "{argument} contains options for {unused}, but log_with has {tracker}, so they have no effect",
                    argument=argument,
                    unused=", ".join(unused),
                    tracker=", ".join(sorted(used)) or "no tracker",
                )
            )


def record_values(values: Mapping[str, Any], *, step: int | None, epoch: float | None = None) -> None:
    """Record the numbers in ``values`` in the run's folder, on rank zero."""
    recorder = recorder_of_process()
    if recorder is not None:
        recorder.log(values, step=step, epoch=epoch)


def record_hyperparameters(group: Group, values: Mapping[str, Any], *, defaults: Sequence[str] = ()) -> None:
    """Record values of any types in the run's folder, on rank zero; see ``ProcessRecorder.log_hyperparameters``."""
    recorder = recorder_of_process()
    if recorder is not None:
        recorder.log_hyperparameters(group, values, defaults=defaults)


def record_settings(config: Resolved[RunConfig], *, engine: str, accumulation: int) -> None:
    """Record the settings that decide what an update computes, and those that the script sets in its code."""
    of_code = [name for name in field_names(RunConfig) if config.origins[name].source is SettingSource.CODE]
    settings = {name: getattr(config.value, name) for name in ("mixed_precision", "parity", *of_code)}
    record_hyperparameters("training", {**settings, "gradient_accumulation_steps": accumulation, "engine": engine})


def _name_of(kind: Any) -> str:
    return str(kind.name) if isinstance(kind, GeneralTracker) else str(kind)  # type: ignore[attr-defined]
