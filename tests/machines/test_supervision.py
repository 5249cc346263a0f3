"""What the launchers of a run on several machines see together: a rank that does not come, a signal to one of them, one that dies."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.launch.conftest import Command

HANG = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(4)
for step in range(50):
    if step == 20 and dist.get_rank() == 1:
        time.sleep(1000)
    dist.all_reduce(total)
"""
TRAIN = """
import os, time, torch
from torch.utils.data import DataLoader, TensorDataset
from echelon import Accelerator
from echelon.utils import ProjectConfiguration
project = ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(cpu=True, project_config=project, seed=7)
model = torch.nn.Linear(1, 1)
x = torch.arange(64.0).reshape(64, 1) / 64
loader = DataLoader(TensorDataset(x, 2 * x), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
accelerator.resume()
first = accelerator.progress.step
for epoch in accelerator.epochs(400 if not os.path.exists("again") else accelerator.progress.epoch + 1):
    for x, y in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.progress.step > 10:
            open(f"trains_{accelerator.process_index}", "w").close()
print(f"went on after {first}", flush=True)
"""


def two(command: Command, *flags: str) -> list[subprocess.Popen[str]]:
    port = command.free_port()
    meet = ["--cpu", "--nproc_per_node=1", "--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}"]
    return [command.start_launch(*meet, *flags, "train.py") for _ in range(2)]


@pytest.mark.soak
def test_a_rank_that_does_not_come_is_named_with_its_machine_and_line_and_its_stack_is_kept(command: Command) -> None:
    command.write("train.py", HANG)
    started = two(command, "--stall_timeout=4", "--on_stall=stop", "--log_dir=logs")
    ends = [command.finish(process) for process in started]
    assert [end.code for end in ends] == [124, 124], ends[0].err
    (report,) = [end.err for end in ends if "stall (" in end.err]  # where the others meet
    assert (
        "stall (a missing rank): rank 1 has not reached the collective, and rank 0 waits for other ranks" in report
    ), report
    assert re.search(r"rank 1: .*at \S*train.py:7: .*sleep\(1000\)", report), report
    assert re.search(r"rank 1: on \S+ \(127.0.0.1\)", report), report
    kept = list((command.directory / "logs").glob("*/attempt_0/stall_*.txt"))
    assert len(kept) == 2
    for path in kept:
        shown = command.echelon("doctor", str(path.parent.parent))
        assert "most recent call last" in shown.out, shown.out


@pytest.mark.soak
def test_a_signal_to_one_launcher_saves_one_step_on_all_machines(command: Command) -> None:
    command.write("train.py", TRAIN)
    started = two(command)
    command.wait_for_files("trains_0", "trains_1")
    started[1].send_signal(signal.SIGTERM)
    ends = [command.finish(process) for process in started]
    assert [end.code for end in ends] == [143, 143], ends[0].err + ends[1].err
    saved = sorted(path.name for path in (command.directory / "run" / "checkpoints").iterdir())
    assert len(saved) == 1, saved
    (command.directory / "again").touch()
    again = [command.finish(process) for process in two(command)]
    assert [end.code for end in again] == [0, 0], again[0].err
    went_on = {int(number) for end in again for number in re.findall(r"went on after (\d+)", end.out)}
    assert len(went_on) == 1
    assert went_on.pop() > 10


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_a_launcher_that_is_killed_ends_the_run_everywhere_and_says_so(victim: int, command: Command) -> None:
    command.write("train.py", TRAIN)
    started = two(command, "--rdzv_conf=join_timeout=5,keep_alive_interval=0.5")
    command.wait_for_files("trains_0", "trains_1")
    hosts = [listens(process) for process in started]
    assert sorted(hosts) == [False, True]
    host = hosts.index(True)
    killed, left = (started[host], started[1 - host]) if victim == 0 else (started[1 - host], started[host])
    killed.kill()
    end = command.finish(left)
    assert end.code == 1, end.err
    assert "lost contact with " in end.err
    command.finish(killed)


def listens(process: subprocess.Popen[str]) -> bool:
    """Whether the others come to this launcher: it has the endpoint's listener, at a port above those of gloo."""
    found = psutil.Process(process.pid).net_connections("tcp")
    return any(one.status == "LISTEN" and one.laddr.port >= 61000 for one in found)


@pytest.mark.soak
def test_doctor_brings_machines_together_and_measures_each_link(command: Command) -> None:
    endpoint = f"--rdzv_endpoint=localhost:{command.free_port()}"
    argv = ["doctor", "--nnodes=2", "--cpu", endpoint]
    started = [command.start([sys.executable, "-m", "echelon", *argv]) for _ in range(2)]
    ends = [command.finish(process) for process in started]
    assert [end.code for end in ends] == [0, 0], ends[0].err + ends[1].err
    assert re.search(
        r"all 2 machines can communicate \(gloo, network interface on this machine: lo\)\n  0 \S+ - 1 \S+: [\d,]+ MB/s",
        ends[0].out + ends[1].out,
    )
    assert "generation 0: 2 ranks on 2 machines" in ends[0].err + ends[1].err


@pytest.mark.slow
def test_the_token_is_made_once_for_its_owner_alone(tmp_path: Path, command: Command) -> None:
    homes = {"XDG_CONFIG_HOME": str(tmp_path)}
    first, second = (command.echelon("token", **homes) for _ in range(2))
    path = tmp_path / "echelon" / "token"
    assert (first.code, second.code) == (0, 0), first.err
    assert "created a token" in first.out
    assert "kept the existing token" in second.out
    text = path.read_text().strip()
    assert len(text) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert text not in first.out + second.out
    path.chmod(0o644)
    told = command.echelon("token", **homes)
    assert told.code == 2
    assert "other users can read the token" in told.err
