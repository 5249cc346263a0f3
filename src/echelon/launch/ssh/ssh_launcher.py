"""Start one command line on several machines by ssh, show what they print, and end all of them when one fails.

No terminal (``ssh -tt``): it would end the other side with the connection, but also echo the token and mix stdout with
stderr. ``remote_end.py`` on the other side looks at its stdin instead.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

from echelon.base import environ
from echelon.base.errors import ConfigError, LaunchError
from echelon.launch.interrupts import Interrupts
from echelon.launch.local.output import relay
from echelon.launch.local.slots import is_this_machine
from echelon.launch.multinode.job_token import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from echelon.launch.ssh import remote_end
from echelon.launch.ssh.hostfile import Host
from echelon.status.stop_barrier import EXIT_CODE

__all__ = ["SSH_ARGS_VARIABLE", "run_on_hosts"]

SSH_ARGS_VARIABLE = "ECHELON_SSH_ARGS"
"""More options for ssh, as a shell would read them: ``-p 2222 -i key``."""

_STDOUT: Literal["stdout"] = "stdout"
_STDERR: Literal["stderr"] = "stderr"
_POLL = timedelta(milliseconds=50)
_SSH_FAILED = 255
# The launchers notice by themselves that one of them has ended, and say what they know; later they are told.
_GRACE = timedelta(seconds=20)
# After SIGHUP a launcher has ended its ranks within 5 s; if nothing comes, the connection is cut.
_HANG_UP = timedelta(seconds=10)
_IMPATIENT = 3  # signals from the user: the third cuts the connections
# Variables that a run may depend on; everything else of this machine's environment stays here.
_SENT = ("ECHELON_", "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_")
_SENT_NAMES = frozenset({"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONHASHSEED"})
_KEPT = frozenset({TOKEN_VARIABLE, TOKEN_FILE_VARIABLE, SSH_ARGS_VARIABLE, "ECHELON_MACHINE_RANK"})


@dataclass(slots=True, kw_only=True)
class _Connection:
    """A launcher on another machine, seen from here."""

    host: str
    process: subprocess.Popen[bytes]
    relays: list[threading.Thread] = field(default_factory=list)

    def send(self, line: str) -> None:
        """Send a line to the other end; nothing happens when that is gone."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError, ValueError):
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def cut(self) -> None:
        """End the connection: the other end notices, and ends what it has started."""
        self.process.kill()

    def close(self) -> None:
        """Let go of it, and show the rest of its output; its process has ended, or been cut."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        for thread in self.relays:
            thread.join(timeout=1.0)


def run_on_hosts(
    hosts: Sequence[Host],
    flags: Sequence[str],
    program: Sequence[str],
    *,
    token: bytes,
    interrupts: Interrupts,
    least: int | None = None,
) -> int:
    """Run ``echelon launch FLAGS PROGRAM`` on every host; return 0, or the exit code of the launcher that failed first.

    Signals that come to us go to all launchers.

    Args:
        hosts: the machines; number i is ``--machine_rank i``, and gets its slots as ``--gpu_ids``.
        flags: what all launchers have in common.
        program: what follows the flags: the script and its arguments.
        token: the secret of the launchers of this run.
        interrupts: the signals that come to us, held.
        least: so many of them can do without the others (an elastic run); None: all are needed.

    Raises:
        ConfigError: ECHELON_SSH_ARGS cannot be read.
        LaunchError: there is no ssh here, or no connection to a host.
    """
    least = len(hosts) if least is None else least
    connections: list[_Connection] = []
    try:
        for i, host in enumerate(hosts):
            own = ["--machine_rank", str(i), "--gpu_ids", ",".join(map(str, host.slots))]
            connections.append(_connect(host.name, [*flags, *own, *program], token))
        return _watch(connections, interrupts, least=least)
    finally:
        for one in connections:
            if one.process.poll() is None:
                one.cut()
        for one in connections:
            one.close()


def _connect(host: str, arguments: Sequence[str], token: bytes) -> _Connection:
    command = [sys.executable, remote_end.__file__, *arguments]
    process = subprocess.Popen(
        command if is_this_machine(host) else [*_ssh(), "--", host, shlex.join(command)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches us alone; we tell the other ends
    )
    connection = _Connection(host=host, process=process)
    assert process.stdout is not None
    assert process.stderr is not None
    for pipe, name in ((process.stdout, _STDOUT), (process.stderr, _STDERR)):
        nowhere = Path(os.devnull).open("wb")  # noqa: SIM115 - the thread closes it
        connection.relays.append(relay(os.dup(pipe.fileno()), nowhere, name, prefix=f"[{host}]: "))
        pipe.close()
    greeting = {
        "token": token.decode(),
        "token_variable": TOKEN_FILE_VARIABLE,
        "environment": _environment(),
        "directory": os.getcwd(),
    }
    connection.send(json.dumps(greeting))
    return connection


def _ssh() -> list[str]:
    program = shutil.which("ssh")
    if program is None:
        raise LaunchError(
            "there is no ssh on this machine", do="install it, or start echelon launch on every machine yourself"
        )
    text = environ.get(SSH_ARGS_VARIABLE) or ""
    try:
        own = shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"{SSH_ARGS_VARIABLE}={text!r} cannot be read: {error}",
            where=f"env {SSH_ARGS_VARIABLE}",
            do="quote as for a shell",
        ) from error
    # The first value of an option counts: the user's. Nobody could answer a question; a machine that is gone is noticed.
    return [program, *own, "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"]


def _environment() -> Mapping[str, str]:
    return {
        name: value
        for name, value in environ.snapshot().items()
        if (name.startswith(_SENT) or name in _SENT_NAMES) and name not in _KEPT
    }


def _watch(connections: Sequence[_Connection], interrupts: Interrupts, *, least: int) -> int:
    """Wait until all have ended; tell them what they must know; return the exit code of the run."""
    codes: dict[str, int] = {}  # in the order of their ends
    signals, next_step, is_told = 0, None, False
    while True:
        running = [one for one in connections if not _has_ended(one, codes)]
        failed = [code for code in codes.values() if code != 0]
        if not running:
            return failed[0] if failed and len(connections) - len(failed) < least else 0
        if interrupts.count > signals:
            signals = interrupts.count
            assert interrupts.first is not None
            for one in running:
                one.send(signal.Signals(interrupts.first).name) if signals < _IMPATIENT else one.cut()
        # Those that were asked to save and end take the time that this takes.
        lost = [code for code in failed if code != EXIT_CODE and signals == 0]
        if len(connections) - len(lost) < least and next_step is None:
            next_step = time.monotonic() + _GRACE.total_seconds()
        if next_step is not None and time.monotonic() > next_step:
            for one in running:
                one.cut() if is_told else one.send("SIGHUP")
            next_step, is_told = time.monotonic() + _HANG_UP.total_seconds(), True
        time.sleep(_POLL.total_seconds())


def _has_ended(one: _Connection, codes: dict[str, int]) -> bool:
    code = one.process.poll()
    if code is not None and one.host not in codes:
        codes[one.host] = 128 - code if code < 0 else code
        _check_connected(one, code)
    return code is not None


def _check_connected(one: _Connection, code: int) -> None:
    """Raise if it is ssh itself that has failed: the other launchers would wait for this one in vain."""
    if code == _SSH_FAILED:
        raise LaunchError(
            f"no connection to {one.host}: its ssh ended with exit code {code}",
            where=f"the machine {one.host}",
            do=f"see the lines of [{one.host}] above; `ssh {one.host} true` must work without a question. "
            f"{SSH_ARGS_VARIABLE}='-p 2222 -i key' gives ssh more options",
        )
