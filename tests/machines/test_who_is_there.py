"""Each mistake that keeps machines apart is named, within 25 seconds, on the side that made it."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from echelon.cli.main import _run
from tests.launch.conftest import Command
from tests.machines.conftest import TOKEN, Network

_WITHIN_S = 25.0
_CONF = "--rdzv_conf=join_timeout=40"


def launch(command: Command, *flags: str, **variables: str) -> subprocess.Popen[str]:
    command.write("train.py", "print('trained')\n")
    return command.start_launch("--cpu", *flags, "train.py", **{"ECHELON_TOKEN": TOKEN, **variables})


def says(process: subprocess.Popen[str], pattern: str) -> str:
    """Read what the launcher says until it says ``pattern``; it has to within the time."""
    assert process.stderr is not None
    deadline = time.monotonic() + _WITHIN_S
    said = ""
    while not re.search(pattern, said, re.DOTALL):
        assert time.monotonic() < deadline, f"{pattern!r} was not said within {_WITHIN_S} s:\n{said}"
        line = process.stderr.readline()
        assert line, f"{pattern!r} was not said:\n{said}"
        said += line
    return said


def end(command: Command, *processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.kill() if process.poll() is None else None
        command.finish(process)


def wait_for_listener(command: Command, port: str) -> None:
    def listens() -> bool:
        try:
            socket.create_connection(("127.0.0.1", int(port)), timeout=5.0).close()
        except OSError:
            return False
        return True

    command.wait_for(listens, "the first launcher")


@pytest.mark.soak
def test_each_machine_that_does_not_fit_is_told_why_and_the_others_wait_for_one_that_does(command: Command) -> None:
    port = str(command.free_port())
    flags = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=localhost", f"--master_port={port}", _CONF]
    first = launch(command, *flags, "--node_rank=0")
    wait_for_listener(command, port)
    wrong = [
        launch(command, *flags, "--node_rank=0"),
        launch(command, *flags, "--node_rank=1", "--mixed_precision=bf16"),
        launch(command, "--nnodes=3", *flags[1:], "--node_rank=1"),
        launch(command, *flags, "--node_rank=1", ECHELON_TOKEN="another secret altogether"),
    ]
    said = [says(process, r"do: +[^\n]*\n") for process in wrong]
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in said[0]
    assert (
        "different settings: mixed_precision is bf16 (from flag --mixed_precision) on the joining machine and not set on"
        in said[1]
    )
    assert re.search(r"this machine expects 3 machines, but \S+ expects 2", said[2])
    assert "it has a different token" in said[3]
    assert [command.finish(process).code for process in wrong] == [1, 1, 1, 1]
    assert "missing machine ranks: 1" in says(first, "still waiting[^\n]*\n")
    right = launch(command, *flags, "--node_rank=1")
    ends = [command.finish(process) for process in (first, right)]
    assert [end.code for end in ends] == [0, 0], ends
    assert [end.out for end in ends] == ["trained\n"] * 2


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--nnodes=2", "--node_rank=$SLURM_NODEID", "--master_addr=10.0.0.1"], "was not expanded"),
        (["--nnodes=2", "--master_addr=$HEAD"], "was not expanded"),
        (["--nnodes=2"], "need a rendezvous address"),
        (
            ["--nnodes=2", "--rdzv_backend=etcd", "--rdzv_endpoint=10.0.0.1"],
            "rendezvous backend 'etcd' is not supported",
        ),
        (["--nnodes=2", "--master_addr=no.such.host.invalid"], "cannot resolve the host name"),
        (["--nnodes=3:2", "--master_addr=127.0.0.1"], "is neither a number nor a range of machines"),
        (["--nnodes=2", "--node_rank=0", "--master_addr=192.0.2.7"], "192.0.2.7 is not one of its addresses"),
        (["--nnodes=2", "--master_addr=127.0.0.1", "--rdzv_conf=join_timeot=3"], "did you mean join_timeout?"),
        (
            ["--nnodes=2", "--num_processes=3", "--master_addr=127.0.0.1"],
            "3 processes cannot be divided evenly among 2 machines",
        ),
    ],
)
def test_what_is_wrong_before_anybody_is_asked(
    flags: list[str], what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ECHELON_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('trained')\n")
    assert _run(["launch", "--cpu", *flags, "train.py"]) == 2
    assert what in capsys.readouterr().err


def test_without_a_token_several_machines_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('trained')\n")
    assert _run(["launch", "--cpu", "--nnodes=2", "--node_rank=1", "--master_addr=192.0.2.7", "train.py"]) == 2
    told = capsys.readouterr().err
    assert "a run on several machines needs a token" in told
    assert "echelon token" in told


@pytest.mark.soak
def test_an_address_that_nobody_answers_at_and_loopback_are_named_where_they_are_tried(network: Network) -> None:
    a, b = network.add(), network.add()
    network.command.write("train.py", "print('trained')\n")
    flags = ["--cpu", "--nnodes=2", "--node_rank=1", "--nproc_per_node=1", _CONF]
    unreachable = b.launch(*flags, f"--master_addr={a.address}", "train.py")
    loopback = b.launch(*flags, "--master_addr=127.0.0.1", "train.py")
    said = says(unreachable, r"do: +[^\n]*\n")
    assert f"cannot connect to {a.address}:29500: Connection refused" in said
    assert "check that the launcher with machine rank 0 is running" in said
    assert "a loopback address always refers to the local machine" in says(loopback, r"do: +[^\n]*\n")
    end(network.command, unreachable, loopback)


@pytest.mark.soak
def test_a_version_that_differs_is_named(command: Command) -> None:
    port = str(command.free_port())
    flags = ["--cpu", "--nnodes=2", "--nproc_per_node=1", "--master_addr=localhost", f"--master_port={port}", _CONF]
    command.write("train.py", "print('trained')\n")
    older = command.write(
        "older.py",
        "import sys\nfrom echelon.launch.multinode import machines\nmachines.__version__ = '0.0.9'\n"
        "from echelon.cli.main import main\nmain(sys.argv[1:])\n",
    )
    first = launch(command, *flags[1:], "--node_rank=0")
    wait_for_listener(command, port)
    second = command.start([sys.executable, older, "launch", *flags, "--node_rank=1", "train.py"], ECHELON_TOKEN=TOKEN)
    assert "different versions: echelon is 0.0.9 on the joining machine and" in says(second, r"do: +[^\n]*\n")
    end(command, first, second)
