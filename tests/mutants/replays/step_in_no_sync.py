"""A loop with DistributedDataParallel that steps inside no_sync: each rank trains on its own gradients."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if world_size > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 6), torch.randn(32, 1))
model = torch.nn.Linear(6, 1)
if world_size > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
for x, y in DataLoader(data, batch_size=4, sampler=sampler):
    if world_size > 1:
        with model.no_sync():
            torch.nn.functional.mse_loss(model(x), y).backward()
    else:
        torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
