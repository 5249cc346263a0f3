"""The examples of README's first screen and of docs/parity.md run as they stand there, on one process and on several."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import run_on_ranks
from tests.launch.programs import run_program

ROOT = Path(__file__).resolve().parent.parent.parent
LEVELS = ["level1", "level2", "level3"]


def _block(level: str, page: str = "README.md") -> str:
    found = re.search(rf"```python {level}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("level", LEVELS)
def test_the_examples_are_short_and_run(level: str, tmp_path: Path) -> None:
    code = _block(level)
    lines = [line for line in code.splitlines() if line.strip() and not line.startswith(("import ", "from "))]
    assert len(lines) <= 10
    (tmp_path / f"{level}.py").write_text(code)
    for world_size in (1, 2):
        run_on_ranks(run_program, f"{level}.py", str(tmp_path), world_size=world_size, init_group=False)


@pytest.mark.soak
@pytest.mark.parametrize("level", LEVELS)
def test_the_examples_run_by_the_commands_of_the_page(level: str, tmp_path: Path) -> None:
    script = tmp_path / f"{level}.py"
    script.write_text(_block(level))
    launch = [sys.executable, "-m", "echelon", "launch", "--cpu", "--num_processes", "2"]
    for command in ([sys.executable], launch):
        done = subprocess.run([*command, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_example_of_parity_gives_one_loss_on_any_number_of_processes(tmp_path: Path) -> None:
    (tmp_path / "exact.py").write_text(_block("exact", "docs/parity.md"))
    printed = {
        run_on_ranks(run_program, "exact.py", str(tmp_path), world_size=world_size, init_group=False)[0]
        for world_size in (1, 3)
    }
    (line,) = printed
    assert re.search(r"^loss of the last update: \d\.\d{5}$", line, re.MULTILINE)
