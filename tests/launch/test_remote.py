"""One command line on several machines, by a program in the place of ssh that runs it here."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.launch.conftest import Command

_TOKEN = "0123456789abcdef-the-token"

# It takes options up to --, as ssh; it runs what it is given in the folder of a new login.
_SSH = """#!/bin/sh
echo "$@" >> "$SSH_LOG"
unset ECHELON_MACHINE_RANK ECHELON_TOKEN NCCL_MARK HF_TOKEN PYTHONPATH
while [ "$1" != -- ]; do shift; done
case "$2" in unreachable*) echo "ssh: Could not resolve hostname $2" >&2; exit 255;; esac
cd / && sh -c "$3"
exit $?  # as ssh, which is not what it has started
"""

# In the place of `python -m echelon launch`: it says what it got, and ends as the program's first argument says.
_LAUNCHER = """
import json, os, signal, sys, time
def end(number, frame):
    os.write(1, f"got {signal.Signals(number).name}\\n".encode())  # print may have been interrupted
    sys.exit(128 + number)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, end)
with open(os.environ["ECHELON_TOKEN_FILE"]) as file:
    token = file.read()
rank = sys.argv[sys.argv.index("--machine_rank") + 1]
told = {"argv": sys.argv[1:], "cwd": os.getcwd(), "token": token, "sent": os.environ.get("NCCL_MARK"),
        "not sent": [os.environ.get(name) for name in ("ECHELON_MACHINE_RANK", "ECHELON_TOKEN", "HF_TOKEN")]}
open(os.environ["ECHELON_FOLDER"] + "/told" + rank, "w").write(json.dumps(told))
print("out of", rank, flush=True)
print("err of", rank, file=sys.stderr, flush=True)
script = sys.argv[-1].split(",")[int(rank)]
if script == "wait":
    time.sleep(100)
sys.exit(int(script))
"""

_MAIN = """
import sys
from echelon.base.errors import EchelonError
from echelon.launch.ssh import ssh_launcher as remote
from echelon.launch.ssh.hostfile import Host
from echelon.launch.interrupts import handle_signals
from datetime import timedelta
remote._GRACE = timedelta(seconds=float(sys.argv[3]))
hosts = [Host(name=name, slots=(0, 2)) for name in sys.argv[1].split(",")]
with handle_signals() as interrupts:
    interrupts.hold()
    try:
        code = remote.run_on_hosts(hosts, ["--cpu", "--note", "a b$c"], ["script.py", sys.argv[2]],
                                   token=b"TOKEN", interrupts=interrupts)
    except EchelonError as error:
        print(f"echelon: {error}", file=sys.stderr)
        code = 77
sys.exit(code)
""".replace("TOKEN", _TOKEN)


def _arguments(command: Command, hosts: str, ends: str, grace: float = 60.0) -> tuple[list[str], dict[str, str]]:
    command.write("bin/ssh", _SSH)
    (command.directory / "bin/ssh").chmod(0o755)
    command.write("stub/echelon/__init__.py", "")
    command.write("stub/echelon/__main__.py", _LAUNCHER)
    command.write("main.py", _MAIN)
    # echelon itself by its place: the stub takes its name in the processes on the other machines.
    source = Path(__file__).resolve().parents[2] / "src"
    main = f"import sys; sys.path.insert(0, {str(source)!r}); sys.path.insert(1, '.'); import runpy; runpy.run_path('main.py')"
    variables = {
        "PATH": f"{command.directory}/bin{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{command.directory}/stub",
        "SSH_LOG": f"{command.directory}/ssh.log",
        "ECHELON_FOLDER": str(command.directory),
        "ECHELON_SSH_ARGS": "-p 2222 -i 'my key'",
        "ECHELON_MACHINE_RANK": "7",
        "ECHELON_TOKEN": "another-token-of-the-environment",
        "NCCL_MARK": "yes",
        "HF_TOKEN": "hf_secret",
    }
    return [sys.executable, "-c", main, hosts, ends, str(grace)], variables


def test_each_machine_gets_its_rank_and_the_token_comes_through_stdin_alone(command: Command) -> None:
    argv, variables = _arguments(command, "node-a,node-b", "0,0")
    result = command.run(argv, **variables)
    assert result.code == 0, result.err
    assert sorted(result.out.split("\n")) == ["", "[node-a]: out of 0", "[node-b]: out of 1"]
    assert sorted(result.err.split("\n")) == ["", "[node-a]: err of 0", "[node-b]: err of 1"]
    for rank in (0, 1):
        told = json.loads((command.directory / f"told{rank}").read_text(encoding="utf-8"))
        own = ["--machine_rank", str(rank), "--gpu_ids", "0,2"]
        assert told["argv"] == ["launch", "--cpu", "--note", "a b$c", *own, "script.py", "0,0"]
        assert told["cwd"] == str(command.directory)
        assert told["token"] == _TOKEN
        assert told["sent"] == "yes"
        assert told["not sent"] == [None, None, None]
    log = (command.directory / "ssh.log").read_text(encoding="utf-8")
    assert log.count("-p 2222 -i my key -o BatchMode=yes") == 2
    assert not re.search(r"token|hf_secret", log)


@pytest.mark.soak
def test_when_one_machine_fails_the_others_are_ended_and_its_exit_code_is_ours(command: Command) -> None:
    argv, variables = _arguments(command, "node-a,node-b,node-c", "wait,3,wait", grace=0.5)
    result = command.run(argv, **variables)
    assert result.code == 3, result.err
    assert {"[node-a]: got SIGHUP", "[node-c]: got SIGHUP"} <= set(result.out.splitlines())


@pytest.mark.soak
@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_goes_to_every_machine(command: Command, number: int, name: str) -> None:
    argv, variables = _arguments(command, "node-a,node-b", "wait,wait")
    process = command.start(argv, **variables)
    command.wait_for_files("told0", "told1")
    process.send_signal(number)
    result = command.finish(process)
    assert result.code == 128 + number, result.err
    assert {f"[node-a]: got {name}", f"[node-b]: got {name}"} <= set(result.out.splitlines())


@pytest.mark.soak
def test_nothing_outlives_the_connection(command: Command) -> None:
    argv, variables = _arguments(command, "node-a,node-b", "wait,wait")
    process = command.start(argv, **variables)
    command.wait_for_files("told0", "told1")
    process.kill()
    process.wait()
    command.wait_for(lambda: not command.left_over(), "the launchers on the other machines to end")


@pytest.mark.soak
def test_the_machines_of_a_hostfile_are_one_run(command: Command) -> None:
    _, variables = _arguments(command, "", "")
    command.write("hosts", "node-a slots=1\nnode-b slots=3 # one of them is left out\nnode-c slots=1\n")
    command.write(
        "world.py",
        "import os\nfrom echelon import Accelerator\nimport torch\naccelerator = Accelerator()\n"
        "total = accelerator.reduce(torch.ones(1)).item()\n"
        "print(os.environ['RANK'], 'on', os.environ['GROUP_RANK'], 'of', int(total), flush=True)\n"
        "accelerator.end_training()\n",
    )
    port = str(command.free_port())
    kept = {name: variables[name] for name in ("PATH", "SSH_LOG")}
    layout = ["--hostfile", "hosts", "--exclude", "node-b:1@node-c", "--main_process_port", port, "--cpu"]
    result = command.launch(*layout, "--main_process_ip", "127.0.0.1", "world.py", **kept)
    assert result.code == 0, result.err
    told = ["[node-a]: 0 on 0 of 3", "[node-b]: 1 on 1 of 3", "[node-b]: 2 on 1 of 3"]
    assert sorted(line for line in result.out.splitlines() if " on " in line) == told


@pytest.mark.soak
def test_a_machine_that_cannot_be_reached_is_named(command: Command) -> None:
    argv, variables = _arguments(command, "node-a,unreachable-b", "wait,wait")
    result = command.run(argv, **variables)
    assert result.code == 77
    assert "[unreachable-b]: ssh: Could not resolve hostname" in result.err
    assert "cannot connect to unreachable-b" in result.err
    assert "`ssh unreachable-b true` must work" in result.err
    command.wait_for(lambda: not command.left_over(), "the launcher on the other machine to end")
