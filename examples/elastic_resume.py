"""Level 2: a run that is preempted twice in the middle of an epoch and resumes on 1, then 3, then 2 processes.

Without arguments, the script plays the scheduler: it starts the run on one process, on three and on two with ``echelon launch``,
starts an uninterrupted run on one process, and compares their final weights:

    python examples/elastic_resume.py

With a folder, it is an ordinary training script: run one of these commands, stop it with SIGTERM, and run the other:

    echelon launch --cpu --num_processes 2 examples/elastic_resume.py --folder run
    torchrun --nproc-per-node 3 examples/elastic_resume.py --folder run
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator
from echelon.utils import ProjectConfiguration

EPOCHS, NUM_SAMPLES, BATCH_SIZE = 2, 1280, 32  # 40 updates per epoch
PREEMPTED = 143  # the exit code of a run that was asked to stop and has saved


def train(folder, preempt_at):
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    # parity="exact": BATCH_SIZE samples over all processes, in an order that does not depend on their number.
    accelerator = Accelerator(parity="exact", seed=7, project_config=project)
    torch.manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 16)
    y = (x @ torch.randn(16, 4)).argmax(dim=1)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH_SIZE, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    accelerator.resume()  # from the newest checkpoint in the folder, if there is one
    done = accelerator.progress.step
    accelerator.print(f"processes: {accelerator.num_processes}, updates so far: {done}", flush=True)
    for _ in accelerator.epochs(EPOCHS):  # also saves and stops the run after SIGTERM or SIGUSR1
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.is_main_process and accelerator.progress.step == preempt_at:
                os.kill(os.getpid(), signal.SIGTERM)  # as Slurm, Kubernetes and spot instances do
                time.sleep(1)  # a small model finishes the run before the launcher reacts
    loss = accelerator.update_loss()
    accelerator.print(f"finished after {accelerator.progress.step} updates, last loss {loss:.6f}")
    Path(folder).mkdir(exist_ok=True)
    accelerator.save(accelerator.get_state_dict(model), Path(folder) / "weights.pt")
    accelerator.end_training()


def play_scheduler():
    enough = torch.accelerator.is_available() and torch.accelerator.device_count() >= 3
    launch = [sys.executable, "-m", "echelon", "launch", *([] if enough else ["--cpu"]), "--oversubscribe"]
    with tempfile.TemporaryDirectory() as folder:
        elastic, uninterrupted = Path(folder, "elastic"), Path(folder, "uninterrupted")
        starts = [(1, 15, elastic), (3, 55, elastic), (2, 0, elastic), (1, 0, uninterrupted)]
        for num_processes, preempt_at, run in starts:
            options = ["--folder", str(run), "--preempt_at", str(preempt_at)]
            done = subprocess.run([*launch, "--num_processes", str(num_processes), __file__, *options], check=False)
            if done.returncode != (PREEMPTED if preempt_at else 0):
                sys.exit(f"echelon launch ended with exit code {done.returncode}")
        files = [run / "weights.pt" for run in (elastic, uninterrupted)]
        first, second = (torch.load(file, weights_only=True, map_location="cpu") for file in files)
    difference = max((first[name] - second[name]).abs().max().item() for name in second)
    print(f"largest difference of a weight between 1 -> 3 -> 2 processes and one process: {difference:.1e}")
    if difference > 1e-4:  # float32 sums in a different order; parity="bitwise" gives 0
        sys.exit("the weights differ")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", help="train, with checkpoints in this folder")
    parser.add_argument("--preempt_at", type=int, default=0, help="update after which the script sends itself SIGTERM")
    options = parser.parse_args()
    if options.folder:
        train(options.folder, options.preempt_at)
    else:
        play_scheduler()


if __name__ == "__main__":
    main()
