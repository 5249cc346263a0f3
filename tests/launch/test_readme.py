"""The examples of README's first screen run as they stand there, on one process and on two."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def _block(level: str) -> str:
    found = re.search(rf"```python {level}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
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
