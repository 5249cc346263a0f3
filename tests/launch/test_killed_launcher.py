"""A launcher that is killed, or told to stop, while it starts ranks: nothing of the run is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from echelon.launch.interrupts import Interrupted
from echelon.launch.local import worker
from echelon.launch.local.guardian import BYE, ENDED, LAUNCHER_VARIABLE, STARTED, STARTING, main as guard
from echelon.launch.local.output import Outputs
from echelon.launch.local.parents import Guardian
from echelon.launch.local.processes import Workers
from echelon.launch.local.warm_start import WarmStarter
from echelon.launch.script import Script
from echelon.status.board import Board
from tests.launch.conftest import Command

# Each rank has a child of its own, as loader workers are, which has nobody to end it but the launcher.
PARENT = """
import os, time
if os.fork() == 0:
    time.sleep(600)
time.sleep(600)
"""
LOADER = """
import time
import torch
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        time.sleep(0.05)
        return i
def main():
    for _ in range(100):
        for batch in DataLoader(Slow(), batch_size=2, num_workers=2):
            pass
if __name__ == "__main__":
    main()
"""
RESTARTING = """
import os, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(20):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
if dist.get_rank() == 1:
    os._exit(3)
time.sleep(600)
"""
SPAWN = """
import time
from echelon.distributed import spawn
def train(rank):
    time.sleep(600)
if __name__ == "__main__":
    spawn(train, nprocs=3)
"""
LEFT_AFTER_S = 3.0


def ranks_of(launcher: subprocess.Popen[str], name: str) -> list[psutil.Process]:
    try:
        return [p for p in psutil.Process(launcher.pid).children(recursive=True) if name in " ".join(p.cmdline())]
    except psutil.Error:
        return []


def nothing_is_left(command: Command, *, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while (left := command.left_over()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, [(p.pid, p.cmdline()) for p in left if p.is_running()]


@pytest.mark.slow
def test_a_launcher_that_is_killed_while_it_starts_ranks_leaves_nothing(command: Command) -> None:
    command.write("train.py", PARENT)
    launcher = command.start_launch("-q", "--cpu", "--num_processes=6", "train.py")
    command.wait_for(lambda: bool(ranks_of(launcher, "train.py")), "the first rank")
    time.sleep(0.015)  # some are not there yet, some have not asked to end with it
    launcher.kill()
    launcher.wait()
    nothing_is_left(command, within_s=LEFT_AFTER_S)


def test_a_rank_whose_launcher_is_gone_does_not_begin(command: Command) -> None:
    command.write("train.py", "open('began', 'w')\n")
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    # Also when its number belongs to a process that lives: this one did not begin then.
    for parent in (f"{gone.pid}:1", f"{os.getppid()}:1"):
        argv = [sys.executable, worker.__file__, parent, str(command.directory), "-", "default", "script", "train.py"]
        assert command.run(argv).code == -signal.SIGKILL
    assert not (command.directory / "began").exists()


def test_a_process_that_a_thread_has_started_ends_with_the_process_not_with_the_thread(command: Command) -> None:
    # As spawn(join=False) in a thread; something that does not pass signals on may also stand between.
    child = (
        "import sys, time, importlib.util as u\n"
        "s = u.spec_from_file_location('worker', sys.argv[1]); w = u.module_from_spec(s); s.loader.exec_module(w)\n"
        "w.die_with(sys.argv[2], by_thread=sys.argv[3] == '1'); print('asked', flush=True); time.sleep(600)\n"
    )
    parent = (
        "import subprocess, sys, threading, time\n"
        "from echelon.launch.local import worker\n"
        "from echelon.launch.local.parents import own_identity\n"
        "between = {'1': [], '0': ['sh', '-c', '\"$@\"; true', 'sh']}\n"
        "def start(how):\n"
        "    argv = [*between[how], sys.executable, '-c', sys.argv[1], worker.__file__, own_identity(), how]\n"
        "    p = subprocess.Popen(argv, stdout=subprocess.PIPE)\n"
        "    p.stdout.readline()\n"
        "for how in '10':\n"
        "    t = threading.Thread(target=start, args=(how,)); t.start(); t.join()\n"
        "time.sleep(0.2); print('ready', flush=True); time.sleep(600)\n"
    )
    process = command.start([sys.executable, "-c", parent, child])
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert len(command.left_over()) == 4  # the parent, the shell, and both children
    process.kill()
    process.wait()
    nothing_is_left(command, within_s=LEFT_AFTER_S)


def test_only_ranks_that_still_are_the_launcher_s_end_when_its_pipe_closes() -> None:
    ranks = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(3)]
    starts = [worker.start_of(rank.pid) for rank in ranks]
    mine, over, another = (rank.pid for rank in ranks)
    # The second is over; the number of the third has gone to a process that the launcher did not start.
    told = [f"{STARTED}{mine} {starts[0]}", f"{STARTED}{over} {starts[1]}", f"{STARTED}{another} 1", f"{ENDED}{over}"]
    try:
        for last, killed in (([BYE], []), ([], [mine])):
            read_end, write_end = os.pipe()
            os.write(write_end, "".join(f"{line}\n" for line in [*told, *last]).encode())
            os.close(write_end)
            guard([str(read_end)])
            assert [rank.wait(timeout=10) for rank in ranks if rank.pid in killed] == [-signal.SIGKILL] * len(killed)
            time.sleep(0.05)  # what was killed would be over by now
            assert [rank.pid for rank in ranks if rank.poll() is None] == [r.pid for r in ranks if r.pid not in killed]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_a_rank_that_the_launcher_was_starting_when_it_was_killed_ends_by_its_mark() -> None:
    def start(mark: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "600"], start_new_session=True, env={**os.environ, LAUNCHER_VARIABLE: mark})

    before, known = start("me"), start("me")
    while int(worker.start_of(known.pid)) >= (now := int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS)):
        time.sleep(0.001)
    unnamed, of_another = start("me"), start("another")
    others = [before, known, of_another]
    named = [f"{STARTING}{now}", f"{STARTED}{known.pid} 1"]  # its number has gone to somebody else: it is left alone
    try:
        for told, killed in (([*named], []), ([*named, f"{STARTING}{now}"], [unnamed])):
            read_end, write_end = os.pipe()
            os.write(write_end, "".join(f"{line}\n" for line in told).encode())
            os.close(write_end)
            guard([str(read_end), "me"])
            assert [rank.wait(timeout=10) for rank in killed] == [-signal.SIGKILL] * len(killed)
            assert [rank.poll() for rank in others] == [None] * 3
    finally:
        for rank in (*others, unnamed):
            rank.kill()
            rank.wait()


def test_a_signal_is_obeyed_between_two_ranks_that_are_started(tmp_path: Path) -> None:
    board, guardian, warm = Board(3, folder=str(tmp_path)), Guardian(), WarmStarter()
    looks = iter(range(10))

    def check() -> None:
        if next(looks) == 2:
            raise Interrupted(signal.SIGTERM)

    script = Script(kind="program", target="sleep", args=("600",), has_local_rank=False)
    outputs = Outputs(tee={}, redirect={})
    workers = Workers(
        script, directory=tmp_path, outputs=outputs, board=board, warm=warm, guardian=guardian, check=check
    )
    try:
        with pytest.raises(Interrupted):
            workers.start({i: {"RANK": str(i), "PATH": os.environ["PATH"]} for i in range(3)})
        assert workers.exit_codes() == [None, None]
    finally:
        workers.stop(signal.SIGTERM, grace=timedelta(seconds=3))
        guardian.close()
        board.remove()
    assert workers.exit_codes() == [-signal.SIGTERM] * 2


@pytest.mark.soak
def test_sigterm_while_ranks_are_started_stops_them_at_once(command: Command) -> None:
    command.write("train.py", PARENT)
    launcher = command.start_launch("-q", "--cpu", "--num_processes=6", "train.py")
    command.wait_for(lambda: bool(ranks_of(launcher, "train.py")), "the first rank")
    begun = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    result = command.finish(launcher)
    assert result.code == 143, result.err
    assert result.err.startswith("echelon: stopped by SIGTERM"), result.err
    assert time.monotonic() - begun < 10.0  # the ranks have 3 s
    nothing_is_left(command, within_s=0.5)


TICKS = os.sysconf("SC_CLK_TCK")
PROGRAMS = {
    "ranks with children": (PARENT, ["--num_processes=6"]),
    "loaders": (LOADER, ["--num_processes=2"]),
    "restarting": (RESTARTING, ["--num_processes=2", "--max_restarts=5"]),
    "programs": (PARENT, ["--num_processes=6", "--no_python", sys.executable]),
    "machines": (PARENT, ["--num_processes=4", "--nnodes=1", "--tee=3"]),
    "spawn": (SPAWN, []),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_launcher_that_is_killed_in_its_first_seconds_leaves_nothing(name: str, command: Command) -> None:
    """KILLS in all (200), a third of them when it starts ranks."""
    program, flags = PROGRAMS[name]
    draw = random.Random(name)
    command.write("train.py", program)
    for number in range(int(os.environ.get("KILLS", "200")) // len(PROGRAMS) + 1):
        argv = [sys.executable, "train.py"]
        if flags:
            argv = [sys.executable, "-m", "echelon", "launch", "-q", "--cpu", *flags, "train.py"]
        launcher = command.start(argv)
        if number % 3 == 0:
            ranks = "train.py" if flags else "multiprocessing"
            command.wait_for(lambda: bool(ranks_of(launcher, ranks)) or launcher.poll() is not None, "a rank")  # noqa: B023
            time.sleep(draw.uniform(0.0, 0.1))
        else:
            time.sleep(draw.uniform(0.0, 5.0))
        launcher.kill()
        launcher.communicate()
        nothing_is_left(command, within_s=LEFT_AFTER_S)
    print(f"{name}: {number + 1} kills")
