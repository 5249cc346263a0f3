"""The examples of README's first screen and of docs/parity.md print what the pages say, on one process and on several."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import run_on_ranks
from tests.launch.programs import run_program

ROOT = Path(__file__).resolve().parent.parent.parent


def _block(kind: str, page: str = "README.md") -> str:
    found = re.search(rf"```{kind}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_difference_on_the_first_screen_is_in_the_example() -> None:
    example = [line.strip() for line in (ROOT / "examples" / "quickstart.py").read_text().splitlines()]
    diff = _block("diff").splitlines()
    assert len(diff) <= 10
    for line in diff:
        assert (line[1:].strip() in example) == (line[0] != "-"), line


@pytest.mark.slow
def test_the_example_prints_what_the_first_screen_shows() -> None:
    commands = re.findall(
        r"^\$ (echelon launch .*quickstart\.py)\n(.*)$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert [printed.partition(",")[0] for _, printed in commands] == ["1 process", "2 processes", "2 processes"]
    for command, printed in commands:
        done = subprocess.run(
            [sys.executable, "-m", *command.split()],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "ECHELON_NO_RECORD": "1"},
        )
        assert done.stdout.splitlines()[-1:] == [printed], done.stdout + done.stderr


def test_the_example_of_parity_gives_one_loss_on_any_number_of_processes(tmp_path: Path) -> None:
    (tmp_path / "exact.py").write_text(_block("python exact", "docs/parity.md"))
    printed = {
        run_on_ranks(run_program, "exact.py", str(tmp_path), world_size=world_size, init_group=False)[0]
        for world_size in (1, 3)
    }
    (line,) = printed
    assert re.search(r"^loss of the last update: \d\.\d{5}$", line, re.MULTILINE)
