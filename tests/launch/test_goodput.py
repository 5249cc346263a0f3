"""The ledger of a run with kills, beside what the ranks themselves and the one who kills them wrote down."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import Command

# Each rank writes down when its loop begins, when a step has ended, and what it has saved.
TRAIN = """
import os, sys, time
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
log = open(f"events/{attempt}_{rank}", "w", buffering=1)
def note(what, number):
    print(what, number, time.monotonic(), file=log)
note("pid", os.getpid())
import torch
from torch.utils.data import DataLoader, Dataset
from echelon import Accelerator
from echelon.utils import ProjectConfiguration

class Slow(Dataset):
    def __len__(self):
        return 4 * 2 * 3000
    def __getitem__(self, i):
        time.sleep(0.002)
        return torch.ones(4) * i

project = ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(cpu=True, project_config=project, seed=1)
model = torch.nn.Linear(4, 4)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader(Slow(), batch_size=4))
accelerator.resume()
for epoch in accelerator.epochs(1):
    note("loop", accelerator.progress.step)
    for x in loader:
        loss = model(x).pow(2).mean()
        if rank == "1":
            time.sleep(0.02)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step = accelerator.progress.step
        note("step", step)
        if step % 25 == 0:
            note("save", step)
            accelerator.save_state()
            note("saved", step)
        if os.path.exists("enough") and int(open("enough").read()) <= step:
            break
    break
"""


def events(folder: Path, attempt: int, rank: int) -> list[tuple[str, int, float]]:
    lines = [line.split() for line in (folder / f"{attempt}_{rank}").read_text().splitlines()]
    return [(line[0], int(line[1]), float(line[2])) for line in lines if len(line) == 3]


@pytest.mark.soak
def test_the_ledger_of_five_kills_adds_up_and_agrees_with_what_was_seen(command: Command) -> None:
    kills, draw, folder = 5, random.Random(8), command.directory / "events"
    folder.mkdir()
    command.write("train.py", TRAIN)
    began = time.time()
    flags = ["--cpu", "--num_processes=2", f"--max_restarts={kills}", "--log_dir=logs", "--redirects=3"]
    launcher = command.start_launch(*flags, "train.py")
    killed: list[float] = []
    step = 0
    for attempt in range(kills):
        # Between two checkpoints, so that something is lost.
        wanted, rank = step + draw.randrange(30, 75), draw.randrange(2)

        def has_come(attempt: int = attempt, wanted: int = wanted) -> bool:
            path = folder / f"{attempt}_0"
            return path.exists() and any(e[0] == "step" and e[1] >= wanted for e in events(folder, attempt, 0))

        command.wait_for(lambda: has_come() or launcher.poll() is not None, f"attempt {attempt}")
        pid = events(folder, attempt, rank)[0][1]
        killed.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)
        step = max(e[1] for e in events(folder, attempt, 0) if e[0] == "saved")
    (command.directory / "enough").write_text(str(step + 100))
    result = command.finish(launcher)
    assert result.code == 0, result.err

    (path,) = command.directory.glob("logs/*/goodput.jsonl")
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    run = lines[-1]
    seconds = run["seconds"]
    wall_s = path.stat().st_mtime - began  # what comes then is the end of the launcher's own interpreter
    print(f"\nseen from outside {wall_s:.2f} s, ledger {run['wall_s']:.2f} s, its sum {sum(seconds.values()):.2f} s")
    print(result.err[result.err.index("echelon: goodput") :])
    assert run["num_restarts"] == kills
    assert sum(seconds.values()) == pytest.approx(run["wall_s"], rel=0.005)
    assert sum(seconds.values()) == pytest.approx(wall_s, rel=0.005)

    # From each kill to the next loop, by the ranks' own clocks.
    loops = [[events(folder, a, r) for r in (0, 1)] for a in range(kills + 1)]
    begun = [sum(next(t for what, _, t in log if what == "loop") for log in logs) / 2 for logs in loops]
    gaps = [after - kill for kill, after in zip(killed, begun[1:])]
    # From the save of what the next attempt begins with to the kill, less what was saved since.
    lost = 0.0
    for kill, logs, after in zip(killed, loops, loops[1:]):
        loaded = next(number for what, number, _ in after[0] if what == "loop")
        lost += kill - next(t for what, number, t in logs[0] if what == "saved" and number == loaded)
    print(f"detection and restart as seen {sum(gaps):.2f} s, lost steps {lost:.2f} s")
    # A death shows when a launcher on a busy machine has looked: until then the time is a step's that is lost.
    assert seconds["lost steps"] == pytest.approx(lost, rel=0.05, abs=0.25 * kills)
    assert seconds["detection"] + seconds["restart"] == pytest.approx(sum(gaps), rel=0.05, abs=0.25 * kills)
    gone = seconds["detection"] + seconds["restart"] + seconds["lost steps"]
    assert gone == pytest.approx(sum(gaps) + lost, rel=0.02, abs=0.02 * kills)
    # Each rank sleeps 8 ms for a batch, rank 1 another 20 ms for its loss, and rank 0 waits for it.
    steps = run["steps"]
    num_steps = steps["num_steps"]
    assert num_steps == pytest.approx(sum(sum(e[0] == "step" for e in logs[0]) for logs in loops), abs=kills + 1)
    assert steps["parts"]["data"]["least"] >= 8
    assert (steps["slowest"], steps["slow_part"]) == (1, "other")
    assert steps["slow_ms"] >= 20
    assert re.search(
        r"echelon: rank 1 is slow: other [\d.]+ ms per step \(median [\d.]+\); the other ranks wait", result.err
    )
    doctor = command.echelon("doctor", str(path.parent))
    assert "goodput" in doctor.out
    assert "rank 1 is slow: other" in doctor.out
