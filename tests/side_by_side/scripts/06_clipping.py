"""Clipping: the norm before it, and its effect on the weights."""

import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from show import show
from torch.utils.data import DataLoader, TensorDataset

set_seed(1)
accelerator = Accelerator(gradient_accumulation_steps=2)
x = 10 * torch.randn(48, 5)
y = torch.randn(48, 2)
model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, y), batch_size=6)
# device_placement has one entry per argument.
model, optimizer, loader = accelerator.prepare(model, optimizer, loader, device_placement=[True, True, False])

for step, (inputs, targets) in enumerate(loader):
    with accelerator.accumulate(model):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss, retain_graph=False)
        if accelerator.sync_gradients:
            norm_type = 2.0 if step < 2 else math.inf
            norm = accelerator.clip_grad_norm_(model.parameters(), max_norm=0.5, norm_type=norm_type)
            show("norm before", norm)
            norms = [torch.linalg.vector_norm(p.grad, norm_type) for p in model.parameters()]
            show("norm after", torch.linalg.vector_norm(torch.stack(norms), norm_type))
        optimizer.step()
        optimizer.zero_grad()
    show("loss", loss)
for name, parameter in accelerator.unwrap_model(model).named_parameters():
    show(name, parameter)
