"""``echelon launch --plan`` refuses a run that does not fit before any rank starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.cli.main import _run

SCRIPT = """
import sys
from pathlib import Path
import torch
from torch import nn
from echelon import Accelerator

accelerator = Accelerator()
model = nn.Linear(int(sys.argv[1]), 1000)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
accelerator.backward(model(torch.randn(8, int(sys.argv[1]))).sum())
optimizer.step()
Path(f"{accelerator.process_index} {accelerator.mixed_precision}").touch()
accelerator.end_training()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return "train.py"


def _launch(*argv: str) -> int:
    return _run(["launch", "--cpu", "--num_processes", "2", *argv])


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_refused_with_the_verdict(
    script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # 4 GB of weights, as many of gradients and DDP's buckets
    assert _launch("--plan", "--gpu_memory", "8GB", "--mixed_precision", "bf16", script, "1000000") == 1
    out = capfd.readouterr().out
    assert "DOES NOT FIT: ddp dp_replicate=2, micro-batch 8 needs " in out
    assert "mixed precision bf16" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]  # no rank, and no record of a run


@pytest.mark.slow
def test_a_run_that_fits_starts(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ECHELON_NO_RECORD")
    (tmp_path / "echelon.toml").write_text('plan = true\ngpu_memory = "8GB"\n')
    argv = ["launch", "--cpu", "--num_processes", "2", script, "10"]
    done = subprocess.run([sys.executable, "-m", "echelon", *argv], capture_output=True, check=True, text=True)
    assert "FITS: ddp dp_replicate=2, micro-batch 8 needs " in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "echelon.toml", "0 no", "1 no", "echelon-runs"}
    (record,) = (tmp_path / "echelon-runs").glob("*/hyperparameters.jsonl")
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    (plan,) = (line["values"]["plan"] for line in lines if "plan" in line["values"])
    assert plan["layout"] == "ddp dp_replicate=2"
    assert plan["peak_bytes"] > 3 * 4 * 11_000  # weights, gradients and DDP's buckets


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ((), "the memory of the devices is unknown"),
        (("--gpu_memory", "8GB", "-m"), "plan needs a Python script"),
        (("--gpu_memory", "8GB", "--parallelism_config_sp_size", "2"), "a plan does not know the mesh axis sp"),
        (("--gpu_memory", "8GB", "--use_deepspeed"), "plan cannot run a script with DeepSpeed's settings"),
    ],
)
def test_what_cannot_be_planned_is_an_error_that_names_the_setting(
    argv: tuple[str, ...], text: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = "timeit" if "-m" in argv else script
    assert _launch("--plan", *argv, target, "10") == 2
    error = capsys.readouterr().err
    assert text in error
    assert "flag --p" in error
