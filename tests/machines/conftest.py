"""Machines as network namespaces of this one: each has its own loopback and an address on a common bridge; its link can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from tests.launch.conftest import Command, Result, command

__all__ = ["Machine", "Network", "command"]

TOKEN = "a-token-that-only-the-tests-know"


@lru_cache(maxsize=1)
def why_not() -> str:
    """Return why this machine cannot have network namespaces; empty: it can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    done = subprocess.run(
        ["ip", "netns", "add", f"echelon-try-{os.getpid()}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return f"`ip netns add` says: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"echelon-try-{os.getpid()}"], check=True)
    return ""


def _ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (args, done.stderr)


class Machine:
    """One namespace.

    Args:
        network: to which it belongs.
        number: the last part of its address.
    """

    def __init__(self, network: Network, number: int) -> None:
        self.namespace = f"ech{os.getpid()}-{number}"
        self.address = f"10.99.0.{number}"
        self.network = network
        self._link = f"e{os.getpid() % 100000}p{number}"  # in the switch's namespace; 15 characters at most
        _ip("netns", "add", self.namespace)
        _ip("-n", self.namespace, "link", "set", "lo", "up")
        _ip(
            "-n",
            network.switch,
            "link",
            "add",
            self._link,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            self.namespace,
        )
        _ip("-n", network.switch, "link", "set", self._link, "master", "br0", "up")
        _ip("-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self.namespace, "link", "set", "eth0", "up")

    def start(self, argv: list[str], **variables: str) -> subprocess.Popen[str]:
        """Start a program there."""
        return self.network.command.start(["ip", "netns", "exec", self.namespace, *argv], **variables)

    def launch(self, *args: str, folder: Path | None = None, **variables: str) -> subprocess.Popen[str]:
        """Start ``echelon launch`` there, with the token, in ``folder``."""
        into = [] if folder is None else ["env", "-C", str(folder)]
        argv = [*into, sys.executable, "-m", "echelon", "launch", *args]
        return self.start(argv, **{"ECHELON_TOKEN": TOKEN, **variables})

    def pids(self) -> list[int]:
        """Return the processes that run there."""
        done = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
        return [int(pid) for pid in done.stdout.split()]

    def cut(self) -> None:
        """Let nothing through, in silence."""
        _ip("-n", self.network.switch, "link", "set", self._link, "down")

    def mend(self) -> None:
        """Let all through again."""
        _ip("-n", self.network.switch, "link", "set", self._link, "up")

    def processes(self) -> list[str]:
        """Return the command lines of what runs there."""
        lines = []
        for pid in self.pids():
            try:
                lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
        return lines


class Network:
    """A bridge in a namespace of its own, and the machines on it."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.switch = f"ech{os.getpid()}-sw"
        self._machines: list[Machine] = []
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        _ip("-n", self.switch, "link", "set", "br0", "up")

    def add(self) -> Machine:
        """Add a machine."""
        self._machines.append(Machine(self, len(self._machines) + 1))
        return self._machines[-1]

    def run_in(self, machine: Machine, argv: list[str]) -> str:
        """Return the output of a program on a machine."""
        full = ["ip", "netns", "exec", machine.namespace, *argv]
        return subprocess.run(full, capture_output=True, text=True, check=True).stdout

    def finish(self, process: subprocess.Popen[str]) -> Result:
        """Wait for the end of a program."""
        return self.command.finish(process)

    def close(self) -> None:
        """Take the machines down."""
        for namespace in [*(machine.namespace for machine in self._machines), self.switch]:
            subprocess.run(["ip", "netns", "del", namespace], check=False)


@pytest.fixture
def network(command: Command) -> Iterator[Network]:
    reason = why_not()
    if reason:
        pytest.skip(f"NO NETWORK NAMESPACES: runs on several machines are not tested here: {reason}")
    found = Network(command)
    try:
        yield found
    finally:
        found.close()
