"""The end of a rank: its own exit code, whatever its threads, its streams and its checkpoints do meanwhile."""

from __future__ import annotations

import sys

import pytest

from tests.launch.conftest import Command

# gloo's thread asks for the GIL once the collective is complete, to release the tensor. Here it is complete while the main thread holds
# the GIL, which it keeps (by the interval) until it has to wait for something, or begins to shut down.
HOLDS_THE_GIL = """
import sys
import time
import torch
import torch.distributed as dist
from echelon.distributed import setup

world = setup()
if len(sys.argv) > 1:
    kept = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))  # the group outlives destroy_process_group
dist.barrier()
sys.setswitchinterval(100)
time.sleep(0.3 * world.rank)
for _ in range(2):  # one for each thread of gloo, which takes the next one only after it has had the GIL
    dist.all_reduce(torch.ones(1), async_op=True)
end = time.monotonic() + 1.0
while time.monotonic() < end:
    pass
if len(sys.argv) > 1:
    dist.destroy_process_group()
sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.parametrize("destroys", [False, True])
def test_a_thread_that_waits_for_the_gil_at_exit_does_not_abort_the_rank(destroys: bool, command: Command) -> None:
    command.write("train.py", HOLDS_THE_GIL)
    port = str(command.free_port())
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    argv = [sys.executable, "train.py", *["destroy"] * destroys]
    ranks = [command.start(argv, **place, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
    results = [command.finish(rank) for rank in ranks]
    assert [result.code for result in results] == [7, 7], results[0].err + results[1].err


@pytest.mark.slow
def test_a_program_without_echelon_is_not_aborted_under_the_launcher_either(command: Command) -> None:
    text = HOLDS_THE_GIL.replace("from echelon.distributed import setup", "import types").replace(
        "world = setup()", "dist.init_process_group('gloo'); world = types.SimpleNamespace(rank=dist.get_rank())"
    )
    assert "echelon" not in text
    command.write("train.py", text)
    result = command.launch("--cpu", "--num_processes=2", "train.py")
    assert result.code == 7, result.err
    assert "terminate called" not in result.err
    assert "Exception ignored" not in result.err


@pytest.mark.soak
def test_nothing_is_printed_at_the_exit_of_a_program_that_has_imported_torch(command: Command) -> None:
    """Python removes the first module's __file__ before the functions that run at exit, one of which loads a file beside it."""
    command.write("train.py", "import torch.distributed\nprint('done')\n")
    result = command.run(
        [sys.executable, "-m", "echelon", "launch", "--cpu", "--num_processes=2", "train.py"], OMP_NUM_THREADS="1"
    )
    assert (result.code, result.out.split(), result.err) == (0, ["done", "done"], "")


TALKS = """
import threading
import torch.distributed as dist
from echelon.distributed import setup

setup()
store = dist.distributed_c10d._get_default_store()

def talk():
    while True:
        store.set("x", "y")

for _ in range(4):
    threading.Thread(target=talk, daemon=True).start()
"""


@pytest.mark.slow
def test_a_daemon_thread_that_talks_to_the_store_does_not_abort_the_rank_at_exit(command: Command) -> None:
    command.write("train.py", TALKS)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(command.free_port()), "WORLD_SIZE": "1", "RANK": "0"}
    result = command.run([sys.executable, "train.py"], **place)
    assert (result.code, result.err) == (0, "")


# Closed standard streams, as in some daemons and cron jobs: only what is written to them is lost.
WRITES = """
import os
import sys

print("printed")
print("to stderr", file=sys.stderr)
with open("ran" + os.environ["RANK"], "w") as file:  # must not get what is printed
    file.write(str(sys.stdin is not None))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "closed",
    [">&-", ">&- 2>&- <&-", *(pytest.param(one, marks=pytest.mark.soak) for one in ("2>&-", "<&-"))],
)
def test_a_run_with_closed_streams_starts(closed: str, command: Command) -> None:
    command.write("train.py", WRITES)
    launch = f"{sys.executable} -m echelon launch -q --no_warm --cpu --num_processes=2 train.py"
    result = command.run(["sh", "-c", f"{launch} {closed}"])
    assert result.code == 0, result.err
    assert [(command.directory / f"ran{rank}").read_text() for rank in range(2)] == ["True"] * 2
    assert result.out.count("printed") == (0 if ">&-" in closed.split() else 2)
    assert result.err.count("to stderr") == (0 if "2>&-" in closed else 2)


FULL = """
import errno
from echelon import Accelerator
from echelon.checkpoint import storage

def full(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")

storage.write = full
accelerator = Accelerator(cpu=True)
for step in range(9):
    print("step", step)
    accelerator.save_state("state", blocking=step % 2 == 0)
"""


@pytest.mark.slow
def test_checkpoints_that_cannot_be_written_end_the_run_with_exit_code_74(command: Command) -> None:
    command.write("full.py", FULL)
    result = command.launch("--cpu", "full.py")
    assert (result.code, "step 3" in result.out) == (74, False), result.err
    assert "3 consecutive checkpoints could not be written" in result.err
    assert "state could not be saved: [Errno 28] No space left on device" in result.err


@pytest.mark.slow
def test_a_run_whose_last_save_has_failed_says_so_at_its_end(command: Command) -> None:
    command.write("full.py", FULL.replace("range(9)", "range(1)"))
    result = command.launch("--cpu", "full.py")
    assert (result.code, result.err.count("the last save of this run has failed")) == (0, 1), result.err
