"""Starts ``echelon launch`` on several machines over ssh, shows its output, and stops all machines if one fails.

A remote terminal (``ssh -tt``) would stop the remote side when the connection closes, but would also echo the token and
mix stdout with stderr. Instead, ``remote_end.py`` watches its stdin on the remote machine.
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
from echelon.base.messages.translation import gettext as _
from echelon.launch.interrupts import Interrupts
from echelon.launch.job_token import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from echelon.launch.local.output import relay
from echelon.launch.local.slots import is_this_machine
from echelon.launch.ssh import remote_end
from echelon.launch.ssh.hostfile import Host
from echelon.status.stop_barrier import EXIT_CODE

SSH_ARGS_VARIABLE = "ECHELON_SSH_ARGS"
"""Environment variable with additional ssh options in shell syntax, such as ``-p 2222 -i key``."""

_STDOUT: Literal["stdout"] = "stdout"
_STDERR: Literal["stderr"] = "stderr"
_POLL = timedelta(milliseconds=50)
_SSH_FAILED = 255
# After a failure, the other launchers detect and report it themselves; after this time they get SIGHUP.
_GRACE = timedelta(seconds=20)
# A launcher stops its ranks within 5 s of SIGHUP; after this time the connection is closed.
_HANG_UP = timedelta(seconds=10)
_IMPATIENT = 3  # the third signal from the user closes the connections
# Variables that may affect a run; only these are sent.
_SENT = ("ECHELON_", "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_")
_SENT_NAMES = frozenset({"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONHASHSEED"})
_KEPT = frozenset({TOKEN_VARIABLE, TOKEN_FILE_VARIABLE, SSH_ARGS_VARIABLE, "ECHELON_MACHINE_RANK"})


@dataclass(slots=True, kw_only=True)
class _Connection:
    """A connection to the launcher on one machine."""

    host: str
    process: subprocess.Popen[bytes]
    relays: list[threading.Thread] = field(default_factory=list)

    def send(self, line: str) -> None:
        """Send a line to the remote end; does nothing if it has exited."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError, ValueError):
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def cut(self) -> None:
        """Kill ssh; the remote end detects this and stops its launcher."""
        self.process.kill()

    def close(self) -> None:
        """Show the remaining output after the process has ended or has been killed."""
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
    min_hosts: int | None = None,
) -> int:
    """Run ``echelon launch FLAGS PROGRAM`` on every host, and return 0 or the exit code of the first launcher that failed.

    Signals to this process are forwarded to all launchers.

    Args:
        hosts: the machines; host i receives ``--machine_rank i`` and its slots as ``--gpu_ids``.
        flags: flags for all launchers.
        program: the script and its arguments.
        token: this run's secret.
        interrupts: the signals that this process has received, raised only when checked.
        min_hosts: minimum number of hosts in an elastic run; None if the run needs all hosts.

    Raises:
        ConfigError: ECHELON_SSH_ARGS is invalid.
        LaunchError: ssh is not installed or cannot connect to a host.
    """
    min_hosts = len(hosts) if min_hosts is None else min_hosts
    connections: list[_Connection] = []
    try:
        for i, host in enumerate(hosts):
            own = ["--machine_rank", str(i), "--gpu_ids", ",".join(map(str, host.slots))]
            connections.append(_connect(host.name, [*flags, *own, *program], token))
        return _watch(connections, interrupts, min_hosts=min_hosts)
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
        start_new_session=True,  # Ctrl-C reaches only this process, which forwards it
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
            _("ssh is not installed on this machine"),
            do=_("install it, or run echelon launch on every machine yourself"),
        )
    text = environ.get(SSH_ARGS_VARIABLE) or ""
    try:
        own = shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            _(
                "{ssh_args_variable}={text!r} is not a valid command line: {error}",
                ssh_args_variable=SSH_ARGS_VARIABLE,
                text=text,
                error=error,
            ),
            where=_("env {name}", name=SSH_ARGS_VARIABLE),
            do=_("quote the options as you would in a shell"),
        ) from error
    # ssh uses the first value of an option, so the user's come first. BatchMode disables prompts, ServerAlive detects lost machines.
    return [program, *own, "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"]


def _environment() -> Mapping[str, str]:
    return {
        name: value
        for name, value in environ.snapshot().items()
        if (name.startswith(_SENT) or name in _SENT_NAMES) and name not in _KEPT
    }


def _watch(connections: Sequence[_Connection], interrupts: Interrupts, *, min_hosts: int) -> int:
    """Wait for all launchers to end, forwarding signals and stopping all after a failure; return the exit code."""
    codes: dict[str, int] = {}  # in the order of exit
    signals, next_step, is_signaled = 0, None, False
    while True:
        running = [one for one in connections if not _has_ended(one, codes)]
        failed = [code for code in codes.values() if code != 0]
        if not running:
            return failed[0] if failed and len(connections) - len(failed) < min_hosts else 0
        if interrupts.count > signals:
            signals = interrupts.count
            assert interrupts.first is not None
            for one in running:
                one.send(signal.Signals(interrupts.first).name) if signals < _IMPATIENT else one.cut()
        # Preempted launchers need time to save, and are not failures.
        lost = [code for code in failed if code != EXIT_CODE and signals == 0]
        if len(connections) - len(lost) < min_hosts and next_step is None:
            next_step = time.monotonic() + _GRACE.total_seconds()
        if next_step is not None and time.monotonic() > next_step:
            for one in running:
                one.cut() if is_signaled else one.send("SIGHUP")
            next_step, is_signaled = time.monotonic() + _HANG_UP.total_seconds(), True
        time.sleep(_POLL.total_seconds())


def _has_ended(one: _Connection, codes: dict[str, int]) -> bool:
    code = one.process.poll()
    if code is not None and one.host not in codes:
        codes[one.host] = 128 - code if code < 0 else code
        _check_connected(one, code)
    return code is not None


def _check_connected(one: _Connection, code: int) -> None:
    """Raise an error if ssh itself failed, because the other launchers would wait for this one until they time out."""
    if code == _SSH_FAILED:
        raise LaunchError(
            _("cannot connect to {host}: ssh failed with exit code {code}", host=one.host, code=code),
            where=_("host {host}", host=one.host),
            do=_(
                "read the output of [{host}] above; `ssh {host} true` must work without a prompt; "
                "{ssh_args_variable}='-p 2222 -i key' passes options to ssh",
                host=one.host,
                ssh_args_variable=SSH_ARGS_VARIABLE,
            ),
        )
