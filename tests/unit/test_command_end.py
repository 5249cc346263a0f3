"""The command ends at once, and still as an interpreter does."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, sys, threading
from echelon.cli import main
sys.modules["torch"] = sys  # what it looks for
main._run = lambda argv: 7
atexit.register(print, "at exit")
main_thread = threading.main_thread()
threading.Thread(target=lambda: (main_thread.join(), print("thread"))).start()  # when the end has begun
class Slow:
    def __del__(self):
        print("taken apart")
slow = Slow()
print("no newline", end=" ")
main.main()
"""


def test_exit_joins_threads_runs_handlers_and_flushes_output_without_module_teardown() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (7, "no newline thread\nat exit\n", "")
