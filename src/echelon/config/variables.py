"""Environment variables that are no settings of ``RunConfig``: choices for one feature each, and those of other libraries."""

from __future__ import annotations

from typing import Literal

from echelon.base import environ
from echelon.compat.variables import get_int_from_env, parse_flag_from_env
from echelon.config.origin import Origin, Setting, SettingSource
from echelon.config.sources import CHOSEN_THREADS

LibraryVariable = Literal[
    "CLEARML_PROJECT",
    "CLEARML_TASK",
    "CUBLAS_WORKSPACE_CONFIG",
    "MLFLOW_EXPERIMENT_NAME",
    "MLFLOW_RUN_ID",
    "MLFLOW_TAGS",
    "TENSORBOARD_LOGGING_DIR",
    "TORCH_EXTENSIONS_DIR",
    "WANDB_PROJECT",
]


def library_variable(name: LibraryVariable) -> str | None:
    """Return another library's variable, which echelon obeys as that library does; None if it is not set."""
    return environ.get(name)


def library_flag(name: Literal["ACCELERATE_INIT_INCLUDE_BUFFERS", "MLFLOW_NESTED_RUN"], *, default: bool) -> bool:
    """Return another library's variable as a bool, or ``default`` if it is not set.

    Raises:
        ConfigError: its value is not a valid boolean value.
    """
    return parse_flag_from_env(name, default)


def checkpoint_format() -> str | None:
    """Return ``ECHELON_CHECKPOINT_FORMAT``, the format of checkpoints if the code does not choose one."""
    return environ.get("ECHELON_CHECKPOINT_FORMAT")


def log_level() -> Setting | None:
    """Return the level of loggers, from ``ECHELON_LOG_LEVEL`` or ``ACCELERATE_LOG_LEVEL``."""
    for name in ("ECHELON_LOG_LEVEL", "ACCELERATE_LOG_LEVEL"):
        if (text := environ.get(name)) is not None:
            return Setting(text, Origin(SettingSource.ENV, name))
    return None


def users_threads() -> int | None:
    """Return ``OMP_NUM_THREADS``; None if it is not set, or the launcher has chosen it."""
    if environ.get("OMP_NUM_THREADS") == environ.get(CHOSEN_THREADS):
        return None
    return get_int_from_env(["OMP_NUM_THREADS"], 0) or None
