"""Callbacks that send logs to the trackers in ``report_to``, and to a CSV file."""

from __future__ import annotations

import csv
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.accelerator.plugins.project_configuration import ProjectConfiguration
from echelon.accelerator.tracking import library_variable
from echelon.trainer.arguments.training_arguments import TrainingArguments, resolve_path
from echelon.trainer.callbacks.callback_handler import TrainerCallback

if TYPE_CHECKING:
    from echelon.accelerator import Accelerator

# Trackers that write to the run's directory; the others have a project and a run name.
_IN_FOLDERS = frozenset({"tensorboard", "jsonl", "csv", "dvclive"})


def tracker_settings(args: TrainingArguments) -> dict[str, Any]:
    """Return the keyword arguments that give the Accelerator its trackers' names and directory."""
    names = [name for name in args.report_to or () if name != "csv"]
    if not names:
        return {}
    if "jsonl" not in names:
        names.append("jsonl")  # the Accelerator writes this file anyway; as a tracker it is closed with the others
    folder = run_folder(args)
    only_files = all(name in _IN_FOLDERS for name in names)
    project = ProjectConfiguration(project_dir=resolve_path(args), logging_dir=folder.parent if only_files else folder)
    return {"log_with": names, "project_config": project}


def run_folder(args: TrainingArguments) -> Path:
    """Return this run's log directory: ``logging_dir``, or ``output_dir/runs/<time>_<machine>``."""
    if args.logging_dir is not None:
        return resolve_path(args, args.logging_dir)
    given = library_variable("TENSORBOARD_LOGGING_DIR")
    if given:
        return resolve_path(args, given)
    name = args.run_name or f"{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}"
    return resolve_path(args) / "runs" / name


def add_split_prefixes(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Rename metrics to ``eval/loss``, ``test/loss`` or ``train/loss``, as transformers does for trackers."""
    result = {}
    for name, value in logs.items():
        split = name.partition("_")[0]
        result[f"{split}/{name[len(split) + 1 :]}" if split in ("eval", "test") else f"train/{name}"] = value
    return result


class TrackerCallback(TrainerCallback):
    """Sends logs to the Accelerator's trackers, which are started for the first training run or log entry."""

    def __init__(self, accelerator: Callable[[], Accelerator], folder: Path) -> None:
        self._accelerator = accelerator
        self._folder = folder
        self._started: Accelerator | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Start the trackers and store the run's settings."""
        self._start(args, model)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        """Send the numeric values."""
        self._start(args, model)
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, (int, float))}
        if numbers:
            self._accelerator().log(add_split_prefixes(numbers), step=state.global_step)

    def _start(self, args: Any, model: Any) -> None:
        accelerator = self._accelerator()
        if self._started is accelerator:
            return
        self._started = accelerator  # each trial of a search has a new Accelerator
        names = [str(name) for name in accelerator.log_with]
        config = args.to_sanitized_dict()
        to_dict = getattr(getattr(model, "config", None), "to_dict", None)
        if callable(to_dict):
            config |= {f"model/{name}": str(value) for name, value in to_dict().items()}
        in_folders = all(name in _IN_FOLDERS for name in names)
        # Services group runs in projects; file trackers use a directory per run.
        project = self._folder.name if in_folders else library_variable("WANDB_PROJECT") or args.project
        more = {"wandb": {"name": args.run_name}} if args.run_name and "wandb" in names else {}
        spaces = {"space_id": args.trackio_space_id, "bucket_id": args.trackio_bucket_id, "name": args.run_name}
        if "trackio" in names:
            more["trackio"] = {name: value for name, value in spaces.items() if value}
        accelerator.init_trackers(project, config=config, init_kwargs=more)


class CSVCallback(TrainerCallback):
    """Writes logs to ``metrics.csv``, one row per log entry and one column per metric; new metrics add columns."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.csv"
        self._columns: list[str] = ["step"]
        self._rows: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Append a row; rewrite the file if the logs contain new metrics."""
        if not state.is_world_process_zero or not logs:
            return
        row = {"step": state.global_step, **logs}
        new = [name for name in row if name not in self._columns]
        self._rows.append(row)
        self._columns += new
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_first = bool(new) or not self.path.exists()
        with self.path.open("w" if is_first else "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            if is_first:
                writer.writeheader()
            writer.writerows(self._rows if is_first else [row])
