"""A loop that clears the gradients before its backward pass, as in torch's tutorials, accumulates correctly."""

import torch
from accelerate import Accelerator
from show import show
from torch.utils.data import DataLoader

accelerator = Accelerator(gradient_accumulation_steps=2)
model = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
loader = DataLoader(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), batch_size=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        optimizer.zero_grad()
        accelerator.backward(model(batch).mean())
        if accelerator.sync_gradients:
            show("gradient of a mean of two", model.weight.grad.item())
        optimizer.step()
