"""Under plain torchrun: a save on one rank against the end of the script on the others."""

from __future__ import annotations

import sys

import pytest

from tests.launch.conftest import Command

HEAD = """
import sys, time
import torch
from echelon import Accelerator
accelerator = Accelerator(engine="fsdp2")
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
def train():
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
train()
"""
END = """
if accelerator.is_main_process:
    accelerator.save_state("state")
"""


def torchrun(command: Command, body: str, *, num_processes: int) -> tuple[int, str, str]:
    command.write("train.py", HEAD + body)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_processes), "--no-python", sys.executable]
    result = command.run(
        [sys.executable, *launcher, str(command.directory / "train.py")], OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"
    )
    return result.code, result.out, result.err


def line_of(command: Command, text: str, body: str) -> str:
    number = next(i for i, line in enumerate((HEAD + body).splitlines(), 1) if line.strip() == text)
    return f"{command.directory}/train.py:{number}: {text}"


@pytest.mark.soak
def test_a_save_on_one_rank_against_the_end_of_the_script(command: Command) -> None:
    code, _, err = torchrun(command, END, num_processes=3)
    assert code != 0
    assert "DesyncError: save_state() must be called on every rank, but some ranks did not call it" in err
    line = line_of(command, 'accelerator.save_state("state")', END)
    assert f"rank 0: save_state() at {line}" in err
    assert "rank 1: has exited (its program has ended)" in err or "rank 2: has exited (its program has ended)" in err
