"""What a launcher hands to the processes of a run besides their settings: names of its files, and the run's identity."""

from __future__ import annotations

from typing import Literal

from echelon.base import environ

BOARD_VARIABLE = "ECHELON_BOARD"
"""Environment variable with the board's path and a slot (``/dev/shm/echelon-board-...:3``), which the launcher sets for its
ranks."""
NO_RECORD_VARIABLE = "ECHELON_NO_RECORD"
"""Environment variable that turns recording off, like ``--no_record``."""
RECORD_VARIABLE = "ECHELON_RECORD"
"""Environment variable with the attempt and the run's folder (``1:/home/me/echelon-runs/...``), which the launcher sets for its
ranks."""

# Environment variables with the run's name and attempt, set by the launcher. A later attempt supersedes an earlier one.
_RUNS = (
    ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
)
_PROGRAMS = (
    ("SLURM_JOB_ID", "slurm"),
    ("KUBERNETES_SERVICE_HOST", "kubernetes"),
    ("RAY_JOB_ID", "ray"),
    ("JPY_PARENT_PID", "notebook"),
    ("COLAB_RELEASE_TAG", "notebook (Colab)"),
    ("KAGGLE_KERNEL_RUN_TYPE", "notebook (Kaggle)"),
)


def board_slot() -> str | None:
    """Return the value of ``BOARD_VARIABLE``; None if echelon launch did not start this process."""
    return environ.own(BOARD_VARIABLE)


def recorded_run() -> str | None:
    """Return the value of ``RECORD_VARIABLE``; None if echelon launch does not record the run of this process."""
    return environ.own(RECORD_VARIABLE)


def is_recording_off() -> bool:
    """Return whether the environment turns recording off."""
    return environ.own(NO_RECORD_VARIABLE) not in (None, "0", "false")


def run_identity() -> tuple[str, int]:
    """Return a variable and its value (``NAME=value``) that identify the run, empty without a launcher, and the attempt."""
    for variable, count in _RUNS:
        name = environ.get(variable)
        if name is not None and name != "none":  # torchrun's default name
            text = environ.get(count) or "0"
            return f"{variable}={name}", int(text) if text.isdigit() else 0
    return "", 0


def attempt_number() -> str:
    """Return how often the launcher has restarted the processes of this run, as a decimal number."""
    return environ.get("TORCHELASTIC_RESTART_COUNT") or "0"


def has_elastic_agent() -> bool:
    """Return whether a launcher with torch's elastic agent (torchrun, echelon launch) started this process."""
    return environ.get("TORCHELASTIC_RUN_ID") is not None


def network_interface(backend: Literal["gloo", "nccl"]) -> str | None:
    """Return the network interface to which ``backend`` is bound; None if it chooses one itself."""
    return environ.get(f"{backend.upper()}_SOCKET_IFNAME")


def schedulers_and_notebooks() -> list[str]:
    """Return the schedulers and notebooks in which this process runs."""
    return [name for variable, name in _PROGRAMS if environ.get(variable) is not None]
