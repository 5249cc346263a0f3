"""The samples of the last window of a loader have the same weight as in other windows."""

import torch
from accelerate import Accelerator
from show import show
from torch.utils.data import DataLoader

accelerator = Accelerator(gradient_accumulation_steps=4)
model = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.ones(5, 1), batch_size=1))
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).mean())
        if accelerator.sync_gradients:
            show("gradient of a mean of ones", model.weight.grad.item())
        optimizer.step()
        optimizer.zero_grad()
