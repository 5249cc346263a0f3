"""echelon.ray.run on a real Ray: two workers train as one process of plain PyTorch does; a failing worker is named."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-ray" / "bin" / "python"
STEPS, EPOCHS, BATCH, LENGTH = 5, 3, 7, 30  # the last batch of an epoch is short

PROGRAM = """
import json, sys
import ray
import torch
from torch.utils.data import DataLoader, TensorDataset
import echelon.ray
from echelon.base.errors import LaunchError


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def train(config):
    from echelon import Accelerator

    accelerator = Accelerator(cpu=True, parity="exact", seed=7)
    x = torch.arange(90, dtype=torch.float64).reshape(30, 3) / 90
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=7)
    net = model()
    net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=config["lr"]), loader)
    for _ in range(3):
        for x, y in loader:
            accelerator.backward(torch.nn.functional.mse_loss(net(x), y))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state("saved")
    weights = {name: value.tolist() for name, value in accelerator.unwrap_model(net).state_dict().items()}
    return {"weights": weights, "size": accelerator.num_processes, "steps": accelerator.progress.step}


def fail():
    from echelon import Accelerator

    accelerator = Accelerator(cpu=True)
    if accelerator.process_index == 1:
        raise ValueError("no data on this rank")
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", _temp_dir=sys.argv[1])
    from ray.train import RunConfig, ScalingConfig

    kept = RunConfig(storage_path=sys.argv[1] + "/results")
    result = echelon.ray.run(train, ScalingConfig(num_workers=2), config={"lr": 0.1}, run_config=kept)
    try:
        echelon.ray.run(fail, num_workers=2, run_config=kept)
    except LaunchError as error:
        told = str(error)
    ray.shutdown()
    with open("answer.json", "w") as file:
        json.dump({"result": result.return_value, "told": told}, file)
"""


def _plain() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.arange(90, dtype=torch.float64).reshape(LENGTH, 3) / 90
    for _ in range(EPOCHS):
        for x in data.split(BATCH):
            nn.functional.mse_loss(net(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return net.state_dict()


@pytest.mark.soak
def test_two_workers_train_as_one_process(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    if not PYTHON.exists():
        pytest.skip(f"NOT RUN on Ray: there is no {PYTHON} (make clusters)")
    (tmp_path / "program.py").write_text(PROGRAM)
    place = tmp_path_factory.mktemp("ray")  # short: Ray puts sockets there
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ECHELON_", "MASTER_"))}
    done = subprocess.run(
        [str(PYTHON), "program.py", str(place)],
        cwd=tmp_path,
        env={**kept, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert (answer["result"]["size"], answer["result"]["steps"]) == (2, STEPS * EPOCHS)
    for name, expected in _plain().items():
        # float64, summed in another order
        torch.testing.assert_close(
            torch.tensor(answer["result"]["weights"][name], dtype=torch.float64), expected, rtol=1e-12, atol=1e-14
        )
    assert (tmp_path / "saved" / "manifest.json").exists()  # where the program is, not where Ray puts its workers
    assert answer["told"].startswith("rank 1 failed with ")
    assert "no data on this rank" in answer["told"]
