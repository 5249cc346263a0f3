"""Real reports: ``echelon verify`` finds them in the original, and echelon's run of the same script is right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.verify.command.layouts import Layout
from tests.mutants.runner import WarmRecorder, verify_text

ROOT = Path(__file__).resolve().parents[2]
REPLAYS = Path(__file__).resolve().parent / "replays"
PEERS = ROOT / ".venv-peers" / "bin" / "python"


@pytest.mark.soak
def test_a_loop_that_steps_inside_no_sync(tmp_path: Path) -> None:
    text = (REPLAYS / "step_in_no_sync.py").read_text(encoding="utf-8")
    result = verify_text(text, Layout(num_processes=2), WarmRecorder(tmp_path), steps=3)
    assert result.verdict is not None
    assert result.verdict.finding is not None
    assert (result.verdict.finding.update, result.verdict.finding.stage) == (0, "reduce")
    right = verify_text(
        text.replace("with model.no_sync():", "if True:"), Layout(num_processes=2), WarmRecorder(tmp_path), steps=3
    )
    assert right.outcome == "same"


@pytest.mark.soak
@pytest.mark.parametrize("is_original", [True, False])
def test_the_last_window_of_an_epoch(is_original: bool, tmp_path: Path) -> None:
    """accelerate divides it by the full number of micro-steps."""
    if is_original and not PEERS.exists():
        pytest.skip("the original is not installed (make peers)")
    python = str(PEERS) if is_original else sys.executable
    library = [] if is_original else ["--as", "accelerate"]
    command = [python, "-m", "echelon", "verify", *library, "--procs", "1", "--steps", "5", "--against"]
    done = subprocess.run(
        [*command, str(REPLAYS / "last_window_plain.py"), str(REPLAYS / "last_window.py")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        timeout=300,
    )
    assert done.returncode == int(is_original), done.stdout + done.stderr
    assert ("update 2, loss weight" in done.stdout) == is_original
