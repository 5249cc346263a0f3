"""What several ranks print on one terminal: each distinct error once, and no message on the line of a progress bar."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading

import pyte
import pytest

from tests.launch.conftest import Command

# `what` fails on all ranks: with the same error, or with two different ones.
FAILS = """
import os, sys, time
from tqdm import tqdm
rank, what = int(os.environ["RANK"]), sys.argv[1]
sys.path.insert(0, "src")
def fail(i):
    if what == "two" and rank % 2:
        raise KeyError("labels")
    if what == "echelon":
        from echelon.base.errors import UsageError
        raise UsageError(f"batch {i} is empty", where="flag --x", do="pass another batch")
    if what == "exit":
        sys.exit("no data")
    raise ValueError(f"index {rank} is out of range")
for i in tqdm(range(3), disable=rank != 0):
    time.sleep(0.05)
fail(i)
"""
# The bar of rank 0 is in the middle of its line when the others fail.
BAR = """
import os, sys, time
from pathlib import Path
from tqdm import tqdm
rank = int(os.environ["RANK"])
bar = tqdm(total=10, ncols=60, disable=rank != 0)
bar.update(4)
bar.refresh()
Path(f"ready{rank}").touch()
while not all(Path(f"ready{one}").exists() for one in range(2)):
    time.sleep(0.01)
if rank == 1:
    raise ValueError("wrong")
time.sleep(60)
"""


def _tracebacks(text: str) -> int:
    return text.count("Traceback (most recent call last)")


def test_the_same_error_on_four_ranks_is_printed_once(command: Command) -> None:
    result = command.launch("--cpu", "--num_processes=4", command.write("fails.py", FAILS), "same")
    assert result.code == 1
    assert _tracebacks(result.err) == 1, result.err
    assert result.err.count("logs:") == 1
    assert len(re.findall(r"^ValueError: index \d is out of range$", result.err, flags=re.MULTILINE)) == 1
    if "stopped by echelon" not in result.err:  # on a busy machine, the launcher may stop a rank before it fails
        assert re.search(r"others: ranks? [\d, -]+ failed with the same error$", result.err, flags=re.MULTILINE)


# With PYTHONUNBUFFERED, Python writes the end of a line, and each argument of print, by itself.
LINES = """
import os
rank = os.environ["RANK"]
for i in range(2000):
    print(rank * 9, i, rank * 9, sep=" ")
print("the", end=" ")
print("end of", rank, end="")
"""


def test_lines_of_ranks_stay_whole(command: Command) -> None:
    result = command.launch("--cpu", "--num_processes=3", command.write("lines.py", LINES), PYTHONUNBUFFERED="1")
    expected = [line for r in "012" for line in (*(f"{r * 9} {i} {r * 9}" for i in range(2000)), f"the end of {r}")]
    assert sorted(result.out.splitlines()) == sorted(expected)
    alone = command.launch("--cpu", "--num_processes=1", "lines.py", PYTHONUNBUFFERED="1")
    assert alone.out.endswith("\nthe end of 0")  # a single rank's output is what the program writes


@pytest.mark.soak
def test_two_errors_are_printed_once_each(command: Command) -> None:
    result = command.launch("--cpu", "--num_processes=4", command.write("fails.py", FAILS), "two")
    assert 1 <= _tracebacks(result.err) <= 2, result.err  # the launcher may stop the ranks of the second one first
    assert result.err.count("\nKeyError: 'labels'") <= 1
    assert len(re.findall(r"^ValueError: index \d is out of range$", result.err, flags=re.MULTILINE)) <= 1
    assert result.err.count("do:") == 1


@pytest.mark.soak
def test_an_error_of_echelon_has_one_do(command: Command) -> None:
    result = command.launch("--cpu", "--num_processes=3", command.write("fails.py", FAILS), "echelon")
    assert _tracebacks(result.err) == 1, result.err
    assert result.err.count("do:") == 1
    report = result.err[result.err.index("failed first") :]
    assert re.match(r"failed first: echelon.base.errors.UsageError: batch 2 is empty\n", report)
    assert re.search(r"\n  where: rank \d of 3, flag --x\n", report)
    assert "\n  do:    pass another batch\n" in report


@pytest.mark.soak
def test_a_text_of_sys_exit_is_printed_once(command: Command) -> None:
    result = command.launch("--cpu", "--num_processes=3", command.write("fails.py", FAILS), "exit")
    assert result.code == 1
    assert result.err.splitlines().count("no data") == 1, result.err


@pytest.mark.soak
def test_log_files_have_the_whole_error_of_their_rank(command: Command) -> None:
    script = command.write("fails.py", FAILS)
    result = command.launch("--cpu", "--num_processes=2", "--log_dir=logs", script, "echelon")
    assert _tracebacks(result.err) == 1, result.err
    assert result.err.count("do:") == 1
    assert "\n  do:    pass another batch\n" in result.err
    assert "\0" not in result.err
    logs = [path.read_text() for path in sorted(command.directory.glob("logs/*/attempt_0/rank_*/stderr.log"))]
    whole = [1, 0] if "stopped by echelon" in result.err else [1, 1]  # it may stop a rank before it fails
    assert sorted((_tracebacks(log) for log in logs), reverse=True) == whole
    assert sorted((log.count("  do:    pass another batch\n") for log in logs), reverse=True) == whole
    assert not any("\0" in log for log in logs)


@pytest.mark.slow
def test_no_message_is_glued_to_a_progress_bar(command: Command) -> None:
    screen = _on_a_terminal(command, "--cpu", "--num_processes=2", command.write("bar.py", BAR))
    assert any("ValueError: wrong" in line for line in screen), screen
    starts = [line for line in screen if "Traceback (most" in line or "echelon: rank 1" in line]
    assert starts == ["Traceback (most recent call last):", "echelon: rank 1 failed first: ValueError: wrong"]


@pytest.mark.soak
def test_a_message_of_one_rank_is_not_glued_to_the_bar_of_another_with_tee(command: Command) -> None:
    screen = _on_a_terminal(command, "--cpu", "--num_processes=2", "--tee=3", command.write("bar.py", BAR))
    starts = [line for line in screen if "Traceback (most" in line or "echelon: rank 1" in line]
    assert starts == ["[rank1]: Traceback (most recent call last):", "echelon: rank 1 failed first: ValueError: wrong"]


def _on_a_terminal(command: Command, *argv: str) -> list[str]:
    """Return the lines that a terminal shows after ``echelon launch``."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))  # tqdm shows nothing on 0 lines
    process = command.start_launch(*argv, TERM="xterm", NO_COLOR="1", terminal=follower)
    os.close(follower)
    written = bytearray()

    def read() -> None:
        try:
            while chunk := os.read(leader, 4096):
                written.extend(chunk)
        except OSError:  # the last process has closed the terminal
            pass

    thread = threading.Thread(target=read)
    thread.start()
    process.wait(timeout=120)
    thread.join(timeout=10)
    os.close(leader)
    assert b"4/10" in written
    return _shown(written.decode())


def _shown(text: str) -> list[str]:
    """Return the lines of a screen that is large enough for all of them."""
    screen = pyte.Screen(1000, 200)
    pyte.Stream(screen).feed(text)
    return [line.rstrip() for line in screen.display]
