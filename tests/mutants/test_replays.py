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


def _verify(*arguments: str, folder: Path, is_original: bool, libraries: str = "accelerate") -> tuple[int, str]:
    """Run ``echelon verify`` where the original is installed, or with echelon in its place; return the exit code and the output."""
    if is_original and not PEERS.exists():
        pytest.skip("the original is not installed (make peers)")
    python = str(PEERS) if is_original else sys.executable
    library = [] if is_original else ["--as", libraries]
    done = subprocess.run(
        [python, "-m", "echelon", "verify", *library, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def _replay(name: str) -> str:
    return str(REPLAYS / f"{name}.py")


@pytest.mark.soak
@pytest.mark.parametrize("is_original", [True, False])
def test_the_last_window_of_an_epoch(is_original: bool, tmp_path: Path) -> None:
    """accelerate divides it by the full number of micro-steps."""
    arguments = ("--procs", "1", "--steps", "5", "--against", _replay("last_window_plain"), _replay("last_window"))
    code, output = _verify(*arguments, folder=tmp_path, is_original=is_original)
    assert code == int(is_original), output
    assert ("update 2, loss weight" in output) == is_original


@pytest.mark.soak
@pytest.mark.parametrize("is_original", [True, False])
def test_a_resume_in_the_second_epoch(is_original: bool, tmp_path: Path) -> None:
    """accelerate resumes with the order of the first epoch."""
    arguments = ["--procs", "1", "--steps", "8", "--resume_after", "6"]
    arguments += ["--resume_args", "--resume runs/{layout} --after 6", _replay("resume_in_epoch_2")]
    code, output = _verify(
        *arguments, "--save", "runs/{layout}", "--after", "6", folder=tmp_path, is_original=is_original
    )
    assert code == int(is_original), output
    assert ("update 6, data" in output) == is_original
    assert (
        "update 6 has the samples that the reference run has in update 2" in " ".join(output.split())
    ) == is_original


@pytest.mark.soak
@pytest.mark.parametrize("is_original", [True, False])
def test_a_loader_that_is_sharded_twice(is_original: bool, tmp_path: Path) -> None:
    """accelerate shards a loader once more that has a DistributedSampler."""
    code, output = _verify(
        "--procs", "2", "--steps", "3", _replay("sharded_twice"), folder=tmp_path, is_original=is_original
    )
    assert code == int(is_original), output
    assert ("update 0, data" in output and "sharded twice" in output) == is_original


@pytest.mark.soak
@pytest.mark.parametrize(("is_original", "is_repaired"), [(True, False), (True, True), (False, True)])
def test_the_mean_of_the_means_of_micro_batches(is_original: bool, is_repaired: bool, tmp_path: Path) -> None:
    """transformers until October 2024; today's Trainer, and echelon's in its place, take the mean over the tokens."""
    arguments = ["--procs", "1", "--steps", "5", "--against", _replay("mean_of_means_plain"), _replay("mean_of_means")]
    code, output = _verify(
        *arguments,
        *["--repaired"] * is_repaired,
        folder=tmp_path,
        is_original=is_original,
        libraries="accelerate,transformers",
    )
    assert code == int(not is_repaired), output
    assert ("update 0, loss weight" in output and "loss averaged per micro-step" in output) == (not is_repaired)
