"""``echelon launch --debugger``: one rank has the terminal, the others do not ask, and an exception opens pdb."""

from __future__ import annotations

import os
import pty
import select
import sys
import termios
import time

import pytest

from tests.launch.conftest import Command

TRAIN = """
import os, time
rank = os.environ["RANK"]
answer = 41
breakpoint()
print(f"rank {rank} goes on", flush=True)
if rank == "1":
    raise ValueError("bad sample")
time.sleep(1000)
"""
_LIMIT_S = 120.0


class Terminal:
    """A terminal at which somebody sits."""

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        self.text = ""

    def read_until(self, text: str) -> str:
        """Return what is shown up to ``text``, which comes."""
        deadline = time.monotonic() + _LIMIT_S
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            if select.select([self._ours], [], [], 0.1)[0]:
                self.text += os.read(self._ours, 65536).decode().replace("\r", "")
        shown, self.text = self.text[: self.text.index(text)], self.text[self.text.index(text) + len(text) :]
        return shown

    def type(self, line: str) -> None:
        os.write(self._ours, f"{line}\n".encode())

    def close(self) -> None:
        os.close(self._ours)
        os.close(self.theirs)


@pytest.mark.slow
def test_a_breakpoint_and_an_exception_of_one_rank_open_pdb_on_the_terminal(command: Command) -> None:
    command.write("train.py", TRAIN)
    terminal = Terminal()
    try:
        before = termios.tcgetattr(terminal.theirs)
        argv = [sys.executable, "-m", "echelon", "launch", "-q", "--num_processes=2", "--debugger", "1", "train.py"]
        launcher = command.start(argv, terminal=terminal.theirs)
        shown = terminal.read_until("(Pdb) ")
        assert "train.py(6)<module>()" in shown
        terminal.type("p answer + 1")
        assert "42" in terminal.read_until("(Pdb) ")
        terminal.type("c")
        shown = terminal.read_until("(Pdb) ")
        assert "rank 1 goes on" in shown
        assert "ValueError: bad sample\n" in shown
        assert '-> raise ValueError("bad sample")' in shown
        assert launcher.poll() is None
        terminal.type("q")
        shown += terminal.read_until("logs:")
        assert "echelon: rank 1 failed first: ValueError: bad sample" in shown
        assert "rank 0 stopped by echelon" in shown
        assert launcher.wait(_LIMIT_S) == 1
        assert termios.tcgetattr(terminal.theirs) == before  # echo and all
    finally:
        terminal.close()


@pytest.mark.soak
def test_a_prompt_is_no_stall_and_the_terminal_is_whole_after_a_kill(command: Command) -> None:
    script = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    breakpoint()
dist.barrier()
"""
    command.write("train.py", script)
    terminal = Terminal()
    try:
        before = termios.tcgetattr(terminal.theirs)
        flags = ["-q", "--num_processes=2", "--stall_timeout=2", "--on_stall=stop", "--debugger"]
        launcher = command.start(
            [sys.executable, "-m", "echelon", "launch", *flags, "train.py"], terminal=terminal.theirs
        )
        terminal.read_until("(Pdb) ")
        time.sleep(8)
        assert launcher.poll() is None
        assert "stall" not in terminal.text
        launcher.terminate()
        launcher.wait(_LIMIT_S)
        assert termios.tcgetattr(terminal.theirs) == before
    finally:
        terminal.close()
