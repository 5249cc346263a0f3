"""``benchmarks/gpu.py`` runs all of its code with tiny models on CPUs."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


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
