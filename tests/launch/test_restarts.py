"""A rank that is killed, again and again: each restart works at once, nothing is lost, and the weights are those without a kill."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time

import psutil
import pytest

from tests.launch.conftest import Command, Result

# Every step is saved. The last attempt makes the whole run once more without a save or a fault, and compares.
TRAIN = """
import os, random, sys, time
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
with open(f"pids/new_{attempt}_{rank}", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"pids/new_{attempt}_{rank}", f"pids/{attempt}_{rank}")
if "torch" in sys.modules:
    with open(f"warm_{attempt}_{rank}", "w") as file:
        file.write("echelon, too" if "echelon.accelerator" in sys.modules else "torch")
time.sleep(random.Random(f"{attempt} {rank}").uniform(0, float(sys.argv[1])))
import torch
from torch.utils.data import DataLoader, TensorDataset
from echelon import Accelerator
from echelon.utils import DistributedDataParallelKwargs, ProjectConfiguration

SAMPLES, EPOCHS = 24 * int(os.environ["WORLD_SIZE"]), 4  # batches of two samples of each rank
STEPS = EPOCHS * 12
class Ledger:
    def __init__(self):
        self.seen, self.attempts = [], []
    def state_dict(self):
        return vars(self)
    def load_state_dict(self, state):
        self.seen, self.attempts = list(state["seen"]), list(state["attempts"])

def trains():
    open(f"trained_{attempt}", "w").close()

def run(folder, saves):
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    # Buckets in one order before and after a restart (docs/checkpoints.md).
    ddp = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, project_config=project, seed=7, kwargs_handlers=[ddp])
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    number = torch.arange(SAMPLES)
    loader = DataLoader(TensorDataset(number, number[:, None] / SAMPLES), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
    ledger = Ledger()
    accelerator.register_for_checkpointing(ledger)
    if saves:
        accelerator.resume()
    for epoch in accelerator.epochs(EPOCHS):
        for number, x in loader:
            while saves and accelerator.progress.step == STEPS - 1 and not os.path.exists("enough"):
                trains()
                time.sleep(0.01)
            accelerator.backward(torch.nn.functional.mse_loss(model(x), 2 * x))
            optimizer.step()
            optimizer.zero_grad()
            ledger.seen += accelerator.gather(number).tolist()
            ledger.attempts.append(attempt)
            if saves:
                accelerator.save_state()
                trains()
    return accelerator, [p.detach().clone() for p in model.parameters()], ledger

accelerator, weights, ledger = run("run", saves=True)
_, plain, plain_ledger = run("none", saves=False)
seen = ledger.seen
same = all(map(torch.equal, weights, plain))
once = all(sorted(seen[i : i + SAMPLES]) == list(range(SAMPLES)) for i in range(0, len(seen), SAMPLES)) and len(seen) == EPOCHS * SAMPLES
accelerator.print(f"attempt {attempt}: same weights {same}, same order {seen == plain_ledger.seen}, each sample once {once}, goes on {len(set(ledger.attempts)) > 1}", flush=True)
accelerator.end_training()
"""


def kill_again_and_again(
    command: Command, *, kills: int, seed: int, ranks: int, delay_s: float, flags: list[str]
) -> Result:
    """Kill a random rank of each attempt at a random moment; let the last one end."""
    draw = random.Random(seed)
    command.is_warm = True
    pids = command.directory / "pids"
    pids.mkdir()
    command.write("train.py", TRAIN)
    head = [
        "-q",
        "--summary",
        "--cpu",
        f"--num_processes={ranks}",
        f"--max_restarts={kills}",
        "--log_dir=logs",
        "--redirects=3",
        *flags,
    ]
    launcher = command.start_launch(*head, "train.py", str(delay_s))
    for attempt in range(kills):
        rank = draw.randrange(ranks)
        file = pids / f"{attempt}_{rank}"
        # Three of ten while it starts; the others in the middle of a step, a save, or the removal of an old checkpoint.
        awaited = [file] if attempt and draw.random() < 0.3 else [file, command.directory / f"trained_{attempt}"]
        command.wait_for(
            lambda awaited=awaited: all(f.exists() for f in awaited) or launcher.poll() is not None, "a rank"
        )
        if launcher.poll() is not None:
            break
        time.sleep(draw.uniform(0, 0.3))
        os.kill(int(file.read_text()), signal.SIGKILL)
    (command.directory / "enough").touch()
    result = command.finish(launcher)
    # A rank that was stopped while it wrote leaves a "new" file, perhaps an empty one.
    started = [int(file.read_text()) for file in pids.iterdir() if not file.name.startswith("new_")]
    assert not [pid for pid in started if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    return result


def check(command: Command, result: Result, *, kills: int) -> None:
    assert result.code == 0, result.err
    # The ranks' output is in files: nobody reads the launcher's pipes before its end, and they hold 64 KiB.
    (said,) = command.directory.glob(f"logs/*/attempt_{kills}/rank_0/stdout.log")
    lines = said.read_text().splitlines()
    assert lines == [f"attempt {kills}: same weights True, same order True, each sample once True, goes on True"]
    # Each kill cost one restart, and nothing else did.
    assert re.findall(r"restart (\d+) of", result.err) == [str(n) for n in range(1, kills + 1)]
    assert result.err.count("killed by SIGKILL") == kills
    (books,) = command.directory.glob("logs/*/goodput.jsonl")
    run = json.loads(books.read_text().splitlines()[-1])
    assert (run["kind"], run["num_restarts"]) == ("run", kills)
    assert sum(run["seconds"].values()) == pytest.approx(run["wall_s"], rel=0.005)
    assert all(run["seconds"][item] > 0 for item in ("init", "compute", "checkpoint", "restart"))
    assert re.search(rf"\nechelon: goodput [\d.]+% of [\d.]+ s: .*; {kills} restarts\n", result.err)


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "ranks"), [(4, 2), pytest.param(20, 3, marks=pytest.mark.soak)])
def test_each_kill_costs_one_restart_and_changes_nothing(kills: int, ranks: int, command: Command) -> None:
    result = kill_again_and_again(command, kills=kills, seed=1, ranks=ranks, delay_s=0.1, flags=[])
    check(command, result, kills=kills)
    # The first attempt is never warm; the second one is when the first has lived long enough.
    warm = {int(path.name.split("_")[1]): path.read_text() for path in command.directory.glob("warm_*_0")}
    assert 0 not in warm
    assert len(warm) > kills // 3
    # Once the loop of echelon has been seen, what it is made of is imported ahead, too.
    assert list(warm.values()).count("echelon, too") > kills // 3


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_two_hundred_kills_at_any_phase_change_nothing(seed: int, command: Command) -> None:
    flags = ["--no_warm"] if seed % 4 == 3 else []
    check(command, kill_again_and_again(command, kills=10, seed=seed, ranks=4, delay_s=4.0, flags=flags), kills=10)
    assert bool(list(command.directory.glob("warm_*"))) == (flags == [])
