"""One of four ranks is killed (SIGKILL) during a save; the old or the new checkpoint can be loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def _num_kills(tmp_path: Path, *, every: int) -> int:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kill_saves", str(tmp_path), str(every)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
def test_a_rank_killed_at_every_fifth_file_operation(tmp_path: Path) -> None:
    assert _num_kills(tmp_path, every=5) >= 12


@pytest.mark.soak
def test_a_rank_killed_at_every_file_operation(tmp_path: Path) -> None:
    assert _num_kills(tmp_path, every=1) >= 60
