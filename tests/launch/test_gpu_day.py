"""The benchmarks of GPUs: gpu.py runs with tiny models on CPUs, and gpu_day.py keeps what failing and hanging programs gave."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PLANTS = ("--plant", "failing", "--plant", "hanging", "--plant", "missing")


def _start(out: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(BENCHMARKS / "gpu_day.py"), "--cpu", "--tiny", "--out", str(out), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ))


def _lines(out: Path) -> list[dict[str, Any]]:
    file = out / "results.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.soak
@pytest.mark.parametrize("plants", [(), PLANTS], ids=["clean", "planted"])
def test_a_day_keeps_its_budget_and_says_what_each_part_came_to(tmp_path: Path, plants: tuple[str, ...]) -> None:
    began = time.monotonic()
    process = _start(tmp_path, "--budget", "90", *plants)
    output, _ = process.communicate(timeout=200)
    assert time.monotonic() - began < 100
    assert process.returncode == 0, output
    assert [line.split(",")[0] for line in output.splitlines() if line.startswith("part ")] == [
        f"part {number}" for number in range(1, 9)
    ]
    lines = _lines(tmp_path)
    outcomes = {line["job"]: line["outcome"] for line in lines if line["kind"] == "end"}
    assert outcomes["facts"] == "done"
    if not plants:
        return
    assert outcomes["failing planted"] == "failed with exit code 1"
    assert outcomes["hanging planted"] == "stopped after 20 s"
    assert outcomes["missing planted"] == "missing"
    ends = {line["job"]: line["lines"] for line in lines if line["kind"] == "end"}
    assert ends["failing planted"][-1] == "RuntimeError: planted"
    assert any(" in hanging" in line for line in ends["hanging planted"]), ends["hanging planted"]  # where it was
    assert ends["missing planted"] == ["not installed: a_package_that_does_not_exist"]
    values = {line["job"]: line["value"] for line in lines if line["kind"] == "result" and line["name"] == "planted"}
    assert values == {"failing planted": 1, "hanging planted": 2}
    for job in ("failing planted", "hanging planted"):
        assert job in output


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_results_survive_a_kill(tmp_path: Path, number: signal.Signals) -> None:
    process = _start(tmp_path, "--budget", "120", "--job", "planted", "--plant", "hanging")
    deadline = time.monotonic() + 60
    while not any(line["kind"] == "result" for line in _lines(tmp_path)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    with process:  # closes its output
        process.communicate(timeout=30)
    assert [line["value"] for line in _lines(tmp_path) if line["kind"] == "result"] == [2]


@pytest.mark.soak
def test_every_job_runs_on_the_cpu(tmp_path: Path) -> None:
    """Each program once, so that no lent device is the first to run it. Only what a device's kernels need may be missing."""
    process = _start(tmp_path, "--budget", "1500")
    output, _ = process.communicate(timeout=1600)
    ends = {line["job"]: line for line in _lines(tmp_path) if line["kind"] == "end"}
    bad = {job: end["lines"] for job, end in ends.items() if end["outcome"] not in ("done", "missing")}
    assert not bad, output
    reads = [sys.executable, str(BENCHMARKS / "gpu_day.py"), "--read", str(tmp_path / "results.jsonl")]
    shown = subprocess.run(reads, capture_output=True, text=True, check=True).stdout
    assert "## A day on a GPU" in shown
    assert "| by hand, gpt2 |" in shown


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu_report")


def _write(folder: Path, *lines: dict[str, Any], cut: str = "") -> Path:
    start = {"kind": "start", "command": ["--budget", "480"], "date": "2026-01-02", "budget_s": 480}
    file = folder / "results.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in (start, *lines)) + cut)
    return file


def test_a_line_that_a_kill_cut_off_is_left_out(report: Any, tmp_path: Path) -> None:
    file = _write(tmp_path, {"kind": "result", "job": "a", "name": "b"}, cut='{"kind": "resu')
    assert [line["kind"] for line in report.read(file)] == ["start", "result"]


def test_the_section_has_the_faster_turn_its_ratio_and_what_did_not_run(report: Any, tmp_path: Path) -> None:
    def model(variant: str, rate: float) -> dict[str, Any]:
        return {
            "kind": "result", "job": f"{variant}, turn 1", "name": variant, "variant": variant, "model": "gpt2", "is_compiled": False,
            "tokens_per_s": rate, "seconds": 16384 / rate, "peak": 2**31, "loss": 10.5,
        }  # fmt: skip

    def end(job: str, outcome: str, *lines: str) -> dict[str, Any]:
        return {"kind": "end", "part": 4, "job": job, "outcome": outcome, "seconds": 1.0, "lines": list(lines)}

    file = _write(
        tmp_path,
        {"kind": "result", "job": "facts", "name": "device", "device": "NVIDIA H100 80GB HBM3"},
        {"kind": "result", "job": "facts", "name": "versions", "python": "3.12.3", "torch": "2.11.0", "triton": None},
        model("by hand", 1000.0),
        model("accelerate", 900.0),
        model("by hand", 1200.0),
        end("by hand, turn 1", "done"),
        end("lightning Fabric, turn 1", "failed with exit code 1", "TypeError: no"),
        end("by hand compiled, turn 1", "no time"),
    )
    text = report.section(file)
    rows = {
        row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]]
        for row in text.splitlines()
        if row[:2] == "| "
    }
    assert rows["by hand, gpt2"][:2] == ["1,200", "1.000"]
    assert rows["accelerate, gpt2"][:2] == ["900", "0.750"]
    # 6 * 123.6 M + 12 * 12 * 768 * 1024 operations per token, of 989 TFLOP/s.
    assert (
        rows["by hand, gpt2"][3]
        == f"{100 * 1200 * (6 * (124475904 - 1024 * 768) + 12 * 12 * 768 * 1024) / 989e12:.1f} %"
    )
    assert rows["by hand, gpt2"][-1] == "2"
    assert "- lightning Fabric, turn 1: failed with exit code 1; TypeError: no" in text
    assert "- did not fit the budget: by hand compiled, turn 1" in text
    assert "2026-01-02, NVIDIA H100 80GB HBM3, Python 3.12.3; torch 2.11.0." in text


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu")


def test_the_models_have_the_sizes_of_their_names(gpu: Any) -> None:
    assert gpu.num_parameters(gpu.MODELS["gpt2"]) == pytest.approx(124.4e6, rel=0.01)
    assert gpu.num_parameters(gpu.MODELS["llama-1b"]) == pytest.approx(1.0e9, rel=0.1)


def test_operations_per_token_are_those_of_the_formula(gpu: Any) -> None:
    """6 for each parameter that multiplies, and 12 L d T for attention."""
    shape = gpu.MODELS["gpt2"]
    multiplied = gpu.num_parameters(shape) - 1024 * 768
    assert gpu.flops_per_token(shape) == 6 * multiplied + 12 * 12 * 768 * 1024


def _table(*options: str) -> list[str]:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--cpu", "--tiny", "--steps", "2", "--warmup", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, "--rounds", "1", *options], capture_output=True, text=True, check=False, env=environment, timeout=600
    )
    assert ended.returncode == 0, ended.stderr
    return [line for line in ended.stdout.splitlines() if line.startswith("| ")][1:]


@pytest.mark.soak
def test_every_variant_has_a_row() -> None:
    rows = [row.split("|")[1].strip() for row in _table("--model", "llama-1b")]
    assert rows[:3] == ["by hand", "echelon Accelerator", "echelon Trainer"]


@pytest.mark.soak
@pytest.mark.parametrize("model", ["gpt2", "llama-1b"])
def test_a_mesh_has_the_losses_of_its_layout_by_hand(model: str) -> None:
    rows = _table("--model", model, "--mesh", "dp_shard=2,tp=2", "--only", "by hand", "--only", "echelon Accelerator")
    losses = [float(row.split("|")[7]) for row in rows]
    assert losses[1] == pytest.approx(losses[0], abs=2e-2)  # bf16; of rank zero
