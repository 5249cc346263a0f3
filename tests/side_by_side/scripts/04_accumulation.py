"""Accumulating gradients over four batches, and over two from the second epoch on."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from show import show
from torch.utils.data import DataLoader, TensorDataset

set_seed(7)
accelerator = Accelerator(gradient_accumulation_steps=4)
x = torch.randn(64, 4)
y = x.sum(dim=1, keepdim=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
model, optimizer, scheduler, loader = accelerator.prepare(
    model, optimizer, scheduler, DataLoader(TensorDataset(x, y), batch_size=4)
)

for epoch in range(2):
    show("gradient_accumulation_steps", accelerator.gradient_accumulation_steps)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            show("sync_gradients", accelerator.sync_gradients)
            before = accelerator.unwrap_model(model).weight.detach().clone()
            optimizer.step()
            show("stepped", not torch.equal(before, accelerator.unwrap_model(model).weight))
            scheduler.step()
            optimizer.zero_grad()
            show("cleared", accelerator.unwrap_model(model).weight.grad is None)
        show("lr", scheduler.get_last_lr())
    accelerator.gradient_accumulation_steps = 2
    show("weight", accelerator.unwrap_model(model).weight)

# A manual loop without accumulate(): backward still divides.
accelerator.sync_gradients = False
show("sync_gradients by hand", accelerator.sync_gradients)
inputs, targets = x[:4], y[:4]
torch.manual_seed(0)
plain = torch.nn.Linear(4, 1)
accelerator.backward(torch.nn.functional.mse_loss(plain(inputs), targets))
show("gradient by hand", plain.weight.grad)
accelerator.sync_gradients = True
