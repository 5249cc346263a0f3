"""Runs scripts on several ranks, as forks of one process that has imported the package, so that a start takes no seconds.

A program for the peers' Python: ``python forks.py PACKAGE`` reads one JSON job per line from stdin, and answers each with a JSON
line that lists the exit codes by rank.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from typing import Any

GRACE_S = 30.0  # time for the other ranks to exit after one has failed


def main(package: str) -> None:
    for name in ("", ".utils", ".tracking", ".logging"):
        importlib.import_module(package + name)
    # Modules that the first optimizer, the first step and the trackers would import in every fork.
    for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.utils.tensorboard"):
        importlib.import_module(name)
    assert importlib.import_module(package).Accelerator  # echelon imports it on first use
    gc.freeze()  # makes garbage collection in the forks take milliseconds
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # only answers go to the original stdout
    for line in sys.stdin:
        job = json.loads(line)
        pids = [_fork(job, rank) for rank in range(len(job["environs"]))]
        print(json.dumps(_wait(pids, timeout_s=job["timeout_s"])), file=answers, flush=True)


def _fork(job: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()  # so that its child processes can be killed with it
    output = os.open(job["outputs"][rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(job["folder"])
    os.environ.update(job["environs"][rank])
    sys.path[:0] = job["sys_path"]
    sys.argv = [job["script"]]
    code = 0
    try:
        runpy.run_path(job["script"], run_name="__main__")
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - printed, and reported by the exit code
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(pids: list[int], *, timeout_s: float) -> list[int]:
    """Return the exit codes (-9: killed after the time limit, or some time after another rank had failed)."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout_s
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    if codes[pid]:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
                elif time.monotonic() > deadline:
                    os.killpg(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    main(sys.argv[1])
