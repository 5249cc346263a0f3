"""Each kind of fault on a random rank of four, in a plain DDP script and in one of echelon: the last lines on the terminal."""

from __future__ import annotations

import random
import re

import pytest

from tests.launch.conftest import Command

RAW = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(x):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""
ECHELON = """
from echelon import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.zeros(4, 8))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
def step(x):
    optimizer.zero_grad()
    accelerator.backward(model(x).sum())
    optimizer.step()
"""
HEAD = """
import ctypes, os, resource, signal, sys, threading, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
bad, fault_step, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rank = dist.get_rank()
"""
LOOP = """
def raise_in_main():
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.main_thread().ident), ctypes.py_object(InterruptedError))
def memory():
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    torch.ones(1 << 33)
def leave():
    sys.stdout.flush()
    os._exit(0)
def raise_error():
    raise ValueError("bad sample 17")
def asynchronous():
    threading.Thread(target=raise_in_main).start()
    while True:
        time.sleep(0.01)
def kill(name):
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(1)
FAULTS = {
    "exception": raise_error,
    "async exception": asynchronous,
    "abort": os.abort,
    "segfault": lambda: ctypes.string_at(0),
    "GIL held": lambda: ctypes.PyDLL(None).sleep(1000),
    "SIGINT": lambda: kill("SIGINT"),
    "SIGKILL": lambda: kill("SIGKILL"),
    "SIGTERM": lambda: kill("SIGTERM"),
    "SIGSTOP": lambda: kill("SIGSTOP"),
    "exit 0": leave,
    "memory limit": memory,
    "collective": lambda: dist.broadcast(torch.ones(72), src=0),
    "shape": lambda: dist.all_reduce(torch.ones(9)),
    "uneven": lambda: dist.barrier(),
    "missing": lambda: time.sleep(1000),
}
for number in range(12):
    if number == fault_step:
        dist.barrier()
        time.sleep(1.0)
        if rank == bad:
            FAULTS[kind]()
    step(torch.ones(4, 8))
"""
# What the report begins with; {bad}: the rank.
FIRST = {
    "exception": r"rank {bad} failed first: ValueError: bad sample 17",
    "async exception": r"rank {bad} failed first: InterruptedError: ",
    "abort": r"rank {bad} failed first: killed by SIGABRT \(signal 6\)",
    "segfault": r"rank {bad} failed first: killed by SIGSEGV \(signal 11\)",
    "GIL held": r"stall \(a rank that does not answer\): rank {bad} is blocked by native code",
    "SIGINT": r"rank {bad} failed first: killed by SIGINT \(signal 2\)",
    "SIGKILL": r"rank {bad} failed first: killed by SIGKILL \(signal 9\)",
    "SIGTERM": r"rank {bad} failed first: killed by SIGTERM \(signal 15\)",
    "SIGSTOP": r"stall \(a stopped process\): rank {bad} is stopped \(SIGSTOP\)",
    # gloo closes the connection at once, but not while the interpreter is still exiting, as on a busy machine.
    "exit 0": r"(rank {bad} failed first: it exited \(code 0\) while other ranks|stall \([\w ]+\): rank {bad} has exited, but )",
    "memory limit": r"rank {bad} failed first: RuntimeError: .*can't allocate memory",
    # gloo aborts, or all wait: by what the operations send, and when.
    "collective": r"(stall \()?(different collectives|uneven data)\)?: rank {bad} ",
    "shape": r"(stall \()?different shapes\)?: rank {bad} does not make the same call as the other ranks",
    "uneven": r"(stall \()?uneven data\)?: rank {bad} has left the training loop",
    "missing": r"stall \(a missing rank\): rank {bad} has not reached the collective",
}
# Its line in the user's program, where it can be known.
LINES = {
    "exception": r'train.py:\d+ in raise_error: raise ValueError\("bad sample 17"\)',
    "async exception": r"train.py:\d+ in asynchronous: ",
    "abort": r"train.py:\d+ in <module>: FAULTS\[kind\]\(\)",
    "segfault": r"train.py:\d+ in <lambda>: ",
    "GIL held": r"train.py:\d+: .*sleep\(1000\)",
    "SIGSTOP": r"last seen at \S*train.py:\d+",
    "memory limit": r"train.py:\d+ in memory: torch.ones\(1 << 33\)",
    "collective": r"rank {bad}: in broadcast number \d+ of float\[72\]; (step \d+, [^;]*; )?at \S*train.py:\d+: .*broadcast",
    "shape": r"rank {bad}: in all_reduce number \d+ of float\[9\]; (step \d+, [^;]*; )?at \S*train.py:\d+: .*all_reduce",
    "uneven": r"rank {bad}: in barrier number \d+; (step \d+, [^;]*; )?at \S*train.py:\d+: .*barrier",
    "missing": r"rank {bad}: (step \d+, .*; )?at \S*train.py:\d+: .*sleep\(1000\)",
}


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("script", ["raw", "echelon"])
@pytest.mark.parametrize("kind", FIRST)
def test_the_last_lines_name_the_rank_the_class_and_the_line(
    kind: str, script: str, seed: int, command: Command
) -> None:
    draw = random.Random(f"{kind} {script} {seed}")
    bad, step = draw.randrange(4), draw.randrange(2, 10)
    command.write("train.py", HEAD + (RAW if script == "raw" else ECHELON) + LOOP)
    flags = ["-q", "--num_processes=4", "--stall_timeout=8", "--on_stall=stop"]
    result = command.launch(*flags, "train.py", str(bad), str(step), kind)
    assert result.code not in (0, 2), result.err
    alarms = list(re.finditer(r"^echelon: (?!note )", result.err, re.MULTILINE))
    assert len(alarms) == 1, result.err
    report = result.err[alarms[0].end() :]
    assert len(report.splitlines()) <= 29, report
    assert re.match(FIRST[kind].format(bad=bad), report), report
    if kind in LINES:
        assert re.search(LINES[kind].replace("{bad}", str(bad)), report), report
    assert re.search(r"^  where: ", report, re.MULTILINE)
    assert re.search(r"^  (do|logs): +", report, re.MULTILINE)  # an exception of the script says all that is known


CLEAN = """
draw = random.Random(rank)
for number in range(10_000):
    if draw.random() < 0.001:
        time.sleep(draw.uniform(0.0, 4.0))
    if number == 7000 and rank == 2:
        until = time.monotonic() + 90
        while time.monotonic() < until:  # as a compiler does; longer than --stall_timeout
            sum(range(100_000))
    step(torch.ones(4, 8))
print("done", flush=True)
"""


@pytest.mark.soak
@pytest.mark.parametrize("script", ["raw", "echelon"])
def test_ten_thousand_clean_steps_raise_no_alarm(script: str, command: Command) -> None:
    body = RAW if script == "raw" else ECHELON
    head = HEAD.replace("bad, fault_step, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]", "import random")
    command.write("train.py", head + body + CLEAN)
    out, err = command.start_launch("-q", "--num_processes=4", "train.py").communicate(timeout=3000)
    assert out.count("done") == 4, err
    told = re.findall(r"^echelon: .*", err, re.MULTILINE)
    assert all(line.startswith("echelon: note (slow, but alive): rank 2 is slow") for line in told), err
