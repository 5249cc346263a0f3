"""A run whose checkpoints cannot be written ends with a code of its own."""

from __future__ import annotations

import pytest

from tests.launch.conftest import Command

FULL = """
import errno
from echelon import Accelerator
from echelon.checkpoint import storage

def full(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")

storage.write = full
accelerator = Accelerator(cpu=True)
for step in range(9):
    print("step", step)
    accelerator.save_state("state", blocking=step % 2 == 0)
"""


@pytest.mark.slow
def test_checkpoints_that_cannot_be_written_end_the_run_with_exit_code_74(command: Command) -> None:
    command.write("full.py", FULL)
    result = command.launch("--cpu", "full.py")
    assert (result.code, "step 3" in result.out) == (74, False), result.err
    assert "3 consecutive checkpoints could not be written" in result.err
    assert "state could not be saved: [Errno 28] No space left on device" in result.err
