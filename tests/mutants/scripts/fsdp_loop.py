"""A loop with torch's fully_shard: each rank holds a part of each weight."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.mutants.probe import probe

EPOCHS, BATCH_SIZE, ACCUMULATION, MAX_NORM = 3, 4, 2, 0.2
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16)])
        self.scale = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x * self.scale)


def make_data(count=48):
    random = torch.Generator().manual_seed(7)
    x = torch.randn(count, 8, generator=random)
    return TensorDataset(x, (x @ torch.randn(8, 3, generator=random)).argmax(dim=1))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main():
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    data = make_data()
    sampler = DistributedSampler(data, num_replicas=WORLD_SIZE, rank=RANK, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler)
    torch.manual_seed(0)
    model = Net()
    if WORLD_SIZE > 1:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)

    def state():
        moments = {
            f"{name}/exp_avg": whole(optimizer.state[p]["exp_avg"])
            for name, p in model.named_parameters()
            if p in optimizer.state
        }
        return {**moments, **{name: whole(value) for name, value in model.state_dict().items()}}

    probe(state)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            is_last = (i + 1) % ACCUMULATION == 0
            if WORLD_SIZE > 1:
                model.set_requires_gradient_sync(is_last)
            loss = F.cross_entropy(model(x), y)
            (loss / ACCUMULATION).backward()
            if is_last:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
                probe(state)


if __name__ == "__main__":
    main()
