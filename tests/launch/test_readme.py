"""The examples of README's first screen and of docs/parity.md run as they stand there, on one process and on several."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def _block(level: str, page: str = "README.md") -> str:
    found = re.search(rf"```python {level}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("level", ["level1", "level2", "level3"])
def test_the_examples_are_short_and_run(level: str, tmp_path: Path) -> None:
    code = _block(level)
    lines = [line for line in code.splitlines() if line.strip() and not line.startswith(("import ", "from "))]
    assert len(lines) <= 10
    script = tmp_path / f"{level}.py"
    script.write_text(code)
    launch = [sys.executable, "-m", "echelon", "launch", "--cpu", "--num_processes", "2"]
    for command in ([sys.executable], launch):
        done = subprocess.run([*command, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_example_of_parity_gives_one_loss_on_any_number_of_processes(tmp_path: Path) -> None:
    script = tmp_path / "exact.py"
    script.write_text(_block("exact", "docs/parity.md"))
    printed = set()
    for command in ([], ["-m", "echelon", "launch", "-q", "--cpu", "--num_processes", "3"]):
        done = subprocess.run(
            [sys.executable, *command, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        printed.add(done.stdout)
    (line,) = printed
    assert re.fullmatch(r"loss of the last update: \d\.\d{5}\n", line)
