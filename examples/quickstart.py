"""The program of README: a small regression in a loop for one device plus a few lines, with equal numbers on any number of processes.

echelon launch --cpu --num_processes 1 --parity exact examples/quickstart.py
echelon launch --cpu --num_processes 2 --parity exact examples/quickstart.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator

torch.manual_seed(0)
x = torch.randn(512, 8)
y = x.square().sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)

accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _epoch in range(30):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

count = accelerator.num_processes
loss = nn.functional.mse_loss(model(x.to(accelerator.device)), y.to(accelerator.device))
accelerator.print(f"{count} process{'' if count == 1 else 'es'}, loss after training: {loss.item():.4f}")
