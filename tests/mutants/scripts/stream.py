"""A DistributedDataParallel loop over an iterable dataset that shards itself, with sums instead of means."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from tests.mutants.probe import probe

EPOCHS, BATCH_SIZE = 3, 3
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Readings(IterableDataset):
    """Readings in a new order in each epoch, of which each rank takes every WORLD_SIZE-th."""

    def __init__(self, count=24):
        self.random = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, 6, generator=self.random)
        self.y = self.x.sum(dim=1, keepdim=True).sin()
        self.epoch = 0

    def __iter__(self):
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for i in order[RANK::WORLD_SIZE]:
            yield self.x[i], self.y[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.head = nn.Linear(12, 1)

    def forward(self, x):
        return self.head(torch.relu(self.first(x)))


def main():
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    readings = Readings()
    loader = DataLoader(readings, batch_size=BATCH_SIZE)
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net) if WORLD_SIZE > 1 else net
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5)

    def state():
        return dict(net.state_dict())

    probe(state)
    for epoch in range(EPOCHS):
        readings.epoch = epoch
        for x, y in loader:
            total = torch.tensor(float(len(x)))
            if WORLD_SIZE > 1:
                dist.all_reduce(total)
            loss = F.mse_loss(model(x), y, reduction="sum") / total * WORLD_SIZE
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.2)
            optimizer.step()
            probe(state)


if __name__ == "__main__":
    main()
