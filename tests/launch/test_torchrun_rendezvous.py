"""Plain torchrun with echelon's rendezvous: machines restart together, and missing ones and wrong settings are named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import echelon
from tests.launch.conftest import Command

_LIMIT_S = 180.0
_PROGRAM = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 3 and not os.path.exists("failed"):
    open("failed", "w").close()
    sys.exit(3)
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():g}", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """The variables under which torch finds the entry point of pyproject.toml, in an environment that is installed or not."""
    metadata = tmp_path / "site" / "echelon_entry_points-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: echelon-entry-points\nVersion: 0\n")
    project = Path(__file__).parents[2] / "pyproject.toml"
    _, _, rest = project.read_text(encoding="utf-8").partition('[project.entry-points."torchrun.handlers"]\n')
    (metadata / "entry_points.txt").write_text("[torchrun.handlers]\n" + rest.partition("\n")[0].replace('"', ""))
    paths = (tmp_path / "site", Path(echelon.__file__).parents[1])
    return {"PYTHONPATH": ":".join(map(str, paths)), "ECHELON_TOKEN": "a token of some length", "OMP_NUM_THREADS": "1"}


def torchrun(command: Command, variables: Mapping[str, str], *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=echelon", "--monitor-interval=0.1"),
            *flags,
            "program.py",
        ],
        cwd=command.directory,
        env=command._environment(variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_two_machines_of_torchrun_restart_together(command: Command, variables: dict[str, str]) -> None:
    command.write("program.py", _PROGRAM)
    flags = ("--nnodes=2", "--nproc-per-node=2", "--max-restarts=1", f"--rdzv-endpoint=127.0.0.1:{command.free_port()}")
    machines = [torchrun(command, variables, *flags) for _ in range(2)]
    outputs = [machine.communicate(timeout=_LIMIT_S)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    text = "".join(outputs)
    assert [f"rank {rank} of 4: 4" in text for rank in range(4)] == [True] * 4
    assert "joined with 1 process (2 of 2 machines)" in text
    assert "generation 1: 2 ranks on 2 machines" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            ("--rdzv-conf=join_timeout=0.5",),
            ("1 of 2 machines have joined: ", "RendezvousClosedError: the run is over"),
        ),
        (
            ("--rdzv-conf=join_timeouts=1",),
            ("unknown rendezvous setting 'join_timeouts'", "did you mean join_timeout?"),
        ),
        (("--rdzv-conf=token_file=none.txt",), ("cannot read the token in none.txt", "flag --rdzv-conf")),
        (("--rdzv-endpoint=",), ("2 machines need a rendezvous address", "flag --nnodes")),
    ],
)
def test_missing_machines_and_wrong_settings_are_named(
    command: Command, variables: dict[str, str], flags: tuple[str, ...], expected: tuple[str, str]
) -> None:
    command.write("program.py", _PROGRAM)
    machine = torchrun(command, variables, "--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{command.free_port()}", *flags)
    output, _ = machine.communicate(timeout=_LIMIT_S)
    assert machine.returncode == 1
    for part in expected:
        assert part in output


@pytest.mark.slow
def test_another_token_is_rejected(command: Command, variables: dict[str, str]) -> None:
    command.write("program.py", _PROGRAM)
    (command.directory / "token").write_text("another token of some length")
    (command.directory / "token").chmod(0o600)
    flags = ("--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{command.free_port()}")
    host = torchrun(command, variables, *flags, "--rdzv-conf=join_timeout=20")
    other = torchrun(command, variables, *flags, "--rdzv-conf=token_file=token,is_host=0,join_timeout=20")
    output, _ = other.communicate(timeout=_LIMIT_S)
    host.kill()
    host.communicate()
    assert other.returncode == 1
    assert "RendezvousConnectionError: cannot connect to 127.0.0.1" in output
    assert "because it has a different token" in output
