"""A rank that fails, and a launcher that is told to stop: quickly, in words, and nothing left over."""

from __future__ import annotations

import signal
import time

import pytest

from tests.launch.conftest import Command, Result

# Rank 1 fails when rank 0 is there; rank 0 waits for ever. `moment()` notes when it happens.
HEAD = """
import os, signal, sys, threading, time
rank = int(os.environ["RANK"])
open(f"ready_{rank}", "w").close()
def moment():
    while not os.path.exists("ready_0"):
        time.sleep(0.005)
    with open("moment.tmp", "w") as file:
        file.write(repr(time.monotonic()))
    os.rename("moment.tmp", "moment")
def wait():
    while True:
        time.sleep(60)
"""
RAISE = """
def train():
    moment()
    raise ValueError("bad sample 17")
train() if rank == 1 else wait()
"""
STUBBORN = """
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
"""


def fail(command: Command, body: str, *flags: str) -> Result:
    """Launch a script of two ranks in which one fails; check what holds for every failure."""
    command.write("train.py", HEAD + body)
    result = command.launch("--num_processes=2", "--quiet", *flags, "train.py")
    moment = float((command.directory / "moment").read_text())
    assert result.code != 0
    assert result.ended - moment < 5.0
    report = result.err[result.err.index("echelon: ") :].splitlines()
    assert len(report) <= 30
    assert any(line.startswith("  where: ") for line in report)
    assert any(line.startswith("  do:    ") for line in report)
    return result


def test_exception_on_one_rank(command: Command) -> None:
    result = fail(command, RAISE)
    line = (HEAD + RAISE).splitlines().index('    raise ValueError("bad sample 17")') + 1
    assert result.code == 1
    assert "echelon: rank 1 failed first: ValueError: bad sample 17" in result.err
    assert f'train.py:{line} in train: raise ValueError("bad sample 17")' in result.err
    assert "others: rank 0 stopped by echelon" in result.err
    # The traceback is the plain one: it begins at the script.
    traceback = result.err[: result.err.index("echelon: ")].splitlines()
    assert traceback[0] == "Traceback (most recent call last):"
    assert traceback[1].startswith(f'  File "{command.directory}/train.py"')
    assert traceback[-1] == "ValueError: bad sample 17"


def test_rank_that_ignores_sigterm_is_killed_in_time_with_all_children(command: Command) -> None:
    child = "import subprocess\nif rank == 1:\n    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    assert (
        "ValueError: bad sample 17" in fail(command, STUBBORN + child + RAISE).err
    )  # the fixture looks for what is left


def test_sys_exit_with_text(command: Command) -> None:
    result = fail(command, "moment() or sys.exit('no data found') if rank == 1 else wait()\n")
    assert result.code == 1
    assert "rank 1 failed first: sys.exit(no data found)" in result.err
    assert result.err.startswith("no data found\n")


def test_exit_code_is_the_ranks_own(command: Command) -> None:
    result = fail(command, "moment() or os._exit(7) if rank == 1 else wait()\n")
    assert result.code == 7
    assert "rank 1 failed first: exit code 7, without a Python exception" in result.err


def test_killed_rank(command: Command) -> None:
    result = fail(command, "moment() or os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else wait()\n")
    assert result.code == 128 + 9
    assert "rank 1 failed first: killed by SIGKILL (signal 9)" in result.err
    assert "memory" in result.err


def test_crash_in_native_code_names_the_users_line(command: Command) -> None:
    result = fail(
        command,
        "def crash():\n    import ctypes\n    moment()\n    ctypes.string_at(0)\ncrash() if rank == 1 else wait()\n",
    )
    assert result.code == 128 + 11
    assert "killed by SIGSEGV" in result.err
    assert "in crash: ctypes.string_at(0)" in result.err


def test_error_in_a_thread_explains_the_exit_code(command: Command) -> None:
    body = "def work():\n    raise KeyError('lost')\n"
    body += "if rank == 0: wait()\nt = threading.Thread(target=work, name='loader'); t.start(); t.join(); moment(); sys.exit(5)\n"
    result = fail(command, body, "--log_dir", "logs")
    assert result.code == 5
    assert "rank 1 failed first (in thread 'loader'): KeyError: 'lost'" in result.err
    assert f"logs:  {command.directory}/logs/" in result.err
    assert "KeyError: 'lost'" in next(command.directory.rglob("rank_1/stderr.log")).read_text()


def test_program_that_fails_without_python(command: Command) -> None:
    result = command.launch("--no_python", "-q", "sh", "-c", "exit 3")
    assert result.code == 3
    assert "rank 0 failed first: exit code 3" in result.err


@pytest.mark.parametrize(
    ("number", "manner"),
    [(signal.SIGINT, ""), (signal.SIGTERM, ""), (signal.SIGTERM, STUBBORN)],
    ids=["SIGINT", "SIGTERM", "SIGTERM ignored by the script"],
)
def test_signal_to_the_launcher_stops_every_process(number: signal.Signals, manner: str, command: Command) -> None:
    command.write("train.py", "import signal\n" + manner + HEAD + "wait()\n")
    process = command.start_launch("--num_processes=2", "--quiet", "train.py")
    command.wait_for_files("ready_0", "ready_1")
    sent = time.monotonic()
    process.send_signal(number)
    result = command.finish(process)
    assert result.ended - sent < 5.0
    assert result.code == 128 + number
    assert result.err.startswith(f"echelon: stopped by {number.name}")
    assert "  where: " in result.err
    assert "  do:    " in result.err
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) == 3


def test_script_sees_the_signal_and_may_clean_up(command: Command) -> None:
    command.write("train.py", HEAD + "try:\n    wait()\nexcept KeyboardInterrupt:\n    open('saved', 'w').close()\n")
    process = command.start_launch("train.py")
    command.wait_for_files("ready_0")
    process.send_signal(signal.SIGINT)
    assert command.finish(process).code == 130
    assert (command.directory / "saved").exists()


def test_kill_of_the_launcher_leaves_no_orphans(command: Command) -> None:
    command.write("train.py", HEAD + "wait()\n")
    process = command.start_launch("--num_processes=2", "train.py")
    command.wait_for_files("ready_0", "ready_1")
    process.kill()
    command.finish(process)
    command.wait_for(lambda: not command.left_over(), "the end of every process")
