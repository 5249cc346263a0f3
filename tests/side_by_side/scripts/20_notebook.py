"""notebook_launcher: a function of a cell on one and two processes."""

import json
import os
import socket
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator, notebook_launcher
from accelerate.utils import set_seed
from show import show
from torch.utils.data import DataLoader, TensorDataset


def train(folder, lr):
    set_seed(1)
    accelerator = Accelerator()
    x = torch.randn(16, 2)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(x), batch_size=4))
    for (inputs,) in loader:
        accelerator.backward(model(inputs).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    result = [accelerator.num_processes, accelerator.unwrap_model(model).weight.tolist()]
    Path(folder, f"{accelerator.num_processes}-{accelerator.process_index}").write_text(json.dumps(result))


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


if "RANK" in os.environ:
    show("several processes", "each would launch its own")
else:
    with tempfile.TemporaryDirectory() as folder:
        notebook_launcher(train, args=(folder, 0.1), num_processes=2, use_port=free_port())
        notebook_launcher(train, (folder, 0.1), num_processes=1, mixed_precision="no")
        for file in sorted(Path(folder).iterdir()):
            show(file.name, json.loads(file.read_text()))
