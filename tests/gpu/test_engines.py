"""The engine contract on the devices of this machine: as many ranks as it has, one a device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from echelon.testing import engine_contract

pytestmark = pytest.mark.gpu

LIMIT_S = 600


@pytest.mark.parametrize("engine", ["single", "dp", "ddp", "zero1", "fsdp2"])
def test_the_contract_on_every_device(engine: str) -> None:
    devices = torch.accelerator.device_count()
    ranks = 1 if engine in ("single", "dp") else max(n for n in (1, 2, 3, 4, 6, 12) if n <= devices)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*start, "-m", "echelon.testing.engine_contract", engine]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=dict(os.environ))
    assert ended.returncode == 0, ended.stderr
    held = [line.removeprefix("passed: ") for line in ended.stdout.splitlines() if line.startswith("passed: ")]
    assert held == [check.__name__ for check in engine_contract.CHECKS]
