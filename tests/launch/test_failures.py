"""A rank that fails, and a launcher that is told to stop: quickly, in words, and nothing left over."""

from __future__ import annotations

import re
import signal
import time

import pytest

from tests.launch.conftest import Command, Result

# Rank 1 fails when rank 0 waits, which it does for ever: its handlers are set then. `moment()` notes when it happens.
HEAD = """
import os, signal, sys, threading, time
rank = int(os.environ["RANK"])
def moment():
    while not os.path.exists("ready_0"):
        time.sleep(0.005)
    with open("moment.tmp", "w") as file:
        file.write(repr(time.monotonic()))
    os.rename("moment.tmp", "moment")
def wait():
    open(f"ready_{rank}", "w").close()
    while True:
        time.sleep(60)
"""
WITHIN_S = 60.0  # 5 on a quiet machine; a rank that nobody ends takes for ever
RAISE = """
def train():
    moment()
    raise ValueError("bad sample 17")
import signal  # a program that saves when it is asked to end
signal.signal(signal.SIGTERM, lambda *_: open("saves", "w").close())
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
    assert result.ended - moment < WITHIN_S
    report = result.err[result.err.index("echelon: ") :].splitlines()
    assert len(report) <= 30
    assert any(line.startswith("  where: ") for line in report)
    assert any(line.startswith("  logs:  ") for line in report)  # and no advice: the exception says all that is known
    assert not any(line.startswith("  do:    ") for line in report)
    return result


def test_exception_on_one_rank(command: Command) -> None:
    result = fail(command, RAISE)
    line = (HEAD + RAISE).splitlines().index('    raise ValueError("bad sample 17")') + 1
    assert result.code == 1
    assert "echelon: rank 1 failed first: ValueError: bad sample 17" in result.err
    assert not (command.directory / "saves").exists()  # rank 0 was stopped: that is no preemption
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


# One kind of end after the other, each in an attempt of its own.
ENDS = """
def work():
    raise KeyError('lost')
def in_thread():
    t = threading.Thread(target=work, name='loader'); t.start(); t.join()
    sys.exit(5)
def crash():
    import ctypes
    ctypes.string_at(0)
ends = [
    lambda: sys.exit('no data found'),
    lambda: os._exit(7),
    lambda: os.kill(os.getpid(), signal.SIGKILL),
    crash,
    in_thread,
]
ends[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]() if rank == 1 else wait()
"""


@pytest.mark.slow
def test_each_kind_of_end_is_told_in_words(command: Command) -> None:
    command.write("train.py", HEAD + ENDS)
    result = command.launch("--num_processes=2", "-q", "--max_restarts=4", "--log_dir", "logs", "train.py")
    assert result.code == 5, result.err
    reports = re.split(r"^echelon: (?=rank)", result.err, flags=re.MULTILINE)[1:]
    assert [report.partition("\n")[0] for report in reports] == [
        "rank 1 failed first: sys.exit(no data found)",
        "rank 1 failed first: exit code 7, without a Python exception",
        "rank 1 failed first: killed by SIGKILL (signal 9)",
        "rank 1 failed first: killed by SIGSEGV (signal 11)",
        "rank 1 failed first (in thread 'loader'): KeyError: 'lost'",
    ]
    assert "others: rank 0 stopped by echelon\n  where: rank 1 of 2\n" in reports[0]
    assert "memory" in reports[2]
    assert "in crash: ctypes.string_at(0)" in reports[3]
    assert f"logs:  {command.directory}/logs/" in reports[4]
    assert [report.count("echelon: restart") for report in reports] == [1, 1, 1, 1, 0]
    (folder,) = (command.directory / "logs").iterdir()
    assert (folder / "attempt_0" / "rank_1" / "stderr.log").read_text() == "no data found\n"
    assert "KeyError: 'lost'" in (folder / "attempt_4" / "rank_1" / "stderr.log").read_text()


def test_program_that_fails_without_python(command: Command) -> None:
    result = command.launch("--no_python", "-q", "sh", "-c", "exit 3")
    assert result.code == 3
    assert "rank 0 failed first: exit code 3" in result.err


@pytest.mark.slow
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
    assert result.ended - sent < WITHIN_S
    assert result.code == 128 + number
    assert result.err.startswith(f"echelon: stopped by {number.name}")
    assert "  where: " in result.err
    assert "  do:    " in result.err
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) == 3


@pytest.mark.slow
def test_script_sees_the_signal_and_may_clean_up(command: Command) -> None:
    command.write("train.py", HEAD + "try:\n    wait()\nexcept KeyboardInterrupt:\n    open('saved', 'w').close()\n")
    process = command.start_launch("train.py")
    command.wait_for_files("ready_0")
    process.send_signal(signal.SIGINT)
    assert command.finish(process).code == 130
    assert (command.directory / "saved").exists()
