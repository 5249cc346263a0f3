"""A real gloo run: works under every starter, and nothing of ours listens off this machine."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import psutil
import pytest

from tests.launch.conftest import Command

SUM = """
import os, time
import torch
import torch.distributed as dist
from echelon.distributed import cleanup, setup
world = setup()
x = torch.full((4,), float(world.rank + 1))
if world.world_size > 1:
    dist.all_reduce(x)
os.write(1, f"sum {int(x[0])}\\n".encode())
open(f"ready_{world.rank}", "w").close()
while "WAIT" in os.environ and not os.path.exists("go"):
    time.sleep(0.01)
cleanup()
"""


def listening(root: psutil.Process) -> set[str]:
    """Return the addresses on which the processes of the tree listen right now."""
    addresses: set[str] = set()
    for process in [root, *root.children(recursive=True)]:
        try:
            connections = process.net_connections(kind="tcp")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        addresses |= {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
    return addresses


@pytest.mark.slow
def test_nothing_listens_off_loopback_during_a_gloo_run(command: Command) -> None:
    command.write("sum.py", SUM)
    process = command.start_launch("--num_processes=2", "--cpu", "sum.py", WAIT="1")
    root, seen = psutil.Process(process.pid), set[str]()

    def both_are_ready() -> bool:
        seen.update(listening(root))
        return process.poll() is not None or all((command.directory / f"ready_{r}").exists() for r in range(2))

    command.wait_for(both_are_ready, "two ranks")
    seen.update(listening(root))
    (command.directory / "go").touch()
    result = command.finish(process)
    assert result.code == 0, result.err
    assert result.out.split() == ["sum", "3", "sum", "3"]
    assert seen == {"127.0.0.1"}


# test_examples.py also starts scripts with torchrun.
@pytest.mark.slow
@pytest.mark.parametrize("starter", [pytest.param("torchrun", marks=pytest.mark.soak), "python"])
def test_same_script_under_other_starters(starter: str, command: Command) -> None:
    command.write("sum.py", SUM)
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    assert torchrun is not None
    argv = [torchrun, "--standalone", "--nproc-per-node=2"] if starter == "torchrun" else [sys.executable]
    result = command.run([*argv, "sum.py"])
    assert result.code == 0, result.err
    assert result.out.split() == (["sum", "3", "sum", "3"] if starter == "torchrun" else ["sum", "1"])


@pytest.mark.slow
def test_rank_that_dies_in_a_collective_is_named_not_its_victim(command: Command) -> None:
    end = "if world.rank == 1:\n    raise KeyError('sample 9')\ndist.all_reduce(x)\n"
    command.write("sum.py", SUM.replace("\ncleanup()\n", f"\n{end}"))
    result = command.launch("--num_processes=2", "-q", "sum.py")
    assert result.code == 1
    assert "echelon: rank 1 failed first: KeyError: 'sample 9'" in result.err
