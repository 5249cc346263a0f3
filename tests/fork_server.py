"""Runs programs on several ranks, as forks of one process that has imported what they need: a start takes no seconds.

The process is a program that calls ``serve``. This module imports only the standard library, for any Python.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn


class ForkServer:
    """A process that runs jobs: ``argv`` is a program that calls ``serve``."""

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def run(
        self,
        environs: Sequence[Mapping[str, str]],
        *,
        outputs: Sequence[str],
        folder: str,
        timeout_s: float,
        grace_s: float = 5.0,
        **job: Any,
    ) -> list[int]:
        """Run a job and return the exit codes of its ranks (-9: killed).

        Args:
            environs: the variables of each rank.
            outputs: the file to which each rank appends its output.
            folder: working directory.
            timeout_s: time after which the ranks are killed.
            grace_s: time for the other ranks to exit after one has failed.
            job: what the function that was given to ``serve`` gets.
        """
        job |= {"environs": environs, "outputs": outputs, "folder": folder, "timeout_s": timeout_s, "grace_s": grace_s}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the process that runs the ranks ended: {self._process.wait()}"
        codes: list[int] = json.loads(answer)
        return codes

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)


def serve(run: Callable[[dict[str, Any]], object]) -> None:
    """Answer jobs on stdin: call ``run`` with the job in a fork for each rank."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # only answers go to the original stdout
    for line in sys.stdin:
        job = json.loads(line)
        pids = []
        for rank in range(len(job["environs"])):
            pid = os.fork()
            if pid == 0:
                _be_rank(run, job, rank)
            pids.append(pid)
        codes = _wait(pids, timeout_s=job["timeout_s"], grace_s=job["grace_s"])
        print(json.dumps(codes), file=answers, flush=True)


def _be_rank(run: Callable[[dict[str, Any]], object], job: dict[str, Any], rank: int) -> NoReturn:
    code = 1
    try:
        os.setsid()  # so that its child processes can be killed with it
        output = os.open(job["outputs"][rank], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(output, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(job["folder"])
        os.environ.update(job["environs"][rank])
        run(job)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - printed, as by the interpreter
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _wait(pids: Sequence[int], *, timeout_s: float, grace_s: float) -> list[int]:
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout_s
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    if codes[pid]:
                        deadline = min(deadline, time.monotonic() + grace_s)
                elif time.monotonic() > deadline:
                    os.killpg(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[pid] for pid in pids]
