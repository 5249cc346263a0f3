"""Under plain torchrun: a save on one rank ends the job in seconds, with the user's lines; a rank that is late does not."""

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
NEXT_STEP = """
if not accelerator.is_main_process:
    time.sleep(2.5)
whole = accelerator.get_state_dict(model)
sys.stdout.write(f"late: {whole is not None}\\n")  # one write: print makes several, which ranks mix
begun = time.monotonic()
try:
    if accelerator.is_main_process:
        state = accelerator.get_state_dict(model)
    train()
finally:
    print(f"rank {accelerator.process_index} ended after {time.monotonic() - begun:.1f} s", file=sys.stderr)
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


@pytest.mark.soak  # test_monitored_barrier.py has the meeting
def test_a_rank_that_is_late_is_no_error_and_one_in_the_next_step_is(command: Command) -> None:
    code, out, err = torchrun(command, NEXT_STEP, num_processes=2)
    assert sorted(out.splitlines()) == ["late: False", "late: True"]
    assert code != 0
    assert "DesyncError: get_state_dict() must be called on every rank, but some ranks did not call it" in err
    here, there = "state = accelerator.get_state_dict(model)", "accelerator.backward(model(torch.ones(2, 4)).sum())"
    assert f"rank 0: get_state_dict() at {line_of(command, here, NEXT_STEP)}" in err
    assert f"rank 1: in another collective at {line_of(command, there, NEXT_STEP)}" in err
    assert "do:    call it on every rank" in err
    assert "It returns the state on rank zero and None on the other ranks." in err
    assert "rank 1 is in a collective that rank 0 will not join" in err  # said by rank 1
    seconds = float(err.split("rank 0 ended after ")[1].split(" s")[0])
    assert seconds < 60.0  # on a busy machine; 0.8 on a quiet one, and 1800 where nothing looks


@pytest.mark.soak
def test_a_save_on_one_rank_against_the_end_of_the_script(command: Command) -> None:
    code, _, err = torchrun(command, END, num_processes=3)
    assert code != 0
    assert "DesyncError: save_state() must be called on every rank, but some ranks did not call it" in err
    line = line_of(command, 'accelerator.save_state("state")', END)
    assert f"rank 0: save_state() at {line}" in err
    assert "rank 1: has exited (its program has ended)" in err or "rank 2: has exited (its program has ended)" in err
