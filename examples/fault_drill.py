"""A fault drill: kill a rank in the middle of training, watch the launcher restart the run, and compare the final weights.

Without arguments, the script runs the drill: two runs on two processes, of which the second loses rank 1 at update 33.

    python examples/fault_drill.py
    python examples/fault_drill.py --num_processes 1 --kill_rank 0 --kill_at 50

With a folder, it is an ordinary training script. To kill a rank yourself, start it, and use ``kill -9`` on a process:

    echelon launch --cpu --num_processes 2 --max_restarts 3 examples/fault_drill.py --folder run --pause 0.5
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

EPOCHS, NUM_SAMPLES, BATCH_SIZE, SAVE_EVERY = 3, 640, 16, 10


def train(options):
    project = ProjectConfiguration(options.folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(seed=7, project_config=project)
    torch.manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 16)
    y = (x @ torch.randn(16, 4)).argmax(dim=1)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH_SIZE, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    was_killed = accelerator.resume()  # from the newest complete checkpoint; False if there is none
    done = accelerator.progress.step
    accelerator.print(f"processes: {accelerator.num_processes}, updates so far: {done}", flush=True)
    for _ in accelerator.epochs(EPOCHS):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step = accelerator.progress.step
            if step % SAVE_EVERY == 0:
                accelerator.save_state()
            is_target = accelerator.process_index == options.kill_rank and step == options.kill_at
            if is_target and not was_killed:
                print(f"rank {options.kill_rank} is killed after update {step}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)  # as the system does when memory runs out
            time.sleep(options.pause)
    accelerator.print(f"finished after {step} updates, last loss of rank 0: {loss.item():.6f}", flush=True)
    accelerator.save(accelerator.get_state_dict(model), Path(options.folder) / "weights.pt")
    accelerator.end_training()


def run_drill(options):
    enough = torch.accelerator.is_available() and torch.accelerator.device_count() >= options.num_processes
    launch = [sys.executable, "-m", "echelon", "launch", *([] if enough else ["--cpu"]), "--max_restarts", "1"]
    launch += ["--num_processes", str(options.num_processes), "--summary", __file__]
    kill = ["--kill_rank", str(options.kill_rank), "--kill_at", str(options.kill_at)]
    weights = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in (("undisturbed", []), ("killed", kill)):
            print(f"---- the {name} run", flush=True)
            subprocess.run([*launch, "--folder", f"{folder}/{name}", *arguments], check=True)
            weights[name] = torch.load(f"{folder}/{name}/weights.pt", weights_only=True, map_location="cpu")
    if not all(torch.equal(value, weights["killed"][name]) for name, value in weights["undisturbed"].items()):
        sys.exit("the final weights of the two runs differ")
    print("the final weights of the two runs are equal, bit for bit")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_processes", type=int, default=2, help="of the drill")
    parser.add_argument("--kill_rank", type=int, help="rank to kill (in the drill, the last one by default)")
    parser.add_argument("--kill_at", type=int, default=33, help=f"update after which it is killed, above {SAVE_EVERY}")
    parser.add_argument("--folder", help="train, with checkpoints in this folder, instead of running the drill")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait after each update")
    options = parser.parse_args()
    if options.folder:
        train(options)
        return
    if options.kill_rank is None:
        options.kill_rank = options.num_processes - 1
    run_drill(options)


if __name__ == "__main__":
    main()
