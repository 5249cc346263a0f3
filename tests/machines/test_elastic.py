"""Machines that leave a run and come to it: it goes on with those that are there, and makes the same updates."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.machines.conftest import Machine, Network
from tests.machines.programs import TRAIN

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Soon noticed and soon begun: the defaults are 10 s without a sign, and 30 s for a last call.
_CONF = "--rdzv_conf=keep_alive_interval=0.5,keep_alive_max_attempt=5,last_call_timeout=3,join_timeout=60"


def flags_of(folder: Path, host: Machine, nodes: str) -> list[str]:
    """The command line of a training in ``folder``, which is written there."""
    (folder / "slow").touch()  # until ``enough``: a run must not have come to its last step when a machine comes
    (folder / "train.py").write_text(f"EXAMPLES = {str(_EXAMPLES)!r}\n{TRAIN}")
    endpoint = f"--rdzv_endpoint={host.address}:29500"
    return ["--cpu", "--nproc_per_node=1", f"--nnodes={nodes}", "--rdzv_backend=c10d", endpoint, _CONF, "train.py"]


def wait_for_steps(
    network: Network, folder: Path, world_size: int, launcher: subprocess.Popen[str], *, after: int = 0
) -> int:
    """Wait until a step was made by so many ranks; return its number."""
    found: list[int] = []

    def look() -> bool:
        assert launcher.poll() is None, launcher.communicate()
        names = [path.name.split("_") for path in folder.glob("trained_*")]
        found[:] = [int(step) for _, _, size, step in names if int(size) == world_size and int(step) > after]
        return bool(found)

    network.command.wait_for(look, f"a step on {world_size} ranks")
    return max(found)


@pytest.mark.soak
def test_a_cut_link_and_its_mending_change_nothing_but_the_ranks(network: Network) -> None:
    a, b = network.add(), network.add()
    flags = flags_of(network.command.directory, a, "1:2")
    first = a.launch(*flags)
    second = b.launch(*flags)
    step = wait_for_steps(network, network.command.directory, 2, first)
    b.cut()
    step = wait_for_steps(network, network.command.directory, 1, first, after=step)
    b.mend()
    wait_for_steps(network, network.command.directory, 2, first, after=step)
    (network.command.directory / "enough").touch()
    one, other = network.finish(first), network.finish(second)
    assert one.code == other.code == 0, one.err + other.err
    assert " worlds [2, 1, 2], steps 60 of 60, each sample once True" in one.out, one.out + one.err
    assert "close True" in one.out, one.out
    assert f"lost contact with {_host()} ({b.address})" in one.err, one.err
    assert "the run continues without it" in one.err
    assert f"lost contact with {a.address}:29500: no answer; stopping the ranks on this machine" in other.err, other.err
    assert a.processes() == b.processes() == []


@pytest.mark.soak
def test_the_survivor_of_a_cut_goes_on_alone_and_nothing_is_left_on_the_other_side(network: Network) -> None:
    a, b = network.add(), network.add()
    flags = flags_of(network.command.directory, a, "1:2")
    flags[-2] = flags[-2].replace("join_timeout=60", "join_timeout=8")
    first, second = a.launch(*flags), b.launch(*flags)
    step = wait_for_steps(network, network.command.directory, 2, first)
    b.cut()
    wait_for_steps(network, network.command.directory, 1, first, after=step)
    (network.command.directory / "enough").touch()
    one, other = network.finish(first), network.finish(second)
    assert one.code == 0, one.err
    assert " worlds [2, 1], steps 60 of 60, each sample once True" in one.out, one.out
    assert "close True" in one.out, one.out
    assert other.code == 1, other.err
    assert f"cannot connect to {a.address}:29500" in other.err, other.err
    assert a.processes() == b.processes() == []


@pytest.mark.soak
def test_a_machine_that_joins_late_is_taken_in_where_the_others_are(network: Network) -> None:
    a, b = network.add(), network.add()
    flags = flags_of(network.command.directory, a, "1:2")
    first = a.launch(*flags)
    step = wait_for_steps(network, network.command.directory, 1, first)
    second = b.launch(*flags)
    wait_for_steps(network, network.command.directory, 2, first, after=step)
    (network.command.directory / "enough").touch()
    one, other = network.finish(first), network.finish(second)
    assert one.code == other.code == 0, one.err + other.err
    assert " worlds [1, 2], steps 60 of 60, each sample once True" in one.out, one.out
    assert "close True" in one.out, one.out
    assert "joined: all ranks save at the same step" in one.err, one.err
    assert a.processes() == b.processes() == []


@pytest.mark.soak
def test_a_machine_that_is_asked_to_end_saves_and_leaves_and_the_other_goes_on(network: Network) -> None:
    a, b = network.add(), network.add()
    flags = flags_of(network.command.directory, a, "1:2")
    first, second = a.launch(*flags), b.launch(*flags)
    step = wait_for_steps(network, network.command.directory, 2, first)
    second.send_signal(signal.SIGTERM)
    other = network.finish(second)
    wait_for_steps(network, network.command.directory, 1, first, after=step)
    (network.command.directory / "enough").touch()
    one = network.finish(first)
    assert (one.code, other.code) == (0, 143), one.err + other.err
    assert " worlds [2, 1], steps 60 of 60, each sample once True" in one.out, one.out
    assert "close True" in one.out, one.out


def _host() -> str:
    return socket.gethostname()
