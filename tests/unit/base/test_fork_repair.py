"""Processes that hang or die in their fork are forked again (base/fork_repair.py)."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In an interpreter of its own: the hooks of a fork cannot be taken back.
_PROGRAM = """
import os, signal, sys, logging, time, multiprocessing
logging.basicConfig(level=logging.WARNING)
failures = {failures!r}
forks = []
os.register_at_fork(before=lambda: forks.append(None))

def fail():
    if len(forks) <= len(failures):
        if failures[len(forks) - 1] == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            signal.pause()

os.register_at_fork(after_in_child=fail)
from echelon.base import fork_repair
fork_repair._TIMEOUTS_S = (0.2, 0.2, 5)
fork_repair._REPAIRED = {{sys.version_info[:2]: (99,)}}
fork_repair.repair_fork()
fork_repair.repair_fork()
import torch
from torch.utils.data import DataLoader
num_files = len(os.listdir("/proc/self/fd"))
print([int(x) for batch in DataLoader(torch.arange(8), batch_size=2, num_workers=2) for x in batch], len(forks))
deadline = time.monotonic() + 30
while len(os.listdir("/proc/self/fd")) > num_files and time.monotonic() < deadline:
    time.sleep(0.01)  # a queue's thread closes its pipe after the loader has ended
print(multiprocessing.active_children(), len(os.listdir("/proc/self/fd")) - num_files)
"""


def _run(*failures: str) -> subprocess.CompletedProcess[str]:
    program = _PROGRAM.format(failures=failures)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_a_loader_worker_that_hangs_or_dies_in_its_fork_is_forked_again() -> None:
    repaired = _run("hangs", "dies")
    assert repaired.stdout.splitlines()[0] == "[0, 1, 2, 3, 4, 5, 6, 7] 4", repaired.stderr
    assert repaired.stdout.splitlines()[1] == "[] 0"  # no process and no file is left
    assert repaired.stderr.count("hung while forking") == 2


@pytest.mark.soak
def test_a_sound_fork_is_not_repeated() -> None:
    sound = _run()
    assert sound.stdout.splitlines() == ["[0, 1, 2, 3, 4, 5, 6, 7] 2", "[] 0"]
    assert "hung" not in sound.stderr


_GARBAGE = """
import gc, os, signal, threading
import torch.distributed as dist
from echelon import Accelerator
gc.disable()
class Node: pass
node = Node()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range({num_accelerators}):
    Accelerator(cpu=True)  # with a group that the script has created
node.own, node.group = node, dist.group.WORLD
dist.destroy_process_group()
del node
if (child := os.fork()) == 0:
    gc.collect()
    os._exit(0)
threading.Timer({limit}, os.kill, (child, signal.SIGKILL)).start()
print("exit code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_accelerators", "limit_s", "ends"),
    [
        (2, 60, ("exit code 0",)),
        # Without the repair, the destructor of the group hangs or aborts in the child, which has none of its threads.
        pytest.param(0, 2, ("exit code -9", "exit code -6", "exit code -11"), marks=pytest.mark.soak),
    ],
)
def test_a_forked_process_does_not_collect_the_garbage_of_its_parent(
    num_accelerators: int, limit_s: int, ends: tuple[str, ...]
) -> None:
    program = _GARBAGE.format(num_accelerators=num_accelerators, limit=limit_s)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() in ends


@pytest.mark.slow
def test_after_the_last_attempt_it_is_an_error_with_the_remedy() -> None:
    failed = _run("hangs", "dies", "dies")
    assert ": 3 forks hung or crashed" in failed.stderr
    assert "upgrade Python" in failed.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="fork")
def test_a_python_without_the_fault_keeps_its_own_fork() -> None:
    program = (
        "import sys; from multiprocessing import context; own = context.ForkProcess._Popen; "
        "from echelon.base import fork_repair; fork_repair._REPAIRED = {}; fork_repair.repair_fork(); "
        "print(context.ForkProcess._Popen is own)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "True"
