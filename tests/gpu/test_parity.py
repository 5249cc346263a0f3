"""Exact and bitwise parity on the devices of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator
from tests.reference import batches_of

pytestmark = pytest.mark.gpu

_SAMPLES, _BATCH, _EPOCHS = 22, 8, 3
ROOT = Path(__file__).parents[2]


def _net(dropout: float, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, 4)).to(dtype)


def _data(dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(_SAMPLES, 16, generator=generator).to(dtype))


def trained(parity: str, max_micro: int | None, dropout: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Train, and return the weights on the CPU."""
    accelerator = Accelerator(parity=parity, max_micro_batch_size=max_micro, seed=7)
    model: Any = _net(dropout, dtype)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(_data(dtype), batch_size=_BATCH))
    for _ in range(_EPOCHS):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
    weights = [value.detach().cpu() for value in accelerator.unwrap_model(model).parameters()]
    accelerator.end_training()
    return weights


def _plainly() -> list[torch.Tensor]:
    model = _net(0.0, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (data,) = _data(torch.float64).tensors
    for _ in range(_EPOCHS):
        for rows in batches_of(range(_SAMPLES), _BATCH):
            model(data[rows]).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return [value.detach() for value in model.parameters()]


@pytest.mark.parametrize("max_micro", [None, 3])
def test_exact_updates_are_those_of_a_plain_loop_on_the_cpu(max_micro: int | None) -> None:
    for found, expected in zip(trained("exact", max_micro, 0.0, torch.float64), _plainly()):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)  # float64, another device's sums


@pytest.mark.usefixtures("deterministic")
def test_bitwise_updates_are_repeated_bit_by_bit_with_dropout() -> None:
    first, second = (trained("bitwise", None, 0.1, torch.float32) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.usefixtures("deterministic")
def test_bitwise_updates_do_not_depend_on_the_number_of_devices(tmp_path: Path) -> None:
    num_devices = torch.accelerator.device_count()
    if num_devices < 2:
        pytest.skip("one device")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, sys, torch\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "torch.use_deterministic_algorithms(True)\n"
        "torch.backends.cudnn.allow_tf32 = False\n"
        "from tests.gpu.test_parity import trained\n"
        "weights = trained('bitwise', None, 0.1, torch.float32)\n"
        "if os.environ['RANK'] == '0':\n"
        f"    open({str(tmp_path / 'weights.json')!r}, 'w').write(json.dumps([w.tolist() for w in weights]))\n"
    )
    ended = subprocess.run(
        [*start, str(program)], capture_output=True, text=True, timeout=600, check=False, env=dict(os.environ)
    )
    assert ended.returncode == 0, ended.stderr
    two = [torch.tensor(weight) for weight in json.loads((tmp_path / "weights.json").read_text())]
    assert all(map(torch.equal, two, trained("bitwise", None, 0.1, torch.float32)))


def test_the_benchmark_of_language_models_runs() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--tiny", "--steps", "2", "--warmup", "1"]
    ended = subprocess.run(
        [*command, "--rounds", "1", "--num-processes", "1"], capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "| echelon Trainer |" in ended.stdout
