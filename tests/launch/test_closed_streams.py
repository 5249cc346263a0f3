"""``echelon launch`` with closed standard streams, as in some daemons and cron jobs: only what is written to them is lost."""

from __future__ import annotations

import sys

import pytest

from tests.launch.conftest import Command

WRITES = """
import os
import sys

print("printed")
print("to stderr", file=sys.stderr)
with open("ran" + os.environ["RANK"], "w") as file:  # must not get what is printed
    file.write(str(sys.stdin is not None))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "closed",
    [">&-", ">&- 2>&- <&-", *(pytest.param(one, marks=pytest.mark.soak) for one in ("2>&-", "<&-"))],
)
def test_the_run_starts(closed: str, command: Command) -> None:
    command.write("train.py", WRITES)
    launch = f"{sys.executable} -m echelon launch -q --no_warm --cpu --num_processes=2 train.py"
    result = command.run(["sh", "-c", f"{launch} {closed}"])
    assert result.code == 0, result.err
    assert [(command.directory / f"ran{rank}").read_text() for rank in range(2)] == ["True"] * 2
    assert result.out.count("printed") == (0 if ">&-" in closed.split() else 2)
    assert result.err.count("to stderr") == (0 if "2>&-" in closed else 2)
