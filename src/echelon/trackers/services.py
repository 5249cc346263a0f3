"""Trackers for the libraries of tracking services, each with the attributes and methods of Accelerate's class.

wandb works offline with ``init_kwargs={"wandb": {"mode": "offline"}}`` or WANDB_MODE=offline; MLflow logs to a server or a directory
(MLFLOW_TRACKING_URI=file:...).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.base.errors import UsageError
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.optional import is_available, require
from echelon.config.variables import library_flag, library_variable
from echelon.trackers.base import GeneralTracker, on_main_process
from echelon.trackers.values import DroppedValues, flat, hide_secrets, is_number, plain

_logger = get_logger(__name__)


class _ServiceTracker(GeneralTracker):
    """A tracker that is constructed with the arguments of the library's own object, which ``start`` creates.

    Args:
        run_name: the project's or the run's name.
        kwargs: arguments of the library's object.
    """

    requires_logging_directory = False
    name: str
    writer: Any = None
    """The library's object; None before ``start`` and on ranks that do not write."""

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @property
    def tracker(self) -> Any:
        """The library's object; None before ``start`` and on ranks that do not write."""
        return self.writer

    def _library(self, module: str | None = None) -> Any:
        """Return the library, or one of its modules.

        Raises:
            MissingExtraError: it is not installed.
        """
        return require(module or self.name, extra=self.name, purpose=f"log_with={self.name!r}")


class TensorBoardTracker(_ServiceTracker):
    """Writes to ``<logging_dir>/<run_name>`` with the ``SummaryWriter`` from ``torch.utils.tensorboard`` or
    tensorboardX.

    Args:
        run_name: name for the run and its directory.
        logging_dir: parent directory.
        kwargs: arguments of ``SummaryWriter``.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = os.path.join(logging_dir, run_name)
        self._dropped = DroppedValues("TensorBoard")

    @on_main_process
    def start(self) -> None:
        """Open the writer."""
        if is_available("tensorboard") or not is_available("tensorboardX"):
            self._library()
            module = self._library("torch.utils.tensorboard")
        else:
            module = self._library("tensorboardX")
        self.writer = module.SummaryWriter(self.logging_dir, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the settings as hyperparameters and to ``<time>/hparams.yml``.

        In the event file, nested settings get names with slashes, and values other than numbers, strings and booleans
        become strings.
        """
        import yaml  # noqa: PLC0415 - slows down imports

        settings = plain(hide_secrets(values))
        known = {n: v if isinstance(v, (bool, int, float, str)) else str(v) for n, v in flat(settings)}
        self.writer.add_hparams(known, metric_dict={})
        self.writer.flush()
        folder = Path(self.logging_dir, str(time.time()))
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "hparams.yml").open("w", encoding="utf-8") as file:
            yaml.safe_dump({n: v if _is_yaml(v) else str(v) for n, v in settings.items()}, file)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write numbers as scalars, strings as text, and dicts of numbers as multiple curves in one chart.

        Args:
            values: values by name.
            step: global step.
            kwargs: arguments for ``add_scalar``, ``add_text`` or ``add_scalars``.
        """
        for name, value in plain(values).items():
            if is_number(value):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(name, value, global_step=step, **kwargs)
            else:
                self._dropped.warn_once(name, value, _("a number, a string or a dict of numbers"))
        self.writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write batches of images; ``kwargs`` are passed to ``add_images``."""
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the writer."""
        self.writer.close()


def _is_yaml(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, (str, int)) and _is_yaml(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(_is_yaml, value))
    return value is None or type(value) in (bool, int, float, str)


class AimTracker(_ServiceTracker):
    """Logs to an ``aim.Run``.

    Args:
        run_name: the run's name.
        logging_dir: Aim repository.
        kwargs: arguments of ``aim.Run``.
    """

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    @on_main_process
    def start(self) -> None:
        """Start the run."""
        self.writer = self._library().Run(repo=self.aim_repo_path, **self.init_kwargs)
        self.writer.name = self.run_name

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
            aim_image = self._library().Image(image, caption=caption, **given.get("aim_image", {}))
            self.writer.track(aim_image, name=name, step=step, **given.get("track", {}))

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.writer.close()


class CometMLTracker(_ServiceTracker):
    """Logs to a ``comet_ml`` experiment; comet_ml reads the API key from its own configuration.

    Args:
        run_name: the project's name.
        kwargs: arguments for ``comet_ml.start`` (for ``comet_ml.Experiment`` before comet_ml 3.41).
    """

    name = "comet_ml"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._dropped = DroppedValues("Comet")

    @on_main_process
    def start(self) -> None:
        """Start the experiment."""
        comet_ml = self._library()
        # Since 3.41; it works offline and can resume an experiment.
        start = comet_ml.start if hasattr(comet_ml, "start") else comet_ml.Experiment
        self.writer = start(project_name=self.run_name, **self.init_kwargs)

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
                self._dropped.warn_once(name, value, _("a number, a string or a dict of numbers"))

    @on_main_process
    def finish(self) -> None:
        """Send pending data and end the experiment."""
        self.writer.end()


class ClearMLTracker(_ServiceTracker):
    """Logs to the script's current ClearML task, or to a new one.

    Args:
        run_name: name of a new project and task, unless CLEARML_PROJECT and CLEARML_TASK are set.
        kwargs: arguments of ``clearml.Task.init``.
    """

    name = "clearml"

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.task: Any = None
        self._created_task = False
        self._dropped = DroppedValues("ClearML")

    @on_main_process
    def start(self) -> None:
        """Find or create the task."""
        clearml = self._library()
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
                self._dropped.warn_once(name, value, _("a number"))
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


class DVCLiveTracker(_ServiceTracker):
    """Logs to a ``dvclive.Live``.

    Args:
        run_name: ignored, because DVCLive names its runs itself.
        live: an existing ``Live``.
        kwargs: arguments of ``dvclive.Live``.
    """

    name = "dvclive"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.live = live
        self._dropped = DroppedValues("DVCLive")

    @on_main_process
    def start(self) -> None:
        """Create the ``Live`` object unless one was given."""
        if self.live is None:
            self.live = self._library().Live(**self.init_kwargs)

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
        plots = self._library("dvclive.plots")
        if step is not None:
            self.live.step = step
        for name, value in plain(values).items():
            if plots.Metric.could_log(value):
                self.live.log_metric(name, value, **kwargs)
            else:
                self._dropped.warn_once(name, value, _("a number or a string"))
        self.live.next_step()

    @on_main_process
    def finish(self) -> None:
        """End the ``Live``."""
        self.live.end()


class MLflowTracker(_ServiceTracker):
    """Logs to an MLflow run.

    The environment variables MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID, MLFLOW_TAGS and MLFLOW_NESTED_RUN override the
    arguments.

    Args:
        experiment_name: the experiment's name; it is created if it does not exist.
        logging_dir: artifact location for a new experiment.
        run_id: run to resume.
        tags: tags for the run and for a new experiment, as a dict or JSON text.
        nested_run: whether to nest the run in the active run.
        run_name: name for a new run.
        description: the run's description.
    """

    name = "mlflow"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name)
        tags = library_variable("MLFLOW_TAGS") or tags
        self.experiment_name = library_variable("MLFLOW_EXPERIMENT_NAME") or experiment_name
        self.logging_dir = logging_dir
        self.run_id = library_variable("MLFLOW_RUN_ID") or run_id
        self.tags = json.loads(tags) if isinstance(tags, str) else tags
        self.nested_run = library_flag("MLFLOW_NESTED_RUN", default=bool(nested_run))
        self.description = description
        self.active_run: Any = None
        self._dropped = DroppedValues("MLflow")

    @on_main_process
    def start(self) -> None:
        """Find or create the experiment, and start the run."""
        mlflow = self._library()
        found = mlflow.search_experiments(filter_string=f"name = '{self.experiment_name}'")
        if len(found) > 1:
            _logger.warning(N_("%d MLflow experiments are named %r; using the first"), len(found), self.experiment_name)
        location = None if self.logging_dir is None else os.fspath(self.logging_dir)
        experiment_id = (
            found[0].experiment_id
            if found
            else mlflow.create_experiment(name=self.experiment_name, artifact_location=location, tags=self.tags)
        )
        self.active_run = mlflow.start_run(
            run_id=self.run_id,
            experiment_id=experiment_id,
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    @property
    def tracker(self) -> Any:
        """The run; None before ``start`` and on ranks that do not write."""
        return self.active_run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings as parameters, in batches that MLflow accepts; skip values that are too long."""
        mlflow = self._library()
        limits = self._library("mlflow.utils.validation")
        kept: list[tuple[str, Any]] = []
        for name, value in plain(hide_secrets(values)).items():
            if len(str(value)) > limits.MAX_PARAM_VAL_LENGTH:
                limit = limits.MAX_PARAM_VAL_LENGTH
                self._dropped.warn_once(name, value, _("parameters of at most {number} characters", number=limit))
            else:
                kept.append((name, value))
        size = limits.MAX_PARAMS_TAGS_PER_BATCH
        for first in range(0, len(kept), size):
            mlflow.log_params(dict(kept[first : first + size]))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers; ``kwargs`` are passed to ``mlflow.log_metrics``."""
        metrics = {}
        for name, value in plain(values).items():
            if is_number(value):
                metrics[name] = value
            else:
                self._dropped.warn_once(name, value, _("a number"))
        self._library().log_metrics(metrics, step=step, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Store a figure as the artifact ``artifact_file``."""
        self._library().log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Store the files in ``local_dir`` as artifacts under ``artifact_path``."""
        self._library().log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store one file as an artifact under ``artifact_path``."""
        self._library().log_artifact(local_path=local_path, artifact_path=artifact_path)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self._library().end_run()


class _RunTracker(_ServiceTracker):
    """Logs to the run that the library's ``init(project=)`` starts.

    Args:
        run_name: the project's name.
        kwargs: arguments for the library's ``init``.
    """

    main_process_only = False
    run: Any = None

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)

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

    def _config(self) -> Any:
        return self._library().config

    def _loggable(self, values: Mapping[str, Any]) -> Any:
        return plain(values)


class _ImageRunTracker(_RunTracker):
    """Logs images, too."""

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images; ``kwargs`` are passed to the run's ``log``."""
        for name, images in values.items():
            self.log({name: [self._library().Image(image) for image in images]}, step=step, **kwargs)


class WandBTracker(_ImageRunTracker):
    """Logs to a ``wandb`` run. Tensors with multiple elements become histograms."""

    name = "wandb"

    def _config(self) -> Any:
        return self.run.config

    def _loggable(self, values: Mapping[str, Any]) -> Any:
        return {name: value if isinstance(plain(value), list) else plain(value) for name, value in values.items()}

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


class SwanLabTracker(_ImageRunTracker):
    """Logs to a ``swanlab`` run."""

    name = "swanlab"

    @on_main_process
    def start(self) -> None:
        """Start the run."""
        super().start()
        self._config()["FRAMEWORK"] = "echelon"


class TrackioTracker(_RunTracker):
    """Logs to a ``trackio`` run."""

    name = "trackio"
