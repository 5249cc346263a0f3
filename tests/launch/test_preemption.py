"""A run that is asked to end, at any moment: all ranks save the same step, the code is right, and the next start goes on exactly."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter

import pytest
import torch

from tests.harness import run_on_ranks
from tests.launch.conftest import Command, Result
from tests.launch.programs import run_program

# Phases: d data, t training, s a save, e an evaluation; rank 0 notes the present one for the test to read.
TRAIN = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from echelon import Accelerator
from echelon.utils import DistributedDataParallelKwargs, ProjectConfiguration

folder, epochs, pace = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
rank = int(os.environ["RANK"])
board = os.open(folder + ".phase", os.O_RDWR | os.O_CREAT)

def phase(letter):
    if rank == 0:
        os.pwrite(board, letter.encode(), 0)

class Data(Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, i):
        if i % 24 == 5:
            phase("d")
            time.sleep(20 * pace)
        return torch.tensor([i / 48.0]), torch.rand(1)

project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=3)
# Buckets in one order before and after a restart (docs/checkpoints.md).
ddp = DistributedDataParallelKwargs(find_unused_parameters=True)
accelerator = Accelerator(cpu=True, project_config=project, seed=7, kwargs_handlers=[ddp])
model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
x = torch.arange(16.0)[:, None]
model, optimizer, loader, held_out = accelerator.prepare(
    model, optimizer, DataLoader(Data(), batch_size=2, shuffle=True), DataLoader(TensorDataset(x, 2 * x), batch_size=2)
)
accelerator.register_for_checkpointing(scheduler)  # steps once an epoch, after the evaluation
accelerator.resume()
open(f"{folder}.ready_{rank}", "w").write(str(os.getpid()))
try:
    for epoch in accelerator.epochs(epochs):
        model.train()
        for x, y in loader:
            phase("t")
            time.sleep(pace)
            accelerator.backward(torch.nn.functional.mse_loss(model(x), 2 * x + 0.1 * y))
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.progress.step % 7 == 3:
                phase("s")
                accelerator.save_state(blocking=accelerator.progress.step % 2 == 0)
        model.eval()
        phase("e")
        with torch.no_grad():
            for x, y in held_out:
                time.sleep(2 * pace)
                accelerator.gather_for_metrics(model(x))
        scheduler.step()
    if accelerator.is_main_process:
        torch.save([p.detach() for p in model.parameters()] + [torch.tensor(scheduler.get_last_lr())], folder + ".pt")
finally:
    with open(f"{folder}.ended_{rank}", "w") as file:
        file.write(f"{accelerator.progress.step}")
accelerator.end_training()
"""


def start(
    command: Command, folder: str, *, epochs: int, pace: float, ranks: int, flags: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    for rank in range(ranks):
        for kind in ("ready", "ended"):
            (command.directory / f"{folder}.{kind}_{rank}").unlink(missing_ok=True)
    head = ["-q", "--cpu", f"--num_processes={ranks}", *flags]
    return command.start_launch(*head, "train.py", folder, str(epochs), str(pace))


def run_without_launcher(directory: str, folder: str, epochs: int) -> None:
    run_program(f"{directory}/train.py", directory, arguments=[folder, str(epochs), "0.0"])


def wait_until_ready(command: Command, folder: str, process: subprocess.Popen[str], ranks: int) -> None:
    command.wait_for(lambda: is_ready(command, folder, ranks) or process.poll() is not None, "ranks")


def is_ready(command: Command, folder: str, ranks: int) -> bool:
    files = [command.directory / f"{folder}.ready_{rank}" for rank in range(ranks)]
    return all(file.exists() and file.read_text() for file in files)


def check_same_step(command: Command, folder: str, result: Result, ranks: int) -> int:
    """All ranks have ended after the step that the newest checkpoint is of; return it."""
    assert result.code == 143, result.err
    steps = {int((command.directory / f"{folder}.ended_{rank}").read_text()) for rank in range(ranks)}
    assert len(steps) == 1, steps
    (step,) = steps
    checkpoints = list((command.directory / folder / "checkpoints").glob("checkpoint_*"))
    newest = max(checkpoints, key=lambda path: int(path.name.removeprefix("checkpoint_")))
    manifest = json.loads((newest / "manifest.json").read_text())["manifest"]
    assert manifest["progress"]["step"] == step
    assert re.search(rf"the run ends after step {step} with exit code 143; saved \S*{newest.name}", result.err), (
        result.err
    )
    assert "Traceback" not in result.err
    return step


@pytest.mark.slow
@pytest.mark.parametrize(
    "signals",
    [
        # To the launcher in a step; to one rank in an evaluation.
        [(signal.SIGTERM, "t", None)],
        pytest.param([(signal.SIGUSR1, "e", 1), (signal.SIGTERM, "t", None)], marks=pytest.mark.soak),
    ],
    ids=["SIGTERM", "SIGUSR1-SIGTERM"],
)
def test_all_ranks_save_the_same_step_and_the_next_start_goes_on_exactly(
    signals: list[tuple[signal.Signals, str, int | None]], command: Command
) -> None:
    command.write("train.py", TRAIN)
    run_on_ranks(run_without_launcher, str(command.directory), "plain", 2)
    phase, last = command.directory / "run.phase", 0
    for number, letter, rank in signals:
        process = start(command, "run", epochs=2, pace=0.02, ranks=2)
        wait_until_ready(command, "run", process, 2)
        phase.write_text("")
        while phase.read_text() != letter:
            assert process.poll() is None
            time.sleep(0.001)
        pid = process.pid if rank is None else int((command.directory / f"run.ready_{rank}").read_text())
        os.kill(pid, number)
        result = command.finish(process)
        step = check_same_step(command, "run", result, 2)
        assert last < step <= 24
        last = step
        who = number.name if rank is None else f"{number.name} to rank {rank}"
        assert (
            f"echelon: {who}: all ranks stopped at the same step; exit code 143; rerun the same command" in result.err
        )
    run_on_ranks(run_without_launcher, str(command.directory), "run", 2)
    check_weights(command, "run")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_signals_at_random_instants_change_nothing(seed: int, command: Command) -> None:
    """25 for each seed: to the launcher from its start on, to a rank once it trains."""
    draw, ranks, epochs, signals = random.Random(seed), 2 + seed % 2, 6, int(os.environ.get("SIGNALS", "25"))
    command.write("train.py", TRAIN)
    assert command.finish(start(command, "plain", epochs=epochs, pace=0.0, ranks=ranks)).code == 0
    told: Counter[str] = Counter()
    run, num_runs = "run0", 1
    while sum(told.values()) < signals:
        process = start(command, run, epochs=epochs, pace=0.03, ranks=ranks)
        number = draw.choice((signal.SIGTERM, signal.SIGUSR1))
        rank = draw.choice((None, *range(ranks)))
        is_early = rank is None and draw.random() < 0.1
        if is_early:
            time.sleep(draw.uniform(0.5, 3.0))
        else:
            wait_until_ready(command, run, process, ranks)
            time.sleep(draw.uniform(0.0, 3.0))
        was_ready = is_ready(command, run, ranks)
        phase = command.directory / f"{run}.phase"
        letter = phase.read_text() if was_ready else "start"
        if process.poll() is None:
            told[f"{letter} {'launcher' if rank is None else 'rank'}"] += 1
            pid = process.pid if rank is None else int((command.directory / f"{run}.ready_{rank}").read_text())
            os.kill(pid, number)
        result = command.finish(process)
        if result.code == 0:  # the last step was made before it could stop
            check_weights(command, run)
            run, num_runs = f"run{num_runs}", num_runs + 1
        elif was_ready:
            check_same_step(command, run, result, ranks)
        else:
            assert result.code == 143, result.err
    result = command.finish(start(command, run, epochs=epochs, pace=0.0, ranks=ranks))
    assert result.code == 0, result.err
    check_weights(command, run)
    print(f"seed {seed}, {ranks} ranks: {sum(told.values())} signals, {num_runs} runs, {dict(told)}")


def check_weights(command: Command, run: str) -> None:
    weights, expected = (torch.load(command.directory / f"{name}.pt", weights_only=True) for name in (run, "plain"))
    assert all(map(torch.equal, weights, expected))


# Rank 1 comes to no boundary after its second step.
STUCK = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset
from echelon import Accelerator
from echelon.utils import ProjectConfiguration

accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration("run", automatic_checkpoint_naming=True))
model, optimizer, loader = accelerator.prepare(
    model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters()), DataLoader(TensorDataset(torch.ones(64, 1)))
)
accelerator.resume()  # takes part from here on
for number, (x,) in enumerate(loader):
    if number == 2:
        open(f"stuck_{accelerator.process_index}", "w").close()
        if accelerator.process_index == 1:
            time.sleep(600)
    accelerator.backward(model(x).sum())
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("grace", [2, pytest.param(600, marks=pytest.mark.soak)])
def test_a_rank_that_does_not_come_is_waited_for_until_the_deadline_or_the_second_signal(
    grace: int, command: Command
) -> None:
    command.write("train.py", STUCK)
    launcher = command.start_launch("-q", "--cpu", "--num_processes=2", f"--preemption_grace={grace}", "train.py")
    command.wait_for_files("stuck_0", "stuck_1")
    begun = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    assert launcher.stderr is not None
    said = next(line for line in launcher.stderr if "SIGTERM" in line)
    assert f"SIGTERM: all ranks save at the same step and exit (within {grace} s; a second signal stops them" in said
    if grace == 600:
        launcher.send_signal(signal.SIGINT)
    rest = launcher.stderr.read()
    assert launcher.wait() == 143, rest
    assert time.monotonic() - begun < 60
    if grace == 2:
        assert "SIGTERM: the ranks did not reach a common step within 2 s and were stopped" in rest
        assert "where: ranks 0-1: step 2, training" in rest, rest
        assert "to give the ranks more time" in rest
    else:
        assert rest.startswith("echelon: stopped by SIGTERM"), rest
