"""Runs recorded scripts on ranks forked from a process that has imported torch: a run takes a second instead of ten.

Stands in for ``echelon launch`` in tests of ``echelon verify`` with many runs. Run as a program, this file is the process that forks.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
_GRACE_S = 5.0


class WarmRunner:
    """Records runs (``RunRequest``) as ``LayoutRunner`` does."""

    def __init__(self, process: subprocess.Popen[str], *, variables: Mapping[str, str], timeout_s: float) -> None:
        self._process, self._variables, self._timeout_s = process, dict(variables), timeout_s
        self.seconds = 0.0
        """Sum of the time of all runs."""

    def record(self, request: Any) -> Any:
        """Run the script, and return a ``LayoutRun``."""
        from echelon.verify.command.run_layouts import LayoutRun, RunFailure

        request.folder.mkdir(parents=True, exist_ok=True)
        arguments = [one.replace("{layout}", request.layout.slug) for one in request.arguments]
        argv = ["--folder", str(request.folder), "--steps", str(request.steps), "--seed", "0"]
        argv += ["--batch_factor", str(request.batch_factor), "--first_update", str(request.first_update)]
        argv += ["--float64"] * request.is_float64
        if getattr(request, "perturbation", 0):
            argv += ["--perturbation", str(request.perturbation)]
        if getattr(request, "gradient_errors", None):
            argv += ["--gradient_errors", str(request.gradient_errors)]
        variables = dict(self._variables)
        if request.layout.engine is not None:
            variables["ECHELON_ENGINE"] = request.layout.engine
        output = request.folder / "output.txt"
        began = time.monotonic()
        codes = self._ask(
            argv=[*argv, request.script, *arguments],
            variables=variables,
            num_ranks=request.layout.num_processes,
            output=str(output),
            timeout_s=self._timeout_s,
            cwd=str(_empty(request.folder / "files")),
        )
        seconds = time.monotonic() - began
        self.seconds += seconds
        failure, count = None, _num_updates(request)
        if any(codes):
            text = output.read_text(errors="replace")[-2500:]
            failure = RunFailure(what=f"exit codes {codes}", details=tuple(text.splitlines()), output=str(output))
        elif not count:
            failure = RunFailure(what="the script ended without an optimizer step")
        return LayoutRun(request=request, num_updates=count, seconds=seconds, failure=failure)

    def _ask(self, **request: Any) -> list[int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: list[int] = json.loads(self._process.stdout.readline())
        return answer


@contextmanager
def warm_runner(
    *modules: str, variables: Mapping[str, str] | None = None, timeout_s: float = 120.0
) -> Iterator[WarmRunner]:
    """Start the process that forks, with ``modules`` imported."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ECHELON_NO_RECORD": "1", "PYTHONHASHSEED": "0"}
    with subprocess.Popen(
        [sys.executable, str(Path(__file__)), *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            yield WarmRunner(process, variables=variables or {}, timeout_s=timeout_s)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def _empty(folder: Path) -> Path:
    """Return a new folder, in which scripts with relative paths write."""
    folder.mkdir(exist_ok=True)
    return folder


def _num_updates(request: Any) -> int:
    found = set()
    for path in request.folder.glob("rank_0.trace.jsonl"):
        for line in path.read_text().splitlines():
            if line.startswith('{"kind":"optimizer_step"'):
                found.add(json.loads(line)["update"])
    return len(found)


def _main(modules: Sequence[str]) -> None:
    for name in ("echelon.verify.child", *modules):
        importlib.import_module(name)
    answers = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        codes = _run(json.loads(line))
        os.write(answers, (json.dumps(codes) + "\n").encode())


def _run(request: dict[str, Any]) -> list[int]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    size = request["num_ranks"]
    Path(request["output"]).write_text("")
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            _be_rank(request, rank, port)
        pids.append(pid)
    return _wait(pids, request["timeout_s"])


def _wait(pids: list[int], timeout_s: float) -> list[int]:
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout_s
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    if codes[pid]:
                        deadline = min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline:
            for pid in pids:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def _be_rank(request: dict[str, Any], rank: int, port: int) -> NoReturn:
    code = 1
    try:
        output = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
        for number in (1, 2):
            os.dup2(output, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(request["cwd"])
        size = str(request["num_ranks"])
        os.environ.update(
            {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size},
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            ACCELERATE_USE_CPU="true",
            **request["variables"],
        )
        from echelon.compat import swap
        from echelon.verify import child

        if libraries := os.environ.get("ECHELON_AS"):
            swap.install_for_rank(libraries)
        child.main(request["argv"])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - printed, as by the interpreter
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    _main(sys.argv[1:])
