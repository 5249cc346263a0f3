"""The tracker for MLflow, which logs to a server or a directory (MLFLOW_TRACKING_URI=file:...)."""

from __future__ import annotations

import json
import os
from typing import Any

from echelon.base.logging import get_logger
from echelon.base.optional import require
from echelon.config.variables import library_flag, library_variable
from echelon.trackers.base import GeneralTracker, on_main_process
from echelon.trackers.values import DroppedValues, hide_secrets, is_number, plain

__all__ = ["MLflowTracker"]

_logger = get_logger(__name__)


class MLflowTracker(GeneralTracker):
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
    requires_logging_directory = False

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
        super().__init__()
        tags = library_variable("MLFLOW_TAGS") or tags
        self.experiment_name = library_variable("MLFLOW_EXPERIMENT_NAME") or experiment_name
        self.logging_dir = logging_dir
        self.run_id = library_variable("MLFLOW_RUN_ID") or run_id
        self.tags = json.loads(tags) if isinstance(tags, str) else tags
        self.nested_run = library_flag("MLFLOW_NESTED_RUN", default=bool(nested_run))
        self.run_name = run_name
        self.description = description
        self.active_run: Any = None
        self._dropped = DroppedValues("MLflow")

    @on_main_process
    def start(self) -> None:
        """Find or create the experiment, and start the run."""
        mlflow = _mlflow()
        found = mlflow.search_experiments(filter_string=f"name = '{self.experiment_name}'")
        if len(found) > 1:
            _logger.warning("%d MLflow experiments are named %r; using the first", len(found), self.experiment_name)
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
        mlflow = _mlflow()
        limits: Any = require("mlflow.utils.validation", extra="mlflow", purpose="log_with='mlflow'")
        kept: list[tuple[str, Any]] = []
        for name, value in plain(hide_secrets(values)).items():
            if len(str(value)) > limits.MAX_PARAM_VAL_LENGTH:
                self._dropped.warn_once(name, value, f"parameters of at most {limits.MAX_PARAM_VAL_LENGTH} characters")
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
                self._dropped.warn_once(name, value, "a number")
        _mlflow().log_metrics(metrics, step=step, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Store a figure as the artifact ``artifact_file``."""
        _mlflow().log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Store the files in ``local_dir`` as artifacts under ``artifact_path``."""
        _mlflow().log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store one file as an artifact under ``artifact_path``."""
        _mlflow().log_artifact(local_path=local_path, artifact_path=artifact_path)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        _mlflow().end_run()


def _mlflow() -> Any:
    return require("mlflow", extra="mlflow", purpose="log_with='mlflow'")
