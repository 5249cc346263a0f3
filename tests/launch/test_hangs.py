"""Real runs in which a rank is stopped, deadlocks or loops at a random instant of any part of the program: it is named in time.

``make soak`` draws 100 of them (HANGS=number); tests/unit/launch/test_supervisor.py has thousands on a simulated clock.
"""

from __future__ import annotations

import os
import random
import re
import select
import signal
import subprocess
import time
from contextlib import suppress

import psutil
import pytest

from echelon.launch.local import worker
from tests.launch.conftest import Command

STALL_S, SLOW_S, REPORT_S = 5.0, 25.0, 5.0
# A rank may compute for so long before it comes to where the others wait.
SLACK_S = 3.0

# Installed code, as far as the reporter is concerned: a signal makes the main thread deadlock, or loop, wherever it is.
PLANTER = """
import os, signal, threading, time
lock = threading.Lock()
lock.acquire()
def deadlock(*_):
    lock.acquire()
def loop(*_):
    while True:
        pass
signal.signal(signal.SIGUSR2, deadlock)
signal.signal(signal.SIGALRM, loop)
board = os.open("stage_" + os.environ["RANK"], os.O_RDWR | os.O_CREAT)
def stage(name):
    os.pwrite(board, (name + " " + str(os.getpid())).ljust(40).encode(), 0)
"""
COMPILER = """
import time
def compile_for(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.02)
"""
TRAIN = """
import os, sys, time
sys.path.insert(0, os.path.join(os.getcwd(), "site-packages"))
from planter import stage
stage("import")
import torch
import torch._dynamo
from echelon import Accelerator
import importlib.util
spec = importlib.util.spec_from_file_location("compiler", "site-packages/torch/_dynamo/convert_frame.py")
compiler = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compiler)
stage("setup")
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(640, 4))
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
# From here on a rank that only waits is no fault: the test strikes while it works.
folder = "checkpoint"
for number, (x,) in enumerate(loader):
    stage("first step" if number == 0 else "training")
    accelerator.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
    if number == 1:
        stage("compile")
        compiler.compile_for(2.0)
    if number % 15 == 14:
        stage("evaluation")
        with torch.no_grad():
            for _ in range(5):
                accelerator.gather(model(x))
                time.sleep(0.05)
        stage("save")
        for _ in range(3):
            accelerator.save_state(folder)
        stage("load")
        for _ in range(3):
            accelerator.load_state(folder)
print("done", flush=True)
"""
STAGES = {
    "start": 0.15,
    "import": 2.0,
    "setup": 0.2,
    "first step": 0.1,
    "compile": 2.0,
    "training": 0.5,
    "evaluation": 0.3,
    "save": 0.2,
    "load": 0.2,
}
SIGNALS = {"stop": signal.SIGSTOP, "deadlock": signal.SIGUSR2, "loop": signal.SIGALRM}


def stage_of(command: Command, rank: int) -> tuple[str, int]:
    try:
        name, _, pid = (command.directory / f"stage_{rank}").read_text().strip().rpartition(" ")
        return name, int(pid)
    except (OSError, ValueError):
        return "", 0


def in_stage(command: Command, launcher: subprocess.Popen[str], stage: str, rank: int) -> int:
    """Wait until the rank comes to the stage; return its process id."""
    while launcher.poll() is None:
        if stage == "start":
            for process in psutil.Process(launcher.pid).children():
                # Before it has begun its own program a child has the launcher's command line, and the launcher waits for it.
                with suppress(psutil.NoSuchProcess):
                    if worker.__file__ in process.cmdline() and process.environ().get("RANK") == str(rank):
                        return process.pid
        elif (now := stage_of(command, rank))[0] == stage:
            return now[1]
        time.sleep(0.002)
    raise AssertionError(f"it ended before {stage}")


def read_alarm(launcher: subprocess.Popen[str], until_s: float) -> tuple[str, float]:
    """Return the first line of the first report, and when it came."""
    assert launcher.stderr is not None
    text, deadline = "", time.monotonic() + until_s
    while time.monotonic() < deadline:
        if select.select([launcher.stderr], [], [], 0.1)[0]:
            data = os.read(launcher.stderr.fileno(), 1 << 16).decode()
            text += data
            if found := re.search(r"^echelon: (?:stall|note) .*$", text, re.MULTILINE):
                return found[0], time.monotonic()
            if not data:
                break
    raise AssertionError(f"no report in {until_s} s: {text}")


def strike(command: Command, *, ranks: int, bad: int, stage: str, kind: str, delay_s: float) -> str:
    """Run once, plant the fault, and check who is named, and when; return what came."""
    for rank in range(ranks):
        (command.directory / f"stage_{rank}").unlink(missing_ok=True)
    flags = ["-q", "--cpu", f"--num_processes={ranks}", f"--stall_timeout={STALL_S}", f"--slow_timeout={SLOW_S}"]
    launcher = command.start_launch(*flags, "train.py", OMP_NUM_THREADS="1")
    try:
        pid = in_stage(command, launcher, stage, bad)
        time.sleep(delay_s)
        was_in = stage_of(command, bad)[0] or "start"
        os.kill(pid, SIGNALS[kind])
        struck = time.monotonic()
        line, came = read_alarm(launcher, SLOW_S + 60)
        line_of = f"{kind} in {was_in} of rank {bad} of {ranks}, told after {came - struck:.1f} s: {line}"
        assert re.search(rf": rank {bad} ", line), line_of
        limit_s = SLOW_S if "too long" in line else STALL_S + (0.0 if kind == "stop" else SLACK_S)
        assert came - struck <= limit_s + REPORT_S, line_of
        return line_of
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.wait()


@pytest.fixture
def prepared(command: Command) -> Command:
    command.write("train.py", TRAIN)
    command.write("site-packages/planter.py", PLANTER)
    command.write("site-packages/torch/_dynamo/convert_frame.py", COMPILER)
    return command


@pytest.mark.soak
@pytest.mark.parametrize("number", range(int(os.environ.get("HANGS", "100"))))
def test_a_hang_at_a_random_instant_is_named(number: int, prepared: Command) -> None:
    draw = random.Random(number)
    ranks, stage = draw.choice((2, 4)), draw.choice(tuple(STAGES))
    kind = "stop" if stage == "start" else draw.choice(tuple(SIGNALS))
    bad, delay_s = draw.randrange(ranks), draw.uniform(0.0, STAGES[stage])
    print(strike(prepared, ranks=ranks, bad=bad, stage=stage, kind=kind, delay_s=delay_s))
