"""Logs for other programs: the trackers that ``report_to`` names, and files of lines (JSON) and of columns (CSV)."""

from __future__ import annotations

import csv
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.accelerator.plugins.project_configuration import ProjectConfiguration
from echelon.base import environ
from echelon.trainer.arguments.training_arguments import TrainingArguments, resolve_path
from echelon.trainer.callbacks.callback_handler import TrainerCallback

if TYPE_CHECKING:
    from echelon.accelerator import Accelerator

__all__ = ["CSVCallback", "TrackerCallback", "by_split", "run_folder", "tracker_settings"]

# They write to a folder of the run; the others have a project and a name.
_IN_FOLDERS = frozenset({"tensorboard", "jsonl", "csv", "dvclive"})


def tracker_settings(args: TrainingArguments) -> dict[str, Any]:
    """Return the Accelerator's settings of the trackers: which, and the folder that holds the run's."""
    names = [name for name in args.report_to or () if name != "csv"]
    if not names:
        return {}
    if "jsonl" not in names:
        names.append("jsonl")  # a folder always brings this record: as a tracker it ends with the others
    folder = run_folder(args)
    only_files = all(name in _IN_FOLDERS for name in names)
    project = ProjectConfiguration(project_dir=resolve_path(args), logging_dir=folder.parent if only_files else folder)
    return {"log_with": names, "project_config": project}


def run_folder(args: TrainingArguments) -> Path:
    """Return where the files of this run go: ``logging_dir``, else ``output_dir/runs/<time>_<machine>``."""
    if args.logging_dir is not None:
        return resolve_path(args, args.logging_dir)
    given = environ.get("TENSORBOARD_LOGGING_DIR")
    if given:
        return resolve_path(args, given)
    name = args.run_name or f"{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}"
    return resolve_path(args) / "runs" / name


def by_split(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Name metrics as ``eval/loss``, ``test/loss`` and ``train/loss``, as transformers does for trackers."""
    result = {}
    for name, value in logs.items():
        split = name.partition("_")[0]
        result[f"{split}/{name[len(split) + 1 :]}" if split in ("eval", "test") else f"train/{name}"] = value
    return result


class TrackerCallback(TrainerCallback):
    """Sends what is logged to the trackers of the Accelerator; they start with the first training or log."""

    def __init__(self, accelerator: Callable[[], Accelerator], folder: Path) -> None:
        self._accelerator = accelerator
        self._folder = folder
        self._started: Accelerator | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Start the trackers, with the settings of the run."""
        self._start(args, model)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        """Send numbers; texts stay in the log."""
        self._start(args, model)
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, (int, float))}
        if numbers:
            self._accelerator().log(by_split(numbers), step=state.global_step)

    def _start(self, args: Any, model: Any) -> None:
        accelerator = self._accelerator()
        if self._started is accelerator:
            return
        self._started = accelerator  # a trial of a search has one of its own
        names = [str(name) for name in accelerator.log_with]
        config = args.to_sanitized_dict()
        to_dict = getattr(getattr(model, "config", None), "to_dict", None)
        if callable(to_dict):
            config |= {f"model/{name}": str(value) for name, value in to_dict().items()}
        in_folders = all(name in _IN_FOLDERS for name in names)
        # A service has a project with runs in it, a file tracker a folder.
        project = self._folder.name if in_folders else environ.get("WANDB_PROJECT") or args.project
        more = {"wandb": {"name": args.run_name}} if args.run_name and "wandb" in names else {}
        spaces = {"space_id": args.trackio_space_id, "bucket_id": args.trackio_bucket_id, "name": args.run_name}
        if "trackio" in names:
            more["trackio"] = {name: value for name, value in spaces.items() if value}
        accelerator.init_trackers(project, config=config, init_kwargs=more)


class CSVCallback(TrainerCallback):
    """Writes what is logged as ``metrics.csv``: a row a log, a column a metric; a new metric adds a column."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.csv"
        self._columns: list[str] = ["step"]
        self._rows: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add a row; all of them are written again when it has new columns."""
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
