"""A loader with a DistributedSampler that is passed to prepare: accelerate shards it once more, and most samples are not used."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 6), torch.randn(64, 1))
accelerator = Accelerator()
sampler = DistributedSampler(data, accelerator.num_processes, accelerator.process_index, shuffle=False)
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4, sampler=sampler))
for _ in range(2):
    for x, y in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
