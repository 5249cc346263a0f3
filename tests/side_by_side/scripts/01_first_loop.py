"""A regression from the quick tour, with four changed lines."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from show import show
from torch.utils.data import DataLoader, TensorDataset

set_seed(42)
accelerator = Accelerator()

x = torch.randn(64, 3)
y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.1
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.5)
loader = DataLoader(TensorDataset(x, y), batch_size=8)

model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
show("steps", len(loader))
for epoch in range(2):
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        show("loss", loss.item())
    show("lr", scheduler.get_last_lr())
for name, parameter in accelerator.unwrap_model(model).named_parameters():
    show(name, parameter)
