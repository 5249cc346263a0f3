"""``run_bounded`` kills the processes of a command that does not end, also those in other sessions."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.ecosystem.bounded import run_bounded

_IN_OTHER_SESSION = "setsid sleep 600 & echo $!; "


def _is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("launcher", ["wait", "exit 0"])
def test_a_command_that_does_not_end_is_killed_with_its_ranks(tmp_path: Path, launcher: str) -> None:
    with pytest.raises(subprocess.TimeoutExpired) as late:
        run_bounded(
            ["sh", "-c", _IN_OTHER_SESSION + launcher], folder=tmp_path, variables=dict(os.environ), timeout_s=1.0
        )
    assert not _is_running(int(late.value.output))


def test_a_process_that_outlives_its_command_is_killed(tmp_path: Path) -> None:
    command = ["sh", "-c", "setsid sleep 600 > /dev/null 2>&1 & echo $!; exit 3"]
    done = run_bounded(command, folder=tmp_path, variables=dict(os.environ), timeout_s=60.0)
    assert done.returncode == 3
    assert not _is_running(int(done.stdout))
