"""Runs a command with a time limit, and leaves no process of it behind.

The ranks of torchrun and of echelon's launcher lead sessions of their own, so that neither killing the launcher nor its process group
reaches them. They are found by a variable that all processes of the run inherit.
"""

from __future__ import annotations

import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

_VARIABLE = "ECOSYSTEM_RUN"
_UNKILLABLE_AFTER_S = 10.0


def run_bounded(
    command: Sequence[str], *, folder: Path, variables: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` in ``folder``, and kill what it leaves running; standard error is part of the output.

    Raises:
        subprocess.TimeoutExpired: the command, or a process that writes to its output, did not end in time; it has the output.
    """
    token = uuid.uuid4().hex
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**variables, _VARIABLE: token},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as late:
            _kill_marked(token)
            output, _ = process.communicate()
            raise subprocess.TimeoutExpired(command, timeout_s, output=output) from late
        finally:
            _kill_marked(token)
    return subprocess.CompletedProcess(command, process.returncode, output)


def _kill_marked(token: str) -> None:
    """Kill the processes that carry ``token``, until none is left; one of them may just be starting another."""
    deadline = time.monotonic() + _UNKILLABLE_AFTER_S
    while found := _marked(token):
        assert time.monotonic() < deadline, f"{found} cannot be killed"
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(found, timeout=0.1)


def _marked(token: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_VARIABLE) == token:
                found.append(process)
    return found
