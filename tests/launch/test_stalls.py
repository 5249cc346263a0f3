"""A run that stands still, or whose ranks do different things: the right rank, the right class, the user's line; and its end."""

from __future__ import annotations

import re

import pytest

from tests.launch.conftest import Command, Result

# Two ranks; rank 1 does what `fault` says, once. The pause before lets the reporter see a rank in its loop.
RAW = """
import ctypes, os, signal, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, bad, attempt = dist.get_rank(), int(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"]
x = torch.ones(4)
def train():
    for step in range(6):
        if step == 3:
            dist.barrier()
            time.sleep(1.0)
            if rank == bad and attempt == "0":
                fault()
        dist.all_reduce(x)
def fault():
    FAULT
train()
print(f"rank {rank} has trained in attempt {attempt}", flush=True)
dist.destroy_process_group()
"""
ACCELERATOR = """
import sys, time
import torch
from echelon import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 4)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, (x,) in enumerate(loader):
    accelerator.backward(model(x).sum())
    optimizer.step()
    if step == 2 and accelerator.process_index == int(sys.argv[1]):
        with accelerator.slow("tokenising"):
            time.sleep(float(sys.argv[2]))
        FAULT
"""
TIMEOUT_S = "5"
LIMIT = re.compile(r"no progress for (\d+) s \(--stall_timeout 5\)")


def stall(command: Command, script: str, fault: str, *flags: str, args: tuple[str, ...] = (), ranks: int = 2) -> Result:
    command.write("train.py", script.replace("FAULT", fault))
    head = ["-q", f"--num_processes={ranks}", "--stall_timeout", TIMEOUT_S, "--log_dir", "logs", "--tee=0", *flags]
    return command.launch(*head, "train.py", *args)


def at(command: Command, text: str) -> str:
    """Return a pattern of the line of the script that holds ``text``."""
    lines = (command.directory / "train.py").read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if text in line)
    return rf"at \S*train\.py:{number}: {re.escape(lines[number - 1].strip())}"


def report(result: Result) -> str:
    """Return the last report; check what holds for each."""
    text = result.err[result.err.rindex("\nechelon: " if "\nechelon: " in result.err else "echelon: ") :].strip()
    assert len(text.splitlines()) <= 30
    assert "\n  where: " in text
    assert "\n  do:    " in text
    return text


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_the_run_restarted_without_it(command: Command) -> None:
    # Its last heartbeat says that it imports an installed module, which may take long by right.
    command.is_warm = True
    fault = "sys.path.insert(0, 'site-packages'); import stops"
    command.write(
        "site-packages/stops.py", "import os, signal, time\ntime.sleep(0.8)\nos.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    result = stall(command, RAW, fault, "--on_stall=restart", "--max_restarts=1", args=("1",))
    assert result.code == 0, result.err
    trained = re.findall(r"rank (\d) has trained in attempt 1", result.out)  # the ranks share a pipe: lines may mix
    assert sorted(trained) == ["0", "1"]
    assert "stall (a stopped process): rank 1 is stopped (SIGSTOP), and rank 0 waits for other ranks" in result.err
    assert re.search(r"rank 0: in all_reduce number 5 of float\[4\]; " + at(command, "dist.all_reduce(x)"), result.err)
    assert re.search(r"rank 1: stopped; last seen at \S*train.py:\d+", result.err)
    waited = LIMIT.search(result.err)
    assert waited is not None
    assert "the run restarts (--on_stall)" in result.err
    assert "restart 1 of 1" in result.err
    # Later: the stack of each rank.
    run = next((command.directory / "logs").iterdir())
    told = command.echelon("doctor", str(run))
    assert told.code == 0, told.err
    assert "attempt_0: stall (a stopped process): rank 1 is stopped" in told.out
    assert re.search(r"rank_0, most recent call last:\n(.*\n)*  File \"\S*train.py\", line \d+, in train", told.out)
    assert "rank_1: no stack recorded" in told.out


@pytest.mark.soak
def test_a_rank_that_does_not_come_stops_the_run_but_not_while_it_says_that_it_is_slow(command: Command) -> None:
    result = stall(command, ACCELERATOR, "time.sleep(1000)", "--on_stall=stop", args=("1", "7"))
    assert result.code == 124, result.err
    text = report(result)
    assert text.startswith(
        "echelon: stall (a missing rank): rank 1 has not reached the collective, and rank 0 waits for other ranks"
    )
    assert re.search(r"rank 1: step 3, outside the model; " + at(command, "time.sleep(1000)"), text)
    assert re.search(
        r"rank 0: in all_reduce number \d+ of float\[20\]; step 3, communication; " + at(command, "backward("), text
    )
    assert "the run stops (--on_stall)" in text
    assert result.err.count("echelon: stall") == 1  # not in the 7 s that were declared


@pytest.mark.soak
def test_ranks_with_unlike_shapes_are_both_shown_with_their_lines(command: Command) -> None:
    result = stall(command, RAW, "dist.all_reduce(torch.ones(9))", args=("1",))
    assert result.code != 0
    text = report(result)
    assert text.startswith("echelon: different shapes: the ranks use different shapes: ")
    assert re.search(r"rank 0: in all_reduce number 5 of float\[4\]; " + at(command, "dist.all_reduce(x)"), text)
    assert re.search(r"rank 1: in all_reduce number 5 of float\[9\]; " + at(command, "torch.ones(9)"), text)
    assert "gloo aborted rank" in text
    assert "where: ranks 0-1 of 2" in text


@pytest.mark.soak
def test_a_gather_on_the_main_process_is_not_uneven_data(command: Command) -> None:
    fault = "accelerator.gather(x.mean())"
    result = stall(command, ACCELERATOR, fault, "--on_stall=stop", args=("0", "0"))
    text = report(result)
    assert re.search(r"different collectives\)?: rank 0 calls gather of float32\[\] in the training loop ", text)
    assert "but rank 1 does not: it is in a forward or backward pass" in text
    assert re.search(r"rank 0: in gather of float32\[\]; [^;]*; " + at(command, fault), text)
    assert "`if accelerator.is_main_process:`" in text


LEAVES = """
import sys
import torch
from echelon.distributed import barrier, process_group, reduce
def train(world):
    total = reduce(torch.ones(4), "sum")
    if world.rank == 1:
        END
    barrier()
with process_group() as world:
    train(world)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("sys.exit()", r"exited \(code 0\): sys\.exit\(\) at \S*train.py:8: sys\.exit\(\)"),
        ("return", r"exited \(code 0\): the end of its program"),
        ("import os; os._exit(0)", r"exited \(code 0\): without Python's exit \(os\._exit\)"),
    ],
)
def test_a_rank_that_leaves_ends_the_run_with_its_line_and_the_line_that_waits(
    end: str, told: str, command: Command
) -> None:
    command.write("train.py", LEAVES.replace("END", end))
    result = command.launch("-q", "--cpu", "--num_processes=2", "train.py")  # the limit of other stalls is 60 s
    assert result.code == 124, result.err
    text = report(result)
    assert text.startswith("echelon: stall (a rank that has exited): rank 1 has exited, but rank 0 still waits in a")
    assert re.search("rank 1: " + told, text), text
    assert re.search("rank 0: in barrier; " + r"at \S*train\.py:9: barrier\(\)", text), text
    assert "where: this wait can never end; the run stops (--on_stall)" in text
    assert "collectives unknown" not in text


SILENT = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
def mean(x):
    dist.all_reduce(x)
    return x / dist.get_world_size()
mean(torch.ones(4, dtype=torch.int32 if dist.get_rank() == 1 else torch.float32))
dist.destroy_process_group()
"""


@pytest.mark.soak
def test_debug_compares_collectives_of_torch_that_fail_in_no_other_way(command: Command) -> None:
    command.write("train.py", SILENT)
    result = command.launch("-q", "--cpu", "--num_processes=3", "--debug", "train.py")
    assert result.code == 1, result.err
    text = report(result)
    assert text.startswith("echelon: different shapes: rank 1 does not make the same call as the other ranks: ")
    place = at(command, "dist.all_reduce(x)")
    assert re.search(rf"rank 1: called all_reduce number 1 of int\[4\]; {place}", text), text
    assert re.search(rf"ranks 0, 2: called all_reduce number 1 of float\[4\]; {place}", text), text
    assert command.launch("-q", "--cpu", "--num_processes=3", "train.py").code == 0  # which is why there is --debug
