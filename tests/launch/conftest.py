"""Run the real command line on small scripts, and see that it leaves no process behind."""

from __future__ import annotations

import math
import os
import random
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.harness import run_on_ranks
from tests.launch.warm_launcher import run_echelon

_TOKEN = "MARK_OF_TESTS"
_LIMIT_S = 180.0  # eight times what the longest takes on a quiet machine


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str
    ended: float  # time.monotonic
    wall_s: float = math.nan  # of a launcher that was run to its end


class Command:
    """Starts programs in ``directory`` that carry a mark, by which their children are found."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.is_warm = False
        """Whether launchers import torch ahead for a restart, which most runs of the tests do not need."""
        self._token = uuid.uuid4().hex
        self._started: list[subprocess.Popen[str]] = []
        self._claims: list[socket.socket] = []

    def write(self, name: str, text: str | bytes) -> str:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return name

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        foreign = (
            "ECHELON_",
            "ACCELERATE_",
            "FSDP_",
            "PARALLELISM_CONFIG_",
            "GLOO_",
            "NCCL_",
            "TORCHELASTIC_",
            "SLURM_",
        )
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(foreign) and k not in ("RANK", "WORLD_SIZE")
        }
        inherited.pop("OMP_NUM_THREADS", None)
        # A machine with accelerators must give the same results here: these tests count on none.
        # Nor on the settings of the person who runs them.
        homes = {
            "XDG_CONFIG_HOME": str(self.directory / ".config"),
            "XDG_CACHE_HOME": str(self.directory / ".cache"),
            "HF_HOME": str(self.directory / ".huggingface"),
        }
        own = {"ECHELON_NO_RECORD": "1", "NO_COLOR": "1", "CUDA_VISIBLE_DEVICES": "", _TOKEN: self._token}
        return {**inherited, **homes, **own, **variables}

    def start(self, argv: list[str], terminal: int | None = None, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            argv,
            cwd=self.directory,
            env=self._environment(variables),
            stdin=subprocess.DEVNULL if terminal is None else terminal,
            stdout=subprocess.PIPE if terminal is None else terminal,
            stderr=subprocess.PIPE if terminal is None else terminal,
            text=True,
        )
        self._started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str]) -> Result:
        out, err = process.communicate(timeout=_LIMIT_S)
        return Result(process.returncode, out, err, time.monotonic())

    def run(self, argv: list[str], **variables: str) -> Result:
        return self.finish(self.start(argv, **variables))

    def echelon(self, *args: str, **variables: str) -> Result:
        return self.run([sys.executable, "-m", "echelon", *args], **variables)

    def start_launch(self, *args: str, **variables: str) -> subprocess.Popen[str]:
        return self.start([sys.executable, "-m", "echelon", "launch", *self._flags(), *args], **variables)

    def launch(self, *args: str, **variables: str) -> Result:
        """Run ``echelon launch ARGS`` in a process that has imported torch already; ``echelon`` and ``start_launch`` start a new one."""
        folder, environment = str(self.directory), self._environment(variables)
        (found,) = run_on_ranks(
            run_echelon,
            ["launch", *self._flags(), *args],
            folder,
            environment,
            world_size=1,
            timeout=_LIMIT_S,
            init_group=False,
        )
        code, out, err, wall_s = found
        return Result(code, out, err, time.monotonic(), wall_s)

    def _flags(self) -> list[str]:
        return [] if self.is_warm else ["--no_warm"]

    def left_over(self) -> list[psutil.Process]:
        """Return the processes that carry the mark and still run."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_TOKEN) == self._token and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited {_LIMIT_S} s for {what}"
            time.sleep(0.01)

    def free_port(self) -> int:
        """Return a port that nothing listens on, above those that the system gives away itself; it is this test's until its end."""
        for port in random.Random(self._token).sample(range(61000, 65000), 100):
            # Its twin for UDP says to other tests, of other processes too, that it is taken, and leaves it free for TCP.
            claim = socket.socket(type=socket.SOCK_DGRAM)
            with suppress(OSError), socket.socket() as sock:
                claim.bind(("127.0.0.1", port))
                sock.bind(("127.0.0.1", port))
                self._claims.append(claim)
                return port
            claim.close()
        raise AssertionError("no port is free")

    def wait_for_files(self, *names: str) -> None:
        self.wait_for(lambda: all((self.directory / name).exists() for name in names), f"{names}")

    def close(self) -> None:
        for claim in self._claims:
            claim.close()
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    command = Command(tmp_path)
    try:
        yield command
        left = command.left_over()
        psutil.wait_procs(left, timeout=5.0)  # one that was killed with its parent is just ending
        left = command.left_over()
        names = [(p.pid, p.cmdline()) for p in left]
        for process in left:
            process.kill()
        assert not names, f"left over: {names}"
    finally:
        command.close()
